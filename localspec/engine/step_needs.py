"""What a verify step must compute for the requests that run, as far as the host knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localspec.core.records import Request
from localspec.engine.device_step import StepNeeds
from localspec.sampling.grammar import RequestGrammar
from localspec.sampling.processors import ProcessorPlan


def step_needs(requests: Sequence[Request], grammars: Mapping[int, RequestGrammar], vocab_size: int) -> StepNeeds:
    """`grammars` by slot, of the slots of the step."""
    wanted = [request.logprobs for request in requests if request.logprobs is not None]
    budgets = (request.thinking.budget_tokens for request in requests if request.thinking is not None)
    return StepNeeds(
        law=ProcessorPlan.for_requests([request.sampling for request in requests], vocab_size),
        logprobs=max(wanted) if wanted else None,
        thinking=any(budget is not None for budget in budgets),
        grammars=grammars,
    )
