"""Row-wise kernels, cache writes, dense matmuls and the back end on a card, against the reference."""

from __future__ import annotations

import pytest
import torch

from localspec.kernels.backends.reference import ReferenceOps
from localspec.kernels.backends.triton_sm80 import TritonOps
from localspec.kernels.nvfp4_pack import quantise_nvfp4
from localspec.kernels.ops import Norm
from localspec.kernels.triton.elementwise import gated
from localspec.kernels.triton.norm_rope import norm_rope_store
from localspec.kernels.weights import DenseWeight
from tests.kernels.gpu_support import DEVICE, paging, poison, relative_error

pytestmark = pytest.mark.gpu

REFERENCE = ReferenceOps(DEVICE)
BOUND = 3e-3  # outputs are bf16


def _ops() -> TritonOps:
    return TritonOps(DEVICE)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


@pytest.mark.parametrize("heads", [(24, 4, 256, 64), (9, 3, 64, 64), (5, 1, 48, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_norm_rope_store(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_heads, kv_heads, head_dim, rotated = heads
    torch.manual_seed(0)
    joined = _randn(6, num_heads + 2 * kv_heads, head_dim) * 2
    q, k, v = joined.split((num_heads, kv_heads, kv_heads), dim=1)
    norms = (
        Norm(torch.randn(head_dim, device=DEVICE), 1e-6, True),
        Norm(torch.randn(head_dim, device=DEVICE), 1e-6, True),
    )
    inv_freq = 1e7 ** (-torch.arange(0, rotated, 2, device=DEVICE).float() / rotated)
    far = torch.tensor([0, 1, 63, 4097, 262143, 99999], device=DEVICE)
    ops = _ops()
    poison()
    found = ops.norm_rope(q, norms[0], far, inv_freq)
    assert relative_error(found, REFERENCE.norm_rope(q.float(), norms[0], far, inv_freq)) < BOUND
    found = ops.norm_rope(q, None, far, inv_freq)
    assert relative_error(found, REFERENCE.norm_rope(q.float(), None, far, inv_freq)) < BOUND
    positions = torch.tensor([0, 1, 63, 64, 127, 5], device=DEVICE)
    tables = torch.tensor([[1, 2], [4, 3]], dtype=torch.int32, device=DEVICE)
    where = paging(tables, [0, 1, 1, 1, 0, -1], 128)
    apart = [torch.zeros(5, 64, kv_heads, head_dim, device=DEVICE).to(dtype) for _ in range(2)]
    fused = [pages.clone() for pages in apart]
    turned = ops.norm_rope(k, norms[1], positions, inv_freq)
    ops.store_kv(turned, apart[0], where, positions)
    ops.store_kv(v, apart[1], where, positions)
    queries = norm_rope_store(q, k, v, norms, inv_freq, (fused[0], fused[1]), where, positions)
    assert torch.equal(queries, ops.norm_rope(q, norms[0], positions, inv_freq))
    for row, (slot, position) in enumerate(zip([0, 1, 1, 1, 0], positions.tolist(), strict=False)):
        page = int(tables[slot, position // 64])
        assert torch.equal(apart[0][page, position % 64].float(), turned[row].to(dtype).float())
        assert torch.equal(apart[1][page, position % 64].float(), v[row].to(dtype).float())
    for one, other in zip(apart, fused, strict=True):
        assert torch.equal(one.float(), other.float())
    assert int((apart[1].float().abs().sum(dim=(2, 3)) > 0).sum()) == 5, "a padding row was written"


def test_elementwise() -> None:
    ops = _ops()
    torch.manual_seed(1)
    for shape in ((1, 5120), (3, 7, 200), (16, 17408)):
        x = _randn(*shape)
        norm = Norm(torch.randn(shape[-1], device=DEVICE), 1e-6, True)
        poison()
        assert relative_error(ops.rms_norm(x, norm), REFERENCE.rms_norm(x.float(), norm)) < BOUND
    x, gate = _randn(5, 24, 256), _randn(5, 24, 2, 256)[:, :, 1]
    assert relative_error(gated(x, gate, silu=False), x.float() * torch.sigmoid(gate.float())) < BOUND
    gate, up = _randn(3, 2 * 1500).chunk(2, dim=1)
    assert relative_error(ops.silu_mul(gate, up), REFERENCE.silu_mul(gate.float(), up.float())) < BOUND


def test_embedding_from_pinned_memory() -> None:
    table = torch.randn(1000, 5120).to(torch.bfloat16).pin_memory()
    ids = torch.tensor([0, 999, 17, -1], device=DEVICE)
    poison()
    found = _ops().embed(ids, table)
    assert torch.equal(found.cpu(), table[[0, 999, 17, 0]])
    with pytest.raises(ValueError, match="pinned"):
        _ops().embed(ids, torch.randn(4, 8))


@pytest.mark.parametrize("size", [(96, 5120), (100, 264), (2048, 1000)], ids=str)
def test_dense_linear(size: tuple[int, int]) -> None:
    n, k = size
    torch.manual_seed(2)
    weight = torch.randn(n, k, device=DEVICE) / k**0.5
    ops = _ops()
    norm = Norm(torch.randn(k, device=DEVICE), 1e-6, True)
    x, residual, bias = _randn(16, k), _randn(16, n), torch.randn(n, device=DEVICE)
    packed = ops.pack([DenseWeight(weight)])
    gated = ops.pack([DenseWeight(weight[: n // 2]), DenseWeight(weight[n // 2 :])], gated=True)
    exact = weight.to(torch.bfloat16).float()
    rows = REFERENCE.rms_norm(x.float(), norm).to(torch.bfloat16).float() @ exact.t()
    poison()
    whole = ops.linear(x, packed, norm, "residual", residual, bias, torch.float32)
    assert relative_error(whole, rows + bias + residual.float()) < BOUND
    gate, up = rows.chunk(2, dim=1)
    found = ops.linear(x, gated, norm, "silu_mul")
    assert relative_error(found, torch.nn.functional.silu(gate) * up) < 4e-3
    for count in range(1, 17):
        poison()
        part = ops.linear(x[16 - count :], packed, norm, "residual", residual[16 - count :], bias, torch.float32)
        assert torch.equal(part, whole[16 - count :]), f"{count} rows"


def test_nvfp4_through_the_back_end() -> None:
    torch.manual_seed(3)
    ops = _ops()
    weights = [quantise_nvfp4(torch.randn(64, 512, device=DEVICE), "max") for _ in range(2)]
    gated = ops.pack(weights, gated=True)
    stacked = ops.pack(weights)
    x, residual = _randn(16, 512), _randn(16, 128)
    rows = x.float() @ torch.cat([weight.dequantise() for weight in weights]).t()
    gate, up = rows.chunk(2, dim=1)
    assert relative_error(ops.linear(x, gated, None, "silu_mul"), torch.nn.functional.silu(gate) * up) < BOUND
    assert relative_error(ops.linear(x, stacked, None, "residual", residual), rows + residual.float()) < BOUND
    many = x.repeat(16, 1)
    assert relative_error(ops.linear(many, gated, None, "silu_mul")[:16], torch.nn.functional.silu(gate) * up) < 1e-2
    assert relative_error(ops.linear(many, stacked)[:16], rows) < BOUND
    assert relative_error(ops.linear(many, stacked, out_dtype=torch.float32)[:16], rows) < BOUND
    assert (
        relative_error(ops.linear(many, stacked, None, "residual", residual.repeat(16, 1))[:16], rows + residual)
        < BOUND
    )
