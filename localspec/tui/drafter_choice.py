"""Choosing a drafter for the engine, from wherever in the interface, and choosing it again after a restart."""

from __future__ import annotations

import json
from dataclasses import replace

from localspec.api.engine import DrafterChoice
from localspec.api.types import EngineError
from localspec.tui.conversation import Conversation

NOTE = "drafter"


async def choose_drafter(talk: Conversation, choice: DrafterChoice) -> None:
    """Draft so from now on, also after a restart. Raises EngineError; nothing is changed then."""
    await talk.engine.choose_drafter(choice)
    # The engine keeps the choice; a drafter of the chat's own would hide it.
    await talk.configure(replace(talk.settings, drafter=None, depth=None))
    if not talk.private:
        value = json.dumps({"drafter": choice.drafter, "depth": choice.depth})
        await talk.durable.run(lambda s: s.remember(NOTE, value))


def read_choice(note: str) -> DrafterChoice | None:
    """The choice that was remembered; None for none, for `auto`, and for a value of another form."""
    try:
        data = json.loads(note)
        drafter, depth = data["drafter"], data["depth"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(drafter, str) or not (depth is None or (type(depth) is int and 0 <= depth <= 64)):
        return None
    return None if (drafter, depth) == ("auto", None) else DrafterChoice(drafter, depth)


async def choose_again(talk: Conversation) -> None:
    """Give a fresh engine the choice of an earlier run, unless it was started with another or lacks the drafter."""
    choice = read_choice(await talk.durable.run(lambda s: s.note(NOTE)))
    if choice is None or talk.settings.drafter is not None:
        return
    try:
        await talk.engine.wait_ready()
        if not (await talk.engine.explain()).by_hand:
            await talk.engine.choose_drafter(choice)
    except EngineError:
        return
