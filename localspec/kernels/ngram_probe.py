"""Drafts from a table of n-grams that lies on the device: what a back end is given, and the specification in PyTorch.

Knows hashes, buckets and packed records; not how the table is filled, nor what a draft is worth. A record that is torn
or stale makes a wrong draft and nothing worse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RECORD_WORDS = 8
FIRST_TOKEN_BYTE = 22
RECORD_BYTES = 8 * RECORD_WORDS
TOKEN_BYTES = 3
MAX_TOKEN = (1 << 8 * TOKEN_BYTES) - 1
BUCKET_RECORDS = 8
_SHIFT_33_BITS = (1 << 31) - 1


@dataclass(frozen=True)
class Hashing:
    """How contexts become numbers; all arithmetic is modulo 2^64, given as signed numbers.

    weights: [T, 2 + orders] int64 of the last T tokens plus one, the newest first: the sums behind both tags, then the
    prefix of each order. orders: [orders] int64 tokens of a context; tags: tokens that each tag covers; mix: the two
    factors of the mixing function; last: of the last token.
    """

    weights: Tensor
    orders: Tensor
    tags: tuple[int, int]
    mix: tuple[int, int]
    last: int


@dataclass(frozen=True)
class DraftRules:
    """lengths: [orders, 3] int64 drafts after an agreement as long as the order, the first and the second tag; speaks:
    [tables, 3] int64, 0 for a table that is silent at this length. Shares are of 255: below min_share nothing is
    drafted, below unsure_share half as much."""

    lengths: Tensor
    speaks: Tensor
    min_share: int
    unsure_share: int
    vocabulary: int


@dataclass(frozen=True)
class NgramProbe:
    """words: [buckets * 8, 8] int64 records of 64 bytes, a power of two of buckets.

    Of a record, from its first byte: address and fingerprint (u32 each, together its key), last token (24 bits) and
    number of tokens (8), table (24) and share (8), two tags (u16), count (u16), then the tokens, three bytes each.
    """

    words: Tensor
    hashing: Hashing
    rules: DraftRules

    @property
    def max_tokens(self) -> int:
        """That a record holds: behind its 22 bytes of numbers."""
        return (RECORD_BYTES - FIRST_TOKEN_BYTE) // TOKEN_BYTES


@dataclass(frozen=True)
class TableDrafts:
    """token_ids (-1: none), tables: [S, K] int64; confidence: [S, K] float32; num_drafts: [S] int64."""

    token_ids: Tensor
    tables: Tensor
    confidence: Tensor
    num_drafts: Tensor


def mixed(value: Tensor, factors: tuple[int, int]) -> Tensor:
    """Finalise sums. int64: products wrap, and the sign is masked out of right shifts."""
    value = (value ^ ((value >> 33) & _SHIFT_33_BITS)) * factors[0]
    value = (value ^ ((value >> 33) & _SHIFT_33_BITS)) * factors[1]
    return value ^ ((value >> 33) & _SHIFT_33_BITS)


def table_drafts(probe: NgramProbe, history: Tensor, lengths: Tensor, depths: Tensor, width: int) -> TableDrafts:
    """See `Ops.table_drafts`."""
    hashing = probe.hashing
    tail = _tail(history, lengths, hashing.weights.shape[0])
    hashes = mixed((tail[:, :, None] * hashing.weights).sum(dim=1), hashing.mix)  # [S, 2 + orders]
    tags = [_tag(hashes[:, at], lengths, tokens) for at, tokens in enumerate(hashing.tags)]
    best = _best(probe, 0, hashes, tail[:, 0] - 1, lengths, tags)
    for index in range(1, hashing.orders.shape[0]):
        other = _best(probe, index, hashes, tail[:, 0] - 1, lengths, tags)
        better = other.score > best.score
        best = _Found(
            torch.where(better[:, None], other.record, best.record),
            torch.where(better, other.score, best.score),
            torch.where(better, other.allowed, best.allowed),
        )
    return _unpacked(probe, best.record, torch.minimum(best.allowed, depths), width)


@dataclass(frozen=True)
class _Found:
    """Best record of each slot. record: [S, 8] int64; score: [S] int64, -1 where none; allowed: [S] int64 drafts."""

    record: Tensor
    score: Tensor
    allowed: Tensor


def _tail(history: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """[S, T] int64 last tokens plus one, newest first, 0 before the text."""
    place = lengths[:, None] - 1 - torch.arange(num_tokens, device=lengths.device)
    tokens = history.gather(1, place.clamp(min=0)) + 1
    return torch.where(place >= 0, tokens, 0)


def _tag(hashed: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """[S] int64 tag over the last tokens; -1 where there are fewer, which no record has."""
    return torch.where(lengths >= tokens, ((hashed >> 48) & 0xFFFF).clamp(min=1), -1)


def _best(probe: NgramProbe, index: int, hashes: Tensor, last: Tensor, lengths: Tensor, tags: list[Tensor]) -> _Found:
    """Look into the buckets of one order. hashes: [S, 2 + orders]; last: [S] last tokens."""
    hashing, rules = probe.hashing, probe.rules
    order, prefix = hashing.orders[index], hashes[:, len(tags) + index]
    buckets = probe.words.view(-1, BUCKET_RECORDS, RECORD_WORDS)
    found = buckets[mixed(prefix + last * hashing.last, hashing.mix) & (buckets.shape[0] - 1)]  # [S, 8, 8] int64
    key = ((prefix >> 32) & 0xFFFFFFFF) | (prefix << 32)
    second, third = found[:, :, 1], found[:, :, 2]
    here = (found[:, :, 0] == key[:, None]) & ((second & MAX_TOKEN) == last[:, None]) & (lengths >= order)[:, None]
    level = torch.where((third & 0xFFFF) == tags[0][:, None], 1, 0)
    level = torch.where(((third >> 16) & 0xFFFF) == tags[1][:, None], 2, level)
    share = (second >> 56) & 0xFF
    here &= (rules.speaks[_table(second, rules), level] != 0) & (share >= rules.min_share)
    score = torch.where(here, (level << 32) | (share << 16) | ((third >> 32) & 0xFFFF), -1)
    # Of equals the first.
    score, best = score.max(dim=1).values, (score == score.max(dim=1, keepdim=True).values).int().argmax(dim=1)
    slots = torch.arange(last.shape[0], device=last.device)
    record = found[slots, best]
    allowed = rules.lengths[index][level[slots, best]]
    allowed = torch.where(share[slots, best] >= rules.unsure_share, allowed, (allowed + 1) // 2)
    return _Found(record, score, torch.where(score >= 0, allowed, 0))


def _table(second: Tensor, rules: DraftRules) -> Tensor:
    return ((second >> 32) & MAX_TOKEN).clamp(max=rules.speaks.shape[0] - 1)


def _unpacked(probe: NgramProbe, record: Tensor, allowed: Tensor, width: int) -> TableDrafts:
    """A torn record may hold any bytes: what is no token of the model ends the draft."""
    packed = record.contiguous().view(torch.uint8).view(-1, RECORD_BYTES)[:, FIRST_TOKEN_BYTE:]
    parts = packed.reshape(-1, probe.max_tokens, TOKEN_BYTES).to(torch.int64)
    tokens = parts[:, :, 0] | (parts[:, :, 1] << 8) | (parts[:, :, 2] << 16)  # [S, max_tokens]
    tokens = torch.nn.functional.pad(tokens[:, :width], (0, max(0, width - probe.max_tokens)), value=-1)
    count = torch.minimum(allowed, (record[:, 1] >> 24) & 0xFF)
    column = torch.arange(width, device=tokens.device)
    usable = (column < count[:, None]) & (tokens >= 0) & (tokens < probe.rules.vocabulary)
    usable = usable.to(torch.int64).cumprod(dim=1).bool()
    share = ((record[:, 1] >> 56) & 0xFF).to(torch.float32) / 255
    return TableDrafts(
        token_ids=torch.where(usable, tokens, -1),
        tables=torch.where(usable, _table(record[:, 1], probe.rules)[:, None], 0),
        confidence=torch.where(usable, share[:, None], 0.0),
        num_drafts=usable.sum(dim=1),
    )
