"""An engine without weights that says the last user message again, at the pace of a small model.

For trying an interface by hand. Knows nothing that ScriptedEngine does not.
"""

from __future__ import annotations

from localspec.api import toy_text
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import GenerateRequest


class EchoEngine(ScriptedEngine):
    """Answers with the last user message, or with the prompt."""

    def __init__(self, tok_per_s: float = 60.0, seed: int = 0) -> None:
        super().__init__(Script(tok_per_s=tok_per_s, seed=seed, model_id="echo"), choose=_echo)


def _echo(request: GenerateRequest, index: int) -> Reply:
    if request.messages:
        said = [message.content for message in request.messages if message.role == "user"]
        return Reply(said[-1] if said else "")
    return Reply(request.prompt if request.prompt is not None else toy_text.decode(request.prompt_token_ids))
