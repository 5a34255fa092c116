"""`localspec adapt`: fine-tunes an installed drafter on the user's own recent answers, on this machine, if they agreed.

What is read: finished answers of the model in saved chats. Private chats are never saved, so they are never read.
Nothing leaves the machine. The drafter is replaced only if acceptance on kept-back chats rises; `--undo` brings the
one before back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.api.types import EngineError
from localspec.commands.common import (
    EXIT_WRONG_USE,
    default_model,
    drafter_ids,
    fail,
    fail_engine,
    make_locator,
    print_json,
    settings,
)
from localspec.commands.options import check_number, device_option, json_option
from localspec.config import Settings
from localspec.storage.files import AtomicFile, exclusive_lock

if TYPE_CHECKING:
    from localspec.engine.build import ModelPlace
    from localspec.engine.text import TextStage
    from localspec.training.answers import Answer

METHODS = ("eagle3", "dflash", "dspark", "mtp")
CONSENT_FILE, LOCK_FILE = "adapt.json", "adapt.lock"
PREVIOUS = "previous"
HELD_OUT_ONE_IN = 5
LEAST_ANSWERS = 8
DAY_S = 86_400.0
QUESTION = "Fine-tune drafters on the answers in your saved chats? Everything stays on this machine."


@click.command()
@click.argument("model", required=False)
@click.option("--method", type=click.Choice(METHODS), help="Kind of drafter. [default: every installed one]")
@click.option("--days", default=30, show_default=True, type=click.IntRange(1), help="How far back chats are read.")
@click.option(
    "--minutes", default=2.0, show_default=True, type=click.FloatRange(0.05), callback=check_number,
    help="Of training, per drafter.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Agree that saved chats are read for this, now and later.")
@click.option("--withdraw", is_flag=True, help="Take the agreement back.")
@click.option("--nightly", is_flag=True, help="For timers: do nothing, and succeed, without agreement or new answers.")
@click.option("--undo", is_flag=True, help="Bring back the drafters from before the last adaptation.")
@device_option
@json_option
def adapt(model: str | None, **options: Any) -> None:
    """Fine-tune the drafters of MODEL on your recent chats, and keep them only if they then draft better.

    A nightly run is one line of crontab: 0 4 * * * localspec adapt --nightly
    """
    config = settings()
    if options["withdraw"]:
        (config.paths.data_dir / CONSENT_FILE).unlink(missing_ok=True)
        click.echo("chats are no longer read for drafters")
        return
    try:
        place = make_locator(config, True, options["device"])(model or default_model(config), lambda line: None)
        if not options["undo"] and not _agreed(config, options["yes"], options["nightly"]):
            return
        # Two at a time would put aside each other's drafters.
        with exclusive_lock(config.paths.data_dir / LOCK_FILE, wait=False):
            if options["undo"]:
                results = [_undo(config, name) for name in _wanted(config, place.id, options["method"])]
            else:
                results = _adapt_all(config, place, options)
    except BlockingIOError:
        fail("another adaptation is under way; call this again when it is done")
    except EngineError as error:
        fail_engine(error)
    except (ValueError, OSError) as error:
        fail(str(error))
    if options["as_json"]:
        print_json(results)
        return
    for result in results:
        click.echo(f"{result['drafter']}: {result['outcome']}")


def _wanted(config: Settings, model_id: str, method: str | None) -> list[str]:
    """Names of installed drafters, MODEL.KIND."""
    known = [f"{model_id}.{kind}" for kind in ([method] if method else METHODS)]
    found = [name for name in known if name in drafter_ids(config)]
    if not found:
        fail(f"{model_id} has no installed drafter of the kinds {', '.join(METHODS)}; pull or train one first")
    return found


def _agreed(config: Settings, yes: bool, nightly: bool) -> bool:
    """Whether chats may be read. Fails where nobody can be asked; nightly runs just stay away."""
    path = config.paths.data_dir / CONSENT_FILE
    if path.is_file():
        return True
    if nightly and not yes:
        return False
    if not yes and not (sys.stdin.isatty() and click.confirm(QUESTION)):
        fail("chats are read only with your agreement: localspec adapt --yes", EXIT_WRONG_USE)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_text(json.dumps({"agreed_s": time.time(), "adapted_s": {}}) + "\n", encoding="utf-8")
    return True


def _adapt_all(config: Settings, place: ModelPlace, options: dict[str, Any]) -> list[dict[str, Any]]:
    names = _wanted(config, place.id, options["method"])
    consent = config.paths.data_dir / CONSENT_FILE
    adapted_s = _adapted_s(consent)
    since_s = time.time() - options["days"] * DAY_S
    answers = list(_answers(config, place, since_s))
    held_out = sum(answer.held_out for answer in answers)
    newest_s = _newest_answer_s(config, place.id)
    if options["nightly"] and newest_s <= adapted_s.get(place.id, 0.0):
        return []
    if len(answers) < LEAST_ANSWERS or not 0 < held_out < len(answers):
        if options["nightly"]:
            return []
        fail(f"{len(answers)} answers of {place.id} in the chats of {options['days']} days are too few to learn from")
    results = [_adapt_one(config, place, name, answers, options) for name in names]
    # An agreement that was taken back meanwhile stays so.
    if consent.is_file():
        state = {**_state(consent), "adapted_s": {**adapted_s, place.id: newest_s}}
        with AtomicFile(consent) as file:
            file.write((json.dumps(state) + "\n").encode())
    return results


def _state(consent: Path) -> dict[str, Any]:
    """What the file of the agreement says; nothing if it is damaged."""
    with contextlib.suppress(ValueError, OSError):
        state = json.loads(consent.read_text(encoding="utf-8"))
        return state if isinstance(state, dict) else {}
    return {}


def _adapted_s(consent: Path) -> dict[str, float]:
    """By model: the time of the newest answer that it was adapted on."""
    found = _state(consent).get("adapted_s")
    known = found if isinstance(found, dict) else {}
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float)}


def _adapt_one(
    config: Settings, place: ModelPlace, name: str, answers: list[Answer], options: dict[str, Any]
) -> dict[str, Any]:
    import torch

    from localspec.engine.build import read_config, resolve_device
    from localspec.formats.checkpoint import open_checkpoint
    from localspec.training.adapting import AdaptSettings, adapt_drafter
    from localspec.training.answers import AnswerStore
    from localspec.training.export import export
    from localspec.training.recipe import open_target

    device = torch.device(resolve_device(options["device"]))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        target = open_target(read_config(place.folder), open_checkpoint(place.folder), device, dtype)
    except torch.OutOfMemoryError:
        raise ValueError(f"{device} has too little memory for the unpacked {place.id}; take --device cpu") from None
    folder = config.paths.drafters_dir / name
    with tempfile.TemporaryDirectory(prefix="localspec-adapt-") as private:
        store = AnswerStore(Path(private))
        store.append(answers)
    # What is mapped has no name on the disk any more, so that a run that is killed leaves nothing of the chats there.
    wanted = AdaptSettings(seconds=60 * options["minutes"])
    report = lambda line: click.echo(f"{name}: {line}", err=True)  # noqa: E731
    result: dict[str, Any] = {"drafter": name, "answers": len(answers)}
    try:
        found = adapt_drafter(name.rpartition(".")[2], folder, target, store, wanted, report)
    except torch.OutOfMemoryError:
        raise ValueError(f"{device} has too little memory to train for {place.id}; take --device cpu") from None
    except ValueError as error:
        if options["method"]:
            raise
        # One that cannot be trained further keeps no other from it.
        return {**result, "kept": False, "outcome": f"unchanged: {error}"}
    result |= {"before": found.before, "after": found.after}
    if not found.better:
        outcome = f"acceptance on kept-back chats did not rise ({found.before:.3f} to {found.after:.3f}); unchanged"
        return {**result, "kept": False, "outcome": outcome}
    with tempfile.TemporaryDirectory(prefix="localspec-adapt-") as work:
        export(found.drafter, Path(work), found.form)
        _replace(config, name, Path(work), "adapted on this machine")
    outcome = f"acceptance length on kept-back chats {found.before:.3f} to {found.after:.3f}; kept"
    return {**result, "kept": True, "outcome": outcome}


def _replace(config: Settings, name: str, new: Path, source: str) -> None:
    """Install a drafter's files in place of the installed one, which is set aside for `--undo`."""
    from localspec.hub.install import LocalFile, NewModel, install
    from localspec.hub.layout import read_manifest
    from localspec.hub.meter import ProgressMeter
    from localspec.hub.pull import drafters_directory
    from localspec.hub.records import ignore_progress

    folder = config.paths.drafters_dir / name
    licence = read_manifest(folder).licence
    aside = drafters_directory(config.paths.data_dir) / PREVIOUS / name
    fresh = aside.with_name(f"{name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copytree(folder, fresh)
    files = [
        LocalFile(path.name, path, None, "copied") for path in sorted(new.iterdir()) if path.name != "localspec.json"
    ]
    model = NewModel(name, source, licence, needs_tokenizer=False)
    install(files, model, drafters_directory(config.paths.data_dir), ProgressMeter(ignore_progress))
    shutil.rmtree(aside, ignore_errors=True)
    fresh.rename(aside)


def _undo(config: Settings, name: str) -> dict[str, Any]:
    from localspec.hub.layout import read_manifest
    from localspec.hub.pull import drafters_directory

    aside = drafters_directory(config.paths.data_dir) / PREVIOUS / name
    if not aside.is_dir():
        return {"drafter": name, "kept": False, "outcome": "nothing to bring back"}
    with tempfile.TemporaryDirectory(prefix="localspec-adapt-") as work:
        copy = Path(work) / name
        shutil.copytree(aside, copy)
        _replace(config, name, copy, read_manifest(aside).source)
    return {"drafter": name, "kept": True, "outcome": "the drafter from before is back"}


def _messages(config: Settings, model_id: str) -> Iterator[tuple[str, str, list[Any]]]:
    """(chat id, system prompt, messages of the shown branch) of saved chats, the latest changed first."""
    from localspec.chats import ChatError, open_store

    if not config.paths.chats_file.is_file():
        return
    try:
        store = open_store(config.paths.chats_file)
    except ChatError as error:
        raise ValueError(str(error)) from error
    try:
        for chat in store.chats():
            yield chat.id, chat.system_prompt, list(store.path(chat.id))
    finally:
        store.close()


def _newest_answer_s(config: Settings, model_id: str) -> float:
    times = [
        message.created_s
        for _, _, messages in _messages(config, model_id)
        for message in messages
        if message.role == "assistant" and message.model_id == model_id
    ]
    return max(times, default=0.0)


def _answers(config: Settings, place: ModelPlace, since_s: float) -> Iterator[Answer]:
    """Finished answers of the model with the prompts that led to them; whole chats are kept back together."""
    from localspec.api.types import GenerateRequest, Message
    from localspec.engine.text import TextStage
    from localspec.training.answers import Answer

    text = TextStage(place.folder, 1 << 20)
    for chat_id, system, messages in _messages(config, place.id):
        held_out = hashlib.sha256(chat_id.encode()).digest()[0] % HELD_OUT_ONE_IN == 0
        history = [Message("system", system)] if system else []
        for message in messages:
            finished = message.role == "assistant" and message.state == "done" and message.created_s >= since_s
            if finished and message.model_id == place.id and history and _are_ids(message.token_ids, text):
                # A chat that the template refuses keeps no other from being read.
                with contextlib.suppress(EngineError):
                    prompt = text.prepare(GenerateRequest(messages=tuple(history))).request.prompt_ids
                    yield Answer((*prompt, *message.token_ids), len(prompt), True, held_out)
            if message.role in ("system", "user", "assistant"):
                history.append(Message(message.role, message.content))


def _are_ids(token_ids: tuple[int, ...], text: TextStage) -> bool:
    """Whether they are of this vocabulary: an older answer may be of another model that had the same name."""
    return bool(token_ids) and min(token_ids) >= 0 and max(token_ids) < text.tokenizer.vocab_size
