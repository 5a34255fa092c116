"""From token ids to records, and from many records of one context to the one that is kept. Pure numpy, no files.

Knows what a record means; does not know runs or tables. Both the build of a run from text and the merge of runs are
`reduce_records` over a sorted stretch of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localspec.storage.ngram_format import (
    CONTINUATION_TOKENS,
    FULL_SHARE,
    MAX_COUNT,
    MAX_RECORDS_PER_ADDRESS,
    MAX_TOKEN,
    RECORD,
    TAG_TOKENS,
    context_sums,
    mix_array,
    take_records,
)

_KEY_FACTOR = np.uint64(0x9FB21C651E98DF25)


@dataclass(frozen=True)
class TextPiece:
    """A stretch of one document. Tokens at its ends may serve as context or continuation only."""

    tokens: NDArray[np.uint32]
    source: int
    lead_tokens: int = 0
    """At the start, in no record as the last token of a context."""
    tail_tokens: int = 0
    """The same at the end."""


def split_document(tokens: NDArray[np.uint32], source: int, piece_tokens: int) -> list[TextPiece]:
    """Cut a document into pieces that overlap as far as contexts and continuations reach; no position comes twice."""
    pieces = []
    for begin in range(0, max(len(tokens), 1), piece_tokens):
        end = min(begin + piece_tokens, len(tokens))
        lead = min(begin, TAG_TOKENS[1] - 1)
        tail = min(len(tokens) - end, CONTINUATION_TOKENS)
        pieces.append(TextPiece(tokens[begin - lead : end + tail], source, lead, tail))
    return pieces


def text_records(pieces: Sequence[TextPiece], order: int) -> NDArray[np.void]:
    """One record for each position that has a full context and a next token, in the order of the text."""
    tokens = np.concatenate([piece.tokens for piece in pieces]) if pieces else np.zeros(0, dtype=np.uint32)
    if len(tokens) and int(tokens.max()) > MAX_TOKEN:
        raise ValueError(f"Token ids in a table must be at most {MAX_TOKEN}, not {int(tokens.max())}.")
    lengths = np.array([len(piece.tokens) for piece in pieces], dtype=np.int64)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    leads = np.array([max(piece.lead_tokens, order - 1) for piece in pieces], dtype=np.int64)
    tails = np.array([max(piece.tail_tokens, 1) for piece in pieces], dtype=np.int64)
    counts = np.maximum(lengths - leads - tails, 0)
    total = int(counts.sum())
    # Position of each record's last context token, and where its piece begins and ends.
    before = np.cumsum(counts) - counts
    position = np.arange(total) + np.repeat(begins + leads - before, counts)
    since_begin = position - np.repeat(begins, counts)
    length = np.minimum(np.repeat(ends, counts) - position - 1, CONTINUATION_TOKENS).astype(np.uint32)

    prefix, twelve, sixteen = context_sums(tokens.astype(np.uint64), order)
    hashes = mix_array(prefix[position])
    records = np.zeros(total, dtype=RECORD)
    records["address"] = hashes >> np.uint64(32)
    records["fingerprint"] = hashes & np.uint64(0xFFFFFFFF)
    records["last_length"] = tokens[position] | (length << np.uint32(24))
    sources = np.array([piece.source for piece in pieces], dtype=np.uint32)
    records["source_share"] = np.repeat(sources, counts) | np.uint32(FULL_SHARE << 24)
    for name, sums, reach in (("tag12", twelve, TAG_TOKENS[0]), ("tag16", sixteen, TAG_TOKENS[1])):
        tags = np.maximum(mix_array(sums[position]) >> np.uint64(48), np.uint64(1))
        records[name] = np.where(since_begin >= reach - 1, tags, 0)
    records["count"] = 1
    records["continuation"] = _continuations(tokens, position, length)
    return records


def _continuations(
    tokens: NDArray[np.uint32], position: NDArray[np.int64], length: NDArray[np.uint32]
) -> NDArray[np.uint8]:
    width = 3 * CONTINUATION_TOKENS
    # Three bytes a token in a row: each continuation is one contiguous window.
    packed = np.zeros(3 * len(tokens) + width, dtype=np.uint8)
    packed[: 3 * len(tokens)].reshape(-1, 3)[:] = tokens.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]
    found: NDArray[np.uint8] = np.lib.stride_tricks.sliding_window_view(packed, width)[3 * (position + 1)]
    short = np.flatnonzero(length < CONTINUATION_TOKENS)
    found[short] *= np.arange(width) < 3 * length[short, None]
    return found


def reduce_records(records: NDArray[np.void], min_count: int = 1) -> NDArray[np.void]:
    """Sort records by address and keep one for each context and source, with counts added up.

    Every record of the addresses that occur must be present. Contexts are told apart by prefix, last token and the
    longer tags. With `min_count` above 1 contexts seen less often give way to one record of their n-gram, if that was
    seen often enough. At most 32 records of an address stay, the most frequent. Where all else is equal a later record
    of the input wins.
    """
    if not len(records):
        return records
    tags = (records["tag12"].astype(np.uint64) << np.uint64(16)) | records["tag16"]
    source = records["source_share"] & np.uint32(MAX_TOKEN)
    kept = _one_per_group(records, _sort_key(records, tags, source))
    if min_count > 1:
        often = kept["count"] >= min_count
        rare = _one_per_group(kept, _sort_key(kept))
        # What the n-gram's record counts may include contexts that stay; those then answer first.
        rare = rare[(rare["count"] >= min_count) & ~np.isin(_sort_key(rare), _sort_key(kept[often]))]
        kept = np.concatenate([kept[often], rare])
        kept = take_records(kept, np.argsort(_sort_key(kept)))
    return _capped(kept)


def _sort_key(records: NDArray[np.void], *more: NDArray[np.unsignedinteger]) -> NDArray[np.uint64]:
    """Address in the high half; in the low half a hash of fingerprint, last token and the further columns.

    Two contexts of one address that meet in 32 bits are taken for one: a draft gets worse, nothing else.
    """
    detail = records["fingerprint"].astype(np.uint64)
    for column in (records["last_length"] & np.uint32(MAX_TOKEN), *more):
        detail = (detail + column.astype(np.uint64)) * _KEY_FACTOR
        detail ^= detail >> np.uint64(29)
    return (records["address"].astype(np.uint64) << np.uint64(32)) | (mix_array(detail) >> np.uint64(32))


def _one_per_group(records: NDArray[np.void], key: NDArray[np.uint64]) -> NDArray[np.void]:
    """The combined record of each distinct key, in order of the keys."""
    # The default sort is several times faster than a stable one; what it loses, _combined restores from the positions.
    order = np.argsort(key)
    sorted_key = key[order]
    starts = _group_starts(sorted_key)
    sizes = np.diff(np.append(starts, len(records)))
    kept = take_records(records, order[starts])
    several = np.flatnonzero(sizes > 1)
    if len(several):
        rows = np.flatnonzero(np.repeat(sizes > 1, sizes))
        groups = np.repeat(np.arange(len(several)), sizes[several])
        kept[several] = _combined(take_records(records, order[rows]), groups, order[rows])
    return kept


def _combined(rows: NDArray[np.void], groups: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.void]:
    """One record for each group; groups are numbered from 0 and come in order, `position` tells later from earlier."""
    weight = rows["count"].astype(np.int64)
    share = np.maximum(rows["source_share"] >> np.uint32(24), 1).astype(np.int64)
    totals = np.add.reduceat(np.maximum(weight * FULL_SHARE // share, weight), _group_starts(groups))
    open_rows, support = _follow_heaviest(np.arange(len(rows)), groups, _token_at(rows, 0), weight, position)
    # Most groups agree on all that follows; only the others are walked, step by step along their most frequent path.
    texts = _continuation_hash(rows)
    settled = []
    for step in range(1, CONTINUATION_TOKENS):
        starts = _group_starts(groups[open_rows])
        differ = np.minimum.reduceat(texts[open_rows], starts) != np.maximum.reduceat(texts[open_rows], starts)
        in_open = np.repeat(differ, np.diff(np.append(starts, len(open_rows))))
        settled.append(open_rows[~in_open])
        open_rows = open_rows[in_open]
        if not len(open_rows):
            break
        token = _token_at(take_records(rows, open_rows), step)
        open_rows, _ = _follow_heaviest(open_rows, groups, token, weight, position)
    alive = np.concatenate([*settled, open_rows])
    # Heaviest, then latest: sorted so that the best is the last of its group.
    alive = alive[np.lexsort((position[alive], weight[alive], groups[alive]))]
    found = take_records(rows, alive[np.append(_group_starts(groups[alive])[1:], len(alive)) - 1])
    found["count"] = np.minimum(support, MAX_COUNT)
    shares = np.maximum(FULL_SHARE * support // np.maximum(totals, support), 1).astype(np.uint32)
    found["source_share"] = (found["source_share"] & np.uint32(MAX_TOKEN)) | (shares << np.uint32(24))
    return found


def _follow_heaviest(
    alive: NDArray[np.int64],
    groups: NDArray[np.int64],
    token: NDArray[np.int64],
    weight: NDArray[np.int64],
    position: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Keep the rows whose `token` is their group's heaviest; returns these rows and, by group, that token's weight.

    `token` stands beside `alive`; the other arrays are indexed by it.
    """
    key = (groups[alive] << 25) | token
    order = np.argsort(key)
    key, alive = key[order], alive[order]
    starts = _group_starts(key)
    weights = np.add.reduceat(weight[alive], starts)
    run_groups = groups[alive[starts]]
    # The heaviest token of a group sorts last in it, of equals the one that was seen last.
    ranked = np.lexsort((np.maximum.reduceat(position[alive], starts), weights, run_groups))
    best = ranked[np.append(_group_starts(run_groups)[1:], len(ranked)) - 1]
    chosen = np.zeros(len(starts), dtype=bool)
    chosen[best] = True
    sizes = np.diff(np.append(starts, len(alive)))
    return alive[np.repeat(chosen, sizes)], weights[best]


def _group_starts(values: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where a new value begins in a sorted, non-empty array."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def _continuation_hash(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    # 42 bytes are 21 numbers of 16 bits; a weighted sum of them tells texts apart well enough to skip a walk.
    words = np.ascontiguousarray(rows["continuation"]).view("<u2").astype(np.uint64)
    weights = mix_array(np.arange(1, words.shape[1] + 1, dtype=np.uint64))
    return (words @ weights) + (rows["last_length"] >> np.uint32(24)).astype(np.uint64)


def _token_at(rows: NDArray[np.void], step: int) -> NDArray[np.int64]:
    """The continuation's token at a step; beyond its end a value no token has."""
    token = np.full(len(rows), MAX_TOKEN + 1, dtype=np.int64)
    inside = np.flatnonzero((rows["last_length"] >> np.uint32(24)) > step)
    packed = rows["continuation"][inside, 3 * step : 3 * step + 3].astype(np.int64)
    token[inside] = packed[:, 0] | (packed[:, 1] << 8) | (packed[:, 2] << 16)
    return token


def _capped(records: NDArray[np.void]) -> NDArray[np.void]:
    address = records["address"]
    starts = _group_starts(address)
    sizes = np.diff(np.append(starts, len(records)))
    if sizes.max() <= MAX_RECORDS_PER_ADDRESS:
        return records
    large = np.flatnonzero(np.repeat(sizes > MAX_RECORDS_PER_ADDRESS, sizes))
    # Most frequent first within its address; then everything beyond the 32nd goes.
    order = large[np.lexsort((-records["count"][large].astype(np.int64), address[large]))]
    large_starts = _group_starts(address[order])
    rank = np.arange(len(order)) - np.repeat(large_starts, np.diff(np.append(large_starts, len(order))))
    keep = np.ones(len(records), dtype=bool)
    keep[order[rank >= MAX_RECORDS_PER_ADDRESS]] = False
    return take_records(records, np.flatnonzero(keep))
