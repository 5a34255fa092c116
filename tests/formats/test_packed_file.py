"""The file of packed weights: what is written is read, through small rings and out of order; damage is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from localspec.formats import _packed_file, _packed_ring
from localspec.formats._packed_file import PackedWriter, read_header
from localspec.formats._packed_ring import PackedRing
from localspec.storage.errors import DamagedFile

pytestmark = pytest.mark.torch
PIECE = 8192


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_packed_file, _packed_ring):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)


def _tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(3 * PIECE,), (1,), (5, 1000), (PIECE,), (0, 4), (2 * PIECE + 4097,)]
    return [torch.randint(0, 256, size, dtype=torch.uint8, generator=generator) for size in sizes]


def _write(path: Path, tensors: list[torch.Tensor]) -> Path:
    with PackedWriter(path) as writer:
        for number, tensor in enumerate(tensors):
            data = tensor.flatten().numpy()
            # In parts of any size, empty ones too.
            parts = np.array_split(data, 1 + number % 3) if number else [data[:1], data[:0], data[1:]]
            assert writer.add("U8", tuple(tensor.shape), parts) == number
        writer.finish({"note": "ünïcode"})
    return path


@pytest.mark.parametrize("buffers", [1, 2, 7])
def test_tensors_come_back_in_any_order(tmp_path: Path, buffers: int) -> None:
    tensors = _tensors()
    path = _write(tmp_path / "w", tensors)
    header = read_header(path)
    assert header.facts == {"note": "ünïcode"} and not list(tmp_path.glob(".tmp*"))
    with PackedRing(path, header, torch.device("cpu"), buffers) as ring:
        for number in (0, 1, 2, 3, 4, 5, 2, 0, 5, 5, 1):
            assert torch.equal(ring.tensor(number), tensors[number]), number
        target = torch.empty(5, 1000, dtype=torch.uint8)
        ring.read_into(2, target)
        assert torch.equal(target, tensors[2])
        with pytest.raises(ValueError, match="does not go into"):
            ring.read_into(2, torch.empty(4999, dtype=torch.uint8))


def test_other_dtypes(tmp_path: Path) -> None:
    values = torch.randn(7, 33)
    with PackedWriter(tmp_path / "w") as writer:
        writer.add("F32", (7, 33), [values.numpy()])
        writer.add("BF16", (7, 33), [values.bfloat16().view(torch.int16).numpy()])
        writer.finish({})
    with PackedRing(tmp_path / "w", read_header(tmp_path / "w"), torch.device("cpu"), 2) as ring:
        assert torch.equal(ring.tensor(0), values) and torch.equal(ring.tensor(1), values.bfloat16())


def test_bytes_that_do_not_fit_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was given 5 bytes"), PackedWriter(tmp_path / "w") as writer:
        writer.add("U8", (6,), [b"12345"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [0, PIECE, 3 * PIECE - 1, 3 * PIECE + 4096])
def test_a_changed_byte_is_found_when_it_is_read(tmp_path: Path, place: int) -> None:
    path = _write(tmp_path / "w", _tensors())
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with PackedRing(path, read_header(path), torch.device("cpu"), 3) as ring:
        wrong = 0 if place < 3 * PIECE else 2
        with pytest.raises(DamagedFile, match="not what was written"):
            ring.tensor(wrong)
        assert torch.equal(ring.tensor(3), _tensors()[3])


def test_headers_that_lie_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "w", _tensors())
    good = path.read_bytes()
    for bad in (b"", good[:-1], good + b"\0", good[:40], good[:-33] + b"x" + good[-32:]):
        path.write_bytes(bad)
        with pytest.raises(DamagedFile):
            read_header(path)
    for entry in (
        ["U8", [10], 1, ["00"]],
        ["U8", [10], 0, []],
        ["U8", [1 << 40], 0, ["00"]],
        ["U8", [-1], 0, ["00"]],
        ["U9", [1], 0, ["00"]],
        ["U8", [True], 0, ["00"]],
        ["U8", [1 << 47] * 8, 0, ["00"]],
        ["U8", [1], 0, ["zz"]],
        "nonsense",
    ):
        document = {"version": 1, "piece_bytes": PIECE, "tensors": [entry], "facts": {}}
        with pytest.raises((ValueError, TypeError)):
            _packed_file._parsed(json.loads(json.dumps(document)), 8192)


def test_a_file_that_ends_early_is_no_hang(tmp_path: Path) -> None:
    path = _write(tmp_path / "w", _tensors())
    header = read_header(path)
    with path.open("r+b") as file:
        file.truncate(PIECE)
    with PackedRing(path, header, torch.device("cpu"), 2) as ring, pytest.raises(DamagedFile):
        ring.tensor(5)
