"""Row bits and epilogues of the reference matmul, and elementwise functions that must not see their place."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from localspec.kernels import reference_linear
from localspec.kernels.elementwise import sigmoid, silu, softplus
from localspec.kernels.ops import Norm
from localspec.kernels.reference_linear import Way, multiply, prepare, row_bits_are_kept
from localspec.kernels.weights import DenseWeight
from tests.helpers.models import reference_ops

pytestmark = pytest.mark.torch
SHAPES = ((576, 576), (960, 576), (3072, 576), (576, 1536), (63, 1000), (1000, 63), (5, 3), (1, 1))


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_rows_bits_do_not_depend_on_the_others(n: int, k: int, way: Way) -> None:
    torch.manual_seed(n * k)
    ops = reference_ops()
    ops.way = way
    norm = Norm(torch.rand(k) + 0.5, 1e-6)
    weight = ops.pack([DenseWeight(torch.randn(n, k))])
    x, residual = torch.randn(256, k), torch.randn(256, n)
    chunk = ops.linear(x, weight, norm=norm, epilogue="residual", residual=residual)
    for rows in (*range(1, 17), 100):
        for start in (0, 37):
            part = slice(start, start + rows)
            got = ops.linear(x[part], weight, norm=norm, epilogue="residual", residual=residual[part])
            assert torch.equal(got, chunk[part]), f"{rows} rows from {start}"


def test_the_ways_agree_and_the_slow_one_is_taken_when_bits_move(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    matrix, x = torch.randn(70, 50), torch.randn(20, 50)
    products = [multiply(x, prepare(matrix, way)) for way in Way]
    assert all((product - x @ matrix.T).abs().max() < 1e-4 for product in products)
    asked: list[Way] = []
    monkeypatch.setattr(reference_linear, "row_bits_are_kept", lambda way: bool(asked.append(way)))
    assert reference_linear.choose_way(torch.device("cpu")) is Way.BLOCKS
    assert asked == [Way.REORDERED, Way.PLAIN]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_probe_passes_here_with_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(row_bits_are_kept(way) for way in Way)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("plus_one", [False, True])
def test_linear_computes_what_it_says(plus_one: bool) -> None:
    torch.manual_seed(1)
    ops = reference_ops()
    x, gate, up = torch.randn(3, 70), torch.randn(50, 70), torch.randn(50, 70)
    norm = Norm(torch.randn(70), 1e-5, plus_one)
    scale = norm.weight.double() + (1 if plus_one else 0)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * scale
    gated = ops.pack([DenseWeight(gate), DenseWeight(up)], gated=True)
    expected = functional.silu(normed @ gate.double().T) * (normed @ up.double().T)
    got = ops.linear(x, gated, norm=norm, epilogue="silu_mul")
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    stacked = ops.pack([DenseWeight(gate), DenseWeight(up.half())])
    bias = torch.randn(100)
    expected = x.double() @ torch.cat((gate, up.half().float())).double().T + bias
    assert (ops.linear(x, stacked, bias=bias) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert stacked.shape == (100, 70) and stacked.read_bytes == 100 * 70 * 4
    assert ops.linear(x, stacked, out_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_wrong_combinations_are_refused() -> None:
    ops = reference_ops()
    weight = ops.pack([DenseWeight(torch.ones(4, 4))])
    x = torch.ones(1, 4)
    with pytest.raises(ValueError, match="gated"):
        ops.linear(x, weight, epilogue="silu_mul")
    with pytest.raises(ValueError, match="residual"):
        ops.linear(x, weight, epilogue="residual")
    with pytest.raises(ValueError, match="two parts"):
        ops.pack([DenseWeight(torch.ones(4, 4)), DenseWeight(torch.ones(2, 4))], gated=True)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(sigmoid, torch.sigmoid), (silu, functional.silu), (softplus, functional.softplus)]
)
def test_elementwise_bits_do_not_depend_on_the_place(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    torch.manual_seed(2)
    x = torch.cat((torch.randn(3000) * 5, torch.tensor([-200.0, 200.0, 0.0, 20.0, 20.5, -89.0])))
    whole = ours(x)
    assert (whole - theirs(x.double())).abs().max() < 1e-5
    for length in (1, 2, 5, 15, 16, 17, 31, 33, 63, 64, 100, 1000):
        for start in (0, 1, 7, 3006 - length):
            assert torch.equal(ours(x[start : start + length]), whole[start : start + length])


def test_embed_and_rope() -> None:
    torch.manual_seed(3)
    ops = reference_ops()
    table = torch.randn(10, 6).half()
    assert torch.equal(ops.embed(torch.tensor([3, -1]), table), table[[3, 0]].float())
    x, inv_freq = torch.randn(5, 2, 10), torch.tensor([1.0, 0.1, 0.01])
    positions = torch.tensor([0, 1, 2, 1000, 65])
    got = ops.norm_rope(x, None, positions, inv_freq)
    turned = torch.polar(torch.ones(5, 1, 3), positions.view(-1, 1, 1) * inv_freq) * torch.complex(
        x[..., :3], x[..., 3:6]
    )
    assert (got - torch.cat((turned.real, turned.imag, x[..., 6:]), -1)).abs().max() < 1e-6
    assert torch.equal(ops.norm_rope(x[2:3], None, positions[2:3], inv_freq), got[2:3])


@pytest.mark.parametrize("width", [1, 20, 63, 576, 1000])
def test_norms_and_rotations_keep_a_rows_bits(width: int) -> None:
    torch.manual_seed(width)
    ops = reference_ops()
    x, norm = torch.randn(64, 2, width), Norm(torch.rand(width), 1e-6, plus_one=True)
    positions, inv_freq = torch.randint(0, 5000, (64,)), torch.rand(width // 4)
    normed, turned = ops.rms_norm(x, norm), ops.norm_rope(x, norm, positions, inv_freq)
    product = ops.silu_mul(x, x + 1)
    for rows in range(1, 17):
        for start in (0, 5, 64 - rows):
            part = slice(start, start + rows)
            assert torch.equal(ops.rms_norm(x[part], norm), normed[part])
            assert torch.equal(ops.norm_rope(x[part], norm, positions[part], inv_freq), turned[part])
            assert torch.equal(ops.silu_mul(x[part], x[part] + 1), product[part])
