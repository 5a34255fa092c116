"""What is known of a method's drafts: how often position i is accepted if all before it were. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

UNSEEN_DECAY = 0.95
"""A position that was never drafted is taken to be this much worse than the one before it."""
OPTIMISM = 0.6
"""First guess of position 1, so that a new method gets its trials."""
SMALLEST_RATE = 1e-3


@dataclass
class Acceptance:
    """Conditional acceptance by position, smoothed; position i counts only steps that reached it."""

    smoothing: float
    rates: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def see(self, drafted: int, accepted: int) -> None:
        """A window with `drafted` drafts of which the first `accepted` stood. Nothing drafted is a miss at 1."""
        reached = min(max(drafted, 1), accepted + 1)
        for position in range(reached):
            if position == len(self.rates):
                self.rates.append(self.rate(position))
                self.counts.append(0)
            weight = max(self.smoothing, 1.0 / (self.counts[position] + 2))
            self.rates[position] += weight * (float(position < accepted) - self.rates[position])
            self.counts[position] += 1

    def rate(self, position: int) -> float:
        """Conditional acceptance at a position counted from 0; a guess beyond what was seen."""
        if position < len(self.rates):
            return self.rates[position]
        last, beyond = (self.rates[-1], position + 1 - len(self.rates)) if self.rates else (OPTIMISM, position)
        return last * UNSEEN_DECAY**beyond

    def tokens_per_step(self, depth: int) -> float:
        """1 + the sum of survivals of the first `depth` drafts."""
        expected, survival = 1.0, 1.0
        for position in range(depth):
            survival *= max(self.rate(position), SMALLEST_RATE)
            expected += survival
        return expected


@dataclass
class StepCosts:
    """Milliseconds of a step by (method, depth), smoothed; neighbours stand in for what was not measured."""

    smoothing: float
    ms: dict[tuple[str, int], float] = field(default_factory=dict)
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    seen_at: dict[tuple[str, int], int] = field(default_factory=dict)
    """Number of the engine's step that was measured last, in this run."""

    def see(self, method: str, depth: int, ms: float, step: int = 0) -> None:
        key = (method, depth)
        self.seen_at[key] = step
        count = self.counts.get(key, 0)
        weight = max(self.smoothing, 1.0 / (count + 1))
        self.ms[key] = self.ms.get(key, ms) + weight * (ms - self.ms.get(key, ms))
        self.counts[key] = count + 1

    def of(self, method: str, depth: int) -> float | None:
        """Measured, else on the line between the nearest measured depths (0 is plain); None if unknown."""
        known = {d: ms for (m, d), ms in self.ms.items() if m == method}
        plain = self.ms.get(("off", 0))
        if plain is not None:
            known.setdefault(0, plain)
        if depth in known:
            return known[depth]
        if not known:
            return None
        below = [d for d in known if d < depth]
        above = [d for d in known if d > depth]
        if below and above:
            low, high = max(below), min(above)
            return known[low] + (known[high] - known[low]) * (depth - low) / (high - low)
        nearest = max(below) if below else min(above)
        if below and len(known) > 1:
            before = max((d for d in known if d < nearest), default=None)
            if before is not None:
                slope = (known[nearest] - known[before]) / (nearest - before)
                return known[nearest] + max(slope, 0.0) * (depth - nearest)
        return known[nearest]
