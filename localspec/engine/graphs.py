"""The device part of a step as captured CUDA graphs: two replays a step, no wait, no shape that depends on acceptance.

A step with grammars is three replays: its masks are made on the host, from the drafts, while the forward pass runs.
A graph is captured when its key first comes up, after a warm-up run on padding rows, which changes nothing; those that
were not used for long are given up for new ones. Layouts reach the device through pinned buffers that are used in turn.
Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from localspec.core.memory_budget import FEW_GRAPHS
from localspec.core.records import MAX_SLOTS, PAGE_TOKENS, Draft, StepResult, VerifyPlan
from localspec.engine.captured import Captured, Families, Family, LawKey, Staging
from localspec.engine.device_step import EagerStep, StepNeeds, layout_in, position_bound
from localspec.engine.drafting import DrafterSet
from localspec.runner.inputs import layout_numbers, layout_of
from localspec.runner.runner import Runner
from localspec.sampling.synthetic import SyntheticAcceptance

SMALLEST_BOUND_TOKENS = 4096
BOUND_STEP = 8
STAGING_BUFFERS = 4
"""More than the steps that can be in flight, so that no buffer is rewritten while a copy still reads it."""

Output = TypeVar("Output")
ProposeKey = tuple[tuple[tuple[int, str, int], ...], int, bool, bool, int, int | None]


def bound_bucket(tokens: int) -> int:
    """4096, 32768, ...: the first that holds `tokens`. Attention grids are sized by it, and each has its own graphs."""
    bucket = SMALLEST_BOUND_TOKENS
    while bucket < tokens:
        bucket *= BOUND_STEP
    return bucket


class EventClock:
    """Times on the device's own clock; reading them never waits, as results land after their events."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def done(self) -> bool:
        return bool(self._events[-1].query())  # type: ignore[no-untyped-call]

    def intervals_ms(self) -> tuple[float, float]:
        start, drafted, verified = self._events
        return start.elapsed_time(drafted), drafted.elapsed_time(verified)

    def since_ms(self, before: Self) -> float:
        return float(before._events[-1].elapsed_time(self._events[0]))


class GraphStep(EagerStep):
    """`EagerStep` whose propose and verify are replays."""

    def __init__(
        self,
        runner: Runner,
        drafters: DrafterSet,
        acceptance: SyntheticAcceptance | None = None,
        most_graphs: int = FEW_GRAPHS,
    ) -> None:
        """`most_graphs`: kept at once, by the memory that is set aside for them."""
        super().__init__(runner, drafters, acceptance)
        self._pool = torch.cuda.graph_pool_handle()
        self.captured = Families(most_graphs)
        self._draft_buffers: dict[torch.Size, Tensor] = {}
        self._turn = 0
        self._bound_limit = runner.state.block_tables.shape[1] * PAGE_TOKENS - 1

    def clock(self) -> EventClock:
        return EventClock()

    def propose(self, plan: VerifyPlan, needs: StepNeeds) -> Draft:
        if not _drafts(plan):
            # The same tensors each time, outside the memory that graphs share: one captured before may write there.
            return self.proposed(plan, needs)
        key = self._propose_key(plan, needs)
        family = self.captured.use(key)
        captured = family.proposal
        if captured is None:
            self._make_room(1, family)
            bounded = _with_bounds(plan, key[1])
            captured = family.proposal = self._capture(lambda: self.proposed(bounded, needs))
        captured.graph.replay()
        return captured.output

    def verify(self, plan: VerifyPlan, draft: Draft, needs: StepNeeds) -> StepResult:
        self.make_room(plan)
        if self.runner.overflows_in(slot.slot for slot in plan.slots):
            # Pages from host memory are fetched layer by layer, which a recorded step does not do.
            return super().verify(plan, draft, needs)
        step = self._step_key(plan, needs)
        family = self.captured.use(self._propose_key(plan, needs))
        if needs.grammars:
            return self._verify_masked(family, step, plan, draft, needs)
        key = step[0]
        entry = family.verifications.get(step)
        if entry is None:
            self._make_room(1, family)
            staging = self._staging(_padding(key[0]))
            layout = layout_of(staging.device)
            shared = plan.row_budget is not None
            entry = (
                self._capture(lambda: self.verify_layout(layout_in(layout, draft, shared), draft, key[1], needs)),
                staging,
            )
            family.verifications[step] = entry
        captured, staging = entry
        self._send(torch.tensor(layout_numbers(plan, key[0]), dtype=torch.int64), staging)
        captured.graph.replay()
        return captured.output

    def _verify_masked(
        self, family: Family, step: LawKey, plan: VerifyPlan, draft: Draft, needs: StepNeeds
    ) -> StepResult:
        """Forward pass and acceptance as two replays; the host makes the masks while the first runs."""
        key = step[0]
        if step not in family.acceptances:
            self._make_room(2, family)
        forward = family.forwards.get(key)
        if forward is None:
            staging = self._staging(_padding(key[0]))
            layout = layout_of(staging.device)
            shared = plan.row_budget is not None
            forward = (
                self._capture(lambda: self.runner.verify(layout_in(layout, draft, shared), draft, key[1])),
                staging,
            )
            family.forwards[key] = forward
        acceptance = family.acceptances.get(step)
        if acceptance is None:
            output = forward[0].output
            bytes_per_row = -(-self.runner.model.vocab_size // 8)
            masks = self._staging(torch.full((key[0], bytes_per_row), 0xFF, dtype=torch.uint8))
            # The warm-up must change nothing, so it accepts what the forward pass makes of padding rows.
            forward[1].device.copy_(_padding(key[0]))
            forward[0].graph.replay()
            acceptance = self._capture(lambda: self.accepted(output, draft, needs, masks.device)), masks
            family.acceptances[step] = acceptance
        drafts = self._draft_buffer(draft.token_ids)
        drafts.copy_(draft.token_ids, non_blocking=True)
        drafted = torch.cuda.Event()  # type: ignore[no-untyped-call]
        drafted.record()
        self._send(torch.tensor(layout_numbers(plan, key[0]), dtype=torch.int64), forward[1])
        forward[0].graph.replay()
        drafted.synchronize()
        self._send(self.packed_masks(plan, drafts.tolist(), needs, key[0]), acceptance[1])
        acceptance[0].graph.replay()
        return acceptance[0].output

    def spare_graphs(self) -> int:
        """How many can be captured before others are given up."""
        return self.captured.num_spare

    def is_captured(self, plan: VerifyPlan, needs: StepNeeds) -> bool:
        """Whether a step without grammars is, both parts of it."""
        family = self.captured.find(self._propose_key(plan, needs))
        if family is None or (family.proposal is None and _drafts(plan)):
            return False
        return self._step_key(plan, needs) in family.verifications

    def wait(self) -> None:
        """Until the device has done all it was given."""
        torch.cuda.synchronize()

    def _step_key(self, plan: VerifyPlan, needs: StepNeeds) -> LawKey:
        rows = plan.graph_key.num_rows, self._bucket(position_bound(plan) + 1)
        return rows, (needs.law, needs.logprobs, needs.thinking)

    def _propose_key(self, plan: VerifyPlan, needs: StepNeeds) -> ProposeKey:
        slots = tuple((slot.slot, slot.drafter, slot.num_drafts) for slot in plan.slots if slot.num_drafts)
        bound = self._bucket(max(slot.length_bound_tokens for slot in plan.slots))
        return slots, bound, needs.thinking, needs.law.sampled, self.drafters.corpus_bound(), plan.row_budget

    def _bucket(self, tokens: int) -> int:
        """The bucket of a bound, capped by what a block table can address."""
        return min(bound_bucket(tokens), self._bound_limit)

    def _draft_buffer(self, token_ids: Tensor) -> Tensor:
        """A pinned buffer of the form of the drafts; one is enough, as it is read before the step ends."""
        if token_ids.shape not in self._draft_buffers:
            self._draft_buffers[token_ids.shape] = torch.zeros(token_ids.shape, dtype=torch.int64).pin_memory()
        return self._draft_buffers[token_ids.shape]

    def _staging(self, start: Tensor) -> Staging:
        """Buffers of the shape and type of `start`, which the device's one holds at first."""
        host = tuple(torch.zeros_like(start).pin_memory() for _ in range(STAGING_BUFFERS))
        return Staging(start.to(self.runner.ops.device), host)

    def _send(self, values: Tensor, staging: Staging) -> None:
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        host = staging.host[self._turn]
        host.copy_(values)
        staging.device.copy_(host, non_blocking=True)

    def _make_room(self, count: int, family: Family) -> None:
        """Before captures for `family`: what was not used for long goes, once nothing replays it."""
        if not self.captured.has_room(count):
            self.wait()
            self.captured.make_room(count, family)

    def _capture(self, function: Callable[[], Output]) -> Captured[Output]:
        """Run once (kernels compile), then record. The function must change nothing on its present inputs."""
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function()
        return Captured(graph, output)


def _drafts(plan: VerifyPlan) -> bool:
    return any(slot.num_drafts for slot in plan.slots)


def _with_bounds(plan: VerifyPlan, bound: int) -> VerifyPlan:
    return replace(plan, slots=tuple(replace(slot, length_bound_tokens=bound) for slot in plan.slots))


def _padding(num_rows: int) -> Tensor:
    """[2 R + 2 S] int64: a layout of padding rows only, in which a step changes nothing."""
    return torch.tensor([-1] * num_rows + [0] * (num_rows + 2 * MAX_SLOTS), dtype=torch.int64)
