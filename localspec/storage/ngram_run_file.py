"""One n-gram run as a file: a writer that streams sorted records into pages, and the opened run with its index in RAM.

Knows pages, fences and the bloom filter; does not know where records come from or which runs make up a table.
"""

from __future__ import annotations

import bisect
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash
from numpy.typing import NDArray

from localspec.storage.errors import DamagedFile, WrongOwner
from localspec.storage.files import AtomicFile, WriteFunction
from localspec.storage.ngram_format import (
    PAGE_BYTES,
    PAGE_HEADER,
    PAGE_MAGIC,
    RECORD,
    RECORD_BYTES,
    RECORDS_PER_PAGE,
    RunHeader,
    bloom_masks,
    bloom_words,
    pack_run_header,
    page_is_whole,
    parse_run_header,
    take_records,
)
from localspec.storage.open_file import OpenFile

RUN_SUFFIX = ".ngr"
BLOOM_BITS_PER_RECORD = 10
MAX_BLOOM_BYTES = 256 << 20


class RunWriter:
    """Streams records in order of their address into a new run file; a context manager, as AtomicFile is.

    Holds less than one page of records and the index (4 bytes a page and the bloom filter) in memory.
    """

    def __init__(
        self,
        directory: Path,
        order: int,
        tokenizer_fingerprint: bytes,
        *,
        record_bound: int,
        write_function: WriteFunction = os.write,
    ) -> None:
        """`record_bound` is at least the number of records to come; it sizes the bloom filter (none above 256 MiB)."""
        self.run_id = secrets.randbits(64)
        self.header: RunHeader | None = None
        self._order = order
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._pending = np.zeros(0, dtype=RECORD)
        self._fences: list[NDArray[np.uint32]] = []
        self._page_count = 0
        self._record_count = 0
        words = _bloom_word_count(record_bound)
        self._bloom = np.zeros(words, dtype=np.uint64)
        self._file = AtomicFile(directory / run_file_name(self.run_id), write_function=write_function)
        try:
            self._file.write(bytes(PAGE_BYTES))
        except BaseException:
            self._file.discard()
            raise

    @property
    def written_bytes(self) -> int:
        """Bytes of data pages so far."""
        return self._page_count * PAGE_BYTES

    def append(self, records: NDArray[np.void]) -> None:
        """Add records that sort after all before; an address must come whole in one call, at most 32 records of it."""
        if not len(records):
            return
        self._record_count += len(records)
        if len(self._bloom):
            self._fill_bloom(records)
        records = np.concatenate([self._pending, records]) if len(self._pending) else records
        starts = _page_starts(records["address"])
        # The last page may still grow.
        self._write_pages(records, starts)
        self._pending = records[starts[-1] :].copy()

    def finish(self, token_count: int) -> RunHeader:
        """Write what is pending, the index and the header, and publish the file."""
        if len(self._pending):
            self._write_pages(self._pending, [0, len(self._pending)])
        fences = np.concatenate(self._fences) if self._fences else np.zeros(0, dtype=np.uint32)
        fence_bytes = fences.astype("<u4").tobytes()
        bloom_bytes = self._folded_bloom().astype("<u8").tobytes()
        self._file.write(fence_bytes + bytes(-len(fence_bytes) % 8))
        self._file.write(bloom_bytes)
        self.header = RunHeader(
            run_id=self.run_id,
            order=self._order,
            tokenizer_fingerprint=self._tokenizer_fingerprint,
            page_count=self._page_count,
            record_count=self._record_count,
            token_count=token_count,
            fence_checksum=xxhash.xxh3_64_intdigest(fence_bytes),
            bloom_word_count=len(bloom_bytes) // 8,
            bloom_checksum=xxhash.xxh3_64_intdigest(bloom_bytes),
        )
        self._file.rewrite(0, pack_run_header(self.header))
        self._file.publish()
        return self.header

    def _fill_bloom(self, records: NDArray[np.void]) -> None:
        words = bloom_words(records["address"], len(self._bloom))
        firsts = np.flatnonzero(np.concatenate([[True], words[1:] != words[:-1]]))
        self._bloom[words[firsts]] |= np.bitwise_or.reduceat(bloom_masks(records["fingerprint"]), firsts)

    def _folded_bloom(self) -> NDArray[np.uint64]:
        # The bound may have been far above what came; joining neighbours keeps every word's meaning.
        bloom = self._bloom
        while len(bloom) >= 2 * _bloom_word_count(self._record_count) and len(bloom) % 2 == 0 and self._record_count:
            bloom = bloom[0::2] | bloom[1::2]
        return bloom

    def _write_pages(self, records: NDArray[np.void], starts: list[int]) -> None:
        page_count = len(starts) - 1
        if not page_count:
            return
        bounds = np.asarray(starts)
        lengths = np.diff(bounds)
        rows = np.zeros((page_count, PAGE_BYTES // RECORD_BYTES), dtype=RECORD)
        slots = np.arange(starts[-1]) - np.repeat(bounds[:-1], lengths)
        places = np.repeat(np.arange(page_count), lengths) * rows.shape[1] + slots + 1
        # As eight words each: numpy would copy a structured row field by field.
        words = np.ascontiguousarray(records[: starts[-1]]).view(np.uint64).reshape(-1, RECORD_BYTES // 8)
        rows.view(np.uint64).reshape(-1, RECORD_BYTES // 8)[places] = words
        headers = rows[:, 0].view(PAGE_HEADER)
        headers["magic"] = PAGE_MAGIC
        headers["run_id"] = self.run_id
        headers["page_number"] = np.arange(page_count) + self._page_count + 1
        headers["record_count"] = lengths
        pages = rows.view(np.uint8).reshape(page_count, PAGE_BYTES)
        flat, digest = pages.reshape(-1).data, xxhash.xxh3_64_intdigest
        headers["checksum"] = [digest(flat[at + 8 : at + PAGE_BYTES]) for at in range(0, flat.nbytes, PAGE_BYTES)]
        self._file.write(pages)
        self._fences.append(records["address"][bounds[:-1]])
        self._page_count += page_count

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.discard()


def run_file_name(run_id: int) -> str:
    """The name of a run's file in its table's directory."""
    return f"{run_id:016x}{RUN_SUFFIX}"


def _bloom_word_count(record_count: int) -> int:
    words = -(-record_count * BLOOM_BITS_PER_RECORD // 64)
    if words * 8 > MAX_BLOOM_BYTES:
        return 0
    # A multiple that lets it be folded ten times.
    return -(-words // 1024) * 1024


def _page_starts(addresses: NDArray[np.uint32]) -> list[int]:
    """First record of each page, and where the pages that are complete end; no address is cut."""
    total = len(addresses)
    # bytes index ten times faster than an array does.
    same_as_before = b"\0" + (addresses[1:] == addresses[:-1]).tobytes()
    starts, start = [0], 0
    while total - start > RECORDS_PER_PAGE:
        start += RECORDS_PER_PAGE
        while same_as_before[start]:
            start -= 1
        starts.append(start)
    return starts


class Run:
    """An opened run: checked header, fences and bloom filter in RAM, pages on disk."""

    def __init__(self, path: Path, tokenizer_fingerprint: bytes) -> None:
        """Open and check; the pages themselves are checked when they are read.

        Raises:
            FileNotFoundError: there is no such file.
            DamagedFile: truncated, flipped, or not a run.
            WrongOwner: built with another tokenizer.
        """
        self.path = path
        self.file = OpenFile(path, random_access=True, no_follow=True)
        try:
            self.header = parse_run_header(self._read(0, PAGE_BYTES), self.file.size_bytes)
            if self.header.tokenizer_fingerprint != tokenizer_fingerprint:
                raise WrongOwner(f"{path} was built with another tokenizer; build the table again for this model.")
            raw = self._read(self.header.fence_offset_bytes, 4 * self.header.page_count)
            if xxhash.xxh3_64_intdigest(raw) != self.header.fence_checksum:
                raise DamagedFile("its index is damaged")
        except DamagedFile as error:
            raise DamagedFile(f"{path} is left out: {error}.") from None
        # A look-up of one number in a memoryview costs a tenth of what it does in an array.
        self.fences = memoryview(raw).cast("I")
        """[pages] first address of each data page; data page i is page i + 1 of the file."""
        self.bloom: memoryview | None = None

    @property
    def index_bytes(self) -> int:
        """RAM held by fences and bloom filter."""
        return self.fences.nbytes + (self.bloom.nbytes if self.bloom is not None else 0)

    def load_bloom(self) -> bool:
        """Load the filter; False when the run has none or it is damaged, which costs reads and nothing else."""
        if self.header.bloom_word_count and self.bloom is None:
            raw = self._read(self.header.bloom_offset_bytes, 8 * self.header.bloom_word_count)
            if xxhash.xxh3_64_intdigest(raw) == self.header.bloom_checksum:
                self.bloom = memoryview(raw).cast("Q")
        return self.bloom is not None

    def page_number(self, prefix: int) -> int:
        """The one page that may hold a prefix hash; 0 where there is none or the filter rules it out."""
        address = prefix >> 32
        if self.bloom is not None:
            word = self.bloom[(address * len(self.bloom)) >> 32]
            mask = 1 << (prefix & 63) | 1 << (prefix >> 6 & 63) | 1 << (prefix >> 12 & 63) | 1 << (prefix >> 18 & 63)
            if word & mask != mask:
                return 0
        return bisect.bisect_right(self.fences, address)

    def blocks(self, pages_per_block: int) -> Iterator[tuple[NDArray[np.void], int]]:
        """All records in order, a block of whole pages at a time, and how many of the block's pages were damaged."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for first in range(1, self.header.page_count + 1, pages_per_block):
                wanted = min(pages_per_block, self.header.page_count + 1 - first)
                raw = np.zeros(wanted * PAGE_BYTES, dtype=np.uint8)
                os.preadv(fd, [raw.data], first * PAGE_BYTES)
                yield _whole_records(raw, self.header.run_id, first)
        finally:
            os.close(fd)

    def _read(self, offset_bytes: int, length_bytes: int) -> bytes:
        # Buffered: the index is read once, and O_DIRECT would want it aligned.
        with open(self.path, "rb", opener=_no_follow) as file:
            file.seek(offset_bytes)
            return file.read(length_bytes)


def _no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _whole_records(raw: NDArray[np.uint8], run_id: int, first_page: int) -> tuple[NDArray[np.void], int]:
    page_count = len(raw) // PAGE_BYTES
    view = raw.data
    whole = np.array(
        [page_is_whole(view[i * PAGE_BYTES : (i + 1) * PAGE_BYTES], run_id, first_page + i) for i in range(page_count)]
    )
    rows = raw.view(RECORD).reshape(page_count, PAGE_BYTES // RECORD_BYTES)
    counts = np.where(whole, rows[:, 0].view(PAGE_HEADER)["record_count"], 0)
    filled = np.arange(-1, RECORDS_PER_PAGE) < counts[:, None]
    # Column 0 is the page header.
    filled[:, 0] = False
    return take_records(rows.reshape(-1), np.flatnonzero(filled)), int(page_count - whole.sum())
