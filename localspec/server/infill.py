"""Prompts for filling a gap, for models whose vocabulary has markers for it.

Knows the markers of the common families and asks the tokenizer whether the model has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.server.errors import bad
from localspec.server.request import Caller


@dataclass(frozen=True)
class InfillMarkers:
    """Texts that stand before the code above the gap, before the code below it, and before what fills it."""

    prefix: str
    suffix: str
    middle: str
    file: str = ""
    repository: str = ""


FAMILIES = (
    InfillMarkers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>"),
    InfillMarkers("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<reponame>"),
    InfillMarkers("<PRE>", "<SUF>", "<MID>"),
)


async def find_markers(caller: Caller) -> InfillMarkers:
    """The markers that are single tokens of this model. Raises ApiError 400 when it has none."""
    for markers in FAMILIES:
        lengths = [len(await caller.engine.tokenize(text)) for text in (markers.prefix, markers.suffix, markers.middle)]
        if lengths == [1, 1, 1]:
            return markers
    raise bad(
        f"{caller.model.id} was not trained to fill gaps; use a model with fill-in-the-middle tokens.",
        "suffix",
        code="unsupported",
    )


async def infill_prompt(caller: Caller, before: str, after: str) -> str:
    """Prompt text that asks for what stands between two texts. Raises ApiError 400."""
    markers = await find_markers(caller)
    return f"{markers.prefix}{before}{markers.suffix}{after}{markers.middle}"
