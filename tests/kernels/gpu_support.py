"""Shared by the tests that need a card: inputs, poisoned memory, relative error."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights, Paging

DEVICE = torch.device("cuda")
PAGE = 64


def poison() -> None:
    """Leave NaN behind in freed memory of many sizes, where the next outputs and scratch buffers will lie."""
    blocks = [torch.full((1 << power,), float("nan"), device=DEVICE) for power in range(7, 25) for _ in range(3)]
    del blocks


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| in float64; NaN stays NaN and fails every bound."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def paged_cache(
    lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype, seed: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scattered pages of some sequences -> (k, v) zero outside them, (k, v) NaN outside them, block tables."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    pages_each = [-(-length // PAGE) for length in lengths]
    width = max(pages_each) + 1
    numbers = torch.randperm(sum(pages_each), generator=generator, device=DEVICE) + 1
    tables = torch.zeros(len(lengths), width, dtype=torch.int32, device=DEVICE)
    shape = (sum(pages_each) + 1, PAGE, heads, head_dim)
    clean = [torch.zeros(shape, device=DEVICE) for _ in range(2)]
    dirty = [torch.full(shape, float("nan"), device=DEVICE) for _ in range(2)]
    at = 0
    for slot, (length, count) in enumerate(zip(lengths, pages_each, strict=True)):
        own = numbers[at : at + count]
        at += count
        tables[slot, :count] = own.int()
        for pool, poisoned in zip(clean, dirty, strict=True):
            values = torch.randn(length, heads, head_dim, generator=generator, device=DEVICE) * scale
            values = values.to(dtype).float()
            token = torch.arange(length, device=DEVICE)
            pool[own[token // PAGE], token % PAGE] = values
            poisoned[own[token // PAGE], token % PAGE] = values
    return (clean[0], clean[1], dirty[0].to(dtype), dirty[1].to(dtype), tables)


def paging(tables: Tensor, slots: list[int], bound: int) -> Paging:
    return Paging(tables, torch.tensor(slots, device=DEVICE), bound)


def gdn_case(
    heads: tuple[int, int, int, int], num_slots: int, num_rows: int, seed: int, taps: int = 4
) -> tuple[GdnInputs, GdnWeights, GdnState]:
    """heads: HK, HV, DK, DV. Projections are slices of one wide buffer, as in the model."""
    hk, hv, dk, dv = heads
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    channels, values = 2 * hk * dk + hv * dv, hv * dv
    parts = 1 + seed % 3  # the gates come as sums of so many
    joined = randn(num_rows, channels + values + 2 * parts * hv).to(torch.bfloat16)
    qkv, z, a, b = joined.split((channels, values, parts * hv, parts * hv), dim=1)
    a, b = a.unflatten(1, (parts, hv)), b.unflatten(1, (parts, hv))
    weights = GdnWeights(
        *(randn(channels, taps) * 0.5, randn(hv) * 0.5, randn(hv), randn(dv).abs() + 0.5, 1e-6, hk, hv, dk, dv)
    )
    ring = 16
    state = GdnState(
        randn(num_slots, hv, dv, dk) * 0.3,
        randn(num_slots, channels, taps - 1 + ring).to(torch.bfloat16),
        torch.nn.functional.normalize(randn(num_slots, ring, hk, dk), dim=-1),
        randn(num_slots, ring, hv, dv),
        torch.rand(num_slots, ring, hv, generator=generator, device=DEVICE) * 0.3 + 0.7,
    )
    none = torch.zeros(num_slots, dtype=torch.int64, device=DEVICE)
    slots = torch.full((num_rows,), -1, device=DEVICE)
    return GdnInputs(qkv, z, a, b, "verify", slots, none, none, none), weights, state


def with_windows(inputs: GdnInputs, windows: list[tuple[int, int]], pending: list[int]) -> GdnInputs:
    """windows: (first row, rows) of each slot."""
    slots = torch.full_like(inputs.slots, -1)
    for slot, (start, count) in enumerate(windows):
        slots[start : start + count] = slot
    starts = torch.tensor([start for start, _ in windows], device=DEVICE)
    counts = torch.tensor([count for _, count in windows], device=DEVICE)
    return replace(
        inputs,
        slots=slots,
        window_starts=starts,
        window_rows=counts,
        pending_rows=torch.tensor(pending, device=DEVICE),
    )


def row_slice(inputs: GdnInputs, first: int, last: int) -> GdnInputs:
    """The rows [first, last) alone, with no windows."""
    rows = {name: getattr(inputs, name)[first:last] for name in ("qkv", "z", "a", "b", "slots")}
    return replace(inputs, **rows)


def clone_state(state: GdnState) -> GdnState:
    return GdnState(*(getattr(state, field.name).clone() for field in fields(GdnState)))
