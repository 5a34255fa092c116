"""The range loop against a real server: resume, faults of all kinds, hashes, full disks."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hub_fake_server import FakeHub, Fault, running, sha256

from localspec.hub.ranges import Span, SpanLedger
from localspec.hub.records import HubError, HubSettings
from localspec.hub.transfer import Transfer
from localspec.hub.web import (
    CorruptFile,
    FileChanged,
    NotThere,
    RemoteFile,
    SourceUnavailable,
    check_response,
    make_client,
    probe,
)

SETTINGS = HubSettings(
    connect_timeout_s=1.0, stall_timeout_s=0.4, n_connections=3, max_attempts=3, backoff_s=0.01, range_bytes=100_000
)
SIZE = 1_000_003
DATA = random.Random(1).randbytes(SIZE)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running(FakeHub(files={"big.bin": DATA}, lfs={"big.bin"})) as hub:
        yield hub


def fetch(
    hub: FakeHub,
    folder: Path,
    settings: HubSettings = SETTINGS,
    name: str = "big.bin",
    digest: str | None = sha256(DATA),
) -> tuple[str, int]:
    """Fetches into the folder; returns the hash and the number of bytes reported in sum."""
    reported = []
    with make_client(settings) as client:
        remote = probe(client, RemoteFile(name, f"{hub.hub_url}/{hub.repo}/resolve/main/{name}", sha256=digest))
        transfer = Transfer(client, remote, folder / name, settings, reported.append)
        return transfer.run(), transfer.held_bytes if not reported else sum(reported)


def test_whole_file_in_parallel_ranges(hub: FakeHub, tmp_path: Path) -> None:
    digest, reported = fetch(hub, tmp_path)
    assert digest == sha256(DATA)
    assert (tmp_path / "big.bin").read_bytes() == DATA
    assert reported == SIZE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.bin"]
    ranges = {r.range for r in hub.log if r.path == "/cdn/big.bin" and r.range != (0, 0)}
    assert len(ranges) == 11 and (0, 99_999) in ranges and (1_000_000, 1_000_002) in ranges
    assert oct((tmp_path / "big.bin").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("size", [0, 1, 100_000, 100_001])
def test_odd_sizes(hub: FakeHub, tmp_path: Path, size: int) -> None:
    hub.files["odd.bin"] = DATA[:size]
    assert fetch(hub, tmp_path, name="odd.bin", digest=sha256(DATA[:size]))[0] == sha256(DATA[:size])
    assert (tmp_path / "odd.bin").read_bytes() == DATA[:size]


FAULTS = {
    "503 twice": [Fault("status", status=503, not_before_byte=1, times=2)],
    "429 with a pause": [Fault("status", status=429, retry_after="0", not_before_byte=1)],
    "dropped at once": [Fault("drop", after_bytes=0, not_before_byte=1)],
    "dropped midway, many times": [Fault("drop", after_bytes=40_000, not_before_byte=1, times=9)],
    "stalled": [Fault("stall", after_bytes=30_000, not_before_byte=1)],
    "whole file instead of a part": [Fault("whole", not_before_byte=200_000)],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
def test_faults_that_pass_are_survived(hub: FakeHub, tmp_path: Path, faults: list[Fault]) -> None:
    hub.faults = [replace(fault) for fault in faults]
    assert fetch(hub, tmp_path)[0] == sha256(DATA)
    assert (tmp_path / "big.bin").read_bytes() == DATA
    assert hub.faults == []


def test_attempts_that_move_on_do_not_count(hub: FakeHub, tmp_path: Path) -> None:
    """Nine requests in a row bring a piece and break; with two attempts allowed the file still arrives."""
    hub.faults = [Fault("drop", after_bytes=100_000, times=10)]
    settings = replace(SETTINGS, max_attempts=2, range_bytes=2 * SIZE)
    assert fetch(hub, tmp_path, settings)[0] == sha256(DATA)
    assert hub.faults == []


def test_a_stall_costs_its_timeout_not_more(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = [Fault("stall", after_bytes=10, not_before_byte=1)]
    began_s = time.monotonic()
    fetch(hub, tmp_path)
    assert 0.3 < time.monotonic() - began_s < 2.5


def test_a_trickle_is_dropped_and_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    """20 bytes a second never stall a socket; one range of this file would take an hour."""
    hub.faults = [Fault("trickle", not_before_byte=1, times=2)]
    began_s = time.monotonic()
    assert fetch(hub, tmp_path)[0] == sha256(DATA)
    assert 0.3 < time.monotonic() - began_s < 3.0


def test_a_server_that_only_trickles_is_given_up(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = [Fault("trickle", not_before_byte=1, times=1000)]
    with pytest.raises(SourceUnavailable, match="the bytes only trickle"):
        fetch(hub, tmp_path, replace(SETTINGS, max_attempts=2))
    hub.faults = []
    assert fetch(hub, tmp_path)[0] == sha256(DATA)


def test_a_stretch_of_a_file(hub: FakeHub, tmp_path: Path) -> None:
    """Bytes 100,003 to 400,010 alone, with a drop on the way and a resume by another object."""
    stretch = DATA[100_003:400_010]
    settings = replace(SETTINGS, max_attempts=2, stall_timeout_s=5.0)
    with make_client(settings) as client:
        whole = probe(client, RemoteFile("big.bin", f"{hub.hub_url}/{hub.repo}/resolve/main/big.bin"))
        remote = replace(whole, first_byte=100_003, size_bytes=len(stretch), whole_bytes=SIZE)
        hub.faults = [Fault("status", status=500, not_before_byte=300_000, times=1000)]
        with pytest.raises(SourceUnavailable):
            Transfer(client, remote, tmp_path / "big.bin", settings, lambda n: None).run()
        hub.faults = []
        again = Transfer(client, remote, tmp_path / "big.bin", settings, lambda n: None)
        assert 0 < again.held_bytes < len(stretch)
        moved = Transfer(client, replace(remote, first_byte=100_002), tmp_path / "big.bin", settings, lambda n: None)
        assert moved.held_bytes == 0
        assert again.run() == sha256(stretch)
    assert (tmp_path / "big.bin").read_bytes() == stretch
    asked = [r.range for r in hub.log if r.path == "/cdn/big.bin" and r.range != (0, 0)]
    assert min(r[0] for r in asked if r) == 100_003 and max(r[1] for r in asked if r) == 400_009


def test_server_without_ranges(hub: FakeHub, tmp_path: Path) -> None:
    hub.serves_ranges = False
    hub.faults = [Fault("drop", after_bytes=300_000)]
    with pytest.raises(SourceUnavailable):
        hub.faults = [Fault("drop", after_bytes=0, times=9)]
        fetch(hub, tmp_path)
    hub.faults = []
    assert fetch(hub, tmp_path)[0] == sha256(DATA)


def test_server_without_ranges_that_drops(hub: FakeHub, tmp_path: Path) -> None:
    hub.serves_ranges = False
    with make_client(SETTINGS) as client:
        url = f"{hub.hub_url}/{hub.repo}/resolve/main/big.bin"
        remote = probe(client, RemoteFile("big.bin", url, sha256=sha256(DATA)))
        assert not remote.serves_ranges
        hub.faults = [Fault("drop", after_bytes=300_000, times=2)]
        assert Transfer(client, remote, tmp_path / "big.bin", SETTINGS, lambda n: None).run() == sha256(DATA)
    assert (tmp_path / "big.bin").read_bytes() == DATA


def test_giving_up_keeps_what_is_there_and_resume_fetches_only_the_rest(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = [Fault("status", status=500, not_before_byte=500_000, times=1000)]
    with pytest.raises(SourceUnavailable, match="it answers 500"):
        fetch(hub, tmp_path)
    held = SpanLedger(SIZE, [Span(*s) for s in _sidecar(tmp_path)["done"]]).done_bytes
    assert 0 < held <= 500_000
    hub.faults, hub.log = [], []
    digest, reported = fetch(hub, tmp_path)
    assert digest == sha256(DATA)
    assert reported == SIZE - held
    assert hub.body_bytes_of("big.bin") == SIZE - held


def _sidecar(folder: Path) -> dict[str, list[list[int]]]:
    import json

    return json.loads((folder / "big.bin.part.json").read_text())


@pytest.mark.parametrize("damage", ["cut", "not json", "beyond the file", "other etag", "other size", "missing data"])
def test_a_doubtful_record_starts_afresh(hub: FakeHub, tmp_path: Path, damage: str) -> None:
    hub.faults = [Fault("status", status=500, not_before_byte=500_000, times=1000)]
    with pytest.raises(SourceUnavailable):
        fetch(hub, tmp_path)
    sidecar = tmp_path / "big.bin.part.json"
    text = sidecar.read_text()
    changed = {
        "cut": text[: len(text) // 2],
        "not json": "\x00" * 40,
        "beyond the file": text.replace('"done": [', '"done": [[0, 99999999],'),
        "other etag": text.replace('"etag": "', '"etag": "x'),
        "other size": text.replace(str(SIZE), str(SIZE + 1)),
        "missing data": text,
    }[damage]
    assert damage == "missing data" or changed != text
    sidecar.write_text(changed)
    if damage == "missing data":
        os.truncate(tmp_path / "big.bin.part", 10)
    hub.faults, hub.log = [], []
    assert fetch(hub, tmp_path)[0] == sha256(DATA)
    assert hub.body_bytes_of("big.bin") == SIZE


def test_damaged_partial_data_is_never_accepted(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = [Fault("status", status=500, not_before_byte=500_000, times=1000)]
    with pytest.raises(SourceUnavailable):
        fetch(hub, tmp_path)
    with (tmp_path / "big.bin.part").open("r+b") as file:
        file.write(b"\xff\x00\xff")
    hub.faults = []
    with pytest.raises(CorruptFile, match="wrong hash"):
        fetch(hub, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert fetch(hub, tmp_path)[0] == sha256(DATA)


def test_wrong_bytes_are_never_accepted(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = [Fault("wrong_bytes", not_before_byte=300_000)]
    with pytest.raises(CorruptFile, match=r"big\.bin from 127\.0\.0\.1 has the wrong hash"):
        fetch(hub, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_place_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = [Fault("other_part", not_before_byte=100_000)]
    with pytest.raises(SourceUnavailable, match="another part"):
        fetch(hub, tmp_path)
    assert not (tmp_path / "big.bin").exists()


def test_file_that_changes_under_way(hub: FakeHub, tmp_path: Path) -> None:
    other = random.Random(2).randbytes(SIZE)
    with make_client(SETTINGS) as client:
        url = f"{hub.hub_url}/{hub.repo}/resolve/main/big.bin"
        remote = probe(client, RemoteFile("big.bin", url))

        def change(n_bytes: int) -> None:
            hub.files["big.bin"] = other

        with pytest.raises(FileChanged, match="changed at"):
            Transfer(client, remote, tmp_path / "big.bin", SETTINGS, change).run()
    assert list(tmp_path.iterdir()) == []
    assert fetch(hub, tmp_path, digest=None)[0] == sha256(other)


def test_changed_etag_between_runs_starts_afresh(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = [Fault("status", status=500, not_before_byte=500_000, times=1000)]
    with pytest.raises(SourceUnavailable):
        fetch(hub, tmp_path, digest=None)
    other = random.Random(2).randbytes(SIZE)
    hub.files["big.bin"], hub.faults, hub.log = other, [], []
    assert fetch(hub, tmp_path, digest=None)[0] == sha256(other)
    assert hub.body_bytes_of("big.bin") == SIZE


def test_without_etag_and_hash_nothing_is_resumed(hub: FakeHub, tmp_path: Path) -> None:
    hub.etags, hub.lfs = False, set()
    hub.faults = [Fault("status", status=500, not_before_byte=500_000, times=1000)]
    with pytest.raises(SourceUnavailable):
        fetch(hub, tmp_path, digest=None)
    hub.faults, hub.log = [], []
    assert fetch(hub, tmp_path, digest=None)[0] == sha256(DATA)
    assert hub.body_bytes_of("big.bin") == SIZE


def test_disk_full_leaves_a_resumable_state(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_pwrite, written = os.pwrite, [0]

    def pwrite(handle: int, data: bytes, position: int) -> int:
        written[0] += len(data)
        if written[0] > 400_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_pwrite(handle, data, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(HubError, match=r"is full; what was fetched stays") as caught:
        fetch(hub, tmp_path)
    assert caught.value.exit_code == 3
    monkeypatch.undo()
    held = SpanLedger(SIZE, [Span(*s) for s in _sidecar(tmp_path)["done"]]).done_bytes
    assert held > 200_000
    hub.log = []
    assert fetch(hub, tmp_path)[0] == sha256(DATA)
    assert hub.body_bytes_of("big.bin") == SIZE - held


def test_missing_file_and_unreachable_host(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(NotThere, match="answers 404"):
        fetch(hub, tmp_path, name="other.bin")
    with make_client(SETTINGS) as client, pytest.raises(SourceUnavailable, match=r"127\.0\.0\.1 cannot be reached"):
        probe(client, RemoteFile("x", "http://127.0.0.1:9/x"))


def test_other_size_than_pinned_is_refused_before_the_first_byte(hub: FakeHub, tmp_path: Path) -> None:
    url = f"{hub.hub_url}/{hub.repo}/resolve/main/big.bin"
    with make_client(SETTINGS) as client, pytest.raises(CorruptFile, match="1000004 are expected"):
        probe(client, RemoteFile("big.bin", url, size_bytes=SIZE + 1))


def test_token_does_not_cross_to_the_second_host(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "secret"
    with make_client(SETTINGS) as client:
        url = f"{hub.hub_url}/{hub.repo}/resolve/main/big.bin"
        remote = probe(client, RemoteFile("big.bin", url, headers=(("Authorization", "Bearer secret"),)))
        Transfer(client, remote, tmp_path / "big.bin", SETTINGS, lambda n: None).run()
    assert {r.authorization for r in hub.log if r.path.startswith("/cdn/")} == {None}
    assert {r.authorization for r in hub.log if "/resolve/" in r.path} == {"Bearer secret"}
    assert "secret" not in repr(remote)


def test_a_redirect_out_of_https_is_refused() -> None:
    response = httpx.Response(200, request=httpx.Request("GET", "http://cdn.example/x"))
    check_response(response, RemoteFile("x", "http://hub.example/x"))
    response.history = [httpx.Response(302, request=httpx.Request("GET", "https://hub.example/x"))]
    with pytest.raises(HubError, match=r"hub\.example redirects from https to plain http"):
        check_response(response, RemoteFile("x", "https://hub.example/x"))
