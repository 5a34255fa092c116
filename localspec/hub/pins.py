"""What was resolved at a pull and is kept from then on: revision, sizes and hashes of repositories. Torch-free.

`<data>/models/pins.json` maps `repo@revision` to a commit and its files. A later pull of the same model gets the same
bytes or an error, unless an update is asked for. The file is a cache of decisions: a damaged one is ignored and said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localspec.hub import layout
from localspec.hub.catalogue import HubSource, PinnedFile
from localspec.hub.records import HubError
from localspec.storage.files import exclusive_lock

PINS_NAME = "pins.json"
FORMAT_VERSION = 1
_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Pin:
    """One repository as it was when it was pulled first."""

    commit: str
    licence: str
    files: tuple[PinnedFile, ...]


def apply_pin(source: HubSource, pins: Mapping[str, Pin]) -> HubSource:
    """The source with the pinned commit and files, or unchanged when nothing fits its patterns.

    Sources that the catalogue pins already are never changed.
    """
    pin = pin_of(source, pins)
    if source.files or pin is None:
        return source
    if source.tensors:
        return replace(source, revision=pin.commit)
    return replace(source, revision=pin.commit, files=pin.files, include=())


def pin_of(source: HubSource, pins: Mapping[str, Pin]) -> Pin | None:
    """The pin of a source as the catalogue states it, or as `apply_pin` changed its revision."""
    found = pins.get(_key(source))
    if found is not None or not source.tensors:
        return found
    same = [pin for key, pin in pins.items() if pin.commit == source.revision and key.endswith(_suffix(source))]
    return same[0] if same else None


def read_pins(data_dir: Path) -> dict[str, Pin]:
    """All pins; empty when there are none. Raises HubError when the file is damaged."""
    path = data_dir / "models" / PINS_NAME
    if not path.exists():
        return {}
    document = layout.read_json(path)
    try:
        if document["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version is {document['format_version']!r}")
        return {key: _read_pin(value) for key, value in document["repositories"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, HubError) as error:
        raise HubError(f"{path} is damaged ({error}); delete it, and models are resolved anew") from error


def _read_pin(value: Mapping[str, Any]) -> Pin:
    files = []
    for name, entry in value["files"].items():
        size_bytes, sha256 = entry["size"], entry["sha256"]
        if type(size_bytes) is not int or size_bytes < 0 or not _SHA256.fullmatch(sha256):
            raise ValueError(f"the entry of {name!r} is not one")
        files.append(PinnedFile(layout.check_file_name(name), size_bytes, sha256))
    if not _SHA1.fullmatch(value["commit"]) or not files:
        raise ValueError("a repository has no commit or no files")
    licence = value["licence"]
    if not isinstance(licence, str) or not (licence.isprintable() and len(licence) <= 100):
        raise ValueError("a repository has no readable licence")
    return Pin(value["commit"], licence, tuple(files))


def keep_pin(data_dir: Path, source: HubSource, commit: str, licence: str, files: Sequence[PinnedFile]) -> None:
    """Records what a source was resolved to, replacing an older record of it. A damaged file is begun anew."""
    directory = layout.models_directory(data_dir)
    with exclusive_lock(directory / f".{PINS_NAME}.lock", wait=True):
        try:
            pins = read_pins(data_dir)
        except HubError:
            pins = {}
        pins[_key(source)] = Pin(commit, licence, tuple(files))
        document = {
            "format_version": FORMAT_VERSION,
            "repositories": {
                key: {
                    "commit": pin.commit,
                    "licence": pin.licence,
                    "files": {f.name: {"size": f.size_bytes, "sha256": f.sha256} for f in pin.files},
                }
                for key, pin in sorted(pins.items())
            },
        }
        temporary = directory / f".{PINS_NAME}.new"
        layout.write_json(temporary, document)
        temporary.replace(directory / PINS_NAME)


def _key(source: HubSource) -> str:
    """Patterns belong to the key: one repository may hold several models."""
    return f"{source.repo}@{source.revision}{_suffix(source)}"


def _suffix(source: HubSource) -> str:
    tensors = f" {source.tensors}*" if source.tensors else ""
    return f" {' '.join(source.include)}{tensors}"
