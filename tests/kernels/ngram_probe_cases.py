"""Texts of four slots and a small device table that knows much about their ends: for the interpreter and for cards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.kernels.ngram_probe import (
    BUCKET_RECORDS,
    FIRST_TOKEN_BYTE,
    RECORD_BYTES,
    RECORD_WORDS,
    DraftRules,
    Hashing,
    NgramProbe,
    mixed,
)

SLOTS, CONTEXT, VOCABULARY, BUCKETS, TAIL = 4, 40, 5000, 64, 16
ORDERS, TAGS, TABLES = (3, 8), (12, 16), 3


@dataclass(frozen=True)
class Case:
    probe: NgramProbe
    history: Tensor
    lengths: Tensor
    depths: Tensor


def make_case(seed: int, device: torch.device) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    history, lengths = draw(0, VOCABULARY, SLOTS, CONTEXT), draw(0, CONTEXT + 1, SLOTS)
    # One that is long enough for every tag, one that is shorter than the longer order.
    lengths[0], lengths[1] = CONTEXT, 5
    factors = (int(draw(-(1 << 62), 1 << 62, 1)) | 1, int(draw(-(1 << 62), 1 << 62, 1)) | 1)
    reaches = [range(tokens) for tokens in TAGS] + [range(1, order) for order in ORDERS]
    weights = torch.stack(
        [draw(-(1 << 62), 1 << 62, TAIL) * torch.tensor([int(at in reach) for at in range(TAIL)]) for reach in reaches],
        dim=1,
    )
    hashing = Hashing(weights.to(device), torch.tensor(ORDERS, device=device), TAGS, factors, 977 << 40 | 1)
    speaks = (draw(0, 4, TABLES, 3) > 0).to(torch.int64)
    lengths_allowed = torch.tensor([[2, 8, 14], [4, 8, 14]], device=device)
    rules = DraftRules(lengths_allowed, speaks.to(device), 51, 127, VOCABULARY)
    words = torch.zeros(BUCKETS * BUCKET_RECORDS, RECORD_WORDS, dtype=torch.int64)
    for slot in range(SLOTS):
        for index, order in enumerate(ORDERS):
            if lengths[slot] >= order:
                _fill(words, hashing, index, history[slot, : lengths[slot]], generator)
    probe = NgramProbe(words.to(device), hashing, rules)
    depths = torch.tensor([14, 14, int(draw(0, 2, 1)) * 9, 7])
    return Case(probe, history.to(device), lengths.to(device), depths.to(device))


def _fill(words: Tensor, hashing: Hashing, index: int, text: Tensor, generator: torch.Generator) -> None:
    """A bucket for the end of a text: records of every agreement, some alike, some torn."""
    tail = torch.zeros(TAIL, dtype=torch.int64)
    newest = text.flip(0)[:TAIL] + 1
    tail[: len(newest)] = newest
    hashes = mixed((tail[:, None] * hashing.weights.cpu()).sum(dim=0), hashing.mix)
    prefix, last = hashes[2 + index], text[-1]
    bucket = int(mixed(prefix + last * hashing.last, hashing.mix) & (BUCKETS - 1)) * BUCKET_RECORDS
    key = ((prefix >> 32) & 0xFFFFFFFF) | (prefix << 32)
    tags = [int(((each >> 48) & 0xFFFF).clamp(min=1)) for each in hashes[:2]]

    def some(high: int) -> int:
        return int(torch.randint(0, high, (1,), generator=generator))

    for at in range(BUCKET_RECORDS):
        record = words[bucket + at]
        agreement, share, table, count = some(4), (60, 100, 200, 255, 20)[some(5)], some(TABLES + 1), (3, 9)[some(2)]
        tokens = some(15)
        record[0] = key if some(8) else some(1 << 30)
        record[1] = last | (tokens << 24) | (table << 32) | ((share - 256 if share > 127 else share) << 56)
        first = tags[0] if agreement > 1 else 70000 % 65536
        second = tags[1] if agreement > 2 else 3
        record[2] = first | (second << 16) | (count << 32)
        packed = record.view(torch.uint8).view(RECORD_BYTES)[FIRST_TOKEN_BYTE:]
        # Mostly tokens of the model, at times any bytes.
        ids = torch.randint(0, VOCABULARY if some(5) else 1 << 24, (14,), generator=generator)
        packed[0::3], packed[1::3], packed[2::3] = (
            (ids & 0xFF).to(torch.uint8), ((ids >> 8) & 0xFF).to(torch.uint8), (ids >> 16).to(torch.uint8)
        )  # fmt: skip
