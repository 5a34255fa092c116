"""`localspec doctor`: what this machine has, what is wrong with it, and what would help.

Each check is a function that gives one `Check` or a few, and never raises. Facts that other modules own are handed in:
the terminal by whoever reads the environment, the kernel self-test by whoever owns the kernels. Torch is imported only
inside its own check. Nothing goes over the network.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from localspec.hub import local
from localspec.hub.gpus import LEAST_CAPABILITY, Gpu, GpuReading, read_gpus
from localspec.hub.records import EXIT_FAILED, EXIT_MACHINE_CANNOT

Status = Literal["ok", "warning", "failed", "skipped"]
LEAST_FREE_DISK_BYTES = 2 << 30
SLOW_DISK_BYTES_PER_S = 500e6
SPEED_TEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Check:
    """One line of the report. `machine` marks failures that no setting mends (exit code 3)."""

    name: str
    status: Status
    finding: str
    advice: str = ""
    machine: bool = False


@dataclass(frozen=True)
class TerminalFacts:
    """What the environment says of the terminal; None where it does not say."""

    is_terminal: bool
    columns: int
    lines: int
    term: str | None
    color_term: str | None
    inside_tmux: bool = False


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
    self_test: Callable[[], tuple[str, ...]] | None = None
    """Compares kernels with their reference; returns one sentence for each that failed."""


@dataclass(frozen=True)
class Report:
    """All checks in order."""

    checks: tuple[Check, ...]

    @property
    def exit_code(self) -> int:
        """0: nothing failed; 3: this machine cannot; 1: something else failed."""
        failed = [check for check in self.checks if check.status == "failed"]
        if not failed:
            return 0
        return EXIT_MACHINE_CANNOT if any(check.machine for check in failed) else EXIT_FAILED


def examine(given: DoctorInput, read: Callable[[], GpuReading] = read_gpus) -> Report:
    """Runs all checks; takes a few seconds, most of them for torch and the disk."""
    reading = read()
    checks = [check_platform(), *check_gpus(reading, given.wants_gpu), check_torch(bool(reading.gpus), given.wants_gpu)]
    checks += [check_compiler(bool(reading.gpus)), check_self_test(given.self_test)]
    checks += [check_disk_space(given.data_dir), check_disk_speed(given.data_dir), check_private(given.data_dir)]
    checks += [check_models(given.data_dir), check_cache(given.cache_dir), check_port(given.host, given.port)]
    checks.append(check_terminal(given.terminal))
    return Report(tuple(checks))


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
    finding = f"{_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free"
    holders = ", ".join(f"{p.name} (pid {p.pid}{_held(p.used_bytes)})" for p in gpu.processes)
    if gpu.free_bytes < gpu.total_bytes * 0.85:
        advice = f"end what holds it: {holders}" if holders else "another program or another system holds the rest"
        return Check(f"gpu {gpu.index} memory", "warning", finding, advice)
    return Check(f"gpu {gpu.index} memory", "ok", finding + (f"; in use by {holders}" if holders else ""))


def _held(used_bytes: int | None) -> str:
    return "" if used_bytes is None else f", {_gib(used_bytes)}"


def _check_link(gpu: Gpu) -> Check:
    name = f"gpu {gpu.index} link"
    if gpu.pcie_width is None or gpu.pcie_max_width is None:
        return Check(name, "skipped", "the driver does not tell the PCIe link")
    finding = f"PCIe {gpu.pcie_generation} x{gpu.pcie_width} (card: {gpu.pcie_max_generation} x{gpu.pcie_max_width})"
    # Idle cards lower the generation to save power, so only the width tells of a wrong slot.
    if gpu.pcie_width < gpu.pcie_max_width:
        return Check(name, "warning", finding, "another slot may be wider; restoring long chats depends on it")
    return Check(name, "ok", finding)


def check_torch(has_gpu: bool, wants_gpu: bool) -> Check:
    """Whether torch sees the card that the driver sees."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(
            "torch", "failed", f"torch cannot be imported: {error}", "run the set-up command of the README again"
        )
    build = torch.version.cuda
    finding = f"torch {torch.__version__}, " + (f"built for CUDA {build}" if build else "built without CUDA")
    if not has_gpu:
        return Check("torch", "ok", finding)
    if build is None:
        advice = "install torch with CUDA, or the card is not used"
        return Check("torch", "failed" if wants_gpu else "warning", finding, advice)
    if not torch.cuda.is_available():
        advice = "torch does not see the card: reboot after a driver update, or take a torch build for this driver"
        return Check("torch", "failed" if wants_gpu else "warning", finding, advice)
    return Check("torch", "ok", finding)


def check_compiler(has_gpu: bool) -> Check:
    """Triton compiles its launchers with the C compiler of the machine."""
    try:
        triton = f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        status: Status = "failed" if has_gpu else "skipped"
        return Check("compiler", status, "triton is not installed", "install torch with CUDA, which brings it")
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        status = "failed" if has_gpu else "warning"
        return Check("compiler", status, f"{triton}, no C compiler", "install gcc (Debian, Ubuntu: apt install gcc)")
    return Check("compiler", "ok", f"{triton}, {compiler}")


def check_self_test(self_test: Callable[[], tuple[str, ...]] | None) -> Check:
    """Kernels against their reference."""
    if self_test is None:
        return Check("kernel self-test", "skipped", "no card to test kernels on")
    try:
        failures = self_test()
    except Exception as error:  # a broken kernel may raise anything; the report must still come
        return Check("kernel self-test", "failed", f"it ended with {type(error).__name__}: {error}", "report this")
    if failures:
        return Check("kernel self-test", "warning", "; ".join(failures), "these kernels are not used; report this")
    return Check("kernel self-test", "ok", "all kernels agree with their reference")


def check_disk_space(directory: Path) -> Check:
    """Free space for models, with the largest ones when there is little."""
    use = local.disk_use(directory)
    finding = f"{_gib(use.free_bytes)} free at {directory}, models take {_gib(use.total_bytes)}"
    if use.free_bytes < LEAST_FREE_DISK_BYTES:
        largest = ", ".join(f"{name} ({_gib(size)})" for name, size in use.models[:3])
        advice = "free space" + (f", or remove models with 'localspec rm': {largest}" if largest else "")
        return Check("disk space", "failed", finding, advice, machine=True)
    return Check("disk space", "ok", finding)


def check_disk_speed(directory: Path, size_bytes: int = SPEED_TEST_BYTES) -> Check:
    """Writes and reads back a file; reading is what decides how fast models and chats open."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        written_per_s, read_per_s = _measure_disk(directory, size_bytes)
    except OSError as error:
        return Check("disk speed", "failed", f"{directory} cannot be written: {error.strerror}", "mend its permissions")
    finding = f"reads {read_per_s / 1e9:.2f} GB/s, writes {written_per_s / 1e9:.2f} GB/s"
    if read_per_s < SLOW_DISK_BYTES_PER_S:
        return Check("disk speed", "warning", finding, "models load slowly from this disk; an NVMe disk is much faster")
    return Check("disk speed", "ok", finding)


def _measure_disk(directory: Path, size_bytes: int) -> tuple[float, float]:
    path = directory / f".tmp-speed-{secrets.token_hex(4)}"
    block = secrets.token_bytes(1 << 20)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        began_s = time.perf_counter()
        for _ in range(size_bytes >> 20):
            os.write(handle, block)
        os.fsync(handle)
        written_s = time.perf_counter() - began_s
        # Synced pages can be dropped, so that the read comes from the disk and not from memory.
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.perf_counter()
        os.lseek(handle, 0, os.SEEK_SET)
        while os.read(handle, 1 << 20):
            pass
        return size_bytes / written_s, size_bytes / (time.perf_counter() - began_s)
    finally:
        os.close(handle)
        path.unlink()


def check_private(directory: Path) -> Check:
    """Chats lie here: nobody else may read them."""
    if not directory.exists():
        return Check("privacy", "skipped", f"{directory} does not exist yet")
    status = directory.stat()
    if status.st_uid != os.geteuid():
        return Check("privacy", "failed", f"{directory} belongs to another user", "choose another data directory")
    if status.st_mode & 0o077:
        return Check("privacy", "warning", f"others may read {directory}", f"run: chmod 700 {directory}")
    return Check("privacy", "ok", f"{directory} is readable by this user only")


def check_models(data_dir: Path) -> Check:
    """Installed models and what is wrong with them; hashes are `verify`'s work."""
    models = local.list_installed(data_dir)
    broken = [f"{model.model_id}: {model.problem}" for model in models if model.problem]
    if broken:
        return Check("models", "failed", "; ".join(broken), "remove and pull them again")
    if not models:
        return Check("models", "warning", "no model is installed", "run 'localspec chat', which fetches the demo model")
    return Check("models", "ok", ", ".join(m.model_id + (" (demo)" if m.is_demo else "") for m in models))


def check_cache(cache_dir: Path) -> Check:
    """The cache may be deleted at any time; it must only be readable and writable."""
    if not cache_dir.exists():
        return Check("cache", "ok", f"{cache_dir} is empty")
    if not os.access(cache_dir, os.R_OK | os.W_OK | os.X_OK):
        return Check(
            "cache", "failed", f"{cache_dir} is not readable and writable", "mend its permissions or delete it"
        )
    return Check("cache", "ok", f"{_gib(local.tree_bytes(cache_dir))} at {cache_dir}")


def check_port(host: str, port: int) -> Check:
    """Whether the port can be opened, and who holds it if not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            holder = _port_holder(port)
            finding = f"{host}:{port} cannot be opened ({error.strerror})" + (f", held by {holder}" if holder else "")
            return Check("port", "warning", finding, "that is fine if it is localspec; else 'localspec serve --port 0'")
    return Check("port", "ok", f"{host}:{port} is free")


def _port_holder(port: int) -> str | None:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            local_address: Any = connection.laddr
            if (
                connection.status == psutil.CONN_LISTEN
                and local_address
                and local_address.port == port
                and connection.pid
            ):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None


def check_terminal(terminal: TerminalFacts) -> Check:
    """What the chat's interface can show here."""
    if not terminal.is_terminal:
        return Check(
            "terminal", "skipped", "not a terminal", "'localspec chat --plain' and 'localspec run' work in pipes"
        )
    colours = "true colour" if terminal.color_term in ("truecolor", "24bit") else "256 colours or fewer"
    finding = f"{terminal.term or 'unknown'}, {terminal.columns}x{terminal.lines}, {colours}"
    finding += ", in tmux" if terminal.inside_tmux else ""
    if terminal.term in (None, "dumb"):
        return Check("terminal", "warning", finding, "this terminal cannot draw; use 'localspec chat --plain'")
    if terminal.columns < 80 or terminal.lines < 24:
        return Check("terminal", "warning", finding, "80x24 or larger is needed for all panels")
    return Check("terminal", "ok", finding)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
