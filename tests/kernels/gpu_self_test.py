"""The self-test on a card: the back end that users get passes it, and a second run is quick."""

from __future__ import annotations

import pytest
import torch

from localspec.kernels import self_test
from localspec.kernels.table import choose

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


def test_the_back_end_of_this_card_passes() -> None:
    ops, _ = choose("cuda")
    report = self_test.run(ops, torch.device("cuda"), seconds_budget=240.0)
    print("\n".join(report.lines()))
    assert report.passed and not report.skipped, report.lines()
    again = self_test.run(ops, torch.device("cuda"))
    assert again.passed and again.seconds < 15
    assert [each.error for each in again.results] == [each.error for each in report.results]
