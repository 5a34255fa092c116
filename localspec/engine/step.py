"""One step, top to bottom: the calls of the stages in order, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.api.types import Sampling
from localspec.core.records import Draft, PrefillPlan, StepResult, VerifyPlan
from localspec.engine.drafting import DrafterSet
from localspec.runner.inputs import cut_to_draft
from localspec.runner.runner import Runner
from localspec.sampling.accept import accept
from localspec.sampling.processors import ProcessorPlan


@dataclass(frozen=True)
class Stages:
    """What a step is made of. Stages do not hold or call each other."""

    runner: Runner
    drafters: DrafterSet


@dataclass(frozen=True)
class VerifyOutcome:
    """`planned` is what the scheduler reserved, `ran` what was run (cut to the drafts where the host knows them)."""

    planned: VerifyPlan
    ran: VerifyPlan
    draft: Draft
    result: StepResult
    draft_ms: float
    verify_ms: float


def run_prefill(plan: PrefillPlan, stages: Stages) -> float:
    """Read a chunk of a prompt. Returns host milliseconds."""
    started = time.perf_counter()
    rows, forward = stages.runner.prefill(plan)
    stages.drafters.observe(rows, forward, stages.runner.state)
    return (time.perf_counter() - started) * 1e3


def run_verify(plan: VerifyPlan, stages: Stages, samplings: Sequence[Sampling], logprobs: int | None) -> VerifyOutcome:
    """Guess, prove, accept. Nothing here waits for the device except where the device is the host.

    `samplings` are those of the plan's sequences; they only choose the cheapest processing that covers all.
    """
    runner = stages.runner
    started = time.perf_counter()
    draft = stages.drafters.propose(plan, runner.state)
    ran = cut_to_draft(plan, draft.num_drafts.tolist()) if runner.ops.waits else plan
    drafted = time.perf_counter()
    output = runner.verify(ran, draft)
    law = ProcessorPlan.for_requests(samplings, output.logits.shape[1])
    result = accept(output.logits, output.rows, draft, runner.state, logprobs=logprobs, plan=law)
    verified = time.perf_counter()
    stages.drafters.observe(output.rows, output.forward, runner.state)
    observed = time.perf_counter()
    draft_ms = (drafted - started + observed - verified) * 1e3
    return VerifyOutcome(plan, ran, draft, result, draft_ms, (verified - drafted) * 1e3)
