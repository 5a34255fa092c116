"""Why a prompt was not found whole in the caches, in words for the user; the part before the colon is stable.

Torch-free. A prompt that only goes on where a cached conversation ended misses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_TIME = "first time: nothing cached begins like this"
OTHER_MODEL = "other model: this chat was computed by another model, back end or set of drafters"
SLOW_DISK = "slow disk: it is kept there, but computing it again is faster than reading it"
DAMAGED = "damaged: a block on disk could not be used"


@dataclass(frozen=True)
class Evidence:
    """What the tree knows of a prompt.

    matched_tokens: whose keys and values are there; usable_tokens: of them those that a model can resume from;
    known_tokens: of this prompt that were in the tree at some time, as far as it remembers; next_ids: what the cached
    conversation goes on with after the matched tokens, empty at its end; same_chat: it is this very chat, None where
    the client names none; state_lost: a state nearer to the end was dropped.
    """

    prompt_tokens: int
    matched_tokens: int
    usable_tokens: int
    known_tokens: int
    next_ids: tuple[int, ...]
    same_chat: bool | None
    state_lost: bool


def explain(evidence: Evidence, thought_start_ids: tuple[int, ...], problem: str, tolerance_tokens: int) -> str:
    """One sentence, or empty where nothing is missing.

    thought_start_ids: tokens that open a thought, empty if unknown; problem: what the tiers below said;
    tolerance_tokens: fewer missing tokens than this are no miss (a hybrid resumes from a page border).
    """
    matched, usable = evidence.matched_tokens, evidence.usable_tokens
    if evidence.prompt_tokens - usable <= tolerance_tokens:
        return ""
    if problem:
        return problem
    if evidence.known_tokens > matched:
        return f"evicted: {evidence.known_tokens - matched} more tokens were computed before, but gave way to others"
    if matched - usable > tolerance_tokens:
        if evidence.state_lost:
            return f"evicted: the recurrent state nearer to the end gave way to others; resumed after {usable} tokens"
        return f"no state: a hybrid model resumes where a state was kept, here after {usable} of {matched} tokens"
    if not matched:
        return FIRST_TIME
    if not evidence.next_ids:
        return ""
    if thought_start_ids and thought_start_ids[-1] in evidence.next_ids[: len(thought_start_ids) + 1]:
        return f"template dropped thinking: earlier thoughts are left out of the prompt from token {matched} on"
    if evidence.same_chat is False:
        return f"first time: another conversation shares the first {matched} tokens"
    return f"edited message: the prompt departs from what was computed after {matched} tokens"
