"""The kernels' test at the first start: remembered for this card and build only, and an error where they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.api.types import EngineError
from localspec.engine import kernel_check
from localspec.engine.kernel_check import FILE_NAME, build_key, check_kernels
from localspec.kernels.self_test import GroupResult, SelfTestReport
from tests.helpers.models import reference_ops

pytestmark = pytest.mark.torch
GOOD = GroupResult("nvfp4 linear", 1e-3, 6e-3, 0.5)
WRONG = GroupResult("gdn window", float("nan"), 6e-3, 0.5, "the results are too far from the reference's")


class Card:
    """Stands in for a card's self-test, and counts how often it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *results: GroupResult, skipped: tuple[str, ...] = ()) -> None:
        self.runs = 0
        self.name = "Card A"
        self.ops: Any = reference_ops()
        self.ops.device = torch.device("cuda")
        self._report = SelfTestReport(results, skipped, 1.0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: self.name)
        monkeypatch.setattr(kernel_check.self_test, "run", self._run)

    def _run(self, *_: Any) -> SelfTestReport:
        self.runs += 1
        return self._report


def test_a_card_is_tested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, said = Card(monkeypatch, GOOD), []
    assert check_kernels(card.ops, tmp_path / "new", said.append) is not None
    assert said == ["testing the kernels on this card, once"]
    assert check_kernels(card.ops, tmp_path / "new", said.append) is None and card.runs == 1
    card.name = "Card B"
    assert check_kernels(card.ops, tmp_path / "new", said.append) is not None and card.runs == 2
    monkeypatch.setattr(kernel_check, "_sources", lambda: "other files")
    assert check_kernels(card.ops, tmp_path / "new", said.append) is not None and card.runs == 3
    stored = json.loads((tmp_path / "new" / FILE_NAME).read_text())
    # With an option and without it: the one before stays.
    assert list(stored)[1:] == [build_key(card.ops)] and stored[build_key(card.ops)]["results"][0]["error"] == 1e-3


def test_nothing_is_remembered_of_a_test_that_did_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, GOOD, skipped=("gdn window",))
    for _ in range(2):
        assert check_kernels(card.ops, tmp_path, lambda text: None) is not None
    assert card.runs == 2 and not (tmp_path / FILE_NAME).exists()
    assert check_kernels(card.ops, None, lambda text: None) is not None


def test_wrong_kernels_end_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, GOOD, WRONG)
    with pytest.raises(EngineError, match=r"must \(gdn window: the results are too far.*--device cpu") as caught:
        check_kernels(card.ops, tmp_path, lambda text: None)
    assert caught.value.code == "machine_cannot" and not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', "[" * 5000])
def test_a_damaged_memory_costs_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    card = Card(monkeypatch, GOOD)
    assert check_kernels(card.ops, tmp_path, lambda text: None) is not None and card.runs == 1
    assert check_kernels(card.ops, tmp_path, lambda text: None) is None


def test_a_cpu_is_not_tested() -> None:
    assert check_kernels(reference_ops(), None, lambda text: None) is None
