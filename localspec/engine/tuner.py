"""Which method and how deep, per kind of work, from what was measured here. "off" is always in the race.

The expected rate of (method, depth) is (1 + sum of survivals) / milliseconds of such a step: survivals from smoothed
acceptance per method and phase, milliseconds from steps of this machine per number of active sequences and context
bucket. The best rate wins with hysteresis. Other methods are tried for a few steps now and then: rarely while they keep
losing, soon again when the work changes. Torch-free; time is counted in steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localspec.engine.acceptance import Acceptance, StepCosts
from localspec.scheduler.sequence import Sequence

OFF = ("off", 0)
Arm = tuple[str, int]
CONTEXT_BUCKET_TOKENS = 4096


@dataclass(frozen=True)
class TunerSettings:
    """Counts are steps. A challenger must win by `margin`; run lengths that move by `change_ratio` are other work."""

    smoothing: float = 0.05
    cost_smoothing: float = 0.05
    margin: float = 0.02
    trial_steps: int = 3
    first_interval_steps: int = 24
    longest_interval_steps: int = 384
    deepen_every_steps: int = 40
    fast_smoothing: float = 0.15
    change_ratio: float = 0.3


@dataclass
class Challenger:
    """When a method is tried next and how long to wait after that."""

    interval_steps: int
    due_step: int = 0


@dataclass
class Work:
    """State for one phase and number of active sequences."""

    current: Arm = OFF
    trial: Arm | None = None
    trial_left: int = 0
    step: int = 0
    fast_run: float = 1.0
    slow_run: float = 1.0
    challengers: dict[str, Challenger] = field(default_factory=dict)


@dataclass
class Learnt:
    """Acceptance by (method, phase), costs by (active sequences, context bucket), work by (phase, active)."""

    acceptance: dict[tuple[str, str], Acceptance] = field(default_factory=dict)
    costs: dict[tuple[int, int], StepCosts] = field(default_factory=dict)
    work: dict[tuple[str, int], Work] = field(default_factory=dict)
    steps: int = 0
    """Measured in this run; says how old a figure is."""


@dataclass
class Tuner:
    """Implements the scheduler's DepthPolicy. `depth_limits` maps each method or chain to its greatest depth."""

    depth_limits: dict[str, int]
    settings: TunerSettings = TunerSettings()
    default_drafter: str = "auto"
    default_depth: int | None = None
    reason: str = "not started"
    chosen: Arm = OFF
    """What was chosen last, for the panel."""
    learnt: Learnt = field(default_factory=Learnt)

    def choose(self, sequence: Sequence, num_active: int) -> Arm:
        """Method and depth of the next window: the request's wish, else the user's, else what measured best."""
        request = sequence.request
        drafter = request.drafter if request.drafter != "auto" else self.default_drafter
        depth = request.depth if request.depth is not None else self.default_depth
        if drafter != "auto":
            limit = self.depth_limits.get(drafter, 0)
            self.chosen = drafter, min(depth if depth is not None else limit, limit)
            self.reason = "chosen by hand" if request.drafter == "auto" else "named by the last request"
            return self.chosen
        bucket = sequence.length_bound_tokens // CONTEXT_BUCKET_TOKENS
        method, best_depth = self._arm(sequence.phase, num_active, bucket)
        self.chosen = method, best_depth if depth is None else min(depth, self.depth_limits.get(method, 0))
        return self.chosen

    def see(self, sequence: Sequence, num_active: int, arm: Arm, drafted: int, accepted: int, ms: float) -> None:
        """A step of this sequence took `ms`; of `drafted` drafts the first `accepted` stood."""
        bucket = sequence.length_bound_tokens // CONTEXT_BUCKET_TOKENS
        self.learnt.steps += 1
        self.costs_of(num_active, bucket).see(*arm, ms, self.learnt.steps)
        method, _ = arm
        if method != OFF[0]:
            self._acceptance_of(method, sequence.phase).see(drafted, accepted)
        work = self._work_of(sequence.phase, num_active)
        if arm == work.current:
            self._notice_change(work, 1.0 + accepted)

    def plain_ms_per_token(self, num_active: int, context_tokens: int) -> float | None:
        """Measured cost of a token without drafts near this context, or None."""
        bucket = context_tokens // CONTEXT_BUCKET_TOKENS
        costs = [(abs(b - bucket), table.ms.get(OFF)) for (n, b), table in self.learnt.costs.items() if n == num_active]
        known = [(distance, ms) for distance, ms in costs if ms is not None]
        return min(known)[1] if known else None

    def see_plain(self, num_active: int, context_tokens: int, ms: float) -> None:
        """A step that drafted nothing cost this: a measure of plain decoding."""
        self.costs_of(num_active, context_tokens // CONTEXT_BUCKET_TOKENS).see(*OFF, ms, self.learnt.steps)

    def reset(self) -> None:
        """Forget everything that was learnt."""
        self.learnt = Learnt()
        self.reason = "not started"

    def explain(self) -> list[str]:
        """What is known, in sentences, the best method first for each kind of work."""
        lines = []
        for phase, active in self.learnt.work:
            for bucket in sorted(b for n, b in self.learnt.costs if n == active):
                rated = sorted(self.rates(phase, active, bucket).items(), key=lambda item: -item[1])
                told = ", ".join(f"{m} {d}: {rate * 1e3:.1f} tok/s" for (m, d), rate in _best_by_method(rated))
                lines.append(f"{phase}, {active} active, context from {bucket * CONTEXT_BUCKET_TOKENS}: {told}")
        return lines

    def _arm(self, phase: str, num_active: int, bucket: int) -> Arm:
        work = self._work_of(phase, num_active)
        work.step += 1
        if work.trial is not None and work.trial_left > 0:
            work.trial_left -= 1
            return work.trial
        rates = self.rates(phase, num_active, bucket)
        if work.trial is not None:
            self._judge_trial(work, rates)
        due = self._due(work, phase, num_active, bucket)
        if due is not None:
            work.trial, work.trial_left = due, self.settings.trial_steps - 1
            self.reason = f"trying {due[0]} at depth {due[1]}"
            return due
        self._keep_best(work, rates)
        method, depth = work.current
        if method != OFF[0] and work.step % self.settings.deepen_every_steps == 0:
            return method, min(depth + 1, self.depth_limits[method])
        return work.current

    def rates(self, phase: str, num_active: int, bucket: int) -> dict[Arm, float]:
        """Expected tokens per millisecond of every arm whose cost is known or can be told from neighbours."""
        costs = self.costs_of(num_active, bucket)
        rates: dict[Arm, float] = {}
        for method, limit in ((OFF[0], 0), *self.depth_limits.items()):
            for depth in range(1 if method != OFF[0] else 0, limit + 1):
                ms = costs.of(method, depth)
                if ms:
                    rates[method, depth] = self._acceptance_of(method, phase).tokens_per_step(depth) / ms
        return rates

    def _keep_best(self, work: Work, rates: dict[Arm, float]) -> None:
        if not rates:
            return
        best = max(rates, key=lambda arm: rates[arm])
        current = rates.get(work.current, 0.0)
        if rates[best] > current * (1.0 + self.settings.margin):
            work.current = best
            work.fast_run = work.slow_run = 0.0
        plain = rates.get(OFF)
        gain = rates.get(work.current, 0.0) / plain if plain else 1.0
        self.reason = f"measured ×{gain:.2f} of plain" if work.current != OFF else "plain is fastest here"

    def _due(self, work: Work, phase: str, num_active: int, bucket: int) -> Arm | None:
        """The next method whose trial is due: plain and unmeasured ones first."""
        costs = self.costs_of(num_active, bucket)
        for method in (OFF[0], *self.depth_limits):
            challenger = work.challengers.setdefault(method, Challenger(self.settings.first_interval_steps))
            if method == work.current[0] and costs.of(method, work.current[1]) is not None:
                continue
            if work.step >= challenger.due_step:
                challenger.due_step = work.step + challenger.interval_steps
                return self._trial_arm(method, phase, costs)
        return None

    def _trial_arm(self, method: str, phase: str, costs: StepCosts) -> Arm:
        """The depth at which a method would do best by what is known, at least 1."""
        if method == OFF[0]:
            return OFF
        acceptance = self._acceptance_of(method, phase)

        def worth(depth: int) -> float:
            return acceptance.tokens_per_step(depth) / (costs.of(method, depth) or 1.0)

        return method, max(range(1, self.depth_limits[method] + 1), key=worth)

    def _judge_trial(self, work: Work, rates: dict[Arm, float]) -> None:
        """A method that lost waits twice as long; one that came close is looked at again soon."""
        assert work.trial is not None
        method = work.trial[0]
        best = max((rate for (name, _), rate in rates.items() if name == method), default=0.0)
        challenger = work.challengers[method]
        if best < 0.9 * rates.get(work.current, 0.0):
            challenger.interval_steps = min(2 * challenger.interval_steps, self.settings.longest_interval_steps)
        else:
            challenger.interval_steps = self.settings.first_interval_steps
        challenger.due_step = work.step + challenger.interval_steps
        work.trial = None

    def _notice_change(self, work: Work, run: float) -> None:
        """The run length moved away from its own past: other work, so others are tried soon."""
        settings = self.settings
        if not work.slow_run:
            work.fast_run = work.slow_run = run
        work.fast_run += settings.fast_smoothing * (run - work.fast_run)
        work.slow_run += settings.smoothing / 3 * (run - work.slow_run)
        if abs(work.fast_run - work.slow_run) > settings.change_ratio * work.slow_run:
            work.slow_run = work.fast_run
            for challenger in work.challengers.values():
                challenger.interval_steps = settings.first_interval_steps
                challenger.due_step = min(challenger.due_step, work.step + settings.first_interval_steps // 4)

    def _acceptance_of(self, method: str, phase: str) -> Acceptance:
        return self.learnt.acceptance.setdefault((method, phase), Acceptance(self.settings.smoothing))

    def costs_of(self, num_active: int, bucket: int) -> StepCosts:
        """The cost table of so many active sequences in a context bucket."""
        return self.learnt.costs.setdefault((num_active, bucket), StepCosts(self.settings.cost_smoothing))

    def _work_of(self, phase: str, num_active: int) -> Work:
        return self.learnt.work.setdefault((phase, num_active), Work())


def _best_by_method(rated: list[tuple[Arm, float]]) -> list[tuple[Arm, float]]:
    seen: dict[str, tuple[Arm, float]] = {}
    for arm, rate in rated:
        seen.setdefault(arm[0], (arm, rate))
    return list(seen.values())
