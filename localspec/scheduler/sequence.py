"""One sequence as the host sees it: what was planned, what came back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from localspec.api.types import Phase
from localspec.core.records import PAGE_TOKENS, Request


class Stage(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass
class Sequence:
    """Mutable; only the scheduler changes it.

    `length_bound_tokens` is at or above the committed length: it grows by a whole window when a step is planned and
    is corrected when the step's result arrives.
    """

    id: int
    request: Request
    stage: Stage = Stage.WAITING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_ring: int = 0
    """Last of the pages that are used in turn once the sequence is larger than they are."""
    outgrown: bool = False
    """It is: from now on only its first pages are all there."""
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    length_bound_tokens: int = 0
    emitted_ids: list[int] = field(default_factory=list)
    miss_reason: str = ""
    finish: str = ""
    phase: str = "answer"
    """Kind of text that the next token belongs to, a value of `api.types.Phase`."""
    cancelled: bool = False
    forgotten: bool = False
    """Its chat was forgotten since it was asked for: it is answered, and nothing of it is kept."""
    held: bool = False
    """Waits for its prefix to come from memory or disk."""
    tier_problem: str = ""
    """Why the tiers below the device brought less than they seemed to have."""
    state_positions: tuple[int, ...] = ()
    """Numbers of prompt tokens after which the state is to be kept; a prefill chunk ends there."""

    def see_phase(self, token_ids: tuple[int, ...]) -> None:
        """Follow the markers of thoughts and tool calls, by their last tokens, through newly emitted tokens."""
        rule, calls = self.request.thinking, self.request.call_ids
        phase_after: dict[int, str] = {}
        if rule is not None:
            closing = (rule.end_ids[-1], *rule.close_ids[-1:])
            phase_after = {rule.start_ids[-1]: Phase.THINKING, **dict.fromkeys(closing, Phase.ANSWER)}
        if calls is not None:
            phase_after |= {calls[0]: Phase.TOOL_CALL, calls[1]: Phase.ANSWER}
        for token_id in token_ids:
            self.phase = phase_after.get(token_id, self.phase)

    def see_growth(self, coming_tokens: int) -> None:
        """Before a step that may add so many tokens."""
        held_tokens = len(self.pages) * PAGE_TOKENS
        self.outgrown |= self.num_ring > 0 and self.length_bound_tokens + coming_tokens > held_tokens

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def prefill_target_tokens(self) -> int:
        """The last prompt token is fed by the first verify step, so that only verify steps sample."""
        return self.prompt_tokens - 1

    @property
    def known_ids(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.emitted_ids)
