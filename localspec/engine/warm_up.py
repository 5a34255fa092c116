"""Runs the widest work once before the engine says that it is ready: kernels compile, scratch memory reaches its peak.

What is too large for the card fails here, with a sentence, and never in the middle of an answer.
"""

from __future__ import annotations

import logging
import time

import torch

from localspec.api.types import EngineError, Sampling
from localspec.core.records import MAX_SLOTS, PAGE_TOKENS, Draft, PrefillPlan, Request, SlotPlan, VerifyPlan
from localspec.engine.device_step import DeviceStep, StepNeeds
from localspec.runner.runner import Runner
from localspec.sampling.processors import ProcessorPlan

log = logging.getLogger(__name__)
STEP_ROWS = (1, 16)
SEQUENCE_ID = 1 << 40


def warm_up(runner: Runner, device: DeviceStep, limit: int, chunk: int) -> float:
    """Read the last chunk of a full context, then step at its end. The decode loop must not run yet. Returns seconds.

    limit, chunk: tokens of the context that is promised, and of a prompt that are read at once.

    Raises EngineError (`machine_cannot`) where memory runs out.
    """
    started = time.perf_counter()
    length = limit - max(STEP_ROWS)
    pages = list(range(1, 1 + -(-limit // PAGE_TOKENS)))
    try:
        with torch.inference_mode():
            runner.admit(0, Request("", (0,) * max(1, length), Sampling(), 0, 1 << 20, ()), pages, None)
            start = max(0, length - chunk) // PAGE_TOKENS * PAGE_TOKENS
            if length > 1:
                device.prefill(PrefillPlan(0, SEQUENCE_ID, start, min(start + chunk, length - 1), "off"))
            for rows in STEP_ROWS:
                plan = VerifyPlan((SlotPlan(0, SEQUENCE_ID, "off", rows - 1, length),))
                device.verify(plan, _draft(rows - 1, runner.ops.device), StepNeeds(ProcessorPlan.for_requests((), 1)))
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


def _draft(width: int, device: torch.device) -> Draft:
    tokens = torch.zeros(MAX_SLOTS, width, dtype=torch.int64, device=device)
    counts = torch.full((MAX_SLOTS,), width, dtype=torch.int64, device=device)
    return Draft(tokens, torch.zeros_like(tokens), counts, ("off",))
