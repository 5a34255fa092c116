"""Which method is listened to though another is in use, how deep, and how often.

A hearing costs what the method loses while it runs, so one that lost much is heard seldom, and one that could not win
hardly ever. Drafters with weights find the same tokens hard: what is in use tells of the others, and where none is in
use one of them is heard for all. Torch-free; time is counted in steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.engine.knowledge import COPYING, ECHO, Knowledge, Prices
from localspec.engine.step_costs import OFF, Arm
from localspec.engine.tuner_work import Hearing, TunerSettings, Work


@dataclass(frozen=True)
class Hearings:
    """Decides by what is known."""

    known: Knowledge
    settings: TunerSettings

    def due(self, work: Work, bucket: int, prices: Prices) -> Arm | None:
        """Who is heard now: plain decoding and methods whose cost nobody knows first."""
        if not self.known.verify_curve(bucket):
            return OFF
        room, soonest = self.known.room(work.num_active), self.settings.kin_interval_steps
        for method, limit in self.known.depth_limits.items():
            if "+" in method or not min(limit, room):
                continue
            if not self.known.draft_curve(method, bucket):
                return method, min(3, limit, room)
            if work.step - work.heard_at.get(method, -self.settings.longest_interval_steps) < soonest:
                continue
            if method != work.in_use and self.due_in(work, method, prices) <= 0:
                return prices.best[method]
        return self._deeper(work, prices)

    def hearing_of(self, arm: Arm, work: Work) -> Hearing:
        """Begins one. Of drafters that are nearly as good as the one in use a longer one costs little."""
        settings = self.settings
        if arm == OFF:
            return Hearing(arm, settings.plain_steps, settings.hearing_windows)
        is_kin = work.hears_kin_of(arm[0]) and arm[0] not in (work.current[0], work.in_use)
        wanted = settings.kin_windows if is_kin else settings.hearing_windows
        return Hearing(arm, settings.longest_hearing_steps + wanted - 1, wanted)

    def due_in(self, work: Work, method: str, prices: Prices) -> int:
        """Steps until a method that is not in use is heard; 0 or less: now."""
        interval = self._interval(work, method, prices)
        # What is in use tells of its kin, and the text of its n-grams; where it repeats itself these come first.
        never = 0 if work.hears_kin_of(method) or method == "ngram" or prices.phase == ECHO else -interval
        heard_at = work.heard_at.get(method, never)
        if method not in COPYING and not work.hears_kin_of(method):
            # One speaks for all.
            heard_at = max([heard_at, *(step for name, step in work.heard_at.items() if name not in COPYING)])
        return heard_at + interval - work.step

    def listens_on(self, hearing: Hearing, work: Work, phase: str) -> bool:
        """A step of a hearing has passed: whether it takes another one."""
        hearing.left -= 1
        if hearing.wanted > 0:
            return hearing.left > 0
        method = hearing.arm[0].split("+")[-1]
        if work.hears_kin_of(method):
            return False
        # It may have done better than it should have: listen on until that is explained.
        suspicious = self.known.acceptance_of(method, phase).suspicion > self.settings.suspicion
        return suspicious and hearing.left > -self.settings.longest_hearing_steps

    def _interval(self, work: Work, method: str, prices: Prices) -> int:
        """Steps between two hearings: what one loses, over the share of time that may be lost."""
        settings = self.settings
        own = prices.best.get(method)
        if work.current not in prices.costs or own is None:
            return settings.shortest_interval_steps
        rate = prices.rates[work.current]
        if max((1 + depth) / ms for (name, depth), ms in prices.costs.items() if name == method) < rate:
            return settings.hopeless_interval_steps
        if method not in COPYING:
            if work.hears_kin_of(method):
                hope = settings.hopes * self.known.acceptance_of(method, prices.phase).hope(own[1])
                hoped = prices.rates[own] * (1.0 + hope)
                return settings.hopeless_interval_steps if hoped < rate else settings.kin_interval_steps
            elif self._speaker_of_kin(prices) != method:
                return settings.hopeless_interval_steps
        loss = max(1.0 - prices.rates[own] / rate, 0.05) * settings.usual_hearing_steps
        longest, shortest = settings.longest_interval_steps, settings.shortest_interval_steps
        return int(min(max(loss / settings.hearing_share, shortest), longest))

    def _speaker_of_kin(self, prices: Prices) -> str | None:
        """The drafter with weights that is expected to do best."""
        kin = [arm for method, arm in prices.best.items() if arm[1] and method not in COPYING and "+" not in method]
        return max(kin, key=prices.rates.__getitem__)[0] if kin else None

    def _deeper(self, work: Work, prices: Prices) -> Arm | None:
        """One draft more than now, where that might win for all that is known of it."""
        method, depth = work.current
        deeper, costs = (method, depth + 1), prices.costs
        if not depth or deeper not in costs or work.step - work.deepened_at < self.settings.deepen_every_steps:
            return None
        tokens = [self.known.tokens(method, n, prices.phase, work.num_active) for n in (depth - 1, depth)]
        known = self.known.acceptance_of(method.split("+")[-1], prices.phase)
        hoped = tokens[1] + (tokens[1] - tokens[0]) * min(known.rate(depth) + known.bonus(depth), 0.98)
        if hoped / costs[deeper] <= tokens[1] / costs[work.current]:
            return None
        work.deepened_at = work.step
        return deeper
