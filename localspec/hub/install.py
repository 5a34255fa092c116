"""From checked files on this disk to an installed model: convert or take over, then publish. Torch-free.

Knows the layout and the converter. Does not know where the files came from (`hub.pull`, `hub.importing`). Files are
checked before they are taken, and taken by link before they are given up, so that a failure costs no download.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from localspec.hub import layout
from localspec.hub.convert import convert_gguf
from localspec.hub.meter import ProgressMeter
from localspec.hub.records import HubError
from localspec.storage.errors import DamagedFile
from localspec.storage.safetensors import SafetensorsFile

# Codes of 5 and 6 bits become bytes, small models keep wide scales: a converted file stays below twice its source.
CONVERTED_SIZE_FACTOR = 2.0


@dataclass(frozen=True)
class LocalFile:
    """A checked file. `taking`: own files are linked and later removed, shared ones linked, foreign ones copied, and
    those of the model that is replaced linked or else copied."""

    name: str
    path: Path
    sha256: str | None
    taking: Literal["own", "shared", "copied", "kept"]


@dataclass(frozen=True)
class NewModel:
    """What the manifest says beside the files."""

    model_id: str
    source: str
    licence: str
    notes: tuple[str, ...] = ()
    sampling: Mapping[str, float | int] = field(default_factory=lambda: MappingProxyType({}))
    """Defaults for generation_config.json of a converted model."""
    needs_tokenizer: bool = True
    """False for a drafter, which speaks its target's vocabulary."""


def install(files: Sequence[LocalFile], model: NewModel, data_dir: Path, meter: ProgressMeter) -> Path:
    """Installs one GGUF file, or the files of a checkpoint; returns the model's directory.

    Raises HubError when a file is damaged or the model is not supported; nothing is installed then.
    """
    with layout.building(data_dir, model.model_id) as directory:
        known_sha256: dict[str, str] = {}
        if len(files) == 1 and files[0].name.endswith(".gguf"):
            source = files[0].path
            meter.start("convert", f"converting {source.name}", source.stat().st_size)
            convert_gguf(source, directory, _generation_defaults(model.sampling), meter.add)
        else:
            meter.start("verify", "checking the weight files")
            check_model_files(files, model.needs_tokenizer)
            for file in files:
                _take(file, directory / layout.check_file_name(file.name))
            known_sha256 = {file.name: file.sha256 for file in files if file.sha256 is not None}
            known_sha256 = {name: sha for name, sha in known_sha256.items() if not _narrow_index(directory / name)}
        meter.start("publish", f"installing {model.model_id}")
        described = layout.describe_files(directory, known_sha256)
        manifest = layout.Manifest(
            model_id=model.model_id,
            source=model.source,
            licence=model.licence,
            files=described,
            fingerprint=layout.fingerprint_of(described),
            notes=model.notes,
        )
        return layout.publish(directory, manifest, data_dir)


def _narrow_index(path: Path) -> bool:
    """Leaves out of an index what was not fetched, so that other programs can read the folder; True if it changed."""
    if not path.name.endswith(".safetensors.index.json"):
        return False
    document = layout.read_json(path)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict):
        return False
    here = {name: file for name, file in weight_map.items() if isinstance(file, str) and _is_beside(path, file)}
    if len(here) == len(weight_map):
        return False
    path.unlink()
    layout.write_json(path, {**document, "weight_map": here})
    return True


def _is_beside(path: Path, name: str) -> bool:
    return "/" not in name and path.with_name(name).is_file()


def _generation_defaults(sampling: Mapping[str, float | int]) -> Mapping[str, float | int]:
    return {"do_sample": True, **sampling} if sampling.get("temperature", 0) > 0 else sampling


def _take(file: LocalFile, target: Path) -> None:
    if file.taking == "copied":
        shutil.copyfile(file.path, target)
        target.chmod(0o600)
        return
    try:
        os.link(file.path, target)
    except OSError:
        # Another disk, or a file system without hard links.
        if file.taking == "own":
            file.path.rename(target)
        elif file.taking == "kept":
            shutil.copyfile(file.path, target)
        else:
            target.symlink_to(file.path)
    if file.taking == "own":
        target.chmod(0o600)


def check_model_files(files: Sequence[LocalFile], needs_tokenizer: bool = True) -> None:
    """Refuses a set of files whose JSON or weight files are missing or not whole. Raises HubError naming the file."""
    by_name = {file.name: file.path for file in files}
    for name in ("config.json", "tokenizer.json") if needs_tokenizer else ("config.json",):
        if name not in by_name:
            raise HubError(f"the model has no {name}; this kind of repository is not supported")
        layout.read_json(by_name[name])
    weights = sorted(name for name in by_name if name.endswith(".safetensors"))
    if not weights:
        raise HubError("the model has no *.safetensors file; this kind of repository is not supported")
    for name in weights:
        try:
            SafetensorsFile.open(by_name[name]).close()
        except DamagedFile as error:
            raise HubError(f"{name} is damaged: {error}") from error
