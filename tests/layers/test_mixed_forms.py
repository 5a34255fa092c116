"""Projections stored in different forms: kept apart for the back end, the same values for the layer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from localspec.kernels.backends.reference import ReferenceOps
from localspec.kernels.ops import Norm
from localspec.kernels.weights import DenseWeight, LogicalWeight
from localspec.layers.linear import load_projections, load_vector
from localspec.layers.mlp import GatedMlp
from tests.helpers.models import reference_ops

pytestmark = pytest.mark.torch


@dataclass(frozen=True)
class HalvedWeight:
    """A form of its own: the stored tensor is twice the weight."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def dequantise(self) -> Tensor:
        return self.tensor / 2


class StubCheckpoint:
    """Weights by name, from a dict."""

    fingerprint = "stub"

    def __init__(self, weights: dict[str, LogicalWeight], vectors: dict[str, Tensor] | None = None) -> None:
        self._weights, self._vectors = weights, vectors or {}

    def names(self) -> tuple[str, ...]:
        return (*self._weights, *self._vectors)

    def has(self, name: str) -> bool:
        return name in self.names()

    def weight(self, name: str) -> LogicalWeight:
        return self._weights[name]

    def vector(self, name: str) -> Tensor:
        return self._vectors[name]

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        del ignore


class CountingOps(ReferenceOps):
    """The reference, counting how many parts each pack got."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.packs: list[int] = []

    def pack(self, parts, gated=False):  # type: ignore[no-untyped-def]
        self.packs.append(len(parts))
        return super().pack(parts, gated)


def test_neighbours_of_one_form_share_a_pass_and_biases_stay_with_their_rows() -> None:
    torch.manual_seed(0)
    matrices = {name: torch.randn(rows, 12) for name, rows in (("q", 8), ("k", 4), ("v", 3))}
    vectors = {f"{name}.bias": torch.randn(len(matrix)) for name, matrix in matrices.items()}
    weights: dict[str, LogicalWeight] = {f"{name}.weight": DenseWeight(matrix) for name, matrix in matrices.items()}
    weights["v.weight"] = HalvedWeight(matrices["v"] * 2)
    ops = CountingOps()
    projections = load_projections(ops, StubCheckpoint(weights, vectors), ("q", "k", "v"), bias=True)
    assert ops.packs == [2, 1] and projections.sizes == (8, 4, 3) and projections.read_bytes == 15 * 12 * 4
    x, norm = torch.randn(5, 12), Norm(torch.rand(12), 1e-6)
    expected = torch.cat(
        [reference_ops().rms_norm(x, norm) @ matrix.T + vectors[f"{name}.bias"] for name, matrix in matrices.items()], 1
    )
    assert torch.allclose(projections(ops, x, norm), expected, atol=1e-5)


def test_an_mlp_whose_gate_and_up_differ_in_form() -> None:
    torch.manual_seed(1)
    gate, up, down = torch.randn(20, 12), torch.randn(20, 12), torch.randn(12, 20)
    forms: dict[str, LogicalWeight] = {"gate_proj.weight": DenseWeight(gate), "down_proj.weight": DenseWeight(down)}
    norm, x = Norm(torch.rand(12), 1e-6), torch.randn(3, 12)
    outputs = []
    for other in (DenseWeight(up), HalvedWeight(up * 2)):
        mlp = GatedMlp((12, 20), norm, reference_ops(), StubCheckpoint({**forms, "up_proj.weight": other}), "")
        outputs.append(mlp.forward(reference_ops(), x))
    assert torch.allclose(*outputs, atol=1e-5) and not torch.allclose(outputs[0], x)


def test_a_wrong_shape_names_the_tensor() -> None:
    checkpoint = StubCheckpoint({"gate_proj.weight": DenseWeight(torch.ones(3, 3))}, {"norm": torch.ones(3)})
    with pytest.raises(ValueError, match=r"gate_proj.weight has shape \(3, 3\), the config asks for \(20, 12\)"):
        GatedMlp((12, 20), Norm(torch.ones(12), 1e-6), reference_ops(), checkpoint, "")
    with pytest.raises(ValueError, match="norm has shape"):
        load_vector(reference_ops(), checkpoint, "norm", (4,))
