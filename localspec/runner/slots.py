"""Per-slot device state: made once, filled at admission, read by every stage.

Only this module and `sampling.accept` change it. Single elements are filled: `tensor[slot] = number` copies the number
from the host, and waits until the device has done everything before it (30 ms at the end of a prompt's chunk, H200).
"""

from __future__ import annotations

from functools import partial

import torch

from localspec.core.records import MAX_ROWS, MAX_SLOTS, PAGE_TOKENS, Request
from localspec.core.state import SamplingTable, SequenceState

MAX_STOP_IDS = 16


def make_state(context_limit_tokens: int, vocab_size: int, device: torch.device) -> SequenceState:
    """Empty state for MAX_SLOTS sequences of up to `context_limit_tokens` tokens."""
    columns = context_limit_tokens + MAX_ROWS + 1
    long = partial(torch.zeros, dtype=torch.int64, device=device)
    real = partial(torch.zeros, dtype=torch.float32, device=device)
    count = partial(torch.zeros, dtype=torch.int32, device=device)
    slots = MAX_SLOTS
    sampling = SamplingTable(
        temperature=real(slots),
        top_k=long(slots),
        top_p=real(slots) + 1.0,
        min_p=real(slots),
        presence_penalty=real(slots),
        frequency_penalty=real(slots),
        repetition_penalty=real(slots) + 1.0,
        seeds=long(slots),
        bias=real(slots, vocab_size),
        prompt_counts=count(slots, vocab_size),
        output_counts=count(slots, vocab_size),
    )
    return SequenceState(
        history=long(slots, columns),
        lengths=long(slots),
        prompt_lengths=long(slots),
        remaining=long(slots),
        frozen=torch.ones(slots, dtype=torch.bool, device=device),
        stop_ids=long(slots, MAX_STOP_IDS) - 1,
        pending_rows=long(slots),
        block_tables=count(slots, -(-columns // PAGE_TOKENS)),
        corpus=long(slots, columns),
        corpus_lengths=long(slots),
        sampling=sampling,
    )


def fill_slot(state: SequenceState, slot: int, request: Request) -> None:
    """Put a request into a slot. Its length is the whole prompt; nothing of it is in the cache yet."""
    device = state.history.device
    prompt = torch.tensor(request.prompt_ids, dtype=torch.int64, device=device)
    state.history[slot].zero_()
    state.history[slot, : len(request.prompt_ids)] = prompt
    state.lengths[slot].fill_(len(request.prompt_ids))
    state.prompt_lengths[slot].fill_(len(request.prompt_ids))
    state.remaining[slot].fill_(request.max_tokens)
    state.frozen[slot].fill_(False)
    state.pending_rows[slot].fill_(0)
    state.stop_ids[slot].fill_(-1)
    for index, stop_id in enumerate(request.stop_ids[:MAX_STOP_IDS]):
        state.stop_ids[slot, index].fill_(stop_id)
    corpus = request.prediction_ids[: state.corpus.shape[1]]
    state.corpus_lengths[slot].fill_(len(corpus))
    if corpus:
        state.corpus[slot, : len(corpus)] = torch.tensor(corpus, dtype=torch.int64, device=device)
    _fill_sampling(state.sampling, slot, request, prompt)


def release_slot(state: SequenceState, slot: int) -> None:
    """Freeze a slot that no sequence holds any more."""
    state.frozen[slot].fill_(True)
    state.pending_rows[slot].fill_(0)
    state.lengths[slot].fill_(0)
    state.corpus_lengths[slot].fill_(0)


def _fill_sampling(table: SamplingTable, slot: int, request: Request, prompt: torch.Tensor) -> None:
    sampling = request.sampling
    table.temperature[slot].fill_(sampling.temperature)
    table.top_k[slot].fill_(sampling.top_k)
    table.top_p[slot].fill_(sampling.top_p)
    table.min_p[slot].fill_(sampling.min_p)
    table.presence_penalty[slot].fill_(sampling.presence_penalty)
    table.frequency_penalty[slot].fill_(sampling.frequency_penalty)
    table.repetition_penalty[slot].fill_(sampling.repetition_penalty)
    table.seeds[slot].fill_(request.seed)
    table.bias[slot].zero_()
    for token_id, value in sampling.logit_bias:
        table.bias[slot, token_id].fill_(value)
    vocab_size = table.bias.shape[1]
    table.prompt_counts[slot] = torch.bincount(prompt, minlength=vocab_size)[:vocab_size].to(torch.int32)
    table.output_counts[slot].zero_()
