"""What the user allows the caches of conversations: sizes and daily writes, kept beside them.

Torch-free. A file that is damaged counts as none, and is said.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from localspec.storage.files import AtomicFile, make_private_directory

log = logging.getLogger(__name__)
LIMITS_NAME = "limits.json"
MOST_BYTES = 1 << 60


@dataclass(frozen=True)
class SpillLimits:
    """`cap_bytes` None takes the smaller of 100 GB and a fifth of what is free (with what is stored) at start."""

    cap_bytes: int | None = None
    min_free_bytes: int = 10_000_000_000
    daily_write_bytes: int = 100_000_000_000


@dataclass(frozen=True)
class ChosenLimits:
    """What was chosen; None where nothing was. `host_bytes`: memory for copies of conversations."""

    cap_bytes: int | None = None
    min_free_bytes: int | None = None
    daily_write_bytes: int | None = None
    host_bytes: int | None = None

    def of_disk(self) -> SpillLimits:
        """With what holds where nothing was chosen."""
        default = SpillLimits()
        return SpillLimits(
            self.cap_bytes,
            default.min_free_bytes if self.min_free_bytes is None else self.min_free_bytes,
            default.daily_write_bytes if self.daily_write_bytes is None else self.daily_write_bytes,
        )


def read_limits(folder: Path) -> ChosenLimits:
    """Of a cache directory. Never raises for what a file may hold."""
    path = folder / LIMITS_NAME
    names = [field.name for field in fields(ChosenLimits)]
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        values = {name: stored.get(name) for name in names}
    except FileNotFoundError:
        return ChosenLimits()
    except (OSError, ValueError, AttributeError) as error:
        log.warning("%s is damaged (%s): the usual limits hold", path, error)
        return ChosenLimits()
    if any(value is not None and (type(value) is not int or not 0 <= value <= MOST_BYTES) for value in values.values()):
        log.warning("%s holds impossible sizes: the usual limits hold", path)
        return ChosenLimits()
    return ChosenLimits(**values)


def write_limits(folder: Path, limits: ChosenLimits) -> None:
    """Keep them; an engine reads them when it starts. Raises OSError."""
    make_private_directory(folder)
    with AtomicFile(folder / LIMITS_NAME) as file:
        file.write(json.dumps(asdict(limits)).encode())
