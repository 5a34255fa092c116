"""A small engine for the tests of drafters: a random target, its caches, and steps in the order that the engine has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from localspec.api.types import Sampling
from localspec.core.records import (
    MAX_SLOTS,
    PAGE_TOKENS,
    Draft,
    HiddenNeeds,
    Request,
    Rows,
    StepResult,
)
from localspec.core.state import Cache
from localspec.drafters import Depths, Drafter, DrafterSetup, drafter_module
from localspec.kernels.backends.reference import ReferenceOps
from localspec.models import Model
from localspec.runner.slots import fill_slot, make_state, release_slot
from localspec.sampling.accept import accept
from tests.helpers.models import load_model, make_cache, make_rows, random_checkpoint, reference_ops
from tests.sampling.tables import verify_rows

CONTEXT_TOKENS = 512
PAGES_PER_SLOT = -(-CONTEXT_TOKENS // PAGE_TOKENS) + 1


def random_target(model_type: str, folder: Path, seed: int = 0) -> Model:
    return load_model(random_checkpoint(model_type, seed, folder))


@functools.cache
def _operations(num_threads: int) -> ReferenceOps:
    """They probe the machine when they are made, which takes longer than a step of a tiny drafter."""
    del num_threads
    return reference_ops()


def setup_for(model: Model, folder: Path | None = None) -> DrafterSetup:
    return DrafterSetup(_operations(torch.get_num_threads()), model, MAX_SLOTS, CONTEXT_TOKENS, folder=folder)


def tiny_drafter(name: str, model: Model) -> Drafter:
    return drafter_module(name).tiny(setup_for(model))


class Session:
    """Sequences in up to four slots over one target and one drafter."""

    def __init__(self, model: Model, drafter: Drafter, device: str = "cpu", row_multiple: int = 1) -> None:
        """row_multiple: rows of a prompt chunk are padded to a multiple of it."""
        self.model, self.drafter, self.device, self.row_multiple = model, drafter, device, row_multiple
        self.state = make_state(CONTEXT_TOKENS, model.vocab_size, torch.device(device))
        num_pages = 1 + MAX_SLOTS * PAGES_PER_SLOT
        self.target_cache = cache_on(make_cache(model.cache_spec, num_pages, MAX_SLOTS), device)
        self.cache: Cache = cache_on(make_cache(drafter.cache_spec, num_pages, MAX_SLOTS), device)
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.pages = order.to(device, torch.int32).view(MAX_SLOTS, PAGES_PER_SLOT)
        self.active: list[int] = []

    def start(
        self,
        slot: int,
        prompt: Sequence[int],
        sampling: Sampling = Sampling(),  # noqa: B008
        max_tokens: int = 400,
        chunk: int = 64,
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        """Give the slot to a new sequence and read its prompt."""
        if slot in self.active:
            self.drafter.forget(slot)
            release_slot(self.state, slot)
        request = Request("r", tuple(prompt), sampling, sampling.seed or 0, max_tokens, stop_ids)
        fill_slot(self.state, slot, request)
        self.state.block_tables[slot, :PAGES_PER_SLOT] = self.pages[slot]
        for states in self.target_cache.states.values():
            states[slot].zero_()
        for begin in range(0, len(prompt) - 1, chunk):
            part = list(prompt[begin : min(begin + chunk, len(prompt) - 1)])
            before = begin % 3 if self.row_multiple == 1 else 0
            padding = (before, 1 if self.row_multiple == 1 else -len(part) % self.row_multiple)
            rows = on(
                make_rows("prefill", {slot: (begin, part)}, self.state.block_tables, padding=padding), self.device
            )
            forward = self.model.forward(rows, self.target_cache, self.drafter.needs)
            self.state.pending_rows[slot] = 0
            self.drafter.observe(rows, forward, self.state, self.cache)
        self.active = sorted({*self.active, slot})

    def depths(self, by_slot: Sequence[int], max_depth: int | None = None) -> Depths:
        by_slot = list(by_slot) + [0] * (MAX_SLOTS - len(by_slot))
        slots = tuple(self.active)
        bounds = tuple(int(self.state.lengths[slot]) for slot in slots)
        return Depths(
            torch.tensor(by_slot, device=self.device), max(by_slot) if max_depth is None else max_depth, slots, bounds
        )

    def propose(self, by_slot: Sequence[int], max_depth: int | None = None) -> Draft:
        return self.drafter.propose(self.depths(by_slot, max_depth), self.state, self.cache)

    def verify(self, draft: Draft, padding: int = 0) -> StepResult:
        """Run the window of every active slot with the drafts that it has, accept, and show the drafter."""
        counts = draft.num_drafts.tolist()
        windows = [1 + count if slot in self.active else 0 for slot, count in enumerate(counts)]
        rows = on(verify_rows(self.state, draft, windows, sum(windows) + padding), self.device)
        forward = self.model.forward(rows, self.target_cache, self.drafter.needs)
        logits = self.model.logits(forward.hidden)
        result = accept(logits, rows, draft, self.state, logprobs=None)
        self.drafter.observe(rows, forward, self.state, self.cache)
        return result

    def step(self, by_slot: Sequence[int]) -> StepResult:
        return self.verify(self.propose(by_slot))

    def answer(self, slot: int) -> list[int]:
        return self.state.history[slot, int(self.state.prompt_lengths[slot]) : int(self.state.lengths[slot])].tolist()


def on(rows: Rows, device: str) -> Rows:
    """The rows with every tensor on a device."""
    fields = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
    return Rows(**{name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in fields.items()})


def cache_on(cache: Cache, device: str) -> Cache:
    return Cache(
        {name: plane.to(device) for name, plane in cache.planes.items()},
        {name: state.to(device) for name, state in cache.states.items()},
    )


def fixed_draft(rows: Sequence[Sequence[int]], width: int) -> Draft:
    """Drafts given by the test, one list for each of the four slots."""
    padded = [list(row) + [-1] * (width - len(row)) for row in rows]
    padded += [[-1] * width] * (MAX_SLOTS - len(padded))
    ids = torch.tensor(padded, dtype=torch.int64).reshape(MAX_SLOTS, width)
    return Draft(ids, torch.zeros_like(ids), (ids >= 0).sum(dim=1), ("given",))


def layer_outputs_of(model: Model, tokens: Sequence[int], layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Outputs [T, D] of the target's layers over `tokens`, by one pass of its own."""
    num_pages = 1 + PAGES_PER_SLOT
    tables = torch.arange(1, num_pages, dtype=torch.int32).view(1, -1)
    rows = make_rows("prefill", {0: (0, list(tokens))}, tables)
    forward = model.forward(rows, make_cache(model.cache_spec, num_pages, 1), HiddenNeeds(True, tuple(layers)))
    return forward.layer_outputs
