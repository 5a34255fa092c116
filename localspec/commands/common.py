"""What commands share: settings, the way to models, exit codes, output. Imports nothing heavy at the top."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from localspec.config import DEMO_MODEL_ID, Settings, load_settings

if TYPE_CHECKING:
    from localspec.api.types import EngineError
    from localspec.engine.build import ModelPlace
    from localspec.engine.engine import LocalEngine
    from localspec.hub.catalogue import Catalogue
    from localspec.hub.records import HubSettings, PullProgress

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_MACHINE_CANNOT = 3
EXIT_INTERRUPTED = 130
ADDITIONS_FILE = "models.toml"
HASHED_AT_LOAD_BYTES = 256 << 20


class Fail(click.ClickException):
    """One line on stderr and an exit code."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        click.echo(f"localspec: {self.message}", err=True)


def fail(message: str, exit_code: int = EXIT_FAILED) -> NoReturn:
    raise Fail(message, exit_code)


def fail_engine(error: EngineError) -> NoReturn:
    """The engine's own sentence, and the exit code that fits."""
    fail(error.message, EXIT_MACHINE_CANNOT if error.code == "machine_cannot" else EXIT_FAILED)


def settings() -> Settings:
    return load_settings()


def hub_settings(config: Settings) -> HubSettings:
    from localspec.hub.records import HubSettings

    network = config.network
    return HubSettings(
        endpoint=network.hub_endpoint,
        mirrors=network.hub_mirrors,
        token=network.hub_token,
        token_variable=network.hub_token_place,
        index_url=network.package_index,
        hub_cache_dir=str(network.hub_cache_dir) if network.hub_cache_dir is not None else None,
        http_proxy=network.http_proxy,
        https_proxy=network.https_proxy,
        no_proxy=network.no_proxy,
        ca_file=str(network.ca_file) if network.ca_file is not None else None,
        ca_dir=str(network.ca_dir) if network.ca_dir is not None else None,
    )


def catalogue(config: Settings) -> Catalogue:
    from localspec.hub.catalogue import load_catalogue

    additions = config.paths.data_dir / ADDITIONS_FILE
    return load_catalogue(additions if additions.exists() else None)


def installed_ids(config: Settings) -> list[str]:
    """Ids of installed models, newest first."""
    return _ids_in(config.paths.models_dir)


def drafter_ids(config: Settings) -> list[str]:
    """Ids of installed drafters, `MODEL.KIND`, newest first."""
    return _ids_in(config.paths.drafters_dir)


def known_id(config: Settings, name: str) -> str:
    """The id behind an alias, an address or a drafter's name; any other name stands for itself, and so does an address
    that the model of this id did not come from."""
    from localspec.hub.catalogue import find_drafter
    from localspec.hub.local import other_source
    from localspec.hub.records import HubError

    if name in installed_ids(config) or name in drafter_ids(config):
        return name
    known = catalogue(config)
    drafter = find_drafter(known, name)
    if drafter is not None:
        return f"{drafter[0].id}.{drafter[1]}"
    try:
        entry = known.find(name)
    except HubError:
        return name
    return name if other_source(config.paths.data_dir, entry) is not None else entry.id


def _ids_in(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    found: list[tuple[float, str]] = []
    for path in folder.iterdir():
        # One folder that this user may not read must not hide the others; `doctor` names it.
        with contextlib.suppress(PermissionError):
            if not path.name.startswith(".") and (path / "localspec.json").is_file():
                found.append((path.stat().st_mtime, path.name))
    return [name for _, name in sorted(found, key=lambda item: -item[0])]


def default_model(config: Settings) -> str:
    """The newest model that was pulled for real work, else the demo."""
    others = [model_id for model_id in installed_ids(config) if model_id != DEMO_MODEL_ID]
    return others[0] if others else DEMO_MODEL_ID


def check_model_is_there(config: Settings, model_id: str) -> None:
    """Raises EngineError where the model is neither installed nor the demo, which is fetched when it is needed."""
    from localspec.api.types import EngineError
    from localspec.hub.records import HubError

    try:
        known, name = catalogue(config), known_id(config, model_id)
        entry = next((each for each in known.models if each.id == name), None)
        if not (config.paths.models_dir / name / "localspec.json").is_file() and (entry is None or not entry.demo):
            raise EngineError("model_not_found", _not_installed(known, model_id))
    except HubError as error:
        code = "machine_cannot" if error.exit_code == EXIT_MACHINE_CANNOT else "model_not_found"
        raise EngineError(code, str(error)) from error


def make_locator(
    config: Settings, offline: bool, device: str = "auto"
) -> Callable[[str, Callable[[str], None]], ModelPlace]:
    """Finds an installed model; fetches the demo, and only the demo, when it is not there. Raises EngineError.

    `device` is what the engine was asked to run on: a model that is meant for a card is refused where `auto` would put
    it on the CPU, or where its weights cannot lie on the card.
    """

    def locate(model_id: str, report: Callable[[str], None]) -> ModelPlace:
        from localspec.api.types import EngineError
        from localspec.engine.build import ModelPlace
        from localspec.hub.get import Wish, get
        from localspec.hub.records import HubError

        check_model_is_there(config, model_id)

        def show(progress: PullProgress) -> None:
            share = f" {progress.done_bytes * 100 // progress.total_bytes}%" if progress.total_bytes else ""
            report(f"{progress.message}{share}")

        try:
            known, name = catalogue(config), known_id(config, model_id)
            entry = next((each for each in known.models if each.id == name), None)
            folder = config.paths.models_dir / name
            if not (folder / "localspec.json").is_file():
                get(known, Wish(name, offline=offline), config.paths.data_dir, hub_settings(config), show)
            _refuse_unsuited(known, name, folder, device)
            _check_files(folder)
            if entry is None:
                return ModelPlace(name, Path(folder), name)
            return ModelPlace(entry.id, Path(folder), entry.title, entry.advice, entry.demo)
        except HubError as error:
            code = "machine_cannot" if error.exit_code == EXIT_MACHINE_CANNOT else "model_not_found"
            raise EngineError(code, str(error)) from error

    return locate


def local_engine(
    config: Settings, offline: bool, options: Mapping[str, Any], kv_dir: Path | None = None
) -> LocalEngine:
    """The engine that a command's options ask for, stopped. Imports torch, which takes seconds. kv_dir: where finished
    conversations are kept; None keeps them in memory only."""
    from localspec.engine.build import EngineOptions
    from localspec.engine.engine import LocalEngine

    return LocalEngine(
        make_locator(config, offline, options["device"]),
        EngineOptions(
            options["device"],
            options["context"],
            options["drafter"],
            options["depth"],
            drafters_dir=config.paths.drafters_dir,
            ngram_dir=config.paths.ngram_dir,
            ngram_learn=options["learn"],
            kv_dir=kv_dir,
            kv_cache=options["kv_cache"],
            fp4_prompts=options["fp4_prompts"],
            checks_dir=config.paths.cache_dir,
            tuner_dir=config.paths.tuner_dir,
        ),
    )


def _not_installed(known: Catalogue, model_id: str) -> str:
    """Raises HubError when no such model exists at all."""
    return f"{known.find(model_id).id} is not installed; get it with: localspec pull {model_id}"


def _refuse_unsuited(known: Catalogue, model_id: str, folder: Path, device: str) -> None:
    """Raises EngineError where a model meant for a card would silently run on a CPU, or cannot lie on the card."""
    from localspec.api.types import EngineError
    from localspec.hub.gpus import read_gpus
    from localspec.hub.suits import meant_for_card, why_no_card, why_too_large

    if device == "cpu" or not meant_for_card(known, model_id, folder):
        return
    index = int(device[5:]) if device.startswith("cuda:") else 0
    reading = read_gpus()
    reason = why_no_card(reading, index)
    if reason is None:
        reason = why_too_large(folder, reading.gpus[index]) or _why_not_in_torch()
    if reason is not None:
        raise EngineError(
            "machine_cannot",
            f"{model_id} is meant for an NVIDIA card, and {reason}; 'localspec doctor' tells more, "
            "--device cpu runs it slowly",
        )


def _why_not_in_torch() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "torch was installed without CUDA; run the set-up command of the README again"
    return "torch does not see the card; reboot if the driver was updated"


def _check_files(folder: Path) -> None:
    """Sizes of all files and hashes of small ones, which cost little beside reading them. Raises HubError."""
    from localspec.hub.layout import read_manifest, sha256_of
    from localspec.hub.records import HubError

    for name, record in read_manifest(folder).files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        cure = f"the model is damaged: localspec rm {folder.name}, then localspec pull {folder.name}"
        if size != record.size_bytes:
            raise HubError(f"{path} has {size} of {record.size_bytes} bytes; {cure}")
        if size <= HASHED_AT_LOAD_BYTES and sha256_of(path) != record.sha256:
            raise HubError(f"{path} is not what was installed; {cure}")


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, ensure_ascii=False, indent=2))


def read_prompt(argument: str) -> str:
    """The prompt itself, or all of stdin for `-`. Bytes that are no UTF-8 are wrong use."""
    text = argument if argument != "-" else sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")
    if any("\ud800" <= character <= "\udfff" for character in text):
        fail("the prompt is not valid UTF-8; convert it first, for example with iconv", EXIT_WRONG_USE)
    if argument != "-":
        return text
    if not text.strip():
        fail("stdin held no prompt; pipe some text in, or give the prompt as an argument", EXIT_WRONG_USE)
    return text


def gib(size_bytes: int) -> str:
    """A size for people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} B"
