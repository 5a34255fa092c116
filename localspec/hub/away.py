"""Whether files are gone or only away for now, as those of a disk that is not mounted are.

Knows paths, and which folders were file systems of their own before; knows no tables. A folder that stands empty where
there was text may be the mount point of a disk that is not there: nothing is concluded from it. Costs grow with the
number of files, not with that of the paths that were given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from localspec.hub.corpus import stored_name


def is_below(path: str, folders: Collection[Path]) -> bool:
    """Whether a path is one of the folders or lies in one. folders: a set, if there may be many."""
    return any(place in folders for place in (Path(path), *Path(path).parents))


def mount_points_above(files: Iterable[Path], roots: Collection[Path]) -> set[str]:
    """Folders from the roots down to the files in which another file system begins. roots: a set."""
    found: set[str] = set()
    seen: set[Path] = set()
    for parent in {file.parent for file in files}:
        chain = [parent]
        while chain[-1] not in roots and chain[-1].parent != chain[-1]:
            chain.append(chain[-1].parent)
        if chain[-1] in roots:
            for folder in set(chain) - seen:
                seen.add(folder)
                if is_mount_point(folder):
                    found.add(stored_name(folder))
    return found


def is_mount_point(folder: Path) -> bool:
    """Whether another file system begins here; False for what is not there."""
    device = _device(folder)
    return device is not None and device != _device(folder.parent)


def _device(folder: Path) -> int | None:
    try:
        return folder.stat().st_dev
    except (OSError, ValueError):
        return None


def folders_away(
    missing: Iterable[str], here: Iterable[str], roots: Iterable[Path], mounted: Iterable[str]
) -> frozenset[Path]:
    """Folders from which nothing may be concluded about the missing files below them.

    missing, here: paths of files; mounted: folders that were mount points before. Away is what was a mount point and is
    none now, and a root in which not one file is left.
    """
    present: set[Path] = set()
    for path in here:
        for place in (Path(path), *Path(path).parents):
            if place in present:
                break
            present.add(place)
    places = {Path(path) for path in mounted if not is_mount_point(Path(path))} | set(roots).difference(present)
    return frozenset(place for path in missing for place in (Path(path), *Path(path).parents) if place in places)
