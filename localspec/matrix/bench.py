"""Measures drafting against plain decoding through the Engine protocol, so that any engine can be measured.

Each cell runs the same prompts greedily, one after another or several at once, after one warm-up; the control "off" is
always among the methods, and speed-ups are ratios within one run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import product

from localspec.api.engine import Engine
from localspec.api.types import Delta, Done, GenerateRequest, Message, Sampling, Timings

OFF = "off"


@dataclass(frozen=True)
class BenchPlan:
    """What to measure. `methods` are (drafter, depth); ("off", 0) is added where it is missing."""

    workloads: dict[str, tuple[str, ...]]
    methods: tuple[tuple[str, int], ...]
    active: tuple[int, ...] = (1,)
    max_tokens: int = 96


@dataclass(frozen=True)
class Cell:
    """One measured combination. Rates are over the decoding time of all its requests."""

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
    differs_from_off: int


@dataclass(frozen=True)
class _Answer:
    ids: tuple[int, ...]
    timings: Timings


async def run_bench(engine: Engine, plan: BenchPlan, progress: Callable[[Cell], None]) -> list[Cell]:
    """Measure every cell; `progress` sees each as it is done."""
    methods = ((OFF, 0), *(method for method in plan.methods if method[0] != OFF))
    await _answers(engine, ("Say one word.",), (OFF, 0), 1, 8)
    cells: list[Cell] = []
    for workload, active in product(plan.workloads, plan.active):
        prompts = plan.workloads[workload]
        control: tuple[list[_Answer], float] | None = None
        for method in methods:
            answers, seconds = await _answers(engine, prompts, method, active, plan.max_tokens)
            control = control or (answers, seconds)
            cell = _cell(workload, method, active, answers, seconds, control)
            cells.append(cell)
            progress(cell)
    return cells


async def _answers(
    engine: Engine, prompts: Sequence[str], method: tuple[str, int], active: int, max_tokens: int
) -> tuple[list[_Answer], float]:
    """Answers in the order of the prompts, and the seconds from the first decoded token to the last."""
    gate = asyncio.Semaphore(active)
    spans: list[tuple[float, float]] = []

    async def one(prompt: str) -> _Answer:
        request = GenerateRequest(
            messages=(Message("user", prompt),),
            sampling=Sampling(),
            max_tokens=max_tokens,
            drafter=method[0],
            depth=method[1] or None,
            client="bench",
            # Nothing of it is kept: a later cell must not draft from what an earlier one answered.
            private=True,
        )
        async with gate:
            return await _answer(engine, request, spans)

    answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return list(answers), _covered_s(spans)


async def _answer(engine: Engine, request: GenerateRequest, spans: list[tuple[float, float]]) -> _Answer:
    ids: list[int] = []
    first = 0.0
    async with aclosing(engine.generate(request)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Delta):
                first = first or time.perf_counter()
                ids.extend(event.token_ids)
            elif isinstance(event, Done):
                last = time.perf_counter()
                spans.append((last - max(event.timings.decode_ms / 1e3, 1e-6), last))
                return _Answer(tuple(ids), event.timings)
    raise RuntimeError("the engine ended an answer without saying so")


def _covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of the spans: time in which at least one answer was being decoded."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def _cell(
    workload: str,
    method: tuple[str, int],
    active: int,
    answers: Sequence[_Answer],
    seconds: float,
    control: tuple[list[_Answer], float],
) -> Cell:
    tokens = sum(len(answer.ids) for answer in answers)
    control_tokens = sum(len(answer.ids) for answer in control[0])
    rate, control_rate = tokens / seconds, control_tokens / control[1]
    steps = sum(answer.timings.verify_steps for answer in answers)
    drafted = sum(answer.timings.draft_n for answer in answers)
    accepted = sum(answer.timings.draft_n_accepted for answer in answers)
    positions = max((len(answer.timings.accepted_per_position) for answer in answers), default=0)
    draft_ms = sum(answer.timings.draft_ms for answer in answers)
    verify_ms = sum(answer.timings.verify_ms for answer in answers)
    return Cell(
        workload=workload,
        drafter=method[0],
        depth=method[1],
        active=active,
        prompts=len(answers),
        tokens=tokens,
        tok_per_s=round(rate, 2),
        speedup=round(rate / control_rate, 3) if method[0] != OFF else None,
        acceptance_length=round(1 + accepted / steps, 3) if steps else 1.0,
        acceptance_rate=round(accepted / drafted, 3) if drafted else 0.0,
        per_position=tuple(
            round(sum(_at(answer.timings.accepted_per_position, i) for answer in answers) / max(steps, 1), 3)
            for i in range(positions)
        ),
        draft_ms_share=round(draft_ms / (draft_ms + verify_ms), 4) if draft_ms + verify_ms else 0.0,
        differs_from_off=sum(a.ids != b.ids for a, b in zip(answers, control[0], strict=True)),
    )


def _at(values: Sequence[int], index: int) -> int:
    return values[index] if index < len(values) else 0
