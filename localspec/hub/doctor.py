"""`localspec doctor`: what this machine has, what is wrong with it, and what would help.

Each check is a function that gives one `Check` or a few, and never raises. Facts that other modules own are handed in:
the terminal by whoever reads the environment, the kernel self-test by whoever owns the kernels. Torch is imported only
inside its own check. Nothing goes over the network.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from localspec.hub.doctor_places import (
    check_cache,
    check_database,
    check_disk_space,
    check_disk_speed,
    check_models,
    check_port,
    check_private,
)
from localspec.hub.doctor_report import Check, Report, Status, in_gib
from localspec.hub.doctor_terminal import TerminalFacts, check_terminal
from localspec.hub.gpus import LEAST_CAPABILITY, Gpu, GpuReading, read_gpus

RECOVER_CHATS = "sqlite3 chats.sqlite3 .recover"


@dataclass(frozen=True)
class DoctorInput:
    """What the checks are about."""

    data_dir: Path
    cache_dir: Path
    host: str
    port: int
    terminal: TerminalFacts
    wants_gpu: bool
    """Whether a missing or unfit card is a failure (a model meant for a GPU is installed or asked for)."""
    self_test: Callable[[], SelfTest] | None = None
    """Compares kernels with their reference on the card."""
    chats_file: Path | None = None
    kv_index_file: Path | None = None


@dataclass(frozen=True)
class SelfTest:
    """Outcome of the kernels' self-test: what was tested, in words, and one sentence for each that failed."""

    summary: str
    failures: tuple[str, ...] = ()


def examine(given: DoctorInput, read: Callable[[], GpuReading] | None = None) -> Report:
    """Runs all checks; takes a few seconds, most of them for torch and the disk."""
    reading = (read or read_gpus)()
    checks = [check_platform(), *check_gpus(reading, given.wants_gpu), check_torch(reading, given.wants_gpu)]
    checks += [check_compiler(bool(reading.gpus)), check_self_test(given.self_test if reading.gpus else None)]
    checks += [
        _readable("disk space", lambda: check_disk_space(given.data_dir)),
        _readable("disk speed", lambda: check_disk_speed(given.data_dir)),
        _readable("privacy", lambda: check_private(given.data_dir)),
        _readable("models", lambda: check_models(given.data_dir)),
        _readable("cache", lambda: check_cache(given.cache_dir)),
    ]
    for name, path, advice in (
        ("chats", given.chats_file, f"copy it away first, then: {RECOVER_CHATS}"),
        ("kept conversations", given.kv_index_file, "localspec cache wipe makes it anew"),
    ):
        if path is not None:
            checks.append(_readable(name, partial(check_database, name, path, advice)))
    checks += [check_port(given.host, given.port), check_terminal(given.terminal)]
    return Report(tuple(checks))


def _readable(name: str, check: Callable[[], Check]) -> Check:
    """The check's own finding; a place that this user may not read is one too, and ends no other check."""
    try:
        return check()
    except OSError as error:
        advice = "mend its owner and permissions, or set LOCALSPEC_HOME to another folder"
        return Check(name, "failed", f"{error.filename} cannot be read: {error.strerror}", advice)


def check_platform() -> Check:
    """Operating system and Python."""
    finding = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Check(
            "platform", "warning", finding, "Linux and WSL2 are supported; elsewhere only the CPU part may run"
        )
    return Check("platform", "ok", finding)


def check_gpus(reading: GpuReading, wants_gpu: bool) -> list[Check]:
    """Driver, then each card: capability, memory and who holds it, link."""
    if reading.problem is not None or not reading.gpus:
        finding = reading.problem or "the driver reports no card"
        advice = "install the NVIDIA driver and reboot; without a card the demo model runs on the CPU"
        return [Check("gpu driver", "failed" if wants_gpu else "skipped", finding, advice, machine=True)]
    checks = [Check("gpu driver", "ok", f"driver {reading.driver_version}, CUDA up to {reading.cuda_version}")]
    for gpu in reading.gpus:
        checks += [_check_capability(gpu, wants_gpu), _check_memory(gpu), _check_link(gpu)]
    return checks


def _check_capability(gpu: Gpu, wants_gpu: bool) -> Check:
    major, minor = gpu.compute_capability
    finding = f"{gpu.name}, compute capability {major}.{minor}"
    if gpu.compute_capability < LEAST_CAPABILITY:
        advice = "compute capability 8.0 (Ampere) or later is needed"
        return Check(f"gpu {gpu.index}", "failed" if wants_gpu else "warning", finding, advice, machine=True)
    return Check(f"gpu {gpu.index}", "ok", finding)


def _check_memory(gpu: Gpu) -> Check:
    finding = f"{in_gib(gpu.free_bytes)} of {in_gib(gpu.total_bytes)} free"
    holders = ", ".join(f"{p.name} (pid {p.pid}{_held(p.used_bytes)})" for p in gpu.processes)
    if gpu.free_bytes < gpu.total_bytes * 0.85:
        advice = f"end what holds it: {holders}" if holders else "another program or another system holds the rest"
        return Check(f"gpu {gpu.index} memory", "warning", finding, advice)
    return Check(f"gpu {gpu.index} memory", "ok", finding + (f"; in use by {holders}" if holders else ""))


def _held(used_bytes: int | None) -> str:
    return "" if used_bytes is None else f", {in_gib(used_bytes)}"


def _check_link(gpu: Gpu) -> Check:
    name = f"gpu {gpu.index} link"
    if gpu.pcie_width is None or gpu.pcie_max_width is None:
        return Check(name, "skipped", "the driver does not tell the PCIe link")
    finding = f"PCIe {gpu.pcie_generation} x{gpu.pcie_width} (card: {gpu.pcie_max_generation} x{gpu.pcie_max_width})"
    # Idle cards lower the generation to save power, so only the width tells of a wrong slot.
    if gpu.pcie_width < gpu.pcie_max_width:
        return Check(name, "warning", finding, "another slot may be wider; restoring long chats depends on it")
    return Check(name, "ok", finding)


def check_torch(reading: GpuReading, wants_gpu: bool) -> Check:
    """Whether torch sees the card that the driver sees, and was built for a CUDA that the driver knows."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(
            "torch", "failed", f"torch cannot be imported: {error}", "run the set-up command of the README again"
        )
    build = torch.version.cuda
    finding = f"torch {torch.__version__}, " + (f"built for CUDA {build}" if build else "built without CUDA")
    if not reading.gpus:
        return Check("torch", "ok", finding)
    status: Status = "failed" if wants_gpu else "warning"
    if build is None:
        return Check("torch", status, finding, "install torch with CUDA, or the card is not used")
    if reading.cuda_version is not None and int(build.split(".")[0]) > int(reading.cuda_version.split(".")[0]):
        finding += f", the driver knows CUDA up to {reading.cuda_version}"
        return Check("torch", status, finding, "update the NVIDIA driver, or take a torch build for an older CUDA")
    if not torch.cuda.is_available():
        advice = "torch does not see the card: reboot after a driver update, or take a torch build for this driver"
        return Check("torch", status, finding, advice)
    return Check("torch", "ok", finding)


def check_compiler(has_gpu: bool) -> Check:
    """Triton compiles its launchers with the C compiler of the machine, against Python's headers."""
    try:
        triton = f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        status: Status = "failed" if has_gpu else "skipped"
        return Check("compiler", status, "triton is not installed", "install torch with CUDA, which brings it")
    status = "failed" if has_gpu else "warning"
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        return Check("compiler", status, f"{triton}, no C compiler", "install gcc (Debian, Ubuntu: apt install gcc)")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.is_file():
        advice = "install Python's headers (Debian, Ubuntu: apt install python3-dev)"
        return Check("compiler", status, f"{triton}, {compiler}, no {headers}", advice)
    return Check("compiler", "ok", f"{triton}, {compiler}")


def check_self_test(self_test: Callable[[], SelfTest] | None) -> Check:
    """Kernels against their reference."""
    if self_test is None:
        return Check("kernel self-test", "skipped", "no card to test kernels on")
    try:
        outcome = self_test()
    except Exception as error:  # a broken kernel may raise anything; the report must still come
        return Check("kernel self-test", "failed", f"it ended with {type(error).__name__}: {error}", "report this")
    if outcome.failures:
        advice = "do not trust answers from this card: use --device cpu, and report this"
        return Check("kernel self-test", "failed", "; ".join(outcome.failures), advice)
    return Check("kernel self-test", "ok", outcome.summary)
