"""Gated DeltaNet of the reference: right against the formulas in float64, folds bit for bit, slots apart."""

from __future__ import annotations

import pytest
import torch

from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights
from tests.helpers.models import reference_ops

pytestmark = pytest.mark.torch
HK, HV, DK, DV, TAPS, RING, SLOTS = 2, 6, 20, 12, 4, 16, 3
WIDTH = 2 * HK * DK + HV * DV


def _weights() -> GdnWeights:
    generator = torch.Generator().manual_seed(1)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return GdnWeights(rand(WIDTH, TAPS) / 2, rand(HV), rand(HV), rand(DV), 1e-6, HK, HV, DK, DV)


def _state(fill: float = 0.0) -> GdnState:
    generator = torch.Generator().manual_seed(2)
    recurrent = fill * torch.randn(SLOTS, HV, DV, DK, generator=generator)
    conv = torch.full((SLOTS, WIDTH, TAPS - 1 + RING), float("nan"))
    conv[:, :, : TAPS - 1] = fill * torch.randn(SLOTS, WIDTH, TAPS - 1, generator=generator)
    rings = (torch.full((SLOTS, RING, *shape), float("nan")) for shape in ((HK, DK), (HV, DV), (HV,)))
    return GdnState(recurrent, conv, *rings)


def _rows(count: int, seed: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, size, generator=generator) for size in (WIDTH, HV * DV, HV, HV))


def _inputs(
    rows: tuple[torch.Tensor, ...], kind: str, windows: dict[int, tuple[int, int]], pending: list[int]
) -> GdnInputs:
    starts = [windows.get(slot, (0, 0))[0] for slot in range(SLOTS)]
    counts = [windows.get(slot, (0, 0))[1] for slot in range(SLOTS)]
    slots = torch.full((len(rows[0]),), -1)
    for slot, (start, count) in windows.items():
        slots[start : start + count] = slot
    as_tensor = torch.tensor
    qkv, z, a, b = rows
    return GdnInputs(
        qkv, z, a[:, None], b[:, None], kind, slots, as_tensor(starts), as_tensor(counts), as_tensor(pending)
    )  # type: ignore[arg-type]


def _formula(rows: tuple[torch.Tensor, ...], weights: GdnWeights, state: GdnState, slot: int) -> torch.Tensor:
    """The recurrence as published, in float64, one row and one head at a time."""
    qkv, z, a, b = (row.double() for row in rows)
    columns = torch.cat((state.conv[slot, :, : TAPS - 1].double(), qkv.T), 1)
    taps = weights.conv.double()
    recurrent = state.recurrent[slot].double().clone()
    out = []
    for t in range(len(qkv)):
        mixed = (columns[:, t : t + TAPS] * taps).sum(1)
        mixed = mixed * torch.sigmoid(mixed)
        q, k, v = (
            mixed[: HK * DK].view(HK, DK),
            mixed[HK * DK : 2 * HK * DK].view(HK, DK),
            mixed[2 * HK * DK :].view(HV, DV),
        )
        for head in range(HV):
            key = k[head // (HV // HK)]
            key = key / (key.square().sum() + 1e-6).sqrt()
            query = q[head // (HV // HK)]
            query = query / (query.square().sum() + 1e-6).sqrt() / DK**0.5
            decay = torch.exp(
                -weights.a_log[head].double().exp() * torch.log1p((a[t, head] + weights.dt_bias[head]).exp())
            )
            recurrent[head] *= decay
            update = torch.sigmoid(b[t, head]) * (v[head] - recurrent[head] @ key)
            recurrent[head] += torch.outer(update, key)
            read = recurrent[head] @ query
            read = read / (read.square().mean() + weights.eps).sqrt() * weights.norm
            gate = z[t].view(HV, DV)[head]
            out.append(read * gate * torch.sigmoid(gate))
    return torch.cat(out).view(len(qkv), -1)


@pytest.mark.parametrize("kind", ["verify", "prefill"])
def test_against_the_formulas(kind: str) -> None:
    weights, state, rows = _weights(), _state(0.7), _rows(13)
    expected = _formula(rows, weights, state, 1)
    got = reference_ops().gdn(_inputs(rows, kind, {1: (0, 13)}, [0, 0, 0]), weights, state)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("accepted", range(1, 17))
def test_folding_equals_the_sequence_bit_for_bit(accepted: int) -> None:
    ops, weights, rows = reference_ops(), _weights(), _rows(16)
    sequential, lazy = _state(0.7), _state(0.7)
    untouched = _state(0.7)
    whole = ops.gdn(
        _inputs(tuple(row[:accepted] for row in rows), "prefill", {1: (0, accepted)}, [0] * 3), weights, sequential
    )
    window = ops.gdn(_inputs(rows, "verify", {1: (0, 16)}, [0] * 3), weights, lazy)
    assert torch.equal(window[:accepted], whole)
    assert torch.equal(lazy.recurrent, untouched.recurrent), "a window must not commit"
    ops.gdn_fold(lazy, torch.tensor([0, accepted, 0]))
    assert torch.equal(lazy.recurrent, sequential.recurrent)
    assert torch.equal(lazy.conv[:, :, : TAPS - 1], sequential.conv[:, :, : TAPS - 1])


def test_windows_of_any_width_and_chunks_give_the_same_bits() -> None:
    ops, weights, rows = reference_ops(), _weights(), _rows(90)
    whole_state = _state()
    whole = ops.gdn(_inputs(rows, "prefill", {0: (0, 90)}, [0] * 3), weights, whole_state)
    generator = torch.Generator().manual_seed(4)
    for trial in range(4):
        state, at, pending, found = _state(), 0, 0, []
        while at < 90:
            count = min(int(torch.randint(1, 17, (), generator=generator)), 90 - at)
            kept = count if trial == 0 else int(torch.randint(1, count + 1, (), generator=generator))
            kind = "prefill" if trial == 3 and at % 2 else "verify"
            kept = count if kind == "prefill" else kept
            part = tuple(torch.cat((torch.full_like(row[:2], 9.0), row[at : at + count])) for row in rows)
            got = ops.gdn(_inputs(part, kind, {0: (2, count)}, [pending, 0, 0]), weights, state)
            assert not got[:2].any()
            found.append(got[2 : 2 + kept])
            pending, at = (0 if kind == "prefill" else kept), at + kept
        ops.gdn_fold(state, torch.tensor([pending, 0, 0]))
        assert torch.equal(torch.cat(found), whole)
        assert torch.equal(state.recurrent[0], whole_state.recurrent[0])


def test_slots_do_not_see_each_other_and_those_left_out_keep_their_pending_rows() -> None:
    ops, weights = reference_ops(), _weights()
    rows, other = _rows(10), _rows(10, seed=9)
    alone = ops.gdn(_inputs(rows, "prefill", {2: (0, 10)}, [0] * 3), weights, _state(0.5))
    state = _state(0.5)
    both = tuple(torch.cat((second[:7], first[:6])) for first, second in zip(rows, other, strict=True))
    first = ops.gdn(_inputs(both, "verify", {0: (0, 7), 2: (7, 6)}, [0] * 3), weights, state)
    assert torch.equal(first[7:], alone[:6])
    before = state.recurrent[0].clone()
    rest = tuple(row[6:] for row in rows)
    second = ops.gdn(_inputs(rest, "verify", {2: (0, 4)}, [5, 0, 6]), weights, state)
    assert torch.equal(second, alone[6:])
    assert torch.equal(state.recurrent[0], before), "a slot that is not in the step must wait"


def test_reduced_precision_projections_come_back_in_the_activation_dtype() -> None:
    ops = reference_ops()
    ops.activation_dtype = torch.bfloat16
    weights, rows = _weights(), tuple(row.bfloat16() for row in _rows(5))
    got = ops.gdn(_inputs(rows, "verify", {0: (0, 5)}, [0] * 3), weights, _state())
    expected = _formula(rows, weights, _state(), 0)
    assert got.dtype == torch.bfloat16 and (got - expected).abs().max() < 0.02 * expected.abs().max()
