"""Options that several commands have, with one wording."""

from __future__ import annotations

import math
import re
from pathlib import Path

import click

import localspec


def check_drafter(context: click.Context, option: click.Parameter, value: str) -> str:
    """Every part of a chain is a file of `drafters/`; found by name, so that nothing heavy is imported."""
    known = ["auto", *sorted(p.stem for p in Path(localspec.__path__[0], "drafters").glob("[a-z]*.py"))]
    unknown = [part for part in value.split("+") if part not in known]
    if unknown:
        raise click.BadParameter(f"there is no drafter {unknown[0]!r}; there are {', '.join(known)}")
    return value


def check_device(context: click.Context, option: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", value):
        raise click.BadParameter(f"{value!r} is no device; give auto, cpu, cuda or cuda:N")
    return value


def check_number(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no finite number")
    return value


model_option = click.option("--model", "-m", help="Model id or alias. Default: what was pulled last, else the demo.")
drafter_option = click.option(
    "--drafter",
    default="auto",
    show_default=True,
    callback=check_drafter,
    help="off, auto, one drafter, or a chain such as ngram+mtp.",
)
depth_option = click.option("--depth", type=click.IntRange(0, 15), help="Tokens to draft a step. Default: measured.")
context_option = click.option("--context", type=click.IntRange(64), help="Context limit in tokens.")
kv_cache_option = click.option(
    "--kv-cache",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "fp8", "bf16"]),
    help="How keys and values are kept. auto: fp8 on a card if the model's keys are normed, else as computed.",
)
fp4_prompts_option = click.option(
    "--experimental-fp4-prompts",
    "fp4_prompts",
    is_flag=True,
    help="On RTX 50 and RTX PRO Blackwell: multiply rows of prompts in FP4 where weights are NVFP4. Changes answers.",
)
device_option = click.option(
    "--device", default="auto", show_default=True, callback=check_device, help="auto, cpu, cuda or cuda:N."
)
learn_option = click.option(
    "--learn/--no-learn", default=True, show_default=True, help="Keep answers, never private ones, to draft from."
)
offline_option = click.option("--offline", is_flag=True, help="Never use the network.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
