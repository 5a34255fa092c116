"""The look-up of a device's n-gram table in the interpreter: what PyTorch says, number for number."""

from __future__ import annotations

import tests.helpers.interpreter  # noqa: F401  must come before the kernels

import torch  # isort: skip

from localspec.kernels import ngram_probe  # isort: skip
from localspec.kernels.triton import ngram_probe as triton_probe  # isort: skip
from tests.kernels.ngram_probe_cases import SLOTS, make_case  # isort: skip

torch.set_num_threads(1)


def test_drafts_are_those_of_pytorch() -> None:
    """Two orders, three tables, some silent; equal scores, short texts, torn records, depths of nought."""
    spoken = levels = 0
    for seed in range(12):
        case = make_case(seed, torch.device("cpu"))
        width = 14 if seed % 3 else 3 + seed
        arguments = (case.probe, case.history, case.lengths, case.depths, width)
        found, wanted = triton_probe.table_drafts(*arguments), ngram_probe.table_drafts(*arguments)
        for name in ("token_ids", "tables", "confidence", "num_drafts"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), (seed, name)
        spoken += int((wanted.num_drafts > 0).sum())
        levels |= int((wanted.num_drafts == 1).any()) | int((wanted.num_drafts > 4).any()) << 1
    assert spoken > 4 * SLOTS and levels == 3
