"""The rate of a disk: measured with a file that is gone afterwards, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.storage import read_rate
from localspec.storage.read_rate import measure_read_rate


def test_a_rate_and_no_trace(tmp_path: Path) -> None:
    assert measure_read_rate(tmp_path, 3 << 20) > 0
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_nearly_full_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rate, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(OSError, match="are free"):
        measure_read_rate(tmp_path, 1 << 20)


def test_a_disk_that_refuses_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path, num_bytes: int) -> None:
        path.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(read_rate, "_write", failing)
    with pytest.raises(OSError, match="No space"):
        measure_read_rate(tmp_path, 1 << 20)
    assert not list(tmp_path.iterdir())
