"""`Ops.table_drafts` in one launch: a program a slot hashes its last tokens, looks into the buckets and unpacks.

Specification: kernels/ngram_probe.py. In PyTorch it is 110 small operations, 0.2 ms of a step; here it waits for five
reads that follow each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.ngram_probe import BUCKET_RECORDS, FIRST_TOKEN_BYTE, RECORD_BYTES, NgramProbe, TableDrafts


@triton.jit
def mixed(value, first_factor, second_factor):
    """int64: products wrap, and the sign is masked out of right shifts."""
    value = (value ^ ((value >> 33) & 0x7FFFFFFF)) * first_factor
    value = (value ^ ((value >> 33) & 0x7FFFFFFF)) * second_factor
    return value ^ ((value >> 33) & 0x7FFFFFFF)


@triton.jit
def hash_of(tokens, weights_ptr, column, mix_first, mix_second, COLUMNS: tl.constexpr, TAIL: tl.constexpr):
    """The hash of the last tokens plus one by one column of the weights."""
    weights = tl.load(weights_ptr + tl.arange(0, TAIL) * COLUMNS + column)
    return mixed(tl.sum(tokens * weights, axis=0), mix_first, mix_second)


@triton.jit
def tag_of(hashed, length, TOKENS: tl.constexpr):
    """16 bits over the last tokens; -1 where there are fewer, which no record has."""
    tag = tl.maximum((hashed >> 48) & 0xFFFF, 1)
    return tl.where(length >= TOKENS, tag, -1)


@triton.jit
def best_of(
    prefix, last, is_long, first_tag, second_tag, words_ptr, allowed_ptr, speaks_ptr, bucket, num_tables, min_share,
    unsure_share,
):  # fmt: skip
    """Of a bucket's 8 records: score, -1 where none fits; drafts that it allows; its place; its second word."""
    each = tl.arange(0, 8)
    records = bucket * 8 + each
    numbers = tl.load(words_ptr + records * 8 + 1)
    tags = tl.load(words_ptr + records * 8 + 2)
    key = ((prefix >> 32) & 0xFFFFFFFF) | (prefix << 32)
    here = (tl.load(words_ptr + records * 8) == key) & ((numbers & 0xFFFFFF) == last) & is_long
    level = tl.where((tags & 0xFFFF) == first_tag, 1, 0).to(tl.int64)
    level = tl.where(((tags >> 16) & 0xFFFF) == second_tag, 2, level)
    table = tl.minimum((numbers >> 32) & 0xFFFFFF, num_tables - 1)
    share = (numbers >> 56) & 0xFF
    here &= (tl.load(speaks_ptr + table * 3 + level) != 0) & (share >= min_share)
    score = tl.where(here, (level << 32) | (share << 16) | ((tags >> 32) & 0xFFFF), -1)
    top = tl.max(score, axis=0)
    # Of equals the first.
    chosen = each == tl.min(tl.where(score == top, each, 8), axis=0)
    share = tl.sum(tl.where(chosen, share, 0), axis=0)
    allowed = tl.load(allowed_ptr + tl.sum(tl.where(chosen, level, 0), axis=0))
    allowed = tl.where(share >= unsure_share, allowed, (allowed + 1) // 2)
    return top, allowed, tl.sum(tl.where(chosen, records, 0), axis=0), tl.sum(tl.where(chosen, numbers, 0), axis=0)


@triton.jit
def unpacked(at, allowed, numbers, vocabulary, max_tokens, WIDTH: tl.constexpr):
    """[WIDTH] tokens of a record, and how many are drafts; what is no token of the model ends them."""
    column = tl.arange(0, WIDTH)
    known = column < max_tokens
    token = tl.load(at + 3 * column, mask=known, other=0).to(tl.int64)
    token |= tl.load(at + 3 * column + 1, mask=known, other=0).to(tl.int64) << 8
    token |= tl.load(at + 3 * column + 2, mask=known, other=0).to(tl.int64) << 16
    count = tl.minimum(tl.minimum(allowed, max_tokens), (numbers >> 24) & 0xFF)
    return token, tl.minimum(count, tl.min(tl.where(token < vocabulary, WIDTH, column), axis=0))


@triton.jit(do_not_specialize=["history_stride", "vocabulary", "mix_first", "mix_second", "last_factor"])
def table_drafts_kernel(
    history_ptr, lengths_ptr, depths_ptr, words_ptr, bytes_ptr, weights_ptr, draft_lengths_ptr, speaks_ptr, orders_ptr,
    tokens_ptr, tables_ptr, confidence_ptr, counts_ptr, history_stride, vocabulary, mix_first, mix_second, last_factor,
    bucket_mask, num_tables, min_share, unsure_share, width, max_tokens, ORDERS: tl.constexpr, FIRST_TAG: tl.constexpr,
    SECOND_TAG: tl.constexpr, TAIL: tl.constexpr, RECORD: tl.constexpr, FIRST_BYTE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: (S,). WIDTH: a power of two >= width; TAIL: tokens that hashes reach, a power of two."""
    slot = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + slot)
    depth = tl.load(depths_ptr + slot)
    back = tl.arange(0, TAIL)
    place = length - 1 - back
    tokens = tl.load(history_ptr + slot * history_stride + tl.maximum(place, 0), mask=place >= 0, other=-1) + 1
    last = tl.sum(tl.where(back == 0, tokens, 0), axis=0) - 1
    first = hash_of(tokens, weights_ptr, 0, mix_first, mix_second, 2 + ORDERS, TAIL)
    second = hash_of(tokens, weights_ptr, 1, mix_first, mix_second, 2 + ORDERS, TAIL)
    first_tag, second_tag = tag_of(first, length, FIRST_TAG), tag_of(second, length, SECOND_TAG)
    best, record, numbers, allowed = length * 0 - 1, length * 0, length * 0, length * 0
    for index in tl.static_range(ORDERS):
        prefix = hash_of(tokens, weights_ptr, 2 + index, mix_first, mix_second, 2 + ORDERS, TAIL)
        bucket = mixed(prefix + last * last_factor, mix_first, mix_second) & bucket_mask
        is_long = length >= tl.load(orders_ptr + index)
        top, its_allowed, its_record, its_numbers = best_of(
            prefix, last, is_long, first_tag, second_tag, words_ptr, draft_lengths_ptr + index * 3, speaks_ptr, bucket,
            num_tables, min_share, unsure_share,
        )  # fmt: skip
        better = top > best
        allowed = tl.where(better, its_allowed, allowed)
        record = tl.where(better, its_record, record)
        numbers = tl.where(better, its_numbers, numbers)
        best = tl.where(better, top, best)
    at = bytes_ptr + record * RECORD + FIRST_BYTE
    token, count = unpacked(at, tl.minimum(allowed, depth), numbers, vocabulary, max_tokens, WIDTH)
    count = tl.maximum(tl.minimum(count, width), 0)
    column = tl.arange(0, WIDTH)
    usable, inside = column < count, column < width
    table = tl.minimum((numbers >> 32) & 0xFFFFFF, num_tables - 1)
    share = ((numbers >> 56) & 0xFF).to(tl.float32) / 255.0
    out = slot * width + column
    tl.store(tokens_ptr + out, tl.where(usable, token, -1), mask=inside)
    tl.store(tables_ptr + out, tl.where(usable, table, 0), mask=inside)
    tl.store(confidence_ptr + out, tl.where(usable, share, 0.0), mask=inside)
    tl.store(counts_ptr + slot, count)


def table_drafts(probe: NgramProbe, history: Tensor, lengths: Tensor, depths: Tensor, width: int) -> TableDrafts:
    """See `Ops.table_drafts`."""
    hashing, rules = probe.hashing, probe.rules
    slots = lengths.shape[0]
    numbers = torch.empty(2, slots, width, dtype=torch.int64, device=lengths.device)
    confidence = torch.empty(slots, width, dtype=torch.float32, device=lengths.device)
    counts = torch.empty(slots, dtype=torch.int64, device=lengths.device)
    table_drafts_kernel[(slots,)](
        *(history, lengths, depths, probe.words, probe.words.view(torch.uint8), hashing.weights, rules.lengths),
        *(rules.speaks, hashing.orders, numbers[0], numbers[1], confidence, counts, history.stride(0)),
        *(rules.vocabulary, *hashing.mix, hashing.last, probe.words.shape[0] // BUCKET_RECORDS - 1),
        *(rules.speaks.shape[0], rules.min_share, rules.unsure_share, width, probe.max_tokens),
        ORDERS=hashing.orders.shape[0],
        FIRST_TAG=hashing.tags[0],
        SECOND_TAG=hashing.tags[1],
        TAIL=hashing.weights.shape[0],
        RECORD=RECORD_BYTES,
        FIRST_BYTE=FIRST_TOKEN_BYTE,
        WIDTH=triton.next_power_of_2(max(width, probe.max_tokens)),
        num_warps=1,
    )
    return TableDrafts(numbers[0], numbers[1], confidence, counts)
