"""Numerics of the Triton kernels in the interpreter, float32 only. Run by test_interpreter.py in its own process."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import tests.helpers.interpreter  # noqa: F401  must come before the kernels

import pytest  # isort: skip
import torch  # isort: skip
from torch import Tensor  # isort: skip

from localspec.kernels import reference_gdn, reference_settle  # isort: skip
from localspec.kernels.backends.reference import ReferenceOps  # isort: skip
from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights, Norm, Paging, Settled, Window  # isort: skip
from localspec.kernels.triton import attention, attention_blocks, attention_prefill, elementwise, gdn_fold  # isort: skip
from localspec.kernels.triton import gdn_prefill, gdn_rows, gdn_window, norm_rope, settle  # isort: skip
from localspec.kernels.triton.dense_linear import DenseMatrix, dense_linear  # isort: skip

from tests.helpers.interpreted_gluon import interpret  # isort: skip

REFERENCE = ReferenceOps(torch.device("cpu"))
torch.set_num_threads(1)
interpret(gdn_rows, gdn_window)


def _close(found: Tensor, expected: Tensor, bound: float) -> None:
    error = float((found - expected).norm() / expected.norm())
    assert error < bound, f"relative error {error:.2e}"


def _pool(num_pages: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_pages)
    k, v = torch.randn(2, num_pages, 64, heads, head_dim).unbind(0)
    tables = (torch.randperm(num_pages - 1)[:20] + 1).view(2, 10).to(torch.int32)
    return k, v, tables


@pytest.mark.parametrize(
    ("heads", "gated"),
    [((6, 1, 32), False), ((4, 2, 64), False), ((4, 2, 64), True), ((3, 3, 16), False)],
    ids=str,
)
def test_attention_window(heads: tuple[int, int, int], gated: bool) -> None:
    num_heads, kv_heads, head_dim = heads
    k, v, tables = _pool(22, kv_heads, head_dim)
    # With six heads to a key head a tile holds two rows: three tiles, the last not full.
    slots = torch.tensor([0] * 5 + [1] * 2 + [-1])
    end = torch.tensor([*range(327, 332), 64, 65, 0])
    begin = torch.tensor([0] * 4 + [300] + [0] * 3)
    q = torch.randn(8, num_heads + 1, head_dim)[:, :num_heads]
    paging = Paging(tables, slots, 400)
    expected = REFERENCE.attention(q, k, v, paging, begin, end, head_dim**-0.5)
    gate = torch.randn(8, num_heads, 2, head_dim)[:, :, 1] if gated else None
    found = attention.paged_attention(q, k, v, paging, (begin, end), head_dim**-0.5, gate)
    _close(found, expected if gate is None else expected * torch.sigmoid(gate), 1e-6)
    assert not found[7:].any()


def test_single_blocks_and_groups_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v, tables = _pool(22, 1, 32)
    k[tables[0, 8:].long()] *= 3  # the greatest weights are in the second group
    paging = Paging(tables[:1], torch.zeros(2, dtype=torch.int64), 600)
    end, begin = torch.tensor([590, 300]), torch.tensor([0, 45])
    q = torch.randn(2, 4, 32)
    fine = attention.paged_attention(q, k, v, paging, (begin, end), 0.2)
    monkeypatch.setattr(attention, "FINE_KEYS", 64)
    coarse = attention.paged_attention(q, k, v, paging, (begin, end), 0.2)
    _close(fine, REFERENCE.attention(q, k, v, paging, begin, end, 0.2), 1e-6)
    assert torch.equal(fine, coarse)
    # A group at a time, as texts of many thousands of keys are merged.
    monkeypatch.setattr(attention_blocks, "MERGE_GROUPS", 1)
    merged = attention.paged_attention(q, k, v, paging, (begin, end), 0.2)
    _close(merged, REFERENCE.attention(q, k, v, paging, begin, end, 0.2), 1e-6)


def test_attention_over_fp8() -> None:
    k, v, tables = _pool(22, 1, 32)
    paging = Paging(tables[:1], torch.zeros(1, dtype=torch.int64), 600)
    end, begin = torch.tensor([200]), torch.tensor([0])
    q = torch.randn(1, 4, 32)
    pages = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    expected = REFERENCE.attention(q, pages[0].float(), pages[1].float(), paging, begin, end, 0.2)
    _close(attention.paged_attention(q, *pages, paging, (begin, end), 0.2), expected, 2e-3)  # float16 operands


def test_attention_prefill() -> None:
    k, v, tables = _pool(21, 1, 32)
    slots = torch.full((130,), 1)
    slots[:7], slots[-5:] = -1, -1
    end = torch.arange(130) + 257
    begin = (end - 200).clamp_min(0)
    q = torch.randn(130, 6, 32)
    paging = Paging(tables, slots, 400)
    expected = REFERENCE.attention(q, k, v, paging, begin, end, 0.2)
    _close(attention_prefill.prefill_attention(q, k, v, paging, (begin, end), 0.2), expected, 1e-6)


def test_attention_refuses_what_it_cannot_read() -> None:
    k, v, tables = _pool(22, 1, 32)
    where = Paging(tables, torch.zeros(1, dtype=torch.int64), 400)
    bounds = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="head size 24"):
        attention.paged_attention(torch.randn(1, 2, 24), k[..., :24], v[..., :24], where, bounds, 1.0)
    with pytest.raises(ValueError, match="at most 16 rows"):
        attention.paged_attention(torch.randn(17, 2, 32), k, v, where, bounds, 1.0)
    with pytest.raises(ValueError, match="hold 9999 keys"):
        attention.paged_attention(torch.randn(1, 2, 32), k, v, replace(where, max_key_bound=9999), bounds, 1.0)


def _gdn_case(
    heads: tuple[int, int, int, int], rows: int, kind: str, taps: int = 4
) -> tuple[GdnInputs, GdnWeights, GdnState]:
    hk, hv, dk, dv = heads
    torch.manual_seed(rows)
    channels = 2 * hk * dk + hv * dv
    weights = GdnWeights(
        torch.randn(channels, taps) * 0.5, torch.randn(hv) * 0.5, torch.randn(hv), torch.randn(dv), 1e-6, hk, hv, dk, dv
    )
    keys = torch.nn.functional.normalize(torch.randn(4, 16, hk, dk), dim=-1)
    conv = torch.randn(4, channels, taps + 15)
    state = GdnState(torch.randn(4, hv, dv, dk), conv, keys, torch.randn(4, 16, hv, dv), torch.rand(4, 16, hv))
    none = torch.zeros(4, dtype=torch.int64)
    qkv = torch.randn(rows, channels + 5)[:, :channels]
    z, a, b = torch.randn(rows, hv * dv), torch.randn(rows, 2, hv), torch.randn(rows, 2, hv)
    assert kind in ("verify", "prefill")
    return GdnInputs(qkv, z, a, b, "verify", none, none, none, none), weights, state


def _clone(state: GdnState) -> GdnState:
    return GdnState(*(getattr(state, field.name).clone() for field in fields(GdnState)))


@pytest.mark.parametrize(
    ("heads", "form", "taps"),
    [((1, 3, 16, 32), (16, 4), 4), ((2, 2, 32, 16), (16, 8), 3), ((1, 2, 64, 16), (16, 4), 2)],
    ids=str,
)
def test_gdn_window_and_fold(
    heads: tuple[int, int, int, int], form: tuple[int, int], taps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs a head, and one; rounds of two rows, which begin with columns before the window twice, and of four;
    keys of one tile and of two."""
    monkeypatch.setattr(gdn_window, "window_shape", lambda *_: form)
    inputs, weights, state = _gdn_case(heads, 16, "verify", taps)
    inputs = replace(
        inputs,
        slots=torch.tensor([0] + [2] * 9 + [3] * 3 + [-1] * 3),
        window_starts=torch.tensor([0, 0, 1, 10]),
        window_rows=torch.tensor([1, 0, 9, 3]),
        pending_rows=torch.tensor([0, 5, 16, 2]),
    )
    expected_state = _clone(state)
    expected = reference_gdn.gdn(inputs, weights, expected_state)
    tickets = torch.zeros(64, dtype=torch.int32)
    found = gdn_window.gdn_window(inputs, weights, state, tickets, torch.full_like(inputs.z, float("nan")))
    assert not tickets.any()
    _close(found, expected, 1e-6)
    pending = torch.tensor([1, 0, 9, 2])
    for step in range(2):
        for field in fields(GdnState):
            _close(getattr(state, field.name), getattr(expected_state, field.name), 1e-6)
        if step == 0:
            reference_gdn.gdn_fold(expected_state, pending)
            gdn_fold.gdn_fold(state, pending)


@pytest.mark.parametrize("case", [(1, 3, 32, 32, 192, 37, 140), (2, 2, 32, 16, 64, 0, 2)], ids=str)
def test_gdn_prefill(case: tuple[int, ...]) -> None:
    hk, hv, dk, dv, rows, start, count = case
    inputs, weights, state = _gdn_case((hk, hv, dk, dv), rows, "prefill")
    inputs = replace(
        inputs,
        kind="prefill",
        window_starts=torch.tensor([0, 0, start, 0]),
        window_rows=torch.tensor([0, 0, count, 0]),
        pending_rows=torch.tensor([3, 0, 5, 1]),
    )
    expected_state = _clone(state)
    expected = reference_gdn.gdn(inputs, weights, expected_state)
    found = gdn_prefill.gdn_prefill(inputs, weights, state, torch.full_like(inputs.z, float("nan")), "ieee")
    assert torch.isfinite(found).all()
    # q, k and their products pass through float16.
    _close(found[start : start + count], expected[start : start + count], 2e-3)
    for field in fields(GdnState):
        _close(getattr(state, field.name), getattr(expected_state, field.name), 1e-3)


def test_gdn_refuses_head_sizes_it_cannot_hold() -> None:
    inputs, weights, state = _gdn_case((1, 3, 16, 32), 4, "verify")
    with pytest.raises(ValueError, match="key_head_dim is 24"):
        gdn_window.gdn_window(
            inputs,
            replace(weights, key_head_dim=24),
            state,
            torch.zeros(64, dtype=torch.int32),
            torch.empty_like(inputs.z),
        )


@pytest.mark.parametrize("heads", [(3, 1, 48, 16), (2, 2, 64, 64)], ids=str)
def test_norm_rope_and_store(heads: tuple[int, int, int, int]) -> None:
    num_heads, kv_heads, head_dim, rotated = heads
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, num_heads + 2 * kv_heads, head_dim) * 3).split((num_heads, kv_heads, kv_heads), 1)
    # Without a fused multiply-add, as here, far positions lose accuracy; the card's test covers them.
    positions = torch.tensor([0, 1, 3, 64, 127])
    inv_freq = 1e4 ** (-torch.arange(0, rotated, 2).float() / rotated)
    norms = Norm(torch.randn(head_dim), 1e-6, True), Norm(torch.randn(head_dim), 1e-6, True)
    for norm in (None, norms[0]):
        _close(
            norm_rope.norm_rope(q, norm, positions, inv_freq), REFERENCE.norm_rope(q, norm, positions, inv_freq), 1e-5
        )
    tables = torch.tensor([[1, 2], [5, 3]], dtype=torch.int32)
    where = Paging(tables, torch.tensor([0, 1, 1, 1, -1]), 128)
    expected = torch.zeros(2, 6, 64, kv_heads, head_dim)
    turned = REFERENCE.norm_rope(k, norms[1], positions, inv_freq)
    for row, slot in enumerate([0, 1, 1, 1]):
        page, offset = tables[slot, positions[row] // 64], positions[row] % 64
        expected[0, page, offset], expected[1, page, offset] = turned[row], v[row]
    pages = torch.zeros_like(expected)
    queries = norm_rope.norm_rope_store(q, k, v, norms, inv_freq, (pages[0], pages[1]), where, positions)
    _close(queries, REFERENCE.norm_rope(q, norms[0], positions, inv_freq), 1e-5)
    _close(pages, expected, 1e-5)
    again = torch.zeros_like(expected[1])
    norm_rope.store_kv(v, again, where, positions)
    assert torch.equal(again, expected[1])


def test_fp8_rounding_equals_torch() -> None:
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    torch.manual_seed(1)
    spread = torch.randn(1024) * 10.0 ** torch.randint(-5, 3, (1024,)).float()
    values = torch.cat([codes, -codes, middles, -middles, spread.clamp(-448, 448)])
    values = values[: values.numel() // 64 * 64].view(-1, 1, 64)
    pages = torch.zeros(2, 64, 1, 64).to(torch.float8_e4m3fn)
    where = Paging(torch.tensor([[1]], dtype=torch.int32), torch.zeros(len(values), dtype=torch.int64), 64)
    norm_rope.store_kv(values, pages, where, torch.arange(len(values)))
    expected = values.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(pages.view(torch.uint8)[1, : len(values)], expected)
    norm_rope.store_kv(torch.full((1, 1, 64), 1e6), pages, replace(where, slots=where.slots[:1]), torch.zeros(1).long())
    assert torch.equal(pages[1, 0].float(), torch.full((1, 64), 448.0))


def test_elementwise() -> None:
    torch.manual_seed(2)
    x, norm = torch.randn(3, 5, 100), Norm(torch.randn(100), 1e-5)
    _close(elementwise.rms_norm(x, norm), REFERENCE.rms_norm(x, norm), 1e-6)
    gate = torch.randn(3, 5, 2, 100)[:, :, 1]
    _close(elementwise.gated(x, gate, silu=False), x * torch.sigmoid(gate), 1e-6)
    gate, up = torch.randn(3, 3000).chunk(2, dim=1)
    _close(elementwise.gated(up, gate, silu=True), REFERENCE.silu_mul(gate, up), 1e-6)
    wide = torch.full((3, 1700), float("nan"))
    elementwise.gated(up, gate, silu=True, out=wide[:, 100:1600])
    _close(wide[:, 100:1600], REFERENCE.silu_mul(gate, up), 1e-6)
    assert wide[:, :100].isnan().all() and wide[:, 1600:].isnan().all()
    table = torch.randn(7, 1100)
    found = elementwise.embed(torch.tensor([0, 6, -1, 3]), table, table.device, torch.float32)
    assert torch.equal(found, table[[0, 6, 0, 3]])


@pytest.mark.parametrize("case", [(3, 100, 300, False), (16, 64, 200, True), (1, 130, 1000, False)], ids=str)
def test_dense_linear(case: tuple[int, int, int, bool]) -> None:
    rows, n, k, gated = case
    torch.manual_seed(3)
    weight, x, bias = torch.randn(n, k), torch.randn(rows, k + 3)[:, :k], torch.randn(n)
    width = n // 2 if gated else n
    residual = None if gated else torch.randn(rows, n)
    out = torch.full((rows, width), float("nan"))
    expected = x @ weight.t() + bias
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    elif residual is not None:
        expected = expected + residual
    _close(dense_linear(x, DenseMatrix(weight, gated), residual, bias, out), expected, 1e-5)


@pytest.mark.parametrize("width", [0, 1, 4, 7, 15])
def test_windows_and_what_becomes_of_them(width: int) -> None:
    """Random windows, drafts that are right for a while, stops, limits and frozen slots; whole numbers, so equal."""
    generator = torch.Generator().manual_seed(width)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    for round_ in range(16):
        counts = [int(draw(width + 2, 1)) for _ in range(4)]
        starts = [sum(counts[:slot]) for slot in range(4)]
        rows = sum(counts) + round_ % 2
        if not rows:
            continue
        slots = [slot for slot in range(4) for _ in range(counts[slot])] + [-1] * (round_ % 2)
        offsets = [offset for count in counts for offset in range(count)] + [0] * (round_ % 2)
        drawn, drafts, origins = draw(3, rows), draw(3, 4, width), draw(4, 4, width)
        drafts[draw(9, 4, width) == 0] = -1
        stops = torch.full((4, 16), -1)
        stops[round_ % 4, 3] = 2
        state = _Counters(draw(50, 4, 40), torch.tensor([1, 9, 20, 30]), draw(6, 4), draw(5, 4) == 0, stops, draw(9, 4))
        places = _Places(torch.tensor(slots), torch.tensor(offsets))
        window = Window(drawn, drafts, origins, torch.tensor(starts), torch.tensor(counts))
        for found, wanted in zip(
            settle.window_rows(places, drafts, state), reference_settle.window_rows(places, drafts, state), strict=True
        ):
            assert torch.equal(found, wanted)
        copy = _Counters(*(getattr(state, field.name).clone() for field in fields(_Counters)))
        found, wanted = settle.settle(window, copy), reference_settle.settle(window, state)
        for field in fields(Settled):
            assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name
        for field in fields(_Counters):
            assert torch.equal(getattr(copy, field.name), getattr(state, field.name)), field.name


@dataclass(frozen=True)
class _Counters:
    history: torch.Tensor
    lengths: torch.Tensor
    remaining: torch.Tensor
    frozen: torch.Tensor
    stop_ids: torch.Tensor
    pending_rows: torch.Tensor


@dataclass(frozen=True)
class _Places:
    slots: torch.Tensor
    offsets: torch.Tensor
