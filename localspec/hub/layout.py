"""The directory of an installed model: names, manifest with hashes, atomic publication. Torch-free.

`<data>/models/<model id>/` holds config.json, tokenizer.json, tokenizer_config.json, generation_config.json, one or
more *.safetensors, and the manifest localspec.json. A model is built in `<data>/models/.tmp-<id>-<random>` and renamed,
so a directory without a dot in front is always complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.hub.records import EXIT_MACHINE_CANNOT, HubError
from localspec.storage.files import sync_directory

LAYOUT_VERSION = 1
MANIFEST_NAME = "localspec.json"
PACKED_NAME = "weights.packed"
"""Made from the other files for a card's kernels; not in the manifest, and may be deleted at any time."""
TEMPORARY_PREFIX = ".tmp-"
PARTIAL_DIRECTORY = ".partial"
PULL_LOCK_NAME = "lock"
READ_BYTES = 4 << 20
RESERVE_BYTES = 64 << 20
MAX_JSON_BYTES = 64 << 20
MAX_TEXT_CHARACTERS = 10_000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MODEL_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")


@dataclass(frozen=True)
class FileRecord:
    """One file of an installed model."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """localspec.json. `fingerprint` is the sha256 over the sorted (name, size, sha256) lines; caches use it as key."""

    model_id: str
    source: str
    licence: str
    files: Mapping[str, FileRecord]
    fingerprint: str
    notes: tuple[str, ...] = ()
    layout_version: int = LAYOUT_VERSION


def check_model_id(model_id: str) -> str:
    """Returns the id. Raises HubError unless it is a plain lower-case name that cannot leave its directory."""
    if not _MODEL_ID.fullmatch(model_id) or ".." in model_id:
        raise HubError(f"{model_id!r} is not a model id: use lower-case letters, digits, dot, dash and underscore")
    return model_id


def check_file_name(name: str) -> str:
    """Returns the name. Raises HubError unless it is a plain file name (no folders, no '..', no leading dot)."""
    if not _FILE_NAME.fullmatch(name) or ".." in name:
        raise HubError(f"the file name {name!r} is refused: only plain names of letters, digits and ._+- are written")
    return name


def readable_path(path: Path) -> str:
    """The whole path as text that can be written: a path may hold bytes that are no UTF-8."""
    return os.fsencode(path.resolve()).decode("utf-8", "replace")


def models_directory(data_dir: Path) -> Path:
    """`<data>/models`; what does not exist yet is created for this user only. A link to another disk is followed."""
    directory = data_dir / "models"
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def partial_directory(data_dir: Path, model_id: str) -> Path:
    """`<data>/models/.partial/<id>`, where a pull keeps what it has so far; created for this user only."""
    parent = models_directory(data_dir) / PARTIAL_DIRECTORY
    parent.mkdir(mode=0o700, exist_ok=True)
    directory = parent / check_model_id(model_id)
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def sha256_of(path: Path) -> str:
    """Hash of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def fingerprint_of(files: Mapping[str, FileRecord]) -> str:
    """sha256 over one line a file, sorted by name: `name size sha256`."""
    lines = [f"{name} {record.size_bytes} {record.sha256}\n" for name, record in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes readable UTF-8 JSON with a stable key order, mode 0600, flushed to disk."""
    text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=)`: new files belong to this user alone."""
    return os.open(path, flags, 0o600)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a small JSON file. Raises HubError when it is missing, too large or no JSON object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise HubError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, which no JSON file of a model is")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HubError(f"{path} cannot be read as JSON ({error}); pull the model again") from error
    if not isinstance(document, dict):
        raise HubError(f"{path} does not hold a JSON object; pull the model again")
    return document


def describe_files(directory: Path, known_sha256: Mapping[str, str]) -> dict[str, FileRecord]:
    """Size and hash of each file in a built directory; hashes in `known_sha256` are taken as already computed."""
    records = {}
    for path in sorted(directory.iterdir()):
        if path.name != MANIFEST_NAME:
            digest = known_sha256.get(path.name) or sha256_of(path)
            records[path.name] = FileRecord(path.stat().st_size, digest)
    return records


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes localspec.json into a built directory."""
    files = {name: {"size": r.size_bytes, "sha256": r.sha256} for name, r in sorted(manifest.files.items())}
    document = {
        "layout_version": manifest.layout_version,
        "model_id": manifest.model_id,
        "source": manifest.source,
        "licence": manifest.licence,
        "fingerprint": manifest.fingerprint,
        "notes": list(manifest.notes),
        "files": files,
    }
    # One that came with the model may be a link to a file outside.
    (directory / MANIFEST_NAME).unlink(missing_ok=True)
    write_json(directory / MANIFEST_NAME, document)


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks localspec.json. Raises HubError naming what is wrong."""
    path = directory / MANIFEST_NAME
    document = read_json(path)
    if document.get("layout_version") != LAYOUT_VERSION:
        raise HubError(
            f"{path} has layout version {document.get('layout_version')!r}, this program reads {LAYOUT_VERSION}; "
            "remove the model and pull it again"
        )
    try:
        files = {
            check_file_name(name): FileRecord(_natural(entry["size"]), _digest(entry["sha256"]))
            for name, entry in document["files"].items()
        }
        manifest = Manifest(
            model_id=check_model_id(document["model_id"]),
            source=_text(document["source"]),
            licence=_text(document["licence"]),
            files=files,
            fingerprint=_digest(document["fingerprint"]),
            notes=tuple(_text(note) for note in document.get("notes", ())),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise HubError(f"{path} is damaged ({error}); remove the model and pull it again") from error
    if manifest.fingerprint != fingerprint_of(files):
        raise HubError(f"{path} does not fit its own fingerprint; remove the model and pull it again")
    return manifest


def _digest(value: object) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{value!r} is not a sha256")
    return value


def _text(value: object) -> str:
    """JSON can spell half a surrogate pair, which no terminal or file takes."""
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"{str(value)[:40]!r} is not a text of a reasonable size")
    value.encode("utf-8")
    return value


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


@contextmanager
def building(data_dir: Path, model_id: str) -> Iterator[Path]:
    """A fresh private directory to build a model in; removed when the block raises (`publish` moves it away)."""
    parent = models_directory(data_dir)
    directory = parent / f"{TEMPORARY_PREFIX}{check_model_id(model_id)}-{secrets.token_hex(4)}"
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def publish(directory: Path, manifest: Manifest, data_dir: Path) -> Path:
    """Writes the manifest and renames the built directory into place; an older version of the model is replaced.

    Returns the final directory. The old version is renamed away first and deleted last, so that at every moment either
    the old or the new model (or, for the length of one rename, none) is there, never a mixture.
    """
    write_manifest(directory, manifest)
    target = models_directory(data_dir) / check_model_id(manifest.model_id)
    old = target.with_name(f"{TEMPORARY_PREFIX}{target.name}-{secrets.token_hex(4)}-old")
    if target.is_symlink() or target.exists():
        target.rename(old)
    directory.rename(target)
    sync_directory(target.parent)
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)
    return target


def refuse_small_disk(model_id: str, needed_bytes: int, data_dir: Path) -> None:
    """Raises HubError (exit code 3), with numbers, when so many bytes and a reserve do not fit beside the models."""
    available_bytes = free_bytes(data_dir)
    if needed_bytes + RESERVE_BYTES > available_bytes:
        largest = ", ".join(f"{name} ({size_bytes / 1e9:.1f} GB)" for name, size_bytes in _largest_models(data_dir))
        raise HubError(
            f"{model_id} needs {(needed_bytes + RESERVE_BYTES) / 1e9:.2f} GB on the disk of {data_dir}, "
            f"{available_bytes / 1e9:.2f} GB are free; free space"
            + (f", or remove a model with 'localspec rm': {largest}" if largest else ""),
            EXIT_MACHINE_CANNOT,
        )


def _largest_models(data_dir: Path, most: int = 3) -> list[tuple[str, int]]:
    """What could be removed, by the sizes that manifests state; damaged ones are passed over."""
    found: list[tuple[str, int]] = []
    for path in (data_dir / "models").glob(f"[!.]*/{MANIFEST_NAME}"):
        with suppress(HubError):
            manifest = read_manifest(path.parent)
            found.append((manifest.model_id, sum(record.size_bytes for record in manifest.files.values())))
    return sorted(found, key=lambda item: -item[1])[:most]


def free_bytes(directory: Path) -> int:
    """Free bytes for this user on the disk that holds the directory."""
    return shutil.disk_usage(directory).free
