"""The measurement of the bench screen: what was asked, the cells so far, the best of them, and its export.

Knows the matrix and no widget.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from localspec.api.types import Message
from localspec.chats import Stored
from localspec.matrix.bench import AS_IT_IS, OFF, BenchPlan, Cell
from localspec.matrix.prompts import Prompt
from localspec.matrix.table import Key, best_by_workload, key_of, table
from localspec.matrix.workloads import WORKLOADS
from localspec.tui.options import SettingError

THIS_CHAT = "this chat"
BUILT_IN = "built-in set"
CHAT_PROMPTS = 8
"""The last questions of a chat that are measured, each with what was said before it."""
AUTO = "auto"
MAX_DEPTH = 15
MAX_CELLS = 400


@dataclass(frozen=True)
class BenchForm:
    """What the fields of the screen hold."""

    prompts: str
    drafters: str
    depths: str = "4, 8"
    active: str = "1"
    max_tokens: str = "96"


def chat_prompts(messages: Sequence[Stored], system_prompt: str) -> tuple[Prompt, ...]:
    """The last questions of a branch, each with what was said before it."""
    said = [Message("system", system_prompt)] if system_prompt else []
    prompts = []
    for message in messages:
        if not message.content:
            continue
        said.append(Message(message.role, message.content))
        if message.role == "user":
            prompts.append(Prompt(tuple(said)))
    return tuple(prompts[-CHAT_PROMPTS:])


def read_plan(form: BenchForm, prompts: Sequence[Prompt], drafters: Sequence[str]) -> BenchPlan:
    """The plan of a form. `prompts` are those of the chat, `drafters` what the model has. Raises SettingError."""
    names = [name.strip() for name in form.drafters.split(",") if name.strip() not in ("", OFF)]
    for name in names:
        if name != AUTO and not all(part in drafters for part in name.split("+")):
            known = ", ".join(dict.fromkeys((AUTO, *drafters)))
            raise SettingError(f"There is no drafter {name!r} here: use {known}, or a chain like a+b.")
    depths = sorted(_numbers(form.depths, "depths", 1, MAX_DEPTH))
    plan = BenchPlan(
        workloads=_workloads(form.prompts, prompts),
        methods=tuple((name, depth) for name in names for depth in (depths if name != AUTO else [0])),
        active=_numbers(form.active, "active sequences", 1, 16),
        max_tokens=_numbers(form.max_tokens, "tokens", 2, 4096)[0],
    )
    n_cells = len(keys_of(plan, drafters))
    if n_cells > MAX_CELLS:
        raise SettingError(f"That makes {n_cells} cells, at most {MAX_CELLS} are measured: give fewer depths or kinds.")
    return plan


def keys_of(plan: BenchPlan, drafters: Sequence[str]) -> tuple[Key, ...]:
    """Every cell of a plan, in the order in which it is measured. A server without "off" is measured as it is."""
    methods = ((OFF, 0), *plan.methods) if OFF in drafters else ((AS_IT_IS, 0),)
    return tuple((work, *method, active) for work, active, method in product(plan.workloads, plan.active, methods))


def best_of_each(cells: Sequence[Cell]) -> frozenset[Key]:
    """The fastest cell for each kind of work and number of sequences."""
    return frozenset(map(key_of, best_by_workload(cells)))


def best_method(cells: Sequence[Cell]) -> tuple[str, int, float] | None:
    """(drafter, depth, gain) with the greatest mean gain among the methods that were measured everywhere.

    The mean is geometric: twice as fast here and half as fast there is no gain. Plain decoding gains 1. None before
    anything is measured.
    """
    gains: dict[tuple[str, int], dict[tuple[str, int], float]] = {}
    for cell in cells:
        gain = 1.0 if cell.speedup is None else cell.speedup
        gains.setdefault((cell.drafter, cell.depth), {})[cell.workload, cell.active] = gain
    n_places = max(map(len, gains.values()), default=0)
    means = {
        method: math.exp(sum(math.log(max(gain, 1e-6)) for gain in places.values()) / len(places))
        for method, places in gains.items()
        if len(places) == n_places
    }
    if not means:
        return None
    best = max(means, key=lambda method: means[method])
    return *best, means[best]


@dataclass(frozen=True)
class BenchResult:
    """Cells with what they were measured on."""

    model: str
    device: str
    cells: tuple[Cell, ...]

    def text(self) -> str:
        """A table for people."""
        return f"{self.model} on {self.device}\n\n{table(self.cells)}\n"

    def json(self) -> str:
        """The document that `localspec bench --json` prints, without its floor."""
        cells = [dataclasses.asdict(cell) for cell in self.cells]
        return json.dumps({"model": self.model, "device": self.device, "cells": cells}, indent=1) + "\n"


def _workloads(chosen: str, prompts: Sequence[Prompt]) -> dict[str, tuple[Prompt, ...]]:
    if chosen == THIS_CHAT:
        if not prompts:
            raise SettingError("This chat has no question yet: ask one first, or measure the built-in set.")
        return {THIS_CHAT: tuple(prompts)}
    names = WORKLOADS if chosen == BUILT_IN else (chosen,)
    return {name: tuple(map(Prompt.of, WORKLOADS[name])) for name in names}


def _numbers(text: str, what: str, low: int, high: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and low <= int(part) <= high for part in parts):
        raise SettingError(f"{what} must be whole numbers from {low} to {high}, with commas between; got {text!r}.")
    return tuple(dict.fromkeys(map(int, parts)))
