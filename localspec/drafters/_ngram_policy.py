"""When an n-gram table may speak and for how long: match length, counts, and what its guesses were worth lately.

Knows look-ups and the tokens that came instead; knows nothing of devices, slots or files. Torch-free. Used by whichever
thread follows the text: on a CPU the decode thread, on a card a thread of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from localspec.drafters import NgramTableHandle
from localspec.storage.ngram_choice import Continuation

CONTEXT_TOKENS = 16
"""The longest agreement that a table tells apart."""


@dataclass(frozen=True)
class NgramPolicy:
    """Figures chosen with scripts/measure_ngram_engine.py.

    draft_tokens: (shortest match, drafts), longest match first; a shorter match is silent.
    min_share: of the occurrences of the context, those that go on as drafted.
    A table is judged for each match length by the share of guesses whose first token was right, smoothed over about
    1 / `smoothing` guesses: below `min_first_right` it is silent and only every `retry_every`th guess is judged.
    """

    draft_tokens: tuple[tuple[int, int], ...] = ((16, 14), (12, 8), (8, 4), (6, 2))
    min_share: float = 0.2
    unsure_share: float = 0.5
    """Below this the draft is half as long."""
    smoothing: float = 1 / 16
    first_right_at_start: float = 0.5
    min_first_right: float = 0.2
    retry_every: int = 8

    def allowed(self, match_tokens: int) -> int:
        """Drafts after a match of so many tokens whose continuation is clear."""
        return next((drafts for shortest, drafts in self.draft_tokens if match_tokens >= shortest), 0)

    def length(self, found: Continuation) -> int:
        """How many tokens of a continuation to draft; 0 to stay silent."""
        allowed = self.allowed(found.match_tokens)
        if found.share < self.min_share:
            return 0
        if found.share < self.unsure_share:
            allowed = (allowed + 1) // 2
        return min(allowed, len(found.tokens))


@dataclass
class Worth:
    """What the guesses of one table at one match length were worth lately."""

    policy: NgramPolicy
    first_right: float = 0.0
    seen: int = 0

    def __post_init__(self) -> None:
        self.first_right = self.policy.first_right_at_start

    @property
    def speaks(self) -> bool:
        """Whether its guesses are proposed."""
        return self.first_right >= self.policy.min_first_right

    def see(self, right: bool) -> None:
        """A guess came true in its first token, or did not."""
        self.seen += 1
        if self.speaks or self.seen % self.policy.retry_every == 0:
            self.first_right += self.policy.smoothing * (float(right) - self.first_right)


@dataclass(frozen=True)
class Guess:
    """A table's answer for the tokens so far. table: index of its handle; tokens: those to draft; may stay unsaid."""

    table: int
    found: Continuation
    tokens: tuple[int, ...]
    speaks: bool


@dataclass
class Advisor:
    """Asks the tables, remembers what they were worth. One thread at a time."""

    handles: tuple[NgramTableHandle, ...]
    policy: NgramPolicy
    _worth: dict[tuple[int, int], Worth] = field(default_factory=dict)

    def ask(self, context: Sequence[int]) -> tuple[Guess, ...]:
        """What each table that knows the context would draft; the best that may speak first. Never waits.

        The longest match comes first, of equals the clearest, then the most frequent.
        """
        guesses = []
        for index, handle in enumerate(self.handles):
            found = handle.table.lookup(context)
            if found is None:
                continue
            length = self.policy.length(found)
            if length:
                speaks = self._worth_of(index, found.match_tokens).speaks
                guesses.append(Guess(index, found, found.tokens[:length], speaks))
        guesses.sort(key=_rank, reverse=True)
        return tuple(guesses)

    def judge(self, guesses: Sequence[Guess], came: Sequence[int]) -> None:
        """The text went on with `came` (at least one token)."""
        for guess in guesses:
            self._worth_of(guess.table, guess.found.match_tokens).see(guess.tokens[0] == came[0])
            self.handles[guess.table].counts.silent += not guess.speaks

    def count(self, guess: Guess, ran: Sequence[int], came: Sequence[int]) -> None:
        """The drafts `ran` were verified, whoever proposed them, and `came` was emitted."""
        if guess.speaks and ran and tuple(ran) == guess.tokens[: len(ran)]:
            right = [ours == theirs for ours, theirs in zip(ran, came, strict=False)]
            counts = self.handles[guess.table].counts
            counts.drafts += 1
            counts.accepted_tokens += right.index(False) if False in right else len(right)

    def prefetch(self, known: Sequence[int], draft: Sequence[int]) -> None:
        """Have read what the tables may be asked next, after 0 to all tokens of the draft."""
        for handle in self.handles:
            handle.table.prefetch_step(known, draft)

    def speaking(self) -> dict[tuple[int, int], bool]:
        """(table, match length) -> whether it may speak; pairs not yet seen may."""
        return {key: worth.speaks for key, worth in self._worth.items()}

    def _worth_of(self, table: int, match_tokens: int) -> Worth:
        worth = self._worth.get((table, match_tokens))
        if worth is None:
            worth = self._worth[table, match_tokens] = Worth(self.policy)
        return worth


def _rank(guess: Guess) -> tuple[bool, int, float, int]:
    return guess.speaks, guess.found.match_tokens, guess.found.share, guess.found.count
