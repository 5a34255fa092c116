"""Acceptance on a card: no waiting, captured equals eager, a row's token does not depend on the others, plans agree."""

from __future__ import annotations

import dataclasses
import time
from typing import TypeVar

import pytest
import torch

from localspec.api.types import Sampling
from localspec.core.records import Draft, Rows, ThinkingRule
from localspec.core.state import SequenceState
from localspec.sampling.accept import accept
from localspec.sampling.candidates import RowParameters
from localspec.sampling.noise import gumbel, row_keys
from localspec.sampling.processors import ProcessorPlan, law
from localspec.sampling.thinking import ThinkingState
from tests.sampling.tables import draft_of, sampling_table, sequence_state, verify_rows

pytestmark = pytest.mark.gpu
VOCAB = 248_320
CASES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=20, top_p=0.8),
    Sampling(temperature=1.3, top_p=0.93),
    Sampling(temperature=0.9, min_p=0.07),
    Sampling(),
]
Record = TypeVar("Record", Rows, Draft, SequenceState, object)


def on_card(record: Record) -> Record:
    """A copy of a record, and of records in it, with every tensor on the card."""
    changes = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = value.cuda()
        elif dataclasses.is_dataclass(value):
            changes[field.name] = on_card(value)
    return dataclasses.replace(record, **changes)  # type: ignore[type-var]


def logits_of(num_rows: int, vocab: int = VOCAB) -> torch.Tensor:
    torch.manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab, device="cuda") * 2
    logits[:, :300] += torch.randn(num_rows, 300, device="cuda") * 6
    return logits


def test_noise_is_that_of_the_cpu() -> None:
    keys = row_keys(torch.arange(16), torch.arange(16) * 7)
    ids = torch.arange(100_003, dtype=torch.int32)
    ours, theirs = gumbel(keys.cuda(), ids.cuda()).cpu(), gumbel(keys, ids)
    # The losing end is coarser in float32; the winning end is the same but for the last bits.
    won = theirs > 0
    torch.testing.assert_close(ours[won], theirs[won], rtol=2e-6, atol=2e-6)
    few = torch.randint(0, 100_003, (16, 200))
    assert torch.equal(gumbel(keys.cuda(), few.cuda()).cpu(), ours.gather(1, few))


def test_rows_and_plans_agree_bit_for_bit() -> None:
    logits = logits_of(16)
    samplings = [CASES[row % len(CASES)] for row in range(16)]
    parameters = RowParameters.gather(on_card(sampling_table(samplings, 4)), torch.arange(16).cuda())
    keys = row_keys(torch.arange(16), torch.arange(16) * 3).cuda()
    general = law(logits, parameters, ProcessorPlan.general(VOCAB)).draw(keys)
    for row, sampling in enumerate(samplings):
        one = RowParameters(*(getattr(parameters, f.name)[row : row + 1] for f in dataclasses.fields(parameters)))
        for plan in (ProcessorPlan.for_requests([sampling], VOCAB), ProcessorPlan.general(VOCAB)):
            assert law(logits[row : row + 1], one, plan).draw(keys[row : row + 1]).item() == general[row].item()


def step_of(num_drafts: int, samplings: list[Sampling]) -> tuple[SequenceState, Draft, Rows, torch.Tensor]:
    slots = len(samplings)
    samplings = [dataclasses.replace(sampling, seed=slot) for slot, sampling in enumerate(samplings)]
    state = sequence_state([[1, 2, 3]] * slots, samplings, VOCAB, capacity=4000, max_tokens=10**6)
    draft = draft_of([[5] * num_drafts] * slots, num_drafts)
    rows = verify_rows(state, draft, [1 + num_drafts] * slots, slots * (1 + num_drafts))
    return on_card(state), on_card(draft), on_card(rows), logits_of(slots * (1 + num_drafts))


@pytest.mark.parametrize("thinks", [False, True])
def test_captured_acceptance_equals_eager_and_never_waits(thinks: bool) -> None:
    samplings = [CASES[0], CASES[1], CASES[2], Sampling(presence_penalty=0.5, repetition_penalty=1.1)]
    results = []
    for captured in (False, True):
        state, draft, rows, logits = step_of(3, samplings)
        thinking = None
        if thinks:
            thinking = ThinkingState.make(4, 3, torch.device("cuda"))
            thinking.fill(1, ThinkingRule(2, (), (9, 8, 7), True))
        tokens = []

        def run() -> torch.Tensor:
            return accept(logits, rows, draft, state, logprobs=2, thinking=thinking).token_ids  # noqa: B023

        if captured:
            before = [t.clone() for t in (state.history, state.lengths, state.remaining, state.sampling.output_counts)]
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.set_sync_debug_mode("error")
                run()
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run()
            for saved, tensor in zip(
                before, (state.history, state.lengths, state.remaining, state.sampling.output_counts), strict=True
            ):
                tensor.copy_(saved)
            if thinking is not None:
                thinking.fill(1, ThinkingRule(2, (), (9, 8, 7), True))
        for _ in range(3):
            if captured:
                graph.replay()
                tokens.append(out.tolist())
            else:
                tokens.append(run().tolist())
        results.append((tokens, state.lengths.tolist(), state.history[:, :40].tolist()))
    assert results[0] == results[1]


def test_time_of_acceptance() -> None:
    """Prints microseconds of a captured call; 248,320 tokens, four slots with four rows and one slot with one."""
    for slots, num_drafts in ((1, 0), (1, 5), (4, 3)):
        for name, sampling in zip(("temperature", "top-k", "top-p", "min-p", "greedy"), CASES, strict=True):
            state, draft, rows, logits = step_of(num_drafts, [sampling] * slots)
            plan = ProcessorPlan.for_requests([sampling], VOCAB)
            accept(logits, rows, draft, state, logprobs=None, plan=plan)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                accept(logits, rows, draft, state, logprobs=None, plan=plan)
            graph.replay()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()
            print(f"accept {slots}x{num_drafts + 1} {name}: {(time.perf_counter() - started) / 20 * 1e6:.0f} us")
