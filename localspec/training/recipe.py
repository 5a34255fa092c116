"""From answers to a drafter's folder: sizes, vocabulary, training and files of one kind of drafter for one target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from localspec.drafters._block_shape import BlockConfig
from localspec.formats import Checkpoint
from localspec.formats.checkpoint import read_config
from localspec.layers.config import ConfigReader
from localspec.training.answers import AnswerStore, BatchPlan
from localspec.training.block import BlockChoices, TrainableBlock, block_config
from localspec.training.drafting import DrafterSizes, DraftVocabulary, TrainableDrafter
from localspec.training.eagle3 import TrainableEagle3, Verifier, eagle3_config
from localspec.training.export import Form, export
from localspec.training.hybrid import HybridTarget, load_hybrid
from localspec.training.kept import KeptHiddens, keep_what_fits
from localspec.training.loading import load_backbone, load_drafter
from localspec.training.mtp import TrainableMtp, mtp_config
from localspec.training.target import DENSE_TYPES, DenseTarget, Target
from localspec.training.trainer import Report, Trainer, TrainPlan

KINDS = ("eagle3", "dflash", "dspark", "mtp")


@dataclass(frozen=True)
class Recipe:
    """What makes a drafter, but for the answers. Either `steps` or `seconds` says how long; steps win.

    `stop_ids` are always in the draft's vocabulary; `mask_token_id` is a row of the embedding that texts do not use.
    """

    kind: str
    steps: int = 0
    seconds: float = 0.0
    seed: int = 0
    form: Form = "bf16"
    draft_vocab_size: int = 16384
    num_layers: int = 2
    block_size: int = 8
    markov_rank: int = 32
    tokens_per_batch: int = 16384
    max_tokens: int = 1024
    learning_rate: float = 1e-3
    stop_ids: tuple[int, ...] = ()
    mask_token_id: int = 0
    measure_every: int = 200
    save_every: int = 200
    depth: int = 4
    intermediate_size: int = 0
    """Of the drafter's MLP; 0: the target's."""
    sharpness: float = 1.0
    """See `Teacher.sharpness`."""
    rounding_from: float = 0.75
    """Share of the steps after which a drafter of the form nvfp4 is trained rounded."""
    start_from: str = ""
    """Folder of a drafter of this kind to go on from, or for DSpark of a DFlash whose backbone it takes; empty: from
    the target's head and random layers."""
    sample_from_anchor: bool = True
    """Of DSpark; otherwise its rows guess their own places, as DFlash's do. A taken backbone has that form."""
    target_name: str = ""
    """For the file, which says whose drafter it is."""
    floor_share: float = 0.03
    """Of the learning rate, at the end; 1: it stays, for a training that another one goes on from."""


@dataclass(frozen=True)
class Trained:
    """A finished training. `report`: figures for a log, plain values."""

    drafter: TrainableDrafter
    trainer: Trainer
    report: dict[str, Any]


def open_target(
    config: Mapping[str, Any], checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> DenseTarget | HybridTarget:
    """The trainable side's form of a model. Raises ValueError for architectures without one."""
    model_type = config.get("model_type")
    if model_type in DENSE_TYPES:
        return DenseTarget(config, checkpoint, device, dtype)
    if model_type == "qwen3_5":
        module = load_hybrid(config, checkpoint)
        return HybridTarget(module.to(dtype), device, dtype)
    known = ", ".join((*DENSE_TYPES, "qwen3_5"))
    raise ValueError(f"drafters are trained for models of the types {known}, not {model_type!r}")


def make_drafter(
    recipe: Recipe, target: Target, config: Mapping[str, Any], vocabulary: DraftVocabulary
) -> TrainableDrafter:
    """An untrained drafter. config: of the target. Raises ValueError for a kind that does not fit the target."""
    if recipe.kind == "mtp":
        if config.get("model_type") == "qwen3_5":
            return TrainableMtp(config, target, recipe.seed)
        block = mtp_config(_sizes(recipe, config), vocabulary)
        return TrainableMtp(block, target, recipe.seed, vocabulary)
    sizes = _sizes(recipe, config)
    if recipe.kind == "eagle3":
        count = target.num_layers
        # The usual three of the layout, but the last as late as other engines can still hand it out.
        outputs = tuple(sorted({min(1, count - 1), max(0, count // 2 - 1), max(0, count - 2)}))
        verifier = Verifier(recipe.target_name, tuple(config.get("architectures") or ()))
        return TrainableEagle3(eagle3_config(sizes, outputs, vocabulary, verifier), target, vocabulary, recipe.seed)
    if recipe.kind not in ("dflash", "dspark"):
        raise ValueError(f"there is no kind {recipe.kind!r}; there are {', '.join(KINDS)}")
    spark = recipe.kind == "dspark"
    choices = BlockChoices(
        num_layers=min(recipe.num_layers, target.num_layers),
        # All draft as many tokens: unless the newest token's row guesses too, it is one of the block's.
        block_size=recipe.block_size - int(spark and recipe.sample_from_anchor),
        mask_token_id=recipe.mask_token_id,
        layer_outputs=block_taps(target.num_layers),
        num_target_layers=target.num_layers,
        markov_rank=recipe.markov_rank if spark else 0,
        sample_from_anchor=recipe.sample_from_anchor,
    )
    return TrainableBlock(block_config(sizes, choices, vocabulary), target, vocabulary, recipe.seed)


def block_taps(num_layers: int) -> tuple[int, ...]:
    """Three layer outputs, evenly from the second to the last but one."""
    last = max(0, num_layers - 2)
    first = min(1, last)
    return tuple(sorted({round(first + place * (last - first) / 2) for place in range(3)}))


def _sizes(recipe: Recipe, config: Mapping[str, Any]) -> DrafterSizes:
    sizes = drafter_sizes(config)
    return replace(sizes, intermediate_size=recipe.intermediate_size or sizes.intermediate_size)


def drafter_sizes(config: Mapping[str, Any]) -> DrafterSizes:
    """A layer like the target's own, so that embedding and head are shared."""
    text = config.get("text_config") or config
    reader = ConfigReader(text)
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    rope = reader.section("rope_parameters") or reader.section("rope_scaling") or ConfigReader({})
    return DrafterSizes(
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=reader.integer("head_dim", max(1, hidden // heads)),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", reader.number("rope_theta", 10000.0)),
        max_context_tokens=reader.integer("max_position_embeddings", 1 << 15),
    )


def draft_vocabulary(recipe: Recipe, target: Target, config: Mapping[str, Any], store: AnswerStore) -> DraftVocabulary:
    """The tokens that the drafter of a recipe can say."""
    size, own_block = recipe.draft_vocab_size, recipe.kind == "mtp" and config.get("model_type") == "qwen3_5"
    if own_block or not 0 < size < target.vocab_size:
        return DraftVocabulary(None, target.vocab_size)
    return DraftVocabulary.most_used(store, target.vocab_size, size, recipe.stop_ids)


def train(
    recipe: Recipe,
    target: Target,
    config: Mapping[str, Any],
    store: AnswerStore,
    folder: Path,
    report: Report,
    kept: KeptHiddens | None = None,
) -> Trained:
    """Train in `folder`, going on from its checkpoint, and write the drafter there.

    kept: of the store, for several trainings; a card with room for them keeps them even so.

    Raises ValueError where answers are missing or the kind does not fit, OSError where the folder cannot be written.
    """
    if recipe.start_from:
        drafter = _goes_on(recipe, target)
    else:
        drafter = make_drafter(recipe, target, config, draft_vocabulary(recipe, target, config, store))
    drafter.teacher.sharpness = recipe.sharpness
    plan = TrainPlan(
        steps=recipe.steps,
        batches=BatchPlan(recipe.tokens_per_batch, recipe.max_tokens, recipe.seed),
        learning_rate=recipe.learning_rate,
        floor_share=recipe.floor_share,
        rounding_from=recipe.rounding_from if recipe.form == "nvfp4" else None,
        measure_every=recipe.measure_every,
        save_every=recipe.save_every,
        depth=recipe.depth,
    )
    kept = kept or keep_what_fits(target, store, drafter.layer_outputs, plan.batches)
    trainer = Trainer(drafter, target, store, plan, folder, kept)
    if not recipe.steps:
        # How many fit is told once: a run that is gone on with ends where it was meant to.
        begun = trainer.begun_steps()
        fitting = begun or max(20, int(recipe.seconds / trainer.seconds_a_step()))
        trainer.plan = plan = replace(plan, steps=fitting)
        report(f"going on with {begun} steps" if begun else f"{fitting} steps fit into {recipe.seconds:.0f} s")
    before = trainer.measure(trainer.held_out)
    curve = trainer.run(report)
    export(drafter, folder, recipe.form)
    entries = store.select(held_out=False)
    return Trained(
        drafter,
        trainer,
        {
            "recipe": {**asdict(recipe), "steps": plan.steps},
            "answers": len(entries),
            "answer_tokens": store.answer_tokens(entries),
            "parameters": sum(each.numel() for each in drafter.module.parameters()),
            "untrained_length": round(before.length, 4),
            "length": curve[-1].length,
            "curve": [asdict(point) for point in curve],
        },
    )


def _goes_on(recipe: Recipe, target: Target) -> TrainableDrafter:
    folder = Path(recipe.start_from)
    if recipe.kind == "dspark" and not BlockConfig(read_config(folder)).get("markov_rank"):
        return load_backbone(folder, target, recipe.markov_rank)
    return load_drafter(recipe.kind, folder, target)[0]
