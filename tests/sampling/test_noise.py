"""The noise has the Gumbel law, is a function of its key alone and does not repeat between positions or seeds."""

from __future__ import annotations

import math

import pytest
import torch

from localspec.sampling.noise import gumbel, row_keys
from tests.sampling.tables import noise_of_all_rows

pytestmark = pytest.mark.torch

KNOWN = [
    [3.3643520, 0.9227285, 1.0506706],
    [0.5542367, -0.4316346, -0.2347810],
    [0.8970410, -0.8864893, 1.2993035],
]


def test_same_value_alone_in_a_batch_and_among_candidates() -> None:
    seeds = torch.tensor([3, -9, 2**62, 3])
    keys = row_keys(seeds, torch.tensor([0, 5, 70_000, 1]))
    whole = gumbel(keys, torch.arange(49_157, dtype=torch.int32))
    few = torch.tensor([[49_156, 0, 17], [5, 6, 7], [49_000, 2, 1], [8, 8, 8]])
    assert torch.equal(gumbel(keys, few), whole.gather(1, few))
    for row in range(4):
        alone = gumbel(row_keys(seeds[row : row + 1], torch.tensor([[0, 5, 70_000, 1][row]])), torch.arange(1001))
        assert torch.equal(alone[0], whole[row, :1001])


def test_all_rows_at_once_give_the_same_bits() -> None:
    """What the tests of the law use in place of one row after the other."""
    keys = row_keys(torch.tensor([3, -9, 2**62, 5, 0] * 7), torch.arange(35))
    for width in (1, 5, 6, 7, 19):
        ids = torch.randint(0, 99, (35, width), generator=torch.Generator().manual_seed(width))
        assert torch.equal(noise_of_all_rows(keys, ids), gumbel(keys, ids))
        columns = torch.arange(width, dtype=torch.int32)
        assert torch.equal(noise_of_all_rows(keys, columns), gumbel(keys, columns))


def test_known_values_never_change() -> None:
    """A saved seed must give the same answer in every later version."""
    noise = gumbel(row_keys(torch.tensor([1, 1, 2]), torch.tensor([10, 11, 10])), torch.tensor([0, 1, 248_319]))
    assert noise.shape == (3, 3)
    expected = torch.tensor(KNOWN)
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)


def test_moments_and_tails_are_gumbel() -> None:
    noise = gumbel(row_keys(torch.arange(16), torch.arange(16) * 3), torch.arange(250_000)).to(torch.float64)
    count = noise.numel()
    assert abs(noise.mean().item() - 0.57721566) < 5 * 1.2825 / math.sqrt(count)
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.01
    for threshold in (3.0, 6.0, 9.0, 12.0):
        expected = count * -math.expm1(-math.exp(-threshold))
        assert abs((noise > threshold).sum().item() - expected) < 5 * math.sqrt(expected) + 1
    # Equal-probability cells of the law.
    cells = torch.histc(torch.exp(-torch.exp(-noise)), bins=1000, min=0, max=1)
    chi_square = ((cells - count / 1000) ** 2 / (count / 1000)).sum().item()
    assert abs(chi_square - 999) < 5 * math.sqrt(2 * 999)


@pytest.mark.parametrize("kind", ["positions", "seeds", "ids"])
def test_neighbours_are_uncorrelated(kind: str) -> None:
    rows = torch.arange(2000)
    zero = torch.zeros_like(rows)
    keys = row_keys(zero, rows) if kind == "positions" else row_keys(rows, zero)
    noise = torch.exp(-torch.exp(-gumbel(keys, torch.arange(200)).to(torch.float64))) - 0.5
    pair = (noise[:-1] * noise[1:]) if kind != "ids" else (noise[:, :-1] * noise[:, 1:])
    assert abs(pair.mean().item() * 12) < 5 / math.sqrt(pair.numel())
    lag = (noise[:-7] * noise[7:]) if kind != "ids" else (noise[:, :-64] * noise[:, 64:])
    assert abs(lag.mean().item() * 12) < 5 / math.sqrt(lag.numel())
