"""Answers of a target on disk, and the batches that a training run reads from them.

A store is a folder: `tokens.bin` (int32, prompts with their answers one behind the other) and `index.bin` (int64, four
numbers a sequence). It is appended to and mapped, so memory does not grow with it. What a batch holds is a function of
the seed and the step alone, so that a resumed run reads on where it stopped. No text, no models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TOKENS_FILE, INDEX_FILE = "tokens.bin", "index.bin"
LENGTH_MULTIPLE = 32
SORT_WINDOW = 4096
"""Sequences that are sorted by length together before they are cut into batches."""


@dataclass(frozen=True)
class Answer:
    """One sequence. prompt_tokens: where the answer begins; greedy: written without a temperature."""

    token_ids: Sequence[int]
    prompt_tokens: int
    greedy: bool = True
    held_out: bool = False
    kind: int = 0


@dataclass(frozen=True)
class Batch:
    """tokens: [B, T] int64, zeros behind each end; answer_from, ends: [B] int64 first answer token and length.

    All on the training device; `label_rows`: [N] int64 places b * T + j of the tokens that are to be guessed.
    """

    tokens: Tensor
    answer_from: Tensor
    ends: Tensor
    label_rows: Tensor

    @property
    def labels(self) -> Tensor:
        """[N] int64 token ids."""
        return self.tokens.flatten()[self.label_rows]


class AnswerStore:
    """Sequences of one target. Entries of the index: offset, length, prompt tokens, flags."""

    def __init__(self, folder: Path) -> None:
        """Opens or begins a store. Raises ValueError for a damaged one."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for name in (TOKENS_FILE, INDEX_FILE):
            (folder / name).touch()
        self._load()

    def _load(self) -> None:
        index = np.fromfile(self._folder / INDEX_FILE, dtype=np.int64)
        size = (self._folder / TOKENS_FILE).stat().st_size // 4
        # A kill while writing leaves at most a torn entry at the end of either file.
        self.index: NDArray[np.int64] = index[: len(index) // 4 * 4].reshape(-1, 4)
        offsets, lengths, prompts = self.index[:, 0], self.index[:, 1], self.index[:, 2]
        whole = (offsets >= 0) & (offsets <= size) & (lengths > 0) & (lengths <= size - offsets)
        if not (whole & (prompts >= 0) & (prompts <= lengths)).all():
            raise ValueError(f"{self._folder} is damaged; delete it and let the target write its answers again")
        empty = np.zeros(0, dtype=np.int32)
        self._tokens: NDArray[np.int32] = (
            np.memmap(self._folder / TOKENS_FILE, dtype=np.int32, mode="r", shape=(size,)) if size else empty
        )

    def __len__(self) -> int:
        return len(self.index)

    def append(self, answers: Sequence[Answer]) -> None:
        """Add sequences; tokens are written before the index that names them."""
        # What is torn would shift everything behind it.
        position = (self._folder / TOKENS_FILE).stat().st_size // 4
        os.truncate(self._folder / TOKENS_FILE, 4 * position)
        os.truncate(self._folder / INDEX_FILE, self.index.nbytes)
        rows: list[tuple[int, int, int, int]] = []
        with (self._folder / TOKENS_FILE).open("ab") as file:
            for answer in answers:
                file.write(np.asarray(answer.token_ids, dtype=np.int32).tobytes())
                flags = int(answer.greedy) + 2 * int(answer.held_out) + 4 * answer.kind
                rows.append((position, len(answer.token_ids), answer.prompt_tokens, flags))
                position += len(answer.token_ids)
        with (self._folder / INDEX_FILE).open("ab") as file:
            file.write(np.asarray(rows, dtype=np.int64).tobytes())
        self._load()

    def tokens(self, entry: int) -> NDArray[np.int32]:
        """The whole sequence."""
        offset, length = self.index[entry, :2]
        return self._tokens[offset : offset + length]

    def select(self, held_out: bool, greedy: bool | None = None, kind: int | None = None) -> NDArray[np.int64]:
        """Entries of one split that have at least two answer tokens."""
        flags, long_enough = self.index[:, 3], self.index[:, 1] - self.index[:, 2] >= 2
        chosen = long_enough & ((flags >> 1 & 1).astype(bool) == held_out)
        if greedy is not None:
            chosen &= (flags & 1).astype(bool) == greedy
        if kind is not None:
            chosen &= flags >> 2 == kind
        return np.flatnonzero(chosen)

    def answer_tokens(self, entries: NDArray[np.int64]) -> int:
        """Answer tokens in all."""
        return int((self.index[entries, 1] - self.index[entries, 2]).sum())

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """[V] occurrences of each token in the answers that are trained on."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for entry in self.select(held_out=False):
            counts += np.bincount(self.tokens(entry)[self.index[entry, 2] :], minlength=vocab_size)[:vocab_size]
        return counts

    def batch(self, entries: Sequence[int] | NDArray[np.int64], max_tokens: int, device: torch.device) -> Batch:
        """Sequences side by side, each cut at max_tokens."""
        ends = np.minimum(self.index[entries, 1], max_tokens)
        starts = np.minimum(self.index[entries, 2], ends)
        width = -(-int(ends.max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        tokens = np.zeros((len(entries), width), dtype=np.int64)
        for row, entry in enumerate(entries):
            tokens[row, : ends[row]] = self.tokens(entry)[: ends[row]]
        columns = np.arange(width)
        # The answer's first token comes with the prompt's last pass and is never guessed.
        labels = (columns > starts[:, None]) & (columns < ends[:, None])
        arrays = (tokens, starts, ends, np.flatnonzero(labels))
        return Batch(*(torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in arrays))


@dataclass(frozen=True)
class BatchPlan:
    """How batches are cut. tokens_per_batch: padded tokens at most (one sequence may exceed it alone)."""

    tokens_per_batch: int
    max_tokens: int
    seed: int


def epoch_batches(store: AnswerStore, entries: NDArray[np.int64], plan: BatchPlan, epoch: int) -> list[list[int]]:
    """The entries of each batch of an epoch, in the order in which they are read."""
    generator = np.random.default_rng((plan.seed, epoch))
    order = entries[generator.permutation(len(entries))]
    batches: list[list[int]] = []
    for begin in range(0, len(order), SORT_WINDOW):
        window = order[begin : begin + SORT_WINDOW]
        lengths = np.minimum(store.index[window, 1], plan.max_tokens)
        window = window[np.argsort(-lengths, kind="stable")]
        batches += _cut(store, window, plan)
    return [batches[place] for place in generator.permutation(len(batches))]


def _cut(store: AnswerStore, window: NDArray[np.int64], plan: BatchPlan) -> Iterator[list[int]]:
    """Longest first, so that the first of a batch gives its width."""
    batch: list[int] = []
    width = 0
    for entry in window:
        if batch and (len(batch) + 1) * width > plan.tokens_per_batch:
            yield batch
            batch = []
        if not batch:
            length = min(int(store.index[entry, 1]), plan.max_tokens)
            width = -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        batch.append(int(entry))
    if batch:
        yield batch
