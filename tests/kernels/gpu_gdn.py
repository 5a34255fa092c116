"""GDN kernels on a card: against the reference, and bit for bit between windows, folds and chunks."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from localspec.kernels import reference_gdn
from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights
from localspec.kernels.triton import gdn_window as window_module
from localspec.kernels.triton.gdn_fold import gdn_fold
from localspec.kernels.triton.gdn_prefill import gdn_prefill
from localspec.kernels.triton.gdn_window import gdn_window
from tests.kernels.gpu_support import (
    DEVICE,
    clone_state,
    gdn_case,
    poison,
    relative_error,
    row_slice,
    with_windows,
)

pytestmark = pytest.mark.gpu

HEADS = [(16, 48, 128, 128), (4, 4, 64, 64), (2, 6, 32, 64)]


def _window(inputs: GdnInputs, weights: GdnWeights, state: GdnState) -> torch.Tensor:
    poison()
    out = torch.full_like(inputs.z, float("nan"), memory_format=torch.contiguous_format)
    tickets = torch.zeros(256, dtype=torch.int32, device=DEVICE)
    found = gdn_window(inputs, weights, state, tickets, out)
    assert not tickets.any()
    return found


@pytest.mark.parametrize("taps", [4, 3, 2])
@pytest.mark.parametrize("heads", [*HEADS, (1, 3, 16, 32), (1, 2, 256, 16)], ids=str)
def test_window_matches_the_reference(heads: tuple[int, int, int, int], taps: int) -> None:
    inputs, weights, state = gdn_case(heads, 4, 16, seed=taps, taps=taps)
    inputs = with_windows(inputs, [(0, 1), (0, 0), (1, 9), (10, 3)], [0, 5, 16, 2])
    expected_state = clone_state(state)
    before = clone_state(state)
    expected = reference_gdn.gdn(inputs, weights, expected_state)
    found = _window(inputs, weights, state)
    assert relative_error(found[:13], expected[:13]) < 4e-3  # the output is bf16
    assert not found[13:].any()
    for field in fields(GdnState):
        ours, theirs = getattr(state, field.name), getattr(expected_state, field.name)
        assert relative_error(ours, theirs) < 1e-5, field.name
        assert torch.equal(ours[1], getattr(before, field.name)[1]), f"{field.name} of an idle slot changed"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_window_length_gives_the_same_rows(seed: int) -> None:
    """Each length against the reference, and each row's output and records against those of the longest window; the
    seed is the number of parts of a gate."""
    inputs, weights, start = gdn_case(HEADS[0], 1, 16, seed=seed)
    pending = [0, 7, 16][seed]
    longest = clone_state(start)
    whole = _window(with_windows(inputs, [(0, 16)], [pending]), weights, longest)
    for count in range(1, 17):
        state, expected_state = clone_state(start), clone_state(start)
        rows = with_windows(inputs, [(0, count)], [pending])
        found = _window(rows, weights, state)
        expected = reference_gdn.gdn(rows, weights, expected_state)
        assert relative_error(found[:count], expected[:count]) < 4e-3, f"{count} rows"
        assert not found[count:].any()
        assert torch.equal(found[:count], whole[:count]), f"{count} rows"
        assert torch.equal(state.recurrent, longest.recurrent)
        assert torch.equal(state.conv[:, :, : 3 + count], longest.conv[:, :, : 3 + count])
        for name in ("ring_k", "ring_u", "ring_decay"):
            ours = getattr(state, name)
            assert torch.equal(ours[:, :count], getattr(longest, name)[:, :count]), f"{name} of {count} rows"
            assert torch.equal(ours[:, count:], getattr(start, name)[:, count:]), f"{name} behind {count} rows"


def test_every_form_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weights, start = gdn_case(HEADS[0], 1, 16, seed=8)
    inputs = with_windows(inputs, [(0, 13)], [5])
    found, states = [], []
    for form in ((64, 8), (32, 4), (64, 4), (128, 8), (16, 4)):
        monkeypatch.setattr(window_module, "window_shape", lambda *_, form=form: form)
        states.append(clone_state(start))
        found.append(_window(inputs, weights, states[-1]))
    for out, state in zip(found[1:], states[1:], strict=True):
        assert torch.equal(out, found[0])
        for field in fields(GdnState):
            assert torch.equal(getattr(state, field.name), getattr(states[0], field.name)), field.name


@pytest.mark.parametrize("pending", [1, 2, 15, 16])
def test_the_lazy_fold_is_the_fold(pending: int) -> None:
    inputs, weights, lazy = gdn_case(HEADS[0], 1, 16, seed=9)
    folded = clone_state(lazy)
    gdn_fold(folded, torch.tensor([pending], device=DEVICE))
    first = _window(with_windows(inputs, [(0, 5)], [0]), weights, folded)
    other = _window(with_windows(inputs, [(0, 5)], [pending]), weights, lazy)
    assert torch.equal(first, other)
    for field in fields(GdnState):
        ours, theirs = getattr(folded, field.name), getattr(lazy, field.name)
        if field.name == "conv":
            ours, theirs = ours[:, :, :8], theirs[:, :, :8]
        assert torch.equal(ours, theirs), field.name


def test_bits_do_not_depend_on_how_rows_are_cut_into_windows() -> None:
    heads = HEADS[0]
    inputs, weights, state = gdn_case(heads, 1, 16, seed=2)
    start = clone_state(state)
    whole = _window(with_windows(inputs, [(0, 16)], [0]), weights, state)
    gdn_fold(state, torch.tensor([16], device=DEVICE))
    for cuts in ([1] * 16, [3, 5, 8], [2, 1, 13], [15, 1]):
        stepped = clone_state(start)
        first, pending = 0, 0
        for count in cuts:
            rows = row_slice(inputs, first, first + count)
            out = _window(with_windows(rows, [(0, count)], [pending]), weights, stepped)
            assert torch.equal(out, whole[first : first + count]), f"rows {first} to {first + count} of {cuts}"
            first, pending = first + count, count
        gdn_fold(stepped, torch.tensor([pending], device=DEVICE))
        assert torch.equal(stepped.recurrent, state.recurrent), f"state after {cuts}"
        assert torch.equal(stepped.conv[:, :, :3], state.conv[:, :, :3])


def test_rejected_rows_leave_no_trace() -> None:
    inputs, weights, state = gdn_case(HEADS[0], 1, 16, seed=3)
    stepped = clone_state(state)
    _window(with_windows(inputs, [(0, 16)], [0]), weights, state)
    rest = row_slice(inputs, 5, 9)
    after = _window(with_windows(rest, [(0, 4)], [5]), weights, state)
    _window(with_windows(row_slice(inputs, 0, 5), [(0, 5)], [0]), weights, stepped)
    plain = _window(with_windows(rest, [(0, 4)], [5]), weights, stepped)
    assert torch.equal(after, plain)
    assert torch.equal(state.recurrent, stepped.recurrent)


def test_row_bits_do_not_depend_on_other_slots() -> None:
    inputs, weights, state = gdn_case(HEADS[0], 4, 16, seed=4)
    windows = [(0, 4), (4, 4), (8, 4), (12, 4)]
    pending = [0, 3, 4, 1]
    start = clone_state(state)
    together = replace(with_windows(inputs, windows, pending), slot_rows_bound=4)  # in the form of several slots
    whole = _window(together, weights, state)
    for slot in range(4):
        alone = GdnState(*(getattr(start, field.name)[slot : slot + 1].clone() for field in fields(GdnState)))
        rows = with_windows(row_slice(inputs, 4 * slot, 4 * slot + 4), [(0, 4)], [pending[slot]])
        assert torch.equal(_window(rows, weights, alone), whole[4 * slot : 4 * slot + 4])
        assert torch.equal(alone.recurrent[0], state.recurrent[slot])


def _prefill(inputs: GdnInputs, weights: GdnWeights, state: GdnState) -> torch.Tensor:
    poison()
    out = torch.full_like(inputs.z, float("nan"), memory_format=torch.contiguous_format)
    return gdn_prefill(replace(inputs, kind="prefill"), weights, state, out, "tf32")


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_matches_the_reference(heads: tuple[int, int, int, int]) -> None:
    inputs, weights, state = gdn_case(heads, 2, 512, seed=5)
    inputs = with_windows(inputs, [(0, 0), (37, 400)], [4, 6])
    expected_state = clone_state(state)
    expected = reference_gdn.gdn(replace(inputs, kind="prefill"), weights, expected_state)
    before = clone_state(state)
    found = _prefill(inputs, weights, state)
    assert torch.isfinite(found).all()
    assert relative_error(found[37:437], expected[37:437]) < 5e-3
    assert relative_error(state.recurrent[1], expected_state.recurrent[1]) < 2e-3  # tf32 products
    assert torch.equal(state.conv[1, :, :3], expected_state.conv[1, :, :3])
    assert torch.equal(state.recurrent[0], before.recurrent[0])
    assert torch.equal(state.conv[0], before.conv[0])


def test_prefill_survives_repeated_keys() -> None:
    """One token again and again: all keys are equal, and a solver by powers of the matrix would overflow."""
    inputs, weights, state = gdn_case(HEADS[0], 1, 256, seed=6)
    qkv = inputs.qkv[:1].expand(256, -1).contiguous()
    b = torch.full_like(inputs.b, 6.0, memory_format=torch.contiguous_format)
    a = torch.full_like(inputs.a, -8.0, memory_format=torch.contiguous_format)
    inputs = with_windows(replace(inputs, qkv=qkv, a=a, b=b), [(0, 256)], [0])
    expected_state = clone_state(state)
    expected = reference_gdn.gdn(replace(inputs, kind="prefill"), weights, expected_state)
    found = _prefill(inputs, weights, state)
    assert relative_error(found, expected) < 1e-2
    assert relative_error(state.recurrent, expected_state.recurrent) < 5e-3


def test_prefill_bits_do_not_depend_on_the_chunk() -> None:
    inputs, weights, state = gdn_case(HEADS[0], 1, 512, seed=7)
    stepped = clone_state(state)
    whole = _prefill(with_windows(inputs, [(0, 512)], [0]), weights, state)
    for first in (0, 256):
        part = _prefill(with_windows(row_slice(inputs, first, first + 256), [(0, 256)], [0]), weights, stepped)
        assert torch.equal(part, whole[first : first + 256])
    assert torch.equal(state.recurrent, stepped.recurrent)
    assert torch.equal(state.conv[:, :, :3], stepped.conv[:, :, :3])
