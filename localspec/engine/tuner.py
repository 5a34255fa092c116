"""Which method and how deep, per kind of work, from what was measured here. "off" is always in the race.

The best expected rate wins with hysteresis. A method that is not in use is heard now and then, for a window or two at a
small depth: often enough to notice a change within a few dozen steps, and hardly ever where even perfect drafts could
not win. The text's own n-grams are scored at every step without being drafted, and tell where the text repeats itself:
there it is work of its own ("echo"). Torch-free; time is counted in steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Words
from dataclasses import dataclass, field, replace

from localspec.core.records import MAX_ROWS
from localspec.engine.confidence import RowBudget
from localspec.engine.hearings import Hearings
from localspec.engine.knowledge import CONTEXT_BUCKET_TOKENS, COPYING, ECHO, Knowledge, Learnt, Prices
from localspec.engine.step_costs import OFF, Arm
from localspec.engine.text_replay import Policy, RecentText, in_question
from localspec.engine.tuner_work import Hearing, Kept, TunerSettings, Work, best_by_method
from localspec.scheduler.sequence import Sequence

__all__ = ["CONTEXT_BUCKET_TOKENS", "ECHO", "OFF", "Arm", "Hearing", "Tuner", "TunerSettings", "Work"]

MAX_FLIGHTS = 64


@dataclass
class Tuner:
    """Implements the scheduler's DepthPolicy. `depth_limits` maps each method or chain to its greatest depth;
    `fixed_rows`, `shares_rows`: see `Knowledge`."""

    depth_limits: dict[str, int]
    settings: TunerSettings = field(default_factory=TunerSettings)
    default_drafter: str = "auto"
    default_depth: int | None = None
    fixed_rows: bool = False
    shares_rows: bool = False
    budget: RowBudget | None = None
    """Of steps whose number of rows is settled before their drafts are known."""
    reason: str = "not started"
    chosen: Arm = OFF
    """What was chosen last, for the panel."""
    work: dict[tuple[str, int], Work] = field(default_factory=dict)
    """By phase and number of active sequences."""
    known: Knowledge = field(init=False)
    recent: dict[tuple[str, int], RecentText] = field(default_factory=dict)
    """By phase, echo not apart, and number of active sequences."""
    _echoing: set[int] = field(default_factory=set)
    _phases_at_echo: dict[int, str] = field(default_factory=dict)
    _hearing: set[int] = field(default_factory=set)
    """Sequences whose last choice was made to hear a method."""
    _flights: dict[int, deque[str]] = field(default_factory=dict)
    """Phases of the windows of each sequence whose results are not known yet."""

    _hearings: Hearings = field(init=False)

    def __post_init__(self) -> None:
        self.known = Knowledge(self.depth_limits, self.fixed_rows, self.shares_rows)
        self._hearings = Hearings(self.known, self.settings)

    @property
    def learnt(self) -> Learnt:
        return self.known.learnt

    def choose(self, sequence: Sequence, num_active: int) -> Arm:
        """Method and depth of the next window: the request's wish, else the user's, else what measured best."""
        request = sequence.request
        drafter = request.drafter if request.drafter != "auto" else self.default_drafter
        depth = request.depth if request.depth is not None else self.default_depth
        phase = self._take_off(sequence, num_active)
        if drafter != "auto":
            self.chosen = self.by_hand(drafter, depth)
            self.reason = "chosen by hand"
            return self.chosen
        bucket = sequence.length_bound_tokens // CONTEXT_BUCKET_TOKENS
        method, best_depth = self._arm(sequence.id, phase, num_active, bucket)
        self.chosen = method, best_depth if depth is None else min(depth, self.depth_limits.get(method, 0))
        return self.chosen

    def wants_all(self, sequence: Sequence) -> bool:
        """Whether all drafts of the window just chosen are to be verified: request or user fixed method or depth, or a
        method is being heard."""
        request = sequence.request
        fixed = request.depth is not None or self.default_depth is not None
        by_hand = fixed or request.drafter != "auto" or self.default_drafter != "auto"
        return by_hand or sequence.id in self._hearing

    def row_budget(self, num_active: int, wanted_rows: int) -> int | None:
        """Rows of a step whose sequences share them, None where nothing is to be shared. Where the host sees the drafts
        it chooses among them all; a card's step has its number of rows before."""
        if not self.fixed_rows or self.budget is None:
            return MAX_ROWS
        if num_active == 1:
            return None
        rows = self.budget.rows(num_active)
        return None if wanted_rows <= rows else rows

    def see_window(
        self,
        sequence: Sequence,
        num_active: int,
        arm: Arm,
        drafted_by: Words[str],
        accepted: int,
        offered: int | None = None,
    ) -> str:
        """A window of this sequence was verified: its drafts had these origins, and the first `accepted` stood. Returns
        the phase that it was planned in. offered: drafts before some were cut; None: none were."""
        flights = self._flights.get(sequence.id)
        phase = flights.popleft() if flights else sequence.phase
        method, depth = arm
        if not depth or method == OFF[0]:
            return phase
        work = self.work_of(phase, num_active)
        for part in method.split("+"):
            if drafted_by and (part in drafted_by or part in COPYING):
                work.heard_at[part] = work.step
        hearing = work.hearing
        if hearing is not None and arm == hearing.arm and (drafted_by or method in COPYING):
            hearing.wanted -= 1
        in_use = hearing is None and arm == work.current
        if in_use:
            work.behind = max(work.behind + work.expected - accepted - 1, 0.0)
        if offered is not None and offered > len(drafted_by):
            # What was cut tells nothing; the window is as if no more had been asked for.
            if not drafted_by:
                return phase
            arm = method, len(drafted_by)
        if self.known.see_window(arm, phase, drafted_by, accepted, in_use):
            speaker = drafted_by[0] if drafted_by else ""
            self._alarm(phase, speaker if speaker in self.depth_limits and speaker not in COPYING else "")
        return phase

    def see_shadow(self, sequence: Sequence, num_active: int, run: int, is_sure: bool, is_echo: bool) -> None:
        """At a place where a window might have begun, `run` drafts of the text's own n-grams would have stood, of at
        most `room`; sure ones would have spoken in front of another drafter too. `is_echo`: what was known when it
        would have been planned."""
        phase = ECHO if is_echo and num_active == 1 else sequence.phase
        in_use = False
        for (name, _), work in self.work.items():
            if name == phase:
                work.heard_at["ngram"] = work.step
                in_use = in_use or work.current[0] == "ngram"
        self.known.see_shadow(phase, self.known.room(num_active), run, is_sure, in_use)

    def see_text(self, sequence: Sequence, num_active: int, sure: bool, right: bool) -> None:
        """A token landed: behind the one before it the text's own n-grams had a long match, and said this one next."""
        phase = sequence.phase
        key = phase, num_active
        text = self.recent.get(key) or self.recent.setdefault(key, RecentText(self.fixed_rows))
        if text.see(sequence.id, sure, right):
            text.forget_old()
            self._alarm(phase)
            if num_active == 1:
                self._alarm(ECHO)
        self._phases_at_echo[num_active] = phase

    def see_echo(self, sequence: Sequence, is_echo: bool) -> None:
        """Whether the text of a sequence repeats itself at its last known token."""
        (self._echoing.add if is_echo else self._echoing.discard)(sequence.id)

    def by_hand(self, drafter: str, depth: int | None) -> Arm:
        """A wish, as deep as the method can draft."""
        limit = self.depth_limits.get(drafter, 0)
        return drafter, limit if depth is None else min(depth, limit)

    def foreseen(self) -> list[Arm]:
        """What a single sequence may be given: the user's choice, else plain decoding and all others, shallow first."""
        if self.default_drafter != "auto":
            return [self.by_hand(self.default_drafter, self.default_depth)]
        return [OFF, *sorted(self.known.arms(1), key=lambda arm: ("+" in arm[0], arm[1], arm[0]))]

    def plain_ms_per_token(self, num_active: int, context_tokens: int) -> float | None:
        """Measured cost of a token without drafts near this context, or None."""
        curve = self.known.verify_curve(context_tokens // CONTEXT_BUCKET_TOKENS)
        return curve[num_active] if curve else None

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._echoing.discard(sequence.id)
        self._hearing.discard(sequence.id)
        self._flights.pop(sequence.id, None)
        for text in self.recent.values():
            text.forget(sequence.id)

    def reset(self) -> None:
        """Forget everything that was learnt."""
        self.swap(None)

    def swap(self, kept: Kept | None) -> Kept:
        """Go on with other knowledge, or with none; gives what was known until now."""
        before = Kept(self.known.learnt, self.work, self.recent)
        after = kept or Kept(self.known.nothing_learnt(), {}, {})
        self.known.learnt, self.work, self.recent = after.learnt, after.work, after.recent
        self.reason = "not started"
        return before

    def explain(self) -> list[str]:
        """What is known, in sentences, the best method first for each kind of work."""
        lines = []
        for phase, active in self.work:
            for bucket in sorted(self.learnt.costs):
                rated = sorted(self.known.rates(phase, active, bucket).items(), key=lambda item: -item[1])
                told = ", ".join(f"{m} {d}: {rate * 1e3:.1f} tok/s" for (m, d), rate in best_by_method(rated))
                lines.append(f"{phase}, {active} active, context from {bucket * CONTEXT_BUCKET_TOKENS}: {told}")
        return lines

    def work_of(self, phase: str, num_active: int) -> Work:
        key = phase, num_active
        return self.work.get(key) or self.work.setdefault(key, Work(num_active=num_active))

    def due_in(self, method: str, phase: str, num_active: int, bucket: int) -> int:
        """Steps until a method that is not in use is heard; 0 or less: now."""
        prices = self.known.prices(phase, num_active, bucket)
        return self._hearings.due_in(self.work_of(phase, num_active), method, prices)

    def _take_off(self, sequence: Sequence, num_active: int) -> str:
        """The phase of the sequence's next window, remembered until its result is known. Echo is work of its own for a
        single sequence only: several share what it costs to draft, so they do best alike."""
        phase = ECHO if sequence.id in self._echoing and num_active == 1 else sequence.phase
        flights = self._flights.setdefault(sequence.id, deque(maxlen=8))
        flights.append(phase)
        if len(self._flights) > MAX_FLIGHTS:
            self._flights.pop(next(iter(self._flights)))
        return phase

    def _arm(self, sequence_id: int, phase: str, num_active: int, bucket: int) -> Arm:
        """All sequences of one step and one phase get the same choice: they share what it costs to draft."""
        work = self.work_of(phase, num_active)
        if sequence_id in work.round_ids or not work.round_ids:
            work.round_ids = set()
            work.step += 1
            self._decide(work, phase, num_active, bucket)
        work.round_ids.add(sequence_id)
        (self._hearing.discard if work.hearing is None else self._hearing.add)(sequence_id)
        return work.hearing.arm if work.hearing is not None else work.current

    def _decide(self, work: Work, phase: str, num_active: int, bucket: int) -> None:
        if work.hearing is not None:
            if self._hearings.listens_on(work.hearing, work, phase):
                return
            work.heard_at[work.hearing.arm[0]] = work.step
            work.alarmed |= work.hearing.contends(work, self.known, phase, self.settings)
            work.hearing = None
        paid = work.paid_every_steps
        if work.is_dear:
            paid = min(paid, work.step // self.settings.settling)
        interval = max(self.settings.decide_every_steps, paid)
        if work.is_dear and work.behind > self.settings.far_behind_tokens:
            work.alarmed |= work.is_overtaken(self.known, phase)
        if not work.alarmed and work.step - work.decided_at < interval:
            return
        work.alarmed, work.decided_at = False, work.step
        prices = self.known.prices(phase, num_active, bucket)
        work.costs = prices.costs
        if prices.costs:
            paid_ms = self.settings.decision_ms / self.settings.decision_share
            work.paid_every_steps = math.ceil(paid_ms / prices.costs[OFF])
        if not self._keep_best_replayed(work, phase, num_active, prices):
            self._keep_best(work, prices.rates)
        work.expect(prices)
        due = self._hearings.due(work, bucket, prices)
        if due is not None:
            work.hearing = self._hearings.hearing_of(due, work)
            self.reason = f"trying {due[0]} at depth {due[1]}"

    def _keep_best_replayed(self, work: Work, phase: str, num_active: int, prices: Prices) -> bool:
        """Choose by what the choices that come into question would have done with the text that was just written; of a
        single sequence together with the choice for text that repeats itself. False while too little is known."""
        costs, rates = prices.costs, prices.rates
        usual_phase = self._phases_at_echo.get(num_active, phase) if phase == ECHO else phase
        text = self.recent.get((usual_phase, num_active))
        usual = echo = work
        if num_active == 1:
            usual, echo = self.work_of(usual_phase, 1), self.work_of(ECHO, 1)
        current = Policy(usual.current, echo.current)
        kind = (phase == ECHO) if num_active == 1 else None
        if text is None or not text.is_enough(kind) or not {usual.current, echo.current} <= costs.keys():
            return False

        def tokens(method: str, depth: int) -> float:
            if usual_phase == phase:
                return prices.tokens(method, depth)
            return self.known.tokens(method, depth, usual_phase, num_active)

        policies = {current, Policy(OFF, OFF)}
        for arm in in_question(rates, work.current, self.settings.choices_when_dear if work.is_dear else None):
            if num_active > 1 or "+" in arm[0] or text.is_enough(phase != ECHO):
                policies.add(Policy(arm, arm))
            if num_active == 1:
                policies.add(replace(current, echo=arm) if phase == ECHO else replace(current, usual=arm))
        found = text.rates(sorted(policies), costs, tokens)
        best = max(found, key=lambda policy: found[policy])
        saved_ms = text.num_tokens * (1.0 / found[current] - 1.0 / found[best])
        if saved_ms > max(
            self.settings.saved_steps * costs[OFF], self.settings.replayed_margin * text.num_tokens / found[best]
        ):
            current = best
            usual.current, echo.current = best.usual, best.echo
        self._tell(work, found[current], found[Policy(OFF, OFF)])
        return True

    def _keep_best(self, work: Work, rates: dict[Arm, float]) -> None:
        if not rates:
            return
        best = max(rates, key=lambda arm: rates[arm])
        current = rates.get(work.current, 0.0)
        if rates[best] > current * (1.0 + self.settings.margin_of(best, work.current, work.is_dear)):
            work.current = best
        self._tell(work, rates.get(work.current, 0.0), rates.get(OFF))

    def _tell(self, work: Work, rate: float, plain: float | None) -> None:
        gain = rate / plain if plain else 1.0
        self.reason = f"measured ×{gain:.2f} of plain" if work.current != OFF else "plain is fastest here"

    def _alarm(self, phase: str, of: str = "") -> None:
        """The work has changed: decide at once, and hear the others soon; where decisions are dear, only those of whom
        what is in use does not tell. of: the drafter with weights that noticed; empty: the text itself, which says
        nothing of such drafters."""
        for (name, _), work in self.work.items():
            if name != phase:
                continue
            work.alarmed = True
            soon = work.step - self.settings.longest_interval_steps + 4
            for method in self.depth_limits:
                if work.is_dear and work.hears_kin_of(method):
                    if of and method != of and "+" not in method:
                        self.known.acceptance_of(method, phase).follow_kin()
                    continue
                if work.step - work.heard_at.get(method, work.step) > self.settings.shortest_interval_steps:
                    self.known.acceptance_of(method, phase).doubt()
                if method in work.heard_at and not (work.is_dear and method == "ngram"):
                    work.heard_at[method] = min(work.heard_at[method], soon)
