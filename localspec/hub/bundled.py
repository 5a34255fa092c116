"""Drafters that come with this program: files of the package, checked against the catalogue's hashes. Torch-free."""

from __future__ import annotations

from pathlib import Path

from localspec.hub import layout
from localspec.hub.catalogue import BundledSource
from localspec.hub.fetching import Job, Plan, check_disk
from localspec.hub.install import LocalFile
from localspec.hub.web import CorruptFile, NotThere, RemoteFile

BUNDLED_DIR = Path(__file__).resolve().parents[1] / "data" / "drafters"


def bundled_plan(job: Job, source: BundledSource) -> Plan:
    """Needs no network. Raises NotThere where the files were left out of this installation."""
    folder = BUNDLED_DIR / layout.check_model_id(source.folder)
    lacking = [file.name for file in source.files if not (folder / file.name).is_file()]
    if lacking:
        raise NotThere(f"{lacking[0]} of {source.folder} is not part of this installation; install localspec again")
    files = tuple(RemoteFile(file.name, "", file.size_bytes, file.sha256) for file in source.files)

    def take() -> list[LocalFile]:
        check_disk(job, list(files))
        return [_checked(folder / file.name, str(file.sha256)) for file in files]

    return Plan("this program", "", files, take)


def _checked(path: Path, sha256: str) -> LocalFile:
    """Copied, never linked: an update of the program replaces its files in place. Raises CorruptFile."""
    if layout.sha256_of(path) != sha256:
        raise CorruptFile(f"{path} does not have the hash of the catalogue; install localspec again")
    return LocalFile(path.name, path, sha256, "copied")
