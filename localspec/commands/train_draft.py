"""`localspec train-draft`: trains a drafter for an installed model on answers that the model writes itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.api.types import EngineError
from localspec.commands.common import (
    EXIT_WRONG_USE,
    default_model,
    fail,
    fail_engine,
    make_locator,
    print_json,
    settings,
)
from localspec.commands.options import check_number, device_option, json_option, offline_option

if TYPE_CHECKING:
    import torch

    from localspec.engine.build import ModelPlace
    from localspec.engine.text import TextStage
    from localspec.training.answers import Answer, AnswerStore
    from localspec.training.recipe import Recipe
    from localspec.training.writing import Prompt

METHODS = ("eagle3", "dflash", "dspark", "mtp")
REPORT_FILE = "training.json"
LOCK_FILE, TARGET_FILE = "training.lock", "answers/target.json"
MAX_SEED = (1 << 31) - 1
MAX_PROMPT_TOKENS = 960
"""Longer prompts are left out: what is trained on is a text's first thousand tokens."""


@click.command("train-draft")
@click.argument("model", required=False)
@click.option("--method", type=click.Choice(METHODS), default="eagle3", show_default=True)
@click.option(
    "--prompts", "prompt_files", multiple=True, required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines (prompt, question, turns or messages) or one prompt a line. May be given again.",
)  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the drafter.")
@click.option("--answer-tokens", default=256, show_default=True, type=click.IntRange(4, 8192))
@click.option("--steps", default=0, type=click.IntRange(0), help="Steps of training, instead of minutes.")
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(0.1), callback=check_number)
@click.option("--form", type=click.Choice(["bf16", "nvfp4"]), default="bf16", show_default=True)
@click.option("--draft-vocabulary", default=16384, show_default=True, type=click.IntRange(0), help="0: all tokens.")
@click.option("--tokens-per-batch", type=click.IntRange(64), help="Bounds the memory. [default: 8192, on a CPU 2048]")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, MAX_SEED))
@device_option
@offline_option
@json_option
def train_draft(model: str | None, **options: Any) -> None:
    """Train a drafter for MODEL. A run that was ended goes on where it stopped when called again.

    The model answers the prompts; every twentieth is kept back to measure acceptance with. The folder holds the drafter
    in the standard layout of its method (config.json, model.safetensors); for `mtp` the block alone, as pull keeps it.
    """
    config = settings()
    try:
        locate = make_locator(config, options["offline"] or config.network.offline, options["device"])
        place = locate(model or default_model(config), _say)
        report = _train_alone(place, options)
    except EngineError as error:
        fail_engine(error)
    except (ValueError, OSError) as error:
        fail(str(error))
    if options["as_json"]:
        print_json(report)
    else:
        length, before = report["length"], report["untrained_length"]
        click.echo(
            f"{options['out']}: acceptance length {length:.2f} on held-out prompts, {before:.2f} before training"
        )


def _train_alone(place: ModelPlace, options: dict[str, Any]) -> dict[str, Any]:
    """Two runs in one folder would write into each other's answers. Raises ValueError where another one is at it."""
    import torch

    from localspec.storage.files import exclusive_lock

    out: Path = options["out"]
    _refuse_foreign(out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive_lock(out / LOCK_FILE, wait=False):
            return _train(place, options)
    except BlockingIOError:
        raise ValueError(f"{out}: another run trains in this folder; wait for it or take another one") from None
    except torch.OutOfMemoryError:
        raise ValueError(
            f"{options['device']} has too little memory to train for {place.id}, whose weights are unpacked for it; "
            "take fewer --tokens-per-batch, or --device cpu"
        ) from None


def _refuse_foreign(out: Path) -> None:
    """A drafter has the same file names as any model, which it would replace. Raises ValueError for such a folder."""
    if not (out / LOCK_FILE).exists() and ((out / "config.json").exists() or any(out.glob("*.safetensors"))):
        raise ValueError(f"{out} holds a model that was not trained here and would be overwritten; take another folder")


def _train(place: ModelPlace, options: dict[str, Any]) -> dict[str, Any]:
    import json

    import torch

    from localspec.engine.build import read_config, resolve_device
    from localspec.engine.text import TextStage
    from localspec.formats.checkpoint import open_checkpoint
    from localspec.training.recipe import open_target, train

    device = torch.device(resolve_device(options["device"]))
    config = read_config(place.folder)
    text = TextStage(place.folder, 1 << 20)
    out: Path = options["out"]
    store = _answers(place, text, options, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = open_target(config, open_checkpoint(place.folder), device, dtype)
    recipe = _recipe(place.id, text, options, device.type == "cuda")
    trained = train(recipe, target, config, store, out, _say)
    (out / REPORT_FILE).write_text(json.dumps(trained.report, indent=1) + "\n", encoding="utf-8")
    return trained.report


def _recipe(model_id: str, text: TextStage, options: dict[str, Any], on_card: bool) -> Recipe:
    from localspec.training.recipe import Recipe

    return Recipe(
        kind=options["method"],
        target_name=model_id,
        steps=options["steps"],
        seconds=60 * options["minutes"],
        seed=options["seed"],
        form=options["form"],
        draft_vocab_size=options["draft_vocabulary"],
        tokens_per_batch=options["tokens_per_batch"] or (8192 if on_card else 2048),
        stop_ids=tuple(text.stop_ids),
        mask_token_id=_mask_token_id(text),
    )


def _mask_token_id(text: TextStage) -> int:
    """A control token that texts do not use: the last special one that neither begins nor ends anything."""
    special = text.tokenizer.special_tokens().values()
    names = [each["content"] for each in text.tokenizer.config.get("added_tokens_decoder", {}).values()]
    for name in reversed([each for each in names if each not in special]):
        token_id = text.tokenizer.token_id(name)
        if token_id is not None and token_id not in text.stop_ids:
            return token_id
    return 0


def _answers(place: ModelPlace, text: TextStage, options: dict[str, Any], device: torch.device) -> AnswerStore:
    """The store in the folder, with an answer to every prompt that has none yet."""
    from localspec.training.answers import AnswerStore

    store = AnswerStore(options["out"] / "answers")
    _check_target(place, options["out"] / TARGET_FILE, empty=not len(store))
    prompts = _prompts(text, options["prompt_files"])
    answered = {tuple(store.tokens(entry)[: int(store.index[entry, 2])].tolist()) for entry in range(len(store))}
    left = [prompt for prompt in prompts if prompt.token_ids not in answered]
    if left:
        _say(f"{len(left)} prompts to answer")
        _write(place, text, left, store, options, device)
    return store


def _check_target(place: ModelPlace, path: Path, empty: bool) -> None:
    """Answers are worth something for the model that wrote them. Raises ValueError if that was another one."""
    import json

    from localspec.formats.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(place.folder)
    checkpoint.close()
    ours = {"model": place.id, "fingerprint": checkpoint.fingerprint}
    if empty:
        path.write_text(json.dumps(ours) + "\n", encoding="utf-8")
    elif path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("fingerprint") != ours["fingerprint"]:
            raise ValueError(f"{path.parent} holds answers of another model than {place.id}; take another folder")


def _prompts(text: TextStage, files: tuple[Path, ...]) -> list[Prompt]:
    from localspec.api.types import GenerateRequest, Message
    from localspec.training.prompts import is_held_out, read_prompts
    from localspec.training.writing import Prompt

    found: list[Prompt] = []
    too_long = 0
    for prompt in read_prompts(files):
        request = (
            GenerateRequest(messages=(Message("user", prompt),)) if text.template else GenerateRequest(prompt=prompt)
        )
        ids = text.prepare(request).request.prompt_ids
        if len(ids) > MAX_PROMPT_TOKENS:
            too_long += 1
            continue
        found.append(Prompt(ids, is_held_out(prompt)))
    if too_long:
        _say(f"{too_long} prompts of more than {MAX_PROMPT_TOKENS} tokens are left out")
    if not any(prompt.held_out for prompt in found) or all(prompt.held_out for prompt in found):
        fail(f"{len(found)} prompts are too few to train on some and measure with others", EXIT_WRONG_USE)
    return found


def _write(
    place: ModelPlace,
    text: TextStage,
    prompts: list[Prompt],
    store: AnswerStore,
    options: dict[str, Any],
    device: torch.device,
) -> None:
    """Dense models write in large batches; others through the engine."""
    import torch

    from localspec.engine.build import read_config
    from localspec.formats.checkpoint import open_checkpoint
    from localspec.training.target import DENSE_TYPES, DenseTarget
    from localspec.training.writing import WritingLimits, write_answers

    def take(answers: list[Answer]) -> None:
        store.append(answers)
        _say(f"{len(store)} answers")

    config = read_config(place.folder)
    if config["model_type"] not in DENSE_TYPES:
        asyncio.run(_write_by_engine(place, prompts, store, options))
        return
    on_card = device.type == "cuda"
    target = DenseTarget(config, open_checkpoint(place.folder), device, torch.bfloat16 if on_card else torch.float32)
    limits = WritingLimits(
        max_answer_tokens=options["answer_tokens"],
        cache_tokens=1 << 20 if on_card else 1 << 13,
        max_sequences=2048 if on_card else 16,
        seed=options["seed"],
    )
    write_answers(target, prompts, tuple(text.stop_ids), limits, take)


async def _write_by_engine(
    place: ModelPlace, prompts: list[Prompt], store: AnswerStore, options: dict[str, Any]
) -> None:
    from localspec.api.types import Delta, GenerateRequest
    from localspec.engine.build import EngineOptions
    from localspec.engine.engine import LocalEngine
    from localspec.training.answers import Answer

    engine = LocalEngine(lambda name, report: place, EngineOptions(options["device"]))
    engine.start(place.id)
    try:
        await engine.wait_ready()
        for prompt in prompts:
            request = GenerateRequest(
                prompt_token_ids=prompt.token_ids,
                max_tokens=options["answer_tokens"],
                private=True,
                client="train-draft",
            )
            ids = [*prompt.token_ids]
            async for event in engine.generate(request):
                ids += event.token_ids if isinstance(event, Delta) else ()
            store.append([Answer(ids, len(prompt.token_ids), True, prompt.held_out)])
    finally:
        await engine.aclose()


def _say(line: str) -> None:
    click.echo(line, err=True)
