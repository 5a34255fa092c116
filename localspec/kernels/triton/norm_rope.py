"""Head norm and rotary position, and the move of keys and values into cache pages, in one kernel.

One program handles one head of one row. Knows pages and block tables; does not know attention. Queries, keys and values
of a row may go through one launch (`norm_rope_store`), or each alone (`norm_rope`, `store_kv`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.compat import gdc_launch_dependents, gdc_wait
from localspec.kernels.ops import PAGE_TOKENS, Norm, Paging
from localspec.kernels.triton.cache_values import cache_bytes, e4m3_from_float32
from localspec.kernels.triton.cards import dependent_launch


@triton.jit
def sine_cosine(angle):
    """sin and cos of a float32 angle up to 2^20, within 2e-7.

    Library versions carry a path for huge angles that needs stack memory. Here the angle is reduced by multiples of
    pi / 2, taken in three float32 parts, and the Cephes polynomials serve [-pi / 4, pi / 4].
    """
    turns = tl.floor(angle * 0.63661977236758134 + 0.5)
    x = tl.fma(turns, -1.57079637050628662, angle)
    x = tl.fma(turns, 4.37113900018624283e-8, x)
    x = tl.fma(turns, 1.71512449e-15, x)
    square = x * x
    sine = tl.fma(tl.fma(tl.fma(square, -1.9515295891e-4, 8.3321608736e-3), square, -1.6666654611e-1), square * x, x)
    cosine = tl.fma(tl.fma(square, 2.443315711809948e-5, -1.388731625493765e-3), square, 4.166664568298827e-2)
    cosine = tl.fma(cosine, square * square, tl.fma(square, -0.5, 1.0))
    quarter = turns.to(tl.int32) & 3
    swapped = (quarter & 1) == 1
    out_sine = tl.where(swapped, cosine, sine)
    out_cosine = tl.where(swapped, sine, cosine)
    out_sine = tl.where(quarter >= 2, -out_sine, out_sine)
    out_cosine = tl.where((quarter == 1) | (quarter == 2), -out_cosine, out_cosine)
    return out_sine, out_cosine


@triton.jit
def turned_head(
    x_ptr, weight_ptr, inv_freq_ptr, position, half, eps, D: tl.constexpr, D_PADDED: tl.constexpr, NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate-half of the first 2 * half of D values -> [D_PADDED] float32.

    The partner of a turned dimension is loaded beside it: a permuted load is cheaper than an exchange of registers.
    """
    dims = tl.arange(0, D_PADDED)
    inside = dims < D
    lower = dims < half
    turned = dims < 2 * half
    partner = tl.where(lower, dims + half, tl.where(turned, dims - half, dims))
    x = tl.load(x_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
        partner_weight = tl.load(weight_ptr + partner, mask=inside, other=0.0).to(tl.float32)
        if PLUS_ONE:
            weight += 1.0
            partner_weight += 1.0
        x = x * scale * weight
        other = other * scale * partner_weight
    frequency = tl.load(inv_freq_ptr + tl.where(lower, dims, dims - half), mask=turned, other=0.0)
    sine, cosine = sine_cosine(position.to(tl.float32) * frequency)
    return tl.where(turned, x * cosine + tl.where(lower, -other, other) * sine, x)


@triton.jit
def store_head(
    value, pages_ptr, table_ptr, position, head, HEADS_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, FP8,
):  # fmt: skip
    """Write one head [D_PADDED] float32 to its place in the pages, rounded to their dtype."""
    page = tl.load(table_ptr + position // PAGE).to(tl.int64)
    dims = tl.arange(0, value.shape[0])
    target = pages_ptr + ((page * PAGE + position % PAGE) * HEADS_KV + head) * D + dims
    if FP8:
        tl.store(target, e4m3_from_float32(value), mask=dims < D)
    else:
        tl.store(target, value.to(pages_ptr.dtype.element_ty), mask=dims < D)


@triton.jit(do_not_specialize=["table_stride", "half"])
def norm_rope_store_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, inv_freq_ptr, positions_ptr, slots_ptr, tables_ptr, k_pages_ptr,
    v_pages_ptr, out_ptr, q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    table_stride, half, eps, H: tl.constexpr, HEADS_KV: tl.constexpr, HEADS_V: tl.constexpr, D: tl.constexpr,
    D_PADDED: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (R, H + HEADS_KV + HEADS_V): H query heads to out_ptr [R, H, D]; key and value heads into the pages.

    A part that is not there has zero heads. Keys and values of padding rows (slot -1) are not written.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + row)
    if head < H:
        source = q_ptr + row * q_row_stride + head * q_head_stride
        value = turned_head(source, q_weight_ptr, inv_freq_ptr, position, half, eps, D, D_PADDED, NORM, PLUS_ONE)
        dims = tl.arange(0, D_PADDED)
        tl.store(out_ptr + (row * H + head) * D + dims, value.to(out_ptr.dtype.element_ty), mask=dims < D)
    else:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if slot >= 0:
            table = tables_ptr + slot * table_stride
            if head < H + HEADS_KV:
                kv_head = head - H
                source = k_ptr + row * k_row_stride + kv_head * k_head_stride
                value = turned_head(
                    source, k_weight_ptr, inv_freq_ptr, position, half, eps, D, D_PADDED, NORM, PLUS_ONE
                )
                # As when keys pass through memory between rotation and cache: rounded to their own dtype first.
                value = value.to(k_ptr.dtype.element_ty).to(tl.float32)
                store_head(value, k_pages_ptr, table, position, kv_head, HEADS_KV, D, PAGE, FP8)
            else:
                kv_head = head - H - HEADS_KV
                v_dims = tl.arange(0, D_PADDED)
                v_source = v_ptr + row * v_row_stride + kv_head * v_head_stride + v_dims
                v_value = tl.load(v_source, mask=v_dims < D, other=0.0).to(tl.float32)
                store_head(v_value, v_pages_ptr, table, position, kv_head, HEADS_V, D, PAGE, FP8)


def _check(name: str, x: Tensor) -> None:
    if x.ndim != 3 or x.stride(2) != 1:
        raise ValueError(f"{name} must be [R, heads, head size], contiguous in its last dimension")


def _launch_width(head_dim: int) -> tuple[int, int]:
    """Padded head size and warps: the sum of a norm stays within one warp."""
    return triton.next_power_of_2(head_dim), 1


def _dependent(x: Tensor) -> dict[str, bool]:
    """Launch options: whether the kernel may start while the one before it ends."""
    pdl = dependent_launch(x.device)
    return {"PDL": pdl, "launch_pdl": pdl}


def norm_rope(x: Tensor, norm: Norm | None, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """See `Ops.norm_rope`."""
    _check("x", x)
    num_rows, heads, head_dim = x.shape
    out = torch.empty(num_rows, heads, head_dim, dtype=x.dtype, device=x.device)
    weight = x if norm is None else norm.weight
    padded, num_warps = _launch_width(head_dim)
    norm_rope_store_kernel[(num_rows, heads)](
        *(x, x, x, weight, weight, inv_freq, positions, positions, positions, x, x, out),
        *(x.stride(0), x.stride(1), 0, 0, 0, 0, 0, inv_freq.shape[0], 0.0 if norm is None else norm.eps),
        H=heads,
        HEADS_KV=0,
        HEADS_V=0,
        D=head_dim,
        D_PADDED=padded,
        PAGE=PAGE_TOKENS,
        NORM=norm is not None,
        PLUS_ONE=norm is not None and norm.plus_one,
        FP8=False,
        num_warps=num_warps,
        **_dependent(x),
    )
    return out


def store_kv(values: Tensor, pages: Tensor, paging: Paging, positions: Tensor) -> None:
    """See `Ops.store_kv`."""
    _check("values", values)
    num_rows, heads, head_dim = values.shape
    page_bytes, fp8 = cache_bytes(pages)
    padded, num_warps = _launch_width(head_dim)
    norm_rope_store_kernel[(num_rows, heads)](
        *(values, values, values, values, values, values, positions, paging.slots, paging.block_tables),
        *(page_bytes, page_bytes, values, 0, 0, 0, 0, values.stride(0), values.stride(1)),
        *(paging.block_tables.stride(0), 0, 0.0),
        H=0,
        HEADS_KV=0,
        HEADS_V=heads,
        D=head_dim,
        D_PADDED=padded,
        PAGE=PAGE_TOKENS,
        NORM=False,
        PLUS_ONE=False,
        FP8=fp8,
        num_warps=num_warps,
        **_dependent(values),
    )


def norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: tuple[Norm, Norm] | None,
    inv_freq: Tensor,
    pages: tuple[Tensor, Tensor],
    paging: Paging,
    positions: Tensor,
) -> Tensor:
    """`norm_rope` of q and k and `store_kv` of k and v in one launch, with the same bits. Returns q [R, H, D].

    norms: of q and of k, with one eps and one kind of weight; pages: of keys and of values.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check(name, x)
    if norms is not None and (norms[0].eps, norms[0].plus_one) != (norms[1].eps, norms[1].plus_one):
        raise ValueError("the norms of q and k must agree in eps and in the kind of weight")
    num_rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    k_bytes, fp8 = cache_bytes(pages[0])
    v_bytes, _ = cache_bytes(pages[1])
    out = torch.empty(num_rows, heads, head_dim, dtype=q.dtype, device=q.device)
    weights = (q, q) if norms is None else (norms[0].weight, norms[1].weight)
    padded, num_warps = _launch_width(head_dim)
    norm_rope_store_kernel[(num_rows, heads + 2 * kv_heads)](
        *(q, k, v, *weights, inv_freq, positions, paging.slots, paging.block_tables, k_bytes, v_bytes, out),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(paging.block_tables.stride(0), inv_freq.shape[0], 0.0 if norms is None else norms[0].eps),
        H=heads,
        HEADS_KV=kv_heads,
        HEADS_V=kv_heads,
        D=head_dim,
        D_PADDED=padded,
        PAGE=PAGE_TOKENS,
        NORM=norms is not None,
        PLUS_ONE=norms is not None and norms[0].plus_one,
        FP8=fp8,
        num_warps=num_warps,
        **_dependent(q),
    )
    return out
