"""`localspec doctor`: what this machine can do, and what stands in the way."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from typing import TYPE_CHECKING

import click

from localspec.cache.spill import INDEX_NAME
from localspec.commands.common import catalogue, installed_ids, print_json, settings
from localspec.commands.options import json_option
from localspec.config import DEFAULT_PORT, Settings

if TYPE_CHECKING:
    from localspec.hub.catalogue import Catalogue
    from localspec.hub.doctor import SelfTest
    from localspec.hub.doctor_report import Check


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check driver, cards, memory, compiler, kernels, disk, models, chats, port and terminal. Nothing is sent anywhere.

    Exit code 0: nothing failed, though there may be warnings. 1: something failed that can be mended. 3: this machine
    cannot run what is installed.
    """
    from localspec.hub.doctor import DoctorInput, examine
    from localspec.hub.doctor_report import Report
    from localspec.hub.doctor_terminal import TerminalFacts

    config = settings()
    known, own_models = _own_models(config)
    size = shutil.get_terminal_size()
    report = examine(
        DoctorInput(
            data_dir=config.paths.data_dir,
            cache_dir=config.paths.cache_dir,
            host="127.0.0.1",
            port=DEFAULT_PORT,
            terminal=TerminalFacts(
                is_terminal=sys.stdout.isatty(),
                columns=size.columns,
                lines=size.lines,
                term=config.term,
                color_term=config.color_term,
                inside_tmux=config.in_tmux,
                program=config.term_program,
                over_ssh=config.over_ssh,
                encoding=sys.stdout.encoding or "unknown",
            ),
            wants_gpu=known is not None and _wants_gpu(config, known),
            self_test=kernel_test,
            chats_file=config.paths.chats_file,
            kv_index_file=config.paths.kv_dir / INDEX_NAME,
        )
    )
    if own_models is not None:
        report = Report((*report.checks, own_models))
    if as_json:
        print_json({"exit_code": report.exit_code, "checks": [dataclasses.asdict(check) for check in report.checks]})
    else:
        for check in report.checks:
            click.echo(f"{check.status:8} {check.name:22} {check.finding}")
            if check.advice and check.status != "ok":
                click.echo(f"{'':31} {check.advice}")
    raise SystemExit(report.exit_code)


def _own_models(config: Settings) -> tuple[Catalogue | None, Check | None]:
    """The catalogue, or what is wrong with the user's own part of it, which stops every command that needs a model."""
    from localspec.hub.doctor_report import Check
    from localspec.hub.records import HubError

    try:
        return catalogue(config), None
    except (HubError, OSError) as error:
        return None, Check("own models", "failed", str(error), "mend that file, or move it away")


def _wants_gpu(config: Settings, known: Catalogue) -> bool:
    """Whether something is installed that should run on a card only."""
    from localspec.hub.suits import meant_for_card

    try:
        return any(meant_for_card(known, name, config.paths.models_dir / name) for name in installed_ids(config))
    except OSError:
        return False  # the check of the models says which place cannot be read


def kernel_test(device: str = "cuda") -> SelfTest:
    """The kernels' own test on a device; may raise whatever a driver raises."""
    import torch

    from localspec.hub.doctor import SelfTest
    from localspec.kernels import self_test
    from localspec.kernels.table import choose

    ops, _ = choose(device)
    report = self_test.run(ops, torch.device(device))
    return SelfTest(report.summary, report.failures)
