"""Options that several commands have, with one wording."""

from __future__ import annotations

import click

model_option = click.option("--model", "-m", help="Model id or alias. Default: what was pulled last, else the demo.")
drafter_option = click.option(
    "--drafter", default="auto", show_default=True, help="off, auto, one drafter, or a chain such as ngram+mtp."
)
depth_option = click.option("--depth", type=click.IntRange(0, 15), help="Tokens to draft a step. Default: measured.")
context_option = click.option("--context", type=click.IntRange(64), help="Context limit in tokens.")
device_option = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
learn_option = click.option(
    "--learn/--no-learn", default=True, show_default=True, help="Keep answers, never private ones, to draft from."
)
offline_option = click.option("--offline", is_flag=True, help="Never use the network.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
