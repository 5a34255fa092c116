"""A model folder on a card, loaded for the first and for the second time: the same weights, read as they are kept."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine import packed_weights
from localspec.engine.build import load_model
from localspec.engine.packed_weights import PackedCheckpoint
from localspec.hub.layout import PACKED_NAME
from tests.engine.test_packed_weights import _folder
from tests.layers.test_placement import _tensors

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


def _loaded(folder: Path) -> tuple[list[torch.Tensor], str]:
    """Every tensor of the model and its own drafting block, and what the checkpoint was."""
    model, ops, checkpoint = load_model(folder, "cuda")
    with closing(checkpoint), torch.inference_mode():
        setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=64)
        drafter: Any = drafter_module("mtp").build(dataclasses.replace(setup, checkpoint=checkpoint, folder=folder))
    assert ops.store is None if isinstance(checkpoint, PackedCheckpoint) else True  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    # Scratch of the back end is no weight.
    return list(_tensors([model, drafter._network], {id(ops)})), type(checkpoint).__name__


@pytest.mark.parametrize("quantised", [False, True])
def test_both_starts_have_the_weights_of_the_source(
    tmp_path: Path, quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder("qwen3_5", tmp_path, quantised)
    monkeypatch.setattr("localspec.engine.build.check_kernels", lambda *_: None)
    with monkeypatch.context() as patched:
        patched.setattr(packed_weights, "can_pack", lambda: False)
        plain, kind = _loaded(folder)
        assert kind == "FolderCheckpoint" and not (folder / PACKED_NAME).exists()
    first, kind = _loaded(folder)
    assert kind == "PackedCheckpoint" and (folder / PACKED_NAME).exists()
    written = (folder / PACKED_NAME).stat().st_mtime_ns
    second, _ = _loaded(folder)
    assert (folder / PACKED_NAME).stat().st_mtime_ns == written
    for one, two, three in zip(plain, first, second, strict=True):
        assert one.device == two.device == three.device and one.is_pinned() == two.is_pinned()
        for other in (two, three):
            assert other.dtype == one.dtype and other.shape == one.shape
            assert torch.equal(other.view(-1).view(torch.uint8), one.contiguous().view(-1).view(torch.uint8))
