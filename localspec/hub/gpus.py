"""The NVIDIA cards of this machine as their driver reports them, through NVML. Torch-free; no card is touched.

Knows what a card is and who holds its memory. What that means for the user is `hub.doctor`'s matter.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

LEAST_CAPABILITY = (8, 0)
"""Ampere: what the kernels are compiled for at least."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a card; `used_bytes` None where the driver does not tell."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One card."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    pcie_generation: int | None
    pcie_width: int | None
    pcie_max_generation: int | None
    pcie_max_width: int | None
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class GpuReading:
    """All cards, or why they could not be read."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    problem: str | None = None


def read_gpus() -> GpuReading:
    """Asks the driver. Never raises: without a driver, or with a broken one, `problem` says what the driver says."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return GpuReading(problem="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReading(problem=_init_problem(nvml, error))
    try:
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
        return GpuReading(
            gpus=tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())),
            driver_version=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
        )
    except nvml.NVMLError as error:
        return GpuReading(problem=f"the NVIDIA driver answers: {error}")
    finally:
        nvml.nvmlShutdown()


def _init_problem(nvml: Any, error: Exception) -> str:
    code = getattr(error, "value", None)
    if code == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver is installed"
    if code == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA driver is installed but not loaded"
    if code == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver and its library have different versions (an update without a reboot)"
    return f"the NVIDIA driver answers: {error}"


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        compute_capability=(int(major), int(minor)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        pcie_generation=_optional(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
        pcie_width=_optional(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_max_generation=_optional(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_max_width=_optional(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        processes=_processes(nvml, handle),
    )


def _optional(nvml: Any, function: str, handle: Any) -> int | None:
    """Some drivers (WSL2, virtual cards) do not know the link."""
    try:
        return int(getattr(nvml, function)(handle))
    except nvml.NVMLError:
        return None


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    found: dict[int, GpuProcess] = {}
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        try:
            running = getattr(nvml, function)(handle)
        except nvml.NVMLError:
            continue
        for process in running:
            used = getattr(process, "usedGpuMemory", None)
            found[process.pid] = GpuProcess(
                process.pid, _process_name(process.pid), None if used is None else int(used)
            )
    return tuple(sorted(found.values(), key=lambda p: -(p.used_bytes or 0)))


def _process_name(pid: int) -> str:
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "unknown"


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
