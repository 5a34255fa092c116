"""The first `localspec`: no model is installed yet, so one is proposed that suits this machine, and fetched.

Only a person at a terminal is asked. Pipes, scripts and the port get the demo model and a line that says what suits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from localspec.commands.common import catalogue, fail, gib, hub_settings, installed_ids
from localspec.commands.progress import ProgressLines
from localspec.config import DEMO_MODEL_ID, Settings

if TYPE_CHECKING:
    from localspec.hub.catalogue import ModelEntry


@dataclass(frozen=True)
class Proposal:
    """What to offer on this machine, best first, and what it was judged by."""

    machine: str
    choices: tuple[ModelEntry, ...]


def propose(config: Settings) -> Proposal:
    """The model that suits the card best, the next smaller one, and the demo. Raises HubError for a bad catalogue."""
    from localspec.hub.fit import proposal
    from localspec.hub.gpus import read_gpus
    from localspec.hub.layout import free_bytes
    from localspec.hub.suits import why_no_card

    known, reading = catalogue(config), read_gpus()
    reason = why_no_card(reading)
    config.paths.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    disk = f"{gib(free_bytes(config.paths.data_dir))} free on the disk"
    if reason is not None:
        return Proposal(f"no NVIDIA card to use ({reason}), {disk}", (known.demo(), *_small(config)))
    gpu = reading.gpus[0]
    best = proposal(known, gpu.total_bytes)
    smaller = [each for each in known.models if 0 < each.smallest_gpu_gib < best.smallest_gpu_gib]
    second = max(smaller, key=lambda each: each.smallest_gpu_gib, default=None)
    choices = {each.id: each for each in (best, second, known.demo()) if each is not None}
    machine = f"{gpu.name} with {gib(gpu.total_bytes)} ({gib(gpu.free_bytes)} free), {disk}"
    return Proposal(machine, tuple(choices.values()))


def _small(config: Settings) -> tuple[ModelEntry, ...]:
    """Models beside the demo that a CPU can run, smallest download first in the catalogue's order."""
    return tuple(each for each in catalogue(config).models if not each.smallest_gpu_gib and not each.demo)[:2]


def offer_model(config: Settings, offline: bool, asks: bool) -> str | None:
    """The id of a model that was chosen and fetched; None when one is installed already or nobody was asked.

    Raises Fail when the fetch does not work.
    """
    from localspec.hub.get import Wish, get
    from localspec.hub.records import HubError

    if installed_ids(config):
        return None
    try:
        offered = propose(config)
        if not asks:
            hint_for_work(offered)
            return None
        if offline:
            fail(
                f"no model is installed under {config.paths.models_dir}, and offline mode was asked for; "
                "go online once, or copy a model here with: localspec import PATH"
            )
        chosen = _ask(offered)
        wish = Wish(chosen.id, offline=offline)
        get(catalogue(config), wish, config.paths.data_dir, hub_settings(config), ProgressLines())
    except HubError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        fail(f"{error.filename or config.paths.data_dir} cannot be written: {error.strerror}")
    return chosen.id


def hint_for_work(offered: Proposal) -> None:
    """One line on stderr when this machine could do more than the demo."""
    best = offered.choices[0]
    if best.id != DEMO_MODEL_ID:
        click.echo(f"This machine suits {best.id}: localspec pull {best.id}", err=True)


def _ask(offered: Proposal) -> ModelEntry:
    click.echo(f"No model is installed yet. This machine: {offered.machine}.\n")
    for number, entry in enumerate(offered.choices, start=1):
        click.echo(f"  {number}  {entry.id:24} {entry.title}{_about(entry)}")
    click.echo("\nOther models: localspec ls. What of a model fits a card: localspec show MODEL --fit.")
    answer = click.prompt("Which one to fetch", type=click.IntRange(1, len(offered.choices)), default=1)
    return offered.choices[answer - 1]


def _about(entry: ModelEntry) -> str:
    if entry.demo:
        return " (a demo, 94 MiB, runs anywhere)"
    size = f", about {entry.download_gb:g} GB" if entry.download_gb else ""
    return (
        f" (for cards from {entry.smallest_gpu_gib} GB{size})" if entry.smallest_gpu_gib else f" (runs on a CPU{size})"
    )
