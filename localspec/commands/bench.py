"""`localspec bench`: what drafting gains here, always beside plain decoding."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import click

from localspec.api.types import EngineError
from localspec.commands.common import default_model, fail, fail_engine, make_locator, settings
from localspec.commands.options import context_option, device_option, json_option, model_option, offline_option


@click.command()
@model_option
@device_option
@context_option
@offline_option
@json_option
@click.option("--drafters", default="ngram", show_default=True, help="Comma-separated drafters or chains.")
@click.option("--depths", default="4,8,15", show_default=True, help="Comma-separated depths.")
@click.option("--workloads", help="Comma-separated kinds of work. Default: all.")
@click.option("--active", default="1", show_default=True, help="Comma-separated numbers of concurrent sequences.")
@click.option("--max-tokens", default=96, show_default=True, type=click.IntRange(2))
@click.option("--url", help="Measure an OpenAI server at this address instead.")
def bench(**options: Any) -> None:
    """Measure methods, depths and kinds of work. Table on stderr; with --json one line of JSON on stdout."""
    try:
        document = asyncio.run(_bench(options))
    except EngineError as error:
        fail_engine(error)
    if options["as_json"]:
        import json

        click.echo(json.dumps(document))


async def _bench(options: dict[str, Any]) -> dict[str, Any]:
    from localspec.matrix.bench import BenchPlan, Cell, run_bench
    from localspec.matrix.table import table
    from localspec.matrix.workloads import WORKLOADS

    engine = await _engine(options)
    chosen = (options["workloads"] or ",".join(WORKLOADS)).split(",")
    unknown = [name for name in chosen if name not in WORKLOADS]
    if unknown:
        fail(f"there is no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}", 2)
    try:
        info = await engine.wait_ready()
        drafters = [name for name in options["drafters"].split(",") if name != "off"]
        plan = BenchPlan(
            workloads={name: WORKLOADS[name] for name in chosen},
            methods=tuple((name, depth) for name in drafters for depth in _numbers(options["depths"])),
            active=tuple(_numbers(options["active"])),
            max_tokens=options["max_tokens"],
        )
        cells: list[Cell] = await run_bench(engine, plan, lambda cell: click.echo(".", nl=False, err=True))
        click.echo(f"\n{table(cells)}", err=True)
        snapshot = engine.metrics()
        document = {
            "model": info.id,
            "device": snapshot.device,
            "cells": [dataclasses.asdict(cell) for cell in cells],
            "floor": _floor(snapshot.device, snapshot.memory_bytes.get("weights", 0)),
        }
        if document["floor"] is not None:
            click.echo(_floor_line(document["floor"], cells), err=True)
        return document
    finally:
        await engine.aclose()


async def _engine(options: dict[str, Any]) -> Any:
    config = settings()
    if options["url"]:
        from localspec.api.remote import RemoteEngine, RemoteSettings

        return RemoteEngine(RemoteSettings(options["url"]))
    from localspec.engine.build import EngineOptions
    from localspec.engine.engine import LocalEngine

    offline = options["offline"] or config.network.offline
    engine = LocalEngine(make_locator(config, offline), EngineOptions(options["device"], options["context"]))
    engine.start(options["model"] or default_model(config))
    return engine


def _floor(device: str, weight_bytes: int) -> dict[str, float] | None:
    """The rate that reading the weights once a token would allow on this device; None for a remote engine."""
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


def _floor_line(floor: dict[str, float], cells: Any) -> str:
    plain = [cell.tok_per_s for cell in cells if cell.drafter == "off" and cell.active == 1]
    best = max(plain, default=0.0)
    return (
        f"plain {best:.1f} tok/s; reading the weights once a token at the measured {floor['read_gb_per_s']:.1f} GB/s "
        f"would allow {floor['tok_per_s']:.1f}"
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        fail(f"{text!r} is not a comma-separated list of numbers", 2)
