"""Progress of a pull for people: one moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from localspec.commands.common import gib

if TYPE_CHECKING:
    from localspec.hub.records import PullProgress

PROGRESS_LINE_EVERY_S = 2.0


class ProgressLines:
    """Progress on stderr: one moving line on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._moving = sys.stderr.isatty()
        self._last_s = 0.0
        self._last_stage = ""

    def __call__(self, progress: PullProgress) -> None:
        now = time.monotonic()
        new_stage = progress.stage != self._last_stage or progress.stage in ("note", "done")
        if not new_stage and now - self._last_s < (0.1 if self._moving else PROGRESS_LINE_EVERY_S):
            return
        self._last_s, self._last_stage = now, progress.stage
        text = progress.message
        if progress.total_bytes:
            share = progress.done_bytes * 100 // progress.total_bytes
            text += f" · {share}% of {gib(progress.total_bytes)}"
            if progress.rate_bytes_per_s > 0:
                text += f" · {gib(int(progress.rate_bytes_per_s))}/s"
            if progress.eta_s is not None:
                text += f" · {in_words(progress.eta_s)} left"
        if self._moving and not new_stage:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
        else:
            click.echo(f"\r\x1b[K{text}" if self._moving else text, err=True)


def in_words(seconds: float) -> str:
    """A time for people: seconds, minutes, or hours and minutes."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
