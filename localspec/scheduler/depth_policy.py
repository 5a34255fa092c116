"""What the scheduler asks before each window: which drafter, how deep, and how many rows a step is worth.

Torch-free. Knows no costs; whoever implements it does.
"""

from __future__ import annotations

from typing import Protocol

from localspec.scheduler.sequence import Sequence


class DepthPolicy(Protocol):
    """Chooses method and depth of each decoding sequence. Implemented by the tuner."""

    def choose(self, sequence: Sequence, num_active: int) -> tuple[str, int]:
        """(drafter name, depth) for the next window."""
        ...

    def wants_all(self, sequence: Sequence) -> bool:
        """Whether all drafts of the window that was just chosen are to be verified, whatever they are worth."""
        ...

    def row_budget(self, num_active: int, wanted_rows: int) -> int | None:
        """Rows of a step whose sequences may share them and ask for so many; None: each draft has its row."""
        ...
