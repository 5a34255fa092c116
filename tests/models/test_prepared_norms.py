"""What a matmul leaves for the norm behind it lasts until another pass runs, and must not reach a prompt's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localspec.core.records import HiddenNeeds
from localspec.kernels.backends.reference import ReferenceOps
from localspec.models import Model, architectures
from tests.helpers.models import Driver, load_model, make_rows, random_checkpoint

pytestmark = pytest.mark.torch


class LeavingOps(ReferenceOps):
    """A back end whose prepared norms round otherwise, as a card's do, and which remembers the last one only."""

    left: tuple[Tensor, Any] | None = None
    num_used = 0

    def linear(self, x: Tensor, *arguments: Any, then: Any = None, **options: Any) -> Tensor:
        norm = options.get("norm", arguments[1] if len(arguments) > 1 else None)
        used = norm is not None and self.left is not None and self.left[0] is x and self.left[1] is norm
        out = super().linear(x, *arguments, **options)
        if used:
            self.num_used += 1
            out = out * 1.01
        if then is not None:
            self.left = out, then
        return out


@pytest.fixture(scope="module", params=architectures())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return load_model(random_checkpoint(request.param, 11, folder), LeavingOps(torch.device("cpu")))


def test_a_short_chunk_cut_between_layers_keeps_its_bits(model: Model) -> None:
    """Windows of another slot run between its layers, as beside a stream; a prompt's last chunk may be as small."""
    own, other = list(range(1, 12)), list(range(20, 60))
    whole = Driver(model).prefill(0, own)
    driver = Driver(model, needs=HiddenNeeds())
    driver.prefill(1, other[:30])
    rows = make_rows("prefill", {0: (0, own)}, driver.block_tables, driver.pending.clone())
    under_way = model.begin(rows, driver.cache, driver.needs)
    at = 30
    while (forward := model.advance(under_way, 1)) is None:
        driver.verify({1: [other[at]]})
        at += 1
    assert torch.equal(model.logits(forward.hidden[: len(own)]), whole)


def test_windows_use_what_was_left_for_them(model: Model) -> None:
    ops = model.ops  # type: ignore[attr-defined]
    assert isinstance(ops, LeavingOps)
    driver = Driver(model)
    driver.prefill(0, [1, 2, 3])
    before = ops.num_used
    driver.verify({0: [4]})
    assert ops.num_used > before
