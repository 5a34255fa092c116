"""Names for who owns an unsent prompt: an interface of a process, known by when the process began."""

from __future__ import annotations

import os
import uuid

import psutil

_SAME_START_S = 5.0
"""Between two readings of one process's start, when the clock of the machine was set meanwhile."""


def new_owner() -> str:
    """A name that no other interface has, of this process or another."""
    return f"{os.getpid()}:{psutil.Process().create_time():.0f}:{uuid.uuid4().hex}"


def has_gone(owner: str) -> bool:
    """Whether the process of this name has ended. A number given to another process anew is told by its start."""
    number, _, rest = owner.partition(":")
    began = rest.partition(":")[0]
    if not (number.isdecimal() and began.isdecimal()):
        return True
    try:
        return abs(psutil.Process(int(number)).create_time() - float(began)) > _SAME_START_S
    except psutil.AccessDenied:
        return False
    except (psutil.Error, OverflowError, ValueError):
        return True
