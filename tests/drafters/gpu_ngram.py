"""The device's table of n-grams on a card: a captured proposal follows what a side stream wrote, and costs little."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch

from localspec.core.records import MAX_SLOTS, Draft
from localspec.drafters import Depths, NgramTableHandle
from localspec.drafters._ngram_device import DeviceNgramDrafter
from localspec.drafters._ngram_policy import NgramPolicy
from localspec.engine.drafting import NO_CACHE
from localspec.kernels import ngram_probe
from localspec.kernels.backends.triton_sm80 import TritonOps
from localspec.runner.slots import make_state
from localspec.storage.aio import AsyncReader
from tests.drafters.test_ngram_disk import make_table, text_of
from tests.kernels.ngram_probe_cases import make_case

pytestmark = pytest.mark.gpu


def test_one_launch_says_what_pytorch_says() -> None:
    device = torch.device("cuda")
    for seed in range(30):
        case, own = make_case(seed, device), make_case(seed, torch.device("cpu"))
        found = TritonOps(device).table_drafts(case.probe, case.history, case.lengths, case.depths, 14)
        wanted = ngram_probe.table_drafts(own.probe, own.history, own.lengths, own.depths, 14)
        for name in ("token_ids", "tables", "num_drafts"):
            assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), (seed, name)
        # A card divides in its own way.
        torch.testing.assert_close(found.confidence.cpu(), wanted.confidence, rtol=1e-6, atol=0)


def test_a_captured_proposal_reads_what_was_fed_meanwhile(tmp_path: Path) -> None:
    device = torch.device("cuda")
    text = text_of(1, 1500)
    with AsyncReader(threads=2) as reader:
        table = make_table(tmp_path / "t", [text, *(text_of(seed, 400) for seed in range(50, 90))], reader)
        drafter = DeviceNgramDrafter((NgramTableHandle("t", table),), NgramPolicy(), TritonOps(device), 5000)
        state = make_state(2048, 8, device)
        state.history[0, : len(text)] = torch.tensor(text, device=device)
        state.lengths[0] = 40
        depths = Depths(torch.tensor([14, 0, 0, 0], device=device), 14, (0,), (2048,))

        def propose() -> Draft:
            return drafter.propose(depths, state, NO_CACHE)

        propose()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            draft = propose()
        followed, spoken, times_us = 40, 0, []
        for length in range(41, 400):
            drafter.follow(0, text[length - 16 : length], text[followed:length], False)
            followed = length
            time.sleep(0.004)
            # The step that was under way while this landed emitted one more token.
            state.lengths[0] = length + 1
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times_us.append(start.elapsed_time(end) * 1e3)
            count = int(draft.num_drafts[0])
            assert draft.token_ids[0, :count].tolist() == text[length + 1 : length + 1 + count]
            assert draft.num_drafts[1:].tolist() == [0] * (MAX_SLOTS - 1)
            spoken += count == 14
        drafter.close()
    print(f"proposal as a graph: {statistics.median(times_us):.0f} us; spoke in {spoken} of {len(times_us)} steps")
    assert spoken > 0.9 * len(times_us)
