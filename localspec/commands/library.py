"""`verify`, `prune`, `df`, `import`: upkeep of the models on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from localspec.commands.common import (
    EXIT_FAILED,
    EXIT_MACHINE_CANNOT,
    EXIT_WRONG_USE,
    Fail,
    drafter_ids,
    fail,
    gib,
    installed_ids,
    known_id,
    print_json,
    settings,
)
from localspec.commands.options import json_option
from localspec.commands.progress import ProgressLines


@click.command()
@click.argument("model", required=False)
@json_option
def verify(model: str | None, as_json: bool) -> None:
    """Hash every file of MODEL, or of all installed models and drafters."""
    from localspec.hub.local import verify as check
    from localspec.hub.records import HubError

    config = settings()
    problems: dict[str, list[str]] = {}
    for model_id in [known_id(config, model)] if model else [*installed_ids(config), *drafter_ids(config)]:
        place = config.paths.data_dir if model_id not in drafter_ids(config) else config.paths.drafters_dir.parent
        try:
            problems[model_id] = list(check(place, model_id, lambda name: click.echo(name, err=True)))
        except HubError as error:
            if model:
                fail(str(error), error.exit_code)
            problems[model_id] = [str(error)]  # the others are still looked at
    if as_json:
        print_json(problems)
    elif not problems:
        click.echo("no model is installed; run 'localspec chat', which fetches the demo model", err=True)
    for model_id, found in problems.items():
        if not as_json:
            click.echo(f"{model_id}: {'whole' if not found else '; '.join(found)}")
    if any(problems.values()):
        raise Fail("some models are damaged; pull them again with --force", EXIT_FAILED)


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also what was touched within the last hour.")
@json_option
def prune(everything: bool, as_json: bool) -> None:
    """Remove unfinished pulls and left-over builds that nothing touched for a while."""
    from localspec.hub.local import STALE_AFTER_S
    from localspec.hub.local import prune as sweep

    config = settings()
    places = (config.paths.data_dir, config.paths.drafters_dir.parent)
    freed_bytes = sum(sweep(place, stale_after_s=0.0 if everything else STALE_AFTER_S) for place in places)
    if as_json:
        print_json({"freed_bytes": freed_bytes})
    else:
        click.echo(f"{gib(freed_bytes)} given back")


@click.command()
@json_option
def df(as_json: bool) -> None:
    """Show what models, drafters and unfinished pulls take, and what the disk has left."""
    from localspec.hub.local import disk_use

    config = settings()
    use, drafters = disk_use(config.paths.data_dir), disk_use(config.paths.drafters_dir.parent)
    partial_bytes = use.partial_bytes + drafters.partial_bytes
    if as_json:
        document = {**dataclasses.asdict(use), "drafters": drafters.models, "partial_bytes": partial_bytes}
        print_json({**document, "total_bytes": use.total_bytes + drafters.total_bytes})
        return
    for model_id, size_bytes in (*use.models, *drafters.models):
        click.echo(f"{model_id:32} {gib(size_bytes):>12}")
    click.echo(f"{'unfinished':32} {gib(partial_bytes):>12}\n{'free on this disk':32} {gib(use.free_bytes):>12}")


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
@click.option("--budget-gib", type=float, help="With --compact: GiB that all weights may take, instead of --bits.")
@click.option(
    "--gptq",
    "--feedback",
    "feedback",
    is_flag=True,
    help="With --compact: columns make up for each other's rounding (GPTQ); better and slower.",
)
@click.option("--device", default="auto", help="With --compact: where to quantise: auto, cpu, cuda, cuda:1.")
@json_option
def import_(path: Path, name: str | None, compact: bool, as_json: bool, **how: Any) -> None:
    """Install a .gguf file, or a folder with config.json and safetensors files, without the network.

    With --compact the copy is smaller: NVFP4 matrices, chosen by what a text needs. Its report.json says what it cost.
    """
    from localspec.hub.importing import import_path
    from localspec.hub.records import HubError

    if compact:
        _import_compact(path, name, _Budget(how["bits"], how["budget_gib"]), how, as_json)
        return
    if any(how[option] for option in ("calibration", "bits", "budget_gib", "feedback")):
        fail("--calibration, --bits, --budget-gib and --gptq belong to --compact", EXIT_WRONG_USE)
    try:
        result = import_path(path, settings().paths.data_dir, ProgressLines(), name)
    except HubError as error:
        fail(str(error), error.exit_code)
    if as_json:
        print_json({"id": result.model_id, "directory": result.directory, "files": dict(result.files)})
    else:
        click.echo(f"{result.model_id}: ready")


@dataclasses.dataclass(frozen=True)
class _Budget:
    """What the matrices or all weights may take; both None: NVFP4 throughout."""

    bits: float | None
    gib: float | None

    def check(self) -> None:
        """Raises Fail for what no budget can be."""
        if self.bits is not None and self.gib is not None:
            fail("--bits and --budget-gib are two ways to say one thing; give one of them", EXIT_WRONG_USE)
        if self.bits is not None and not 4.5 <= self.bits <= 16:
            fail(f"--bits is {self.bits:g}; NVFP4 takes 4.5, so give 4.5 to 16", EXIT_WRONG_USE)
        if self.gib is not None and not 0 < self.gib < 4096:
            fail(f"--budget-gib is {self.gib:g}; give a size in GiB", EXIT_WRONG_USE)


def _import_compact(path: Path, name: str | None, budget: _Budget, how: dict[str, Any], as_json: bool) -> None:
    from localspec.api.types import EngineError
    from localspec.engine.build import resolve_device
    from localspec.hub.compact import CompactOptions, compact_model
    from localspec.hub.compact_report import summary_lines
    from localspec.hub.records import HubError

    budget.check()
    try:
        options = CompactOptions(
            name,
            how["calibration"],
            bits_per_weight=budget.bits,
            budget_bytes=None if budget.gib is None else int(budget.gib * 2**30),
            feedback=how["feedback"],
            device=resolve_device(how["device"]),
        )
        result = compact_model(path, settings().paths.data_dir, options, ProgressLines())
        packed_bytes = _keep_packed(result.directory, options.device)
    except EngineError as error:
        fail(error.message, EXIT_MACHINE_CANNOT)
    except HubError as error:
        fail(str(error), error.exit_code)
    if as_json:
        document = {"id": result.model_id, "directory": str(result.directory), "report": dict(result.report)}
        print_json({**document, "packed_bytes": packed_bytes})
        return
    packed = f"packed for the kernels: {gib(packed_bytes)}" if packed_bytes else "packed for the kernels at first start"
    for line in (*summary_lines(result.report), packed, f"{result.model_id}: ready"):
        click.echo(line)


def _keep_packed(directory: Path, device: str) -> int:
    """Write the weights as a card reads them; 0 where that is left to the first start, said on stderr."""
    from localspec.engine.packed_weights import can_pack, write_packed

    if not can_pack():
        return 0
    try:
        return write_packed(directory, device, lambda text: None)
    except (OSError, ValueError) as error:
        click.echo(f"the weights are not kept packed yet: {error}", err=True)
        return 0
