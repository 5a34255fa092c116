"""One step, top to bottom: the calls of the stages in order, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.core.records import Draft, StepResult, VerifyPlan
from localspec.engine.device_step import DeviceStep, StepClock, StepNeeds
from localspec.runner.inputs import cut_to_draft
from localspec.runner.runner import Reading


@dataclass(frozen=True)
class VerifyOutcome:
    """`planned` is what the scheduler reserved, `ran` what was run (cut to the drafts where the host knows them)."""

    planned: VerifyPlan
    ran: VerifyPlan
    draft: Draft
    result: StepResult
    clock: StepClock


def run_prefill(reading: Reading, num_layers: int, device: DeviceStep) -> tuple[StepClock, bool]:
    """Run the next layers of a chunk of a prompt; whether those were its last. Nothing here waits for them; their time
    is the clock's first interval."""
    clock = device.clock()
    clock.mark()
    done = device.advance_prefill(reading, num_layers)
    clock.mark()
    clock.mark()
    return clock, done


def run_verify(plan: VerifyPlan, device: DeviceStep, needs: StepNeeds, waits: bool) -> VerifyOutcome:
    """Guess, prove, accept. Nothing here waits for the device, except where the device is the host (`waits`) and where
    a grammar must see the drafts."""
    clock = device.clock()
    clock.mark()
    draft = device.propose(plan, needs)
    ran = cut_to_draft(plan, draft.num_drafts.tolist()) if waits else plan
    clock.mark()
    result = device.verify(ran, draft, needs)
    clock.mark()
    return VerifyOutcome(plan, ran, draft, result, clock)
