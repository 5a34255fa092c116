"""What training reads of a target's answers, kept on the training device: tokens and hiddens, captured once.

Several epochs, and several drafters of one target, then read what one pass of the target gave. Takes
`bytes_a_token` for every token of the store; whoever has less memory lets the target read each batch anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localspec.training.answers import LENGTH_MULTIPLE, AnswerStore, Batch, BatchPlan, epoch_batches
from localspec.training.target import Hiddens, Target

ROOM_SHARE = 0.7
"""Of a card's free memory, that hiddens may take."""
NO_TOKENS = "a store without sequences has no hiddens to keep"


class KeptHiddens:
    """Of every sequence of a store, up to `max_tokens` of each."""

    def __init__(self, target: Target, store: AnswerStore, layer_outputs: tuple[int, ...], plan: BatchPlan) -> None:
        """Reads the whole store in batches of the plan. Raises ValueError for an empty store."""
        if not len(store):
            raise ValueError(NO_TOKENS)
        self.layer_outputs, self._width, self._device = layer_outputs, target.hidden_size, target.device
        lengths = np.minimum(store.index[:, 1], plan.max_tokens)
        places = np.cumsum(lengths) - lengths
        self._starts, self._lengths = self._on_device(places), self._on_device(lengths)
        self._host_lengths, self._host_answers = lengths, np.minimum(store.index[:, 2], lengths)
        self._answers = self._on_device(self._host_answers)
        total = int(lengths.sum())
        columns = (len(layer_outputs) + 1) * target.hidden_size
        self._tokens = torch.zeros(total, device=target.device, dtype=torch.int64)
        # One row more, for what stands behind an end.
        self._values = torch.zeros(total + 1, columns, device=target.device, dtype=target.dtype)
        self._nowhere = total
        for entries in epoch_batches(store, np.arange(len(store)), plan, 0):
            batch = store.batch(entries, plan.max_tokens, target.device)
            hiddens = target.hiddens(batch.tokens, layer_outputs)
            rows = self._rows(self._on_device(np.asarray(entries)), batch.tokens.shape[1])
            inside = rows != self._nowhere
            self._tokens[rows[inside]] = batch.tokens[inside]
            self._values[rows[inside]] = torch.cat([hiddens.taps, hiddens.final], dim=-1)[inside]

    @staticmethod
    def bytes_a_token(target: Target, layer_outputs: tuple[int, ...]) -> int:
        """Of device memory."""
        return (len(layer_outputs) + 1) * target.hidden_size * target.dtype.itemsize + 8

    def _on_device(self, values: NDArray[np.int64]) -> Tensor:
        found = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
        return found.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else found

    def _rows(self, entries: Tensor, width: int) -> Tensor:
        """[B, T] int64 places of the sequences' tokens, `_nowhere` behind each end."""
        columns = torch.arange(width, device=self._device)
        rows = self._starts[entries][:, None] + columns
        return torch.where(columns < self._lengths[entries][:, None], rows, self._nowhere)

    def batch(self, entries: Sequence[int], layer_outputs: tuple[int, ...]) -> tuple[Batch, Hiddens]:
        """What `AnswerStore.batch` and `Target.hiddens` give, zeros behind each end.

        Raises ValueError for layers that are not kept.
        """
        missing = set(layer_outputs) - set(self.layer_outputs)
        if missing:
            raise ValueError(f"the outputs of the layers {sorted(missing)} are not kept, only {self.layer_outputs}")
        width = -(-int(self._host_lengths[np.asarray(entries)].max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        chosen = self._on_device(np.asarray(entries))
        rows = self._rows(chosen, width)
        tokens = self._tokens[rows.clamp(max=self._nowhere - 1)] * (rows != self._nowhere)
        found = self._values[rows]
        starts, ends = self._answers[chosen], self._lengths[chosen]
        size = self._width
        places = [self.layer_outputs.index(each) for each in layer_outputs]
        whole = places == list(range(len(self.layer_outputs)))
        taps = (
            found[..., : len(places) * size]
            if whole
            else torch.cat([found[..., place * size : (place + 1) * size] for place in places], dim=-1)
            if places
            else found[..., :0]
        )
        # Told on the host, which then never waits for the device.
        columns, host = np.arange(width), np.asarray(entries)
        labels = (columns > self._host_answers[host, None]) & (columns < self._host_lengths[host, None])
        label_rows = self._on_device(np.flatnonzero(labels))
        return Batch(tokens, starts, ends, label_rows), Hiddens(taps, found[..., -size:])


def keep_what_fits(
    target: Target, store: AnswerStore, layer_outputs: tuple[int, ...], plan: BatchPlan
) -> KeptHiddens | None:
    """The hiddens of a store on a card that has room for them; None on a CPU and where they are too many."""
    if target.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    tokens = int(np.minimum(store.index[:, 1], plan.max_tokens).sum())
    free_bytes, _ = torch.cuda.mem_get_info(target.device)
    if not tokens or tokens * KeptHiddens.bytes_a_token(target, layer_outputs) > ROOM_SHARE * free_bytes:
        return None
    return KeptHiddens(target, store, layer_outputs, plan)
