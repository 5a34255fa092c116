"""The doctor's judgements on made-up cards and on real directories, ports and terminals."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localspec.hub import doctor, doctor_places
from localspec.hub.doctor import DoctorInput, SelfTest
from localspec.hub.doctor_report import Check, Report
from localspec.hub.doctor_terminal import TerminalFacts
from localspec.hub.gpus import Gpu, GpuProcess, GpuReading

GIB = 2**30
CARD = Gpu(0, "RTX 5090", (12, 0), 32 * GIB, 31 * GIB, 5, 16, 5, 16, ())
GOOD_TERMINAL = TerminalFacts(True, 120, 40, "xterm-256color", "truecolor")


def reading(**changes: object) -> GpuReading:
    return GpuReading((dataclasses.replace(CARD, **changes),), "580.1", "13.0")  # type: ignore[arg-type]


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_good_card() -> None:
    checks = doctor.check_gpus(reading(), wants_gpu=True)
    assert [c.status for c in checks] == ["ok"] * 4
    assert "driver 580.1, CUDA up to 13.0" in checks[0].finding
    assert by_name(checks)["gpu 0"].finding == "RTX 5090, compute capability 12.0"


@pytest.mark.parametrize(("wants_gpu", "status"), [(True, "failed"), (False, "skipped")])
def test_no_driver_fails_only_when_a_gpu_is_wanted(wants_gpu: bool, status: str) -> None:
    (check,) = doctor.check_gpus(GpuReading(problem="no NVIDIA driver is installed"), wants_gpu)
    assert check.status == status and check.machine and "reboot" in check.advice
    assert Report((check,)).exit_code == (3 if wants_gpu else 0)
    (empty,) = doctor.check_gpus(GpuReading((), "1", "1"), wants_gpu)
    assert empty.finding == "the driver reports no card"


def test_old_card_narrow_link_and_held_memory() -> None:
    held = (GpuProcess(41, "python", 9 * GIB), GpuProcess(42, "Xorg", None))
    checks = by_name(
        doctor.check_gpus(reading(compute_capability=(7, 5), free_bytes=20 * GIB, processes=held, pcie_width=4), True)
    )
    assert checks["gpu 0"].status == "failed" and "8.0" in checks["gpu 0"].advice
    assert checks["gpu 0 memory"].status == "warning"
    assert checks["gpu 0 memory"].advice == "end what holds it: python (pid 41, 9.0 GiB), Xorg (pid 42)"
    assert checks["gpu 0 link"].status == "warning"
    idle = by_name(doctor.check_gpus(reading(pcie_generation=1), True))
    assert idle["gpu 0 link"].status == "ok"
    unknown = by_name(doctor.check_gpus(reading(pcie_width=None), True))
    assert unknown["gpu 0 link"].status == "skipped"


def test_exit_codes() -> None:
    fine, bad = Check("a", "warning", ""), Check("b", "failed", "")
    assert Report((fine,)).exit_code == 0
    assert Report((fine, bad)).exit_code == 1
    assert Report((bad, dataclasses.replace(bad, machine=True))).exit_code == 3


def test_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check = doctor_places.check_port("127.0.0.1", taken.getsockname()[1])
    assert check.status == "warning" and "cannot be opened" in check.finding
    assert doctor_places.check_port("127.0.0.1", 0).status == "ok"


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor_places.check_disk_speed(tmp_path, 2 << 20)
    assert "GB/s" in check.finding and check.status in ("ok", "warning")
    assert list(tmp_path.iterdir()) == []
    assert doctor_places.check_disk_space(tmp_path).status in ("ok", "failed")
    monkeypatch.setattr(doctor_places, "LEAST_FREE_DISK_BYTES", 1 << 60)
    full = doctor_places.check_disk_space(tmp_path)
    assert full.status == "failed" and full.machine
    (tmp_path / "file").write_text("")
    assert doctor_places.check_disk_speed(tmp_path / "file").status == "failed"


def test_a_full_disk_is_not_a_matter_of_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, cure in ((errno.ENOSPC, "free space"), (errno.EROFS, "permissions")):
        full = OSError(code, os.strerror(code))
        monkeypatch.setattr("localspec.hub.doctor_places._measure_disk", _raiser(full))
        assert cure in doctor_places.check_disk_speed(tmp_path).advice


def _raiser(error: OSError) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise error

    return fail


def test_privacy(tmp_path: Path) -> None:
    assert doctor_places.check_private(tmp_path / "absent").status == "skipped"
    tmp_path.chmod(0o700)
    assert doctor_places.check_private(tmp_path).status == "ok"
    tmp_path.chmod(0o755)
    assert doctor_places.check_private(tmp_path).advice == f"run: chmod 700 {tmp_path}"


def test_models_with_problems(tmp_path: Path) -> None:
    assert doctor_places.check_models(tmp_path).status == "warning"
    (tmp_path / "models" / "broken").mkdir(parents=True)
    check = doctor_places.check_models(tmp_path)
    assert check.status == "failed" and check.finding.startswith("broken: ")


@pytest.mark.parametrize(
    ("terminal", "status", "words"),
    [
        (GOOD_TERMINAL, "ok", "true colour"),
        (dataclasses.replace(GOOD_TERMINAL, color_term=None, inside_tmux=True), "ok", "in tmux"),
        (dataclasses.replace(GOOD_TERMINAL, columns=79), "warning", "79x40"),
        (dataclasses.replace(GOOD_TERMINAL, term="dumb"), "warning", "dumb"),
        (dataclasses.replace(GOOD_TERMINAL, is_terminal=False), "skipped", "not a terminal"),
        (
            dataclasses.replace(GOOD_TERMINAL, program="WezTerm"),
            "ok",
            "WezTerm (xterm-256color), 120x40, true colour",
        ),
        (dataclasses.replace(GOOD_TERMINAL, term="linux"), "ok", "some keys alike, clipboard unknown"),
        (dataclasses.replace(GOOD_TERMINAL, encoding="ANSI_X3.4-1968"), "warning", "xterm-256color"),
    ],
)
def test_terminal(terminal: TerminalFacts, status: str, words: str) -> None:
    check = doctor.check_terminal(terminal)
    assert check.status == status and words in check.finding


def test_self_test_results() -> None:
    def explode() -> SelfTest:
        raise RuntimeError("illegal instruction")

    assert doctor.check_self_test(None).status == "skipped"
    assert doctor.check_self_test(lambda: SelfTest("12 kernels agree")).finding == "12 kernels agree"
    wrong = doctor.check_self_test(lambda: SelfTest("", ("linear differs", "gdn differs")))
    assert (wrong.status, wrong.finding) == ("failed", "linear differs; gdn differs") and "--device cpu" in wrong.advice
    assert "illegal instruction" in doctor.check_self_test(explode).finding


@pytest.mark.torch
def test_torch_against_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.check_torch(reading(), wants_gpu=True).status == "ok"
    old = dataclasses.replace(reading(), cuda_version="12.8")
    check = doctor.check_torch(old, wants_gpu=True)
    assert check.status == "failed" and "CUDA up to 12.8" in check.finding and "driver" in check.advice
    assert doctor.check_torch(old, wants_gpu=False).status == "warning"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "reboot" in doctor.check_torch(reading(), wants_gpu=True).advice


def test_compiler_and_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.6.0")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.check_compiler(has_gpu=True).status == "failed" and "gcc" in doctor.check_compiler(True).advice
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert "python3-dev" in doctor.check_compiler(has_gpu=True).advice
    assert doctor.check_compiler(has_gpu=False).status == "warning"


def test_databases(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "chats.sqlite3"
    assert doctor_places.check_database("chats", path, "").status == "ok"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (x TEXT)")
        db.executemany("INSERT INTO t VALUES (?)", [("y" * 500,)] * 200)
    db.close()
    assert "is whole" in doctor_places.check_database("chats", path, "").finding
    raw = path.read_bytes()
    path.write_bytes(raw[:8192] + b"\xff" * 4096 + raw[12288:])
    check = doctor_places.check_database("chats", path, "mend it")
    assert check.status == "failed" and check.advice == "mend it"
    path.write_bytes(b"no database at all")
    assert doctor_places.check_database("chats", path, "").status == "failed"


@pytest.mark.torch
def test_whole_examination(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    given = DoctorInput(
        tmp_path, tmp_path / "cache", "127.0.0.1", 0, GOOD_TERMINAL, wants_gpu=False,
        self_test=lambda: pytest.fail("there is no card to test"), chats_file=tmp_path / "chats.sqlite3",
        kv_index_file=tmp_path / "cache" / "index",
    )  # fmt: skip
    report = doctor.examine(given, lambda: GpuReading(problem="no NVIDIA driver is installed"))
    assert report.exit_code == 0
    names = [check.name for check in report.checks]
    assert len(set(names)) == len(names) == 14
    json.dumps(dataclasses.asdict(report))
    assert all(check.advice for check in report.checks if check.status in ("failed", "warning"))


def test_doctor_itself_needs_no_torch() -> None:
    code = "import sys, localspec.hub.doctor; sys.exit('torch' in sys.modules or 'pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
