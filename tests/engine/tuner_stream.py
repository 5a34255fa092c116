"""Replayed streams for the tuner: what every drafter would have had right at every token, drawn once from a seed.

Kinds of text differ in how well the multi-token block guesses and in how much repeats itself. Costs are those that were
measured on an H200 with the shapes of the 27B (scripts/results: h200_engine.json, h200_drafting.json). Knows nothing of
the tuner's inside.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from localspec.api.types import Sampling
from localspec.core.records import MAX_ROWS, Request
from localspec.engine.step_costs import OFF, Arm, graph_rows
from localspec.engine.tuner import Tuner
from localspec.scheduler.sequence import Sequence

LIMITS = {"mtp": 7, "ngram": 15, "ngram+mtp": 15}
VERIFY_MS = {1: 5.69, 2: 5.87, 3: 5.96, 4: 5.98, 5: 6.08, 6: 6.15, 8: 6.18, 12: 7.63, 16: 7.67}
MTP_FIXED_MS, MTP_MS, NGRAM_MS = 0.064, 0.149, 0.06
"""A proposal of d drafts takes the first and d times the second."""
KEEP_UP_MS = 0.2
"""A pass of the block over rows that nobody asked for; beside a step, in no one's account."""
SURE_TOKENS = 8
CATCH_UP_ROWS = 16


@dataclass(frozen=True)
class Kind:
    """mtp: conditional acceptance by position, the last one goes on; enter, stay: chances that a token begins, and goes
    on, repeating earlier text."""

    name: str
    mtp: tuple[float, ...]
    enter: float
    stay: float


CODE = Kind("code", (0.95, 0.93, 0.88, 0.87, 0.86, 0.83, 0.8), 0.05, 0.88)
PROSE = Kind("prose", (0.62, 0.5, 0.45, 0.4), 0.01, 0.5)
REASONING = Kind("reasoning", (0.917, 0.913, 0.774, 0.83, 0.838, 0.772), 0.03, 0.75)
EDITING = Kind("editing", (0.94, 0.92, 0.9, 0.88), 0.3, 0.985)
HOPELESS = Kind("hopeless", (0.12, 0.1), 0.0, 0.0)


@dataclass
class Text:
    """One text of parts (kind, tokens): draws are per token, so that every choice meets the same text."""

    parts: list[tuple[Kind, int]]
    seed: int
    kinds: list[Kind] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)
    """Length of the run of repeating tokens up to each token."""

    def __post_init__(self) -> None:
        generator = random.Random(self.seed)
        run = 0
        for kind, tokens in self.parts:
            for _ in range(tokens):
                run = run + 1 if generator.random() < (kind.stay if run else kind.enter) else 0
                self.kinds.append(kind)
                self.draws.append(generator.random())
                self.repeats.append(run)
        self.kinds += [self.kinds[-1]] * MAX_ROWS
        self.draws += [1.0] * MAX_ROWS
        self.repeats += [0] * MAX_ROWS

    def mtp_run(self, at: int, depth: int) -> int:
        """Drafts of the block that would stand behind the token at `at`."""
        for offset in range(depth):
            rates = self.kinds[at + offset].mtp
            if self.draws[at + 1 + offset] >= rates[min(offset, len(rates) - 1)]:
                return offset
        return depth

    def copied_run(self, at: int, depth: int) -> int:
        """Drafts of the text's own n-grams that would stand."""
        if not self.repeats[at]:
            return 0
        return next((offset for offset in range(depth) if not self.repeats[at + 1 + offset]), depth)


@dataclass
class Reader:
    """One sequence on its way through a text."""

    text: Text
    sequence: Sequence
    at: int = 0
    unread_by_mtp: int = 0
    not_landed: int = 0
    shadow_at: int = 0
    was_sure: bool = False
    """At the window of the text's own n-grams before the present one: all that is known when one is planned."""

    @property
    def done(self) -> bool:
        return self.at >= len(self.text.kinds) - MAX_ROWS

    def keeps_up(self) -> bool:
        """A whole pass of rows has landed that the block has not run: it runs them, whoever drafts."""
        return self.unread_by_mtp - self.not_landed >= CATCH_UP_ROWS

    def step(self, arm: Arm) -> tuple[tuple[str, ...], int]:
        """Origins of the drafts of a window and how many stood; the sequence goes on behind them."""
        method, depth = arm
        drafted: tuple[str, ...] = ()
        stood = 0
        if self.keeps_up():
            self.unread_by_mtp -= CATCH_UP_ROWS
        parts = method.split("+")
        if "ngram" in parts and depth and self.text.repeats[self.at] >= (SURE_TOKENS if len(parts) > 1 else 1):
            drafted, stood = ("ngram",) * depth, self.text.copied_run(self.at, depth)
        if "mtp" in parts and depth:
            ready = self.unread_by_mtp <= CATCH_UP_ROWS
            self.unread_by_mtp = max(0, self.unread_by_mtp - CATCH_UP_ROWS)
            if not drafted and ready:
                width = min(depth, LIMITS["mtp"])
                drafted, stood = ("mtp",) * width, self.text.mtp_run(self.at, width)
        self.at += stood + 1
        self.not_landed = stood + 1
        self.unread_by_mtp += self.not_landed
        return drafted, stood


def step_ms(arms: list[Arm]) -> tuple[int, float, float]:
    """Rows, milliseconds drafting and verifying of a step of these sequences."""
    rows = graph_rows(sum(1 + depth for _, depth in arms))
    methods = {(part, depth) for method, depth in arms for part in method.split("+") if depth}
    mtp = max((min(depth, LIMITS["mtp"]) for part, depth in methods if part == "mtp"), default=0)
    draft = (MTP_FIXED_MS + MTP_MS * mtp if mtp else 0.0) + (
        NGRAM_MS if any(part == "ngram" for part, _ in methods) else 0.0
    )
    return rows, draft, VERIFY_MS[rows]


@dataclass
class Log:
    """What a replay took: (kind, tokens, milliseconds) of each step."""

    steps: list[tuple[str, int, float]] = field(default_factory=list)

    def rate(self, kind: str) -> float:
        """Tokens per millisecond in one kind of text."""
        tokens = sum(count for name, count, _ in self.steps if name == kind)
        return tokens / sum(ms for name, _, ms in self.steps if name == kind)


def readers_of(texts: list[Text]) -> list[Reader]:
    return [Reader(text, Sequence(i, Request("", (1,), Sampling(), 1, 10**9, ()))) for i, text in enumerate(texts)]


def replay_fixed(texts: list[Text], arm: Arm) -> Log:
    """All sequences with the same choice all the time."""
    log, readers = Log(), readers_of(texts)
    room = (MAX_ROWS - len(texts)) // len(texts)
    arm = arm[0], min(arm[1], room)
    while not any(reader.done for reader in readers):
        kind = texts[0].kinds[readers[0].at].name
        kept_up = KEEP_UP_MS * any(reader.keeps_up() for reader in readers)
        _, draft, verify = step_ms([arm] * len(readers))
        tokens = sum(reader.step(arm)[1] + 1 for reader in readers)
        log.steps.append((kind, tokens, draft + verify + kept_up))
    return log


def replay_tuned(texts: list[Text], tuner: Tuner, seed: int = 0, shadow: bool = True) -> Log:
    """The tuner chooses; it hears of a step when the next one is already planned, as on a card."""
    log, readers, generator = Log(), readers_of(texts), random.Random(seed)
    num = len(readers)
    late: list[tuple[Reader, Arm, tuple[str, ...], int, int]] = []
    cost: tuple[int, list[Arm], float, float] | None = None
    while not any(reader.done for reader in readers):
        arms = [tuner.choose(reader.sequence, num) for reader in readers]
        for reader, arm, drafted, stood, at in late:
            tuner.see_window(reader.sequence, num, arm, drafted, stood)
            tuner.see_echo(reader.sequence, shadow and reader.text.repeats[at] >= SURE_TOKENS)
        if cost is not None:
            tuner.known.see_step(100, *cost)
        rows, draft, verify = step_ms(arms)
        noise = 1 + generator.gauss(0, 0.01)
        cost = rows, arms, draft * noise, verify * noise
        kind = texts[0].kinds[readers[0].at].name
        kept_up = KEEP_UP_MS * any(reader.keeps_up() for reader in readers)
        late, tokens = [], 0
        for reader, arm in zip(readers, arms, strict=True):
            drafted, stood = reader.step(arm)
            late.append((reader, arm, drafted, stood, reader.at))
            if shadow:
                for place in range(reader.at - stood - 1, reader.at):
                    sure, right = reader.text.repeats[place] >= SURE_TOKENS, reader.text.copied_run(place, 1) == 1
                    tuner.see_text(reader.sequence, num, sure, right)
            tokens += stood + 1
            while shadow:
                run = reader.text.copied_run(reader.shadow_at, tuner.known.room(num))
                if reader.shadow_at + run + 1 > reader.at:
                    break
                sure = reader.text.repeats[reader.shadow_at] >= SURE_TOKENS
                tuner.see_shadow(reader.sequence, num, run, sure, reader.was_sure)
                reader.was_sure = sure
                reader.shadow_at += run + 1
        log.steps.append((kind, tokens, (draft + verify) * noise + kept_up))
    return log


CONTENDERS: list[Arm] = [
    OFF,
    *(("mtp", depth) for depth in range(1, 8)),
    *(("ngram", depth) for depth in (1, 3, 7, 11, 15)),
    *(("ngram+mtp", depth) for depth in (1, 2, 3, 4, 5, 6, 7, 11, 15)),
]


def best_fixed(texts: list[Text], contenders: list[Arm] = CONTENDERS) -> dict[str, tuple[float, Arm]]:
    """The best rate of one choice for each kind of text, in hindsight."""
    best: dict[str, tuple[float, Arm]] = {}
    room = (MAX_ROWS - len(texts)) // len(texts)
    for arm in sorted({(method, min(depth, room)) for method, depth in contenders}):
        log = replay_fixed(texts, arm)
        for kind in {name for name, _, _ in log.steps}:
            rate = log.rate(kind)
            if rate > best.get(kind, (0.0, OFF))[0]:
                best[kind] = rate, arm
    return best


def worst_window(log: Log, plain: float, tokens: int = 2000) -> float:
    """The smallest rate over any run of so many tokens, over plain's."""
    worst, count, total, first = float("inf"), 0, 0.0, 0
    for _, emitted, ms in log.steps:
        count += emitted
        total += ms
        while count - log.steps[first][1] >= tokens:
            count -= log.steps[first][1]
            total -= log.steps[first][2]
            first += 1
        if count >= tokens:
            worst = min(worst, count / total / plain)
    return worst
