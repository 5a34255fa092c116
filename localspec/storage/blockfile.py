"""Cached blocks on disk: one blob a file behind a 4 KiB header that says what it is and what its bytes hash to.

Knows keys, token ranges and checksums; does not know what a payload holds, nor which block is worth keeping. A block is
a cache entry: any doubt about it is an error the caller answers by computing again.

Header, little-endian, at offset 0 (the payload starts at 4096): magic 8, version u32, layout length u32, note length
u32, 4 zeros, fingerprint 32, key 32, parent key 32, first token u64, end token u64, payload bytes u64, xxh3-64 of the
payload u64, layout text, note; zeros; at 4088 the xxh3-64 of the 4088 bytes before it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from localspec.storage.errors import DamagedFile, WrongOwner
from localspec.storage.files import (
    AtomicFile,
    Buffer,
    WriteFunction,
    as_bytes,
    make_private_directory,
    sweep_temporary_files,
    sync_file_system,
)

HEADER_BYTES = 4096
_MAGIC = b"LSPBLOCK"
_VERSION = 2
_FIELDS = struct.Struct("<8sIII4x32s32s32sQQQQ")
_HASHED_BYTES = HEADER_BYTES - 8
MAX_LAYOUT_BYTES = 1024
MAX_NOTE_BYTES = 2048
_SUFFIX = ".blk"
_FINGERPRINT_NAME = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class BlockHeader:
    """What a block says of itself. The writer of the block fills it; nobody changes it."""

    fingerprint: bytes
    """32 bytes: model, cache dtypes and layout, so that other weights never read it."""
    key: bytes
    """32 bytes: the hash chain up to this block's last token."""
    parent_key: bytes
    """32 bytes: the chain before its first token; zeros at the root."""
    token_begin: int
    token_end: int
    layout: str
    """Dtypes and shapes in the caller's words; compared as text."""
    payload_bytes: int = 0
    payload_hash: int = 0
    """xxh3-64; both are set by `BlockStore.write`."""
    note: bytes = b""
    """What an index needs to know of the block beside its key."""


@dataclass(frozen=True)
class SweepReport:
    """What a sweep removed."""

    temporary_files: int
    foreign_directories: int
    freed_bytes: int


def pack_header(header: BlockHeader) -> bytes:
    """The 4096 bytes that precede a payload; ValueError for a field that does not fit the format."""
    layout = header.layout.encode()
    if any(len(field) != 32 for field in (header.fingerprint, header.key, header.parent_key)):
        raise ValueError("Fingerprint, key and parent key of a block must have 32 bytes each.")
    if not 0 <= header.token_begin <= header.token_end or len(layout) > MAX_LAYOUT_BYTES:
        raise ValueError(f"A block needs an ordered token range and a layout of at most {MAX_LAYOUT_BYTES} bytes.")
    if len(header.note) > MAX_NOTE_BYTES:
        raise ValueError(f"The note of a block has at most {MAX_NOTE_BYTES} bytes, not {len(header.note)}.")
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, len(layout), len(header.note), header.fingerprint, header.key, header.parent_key,
        header.token_begin, header.token_end, header.payload_bytes, header.payload_hash,
    )  # fmt: skip
    hashed = (fields + layout + header.note).ljust(_HASHED_BYTES, b"\0")
    return hashed + struct.pack("<Q", xxhash.xxh3_64_intdigest(hashed))


def parse_block_header(data: Buffer) -> BlockHeader:
    """Check and read the first 4096 bytes of a block.

    Raises:
        DamagedFile: too short, not a block, another version, or its checksum does not fit.
    """
    view = as_bytes(data)
    if view.nbytes != HEADER_BYTES or view[:8] != _MAGIC:
        raise DamagedFile("this is not a block header")
    if xxhash.xxh3_64_intdigest(view[:_HASHED_BYTES]) != int.from_bytes(view[_HASHED_BYTES:], "little"):
        raise DamagedFile("the header's checksum does not fit")
    # The version first: another one may have other fields.
    version = int.from_bytes(view[8:12], "little")
    _, _, layout_bytes, note_bytes, fingerprint, key, parent, begin, end, payload_bytes, payload_hash = (
        _FIELDS.unpack_from(view)
    )
    if version != _VERSION or layout_bytes > MAX_LAYOUT_BYTES or note_bytes > MAX_NOTE_BYTES or begin > end:
        raise DamagedFile(f"the header is of version {version} or holds impossible values")
    try:
        layout = bytes(view[_FIELDS.size : _FIELDS.size + layout_bytes]).decode()
    except UnicodeDecodeError:
        raise DamagedFile("the layout is not text") from None
    note = bytes(view[_FIELDS.size + layout_bytes : _FIELDS.size + layout_bytes + note_bytes])
    return BlockHeader(fingerprint, key, parent, begin, end, layout, payload_bytes, payload_hash, note)


def verify_payload(header: BlockHeader, payload: Buffer, path: Path) -> None:
    """Compare a payload with its header (20 GB/s, the interpreter's lock let go); DamagedFile if it differs."""
    verify_parts(header, [payload], path)


def verify_parts(header: BlockHeader, payload: Iterable[Buffer], path: Path) -> None:
    """As `verify_payload`, of one that comes in several parts, each looked at before the next is asked for."""
    digest, num_bytes = xxhash.xxh3_64(), 0
    for data in map(as_bytes, payload):
        digest.update(data)
        num_bytes += data.nbytes
    if num_bytes != header.payload_bytes or digest.intdigest() != header.payload_hash:
        raise DamagedFile(f"The payload of {path} does not match its checksum; it is to be computed again.")


class BlockStore:
    """A directory of blocks: `<fingerprint>/<two digits>/<key>.blk`, directories 0700, files 0600, no links followed.

    Safe for several processes: a block appears by rename, and two writers of one key write the same bytes.
    """

    def __init__(self, root: Path, *, write_function: WriteFunction = os.write) -> None:
        """Create the directory if needed; PermissionError when it is a link or another user's."""
        self.root = root
        self._write_function = write_function
        make_private_directory(root)

    def path(self, fingerprint: bytes, key: bytes) -> Path:
        """Where this block lies, whether or not it exists."""
        return self.root / fingerprint.hex() / f"{key[0]:02x}" / f"{key.hex()}{_SUFFIX}"

    def write(self, header: BlockHeader, payload: Sequence[Buffer]) -> BlockHeader:
        """Write a block from pieces; returns the header with size and checksum set.

        Not synced one by one: call `flush` after a group, before anything that promises the blocks is recorded. A block
        that a power cut tears fails its checksum.

        Raises:
            OSError: the disk is full (ENOSPC) or refuses; nothing is visible under the key.
        """
        pieces = [as_bytes(piece) for piece in payload]
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        complete = BlockHeader(
            header.fingerprint, header.key, header.parent_key, header.token_begin, header.token_end, header.layout,
            sum(piece.nbytes for piece in pieces), digest.intdigest(), header.note,
        )  # fmt: skip
        packed = pack_header(complete)
        path = self.path(header.fingerprint, header.key)
        make_private_directory(path.parent.parent)
        make_private_directory(path.parent)
        with AtomicFile(path, durable=False, write_function=self._write_function) as file:
            file.write(packed)
            for piece in pieces:
                file.write(piece)
        return complete

    def read_header(self, fingerprint: bytes, key: bytes) -> BlockHeader:
        """Read and check a block's header, and that the file has the size it declares.

        Raises:
            FileNotFoundError: there is no such block.
            DamagedFile: torn or flipped.
            WrongOwner: it was written for another model or key.
        """
        path = self.path(fingerprint, key)
        fd = _open_block(path)
        try:
            return _checked_header(fd, path, fingerprint, key)
        finally:
            os.close(fd)

    def read_into(self, fingerprint: bytes, key: bytes, layout: str, buffer: memoryview) -> BlockHeader:
        """Read a block into a buffer of exactly its size and verify it; on any error the buffer's content is void.

        Raises:
            FileNotFoundError, DamagedFile: as `read_header`; also when the payload's checksum does not fit.
            WrongOwner: another model, key or layout.
            ValueError: the buffer has another size than the payload.
        """
        path = self.path(fingerprint, key)
        fd = _open_block(path)
        try:
            header = _checked_header(fd, path, fingerprint, key)
            if header.layout != layout:
                raise WrongOwner(f"{path} holds the layout {header.layout!r}, not {layout!r}; compute it again.")
            target = buffer.cast("B")
            if target.nbytes != header.payload_bytes:
                raise ValueError(f"The buffer for {path} must have {header.payload_bytes} bytes, not {target.nbytes}.")
            done_bytes = 0
            while done_bytes < target.nbytes:
                count = os.preadv(fd, [target[done_bytes:]], HEADER_BYTES + done_bytes)
                if count == 0:
                    raise DamagedFile(f"{path} ends inside its payload; it is to be computed again.")
                done_bytes += count
        finally:
            os.close(fd)
        verify_payload(header, target, path)
        return header

    def delete(self, fingerprint: bytes, key: bytes) -> bool:
        """Remove a block; False when there was none. Readers that opened it keep their bytes."""
        try:
            self.path(fingerprint, key).unlink()
        except FileNotFoundError:
            return False
        return True

    def flush(self) -> None:
        """Make every block written so far durable, with one call for the file system."""
        sync_file_system(self.root)

    def blocks(self, fingerprint: bytes) -> Iterator[tuple[bytes, int]]:
        """Key and file size of each block of a model, from names alone: for rebuilding an index and for caps."""
        base = self.root / fingerprint.hex()
        for shard in _directories(base):
            with os.scandir(shard) as found:
                for item in found:
                    name = item.name
                    if name.endswith(_SUFFIX) and _FINGERPRINT_NAME.fullmatch(name[:64]) and len(name) == 64 + 4:
                        yield bytes.fromhex(name[:64]), item.stat(follow_symlinks=False).st_size

    def sweep(self, keep_fingerprints: Container[bytes]) -> SweepReport:
        """Remove the temporary files of dead writers and everything of models that are not to be kept."""
        temporary_files = foreign = freed_bytes = 0
        for base in _directories(self.root):
            if not _FINGERPRINT_NAME.fullmatch(base.name):
                continue
            if bytes.fromhex(base.name) not in keep_fingerprints:
                freed_bytes += sum(item.lstat().st_size for item in base.rglob("*") if item.is_file())
                shutil.rmtree(base, ignore_errors=True)
                foreign += 1
                continue
            for shard in _directories(base):
                temporary_files += sweep_temporary_files(shard)
        return SweepReport(temporary_files, foreign, freed_bytes)


def _directories(base: Path) -> list[Path]:
    try:
        with os.scandir(base) as found:
            return sorted(Path(item.path) for item in found if item.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _open_block(path: Path) -> int:
    # O_NOFOLLOW covers the last component; the two directories above are ours and 0700.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedFile(f"{path} is not a regular file.")
    return fd


def _checked_header(fd: int, path: Path, fingerprint: bytes, key: bytes) -> BlockHeader:
    try:
        header = parse_block_header(os.pread(fd, HEADER_BYTES, 0))
    except DamagedFile as error:
        raise DamagedFile(f"{path} cannot be used: {error}.") from None
    if header.fingerprint != fingerprint or header.key != key:
        raise WrongOwner(f"{path} holds a block of another model or position; it is to be computed again.")
    if os.fstat(fd).st_size != HEADER_BYTES + header.payload_bytes:
        raise DamagedFile(f"{path} does not have the size that its header declares; it is to be computed again.")
    return header
