"""What is known of a method's drafts: how often it speaks, how often position i is accepted if all before it were.

Counts forget slowly while the work stays the same. When acceptance leaves what it was expected to be (a two-sided CUSUM
of log-likelihood ratios, Page 1954), the counts give way to those since the departure began, so that a new kind of work
is known from its first steps. Drafters of the same work tell of each other (a scalar Kalman filter, Kalman 1960, of the
work and of each drafter's lead). Torch-free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

UNSEEN_DECAY = 0.95
"""A position that was never drafted is taken to be this much worse than the one before it."""
OPTIMISM = 0.6
"""First guess of position 1, so that a new method gets its trials."""
FIRST_GUESS_COPIES = 0.3
"""They are known without being tried."""
SMALLEST_RATE, LARGEST_RATE = 1e-3, 1 - 1e-3
FORGET = 0.997
"""Of a count, kept each time its position is seen again: a memory of about 300 drafts."""
FORGET_COPIES = 0.95
PRIOR_WEIGHT = 3.0
"""Observations that the long-run rate of a position stands for."""
LEVEL_VARIANCE, LEAD_VARIANCE = 1.0, 0.16
"""In squared logits: of how hard the work is before any of it is known, and of how far a drafter is from its kin."""
LEVEL_DRIFT, LEAD_DRIFT, TURNED_LEVEL_VARIANCE = 0.003, 0.00005, 0.3
"""Variance that the work and each drafter's lead gain with every window, and the work has at least when it changed."""
KIN_PRIOR_WEIGHT = 27.0
"""Beside PRIOR_WEIGHT, where kin tell: the counts of a drafter are of the parts of the text in which it was heard."""
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
class Kin:
    """Drafters of the same work. What is hard for one of them is hard for all, so every window tells of the work, which
    drifts, and of its drafter, which does not: a Kalman filter of two logits, by which the odds of all positions are
    higher than in the long run. So a drafter that was not heard is known nearly as well as the others."""

    members: list[Acceptance] = field(default_factory=list)
    level: float = 0.0
    """Of the work."""
    level_variance: float = LEVEL_VARIANCE
    changes: int = 0

    def add(self, member: Acceptance) -> None:
        """What a member has counted before stands for its lead."""
        self.members.append(member)
        member.kin, member.lead = self, member.own_shift()
        self.changes += 1

    def see(self, member: Acceptance, rates: list[float], accepted: int) -> None:
        """A window of a member reached positions of these rates, and the first `accepted` stood."""
        information = sum(rate * (1.0 - rate) for rate in rates)
        surprise = (accepted - sum(rates)) / information
        self.level_variance += LEVEL_DRIFT
        variance = 1.0 / information + self.level_variance + member.lead_variance
        for_level, for_lead = self.level_variance / variance, member.lead_variance / variance
        self.level += for_level * surprise
        member.lead += for_lead * surprise
        self.level_variance *= 1.0 - for_level
        member.lead_variance *= 1.0 - for_lead
        for each in self.members:
            each.lead_variance = min(each.lead_variance + LEAD_DRIFT, LEAD_VARIANCE)
        self.changes += 1


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
    kin: Kin = field(default_factory=Kin, repr=False)
    lead: float = 0.0
    lead_variance: float = LEAD_VARIANCE
    """Of this drafter over its kin, in logits."""
    _kin_changes: int = 0
    _up: _Departure = field(default_factory=_Departure)
    _down: _Departure = field(default_factory=_Departure)
    _rates: list[float] = field(default_factory=list)
    _curve: list[float] | None = None
    _guessed: list[float] = field(default_factory=list)

    def see(self, drafted: int, accepted: int) -> bool:
        """A window with `drafted` drafts of which the first `accepted` stood. Tells whether the work has changed.

        For a method that might have said more, give what it might have said: its silence is a miss.
        """
        reached = min(drafted, accepted + 1, MAX_POSITIONS)
        if not reached:
            return False
        rates = self._rates[:reached] if self._is_fresh() else self._first_rates(reached)
        if not self.copies:
            self.kin.see(self, rates, accepted)
        self.now.add(reached, accepted, FORGET_COPIES if self.copies else FORGET)
        guesses = self._guesses()
        for position in range(reached):
            if position == len(self.long_run):
                self.long_run.append(guesses[position])
            self.long_run[position] += LONG_RUN_SMOOTHING * (float(position < accepted) - self.long_run[position])
        self.steps += 1
        self._forget_told()
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
        self.kin.level_variance = max(self.kin.level_variance, TURNED_LEVEL_VARIANCE)
        self._up, self._down = _Departure(), _Departure()
        self._forget_told()

    def follow_kin(self) -> None:
        """The work has changed, and another drafter tells how."""
        self.now.clear()
        self._up, self._down = _Departure(), _Departure()
        self._forget_told()

    def rate(self, position: int) -> float:
        """Conditional acceptance at a position counted from 0; a guess beyond what was seen."""
        return self.rates()[min(position, MAX_POSITIONS - 1)]

    def rates(self) -> list[float]:
        """Of every position."""
        if not self._is_fresh():
            self._rates, self._curve = self._first_rates(MAX_POSITIONS), None
            self._kin_changes = self.kin.changes
        return self._rates

    def _is_fresh(self) -> bool:
        return bool(self._rates) and self._kin_changes == self.kin.changes

    def _forget_told(self) -> None:
        self._rates, self._curve, self._guessed = [], None, []
        self.kin.changes += 1

    def _first_rates(self, count: int) -> list[float]:
        """Of the first `count` positions: most questions are about few."""
        odds, weight = math.exp(self._shift()), self.prior_weight
        if len(self.kin.members) > 1:
            weight += KIN_PRIOR_WEIGHT
        found = []
        for guess, hits, seen in zip(self._guesses()[:count], self.now.hits, self.now.seen, strict=False):
            # The guess with its odds shifted.
            prior = guess * odds / (1.0 - guess + guess * odds)
            found.append((hits + weight * prior) / (seen + weight))
        return found

    def bonus(self, position: int) -> float:
        """How much better than thought a position might be, from how seldom it was seen."""
        return 0.5 / math.sqrt(1.0 + self.now.seen[min(position, MAX_POSITIONS - 1)])

    def curve(self) -> list[float]:
        """1 + the sum of survivals of the first 0, 1, ... MAX_POSITIONS - 1 drafts. Not to be changed."""
        rates = self.rates()
        if self._curve is None:
            curve, survival = [1.0], 1.0
            for rate in rates[:-1]:
                survival *= rate
                curve.append(curve[-1] + survival)
            self._curve = curve
        return self._curve

    def hope(self, depth: int) -> float:
        """Share by which a window of `depth` drafts brings more with a lead a standard deviation higher."""
        curve = self.curve()
        weighted = sum(place * (curve[place] - curve[place - 1]) for place in range(1, depth + 1))
        return math.sqrt(self.lead_variance) * (1.0 - self.rate(0)) * weighted / curve[depth]

    def _turn_to(self, side: _Departure) -> None:
        """The counts since the departure are those of the new work."""
        self.kin.level_variance = max(self.kin.level_variance, TURNED_LEVEL_VARIANCE)
        self.now = side.counts
        self.prior_weight = PRIOR_WEIGHT
        self.changes += 1
        self._up, self._down = _Departure(), _Departure()
        self._forget_told()

    def _guesses(self) -> list[float]:
        """The long-run rates, beyond what was seen a guess from the position before."""
        if not self._guessed:
            found = [min(max(rate, SMALLEST_RATE), LARGEST_RATE) for rate in self.long_run]
            guess = found[-1] if found else (FIRST_GUESS_COPIES if self.copies else OPTIMISM) / UNSEEN_DECAY
            while len(found) < MAX_POSITIONS:
                guess = max(guess * UNSEEN_DECAY, SMALLEST_RATE)
                found.append(guess)
            self._guessed = found
        return self._guessed

    def _shift(self) -> float:
        """How much better the present work is than the long run, in logits: it also tells of positions that the present
        work has not reached."""
        return self.kin.level + self.lead if len(self.kin.members) > 1 else self.own_shift()

    def own_shift(self) -> float:
        """The same by the counts of this drafter alone."""
        total, weights, known = 0.0, 2.0, self.now.num_positions
        for guess, hits, seen in zip(self._guesses()[:known], self.now.hits, self.now.seen, strict=False):
            weight = min(seen, 20.0)
            total += weight * (_logit((hits + 0.5) / (seen + 1.0)) - _logit(guess))
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
