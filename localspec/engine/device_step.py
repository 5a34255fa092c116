"""The device part of a step: propose, and verify with acceptance. Run call by call here, or as captured graphs.

Both forms run the same functions in the same order; `graphs.py` only replays them.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from localspec.core.records import Draft, PrefillPlan, StepResult, VerifyPlan
from localspec.engine.drafting import DrafterSet
from localspec.runner.inputs import Layout, layout_numbers, layout_of
from localspec.runner.runner import Runner
from localspec.sampling.accept import accept
from localspec.sampling.processors import ProcessorPlan
from localspec.sampling.synthetic import SyntheticAcceptance


def position_bound(plan: VerifyPlan) -> int:
    """Host bound at or above every position of the step."""
    return max(slot.length_bound_tokens + slot.num_drafts for slot in plan.slots)


class StepClock(Protocol):
    """When a step began, had its drafts, and was verified; read after its results have landed."""

    def mark(self) -> None:
        """Take a time: at the start, after drafting, after verifying."""
        ...

    def intervals_ms(self) -> tuple[float, float]:
        """Milliseconds drafting and verifying."""
        ...


class HostClock:
    """For devices whose work is done when a call returns."""

    def __init__(self) -> None:
        self._marks_s: list[float] = []

    def mark(self) -> None:
        self._marks_s.append(time.perf_counter())

    def intervals_ms(self) -> tuple[float, float]:
        start, drafted, verified = self._marks_s
        return (drafted - start) * 1e3, (verified - drafted) * 1e3


class DeviceStep(Protocol):
    """What `step.py` calls."""

    def clock(self) -> StepClock:
        """A fresh clock for one step."""
        ...

    def propose(self, plan: VerifyPlan) -> Draft:
        """Drafts for the plan's slots."""
        ...

    def verify(self, plan: VerifyPlan, draft: Draft, law: ProcessorPlan, logprobs: int | None) -> StepResult:
        """Run the windows, accept, and let drafters see the rows."""
        ...

    def prefill(self, plan: PrefillPlan) -> None:
        """Read a chunk of a prompt and let drafters see it."""
        ...


class EagerStep:
    """Calls every stage directly."""

    def __init__(self, runner: Runner, drafters: DrafterSet, acceptance: SyntheticAcceptance | None = None) -> None:
        """`acceptance` forces drafts to be accepted at given rates; benchmarks only."""
        self.runner = runner
        self.drafters = drafters
        self._acceptance = acceptance

    def clock(self) -> StepClock:
        return HostClock()

    def propose(self, plan: VerifyPlan) -> Draft:
        return self.drafters.propose(plan, self.runner.state)

    def verify(self, plan: VerifyPlan, draft: Draft, law: ProcessorPlan, logprobs: int | None) -> StepResult:
        pad_to = plan.num_rows if self.runner.ops.waits else plan.graph_key.num_rows
        numbers = torch.tensor(layout_numbers(plan, pad_to), dtype=torch.int64, device=self.runner.ops.device)
        return self.verify_layout(layout_of(numbers), draft, position_bound(plan), law, logprobs)

    def verify_layout(
        self, layout: Layout, draft: Draft, max_position_bound: int, law: ProcessorPlan, logprobs: int | None
    ) -> StepResult:
        """The part that a graph captures: device values only."""
        output = self.runner.verify(layout, draft, max_position_bound)
        state = self.runner.state
        rules = self._acceptance(output.rows, draft, state.sampling.seeds) if self._acceptance is not None else None
        result = accept(output.logits, output.rows, draft, state, logprobs=logprobs, plan=law, rules=rules)
        self.drafters.observe(output.rows, output.forward, self.runner.state)
        return result

    def prefill(self, plan: PrefillPlan) -> None:
        rows, forward = self.runner.prefill(plan)
        self.drafters.observe(rows, forward, self.runner.state)
