"""Drafters, one file each, found by name. This file holds the Protocol and the finding.

A drafter guesses; it never decides. It reads the device state of the sequences and what it asked of the target's
hiddens, and may keep planes of its own in the same pages. Siblings do not know each other.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from localspec.core.cache_spec import CacheSpec
from localspec.core.records import Draft, Forward, HiddenNeeds, Rows
from localspec.core.state import Cache, SequenceState
from localspec.formats import Checkpoint
from localspec.kernels.ops import Ops
from localspec.models import Model
from localspec.storage.ngram_runs import NgramTable

MAX_PASS_ROWS = 16
"""Most rows of a pass over what waits: the kernels that read each weight once end there, as verify steps do."""
FEWEST_PASS_ROWS = 4
"""So that a drafter which is behind catches up within a few steps."""


def pass_rows(window_rows: Iterable[int]) -> int:
    """Rows, a power of two, of a pass that keeps up with steps of these windows: fewer take less time.

    A drafter that is behind, having paused or followed wider windows, needs a step or two more.
    """
    wanted = max(FEWEST_PASS_ROWS, sum(window_rows))
    return min(1 << (wanted - 1).bit_length(), MAX_PASS_ROWS)


@dataclass(frozen=True)
class Depths:
    """How many tokens each slot may be given. depths: [S] int64, device (0: slot is not drafted for).

    max_depth: host integer at or above every depth; the Draft has this many columns.
    slots: host list of slots in question. length_bounds: host upper bounds of their lengths, same order.
    sampled: whether some of them draw with a temperature; if the host knows that none does, drafters spare the noise.
    only_sure: another drafter stands ready for the slots that get nothing, so speak only where it is likely right.
    corpus_bound: host bound of the lengths of the slots' corpora, 0 where none has one; None: not known.
    pass_rows: rows that a drafter may run of those that wait; see `pass_rows`.
    """

    depths: Tensor
    max_depth: int
    slots: tuple[int, ...]
    length_bounds: tuple[int, ...]
    sampled: bool = True
    only_sure: bool = False
    corpus_bound: int | None = None
    pass_rows: int = MAX_PASS_ROWS


class Drafter(Protocol):
    """One way of guessing. Attributes are fixed at construction.

    `origins` are the names under which its tokens are shown and counted. `max_depth` 0 is `off`.
    """

    name: str
    origins: tuple[str, ...]
    max_depth: int
    needs: HiddenNeeds
    cache_spec: CacheSpec

    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """Guess what follows position length-1 of each slot. Reads state, changes only its own cache and buffers."""
        ...

    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        """See rows that the target ran, after acceptance was applied to `state`.

        A row at position p of slot s is committed, and its next token known, exactly if p + 1 < state.lengths[s];
        the others must leave nothing that a later read would see.
        """
        ...

    def forget(self, slot: int) -> None:
        """The slot was given to another sequence."""
        ...


@runtime_checkable
class Extender(Protocol):
    """A drafter that can go on behind another's words."""

    def extend(self, draft: Draft, depths: Depths, state: SequenceState) -> Draft:
        """A Draft of depths.max_depth columns that begins with `draft`, which is at most as wide."""
        ...


@runtime_checkable
class Waiter(Protocol):
    """A drafter that runs rows of its own later than the target does. `loses_rows`: it keeps only the last ones."""

    loses_rows: bool

    def catch_up(self, depths: Depths, state: SequenceState, cache: Cache) -> object:
        """One pass over rows that wait, the oldest of the slots with a depth."""
        ...


@dataclass
class NgramCounts:
    """What a table was worth; counted by the drafter, read from any thread."""

    drafts: int = 0
    """Verified ones."""
    accepted_tokens: int = 0
    silent: int = 0
    """Answers that were not proposed, because the table did not pay lately."""


@dataclass(frozen=True)
class NgramTableHandle:
    """An opened n-gram table of the target's tokenizer, and the name under which it is shown."""

    name: str
    table: NgramTable
    counts: NgramCounts = field(default_factory=NgramCounts)


@dataclass(frozen=True)
class DrafterSetup:
    """What a drafter module's `build` receives. `checkpoint` and `folder` are None for drafters without weights.

    `target_folder` lets a drafter with a vocabulary of its own compare the two tokenizers. `ngram_tables` are closed
    by whoever opened them.
    """

    ops: Ops
    model: Model
    num_slots: int
    context_limit_tokens: int
    checkpoint: Checkpoint | None = None
    folder: Path | None = None
    target_folder: Path | None = None
    ngram_tables: tuple[NgramTableHandle, ...] = ()


class DrafterModule(Protocol):
    """What a file of this package offers.

    `build` raises ValueError if the checkpoint does not fit. `needs_weights` tells whether it wants a checkpoint;
    `tiny` makes a small random instance for the conformance tests.
    """

    needs_weights: bool

    def build(self, setup: DrafterSetup) -> Drafter: ...

    def tiny(self, setup: DrafterSetup) -> Drafter: ...


def drafter_names() -> tuple[str, ...]:
    """Names of all drafters, from the files of this package."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def drafter_module(name: str) -> DrafterModule:
    """The module of a drafter. Raises ValueError naming what exists."""
    if name not in drafter_names():
        raise ValueError(f"drafter {name!r} does not exist; there are {', '.join(drafter_names())}")
    module: DrafterModule = importlib.import_module(f"{__name__}.{name}")
    return module
