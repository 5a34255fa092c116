"""Records of what an engine knows about drafting: its present choices, the candidates, how fresh the figures are.

Frozen plain values, so that they travel over the wire unchanged. Knows nothing of how a choice is made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """One drafter at the depth that runs, or where it is expected to do best; depth 0 is plain decoding.

    `tok_per_s` is expected of one sequence: `tokens_per_step` over `step_ms`. `measured_steps` counts the steps that
    ran at exactly this depth; 0 means that the time is told from neighbouring depths. `steps_ago` counts the engine's
    steps since this drafter was last measured at any depth; None where it was not since the engine started.
    """

    drafter: str
    depth: int
    tok_per_s: float
    tokens_per_step: float = 1.0
    step_ms: float = 0.0
    measured_steps: int = 0
    steps_ago: int | None = None


@dataclass(frozen=True)
class TunerChoice:
    """What is chosen for one kind of text at one number of active sequences, for contexts of a certain length.

    `candidates` hold one entry a drafter, the fastest first. `decisions` counts the windows that were decided since
    the engine started; `next_trial` says in words what is tried next.
    """

    phase: str
    active: int
    context_from_tokens: int
    drafter: str
    depth: int
    reason: str
    decisions: int = 0
    next_trial: str = ""
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class TunerReport:
    """The choice now, and what stands behind it. `by_hand`: the user chose, so nothing is weighed meanwhile."""

    drafter: str = "off"
    depth: int = 0
    reason: str = ""
    by_hand: bool = False
    choices: tuple[TunerChoice, ...] = ()
