"""`localspec bench`: what drafting gains here, always beside plain decoding."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.api.types import EngineError
from localspec.commands.common import EXIT_WRONG_USE, default_model, fail, fail_engine, make_locator, settings
from localspec.commands.options import context_option, device_option, json_option, model_option, offline_option

if TYPE_CHECKING:
    from localspec.api.types import ModelInfo
    from localspec.matrix.bench import BenchPlan, Cell
    from localspec.matrix.prompts import Prompt

MATRIX_DEPTHS, MATRIX_ACTIVE = "2,4,7,15", "1,4"
USUAL_DRAFTERS, USUAL_DEPTHS, USUAL_ACTIVE = "ngram", "4,8,15", "1"


@click.command()
@model_option
@device_option
@context_option
@offline_option
@json_option
@click.option("--matrix", is_flag=True, help="Every drafter of the model and the tuner, 1 and 4 sequences at once.")
@click.option("--drafters", help=f"Comma-separated drafters or chains. [default: {USUAL_DRAFTERS}; --matrix: all]")
@click.option("--depths", help=f"Comma-separated depths. [default: {USUAL_DEPTHS}; --matrix: {MATRIX_DEPTHS}]")
@click.option("--workloads", help="Comma-separated kinds of work. [default: all]")
@click.option("--prompts", type=click.Path(path_type=Path), help="Own prompts: .jsonl, or texts parted by ---.")
@click.option("--active", help=f"Comma-separated sequences at once. [{USUAL_ACTIVE}; --matrix: {MATRIX_ACTIVE}]")
@click.option("--max-tokens", default=96, show_default=True, type=click.IntRange(2))
@click.option("--url", help="Measure an OpenAI server at this address instead.")
@click.option("--api-key", help="Key of that server.")
@click.option("--synthetic", metavar="MODEL", help="Measure steps of MODEL at full size with random weights instead.")
@click.option("--markdown", "as_markdown", is_flag=True, help="The table as Markdown on stdout.")
@click.option("--against", type=click.Path(path_type=Path), help="Compare with the --json document of another run.")
def bench(**options: Any) -> None:
    """Measure methods, depths and kinds of work, plain decoding always among them. Table on stderr; --json and
    --markdown write to stdout."""
    if options["as_json"] and options["as_markdown"]:
        fail("--json and --markdown cannot be given together", EXIT_WRONG_USE)
    if options["synthetic"]:
        from localspec.commands.bench_synthetic import bench_synthetic

        bench_synthetic(options["synthetic"], options["device"], options["as_json"])
        return
    prompts = _prompts(options)
    earlier = _earlier(options["against"])
    try:
        document, cells = asyncio.run(_bench(options, prompts))
    except EngineError as error:
        fail_engine(error)
    from localspec.matrix.table import against, markdown

    compared = against(cells, earlier)
    if compared:
        click.echo(compared, err=True)
    if options["as_markdown"]:
        click.echo(markdown(cells))
    if options["as_json"]:
        click.echo(json.dumps(document))


async def _bench(
    options: Mapping[str, Any], prompts: Mapping[str, tuple[Prompt, ...]]
) -> tuple[dict[str, Any], list[Cell]]:
    from localspec.matrix.bench import run_bench
    from localspec.matrix.table import table

    engine = await _engine(options)
    try:
        info = await engine.wait_ready()
        plan = _plan(options, prompts, info)
        cells = await run_bench(engine, plan, lambda cell: click.echo(".", nl=False, err=True))
        click.echo(f"\n{table(cells)}", err=True)
        snapshot = engine.metrics()
        device = options["url"] or snapshot.device
        floor = None if options["url"] else _floor(device, snapshot.memory_bytes.get("weights", 0))
        document = {
            "model": info.id,
            "device": device,
            "max_tokens": plan.max_tokens,
            "cells": [dataclasses.asdict(cell) for cell in cells],
            "floor": floor,
        }
        if floor is not None:
            click.echo(_floor_line(floor, cells), err=True)
        return document, cells
    finally:
        await engine.aclose()


def _plan(options: Mapping[str, Any], prompts: Mapping[str, tuple[Prompt, ...]], info: ModelInfo) -> BenchPlan:
    """Methods in the order asked for, depths rising; `auto` has no depth of its own."""
    from localspec.matrix.bench import BenchPlan

    whole = options["matrix"]
    named = options["drafters"] or (",".join(_all_drafters(info)) if whole else USUAL_DRAFTERS)
    drafters = [name for name in named.split(",") if name != "off"]
    if not options["url"]:
        unknown = [name for name in drafters for part in name.split("+") if part not in info.drafters]
        if unknown:
            fail(f"{info.id} has no drafter {unknown[0]!r}; there are {', '.join(info.drafters)}", EXIT_WRONG_USE)
    depths = sorted(set(_numbers(options["depths"] or (MATRIX_DEPTHS if whole else USUAL_DEPTHS), 1, 15)))
    return BenchPlan(
        workloads=prompts,
        methods=tuple((name, depth) for name in drafters for depth in (depths if name != "auto" else [0])),
        active=tuple(_numbers(options["active"] or (MATRIX_ACTIVE if whole else USUAL_ACTIVE), 1, 64)),
        max_tokens=options["max_tokens"],
    )


def _all_drafters(info: ModelInfo) -> list[str]:
    """Every drafter of a model, n-grams in front of those with weights, and the tuner's own choice."""
    single = [name for name in info.drafters if name not in ("auto", "off")]
    others = [name for name in single if not name.startswith("ngram")]
    return [*single, *(f"ngram+{name}" for name in others if "ngram" in single), "auto"]


def _prompts(options: Mapping[str, Any]) -> Mapping[str, tuple[Prompt, ...]]:
    """The user's own prompts, else the built-in ones, of the workloads that were asked for."""
    from localspec.matrix.prompts import Prompt, read_prompts
    from localspec.matrix.workloads import WORKLOADS

    known: Mapping[str, tuple[Prompt, ...]]
    if options["prompts"] is None:
        known = {name: tuple(map(Prompt.of, texts)) for name, texts in WORKLOADS.items()}
    else:
        try:
            known = read_prompts(options["prompts"])
        except ValueError as error:
            fail(str(error), EXIT_WRONG_USE)
    chosen = options["workloads"].split(",") if options["workloads"] else list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        fail(f"there is no workload {unknown[0]!r}; there are {', '.join(known)}", EXIT_WRONG_USE)
    return {name: known[name] for name in chosen}


def _earlier(path: Path | None) -> dict[tuple[str, int], float]:
    """The best rate of each workload and number of active sequences in the document of another run."""
    if path is None:
        return {}
    best: dict[tuple[str, int], float] = {}
    try:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            key = str(cell["workload"]), int(cell["active"])
            best[key] = max(best.get(key, 0.0), float(cell["tok_per_s"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        fail(f"{path} is no document of `localspec bench --json`: {error}", EXIT_WRONG_USE)
    return best


async def _engine(options: Mapping[str, Any]) -> Any:
    config = settings()
    if options["url"]:
        from localspec.api.remote import RemoteEngine, RemoteSettings

        try:
            return RemoteEngine(RemoteSettings(options["url"], options["api_key"], model=options["model"]))
        except ValueError as error:
            fail(str(error), EXIT_WRONG_USE)
    from localspec.engine.build import EngineOptions
    from localspec.engine.engine import LocalEngine

    offline = options["offline"] or config.network.offline
    paths = config.paths
    place = EngineOptions(
        device=options["device"],
        context_tokens=options["context"],
        drafters_dir=paths.drafters_dir,
        checks_dir=paths.cache_dir,
        ngram_dir=paths.ngram_dir,
        ngram_learn=False,
    )
    engine = LocalEngine(make_locator(config, offline, options["device"]), place)
    engine.start(options["model"] or default_model(config))
    return engine


def _floor(device: str, weight_bytes: int) -> dict[str, float] | None:
    """The rate that reading the weights once a token would allow on this device."""
    if not device or not weight_bytes:
        return None
    import torch

    from localspec.engine.rates import read_rate_bytes_per_s

    rate = read_rate_bytes_per_s(torch.device(device))
    return {
        "read_gb_per_s": round(rate / 1e9, 2),
        "weight_bytes": weight_bytes,
        "tok_per_s": round(rate / weight_bytes, 1),
    }


def _floor_line(floor: Mapping[str, float], cells: list[Cell]) -> str:
    best = max((cell.tok_per_s for cell in cells if cell.drafter == "off" and cell.active == 1), default=0.0)
    return (
        f"plain {best:.1f} tok/s; reading the weights once a token at the measured {floor['read_gb_per_s']:.1f} GB/s "
        f"would allow {floor['tok_per_s']:.1f}"
    )


def _numbers(text: str, least: int, most: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [least - 1]
    if any(not least <= number <= most for number in numbers):
        fail(f"{text!r} is not a comma-separated list of numbers from {least} to {most}", EXIT_WRONG_USE)
    return numbers
