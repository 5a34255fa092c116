"""The n-gram table's bytes: how a context is hashed, and how records, pages and run headers are laid out.

Knows numbers and layouts; does not open files. A draft graph on the device computes the same hashes and reads the same
records: this page is the specification for both.

Hashes. With t[-1] the last token of a context and M[d] odd 64-bit constants, S(a, b) = sum over distances d = a..b of
(t[-1-d] + 1) * M[d] modulo 2^64, and mix is the finaliser of MurmurHash3 (public domain). For a table of order n:
    prefix hash = mix(S(1, n - 1))      the n-1 tokens before the last: address = high, fingerprint = low 32 bits
    tag12, tag16 = mix(S(0, 11)) >> 48, mix(S(0, 15)) >> 48, at least 1; 0 where the text has fewer tokens before it
The prefix leaves out the last token so that the page for a position can be fetched before its token is decided.

A run file is one header page, then data pages sorted by address, then the fence array (the first address of each data
page), then the bloom filter. All numbers are little-endian. Records of one address never straddle two pages, so a
look-up is one read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np
import xxhash
from numpy.typing import NDArray

from localspec.storage.errors import DamagedFile
from localspec.storage.files import Buffer, as_bytes

PAGE_BYTES = 4096
RECORD_BYTES = 64
RECORDS_PER_PAGE = 63
CONTINUATION_TOKENS = 14
MAX_RECORDS_PER_ADDRESS = 32
MAX_TOKEN = (1 << 24) - 1
MIN_ORDER, MAX_ORDER = 3, 12
TAG_TOKENS = (12, 16)
MAX_COUNT = (1 << 16) - 1
MAX_SOURCE = (1 << 24) - 1
FULL_SHARE = 255

RECORD = np.dtype(
    [
        ("address", "<u4"),
        ("fingerprint", "<u4"),
        ("last_length", "<u4"),  # last token of the context | continuation length << 24
        ("source_share", "<u4"),  # source id | share << 24: of the context's occurrences, in 255ths, those counted
        ("tag12", "<u2"),
        ("tag16", "<u2"),
        ("count", "<u2"),  # occurrences whose next token is the continuation's first, at most 65535
        ("continuation", "u1", (3 * CONTINUATION_TOKENS,)),  # 3 bytes a token, zeros beyond the length
    ]
)
RECORD_HEAD = struct.Struct("<IIIIHHH")
"""The fields before the continuation, for reading one record without numpy."""

PAGE_HEADER = np.dtype(
    [
        ("checksum", "<u8"),  # xxh3-64 of the 4088 bytes after it
        ("magic", "S8"),
        ("run_id", "<u8"),
        ("page_number", "<u8"),  # the header page is 0
        ("record_count", "<u2"),
        ("spare", "u1", (30,)),
    ]
)
_PAGE_HEAD = struct.Struct("<Q8sQQH")
PAGE_MAGIC = b"LSNGPAGE"

_RUN_MAGIC = b"LSNGRUN\0"
_RUN_VERSION = 1
_RUN_HEAD = struct.Struct("<8sIIQ32sQQQQQQQ")
_HASHED_BYTES = PAGE_BYTES - 8

_MASK = (1 << 64) - 1
_MIX_1, _MIX_2 = MIX_FACTORS = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


def _multipliers() -> tuple[int, ...]:
    # splitmix64 (public domain) started at 1, made odd: any fixed odd constants would do.
    state, found = 1, []
    for _ in range(TAG_TOKENS[1]):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        value = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append((value ^ (value >> 31)) | 1)
    return tuple(found)


MULTIPLIERS = _multipliers()
"""M[d] for the distances 0 to 15."""
_MULTIPLIER_ARRAY = np.array(MULTIPLIERS, dtype=np.uint64)


def mix(value: int) -> int:
    """Finalise a 64-bit sum."""
    value = ((value ^ (value >> 33)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 33)) * _MIX_2) & _MASK
    return value ^ (value >> 33)


def mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` for an array; works in place and returns it."""
    shift = np.uint64(33)
    values ^= values >> shift
    values *= np.uint64(_MIX_1)
    values ^= values >> shift
    values *= np.uint64(_MIX_2)
    values ^= values >> shift
    return values


# For a prefix of w tokens or a tag over w, oldest first: the weights M[w]..M[1] or M[w-1]..M[0], and their sum, which
# is what the "+ 1" of each token adds.
_PREFIX_WEIGHTS = tuple(MULTIPLIERS[width:0:-1] for width in range(MAX_ORDER))
_PREFIX_SUMS = tuple(map(sum, _PREFIX_WEIGHTS))
_TAG_WEIGHTS = {tokens: MULTIPLIERS[tokens - 1 :: -1] for tokens in TAG_TOKENS}
_TAG_SUMS = {tokens: sum(weights) for tokens, weights in _TAG_WEIGHTS.items()}


def prefix_hash(prefix: Sequence[int]) -> int:
    """Hash of the n-1 tokens before the unknown last one, oldest first."""
    width = len(prefix)
    return mix((sum(map(mul, prefix, _PREFIX_WEIGHTS[width])) + _PREFIX_SUMS[width]) & _MASK)


def context_tag(context: Sequence[int], tokens: int) -> int:
    """The 16-bit tag over the last `tokens` tokens (12 or 16) of a context; 0 when it has fewer."""
    if len(context) < tokens:
        return 0
    total = sum(map(mul, context[-tokens:], _TAG_WEIGHTS[tokens])) + _TAG_SUMS[tokens]
    return max(1, mix(total & _MASK) >> 48)


def context_sums(tokens: NDArray[np.uint64], order: int) -> tuple[NDArray[np.uint64], ...]:
    """The sums behind prefix hash, tag12 and tag16 at each position as the last token, before `mix`.

    Positions with fewer tokens before them hold sums over what there is; the caller knows which those are.
    """
    plus_one = tokens + np.uint64(1)

    def add(total: NDArray[np.uint64], distances: range) -> NDArray[np.uint64]:
        for distance in distances:
            if distance < len(tokens):
                total[distance:] += plus_one[: len(tokens) - distance] * _MULTIPLIER_ARRAY[distance]
        return total

    prefix = add(np.zeros_like(plus_one), range(1, order))
    twelve = add(add(prefix.copy(), range(order, TAG_TOKENS[0])), range(1))
    return prefix, twelve, add(twelve.copy(), range(TAG_TOKENS[0], TAG_TOKENS[1]))


def take_records(records: NDArray[np.void], index: NDArray[np.integer]) -> NDArray[np.void]:
    """`records[index]`, seven times as fast: numpy copies a structured row field by field, and eight words at once."""
    words = np.ascontiguousarray(records).view(np.uint64).reshape(-1, RECORD_BYTES // 8)
    return words.take(index, axis=0).view(RECORD).reshape(-1)


def bloom_masks(fingerprints: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Four bits of one 64-bit word, picked by the low 24 bits of each fingerprint."""
    wide, one, six_bits = fingerprints.astype(np.uint64), np.uint64(1), np.uint64(63)
    masks = np.zeros_like(wide)
    for shift in (0, 6, 12, 18):
        masks |= one << ((wide >> np.uint64(shift)) & six_bits)
    return masks


def bloom_words(addresses: NDArray[np.uint32], word_count: int) -> NDArray[np.int64]:
    """The word of each address; grows with the address, so a sorted run fills its filter from front to back."""
    return ((addresses.astype(np.uint64) * np.uint64(word_count)) >> np.uint64(32)).astype(np.int64)


def page_is_whole(page: memoryview, run_id: int, page_number: int) -> bool:
    """Whether 4096 bytes are the page of that number of that run, untouched."""
    checksum, magic, found_run, found_page, record_count = _PAGE_HEAD.unpack_from(page)
    return bool(
        found_run == run_id
        and found_page == page_number
        and magic == PAGE_MAGIC
        and record_count <= RECORDS_PER_PAGE
        and checksum == xxhash.xxh3_64_intdigest(page[8:])
    )


@dataclass(frozen=True)
class RunHeader:
    """What a run says of itself; filled by its writer."""

    run_id: int
    """Random 64 bits, repeated in each page: a page of a deleted run that reappears is not taken for ours."""
    order: int
    tokenizer_fingerprint: bytes
    """32 bytes."""
    page_count: int
    """Data pages, the header page not among them."""
    record_count: int
    token_count: int
    """Tokens of text that went in."""
    fence_checksum: int
    bloom_word_count: int
    bloom_checksum: int

    @property
    def fence_offset_bytes(self) -> int:
        """Where the fence array starts."""
        return PAGE_BYTES * (1 + self.page_count)

    @property
    def bloom_offset_bytes(self) -> int:
        """Where the bloom filter starts."""
        return self.fence_offset_bytes + -(-4 * self.page_count // 8) * 8

    @property
    def file_bytes(self) -> int:
        """The only size a whole file can have."""
        return self.bloom_offset_bytes + 8 * self.bloom_word_count


def pack_run_header(header: RunHeader) -> bytes:
    """The header page."""
    fields = _RUN_HEAD.pack(
        _RUN_MAGIC, _RUN_VERSION, header.order, header.run_id, header.tokenizer_fingerprint, header.page_count,
        header.record_count, header.token_count, header.fence_checksum, header.bloom_word_count,
        header.bloom_checksum, 0,
    ).ljust(_HASHED_BYTES, b"\0")  # fmt: skip
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


def parse_run_header(data: Buffer, file_bytes: int) -> RunHeader:
    """Check a header page against the size of its file.

    Raises:
        DamagedFile: not a run, another version, checksum or size do not fit.
    """
    view = as_bytes(data)
    if view.nbytes != PAGE_BYTES or view[:8] != _RUN_MAGIC:
        raise DamagedFile("this is not an n-gram run")
    if xxhash.xxh3_64_intdigest(view[:_HASHED_BYTES]) != int.from_bytes(view[_HASHED_BYTES:], "little"):
        raise DamagedFile("the header's checksum does not fit")
    _, version, order, run_id, tokenizer, pages, records, tokens, fence, words, bloom, _ = _RUN_HEAD.unpack_from(view)
    header = RunHeader(run_id, order, tokenizer, pages, records, tokens, fence, words, bloom)
    if version != _RUN_VERSION or not MIN_ORDER <= order <= MAX_ORDER or records > pages * RECORDS_PER_PAGE:
        raise DamagedFile(f"the header is of version {version} or holds impossible values")
    if header.file_bytes != file_bytes:
        raise DamagedFile(f"the file has {file_bytes} bytes and should have {header.file_bytes}")
    return header
