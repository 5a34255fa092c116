"""Whether files are gone or only away for now, as those of a disk that is not mounted are.

Knows paths, and which folders were file systems of their own before; knows no tables. A folder that stands empty where
there was text may be the mount point of a disk that is not there: nothing is concluded from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from localspec.hub.corpus import stored_name


def mount_points_above(files: Iterable[Path], roots: Sequence[Path]) -> set[str]:
    """Folders from the roots down to the files in which another file system begins."""
    found: set[str] = set()
    devices: dict[Path, int | None] = {}
    for parent in {file.parent for file in files}:
        folder = parent
        while folder not in devices and any(folder.is_relative_to(root) for root in roots):
            devices[folder] = _device(folder)
            if is_mount_point(folder, devices[folder]):
                found.add(stored_name(folder))
            folder = folder.parent
    return found


def is_mount_point(folder: Path, device: int | None = None) -> bool:
    """Whether another file system begins here; False for what is not there."""
    device = _device(folder) if device is None else device
    return device is not None and device != _device(folder.parent)


def _device(folder: Path) -> int | None:
    try:
        return folder.stat().st_dev
    except (OSError, ValueError):
        return None


def folders_away(
    missing: Iterable[str], here: Sequence[str], roots: Sequence[Path], mounted: Iterable[str]
) -> set[Path]:
    """Folders from which nothing may be concluded about the missing files below them.

    missing, here: paths of files; mounted: folders that were mount points before. Away is what was a mount point and is
    none now, and a root in which not one file is left.
    """
    places = {Path(path) for path in mounted if not is_mount_point(Path(path))}
    places |= {root for root in roots if not any(Path(path).is_relative_to(root) for path in here)}
    return {place for path in missing for place in places if Path(path).is_relative_to(place)}
