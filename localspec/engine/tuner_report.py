"""What a tuner knows, as the records that interfaces show: the choice of each kind of work, why, and how fresh."""

from __future__ import annotations

from localspec.api.tuning import Candidate, TunerChoice, TunerReport
from localspec.engine.tuner import CONTEXT_BUCKET_TOKENS, OFF, Arm, Tuner, Work


def report(tuner: Tuner) -> TunerReport:
    """Call it where nothing changes the tuner meanwhile: between two steps."""
    state = tuner.learnt
    choices = [
        _choice(tuner, phase, active, bucket) for phase, active in sorted(tuner.work) for bucket in sorted(state.costs)
    ]
    by_hand = tuner.default_drafter != "auto"
    drafter, depth = tuner.chosen
    if by_hand:
        drafter, depth = tuner.by_hand(tuner.default_drafter, tuner.default_depth)
    reason = "chosen by hand" if by_hand else tuner.reason
    return TunerReport(drafter, depth, reason, by_hand, tuple(choice for choice in choices if choice.candidates))


def _choice(tuner: Tuner, phase: str, active: int, bucket: int) -> TunerChoice:
    work = tuner.work[phase, active]
    rates = tuner.known.rates(phase, active, bucket)
    costs = tuner.known.step_ms(phase, active, bucket)
    best: dict[str, Arm] = {}
    for arm in sorted(rates, key=lambda arm: -rates[arm]):
        best.setdefault(arm[0], arm)
    if work.current in rates:
        # The depth that runs: one that is better by little is not worth a change.
        best[work.current[0]] = work.current
    ranked = sorted(best.values(), key=lambda arm: -rates[arm])
    candidates = tuple(_candidate(tuner, active, bucket, arm, costs[arm], rates[arm]) for arm in ranked)
    return TunerChoice(
        phase=phase,
        active=active,
        context_from_tokens=bucket * CONTEXT_BUCKET_TOKENS,
        drafter=work.current[0],
        depth=work.current[1],
        reason=_reason(work, rates),
        decisions=work.step,
        next_trial=_next_trial(tuner, phase, active, bucket),
        candidates=candidates,
    )


def _candidate(tuner: Tuner, active: int, bucket: int, arm: Arm, ms: float, rate: float) -> Candidate:
    costs = tuner.known.costs_of(bucket)
    measured = costs.verify.get(active) if arm == OFF else costs.draft.get(arm)
    drafts = (mean for (method, _), mean in costs.draft.items() if method == arm[0])
    ran = [mean.seen_at for mean in ([measured] if arm == OFF and measured else drafts) if mean.seen_at is not None]
    return Candidate(
        drafter=arm[0],
        depth=arm[1],
        tok_per_s=round(rate * 1e3, 2),
        tokens_per_step=round(rate * ms, 3),
        step_ms=round(ms, 3),
        measured_steps=measured.count if measured is not None else 0,
        steps_ago=tuner.learnt.steps - max(ran) if ran else None,
    )


def _reason(work: Work, rates: dict[Arm, float]) -> str:
    current, plain = rates.get(work.current), rates.get(OFF)
    if work.hearing is not None:
        return f"trying {work.hearing.arm[0]} at depth {work.hearing.arm[1]}"
    if current is None:
        return "not measured at this context yet"
    best = max(rates, key=lambda arm: rates[arm])
    if work.current == OFF:
        lead = "plain is fastest here"
    else:
        lead = f"measured ×{current / plain:.2f} of plain" if plain else "plain is not measured yet"
    if best != work.current:
        name = "plain" if best == OFF else f"{best[0]} at depth {best[1]}"
        lead += f"; {name} is expected to give ×{rates[best] / current:.2f} of it"
    return lead


def _next_trial(tuner: Tuner, phase: str, active: int, bucket: int) -> str:
    """The method that is heard first. Only windows of this kind of work count."""
    current = tuner.work[phase, active].current[0].split("+")
    others = [method for method in tuner.depth_limits if "+" not in method and method not in current]
    if not others:
        return ""
    left, method = min((tuner.due_in(method, phase, active, bucket), method) for method in others)
    return f"{method} in {left} steps" if left > 0 else f"{method} next"
