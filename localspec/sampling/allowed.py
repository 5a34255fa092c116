"""Packed masks of grammars as the rows of a verify step: put together on the host, unpacked where the logits are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from localspec.core.records import VerifyPlan
from localspec.sampling.grammar import RequestGrammar


def packed_rows(
    plan: VerifyPlan,
    drafts: Sequence[Sequence[int]],
    grammars: Mapping[int, RequestGrammar],
    num_rows: int,
    vocab_size: int,
) -> Tensor:
    """[num_rows, ceil(V / 8)] uint8 on the host; rows of slots without a grammar, and padding rows, allow all.

    drafts: [S][K] token ids, -1 where there is none; grammars by slot. Rows lie as the plan lays them out.
    """
    width = -(-vocab_size // 8)
    buffer = bytearray(b"\xff" * (num_rows * width))
    row = 0
    for entry in plan.slots:
        grammar = grammars.get(entry.slot)
        if grammar is not None:
            window = drafts[entry.slot][: entry.num_drafts]
            for index, mask in enumerate(grammar.window_masks(window)):
                if mask is not None:
                    start = (row + index) * width
                    buffer[start : start + width] = mask[:width].ljust(width, b"\0")
        row += 1 + entry.num_drafts
    return torch.frombuffer(buffer, dtype=torch.uint8).view(num_rows, width)


def unpacked(packed: Tensor, vocab_size: int) -> Tensor:
    """[R, ceil(V / 8)] uint8 -> [R, V] bool on the same device; lowest bit first."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size].to(torch.bool)
