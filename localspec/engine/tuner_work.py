"""What the tuner goes by: its settings, and where it stands in one kind of work. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from localspec.engine.knowledge import COPYING, Knowledge, Learnt, Prices
from localspec.engine.step_costs import OFF, Arm
from localspec.engine.text_replay import RecentText

CHEAP_EVERY_STEPS = 12
"""Decisions that may be made so often are cheap."""


@dataclass(frozen=True)
class TunerSettings:
    """Counts are steps. A challenger must win by `margin`. A hearing lasts until the method spoke in `hearing_windows`,
    at most `longest_hearing_steps`; hearings of a method may cost `hearing_share` of the time."""

    margin: float = 0.015
    other_margin: float = 0.04
    """Where decisions are dear, of another drafter, of which less is known than of what is in use."""
    copies_margin: float = 0.5
    """Of copies alone over another method, where there is too little text to go through: they come in long runs, so a
    few windows tell little."""
    replayed_margin: float = 0.005
    """Of rates over the same text."""
    saved_steps: float = 2.0
    """Plain steps that a challenger must have saved over that text: the less there is of it, the more must speak."""
    decide_every_steps: int = 4
    decision_ms: float = 0.4
    """Of the host, which may take no more than this share of the time: a small model's steps take a millisecond."""
    decision_share: float = 0.01
    choices_when_dear: int = 5
    """That are gone through the text with where decisions are dear: each takes the host a microsecond a token."""
    far_behind_tokens: float = 3.0
    """That the last windows brought less than was expected of what is in use: where decisions are dear, and so seldom,
    it is then compared with the next best."""
    settling: int = 2
    """While so many times a decision's interval is all that has passed, dear ones may cost more than their share."""
    hearing_windows: int = 1
    longest_hearing_steps: int = 6
    usual_hearing_steps: int = 3
    plain_steps: int = 2
    hearing_share: float = 0.005
    shortest_interval_steps: int = 16
    longest_interval_steps: int = 64
    hopeless_interval_steps: int = 1024
    hopes: float = 1.0
    """Standard deviations by which a drafter may be better than expected: one that even then is slower than its kin in
    use is hardly ever heard."""
    kin_windows: int = 6
    """Of a hearing of another."""
    kin_interval_steps: int = 8
    deepen_every_steps: int = 12
    contending: float = 0.9
    """Where decisions are dear, what was heard is decided about at once if it has so much of the rate of what is in
    use."""
    suspicion: float = 0.15
    """From here on a hearing goes on: the method did better than it should have."""

    def margin_of(self, arm: Arm, current: Arm, is_dear: bool) -> float:
        """Share by which a choice must win over what is in use. Cheap decisions soon mend a wrong one."""
        if arm == OFF or arm[0] == current[0] or not is_dear:
            return self.margin
        return self.copies_margin if arm[0] in COPYING and current[0] not in COPYING else self.other_margin


@dataclass
class Hearing:
    """A method that is listened to at some depth. `left` steps at most, `wanted` windows in which it speaks."""

    arm: Arm
    left: int
    wanted: int

    def contends(self, work: Work, known: Knowledge, phase: str, settings: TunerSettings) -> bool:
        """Whether what was heard is to be decided about at once: where a decision costs next to nothing always, else if
        it comes near the rate of what is in use."""
        arms = self.arm, work.current
        if not work.is_dear or not set(arms) <= work.costs.keys():
            return True
        rate, own = (known.tokens(*arm, phase, work.num_active) / work.costs[arm] for arm in arms)
        return rate > settings.contending * own


@dataclass
class Work:
    """State for one phase and number of active sequences. `heard_at`: step at which a method last spoke."""

    current: Arm = OFF
    hearing: Hearing | None = None
    step: int = 0
    decided_at: int = -100
    paid_every_steps: int = 0
    """A decision in so many steps costs the host little enough."""
    deepened_at: int = 0
    alarmed: bool = False
    heard_at: dict[str, int] = field(default_factory=dict)
    round_ids: set[int] = field(default_factory=set)
    num_active: int = 1
    expected: float = 0.0
    """Tokens of a window of the present choice, as of the last decision."""
    behind: float = 0.0
    """Tokens that its last windows brought less."""
    rival: float = 0.0
    """Highest rate of another method then."""
    costs: dict[Arm, float] = field(default_factory=dict)
    """Milliseconds of a step by choice, as of the last decision."""

    @property
    def in_use(self) -> str:
        """The method that drafts, behind copies if it is a chain."""
        return self.current[0].split("+")[-1]

    def hears_kin_of(self, method: str) -> bool:
        """Whether a drafter with weights is in use, and this is another."""
        in_use = self.in_use
        return in_use not in COPYING and in_use != OFF[0] and method not in COPYING

    def expect(self, prices: Prices) -> None:
        """A decision was made by these prices."""
        self.behind = 0.0
        if self.current in prices.costs:
            self.expected = prices.tokens(*self.current)
            others = (prices.rates[arm] for method, arm in prices.best.items() if method.split("+")[-1] != self.in_use)
            self.rival = max(others, default=0.0)

    def is_overtaken(self, known: Knowledge, phase: str) -> bool:
        """Whether what is in use, which lags, is now expected to do worse than another method was."""
        if self.current not in self.costs:
            return True
        self.behind = 0.0
        self.expected = known.tokens(*self.current, phase, self.num_active)
        return self.expected / self.costs[self.current] < self.rival

    @property
    def is_dear(self) -> bool:
        """Whether a decision takes the host long beside a step."""
        return self.paid_every_steps > CHEAP_EVERY_STEPS


@dataclass(frozen=True)
class Kept:
    """What a tuner learnt; the fields are those of `Tuner`."""

    learnt: Learnt
    work: dict[tuple[str, int], Work]
    recent: dict[tuple[str, int], RecentText]


def best_by_method(rated: Sequence[tuple[Arm, float]]) -> list[tuple[Arm, float]]:
    """The first of each method."""
    seen: dict[str, tuple[Arm, float]] = {}
    for arm, rate in rated:
        seen.setdefault(arm[0], (arm, rate))
    return list(seen.values())
