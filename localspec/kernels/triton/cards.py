"""What a card can do, where a launch depends on it. Knows no kernels."""

from __future__ import annotations

import torch


def capability_major(device: torch.device) -> int:
    """First number of the compute capability; 8, the oldest that is served, where there is no card."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start while the one before ends (sm_90 and later)."""
    return capability_major(device) >= 9


def multiprocessors(device: torch.device) -> int:
    """Of the card; 8 where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
