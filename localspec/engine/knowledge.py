"""What was learnt of drafting here: acceptance and costs, and from both the rate that each choice is expected to have.

The expected rate of (method, depth) is (1 + sum of survivals) / milliseconds of such a step. A chain `first+second` is
told from its parts: the first speaks in a share of the windows, the second in the rest. Torch-free.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localspec.core.records import MAX_ROWS
from localspec.engine.acceptance import MAX_POSITIONS, Acceptance, Kin, Speech
from localspec.engine.step_costs import LEAST_MS, OFF, Arm, Mean, StepCosts, graph_rows

CONTEXT_BUCKET_TOKENS = 4096
COPYING = frozenset(("ngram", "ngram_disk"))
"""Methods that speak as long as they know something and cost next to nothing to ask."""
COPY_DEPTHS, CHAIN_DEPTHS, MODEL_DEPTHS = (3, 7, 15), (2, 3, 4, 5, 7, 15), (1, 2, 3, 4, 5, 6, 7, 11, 15)
"""Depths that are looked at. On a card each is captured when it first comes up, so those that make little difference
are left out."""
ECHO = "echo"
"""The phase in which the text repeats itself."""
ECHO_RATE = 0.9
"""First guess of copies there."""
SHARING_GAIN = 0.15
"""Between 0.1 and 0.4 for three and four sequences with the published acceptance; the tests' figures."""
CHEAP_DRAFT_SHARE = 0.01
"""Of a plain step: what asking a copying method costs until it was measured."""
PLAIN_TOKENS = [1.0] * MAX_POSITIONS
AHEAD_COUNT = 2
"""Measurements that a step counts for which no request asked for."""


@dataclass
class Learnt:
    """acceptance, speech: by (method, phase), with `method!` for what a method says as the sure first part of a chain;
    drafted: by (method, phase), drafts of a window where the host sees how many there are; costs: by context bucket."""

    acceptance: dict[tuple[str, str], Acceptance] = field(default_factory=dict)
    speech: dict[tuple[str, str], Speech] = field(default_factory=dict)
    drafted: dict[tuple[str, str], Mean] = field(default_factory=dict)
    costs: dict[int, StepCosts] = field(default_factory=dict)
    kin: dict[str, Kin] = field(default_factory=dict)
    """The drafters with weights, by phase."""
    steps: int = 0
    """Measured in this run; says how old a figure is."""


@dataclass
class Knowledge:
    """`depth_limits` maps each method or chain to its greatest depth. `fixed_rows`: a step runs as many rows as were
    planned, whatever was drafted (captured graphs). `shares_rows`: sequences may ask for more than their share."""

    depth_limits: Mapping[str, int]
    fixed_rows: bool = False
    shares_rows: bool = False
    learnt: Learnt = field(default_factory=Learnt)
    ahead: StepCosts = field(default_factory=StepCosts)
    """Of steps that no request asked for, in the first bucket of contexts: what is known before anything is learnt."""
    _told: _Told = field(default_factory=lambda: _Told(None))

    def see_ahead(self, arm: Arm, rows: int, draft_ms: float, verify_ms: float) -> None:
        """A step that no request asked for took so long; what steps of requests took stands."""
        for costs in (self.ahead, self.costs_of(0)):
            costs.verify.setdefault(rows, Mean(max(verify_ms, LEAST_MS), AHEAD_COUNT))
            if arm[1]:
                costs.draft.setdefault(arm, Mean(max(draft_ms, LEAST_MS), AHEAD_COUNT))

    def see_step(
        self,
        context_tokens: int,
        rows: int,
        arms: Sequence[Arm],
        draft_ms: float,
        verify_ms: float,
        wait_ms: float | None = None,
    ) -> None:
        """A step of `rows` rows in all took so long to draft and to verify, and waited so long for the host if that is
        known; `arms` of its sequences, with depth 0 where none was drafted."""
        if not (math.isfinite(draft_ms) and math.isfinite(verify_ms)):
            return
        self.learnt.steps += 1
        costs, number = self._table(context_tokens // CONTEXT_BUCKET_TOKENS), self.learnt.steps
        moved = costs.verify.setdefault(rows, Mean()).see(verify_ms, number)
        if wait_ms is not None and math.isfinite(wait_ms):
            moved |= costs.wait.setdefault(rows, Mean()).see(wait_ms, number)
        if moved:
            self._told.steps.clear()
            self._told.verify.clear()
        drafting = {arm for arm in arms if arm[1]}
        if len(drafting) == 1:
            arm = drafting.pop()
            if costs.draft.setdefault(arm, Mean()).see(draft_ms, number):
                self._told.forget_drafts_of(arm[0])

    def nothing_learnt(self) -> Learnt:
        """What a tuner that begins anew knows."""
        return Learnt(costs={0: copy.deepcopy(self.ahead)} if self.ahead.verify else {})

    def see_window(self, arm: Arm, phase: str, drafted_by: Sequence[str], accepted: int, in_use: bool = True) -> bool:
        """The drafts of a window had these origins, and the first `accepted` stood; `in_use`: the choice was in use for
        a while, so that its silence counts. Tells whether the work has changed."""
        method, depth = arm
        parts = method.split("+")
        speaker = _speaker(parts, drafted_by)
        if speaker is None:
            return False
        if not self.fixed_rows and parts[0] in COPYING:
            self.learnt.drafted.setdefault((method, phase), Mean()).average(float(len(drafted_by)), 0)
        spoken = sum(1 for origin in drafted_by if _part_of(parts, origin) == speaker)
        is_first = speaker == parts[0]
        changed = False
        if len(parts) > 1:
            changed = self._see_first(parts[0], phase, depth if is_first else 0, accepted)
        if len(parts) == 1 or (speaker and not is_first):
            # A copying method that says nothing has missed; another one was not caught up, which tells nothing.
            name = speaker or method
            if in_use and name not in COPYING:
                self.speech_of(name, phase).see(bool(drafted_by))
            known = self.acceptance_of(name, phase)
            changed = known.see(depth if name in COPYING else spoken, min(accepted, spoken)) or changed
        return changed

    def see_shadow(self, phase: str, depth: int, run: int, sure: bool, in_use: bool = False) -> bool:
        """What the text's own n-grams would have had right, of `depth` drafts, at a place where a window might have
        begun; `sure`: in front of another drafter they would have spoken there. `in_use`: they are, and are
        counted as it happens. Tells whether the work has changed."""
        first = self._see_first("ngram", phase, depth if sure else 0, run)
        if in_use:
            return False
        return self.acceptance_of("ngram", phase).see(depth, run) or first

    def tokens(self, method: str, depth: int, phase: str, num_active: int = 1) -> float:
        """Expected tokens of a window, where all of so many sequences have the same choice.

        Where they ask for more rows than a step has, each gets its share on average; that the likeliest drafts get them
        is worth SHARING_GAIN of what rows for all would be.
        """
        if not depth:
            return 1.0
        share = (MAX_ROWS - num_active) / num_active
        if depth > share:
            low = int(share)
            few, more = self.tokens(method, low, phase), self.tokens(method, low + 1, phase)
            cut = few + (share - low) * (more - few)
            return cut + SHARING_GAIN * (self.tokens(method, depth, phase) - cut)
        return self.tokens_by_depth(method, phase)[depth]

    def tokens_by_depth(self, method: str, phase: str) -> list[float]:
        """Expected tokens of a window of 0, 1, ... MAX_POSITIONS - 1 drafts that has rows for them all."""
        if method == OFF[0]:
            return PLAIN_TOKENS
        first, _, second = method.partition("+")
        if second:
            share, sure = self.speech_of(f"{first}!", phase).share, self.acceptance_of(f"{first}!", phase).curve()
            others = self.tokens_by_depth(second, phase)
            return [share * one + (1.0 - share) * other for one, other in zip(sure, others, strict=True)]
        curve = self.acceptance_of(method, phase).curve()
        limit = self.depth_limits.get(method, MAX_POSITIONS)
        if limit < MAX_POSITIONS - 1:
            curve = curve[: limit + 1] + [curve[limit]] * (MAX_POSITIONS - 1 - limit)
        if method in COPYING:
            return curve
        share = self.speech_of(method, phase).share
        return [1.0 + share * (tokens - 1.0) for tokens in curve]

    def rates(self, phase: str, num_active: int, bucket: int) -> dict[Arm, float]:
        """Expected tokens per millisecond of a sequence, for every choice whose cost can be told; none is rounded."""
        self._told = _Told(self.learnt)
        return self.prices(phase, num_active, bucket).rates

    def step_ms(self, phase: str, num_active: int, bucket: int) -> dict[Arm, float]:
        """Expected milliseconds of a step in which all of so many sequences have the same choice, with what the device
        waits for the host; unknown ones left out."""
        if not self.fixed_rows:
            return self._step_ms(phase, num_active, bucket)
        told, key = self._fresh().steps, (num_active, bucket)
        if key not in told:
            told[key] = self._step_ms(phase, num_active, bucket)
        return told[key]

    def _step_ms(self, phase: str, num_active: int, bucket: int) -> dict[Arm, float]:
        verify = self.verify_curve(bucket)
        if not verify:
            return {}
        known = sorted((b for b, table in self.learnt.costs.items() if table.wait), key=lambda b: abs(b - bucket))
        waits = self.learnt.costs[known[0]] if known else StepCosts()
        by_rows = [ms + waits.wait_ms(rows) for rows, ms in enumerate(verify)]
        found = {OFF: by_rows[num_active]}
        drafts = {method: self.draft_curve(method, bucket) for method in self.depth_limits}
        for arm in self.arms(num_active):
            method, depth = arm
            draft = drafts[method]
            if not draft:
                continue
            if self.fixed_rows:
                found[arm] = by_rows[graph_rows(num_active * (1 + depth))] + draft[depth]
            else:
                rows = min(num_active * (1.0 + self._drafts_of_window(method, depth, phase)), float(MAX_ROWS))
                whole = int(rows)
                more = verify[min(whole + 1, MAX_ROWS)] - verify[whole]
                found[arm] = by_rows[whole] + (rows - whole) * more + draft[depth]
        return found

    def prices(self, phase: str, num_active: int, bucket: int) -> Prices:
        """See `Prices`."""
        return Prices(self, phase, num_active, self.step_ms(phase, num_active, bucket))

    def arms(self, num_active: int) -> list[Arm]:
        """Every choice with drafts that fits the rows of a step, shared alike."""
        found = self._fresh().arms.get(num_active)
        if found is None:
            room = self.room(num_active)
            found = self._fresh().arms[num_active] = []
            for method, limit in self.depth_limits.items():
                kind = CHAIN_DEPTHS if "+" in method else COPY_DEPTHS if method in COPYING else MODEL_DEPTHS
                depths = {depth for depth in kind if depth < min(limit, room)} | {min(limit, room)} - {0}
                found += [(method, depth) for depth in sorted(depths)]
        return found

    def room(self, num_active: int) -> int:
        """Drafts that each of so many sequences has room for."""
        return MAX_ROWS - num_active if self.shares_rows else (MAX_ROWS - num_active) // num_active

    def verify_curve(self, bucket: int) -> list[float]:
        """See `StepCosts`; from this bucket of contexts, else from the nearest, scaled by what both have measured."""
        told = self._fresh().verify
        if bucket not in told:
            told[bucket] = self._verify_curve(bucket)
        return told[bucket]

    def _verify_curve(self, bucket: int) -> list[float]:
        own = self._table(bucket)
        if len(own.verify) > 1:
            return own.verify_curve()
        for near in sorted(self.learnt.costs, key=lambda b: abs(b - bucket)):
            table = self.learnt.costs[near]
            if len(table.verify) > 1:
                curve = table.verify_curve()
                scale = next((mean.value / curve[rows] for rows, mean in own.verify.items()), 1.0)
                return [scale * ms for ms in curve]
        return own.verify_curve()

    def draft_curve(self, method: str, bucket: int) -> list[float]:
        """See `StepCosts`; from the nearest bucket that has any. Of a chain that never ran, the sum of its parts;
        asking a copying method costs next to nothing until it was measured."""
        told, key = self._fresh().draft, (method, bucket)
        curve = told.get(key)
        if curve is None:
            curve = self._draft_curve(method, bucket)
            if curve:
                told[key] = curve
        return curve

    def _draft_curve(self, method: str, bucket: int) -> list[float]:
        for near in sorted(self.learnt.costs, key=lambda b: abs(b - bucket)):
            table = self.learnt.costs[near]
            curve = table.draft_curve(method)
            if curve and "+" in method:
                # Beyond what was measured as its parts go on: one may have reached its greatest depth.
                deepest = max(depth for name, depth in table.draft if name == method)
                summed = self._curve_of_parts(method.split("+"), bucket)
                if summed:
                    more = (curve[deepest] + ms - summed[deepest] for ms in summed[deepest + 1 :])
                    return [*curve[: deepest + 1], *more]
            if curve:
                return curve
        if method in COPYING:
            plain = self.verify_curve(bucket)
            return [CHEAP_DRAFT_SHARE * plain[1] * min(depth, 1) for depth in range(MAX_ROWS)] if plain else []
        parts = method.split("+")
        return self._curve_of_parts(parts, bucket) if len(parts) > 1 else []

    def _curve_of_parts(self, parts: Sequence[str], bucket: int) -> list[float]:
        """The sum of what the parts of a chain take, each to its own greatest depth; empty if one is not known."""
        total = [0.0] * MAX_ROWS
        for part in parts:
            curve, limit = self.draft_curve(part, bucket), self.depth_limits.get(part, 0)
            if not curve:
                return []
            reached = curve[: limit + 1] + [curve[min(limit, MAX_ROWS - 1)]] * (MAX_ROWS - 1 - limit)
            total = [so_far + ms for so_far, ms in zip(total, reached, strict=False)]
        return total

    def _drafts_of_window(self, method: str, depth: int, phase: str) -> float:
        """Rows beyond the first: the depth, or where the host sees the drafts what they usually are."""
        drafted = self.learnt.drafted.get((method, phase))
        if self.fixed_rows or drafted is None:
            return float(depth)
        return min(float(depth), drafted.value)

    def acceptance_of(self, method: str, phase: str) -> Acceptance:
        """Of a new kind of work, a guess from the one that is known best; where the text repeats itself, that copies
        stand."""
        found = self.learnt.acceptance.get((method, phase))
        if found is None:
            copies = method.rstrip("!") in COPYING
            found = Acceptance(copies=copies)
            like = [a for (name, _), a in self.learnt.acceptance.items() if name == method and a.steps]
            if copies and phase == ECHO:
                found.long_run = [ECHO_RATE] * MAX_POSITIONS
            elif like:
                found.long_run = list(max(like, key=lambda a: a.steps).long_run)
            self.learnt.acceptance[method, phase] = found
        if not found.copies and not found.kin.members:
            self.learnt.kin.setdefault(phase, Kin()).add(found)
        return found

    def speech_of(self, method: str, phase: str) -> Speech:
        """Copying methods have something to say now and then, others always but while they catch up."""
        found = self.learnt.speech.get((method, phase))
        if found is None:
            found = Speech(0.5 if method.rstrip("!") in COPYING else 1.0)
            self.learnt.speech[method, phase] = found
        return found

    def costs_of(self, bucket: int) -> StepCosts:
        """The cost table of a context bucket, for who may change it."""
        self._told = _Told(self.learnt)
        return self._table(bucket)

    def _table(self, bucket: int) -> StepCosts:
        return self.learnt.costs.get(bucket) or self.learnt.costs.setdefault(bucket, StepCosts())

    def _fresh(self) -> _Told:
        """What was told of the costs as they are: it holds until one of them moves by more than noise."""
        if self._told.learnt is not self.learnt:
            self._told = _Told(self.learnt)
        return self._told

    def _see_first(self, part: str, phase: str, depth: int, accepted: int) -> bool:
        """The first part of a chain spoke and might have said `depth` drafts, or stayed silent (0)."""
        self.speech_of(f"{part}!", phase).see(depth > 0)
        return bool(depth) and self.acceptance_of(f"{part}!", phase).see(depth, accepted)


@dataclass
class _Told:
    """What was worked out of the tables of `learnt`, each until one of its figures moves by more than noise."""

    learnt: Learnt | None
    arms: dict[int, list[Arm]] = field(default_factory=dict)
    """By number of sequences."""
    steps: dict[tuple[int, int], dict[Arm, float]] = field(default_factory=dict)
    """By number of sequences and bucket; the same for every phase."""
    verify: dict[int, list[float]] = field(default_factory=dict)
    draft: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def forget_drafts_of(self, method: str) -> None:
        """And of the chains that it is part of."""
        self.steps.clear()
        for key in [key for key in self.draft if method in key[0]]:
            del self.draft[key]


class Prices:
    """What one decision goes by, each figure told once: `costs`, milliseconds of a step by choice, empty where none can
    be told; `rates`, expected tokens per millisecond of a sequence; `best`, the choice of each method that has the
    highest."""

    def __init__(self, known: Knowledge, phase: str, num_active: int, costs: dict[Arm, float]) -> None:
        self.costs, self.phase = costs, phase
        self.rates: dict[Arm, float] = {}
        self.best: dict[str, Arm] = {}
        self._known, self._num_active = known, num_active
        self._shared = MAX_ROWS // num_active - 1
        self._curves: dict[str, list[float]] = {}
        highest: dict[str, float] = {}
        for arm, ms in costs.items():
            method = arm[0]
            rate = self.rates[arm] = self.tokens(*arm) / ms
            if rate > highest.get(method, 0.0):
                highest[method], self.best[method] = rate, arm

    def tokens(self, method: str, depth: int) -> float:
        """See `Knowledge.tokens`."""
        if depth > self._shared:
            return self._known.tokens(method, depth, self.phase, self._num_active)
        curve = self._curves.get(method)
        if curve is None:
            curve = self._curves[method] = self._known.tokens_by_depth(method, self.phase)
        return curve[depth]


def _part_of(parts: Sequence[str], origin: str) -> str | None:
    """The part of a chain that an origin belongs to; tables on disk have names of their own."""
    if origin in parts:
        return origin
    return "ngram_disk" if origin.startswith("table:") and "ngram_disk" in parts else None


def _speaker(parts: Sequence[str], drafted_by: Sequence[str]) -> str | None:
    """Who spoke first: "" for nobody, None for something that is no drafter (a dictated token)."""
    return _part_of(parts, drafted_by[0]) if drafted_by else ""
