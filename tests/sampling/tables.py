"""Small device states and steps for the tests of sampling: a random logit function stands for the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from localspec.api.types import Sampling
from localspec.core.records import Draft, Rows, StepResult
from localspec.core.state import SamplingTable, SequenceState
from localspec.sampling import noise
from localspec.sampling.accept import accept
from localspec.sampling.processors import ProcessorPlan

LogitFunction = Callable[[Sequence[int]], Tensor]
"""History up to and with a token -> logits [V] float32 of the next."""


def sampling_table(samplings: Sequence[Sampling], vocab_size: int) -> SamplingTable:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    bias = torch.zeros(len(samplings), vocab_size)
    for slot, sampling in enumerate(samplings):
        for token, value in sampling.logit_bias:
            bias[slot, token] = value
    return SamplingTable(
        temperature=column([s.temperature for s in samplings]),
        top_k=torch.tensor([s.top_k for s in samplings]),
        top_p=column([s.top_p for s in samplings]),
        min_p=column([s.min_p for s in samplings]),
        presence_penalty=column([s.presence_penalty for s in samplings]),
        frequency_penalty=column([s.frequency_penalty for s in samplings]),
        repetition_penalty=column([s.repetition_penalty for s in samplings]),
        seeds=torch.tensor([s.seed or 0 for s in samplings]),
        bias=bias,
        prompt_counts=torch.zeros(len(samplings), vocab_size, dtype=torch.int32),
        output_counts=torch.zeros(len(samplings), vocab_size, dtype=torch.int32),
    )


def sequence_state(
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    vocab_size: int,
    *,
    capacity: int = 160,
    max_tokens: int = 100,
    stop_ids: Sequence[int] = (),
) -> SequenceState:
    num_slots = len(prompts)
    table = sampling_table(samplings, vocab_size)
    history = torch.full((num_slots, capacity), 7777, dtype=torch.int64)
    slots = torch.tensor([slot for slot, prompt in enumerate(prompts) for _ in prompt])
    columns = torch.tensor([column for prompt in prompts for column in range(len(prompt))])
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    history[slots, columns] = tokens
    table.prompt_counts.index_put_((slots, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
    stops = torch.full((num_slots, 16), -1, dtype=torch.int64)
    if stop_ids:
        stops[:, : len(stop_ids)] = torch.tensor(stop_ids)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return SequenceState(
        history=history,
        lengths=lengths,
        prompt_lengths=lengths.clone(),
        remaining=torch.full((num_slots,), max_tokens),
        frozen=torch.zeros(num_slots, dtype=torch.bool),
        stop_ids=stops,
        pending_rows=torch.zeros(num_slots, dtype=torch.int64),
        block_tables=torch.zeros(num_slots, 8, dtype=torch.int32),
        corpus=torch.zeros(num_slots, 0, dtype=torch.int64),
        corpus_lengths=torch.zeros(num_slots, dtype=torch.int64),
        sampling=table,
    )


def hashed_logits(vocab_size: int, scale: float = 2.0, context: int = 3, salt: int = 0) -> LogitFunction:
    """Random logits that depend on the last `context` tokens only."""

    def logits(history: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((salt, *history[-context:])) % 2**31)
        return torch.randn(vocab_size, generator=generator) * scale

    return logits


def draft_of(tokens: Sequence[Sequence[int]], num_columns: int) -> Draft:
    """Drafts of each slot, padded with -1 to a common width."""
    padded = [list(row) + [-1] * (num_columns - len(row)) for row in tokens]
    ids = torch.tensor(padded, dtype=torch.int64).reshape(len(tokens), num_columns)
    return Draft(ids, torch.zeros_like(ids), (ids >= 0).sum(dim=1), ("test",))


def verify_rows(state: SequenceState, draft: Draft, window_rows: Sequence[int], num_rows: int) -> Rows:
    """A step with the given rows for each slot (0: not in the step), in slot order, padded to `num_rows`."""
    windows = torch.tensor(window_rows)
    starts = windows.cumsum(0) - windows
    slots = torch.arange(len(windows)).repeat_interleave(windows)
    offsets = torch.arange(len(slots)) - starts[slots]
    last = state.lengths.cpu()[slots] - 1
    own = state.history.cpu()[slots, last]
    drafted = torch.nn.functional.pad(draft.token_ids.cpu(), (1, 0))[slots, offsets].clamp(min=0)

    def padded(values: Tensor, value: int = 0) -> Tensor:
        return torch.nn.functional.pad(values, (0, num_rows - len(slots)), value=value)

    return Rows(
        kind="verify",
        token_ids=padded(torch.where(offsets == 0, own, drafted)),
        positions=padded(last + offsets),
        slots=padded(slots, -1),
        block_tables=state.block_tables,
        lengths=state.lengths,
        window_starts=starts,
        window_rows=windows,
        pending_rows=state.pending_rows,
        max_position_bound=state.history.shape[1],
        slot_rows_bound=num_rows,
    )


def draw_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the noise of thousands of short rows at once instead of row by row; test_noise.py shows the same bits."""
    monkeypatch.setattr("localspec.sampling.processors.gumbel", noise_of_all_rows)


def noise_of_all_rows(keys: Tensor, ids: Tensor) -> Tensor:
    return noise._gumbel64(keys, ids)


def row_logits(logit_function: LogitFunction, rows: Rows, state: SequenceState, vocab_size: int) -> Tensor:
    """What a model would say at each row, seeing the window's tokens before it; NaN at padding rows."""
    out = torch.full((rows.slots.shape[0], vocab_size), torch.nan)
    for index, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            continue
        start = int(rows.window_starts[slot])
        history = state.history[slot, : int(state.lengths[slot]) - 1].tolist()
        out[index] = logit_function(history + rows.token_ids[start : index + 1].tolist())
    return out


def step(
    logit_function: LogitFunction,
    state: SequenceState,
    drafts: Sequence[Sequence[int]],
    vocab_size: int,
    *,
    window_rows: Sequence[int] | None = None,
    num_rows: int | None = None,
    plan: ProcessorPlan | None = None,
    logprobs: int | None = None,
) -> StepResult:
    """One verify step of every slot with the given drafts."""
    draft = draft_of(drafts, max([len(row) for row in drafts], default=0))
    window_rows = window_rows or [1 + len(row) for row in drafts]
    rows = verify_rows(state, draft, window_rows, num_rows or sum(window_rows))
    logits = row_logits(logit_function, rows, state, vocab_size)
    return accept(logits, rows, draft, state, logprobs=logprobs, plan=plan)


def answer(state: SequenceState, slot: int) -> list[int]:
    """Tokens emitted so far."""
    return state.history[slot, int(state.prompt_lengths[slot]) : int(state.lengths[slot])].tolist()
