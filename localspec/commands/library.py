"""`verify`, `prune`, `df`, `import`: upkeep of the models on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from localspec.commands.common import (
    EXIT_FAILED,
    EXIT_MACHINE_CANNOT,
    EXIT_WRONG_USE,
    Fail,
    fail,
    gib,
    installed_ids,
    print_json,
    settings,
)
from localspec.commands.models import ProgressLines
from localspec.commands.options import json_option


@click.command()
@click.argument("model", required=False)
@json_option
def verify(model: str | None, as_json: bool) -> None:
    """Hash every file of MODEL, or of all installed models."""
    from localspec.hub.local import verify as check
    from localspec.hub.records import HubError

    config = settings()
    problems: dict[str, list[str]] = {}
    for model_id in [model] if model else installed_ids(config):
        try:
            problems[model_id] = list(check(config.paths.data_dir, model_id, lambda name: click.echo(name, err=True)))
        except HubError as error:
            fail(str(error), error.exit_code)
    if as_json:
        print_json(problems)
    for model_id, found in problems.items():
        if not as_json:
            click.echo(f"{model_id}: {'whole' if not found else '; '.join(found)}")
    if any(problems.values()):
        raise Fail("some models are damaged; remove and pull them again", EXIT_FAILED)


@click.command()
def prune() -> None:
    """Remove unfinished pulls and left-over builds that nothing touched for a while."""
    from localspec.hub.local import prune as sweep

    click.echo(f"{gib(sweep(settings().paths.data_dir))} given back")


@click.command()
@json_option
def df(as_json: bool) -> None:
    """Show what the models take and what the disk has left."""
    from localspec.hub.local import disk_use

    use = disk_use(settings().paths.data_dir)
    if as_json:
        print_json({**dataclasses.asdict(use), "total_bytes": use.total_bytes})
        return
    for model_id, size_bytes in use.models:
        click.echo(f"{model_id:32} {gib(size_bytes):>12}")
    click.echo(f"{'unfinished':32} {gib(use.partial_bytes):>12}\n{'free on this disk':32} {gib(use.free_bytes):>12}")


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", help="Id of the imported model. Default: from the file's name.")
@click.option("--compact", is_flag=True, help="Re-quantise the matrices to NVFP4; PATH may also be an installed id.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="With --compact: a text to weigh errors by and to judge by. Default: a built-in one.",
)
@click.option("--bits", type=float, help="With --compact: bits per weight to spend, 4.5 or more. Default: 4.5.")
@click.option("--feedback", is_flag=True, help="With --compact: columns make up for each other's rounding; slower.")
@click.option("--device", default="auto", help="With --compact: where to quantise: auto, cpu, cuda, cuda:1.")
@json_option
def import_(
    path: Path,
    name: str | None,
    compact: bool,
    calibration: Path | None,
    bits: float | None,
    feedback: bool,
    device: str,
    as_json: bool,
) -> None:
    """Install a .gguf file, or a folder with config.json and safetensors files, without the network.

    With --compact the copy is smaller: NVFP4 matrices, chosen by what a text needs. Its report.json says what it cost.
    """
    from localspec.hub.importing import import_path
    from localspec.hub.records import HubError

    if compact:
        _import_compact(path, name, calibration, bits, feedback, device, as_json)
        return
    if calibration is not None or bits is not None or feedback:
        fail("--calibration, --bits and --feedback belong to --compact", EXIT_WRONG_USE)
    try:
        result = import_path(path, settings().paths.data_dir, ProgressLines(), name)
    except HubError as error:
        fail(str(error), error.exit_code)
    if as_json:
        print_json({"id": result.model_id, "directory": result.directory, "files": dict(result.files)})
    else:
        click.echo(f"{result.model_id}: ready")


def _import_compact(
    path: Path,
    name: str | None,
    calibration: Path | None,
    bits: float | None,
    feedback: bool,
    device: str,
    as_json: bool,
) -> None:
    from localspec.api.types import EngineError
    from localspec.engine.build import resolve_device
    from localspec.hub.compact import CompactOptions, compact_model
    from localspec.hub.compact_report import summary_lines
    from localspec.hub.records import HubError

    if bits is not None and not 4.5 <= bits <= 16:
        fail(f"--bits is {bits:g}; NVFP4 takes 4.5, so give 4.5 to 16", EXIT_WRONG_USE)
    try:
        options = CompactOptions(
            name, calibration, bits_per_weight=bits, feedback=feedback, device=resolve_device(device)
        )
        result = compact_model(path, settings().paths.data_dir, options, ProgressLines())
    except EngineError as error:
        fail(error.message, EXIT_MACHINE_CANNOT)
    except HubError as error:
        fail(str(error), error.exit_code)
    if as_json:
        print_json({"id": result.model_id, "directory": str(result.directory), "report": dict(result.report)})
        return
    for line in (*summary_lines(result.report), f"{result.model_id}: ready"):
        click.echo(line)
