"""Hashes and the choice among records, against plain Python."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from localspec.storage.ngram_format import (
    FULL_SHARE,
    MAX_RECORDS_PER_ADDRESS,
    MAX_TOKEN,
    MULTIPLIERS,
    RECORD,
    RECORD_BYTES,
    bloom_masks,
    bloom_words,
    context_tag,
    prefix_hash,
)
from localspec.storage.ngram_merge import plan_merge
from localspec.storage.ngram_records import TextPiece, reduce_records, split_document, text_records
from tests.storage.ngram_cases import stdlib_documents


def continuation(record: np.void) -> list[int]:
    length = int(record["last_length"]) >> 24
    raw = record["continuation"].tobytes()
    assert not any(raw[3 * length :])
    return [int.from_bytes(raw[3 * i : 3 * i + 3], "little") for i in range(length)]


def test_record_is_64_bytes() -> None:
    assert RECORD.itemsize == RECORD_BYTES == 64


@pytest.mark.parametrize("order", [3, 8, 12])
def test_records_of_text(order: int) -> None:
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, MAX_TOKEN + 1, size=n).astype(np.uint32) for n in (0, 1, 7, 9, 40, 133)]
    records = text_records([TextPiece(text, source) for source, text in enumerate(texts)], order)
    expected = []
    for source, text in enumerate(texts):
        tokens = text.tolist()
        ends = range(order, len(tokens))
        expected += [(source, tokens[:end], tokens[end : end + 14]) for end in ends]
    assert len(records) == len(expected)
    for record, (source, context, following) in zip(records, expected, strict=True):
        hashed = prefix_hash(context[-order:-1])
        assert (record["address"], record["fingerprint"]) == (hashed >> 32, hashed & 0xFFFFFFFF)
        assert record["last_length"] & MAX_TOKEN == context[-1]
        assert record["source_share"] == source | FULL_SHARE << 24
        assert (record["tag12"], record["tag16"]) == (context_tag(context, 12), context_tag(context, 16))
        assert continuation(record) == following


def test_hash_is_the_formula_of_the_format() -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]

    def murmur_finaliser(value: int) -> int:
        value = ((value ^ value >> 33) * 0xFF51AFD7ED558CCD) % 2**64
        value = ((value ^ value >> 33) * 0xC4CEB9FE1A85EC53) % 2**64
        return value ^ value >> 33

    def total(first: int, last: int, reference: int) -> int:
        distances = range(first, last + 1)
        return sum((tokens[reference - d] + 1) * MULTIPLIERS[d] for d in distances) % 2**64

    last = len(tokens) - 1
    assert prefix_hash(tokens[-8:-1]) == murmur_finaliser(total(1, 7, last))
    assert context_tag(tokens, 12) == murmur_finaliser(total(0, 11, last)) >> 48
    assert context_tag(tokens, 16) == murmur_finaliser(total(0, 15, last)) >> 48
    assert context_tag(tokens[-11:], 12) == 0


def test_token_beyond_the_format_is_refused() -> None:
    with pytest.raises(ValueError, match="16777216"):
        text_records([TextPiece(np.full(20, MAX_TOKEN + 1, dtype=np.uint32), 1)], 8)


@pytest.mark.parametrize("piece_tokens", [1, 5, 16, 50, 1000])
def test_split_document_gives_every_position_once(piece_tokens: int) -> None:
    tokens = np.random.default_rng(9).integers(0, 50, size=120).astype(np.uint32)
    whole = text_records([TextPiece(tokens, 3)], 8)
    split = np.concatenate([text_records([piece], 8) for piece in split_document(tokens, 3, piece_tokens)])
    assert np.array_equal(whole, split)


def test_reduced_records_count_as_python_does() -> None:
    documents = stdlib_documents(["heapq", "bisect", "queue", "copy", "stat"])
    kept = reduce_records(text_records([TextPiece(tokens, 1) for tokens in documents], 8))
    following: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens in (document.tolist() for document in documents):
        for last in range(7, len(tokens) - 1):
            context = tokens[: last + 1]
            hashed = prefix_hash(context[-8:-1])
            key = (hashed >> 32, hashed & 0xFFFFFFFF, context[-1], context_tag(context, 12), context_tag(context, 16))
            following[key][tokens[last + 1]] += 1
    per_address = Counter(key[0] for key in following)
    assert np.all(np.diff(kept["address"].astype(np.int64)) >= 0)
    seen = set()
    for record in kept:
        last = int(record["last_length"]) & MAX_TOKEN
        key = (record["address"], record["fingerprint"], last, record["tag12"], record["tag16"])
        key = tuple(int(part) for part in key)
        assert key not in seen
        seen.add(key)
        counter = following[key]
        token, count = continuation(record)[0], int(record["count"])
        assert counter[token] == count == max(counter.values())
        assert int(record["source_share"]) >> 24 == max(1, FULL_SHARE * count // sum(counter.values()))
    # Nothing is missing but what the cap on an address took.
    assert all(per_address[key[0]] > MAX_RECORDS_PER_ADDRESS for key in set(following) - seen)


def test_merging_halves_equals_the_whole() -> None:
    documents = stdlib_documents(["heapq", "bisect", "queue", "copy", "stat", "abc"])
    pieces = [TextPiece(tokens, 1) for tokens in documents]
    whole = reduce_records(text_records(pieces, 8))
    halves = [reduce_records(text_records(part, 8)) for part in (pieces[:3], pieces[3:])]
    merged = reduce_records(np.concatenate(halves))
    assert len(merged) == len(whole)
    assert np.array_equal(np.sort(merged["address"]), np.sort(whole["address"]))
    # Where contexts repeat in both halves the counts add up, unless the halves disagree on what comes next.
    assert abs(int(merged["count"].sum()) - int(whole["count"].sum())) <= 0.002 * int(whole["count"].sum())


def test_the_frequent_path_wins_then_the_latest() -> None:
    context = list(range(100, 116))
    texts = [[*context, 1, 2, 3, 4, 9, 9], [*context, 1, 2, 3, 4, 8, 8], [*context, 1, 5, 5, 5, 5, 5], [*context, 7, 7]]
    records = text_records([TextPiece(np.array(text, dtype=np.uint32), 1) for text in texts], 8)
    kept = reduce_records(records)
    record = kept[kept["tag16"] == context_tag(context, 16)]
    assert len(record) == 1
    assert continuation(record[0]) == [1, 2, 3, 4, 8, 8]
    assert int(record[0]["count"]) == 3
    assert int(record[0]["source_share"]) >> 24 == 255 * 3 // 4


def test_hot_prefix_is_capped_to_the_most_frequent() -> None:
    lasts = [last for last in range(100) for _ in range(1 + last % 50)]
    texts = [np.array([1, 2, 3, 4, 5, 6, 7, 1000 + last, 9, 9], dtype=np.uint32) for last in lasts]
    kept = reduce_records(text_records([TextPiece(text, 1) for text in texts], 8))
    hot = kept[kept["address"] == prefix_hash([1, 2, 3, 4, 5, 6, 7]) >> 32]
    assert len(hot) == MAX_RECORDS_PER_ADDRESS
    assert sorted(hot["count"].tolist(), reverse=True) == [50 - i // 2 for i in range(32)]


def test_pruning_keeps_what_was_seen_often() -> None:
    def text(lead: int, following: int) -> TextPiece:
        return TextPiece(np.array([lead] * 9 + [1, 2, 3, 4, 5, 6, 7, 8, following, 50], dtype=np.uint32), 1)

    # The 8-gram 1..8 is seen three times, each time after other text; each 16-token context once.
    pieces = [text(70, 30), text(71, 30), text(72, 31)]
    records = text_records(pieces, 8)
    address = prefix_hash([1, 2, 3, 4, 5, 6, 7]) >> 32
    assert len(reduce_records(records)[at_address(reduce_records(records), address)]) == 3
    pruned = reduce_records(records, 2)
    found = pruned[at_address(pruned, address)]
    assert len(found) == 1
    assert continuation(found[0])[0] == 30
    assert int(found[0]["count"]) == 2
    assert len(reduce_records(records, 3)[at_address(reduce_records(records, 3), address)]) == 0
    assert len(reduce_records(records[:0], 2)) == 0


def at_address(records: np.ndarray, address: int) -> np.ndarray:
    return records["address"] == address


def test_bloom_has_no_false_negative_and_few_false_positives() -> None:
    rng = np.random.default_rng(10)
    hashes = rng.integers(0, 1 << 64, size=20_000, dtype=np.uint64)
    inside, outside = hashes[:10_000], hashes[10_000:]
    words = np.zeros(2048, dtype=np.uint64)

    def parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return bloom_words((values >> np.uint64(32)).astype(np.uint32), 2048), bloom_masks(values.astype(np.uint32))

    where, masks = parts(inside)
    np.bitwise_or.at(words, where, masks)
    assert ((words[where] & masks) == masks).all()
    where, masks = parts(outside)
    assert ((words[where] & masks) == masks).mean() < 0.06


def test_merges_are_due_by_size() -> None:
    assert plan_merge([]) == []
    assert plan_merge([1, 2, 3]) == []
    assert plan_merge([100_000, 1, 2, 3, 4]) == [1, 2, 3, 4]
    assert plan_merge([100_000, 1, 2, 3, 90_000]) == []


def test_write_amplification_is_bounded() -> None:
    runs: list[int] = []
    written = added = 0
    for _ in range(2000):
        runs.append(100)
        added += 100
        written += 100
        while due := plan_merge(runs):
            size = sum(runs[index] for index in due)
            runs = [pages for index, pages in enumerate(runs) if index not in due] + [size]
            written += size
    assert len(runs) <= 20
    assert written <= added * 8
