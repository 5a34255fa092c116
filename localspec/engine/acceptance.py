"""What is known of a method's drafts: how often it speaks, how often position i is accepted if all before it were.

Counts forget slowly while the work stays the same. When acceptance leaves what it was expected to be (a two-sided CUSUM
of log-likelihood ratios, Page 1954), the counts give way to those since the departure began, so that a new kind of work
is known from its first steps. Torch-free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

UNSEEN_DECAY = 0.95
"""A position that was never drafted is taken to be this much worse than the one before it."""
OPTIMISM = 0.6
"""First guess of position 1, so that a new method gets its trials."""
SMALLEST_RATE, LARGEST_RATE = 1e-3, 1 - 1e-3
FORGET = 0.997
"""Of a count, kept each time its position is seen again: a memory of about 300 drafts."""
FORGET_COPIES = 0.95
PRIOR_WEIGHT = 3.0
"""Observations that the long-run rate of a position stands for."""
SPEECH_SMOOTHING = 0.03
DOUBTED_PRIOR_WEIGHT = 1.0
LONG_RUN_SMOOTHING = 0.004
ODDS_RATIO, ALARM = 4.0, 6.5
"""Of the CUSUM: the smallest change of odds that it looks for, and the log-likelihood ratio at which it calls."""
MAX_POSITIONS = 16


@dataclass
class Counts:
    """Accepted and seen drafts by position."""

    hits: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    seen: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)

    def add(self, reached: int, accepted: int, keep: float = 1.0) -> None:
        """The first `accepted` of `reached` positions stood; older counts are worth `keep`."""
        for position in range(reached):
            self.hits[position] = keep * self.hits[position] + float(position < accepted)
            self.seen[position] = keep * self.seen[position] + 1.0

    @property
    def num_positions(self) -> int:
        """That were ever seen: no later one is without those before it."""
        return MAX_POSITIONS - self.seen.count(0.0)

    def clear(self) -> None:
        self.hits = [0.0] * MAX_POSITIONS
        self.seen = [0.0] * MAX_POSITIONS


@dataclass
class _Departure:
    """One side of the CUSUM and what was counted since it last stood at zero."""

    score: float = 0.0
    counts: Counts = field(default_factory=Counts)


@dataclass
class Acceptance:
    """Conditional acceptance by position. `long_run` are rates over everything ever seen, the prior of new work.

    `copies`: the drafts repeat the text itself, which comes and goes faster than other work.
    """

    copies: bool = False
    long_run: list[float] = field(default_factory=list)
    now: Counts = field(default_factory=Counts)
    steps: int = 0
    changes: int = 0
    prior_weight: float = PRIOR_WEIGHT
    _up: _Departure = field(default_factory=_Departure)
    _down: _Departure = field(default_factory=_Departure)
    _rates: list[float] | None = None
    _curve: list[float] | None = None

    def see(self, drafted: int, accepted: int) -> bool:
        """A window with `drafted` drafts of which the first `accepted` stood. Tells whether the work has changed.

        For a method that might have said more, give what it might have said: its silence is a miss.
        """
        reached = min(drafted, accepted + 1, MAX_POSITIONS)
        if not reached:
            return False
        rates = self._rates[:reached] if self._rates is not None else self._first_rates(reached)
        self.now.add(reached, accepted, FORGET_COPIES if self.copies else FORGET)
        for position in range(reached):
            if position == len(self.long_run):
                self.long_run.append(self._guesses(position + 1)[position])
            self.long_run[position] += LONG_RUN_SMOOTHING * (float(position < accepted) - self.long_run[position])
        self.steps += 1
        self._rates = self._curve = None
        changed = False
        for side, odds in ((self._up, ODDS_RATIO), (self._down, 1.0 / ODDS_RATIO)):
            side.score = max(0.0, side.score + _log_likelihood_ratio(rates, accepted, odds))
            if side.score:
                side.counts.add(reached, accepted)
            else:
                side.counts.clear()
            changed = changed or side.score > ALARM
        if changed:
            self._turn_to(self._up if self._up.score > ALARM else self._down)
        return changed

    @property
    def suspicion(self) -> float:
        """How far the last drafts were better than expected: 0 not at all, 1 the work has changed."""
        return self._up.score / ALARM

    def doubt(self) -> None:
        """The work has changed while this method was not heard: what was counted tells little now."""
        self.now.clear()
        self.prior_weight = DOUBTED_PRIOR_WEIGHT
        self._up, self._down = _Departure(), _Departure()
        self._rates = self._curve = None

    def rate(self, position: int) -> float:
        """Conditional acceptance at a position counted from 0; a guess beyond what was seen."""
        return self.rates()[min(position, MAX_POSITIONS - 1)]

    def rates(self) -> list[float]:
        """Of every position."""
        if self._rates is None:
            self._rates = self._first_rates(MAX_POSITIONS)
        return self._rates

    def _first_rates(self, count: int) -> list[float]:
        """Of the first `count` positions: most questions are about few."""
        guesses = self._guesses(max(count, self.now.num_positions))
        odds = math.exp(self._shift(guesses))
        found = []
        for guess, hits, seen in zip(guesses[:count], self.now.hits, self.now.seen, strict=False):
            # The guess with its odds shifted.
            prior = guess * odds / (1.0 - guess + guess * odds)
            found.append((hits + self.prior_weight * prior) / (seen + self.prior_weight))
        return found

    def bonus(self, position: int) -> float:
        """How much better than thought a position might be, from how seldom it was seen."""
        return 0.5 / math.sqrt(1.0 + self.now.seen[min(position, MAX_POSITIONS - 1)])

    def curve(self) -> list[float]:
        """1 + the sum of survivals of the first 0, 1, ... MAX_POSITIONS - 1 drafts. Not to be changed."""
        if self._curve is None:
            curve, survival = [1.0], 1.0
            for rate in self.rates()[:-1]:
                survival *= rate
                curve.append(curve[-1] + survival)
            self._curve = curve
        return self._curve

    def tokens_per_step(self, depth: int) -> float:
        """1 + the sum of survivals of the first `depth` drafts."""
        return self.curve()[min(depth, MAX_POSITIONS - 1)]

    def _turn_to(self, side: _Departure) -> None:
        """The counts since the departure are those of the new work."""
        self.now = side.counts
        self.prior_weight = PRIOR_WEIGHT
        self.changes += 1
        self._up, self._down = _Departure(), _Departure()
        self._rates = self._curve = None

    def _guesses(self, count: int) -> list[float]:
        """Of the first `count` positions the long-run rate, beyond what was seen a guess from the position before."""
        found = [min(max(rate, SMALLEST_RATE), LARGEST_RATE) for rate in self.long_run[:count]]
        guess = found[-1] if found else OPTIMISM / UNSEEN_DECAY
        while len(found) < count:
            guess *= UNSEEN_DECAY
            found.append(max(guess, SMALLEST_RATE))
        return found

    def _shift(self, guesses: list[float]) -> float:
        """How much better the present work is than the long run, in logits, over all positions: it also tells of
        positions that the present work has not reached."""
        total, weights = 0.0, 2.0
        known = slice(self.now.num_positions)
        for guess, hits, seen in zip(guesses[known], self.now.hits[known], self.now.seen[known], strict=True):
            present = (hits + 0.5) / (seen + 1.0)
            weight = min(seen, 20.0)
            total += weight * (_logit(present) - _logit(guess))
            weights += weight
        return total / weights


@dataclass
class Speech:
    """How often a method has anything to say, as a share of the windows in which it was asked."""

    share: float
    count: int = 0

    def see(self, spoke: bool) -> None:
        self.count += 1
        self.share += max(SPEECH_SMOOTHING, 1.0 / (self.count + 8)) * (float(spoke) - self.share)


def _log_likelihood_ratio(rates: list[float], accepted: int, odds: float) -> float:
    """Of these outcomes, if the odds of every position were so many times as high, over the rates as they are."""
    total = 0.0
    for position, rate in enumerate(rates):
        scale = 1.0 - rate + odds * rate
        total += math.log(odds / scale) if position < accepted else -math.log(scale)
    return total


def _logit(rate: float) -> float:
    rate = min(max(rate, SMALLEST_RATE), LARGEST_RATE)
    return math.log(rate / (1.0 - rate))
