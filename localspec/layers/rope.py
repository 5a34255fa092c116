"""Rotary frequencies from a config: default, linear and llama3 scaling; other kinds are refused by name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from localspec.layers.config import ConfigReader


def rotary_frequencies(config: ConfigReader, head_dim: int, default_fraction: float = 1.0) -> Tensor:
    """Inverse frequencies of the rotated pairs, [rot / 2] float32, rot = head_dim * partial_rotary_factor.

    Reads `rope_parameters`, or the older flat `rope_theta`, `rope_scaling` and `partial_rotary_factor`. Raises
    ValueError for kinds of scaling that are not supported. Formulas as in the configuration of Llama 3.1.
    """
    scaling = config.section("rope_parameters") or config.section("rope_scaling") or ConfigReader({})
    config.ignore("rope_scaling")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    fraction = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", default_fraction))
    rotated = int(head_dim * fraction)
    if rotated % 2 or not 2 <= rotated <= head_dim:
        raise ValueError(
            f"partial_rotary_factor {fraction} rotates {rotated} of {head_dim} dimensions; it must be even"
        )
    # The exponent in float32, as the reference models compute it: the last bits of frequencies matter at long context.
    inv_freq = 1.0 / (theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        inv_freq = inv_freq / scaling.number("factor")
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling)
    elif kind != "default":
        raise ValueError(f"rope_type {kind!r} is not supported; supported are default, linear and llama3")
    # For text the three positions of multimodal rope are equal, so its sections change nothing.
    scaling.ignore("type", "factor", "mrope_section", "mrope_interleaved")
    scaling.finish()
    return inv_freq


def _llama3(inv_freq: Tensor, scaling: ConfigReader) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    factor, low, high = (scaling.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = scaling.number("original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, scaled)
