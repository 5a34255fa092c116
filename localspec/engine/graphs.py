"""The device part of a step as captured CUDA graphs: two replays a step, no wait, no shape that depends on acceptance.

A graph is captured when its key first comes up, after a warm-up run on padding rows, which changes nothing. Layouts
reach the device through pinned buffers that are used in turn. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from localspec.core.records import MAX_SLOTS, Draft, StepResult, VerifyPlan
from localspec.engine.device_step import EagerStep, position_bound
from localspec.engine.drafting import DrafterSet
from localspec.runner.inputs import layout_numbers, layout_of
from localspec.runner.runner import Runner
from localspec.sampling.processors import ProcessorPlan
from localspec.sampling.synthetic import SyntheticAcceptance

SMALLEST_BOUND_TOKENS = 1024
STAGING_BUFFERS = 4
"""More than the steps that can be in flight, so that no buffer is rewritten while a copy still reads it."""

Output = TypeVar("Output")
ProposeKey = tuple[tuple[tuple[int, str, int], ...], int]
VerifyKey = tuple[ProposeKey, int, int, ProcessorPlan, int | None]


@dataclass(frozen=True)
class _Captured(Generic[Output]):
    graph: torch.cuda.CUDAGraph
    output: Output


@dataclass(frozen=True)
class _Staging:
    """device: [2 R + 2 S] int64 that a graph reads; host: pinned buffers of the same length."""

    device: Tensor
    host: tuple[Tensor, ...]


def bound_bucket(tokens: int) -> int:
    """The power of two (at least 1024) that holds `tokens`: attention grids are sized by it."""
    bucket = SMALLEST_BOUND_TOKENS
    while bucket < tokens:
        bucket *= 2
    return bucket


class EventClock:
    """Times on the device's own clock; reading them never waits, as results land after their events."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def intervals_ms(self) -> tuple[float, float]:
        start, drafted, verified = self._events
        return start.elapsed_time(drafted), drafted.elapsed_time(verified)


class GraphStep(EagerStep):
    """`EagerStep` whose propose and verify are replays."""

    def __init__(self, runner: Runner, drafters: DrafterSet, acceptance: SyntheticAcceptance | None = None) -> None:
        super().__init__(runner, drafters, acceptance)
        self._pool = torch.cuda.graph_pool_handle()
        self._proposals: dict[ProposeKey, _Captured[Draft]] = {}
        self._verifications: dict[VerifyKey, tuple[_Captured[StepResult], _Staging]] = {}
        self._turn = 0

    def clock(self) -> EventClock:
        return EventClock()

    def propose(self, plan: VerifyPlan) -> Draft:
        key = self._propose_key(plan)
        captured = self._proposals.get(key)
        if captured is None:
            bounded = _with_bounds(plan, key[1])
            captured = self._capture(lambda: self.drafters.propose(bounded, self.runner.state))
            self._proposals[key] = captured
        captured.graph.replay()
        return captured.output

    def verify(self, plan: VerifyPlan, draft: Draft, law: ProcessorPlan, logprobs: int | None) -> StepResult:
        propose_key = self._propose_key(plan)
        num_rows = plan.graph_key.num_rows
        key = (propose_key, num_rows, bound_bucket(position_bound(plan) + 1), law, logprobs)
        entry = self._verifications.get(key)
        if entry is None:
            entry = self._capture_verify(key, draft)
            self._verifications[key] = entry
        captured, staging = entry
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        host = staging.host[self._turn]
        host.copy_(torch.tensor(layout_numbers(plan, num_rows), dtype=torch.int64))
        staging.device.copy_(host, non_blocking=True)
        captured.graph.replay()
        return captured.output

    def _propose_key(self, plan: VerifyPlan) -> ProposeKey:
        slots = tuple((slot.slot, slot.drafter, slot.num_drafts) for slot in plan.slots if slot.num_drafts)
        return slots, bound_bucket(max(slot.length_bound_tokens for slot in plan.slots))

    def _capture_verify(self, key: VerifyKey, draft: Draft) -> tuple[_Captured[StepResult], _Staging]:
        _, num_rows, bound, law, logprobs = key
        length = 2 * num_rows + 2 * MAX_SLOTS
        padding = [-1] * num_rows + [0] * (num_rows + 2 * MAX_SLOTS)
        staging = _Staging(
            torch.tensor(padding, dtype=torch.int64, device=self.runner.ops.device),
            tuple(torch.zeros(length, dtype=torch.int64).pin_memory() for _ in range(STAGING_BUFFERS)),
        )
        layout = layout_of(staging.device)
        return self._capture(lambda: self.verify_layout(layout, draft, bound, law, logprobs)), staging

    def _capture(self, function: Callable[[], Output]) -> _Captured[Output]:
        """Run once (kernels compile), then record. The function must change nothing on its present inputs."""
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function()
        return _Captured(graph, output)


def _with_bounds(plan: VerifyPlan, bound: int) -> VerifyPlan:
    return VerifyPlan(tuple(replace(slot, length_bound_tokens=bound) for slot in plan.slots))
