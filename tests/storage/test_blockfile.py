"""Blocks: round trip, nothing served that is torn, flipped, foreign or half written."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localspec.storage.aio import AsyncReader, OpenFile
from localspec.storage.blockfile import (
    HEADER_BYTES,
    BlockHeader,
    BlockStore,
    pack_header,
    parse_block_header,
    verify_payload,
)
from localspec.storage.errors import DamagedFile, WrongOwner
from localspec.storage.files import TEMPORARY_PREFIX

MODEL, OTHER = bytes(range(32)), b"\xee" * 32
KEY = b"\xab" * 32
HEADER = BlockHeader(MODEL, KEY, b"\0" * 32, 256, 300, "kv bf16 [16, 2, 44, 4, 256] ü")
DATA = np.random.default_rng(5).bytes(100_003)


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "cache" / "blocks")


def read(store: BlockStore, layout: str = HEADER.layout, size: int = len(DATA)) -> bytes:
    buffer = bytearray(size)
    store.read_into(MODEL, KEY, layout, memoryview(buffer))
    return bytes(buffer)


def test_round_trip(store: BlockStore) -> None:
    written = store.write(HEADER, [DATA[:7], np.frombuffer(DATA[7:50_007], dtype="i4"), memoryview(DATA)[50_007:]])
    assert read(store) == DATA
    assert store.read_header(MODEL, KEY) == written
    assert replace(written, payload_bytes=0, payload_hash=0) == HEADER
    path = store.path(MODEL, KEY)
    assert path.stat().st_mode & 0o777 == 0o600
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (path.parent, path.parent.parent, store.root))
    assert list(store.blocks(MODEL)) == [(KEY, HEADER_BYTES + len(DATA))]
    assert list(store.blocks(OTHER)) == []
    store.flush()
    assert store.delete(MODEL, KEY)
    assert not store.delete(MODEL, KEY)
    with pytest.raises(FileNotFoundError):
        read(store)


def test_the_reader_reads_payloads(store: BlockStore) -> None:
    header = store.write(HEADER, [DATA])
    with AsyncReader(threads=1) as reader:
        file = OpenFile(store.path(MODEL, KEY), no_follow=True)
        view = reader.submit(file, HEADER_BYTES, header.payload_bytes).result(10)
        verify_payload(header, view, file.path)
        with pytest.raises(DamagedFile):
            verify_payload(header, view[1:], file.path)


def test_every_flipped_header_byte_is_found() -> None:
    good = pack_header(replace(HEADER, payload_bytes=9, payload_hash=7))
    assert parse_block_header(good) == replace(HEADER, payload_bytes=9, payload_hash=7)
    for position in range(0, HEADER_BYTES, 7):
        bad = bytearray(good)
        bad[position] ^= 0x10
        with pytest.raises(DamagedFile):
            parse_block_header(bad)
    with pytest.raises(DamagedFile):
        parse_block_header(good[:-1])


@pytest.mark.parametrize("position", [0, 50, 4090, 4096, 60_000, HEADER_BYTES + len(DATA) - 1])
def test_flipped_bit_is_never_served(store: BlockStore, position: int) -> None:
    store.write(HEADER, [DATA])
    path = store.path(MODEL, KEY)
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamagedFile, match=str(path.name)):
        read(store)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 50_000, HEADER_BYTES + len(DATA) - 1, HEADER_BYTES + len(DATA) + 1])
def test_torn_file_is_never_served(store: BlockStore, size: int) -> None:
    store.write(HEADER, [DATA])
    os.truncate(store.path(MODEL, KEY), size)
    with pytest.raises(DamagedFile):
        read(store)
    with pytest.raises(DamagedFile):
        store.read_header(MODEL, KEY)


def test_other_model_key_layout_and_size(store: BlockStore) -> None:
    store.write(HEADER, [DATA])
    with pytest.raises(FileNotFoundError):
        store.read_header(OTHER, KEY)
    foreign = store.path(OTHER, KEY)
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(store.path(MODEL, KEY).read_bytes())
    with pytest.raises(WrongOwner):
        store.read_header(OTHER, KEY)
    with pytest.raises(WrongOwner, match="layout"):
        read(store, layout="kv fp8")
    with pytest.raises(ValueError, match="must have"):
        read(store, size=len(DATA) - 1)
    for bad in (replace(HEADER, key=b"x"), replace(HEADER, token_end=1), replace(HEADER, layout="x" * 2000)):
        with pytest.raises(ValueError):
            store.write(bad, [b""])


def test_links_are_not_followed(store: BlockStore, tmp_path: Path) -> None:
    store.write(HEADER, [DATA])
    path = store.path(MODEL, KEY)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        read(store)
    (tmp_path / "link").symlink_to(store.root)
    with pytest.raises(PermissionError, match="link"):
        BlockStore(tmp_path / "link")


def test_sweep(store: BlockStore) -> None:
    store.write(HEADER, [DATA])
    store.write(replace(HEADER, fingerprint=OTHER), [DATA])
    (store.path(MODEL, KEY).parent / f"{TEMPORARY_PREFIX}1").write_bytes(b"half")
    (store.root / "README").write_bytes(b"not ours to remove")
    report = store.sweep({MODEL})
    assert (report.temporary_files, report.foreign_directories) == (1, 1)
    assert report.freed_bytes == HEADER_BYTES + len(DATA)
    assert read(store) == DATA
    assert (store.root / "README").exists()
    assert store.sweep({MODEL}).temporary_files == 0


@pytest.mark.parametrize("room", [0, 4096, 5000, 100_000])
def test_full_disk_shows_nothing(tmp_path: Path, room: int) -> None:
    def limited(fd: int, data: memoryview) -> int:
        at = os.lseek(fd, 0, os.SEEK_CUR)
        if at >= room:
            raise OSError(28, "No space left on device")
        return os.write(fd, data[: room - at])

    store = BlockStore(tmp_path / "b", write_function=limited)
    with pytest.raises(OSError, match="space"):
        store.write(HEADER, [DATA])
    assert not [path for path in store.root.rglob("*") if path.is_file()]
    with pytest.raises(FileNotFoundError):
        read(store)


def test_file_size_limit_of_the_kernel(store: BlockStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError):
            store.write(HEADER, [DATA])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert not [path for path in store.root.rglob("*") if path.is_file()]


WRITER = """
import sys
from pathlib import Path
from localspec.storage.blockfile import BlockHeader, BlockStore
store = BlockStore(Path(sys.argv[1]))
print("ready", flush=True)
n = 0
while True:
    key = n.to_bytes(1, "little") * 32
    store.write(BlockHeader(bytes(32), key, bytes(32), n, n + 1, "x"), [key * 30_000])
    n = (n + 1) % 200
"""


def test_killed_writer_leaves_only_whole_blocks(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    checked = 0
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "k")], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(float(rng.random()) * 0.08)
        process.kill()
        process.wait()
        process.stdout.close()
        store = BlockStore(tmp_path / "k")
        store.sweep({bytes(32)})
        for key, size in store.blocks(bytes(32)):
            buffer = bytearray(size - HEADER_BYTES)
            store.read_into(bytes(32), key, "x", memoryview(buffer))
            assert bytes(buffer) == key * 30_000
            checked += 1
        assert not list(store.root.rglob(f"{TEMPORARY_PREFIX}*"))
    assert checked
