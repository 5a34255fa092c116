"""Captured steps and how many of them are kept: each holds memory of the driver, which the memory plan bounds.

What was captured with the drafts of one proposal reads them where that proposal leaves them, and acceptance reads where
its forward pass left logits. So these form a family that is kept and given up together. Knows no kernels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from localspec.core.records import Draft, StepResult
from localspec.runner.runner import VerifyOutput
from localspec.sampling.processors import ProcessorPlan

Output = TypeVar("Output")
StepKey = tuple[int, int]
"""Rows, and the bucket of the host's bound on positions."""
LawKey = tuple[StepKey, tuple[ProcessorPlan, int | None, bool]]
"""And what acceptance does: processors, alternatives at each token, budgets for thinking."""


@dataclass(frozen=True)
class Captured(Generic[Output]):
    """A graph, and where each replay leaves what it finds."""

    graph: torch.cuda.CUDAGraph
    output: Output


@dataclass(frozen=True)
class Staging:
    """device: a tensor that a graph reads (a layout, or masks); host: pinned buffers of the same shape."""

    device: Tensor
    host: tuple[Tensor, ...]


@dataclass
class Family:
    """All that was captured for one way of drafting: the drafts, whole steps, and steps in two parts."""

    proposal: Captured[Draft] | None = None
    verifications: dict[LawKey, tuple[Captured[StepResult], Staging]] = field(default_factory=dict)
    forwards: dict[StepKey, tuple[Captured[VerifyOutput], Staging]] = field(default_factory=dict)
    acceptances: dict[LawKey, tuple[Captured[StepResult], Staging]] = field(default_factory=dict)

    @property
    def num_graphs(self) -> int:
        steps = len(self.verifications) + len(self.forwards) + len(self.acceptances)
        return steps + (self.proposal is not None)

    def give_up_steps(self) -> None:
        """Keep the drafts and the newer half of the steps."""
        for steps in (self.verifications, self.acceptances):
            for key in list(steps)[: (len(steps) + 1) // 2]:
                del steps[key]
        read = {key for key, _ in self.acceptances}
        self.forwards = {key: forward for key, forward in self.forwards.items() if key in read}


class Families:
    """Families by key, those that were used last."""

    def __init__(self, most_graphs: int) -> None:
        self._most_graphs = most_graphs
        self._families: OrderedDict[Hashable, Family] = OrderedDict()

    @property
    def num_graphs(self) -> int:
        return sum(family.num_graphs for family in self._families.values())

    @property
    def num_spare(self) -> int:
        """Graphs that may be captured before others are given up."""
        return self._most_graphs - self.num_graphs

    def find(self, key: Hashable) -> Family | None:
        """The family of a key, which counts as old as before; None if there is none."""
        return self._families.get(key)

    def use(self, key: Hashable) -> Family:
        """The family of a key, an empty one if there is none; it counts as the newest from now on."""
        family = self._families.setdefault(key, Family())
        self._families.move_to_end(key)
        return family

    def make_room(self, count: int, needed: Family) -> None:
        """Give up the oldest families, then older steps of `needed`, until `count` more graphs may be captured.

        Some graph always stays: PyTorch gives the memory that all share away with the last one. No replay may be under
        way where `has_room` says no.
        """
        while not self.has_room(count) and next(iter(self._families.values())) is not needed:
            self._families.popitem(last=False)
        if not self.has_room(count):
            needed.give_up_steps()

    def has_room(self, count: int) -> bool:
        """For `count` more graphs."""
        return count <= self.num_spare
