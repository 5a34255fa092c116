"""Installed models: list, show, check, remove, tidy, and how much disk they take. Torch-free.

Knows the data directory only; what could be installed is the catalogue's matter. Nothing outside
`<data>/models` is ever removed: a model that shares files with the hub's cache gives back its links only.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.hub import layout
from localspec.hub.catalogue import ModelEntry
from localspec.hub.layout import Manifest
from localspec.hub.pins import PINS_NAME
from localspec.hub.records import HubError
from localspec.storage.files import exclusive_lock

# A build that is running touches its folder; older ones belong to a process that is gone.
STALE_AFTER_S = 3600.0


def other_source(data_dir: Path, entry: ModelEntry) -> str | None:
    """Where the installed model of the entry's id came from, if not from the hub address that the entry was made of.

    Repositories of two owners may have one name. None where it is from there, not installed, damaged, or the entry is
    one of the catalogue.
    """
    folder = data_dir / "models" / entry.id
    if (
        entry.base is None
        or entry.title.partition(":")[0] != entry.base
        or not (folder / layout.MANIFEST_NAME).is_file()
    ):
        return None
    try:
        source = layout.read_manifest(folder).source
    except HubError:
        return None
    return None if source.casefold().startswith(f"{entry.base}@".casefold()) else source


@dataclass(frozen=True)
class InstalledModel:
    """One model on this disk; `problem` says why it cannot be used, if so."""

    model_id: str
    directory: Path
    size_bytes: int
    manifest: Manifest | None
    problem: str | None = None

    @property
    def is_demo(self) -> bool:
        return self.manifest is not None and "demo" in self.manifest.notes


@dataclass(frozen=True)
class ModelFacts:
    """What `show` says beyond the manifest; None where config.json does not tell."""

    model: InstalledModel
    architecture: str | None
    weight_format: str
    context_tokens: int | None
    n_layers: int | None
    vocabulary: int | None
    has_chat_template: bool


@dataclass(frozen=True)
class DiskUse:
    """Bytes under the models directory, and what is free on its disk."""

    models: tuple[tuple[str, int], ...]
    partial_bytes: int
    """Unfinished pulls and left-over builds; `prune` gives back what no running pull holds."""
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.models) + self.partial_bytes


def list_installed(data_dir: Path) -> tuple[InstalledModel, ...]:
    """All installed models by name; a damaged one is listed with its problem, never an error."""
    directory = data_dir / "models"
    if not directory.is_dir():
        return ()
    found = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    return tuple(_describe(path) for path in found)


def find_installed(data_dir: Path, model_id: str) -> InstalledModel:
    """The installed model of this id. Raises HubError that says what is installed, or how to install it."""
    path = data_dir / "models" / layout.check_model_id(model_id)
    if not path.is_dir():
        names = ", ".join(model.model_id for model in list_installed(data_dir)) or "none"
        raise HubError(f"{model_id} is not installed (installed: {names}); run 'localspec pull {model_id}'")
    return _describe(path)


def _describe(path: Path) -> InstalledModel:
    try:
        return _described(path)
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror}); mend its owner and permissions"
        return InstalledModel(path.name, path, 0, None, problem)


def _described(path: Path) -> InstalledModel:
    size_bytes = tree_bytes(path)
    if not (path / layout.MANIFEST_NAME).exists():
        foreign = f"the folder holds no {layout.MANIFEST_NAME}, so nothing was installed there; move {path} away"
        return InstalledModel(path.name, path, size_bytes, None, foreign)
    try:
        manifest = layout.read_manifest(path)
    except HubError as error:
        return InstalledModel(path.name, path, size_bytes, None, str(error))
    lacking = [name for name in manifest.files if not (path / name).is_file()]
    problem = f"{lacking[0]} is missing; pull the model again" if lacking else None
    return InstalledModel(path.name, path, size_bytes, manifest, problem)


def show(data_dir: Path, model_id: str) -> ModelFacts:
    """Facts about an installed model. Raises HubError when it is not installed or its config.json is damaged."""
    model = find_installed(data_dir, model_id)
    config = layout.read_json(model.directory / "config.json")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    quantization = config.get("quantization_config")
    weight_format = str(config.get("dtype") or config.get("torch_dtype") or "not stated")
    if isinstance(quantization, dict):
        weight_format = str(quantization.get("quant_algo") or quantization.get("quant_method"))
    return ModelFacts(
        model=model,
        architecture=_text(config, "model_type"),
        weight_format=weight_format,
        context_tokens=_number(text, "max_position_embeddings"),
        n_layers=_number(text, "num_hidden_layers"),
        vocabulary=_number(text, "vocab_size"),
        has_chat_template=_has_chat_template(model.directory),
    )


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    tokenizer = directory / "tokenizer_config.json"
    return tokenizer.is_file() and bool(layout.read_json(tokenizer).get("chat_template"))


def _text(document: dict[str, Any], key: str) -> str | None:
    value = document.get(key)
    return value if isinstance(value, str) else None


def _number(document: dict[str, Any], key: str) -> int | None:
    value = document.get(key)
    return value if type(value) is int else None


def verify(data_dir: Path, model_id: str, on_file: Callable[[str], None] = lambda file_name: None) -> tuple[str, ...]:
    """Hashes every file of an installed model; returns one sentence for each that is wrong, so () means whole.

    `on_file` hears each name before its turn. Raises HubError when the model is not installed or has no manifest.
    """
    model = find_installed(data_dir, model_id)
    if model.manifest is None:
        raise HubError(model.problem or f"{model_id} has no manifest; pull it again")
    problems = []
    for name, record in sorted(model.manifest.files.items()):
        on_file(name)
        path = model.directory / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != record.size_bytes:
            problems.append(f"{name} has {path.stat().st_size} bytes, the manifest says {record.size_bytes}")
        elif layout.sha256_of(path) != record.sha256:
            problems.append(f"{name} does not have the hash of the manifest")
    known = {*model.manifest.files, layout.MANIFEST_NAME, layout.PACKED_NAME}
    problems += [
        f"{p.name} does not belong to the model" for p in sorted(model.directory.iterdir()) if p.name not in known
    ]
    return tuple(problems)


def remove(data_dir: Path, model_id: str) -> int:
    """Removes an installed model; returns the bytes it took. Raises HubError when it is not installed.

    The directory is renamed first, so that an ended removal leaves no half model, only something for `prune`.
    """
    model = find_installed(data_dir, model_id)
    doomed = model.directory.with_name(f"{layout.TEMPORARY_PREFIX}{model.model_id}-removed-{time.time_ns():x}")
    model.directory.rename(doomed)
    _delete(doomed)
    return model.size_bytes


def prune(data_dir: Path, now_s: float | None = None, stale_after_s: float = STALE_AFTER_S) -> int:
    """Removes left-over builds and unfinished pulls that nothing touched for a while; returns the bytes given back.

    A pull that is running keeps its files, however old.
    """
    now_s = time.time() if now_s is None else now_s
    freed_bytes = 0
    for path in _leftovers(data_dir):
        if _is_pulled_now(path):
            continue
        newest_s = max(p.lstat().st_mtime for p in (path, *(() if path.is_symlink() else path.rglob("*"))))
        # A date in the future is a clock that was set back, not a build that is younger than now.
        if abs(now_s - newest_s) >= stale_after_s:
            freed_bytes += tree_bytes(path)
            _delete(path)
    return freed_bytes


def _is_pulled_now(path: Path) -> bool:
    lock = path / layout.PULL_LOCK_NAME
    if not lock.is_file():
        return False
    try:
        with exclusive_lock(lock, wait=False):
            return False
    except OSError:
        return True


def disk_use(data_dir: Path) -> DiskUse:
    """How the models directory uses its disk, largest model first."""
    models = sorted(((m.model_id, m.size_bytes) for m in list_installed(data_dir)), key=lambda item: -item[1])
    partial_bytes = sum(tree_bytes(path) for path in _leftovers(data_dir))
    existing = next(path for path in (data_dir, *data_dir.absolute().parents) if path.exists())
    return DiskUse(tuple(models), partial_bytes, shutil.disk_usage(existing).free)


def _leftovers(data_dir: Path) -> list[Path]:
    directory = data_dir / "models"
    builds = [*directory.glob(f"{layout.TEMPORARY_PREFIX}*"), *directory.glob(f".{PINS_NAME}.new")]
    return sorted([*builds, *(directory / layout.PARTIAL_DIRECTORY).glob("*")])


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def tree_bytes(path: Path) -> int:
    """Bytes that the files under a path take on disk (sparse files count what they hold), links not followed."""
    paths = (path, *path.rglob("*")) if not path.is_symlink() else (path,)
    return sum(p.lstat().st_blocks * 512 for p in paths if not p.is_dir() or p.is_symlink())
