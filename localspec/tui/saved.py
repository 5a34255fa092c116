"""What the interface keeps between runs beside the chats: settings of new chats, named system prompts.

Values go through the store's notes as JSON and are checked when they come back. Knows no widget.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from localspec.tui.options import ChatSettings

SETTINGS_NOTE = "settings"
PROMPTS_NOTE = "system_prompts"
MAX_PROMPTS = 100
MAX_NAME_CHARS = 40


def settings_text(settings: ChatSettings) -> str:
    """Settings for the next run. The drafter is the engine's and kept apart."""
    values = settings.to_json()
    del values["drafter"], values["depth"]
    return json.dumps(values)


def read_settings(note: str) -> ChatSettings:
    """Settings of an earlier run; the defaults for none and for text of another form."""
    values = _object(note)
    return ChatSettings.from_json({name: value for name, value in values.items() if name not in ("drafter", "depth")})


def prompts_text(prompts: Mapping[str, str]) -> str:
    """Named system prompts for the next run."""
    return json.dumps(dict(prompts), ensure_ascii=False)


def read_prompts(note: str) -> dict[str, str]:
    """Named system prompts by name, in order; what is no text is left out."""
    found = {name: text for name, text in _object(note).items() if isinstance(text, str) and name and text}
    return dict(sorted(found.items())[:MAX_PROMPTS])


def with_prompt(prompts: Mapping[str, str], name: str, text: str) -> dict[str, str]:
    """The prompts with one more, one changed, or for an empty text one less."""
    name = " ".join(name.split())[:MAX_NAME_CHARS]
    others = {key: value for key, value in prompts.items() if key != name}
    return dict(sorted({**others, name: text}.items())) if text else others


def _object(note: str) -> dict[str, object]:
    try:
        values = json.loads(note)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
