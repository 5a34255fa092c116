"""Where the time of a step goes, by kernel group: what each kernel adds to a step on a card, times of calls elsewhere.

Knows kernels by name and operations by what they do; knows no model. A kernel that no group names counts as "rest".
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from localspec.kernels.ops import Ops

KERNELS: Mapping[str, str] = MappingProxyType(
    {
        "weights": r"weight_stream|dense_split|dense_finish|unpack_|gemm|cutlass|nvjet|ampere_|sm80_|sm90_",
        "attention": r"attention|norm_rope_store|norm_rope|store_kv",
        "gdn": r"^gdn",
        "norms": r"rms_norm|gate_kernel|embed",
        "copies": r"^Memcpy|^Memset|memcpy|memset",
    }
)
OPERATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "weights": ("linear",),
        "attention": ("attention", "norm_rope_store", "norm_rope", "store_kv"),
        "gdn": ("gdn",),
        "norms": ("rms_norm", "silu_mul", "embed"),
    }
)
REST = "rest"
GAPS = "gaps"


@dataclass(frozen=True)
class KernelSpan:
    """When one kernel began and ended, in microseconds of the profiler's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class GroupTime:
    """Milliseconds of a group in one step, and of the bytes that it must move at the measured rate."""

    group: str
    ms: float
    floor_ms: float

    @property
    def beyond_ms(self) -> float:
        return self.ms - self.floor_ms


def group_of(kernel: str) -> str:
    """The group of a device kernel by its name."""
    return next((group for group, pattern in KERNELS.items() if re.search(pattern, kernel)), REST)


def profile_step(step: Callable[[], object], ops: Ops, repeats: int = 10) -> dict[str, float]:
    """Milliseconds by group of one call of `step`, which must be ready to run at full speed.

    `gaps` is what passes on a card between its kernels; elsewhere `rest` is all outside the operations.
    """
    if ops.device.type == "cuda":
        return _profile_kernels(step, ops.device, repeats)
    totals: dict[str, float] = {}
    with _timed(ops, totals):
        started = time.perf_counter()
        for _ in range(repeats):
            step()
        wall_ms = (time.perf_counter() - started) * 1e3
    totals[REST] = max(0.0, wall_ms - sum(totals.values()))
    return {group: ms / repeats for group, ms in totals.items()}


def verdict(times: Mapping[str, float], floors_ms: Mapping[str, float]) -> tuple[list[GroupTime], str]:
    """Groups by the time that they take beyond their floor, most first, and one sentence on it."""
    groups = [GroupTime(group, ms, floors_ms.get(group, 0.0)) for group, ms in times.items()]
    groups.sort(key=lambda each: -each.beyond_ms)
    total, floor = sum(each.ms for each in groups), sum(floors_ms.values())
    beyond = sum(max(0.0, each.beyond_ms) for each in groups)
    shares = ", ".join(
        f"{each.group} {each.beyond_ms:.2f} ms" for each in groups if beyond and each.beyond_ms > 0.05 * beyond
    )
    sentence = f"a step takes {total:.2f} ms, its floor is {floor:.2f} ms; beyond it: {shares or 'nothing'}"
    return groups, sentence


def group_table(groups: list[GroupTime]) -> str:
    """Groups for people."""
    lines = [f"{'group':10} {'ms':>8} {'floor ms':>9} {'beyond':>8}"]
    lines += [f"{each.group:10} {each.ms:>8.3f} {each.floor_ms:>9.3f} {each.beyond_ms:>8.3f}" for each in groups]
    return "\n".join(lines)


def added_times(spans: Iterable[KernelSpan], steps: int) -> dict[str, float]:
    """By kernel name, how far each kernel moves the end of all that began before it; same unit as the spans.

    Kernels overlap where one may start while the one before ends, so their durations would count waiting twice; these
    times and `GAPS` add up to the whole. The longest gaps, one between two steps each, are the profiler's and left out.
    """
    totals: dict[str, float] = {}
    gaps: list[float] = []
    last_end: float | None = None
    for span in sorted(spans, key=lambda each: (each.start, each.end)):
        begin = span.start if last_end is None else max(span.start, last_end)
        if last_end is not None and span.start > last_end:
            gaps.append(span.start - last_end)
        totals[span.name] = totals.get(span.name, 0.0) + max(0.0, span.end - begin)
        last_end = span.end if last_end is None else max(last_end, span.end)
    totals[GAPS] = sum(sorted(gaps)[: max(0, len(gaps) - (steps - 1))])
    return totals


def _profile_kernels(step: Callable[[], object], device: torch.device, repeats: int) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize(device)
    spans = [
        KernelSpan(str(event.name), event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if str(event.device_type).endswith("CUDA")
    ]
    totals: dict[str, float] = {}
    for name, added_us in added_times(spans, repeats).items():
        group = GAPS if name == GAPS else group_of(name)
        totals[group] = totals.get(group, 0.0) + added_us / 1e3 / repeats
    return {group: ms for group, ms in totals.items() if ms}


@contextmanager
def _timed(ops: Ops, totals: dict[str, float]) -> Iterator[None]:
    """Operations of a back end whose calls return when they are done, with a clock around each; nested ones once."""
    depth = [0]

    def clocked(group: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            depth[0] += 1
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    totals[group] = totals.get(group, 0.0) + (time.perf_counter() - started) * 1e3

        return run

    names = [(group, name) for group, names in OPERATIONS.items() for name in names if hasattr(ops, name)]
    for group, name in names:
        setattr(ops, name, clocked(group, getattr(ops, name)))
    try:
        yield
    finally:
        for _, name in names:
            delattr(ops, name)
