"""Device-resident state of the running sequences, and the cache buffers that models and drafters read and write.

Only `runner` creates these; `sampling.accept` and the runner's admission change them in place. The host keeps upper
bounds of lengths; the true ones are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SamplingTable:
    """Per-slot sampling parameters, as the processors read them.

    temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty: [S] float32;
    top_k: [S] int64 (0: off); seeds: [S] int64; bias: [S, V] float32 (zero where unused) or None until first used;
    prompt_counts, output_counts: [S, V] int32 occurrences of each token, for penalties (repetition counts the
    prompt too, presence and frequency only the output).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    seeds: Tensor
    bias: Tensor
    prompt_counts: Tensor
    output_counts: Tensor


@dataclass(frozen=True)
class SequenceState:
    """One row for each slot.

    history: [S, C] int64 token ids (C = context limit + MAX_ROWS + 1), prompt and answer;
    lengths: [S] int64 committed tokens; positions 0 .. length-2 are in the cache, the last token is fed next;
    prompt_lengths: [S] int64; remaining: [S] int64 tokens that may still be emitted; frozen: [S] bool;
    stop_ids: [S, 16] int64, -1 beyond; pending_rows: [S] int64, see Rows; block_tables: [S, P] int32;
    corpus: [S, C2] int64 and corpus_lengths [S] int64: extra text that n-gram drafters may search (the request's
    `prediction`), never forwarded.
    """

    history: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    remaining: Tensor
    frozen: Tensor
    stop_ids: Tensor
    pending_rows: Tensor
    block_tables: Tensor
    corpus: Tensor
    corpus_lengths: Tensor
    sampling: SamplingTable


class ColdTables(Protocol):
    """Pages that are not on the device all the time."""

    def tables(self, plane: str, block_tables: Tensor) -> Tensor:
        """Bring those of a layer, named by its plane of keys, near; returns the tables [S, P] int32 that find them."""
        ...


@dataclass(frozen=True)
class Cache:
    """Buffers behind one CacheSpec.

    planes: name -> [num_pages, PAGE_TOKENS, *shape]; states: name -> [S, *shape]. Page 0 is never given to a
    sequence: rows that must not be kept write there. cold: set for a forward pass where some pages lie elsewhere.
    """

    planes: dict[str, Tensor]
    states: dict[str, Tensor]
    cold: ColdTables | None = None
