"""Lets a target write many answers at once: a batched loop with keys and values of fixed size.

Prompts are sorted by length and padded in front, so that every sequence of a batch writes to the same column; finished
sequences are dropped now and then. Tokens in, tokens out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.training.answers import Answer
from localspec.training.target import COLUMNS, DenseTarget, KeyValues

CHECK_STEPS = 16
"""Steps between two looks at which sequences are done: each look waits for the device."""
KEPT_SHARE = 0.7
PREFILL_TOKENS = 1 << 16
RARE_SHARE = 0.02
"""Tokens less likely than this share of the likeliest are never drawn: a small model's tail is noise."""


@dataclass(frozen=True)
class Prompt:
    """A question in tokens. kind: a number for reports."""

    token_ids: tuple[int, ...]
    held_out: bool = False
    kind: int = 0
    greedy: bool = True


@dataclass(frozen=True)
class WritingLimits:
    """cache_tokens: columns over all sequences of a batch; temperature: of the prompts that are not greedy."""

    max_answer_tokens: int = 256
    cache_tokens: int = 1 << 20
    max_sequences: int = 2048
    temperature: float = 0.8
    seed: int = 0


def write_answers(
    target: DenseTarget,
    prompts: Sequence[Prompt],
    stop_ids: Sequence[int],
    limits: WritingLimits,
    take: Callable[[list[Answer]], None],
) -> None:
    """Hands over the answers batch by batch, shortest prompts first."""
    generator = torch.Generator(device=target.device).manual_seed(limits.seed)
    stops = torch.tensor(sorted(stop_ids), device=target.device)
    for group in _groups(prompts, limits):
        written = _write_group(target, group, stops, limits, generator)
        take(
            [
                Answer((*prompt.token_ids, *ids), len(prompt.token_ids), prompt.greedy, prompt.held_out, prompt.kind)
                for prompt, ids in zip(group, written, strict=True)
            ]
        )


def _groups(prompts: Sequence[Prompt], limits: WritingLimits) -> Iterator[list[Prompt]]:
    group: list[Prompt] = []
    for prompt in sorted(prompts, key=lambda each: len(each.token_ids)):
        columns = len(prompt.token_ids) + limits.max_answer_tokens
        full = len(group) >= limits.max_sequences or (len(group) + 1) * columns > limits.cache_tokens
        if group and full:
            yield group
            group = []
        group.append(prompt)
    if group:
        yield group


@torch.no_grad()
def _write_group(
    target: DenseTarget, group: Sequence[Prompt], stops: Tensor, limits: WritingLimits, generator: torch.Generator
) -> list[list[int]]:
    """Answer tokens of each prompt, with the token that ended it."""
    width = max(len(prompt.token_ids) for prompt in group)
    tokens = torch.zeros(len(group), width, dtype=torch.int64)
    for row, prompt in enumerate(group):
        tokens[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
    tokens = tokens.to(target.device)
    first = torch.tensor([width - len(prompt.token_ids) for prompt in group], device=target.device)
    greedy = torch.tensor([prompt.greedy for prompt in group], device=target.device)
    # Asked for once and whenever rows go: every such question waits for the device.
    drawn = (~greedy).nonzero()[:, 0]
    length = -(-(width + limits.max_answer_tokens) // COLUMNS) * COLUMNS
    cache = KeyValues(target.sizes, len(group), length, (target.device, target.dtype))
    step_rows = max(1, PREFILL_TOKENS // width)
    parts = [slice(begin, min(begin + step_rows, len(group))) for begin in range(0, len(group), step_rows)]
    read = [target.read_prompts(tokens[part], first[part], cache, part) for part in parts]
    found = _drawn(torch.cat(read), drawn, limits, generator)
    del read
    written = torch.full((len(group), limits.max_answer_tokens), -1, dtype=torch.int64, device=target.device)
    rows = torch.arange(len(group), device=target.device)
    done = torch.zeros(len(group), dtype=torch.bool, device=target.device)
    for step in range(limits.max_answer_tokens):
        written[rows, step] = torch.where(done, -1, found)
        done = done | torch.isin(found, stops)
        if step % CHECK_STEPS == CHECK_STEPS - 1:
            left = int((~done).sum())
            if not left:
                break
            if left < KEPT_SHARE * len(rows):
                kept = (~done).nonzero()[:, 0]
                cache.keep(kept, width + step)
                rows, found, first, greedy, done = (each[kept] for each in (rows, found, first, greedy, done))
                drawn = (~greedy).nonzero()[:, 0]
        if step + 1 < limits.max_answer_tokens:
            found = _drawn(target.decode(found, width + step, first, cache), drawn, limits, generator)
    return [[token for token in row if token >= 0] for row in written.tolist()]


def _drawn(logits: Tensor, drawn: Tensor, limits: WritingLimits, generator: torch.Generator) -> Tensor:
    """logits [B, V] float32 -> [B] int64: the likeliest, or at the rows `drawn` [b] int64 one by chance."""
    best = logits.argmax(dim=1)
    if not len(drawn):
        return best
    weights = (logits[drawn] / limits.temperature).softmax(dim=1)
    weights = torch.where(weights < RARE_SHARE * weights.amax(dim=1, keepdim=True), 0.0, weights)
    noise = torch.empty_like(weights).exponential_(generator=generator)
    return best.index_copy(0, drawn, (weights / noise).argmax(dim=1))
