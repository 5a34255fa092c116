"""One step, top to bottom: the calls of the stages in order, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.core.records import Draft, PrefillPlan, StepResult, VerifyPlan
from localspec.engine.device_step import DeviceStep, StepClock, StepNeeds
from localspec.runner.inputs import cut_to_draft


@dataclass(frozen=True)
class VerifyOutcome:
    """`planned` is what the scheduler reserved, `ran` what was run (cut to the drafts where the host knows them)."""

    planned: VerifyPlan
    ran: VerifyPlan
    draft: Draft
    result: StepResult
    clock: StepClock


def run_prefill(plan: PrefillPlan, device: DeviceStep) -> StepClock:
    """Read a chunk of a prompt. Nothing here waits for it; its time is the clock's first interval."""
    clock = device.clock()
    clock.mark()
    device.prefill(plan)
    clock.mark()
    clock.mark()
    return clock


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
