"""`localspec doctor`: what this machine can do, and what stands in the way."""

from __future__ import annotations

import dataclasses
import shutil
import sys

import click

from localspec.commands.common import installed_ids, print_json, settings
from localspec.commands.options import json_option
from localspec.config import DEFAULT_PORT, DEMO_MODEL_ID


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check driver, cards, memory, disk, models, port and terminal. Exit code 3: this machine cannot."""
    from localspec.hub.doctor import DoctorInput, TerminalFacts, examine

    config = settings()
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
            ),
            wants_gpu=any(model_id != DEMO_MODEL_ID for model_id in installed_ids(config)),
        )
    )
    if as_json:
        print_json({"exit_code": report.exit_code, "checks": [dataclasses.asdict(check) for check in report.checks]})
    else:
        for check in report.checks:
            click.echo(f"{check.status:8} {check.name:22} {check.finding}")
            if check.advice:
                click.echo(f"{'':31} {check.advice}")
    raise SystemExit(report.exit_code)
