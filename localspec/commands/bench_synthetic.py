"""`localspec bench --synthetic MODEL`: a model's full size with random weights, without its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from localspec.commands.common import EXIT_MACHINE_CANNOT, EXIT_WRONG_USE, catalogue, fail, fail_engine, settings

if TYPE_CHECKING:
    from localspec.config import Settings


def bench_synthetic(model: str, device: str, as_json: bool) -> None:
    """Measure and print: sections on stderr as they end; with --json one line of JSON on stdout."""
    import torch

    from localspec.api.types import EngineError
    from localspec.engine.synthetic_bench import SyntheticBench, plan_for

    config = synthetic_config(settings(), model)
    click.echo(f"{model}: random weights at full size; what the model says means nothing", err=True)
    try:
        plan = plan_for(model, config, device)
        document = SyntheticBench(plan, lambda text: click.echo(text, err=True)).run()
    except EngineError as error:
        fail_engine(error)
    except torch.OutOfMemoryError:
        fail(f"{model} does not fit this card at full size", EXIT_MACHINE_CANNOT)
    except ValueError as error:
        fail(str(error))
    if as_json:
        click.echo(json.dumps(document))
    if document["failed"]:
        fail(f"not measured: {', '.join(document['failed'])}")


def synthetic_config(config: Settings, model: str) -> Mapping[str, Any]:
    """Shapes of a catalogue model: from its files where it is installed, else as they are known. Fails by name."""
    from localspec.hub.layout import read_json
    from localspec.hub.records import HubError
    from localspec.runner.synthetic import CONFIGS, known_config

    try:
        model_id = catalogue(config).find(model).id
        folder = config.paths.models_dir / model_id
        if (folder / "localspec.json").is_file():
            return {key: value for key, value in read_json(folder / "config.json").items() if "quantization" not in key}
    except HubError as error:
        fail(str(error), EXIT_WRONG_USE)
    found = known_config(model_id)
    if found is None:
        fail(
            f"the sizes of {model_id} are not known here; pull it, or name one of {', '.join(CONFIGS)}", EXIT_WRONG_USE
        )
    return found
