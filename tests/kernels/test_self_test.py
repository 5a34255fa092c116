"""The self-test passes the reference, and finds a back end that is a little wrong, slow or broken."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localspec.kernels import self_test
from localspec.kernels.backends.reference import ReferenceOps

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
GROUPS = {
    "nvfp4 linear", "fp8 linear", "bf16 linear", "norms and embedding", "attention bf16", "attention fp8",
    "attention of prompts", "gdn window", "gdn of prompts", "drafting",
}  # fmt: skip


def _wrong(report: self_test.SelfTestReport) -> set[str]:
    return {result.group for result in report.results if result.problem}


def test_a_right_back_end_passes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        report = self_test.run(ReferenceOps(CPU, dtype), CPU)
        assert {result.group for result in report.results} == GROUPS and not report.skipped
        assert report.passed, report.lines()
        assert all(result.error <= result.bound / 2 and result.seconds > 0 for result in report.results)
    assert report.summary.startswith("10 kernel groups agree with their reference") and not report.failures
    assert len(report.lines()) == len(GROUPS) and "nvfp4 linear         passed" in report.lines()[0]


WRONG: dict[str, tuple[Any, set[str]]] = {
    "linear": (lambda out: out * 1.02, {"nvfp4 linear", "fp8 linear", "bf16 linear"}),
    "rms_norm": (lambda out: out + 0.05, {"norms and embedding", "drafting"}),
    "joined_norms": (lambda out: out.index_fill(0, torch.tensor([1]), float("nan")), {"drafting"}),
    "embed": (lambda out: out * float("nan"), {"norms and embedding", "drafting"}),
    "best_tokens": (lambda out: (out[0].flip(0), out[1]), {"drafting"}),
    "keep_newest": (lambda out: replace(out, slots=out.slots + 1), {"drafting"}),
    "take_rows": (lambda out: replace(out, key_begin=out.key_begin * 0), {"drafting"}),
    "attention": (
        lambda out: out.index_fill(0, torch.tensor([0]), float("nan")),
        {"attention bf16", "attention fp8", "attention of prompts"},
    ),
    "gdn": (torch.zeros_like, {"gdn window", "gdn of prompts"}),
}


@pytest.mark.parametrize("operation", WRONG)
def test_wrong_results_are_found(operation: str) -> None:
    change, groups = WRONG[operation]

    class Wrong(ReferenceOps):
        pass

    right = getattr(ReferenceOps, operation)
    setattr(Wrong, operation, lambda self, *arguments, **more: change(right(self, *arguments, **more)))
    report = self_test.run(Wrong(CPU), CPU)
    assert not report.passed and _wrong(report) == groups
    assert any("WRONG" in line for line in report.lines())


def test_a_wrong_state_is_found() -> None:
    class Forgetful(ReferenceOps):
        def gdn_fold(self, state: Any, pending_rows: Tensor) -> None:
            """Folds nothing."""

    assert _wrong(self_test.run(Forgetful(CPU), CPU)) == {"gdn window"}


def test_a_row_that_depends_on_others_is_found() -> None:
    class Batched(ReferenceOps):
        def attention(self, q: Tensor, *arguments: Any, **more: Any) -> Tensor:
            out = super().attention(q, *arguments, **more)
            return out * 1.01 if len(q) == 1 else out

    report = self_test.run(Batched(CPU), CPU)
    assert _wrong(report) == {"attention bf16", "attention fp8"}
    assert "other bits alone" in next(each.problem for each in report.results if each.problem)


def test_what_raises_is_said_and_the_rest_goes_on() -> None:
    class Broken(ReferenceOps):
        def norm_rope(self, *arguments: Any) -> Tensor:
            raise RuntimeError("no kernel image is available\nfor this device")

    report = self_test.run(Broken(CPU), CPU)
    assert _wrong(report) == {"norms and embedding"} and len(report.results) == len(GROUPS)
    [result] = [each for each in report.results if each.problem]
    assert result.problem == "RuntimeError: no kernel image is available"
    assert report.summary == "1 of 10 kernel groups are wrong"
    assert report.failures == ("norms and embedding: RuntimeError: no kernel image is available",)


def test_the_budget_is_kept() -> None:
    class Slow(ReferenceOps):
        def pack(self, *arguments: Any, **more: Any) -> Any:
            time.sleep(0.05)
            return super().pack(*arguments, **more)

    report = self_test.run(Slow(CPU), CPU, seconds_budget=0.01)
    assert len(report.results) == 1 and len(report.skipped) == len(GROUPS) - 1 and report.passed
    assert report.summary.endswith("bf16 linear, attention bf16")
    assert report.lines()[-1].endswith("no time was left")


def test_the_cache_in_use_goes_first_and_with_every_head_size() -> None:
    class Noting(ReferenceOps):
        def attention(self, q: Tensor, k_pages: Tensor, *arguments: Any, **more: Any) -> Tensor:
            if len(q) == 1:
                seen.append((k_pages.dtype, q.shape[2]))
            return super().attention(q, k_pages, *arguments, **more)

    for dtype, other in ((torch.bfloat16, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.bfloat16)):
        seen: list[tuple[torch.dtype, int]] = []
        ops = Noting(CPU, torch.bfloat16)
        ops.cache_dtype = dtype
        self_test.run(ops, CPU)
        assert list(dict.fromkeys(seen)) == [(dtype, 256), (dtype, 128), (dtype, 64), (other, 128)]
