"""Which method and how deep, per kind of work, from what was measured here. "off" is always in the race.

An arm is (method, depth). Each arm keeps smoothed tokens per step and milliseconds per step for each number of active
sequences; the best ratio wins, with hysteresis. Arms that were not tried lately are tried again for a few steps.
Torch-free; the clock is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localspec.scheduler.sequence import Sequence

OFF = ("off", 0)
Arm = tuple[str, int]


@dataclass(frozen=True)
class TunerSettings:
    """`trial_steps` steps in a row try an arm every `explore_every_steps`; a challenger must win by `margin`."""

    smoothing: float = 0.06
    margin: float = 0.04
    warmup_steps: int = 6
    trial_steps: int = 6
    explore_every_steps: int = 160


@dataclass
class ArmStats:
    """Smoothed figures of one arm at one number of active sequences."""

    steps: int = 0
    tokens_per_step: float = 0.0
    ms_per_step: float = 0.0
    last_step: int = 0

    def see(self, tokens: float, ms: float, now: int, smoothing: float) -> None:
        weight = max(smoothing, 1.0 / (self.steps + 1))
        self.tokens_per_step += weight * (tokens - self.tokens_per_step)
        self.ms_per_step += weight * (ms - self.ms_per_step)
        self.steps += 1
        self.last_step = now

    @property
    def tok_per_s(self) -> float:
        return self.tokens_per_step / self.ms_per_step * 1e3 if self.ms_per_step else 0.0


@dataclass
class Tuner:
    """Implements the scheduler's DepthPolicy. `arms` always holds OFF."""

    arms: tuple[Arm, ...]
    depth_limits: dict[str, int]
    settings: TunerSettings = TunerSettings()
    default_drafter: str = "auto"
    default_depth: int | None = None
    _stats: dict[tuple[Arm, int], ArmStats] = field(default_factory=dict)
    _current: dict[int, Arm] = field(default_factory=dict)
    _trial: dict[int, tuple[Arm, int]] = field(default_factory=dict)
    _step: int = 0
    reason: str = "not started"
    chosen: Arm = OFF
    """What was chosen last, for the panel."""

    def choose(self, sequence: Sequence, num_active: int) -> Arm:
        """Method and depth of the next window: the request's wish, else the user's, else what measured best."""
        request = sequence.request
        drafter = request.drafter if request.drafter != "auto" else self.default_drafter
        depth = request.depth if request.depth is not None else self.default_depth
        if drafter != "auto":
            limit = self.depth_limits.get(drafter, 0)
            return drafter, min(depth if depth is not None else limit, limit)
        method, measured_depth = self._arm(num_active)
        self.chosen = method, measured_depth if depth is None else min(depth, self.depth_limits.get(method, 0))
        return self.chosen

    def see(self, arm: Arm, num_active: int, tokens: int, ms: float) -> None:
        """A step with this arm emitted `tokens` for one sequence in `ms`."""
        self._step += 1
        if arm not in self.arms:
            return
        stats = self._stats.setdefault((arm, num_active), ArmStats())
        stats.see(tokens, ms, self._step, self.settings.smoothing)

    def plain_ms_per_token(self, num_active: int) -> float | None:
        """Measured cost of a token without drafts, or None."""
        stats = self._stats.get((OFF, num_active))
        return stats.ms_per_step / stats.tokens_per_step if stats and stats.tokens_per_step else None

    def explain(self) -> list[str]:
        """One line per measured arm, best first for each number of active sequences."""
        lines = []
        for (arm, active), stats in sorted(self._stats.items(), key=lambda item: (item[0][1], -item[1].tok_per_s)):
            lines.append(
                f"{active} active · {arm[0]} depth {arm[1]}: {stats.tokens_per_step:.2f} tokens a step, "
                f"{stats.ms_per_step:.1f} ms, {stats.tok_per_s:.1f} tok/s ({stats.steps} steps)"
            )
        return lines

    def _arm(self, num_active: int) -> Arm:
        trial = self._trial.get(num_active)
        if trial is not None and self._step < trial[1]:
            return trial[0]
        untried = self._due_for_trial(num_active)
        if untried is not None:
            self._trial[num_active] = (untried, self._step + self.settings.trial_steps)
            self.reason = f"trying {untried[0]} at depth {untried[1]}"
            return untried
        best = self._best(num_active)
        self._current[num_active] = best
        return best

    def _due_for_trial(self, num_active: int) -> Arm | None:
        for arm in self.arms:
            stats = self._stats.get((arm, num_active))
            if stats is None or stats.steps < self.settings.warmup_steps:
                return arm
        oldest = min(self.arms, key=lambda arm: self._stats[(arm, num_active)].last_step)
        age = self._step - self._stats[(oldest, num_active)].last_step
        return oldest if age > self.settings.explore_every_steps * len(self.arms) else None

    def _best(self, num_active: int) -> Arm:
        rates = {arm: self._stats[(arm, num_active)].tok_per_s for arm in self.arms}
        best = max(self.arms, key=lambda arm: rates[arm])
        current = self._current.get(num_active, OFF)
        if current in rates and rates[best] < rates[current] * (1 + self.settings.margin):
            best = current
        gain = rates[best] / rates[OFF] if rates.get(OFF) else 1.0
        self.reason = f"measured ×{gain:.2f} of plain" if best != OFF else "plain is fastest here"
        return best
