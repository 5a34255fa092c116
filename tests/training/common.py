"""A tiny random target in its two forms, answers that it wrote, and drafters of each kind for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.models import Model
from localspec.training.answers import AnswerStore
from localspec.training.block import BlockChoices, TrainableBlock, block_config
from localspec.training.drafting import DrafterSizes, DraftVocabulary, TrainableDrafter
from localspec.training.eagle3 import TrainableEagle3, Verifier, eagle3_config
from localspec.training.mtp import TrainableMtp, mtp_config
from localspec.training.target import DenseTarget
from localspec.training.writing import Prompt, WritingLimits, write_answers
from tests.helpers.models import load_model, random_checkpoint

CPU = torch.device("cpu")
KINDS = ("eagle3", "dflash", "dspark", "mtp")
OWN_PLACE = "dspark, own place"
"""DSpark whose rows guess their own places, as DFlash's do."""


@dataclass(frozen=True)
class TinyTarget:
    folder: Path
    model: Model
    dense: DenseTarget


def tiny_target(folder: Path, model_type: str = "llama", seed: int = 0) -> TinyTarget:
    folder = random_checkpoint(model_type, seed, folder)
    dense = DenseTarget(read_config(folder), open_checkpoint(folder), CPU, torch.float32)
    return TinyTarget(folder, load_model(folder), dense)


def prompts(count: int, seed: int = 0, vocab_size: int = 131) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = int(torch.randint(2, 9, (1,), generator=generator))
        ids = torch.randint(2, vocab_size, (length,), generator=generator).tolist()
        found.append(Prompt(tuple(ids), held_out=index % 5 == 0))
    return found


def written(target: TinyTarget, folder: Path, count: int = 60, tokens: int = 24) -> AnswerStore:
    store = AnswerStore(folder)
    limits = WritingLimits(max_answer_tokens=tokens, cache_tokens=2048)
    write_answers(target.dense, prompts(count), (1,), limits, store.append)
    return store


def drafter(kind: str, target: TinyTarget, ids: Sequence[int] | None = None, seed: int = 3) -> TrainableDrafter:
    model = target.dense
    vocabulary = DraftVocabulary(None if ids is None else torch.tensor(ids), model.vocab_size)
    sizes = DrafterSizes(model.hidden_size, 48, 4, 2, 16, 1e-5, 10000.0, 4096)
    if kind == "mtp":
        return TrainableMtp(mtp_config(sizes, vocabulary), model, seed, vocabulary)
    taps = (0, model.num_layers - 1)
    if kind == "eagle3":
        return TrainableEagle3(eagle3_config(sizes, taps, vocabulary, Verifier("tiny")), model, vocabulary, seed)
    rank = 0 if kind == "dflash" else 16
    choices = BlockChoices(2, 5, model.vocab_size - 1, taps, model.num_layers, rank, kind != OWN_PLACE)
    return TrainableBlock(block_config(sizes, choices, vocabulary), model, vocabulary, seed)
