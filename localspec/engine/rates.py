"""What this machine could do at best: measured rates that benchmark figures are held against."""

from __future__ import annotations

import time

import torch


def read_rate_bytes_per_s(device: torch.device, size_bytes: int = 512 << 20, repeats: int = 5) -> float:
    """Best of `repeats` sums over a float32 buffer of `size_bytes`: the rate at which weights can be read."""
    buffer = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats + 1):
        _wait(device)
        started = time.perf_counter()
        buffer.sum()
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return size_bytes / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
