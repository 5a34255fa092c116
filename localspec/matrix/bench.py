"""Measures drafting against plain decoding through the Engine protocol, so that any engine can be measured.

Each cell runs the same prompts greedily, one after another or several at once, after one warm-up; the control "off" is
always among the methods, and speed-ups are ratios within one run. A server that cannot be told how to draft gives one
cell for each workload, as it is.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import product
from typing import Protocol, runtime_checkable

from localspec.api.engine import Engine
from localspec.api.types import (
    Delta,
    Done,
    DrafterMetrics,
    EngineError,
    GenerateRequest,
    MetricsSnapshot,
    Sampling,
    Timings,
    Usage,
)
from localspec.matrix.prompts import Prompt

OFF, AUTO = "off", "auto"
AS_IT_IS = "server"
"""Method of a server that chooses by itself."""


@runtime_checkable
class Forgetful(Protocol):
    """An engine whose tuner can begin anew."""

    async def reset_tuner(self) -> None: ...


@runtime_checkable
class Learning(Protocol):
    """An engine whose tuner's knowledge can be exchanged: None for nothing learnt; gives what it knew until then."""

    async def swap_tuner(self, learnt: object | None) -> object: ...


@runtime_checkable
class CapturesAhead(Protocol):
    """An engine that captures steps while nobody asks for anything, or now."""

    async def capture_ahead(self) -> None: ...


@dataclass(frozen=True)
class BenchPlan:
    """What to measure. `methods` are (drafter, depth), depth 0 leaves it to the engine; off is added if missing."""

    workloads: Mapping[str, tuple[Prompt, ...]]
    methods: tuple[tuple[str, int], ...]
    active: tuple[int, ...] = (1,)
    max_tokens: int = 96
    cold: bool = False
    """Whether what the engine's tuner learnt is forgotten before each cell that it steers."""
    in_turns: bool = False
    """Whether the methods take turns prompt by prompt, so that what else the machine does meets them alike."""
    rehearsals: int = 0
    """Runs of a cell before the one that counts: on a card the first step of each shape is captured."""


@dataclass(frozen=True)
class Cell:
    """One measured combination. Rates are over the time in which at least one of its answers was being decoded.

    `per_position` is marginal: of all windows with drafts, the share whose draft at offset 1, 2, ... was accepted.
    `acceptance_length` is tokens a step. `differs_from_off` counts tokens that differ from those of the control, None
    where there is no control. `speedup` is None for the control and where there is none.
    """

    workload: str
    drafter: str
    depth: int
    active: int
    prompts: int
    tokens: int
    tok_per_s: float
    speedup: float | None
    acceptance_length: float
    acceptance_rate: float
    per_position: tuple[float, ...]
    draft_ms_share: float
    differs_from_off: int | None


@dataclass(frozen=True)
class _Answer:
    ids: tuple[int, ...]
    usage: Usage
    timings: Timings

    @property
    def num_tokens(self) -> int:
        return len(self.ids) or self.usage.completion_tokens


@dataclass(frozen=True)
class _Run:
    """The answers of a cell, the seconds that decoding covered, and the engine's counters before and after."""

    answers: tuple[_Answer, ...]
    seconds: float
    before: MetricsSnapshot
    after: MetricsSnapshot

    @property
    def tok_per_s(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / self.seconds

    def then(self, later: _Run) -> _Run:
        """Both as one."""
        return _Run(self.answers + later.answers, self.seconds + later.seconds, self.before, later.after)


async def run_bench(engine: Engine, plan: BenchPlan, progress: Callable[[Cell], None]) -> list[Cell]:
    """Measure every cell; `progress` sees each as it is done. A drafter that never drafts as deep as it may is not
    measured deeper. Raises EngineError as `generate` does.
    """
    obeys = OFF in (await engine.wait_ready()).drafters
    methods = ((OFF, 0), *(m for m in plan.methods if m[0] != OFF)) if obeys else ((AS_IT_IS, 0),)
    warm_up = (Prompt.of("Say one word."),)
    await _run(engine, warm_up, methods[0], 1, 8)
    if isinstance(engine, CapturesAhead):
        # As for a user, who reads and types between two questions.
        await engine.capture_ahead()
    cells: list[Cell] = []
    for workload, active in product(plan.workloads, plan.active):
        bench = _Workload(engine, plan, workload, active)
        for turn in bench.turns:
            # The control stays first, so that whatever is done can be compared with it.
            order = [methods[0], *_rotated(methods[1:], turn)]
            for method in order:
                run = await bench.run(method, turn)
                if run is not None and turn == bench.turns[-1]:
                    cells.append(_cell(workload, method, active, run, bench.control))
                    progress(cells[-1])
    return cells


def _rotated(methods: Sequence[tuple[str, int]], by: int) -> list[tuple[str, int]]:
    by = by % len(methods) if methods else 0
    return [*methods[by:], *methods[:by]]


class _Workload:
    """One kind of work while it is measured."""

    def __init__(self, engine: Engine, plan: BenchPlan, workload: str, active: int) -> None:
        self._engine, self._plan, self._active = engine, plan, active
        prompts = plan.workloads[workload]
        self._parts = [prompts[i : i + active] for i in range(0, len(prompts), active)] if plan.in_turns else [prompts]
        self._runs: dict[tuple[str, int], _Run] = {}
        self._exhausted: dict[str, int] = {}
        self._learnt: object | None = None

    @property
    def turns(self) -> range:
        return range(len(self._parts))

    @property
    def control(self) -> _Run | None:
        return self._runs.get((OFF, 0))

    async def run(self, method: tuple[str, int], turn: int) -> _Run | None:
        """Answer the prompts of this turn. What was measured until now; None for a depth that is never reached."""
        drafter, depth = method
        if depth > self._exhausted.get(drafter, depth):
            return None
        is_cold = self._plan.cold and drafter == AUTO
        learning = self._engine if is_cold and isinstance(self._engine, Learning) else None
        for _ in range(self._plan.rehearsals):
            await self._learn_anew(drafter)
            if learning is not None and turn:
                # What it teaches is lost, but it begins with the same knowledge, so that it takes the same steps.
                await learning.swap_tuner(copy.deepcopy(self._learnt))
            await self._answers(method, turn)
        await self._learn_anew(drafter)
        if learning is not None and turn:
            await learning.swap_tuner(self._learnt)
        run = await self._answers(method, turn)
        if learning is not None:
            self._learnt = await learning.swap_tuner(None)
        reached = max((len(answer.timings.drafted_per_position) for answer in run.answers), default=0)
        if reached < depth and not turn:
            self._exhausted[drafter] = min(depth, self._exhausted.get(drafter, depth))
        known = self._runs.get(method)
        self._runs[method] = run if known is None else known.then(run)
        return self._runs[method]

    async def _learn_anew(self, drafter: str) -> None:
        if self._plan.cold and drafter == AUTO and isinstance(self._engine, Forgetful):
            await self._engine.reset_tuner()

    async def _answers(self, method: tuple[str, int], turn: int) -> _Run:
        return await _run(self._engine, self._parts[turn], method, self._active, self._plan.max_tokens)


async def _run(
    engine: Engine, prompts: Sequence[Prompt], method: tuple[str, int], active: int, max_tokens: int
) -> _Run:
    gate = asyncio.Semaphore(active)
    spans: list[tuple[float, float]] = []

    async def one(prompt: Prompt) -> _Answer:
        request = GenerateRequest(
            messages=prompt.messages,
            sampling=Sampling(),
            max_tokens=max_tokens,
            drafter=None if method[0] == AS_IT_IS else method[0],
            depth=method[1] or None,
            client="bench",
            # Nothing of it is kept: a later cell must not draft from what an earlier one answered.
            private=True,
        )
        async with gate:
            return await _answer(engine, request, spans)

    before = engine.metrics()
    answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return _Run(tuple(answers), _covered_s(spans), before, engine.metrics())


async def _answer(engine: Engine, request: GenerateRequest, spans: list[tuple[float, float]]) -> _Answer:
    ids: list[int] = []
    num_chars = 0
    async with aclosing(engine.generate(request)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Delta):
                ids.extend(event.token_ids)
                num_chars += len(event.text)
            elif isinstance(event, Done):
                if num_chars and not (ids or event.usage.completion_tokens > 0):
                    what = "the server says neither token ids nor counts (usage), so its speed cannot be measured"
                    raise EngineError("unsupported", what)
                last = time.perf_counter()
                spans.append((last - max(event.timings.decode_ms / 1e3, 1e-6), last))
                return _Answer(tuple(ids), event.usage, event.timings)
    raise RuntimeError("the engine ended an answer without saying so")


def _covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of the spans: time in which at least one answer was being decoded."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return max(covered, 1e-6)


@dataclass(frozen=True)
class _Counts:
    """Drafting of a cell: windows with drafts, drafts, accepted ones, accepted by offset, steps."""

    windows: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]
    steps: int


def _cell(workload: str, method: tuple[str, int], active: int, run: _Run, control: _Run | None) -> Cell:
    timings = [answer.timings for answer in run.answers]
    tokens = sum(answer.num_tokens for answer in run.answers)
    counts = _counts(timings)
    if not counts.steps:
        counts = _server_counts(run, tokens)
    draft_ms, verify_ms = sum(t.draft_ms for t in timings), sum(t.verify_ms for t in timings)
    return Cell(
        workload=workload,
        drafter=method[0],
        depth=method[1],
        active=active,
        prompts=len(run.answers),
        tokens=tokens,
        tok_per_s=round(run.tok_per_s, 2),
        speedup=round(run.tok_per_s / control.tok_per_s, 3) if control is not None and run is not control else None,
        acceptance_length=round(tokens / counts.steps, 3) if counts.steps else 1.0,
        acceptance_rate=round(counts.accepted / counts.drafted, 3) if counts.drafted else 0.0,
        per_position=tuple(round(count / max(counts.windows, 1), 3) for count in counts.accepted_at),
        draft_ms_share=round(draft_ms / (draft_ms + verify_ms), 4) if draft_ms + verify_ms else 0.0,
        differs_from_off=None if control is None else _differing(run.answers, control.answers),
    )


def _counts(timings: Sequence[Timings]) -> _Counts:
    """As the answers themselves tell."""
    positions = max((len(t.accepted_per_position) for t in timings), default=0)
    return _Counts(
        windows=sum(t.draft_steps for t in timings),
        drafted=sum(t.draft_n for t in timings),
        accepted=sum(t.draft_n_accepted for t in timings),
        accepted_at=tuple(sum(_at(t.accepted_per_position, i) for t in timings) for i in range(positions)),
        steps=sum(t.verify_steps for t in timings),
    )


def _server_counts(run: _Run, tokens: int) -> _Counts:
    """From the counters of a server whose answers tell nothing: what they grew by meanwhile, others' work included."""
    before, after = (_first(snapshot.drafters) for snapshot in (run.before, run.after))
    positions = range(len(after.accepted_per_position))
    windows, accepted = after.drafts - before.drafts, after.accepted_tokens - before.accepted_tokens
    return _Counts(
        windows=windows,
        drafted=after.drafted_tokens - before.drafted_tokens,
        accepted=accepted,
        accepted_at=tuple(after.accepted_per_position[i] - _at(before.accepted_per_position, i) for i in positions),
        steps=max(tokens - accepted, 0) if windows > 0 else 0,
    )


def _first(drafters: Sequence[DrafterMetrics]) -> DrafterMetrics:
    return drafters[0] if drafters else DrafterMetrics("")


def _differing(ours: Sequence[_Answer], plain: Sequence[_Answer]) -> int:
    """Tokens that are not the same at the same place, tokens that one of the two lacks included."""
    return sum(
        abs(len(a.ids) - len(b.ids)) + sum(x != y for x, y in zip(a.ids, b.ids, strict=False))
        for a, b in zip(ours, plain, strict=True)
    )


def _at(values: Sequence[int], index: int) -> int:
    return values[index] if index < len(values) else 0
