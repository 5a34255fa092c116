"""Runs the widest work once before the engine says that it is ready: kernels compile, scratch memory reaches its peak.

What is too large for the card fails here, with a sentence, and never in the middle of an answer.
"""

from __future__ import annotations

import logging
import time

import torch

from localspec.api.types import EngineError, Sampling
from localspec.core.records import MAX_ROWS, PAGE_TOKENS, PrefillPlan, Request, SlotPlan, VerifyPlan
from localspec.engine.device_step import StepNeeds
from localspec.engine.loop import Stages
from localspec.sampling.processors import ProcessorPlan

log = logging.getLogger(__name__)
SEQUENCE_ID = 1 << 40
WIDEST_DRAFTER = "ngram"
"""It reaches the widest window, and needs no weights."""
LAWS = (Sampling(), Sampling(temperature=0.8, top_k=20, top_p=0.95))
WIDEST_LAW = Sampling(
    temperature=1.0, top_p=0.9, min_p=0.01, presence_penalty=0.1, repetition_penalty=1.1, logit_bias=((0, 0.5),)
)
LOGPROBS = 20


def warm_up(stages: Stages, limit: int, chunk: int) -> float:
    """Read the last chunk of a full context, then step at its end. The decode loop must not run yet. Returns seconds.

    limit, chunk: tokens of the context that is promised, and of a prompt that are read at once. Goes the way of the
    loop, drafts included, so that what is captured serves real steps. Raises EngineError (`machine_cannot`) where
    memory runs out.
    """
    started = time.perf_counter()
    runner, device = stages.runner, stages.device
    length = max(1, limit - MAX_ROWS)
    request = Request("", (0,) * length, Sampling(), 0, 1 << 20, ())
    try:
        with torch.inference_mode():
            runner.admit(0, request, list(range(1, 1 + -(-limit // PAGE_TOKENS))), None)
            device.admit(0, request)
            stages.drafters.admit(0, request)
            start = max(0, length - chunk) // PAGE_TOKENS * PAGE_TOKENS
            if length > 1:
                device.prefill(PrefillPlan(0, SEQUENCE_ID, start, min(start + chunk, length - 1), "off"))
            for law in LAWS:
                _step(stages, "off", 0, length, law)
            if stages.drafters.knows(WIDEST_DRAFTER):
                depth = min(MAX_ROWS - 1, stages.drafters.max_depth(WIDEST_DRAFTER))
                _step(stages, WIDEST_DRAFTER, depth, length, LAWS[-1])
                _step(stages, WIDEST_DRAFTER, depth, length, WIDEST_LAW, LOGPROBS)
            if runner.ops.device.type == "cuda":
                torch.cuda.synchronize(runner.ops.device)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            "machine_cannot", f"A context of {limit} tokens does not fit this card; choose a smaller --context."
        ) from error
    finally:
        runner.release(0)
        runner.pool.reset_states(0)
    seconds = time.perf_counter() - started
    log.info("warmed up in %.1f s", seconds)
    return seconds


def _step(stages: Stages, drafter: str, depth: int, length: int, law: Sampling, logprobs: int | None = None) -> None:
    needs = StepNeeds(ProcessorPlan.for_requests([law], stages.runner.model.vocab_size), logprobs)
    plan = VerifyPlan((SlotPlan(0, SEQUENCE_ID, drafter, depth, length),))
    stages.device.verify(plan, stages.device.propose(plan, needs), needs)
