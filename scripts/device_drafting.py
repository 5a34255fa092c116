#!/usr/bin/env python3
"""What drafting gains at the 27B's shapes: plain against MTP at every depth, in one run, and one JSON line.

Weights are random and acceptance is synthetic: drafts are accepted at given rates whatever the model says, on the same
path as any other step. Every answer runs once before it is timed, so that compilation and capture are over. Drafting
time, whose bar is 1.8 times its bytes at the measured rate, is all that passes before verification begins; what it
adds to a step stands beside it, as the marks of a step that proposes nothing lie apart too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from localspec.api.types import Sampling
from localspec.core.records import MAX_SLOTS, Request
from localspec.drafters import Drafter, DrafterSetup, drafter_module
from localspec.engine.build import Assembled, EngineOptions, assemble, resolve_device
from localspec.engine.rates import read_rate_bytes_per_s
from localspec.engine.synthetic_decode import decode, decode_all, identity, made_up_prompt
from localspec.engine.tuner import Tuner
from localspec.kernels.ops import Ops
from localspec.kernels.table import choose
from localspec.models import Model, architecture
from localspec.runner.synthetic import QWEN3_5_27B, SyntheticCheckpoint
from localspec.scheduler.sequence import Sequence as Scheduled

PUBLISHED_MTP = (0.917, 0.837, 0.648, 0.538, 0.451, 0.348)
MEAN_LENGTH_3_2 = (0.90, 0.75, 0.55)
"""Three drafts of which 2.2 stand: 3.2 tokens a step."""
BARS = {"mtp_over_plain": 2.5, "tok_per_s_at_length_3_2": 450.0, "draft_over_floor": 1.8}


@dataclass(frozen=True)
class Plan:
    """What to measure. read_bytes: of the buffer that the read rate is measured on."""

    config: Mapping[str, Any]
    device: str = "cuda"
    depths: tuple[int, ...] = (3, 6, 5, 4, 7, 2, 1)
    prompt_tokens: int = 2000
    max_tokens: int = 400
    identity_tokens: int = 48
    draft_head_rows: int = 32768
    long_prompt_tokens: int = 33000
    read_bytes: int = 8 << 30
    repeats: int = 2


def measure(plan: Plan, keep: Callable[[dict[str, Any]], None] = lambda document: None) -> dict[str, Any]:
    """The whole document. Rates are tokens per second of the best repeat, milliseconds are the device's own.

    What matters most comes first; `keep` is given the document as it grows.
    """
    run = _Run(plan, time.perf_counter(), keep)
    run.synthetic()
    run.at_length_3_2()
    run.without_drafters()
    run.many()
    run.identity()
    return run.document


class _Run:
    """One document that grows section by section."""

    def __init__(self, plan: Plan, started_s: float, keep: Callable[[dict[str, Any]], None]) -> None:
        self._plan, self._started_s, self._keep = plan, started_s, keep
        ops, _ = choose(resolve_device(plan.device))
        self._ops = ops
        self._read_rate = read_rate_bytes_per_s(ops.device, plan.read_bytes)
        with torch.inference_mode():
            self._model = architecture("qwen3_5").load(plan.config, SyntheticCheckpoint(plan.config, ops.device), ops)
            mtp = _mtp(plan, ops, self._model)
        self._drafters = {"mtp": mtp, "ngram": drafter_module("ngram").build(_setup(plan, ops, self._model))}
        # Of one draft: the block once, and its head.
        self._draft_bytes = sum(weight.read_bytes for weight in packed_weights(mtp))
        self.document: dict[str, Any] = {
            "device": torch.cuda.get_device_name(ops.device) if ops.device.type == "cuda" else "cpu",
            "weights": "random",
            "acceptance": "synthetic",
            "read_gb_per_s": round(self._read_rate / 1e9, 1),
            "target_gb_per_token": round(self._model.read_bytes_per_token / 1e9, 4),
            "draft_gb_per_token": round(self._draft_bytes / 1e9, 4),
            "mtp": {},
            "figures": {},
            "bars": BARS,
        }
        self._say("loaded", self.document["draft_gb_per_token"])

    def synthetic(self) -> None:
        """MTP at every depth and plain steps at the published rates, and which kernels drafting takes."""
        plan, by_depth = self._plan, self.document["mtp"]
        with running(self._model, self._ops, self._drafters, plan, PUBLISHED_MTP) as parts:
            for depth in plan.depths:
                by_depth[str(depth)] = found = timed(parts, plan, "mtp", depth)
                self._say(f"mtp {depth}", found)
                if depth == plan.depths[0] and self._ops.device.type == "cuda":
                    self.document["kernels"] = proposal_kernels(parts, plan, depth)
                    self._say("kernels", self.document["kernels"])
            self.document["plain"] = timed(parts, plan, "off", None)
            self._say("plain", self.document["plain"])
            plain = self.document["plain"]
            for depth in plan.depths:
                found, floor_ms = by_depth[str(depth)], depth * self._draft_bytes / self._read_rate * 1e3
                found["over_plain"] = round(found["tok_per_s"] / plain["tok_per_s"], 3)
                found["draft_over_floor"] = round(found["draft_ms"] / floor_ms, 3)
                # The same marks of a plain step, which proposes nothing, lie apart too.
                found["added_over_floor"] = round((found["draft_ms"] - plain["draft_ms"]) / floor_ms, 3)
            self._figure("mtp_over_plain", max(found["over_plain"] for found in by_depth.values()))
            self._figure("draft_over_floor", max(found["draft_over_floor"] for found in by_depth.values()))

    def at_length_3_2(self) -> None:
        """Three drafts of which 2.2 stand."""
        with running(self._model, self._ops, self._drafters, self._plan, MEAN_LENGTH_3_2) as parts:
            found = timed(parts, self._plan, "mtp", min(3, max(self._plan.depths)))
        self.document["mtp_at_length_3_2"] = found
        self._figure("tok_per_s_at_length_3_2", found["tok_per_s"])
        self._say("mtp at length 3.2", found)

    def without_drafters(self) -> None:
        """What `off` costs where drafters are loaded."""
        with running(self._model, self._ops, {}, self._plan, PUBLISHED_MTP) as parts:
            found = timed(parts, self._plan, "off", None)
        self.document["plain_without_drafters"] = found
        rate = self.document["plain"]["tok_per_s"]
        self._figure("off_with_drafters_over_without", round(rate / found["tok_per_s"], 4))
        self._say("plain without drafters", found)

    def many(self) -> None:
        """Four sequences: plain, each with its share of the rows, and with rows shared by confidence."""
        found: dict[str, dict[str, float]] = {}
        with running(self._model, self._ops, self._drafters, self._plan, PUBLISHED_MTP) as parts:
            for name, method, depth in (("plain", "off", None), ("own rows", "mtp", 3)):
                found[name] = timed_together(parts, self._plan, method, depth)
            parts.scheduler.policy = SharedRows(parts.tuner, ())
            found["shared rows"] = timed_together(parts, self._plan, "auto", None)
        self.document["four_sequences"] = found
        self._say("four sequences", found)

    def identity(self) -> None:
        """Drafted answers against plain ones, token by token: rows shared on the device, and beyond 32k."""
        plan = self._plan
        with running(self._model, self._ops, self._drafters, plan, ()) as parts:
            parts.scheduler.policy = SharedRows(parts.tuner, (16, 12, 8, 5))
            self.document["identity_shared_rows"] = identity(parts, [("auto", None)], plan.identity_tokens)
        self._say("identity, shared rows", self.document["identity_shared_rows"])
        long = replace(plan, prompt_tokens=plan.long_prompt_tokens)
        drafters: dict[str, Drafter] = {"mtp": _mtp(long, self._ops, self._model)}
        drafters["ngram"] = drafter_module("ngram").build(_setup(long, self._ops, self._model))
        prompts = (plan.long_prompt_tokens, plan.long_prompt_tokens + 77)
        with running(self._model, self._ops, drafters, long, ()) as parts:
            methods = [("mtp", 1), ("mtp", 7), ("ngram+mtp", 7)]
            self.document["identity_long"] = identity(parts, methods, plan.identity_tokens, prompts)
        self._say("identity, long", self.document["identity_long"])

    def _figure(self, name: str, value: float) -> None:
        self.document["figures"][name] = value

    def _say(self, what: str, found: Any) -> None:
        self.document["seconds"] = round(time.perf_counter() - self._started_s, 1)
        print(f"{self.document['seconds']} s, {what}: {json.dumps(found)}", flush=True)
        self._keep(self.document)


class SharedRows:
    """Asks for more drafts than there are rows, whatever was measured. budgets: rows of the steps, in turn; none: what
    the engine would take."""

    def __init__(self, tuner: Tuner, budgets: Sequence[int]) -> None:
        self._tuner, self._turns = tuner, itertools.cycle(budgets) if budgets else None

    def choose(self, sequence: Scheduled, num_active: int) -> tuple[str, int]:
        """Seven drafts of MTP, where the request leaves it open."""
        arm = self._tuner.choose(sequence, num_active)
        return ("mtp", 7) if sequence.request.drafter == "auto" else arm

    def wants_all(self, sequence: Scheduled) -> bool:
        """Only what was asked for."""
        return sequence.request.drafter != "auto"

    def row_budget(self, num_active: int, wanted_rows: int) -> int | None:
        """Always fewer than are asked for."""
        if self._turns is None:
            return self._tuner.row_budget(num_active, wanted_rows)
        return max(next(self._turns), num_active) if num_active < wanted_rows else None


def timed_together(parts: Assembled, plan: Plan, drafter: str, depth: int | None) -> dict[str, float]:
    """Tokens per second of four sequences in all, the best of some repeats, and tokens of a window."""
    best: dict[str, float] = {}
    for repeat in range(1 + plan.repeats):
        requests = [
            Request("", made_up_prompt(parts, plan.prompt_tokens // 4, seed), Sampling(), seed, plan.max_tokens, (),
                    drafter=drafter, depth=depth)
            for seed in range(MAX_SLOTS)
        ]  # fmt: skip
        all_seen = decode_all(parts, requests)
        rate = sum(len(seen.token_ids) for seen in all_seen) / max(seen.seconds for seen in all_seen)
        if repeat and rate > best.get("tok_per_s", 0.0):
            best = {"tok_per_s": rate, "tokens_per_window": all_seen[0].figures()["tokens_per_step"]}
    return {name: round(value, 4) for name, value in best.items()}


def proposal_kernels(parts: Assembled, plan: Plan, depth: int, max_tokens: int = 80) -> list[dict[str, Any]]:
    """Device kernels of a proposal in their order, from an answer that runs under the profiler: see `timeline`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        decode(parts, plan.prompt_tokens, max_tokens, "mtp", depth)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return timeline(json.loads(path.read_text())["traceEvents"])


def timeline(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Medians over all proposals of the usual length: where each kernel starts and how long it runs, microseconds.

    A proposal runs from taking the rows that waited to the verify step's own rows. Under dependent launch a kernel's
    time holds its wait for the one before, so that starts and ends say more than durations.
    """
    kernels = sorted((each for each in events if each.get("cat") == "kernel"), key=lambda each: float(each["ts"]))
    proposals: list[list[Mapping[str, Any]]] = []
    running: list[Mapping[str, Any]] | None = None
    for kernel in kernels:
        if "take_rows" in kernel["name"]:
            running = []
        elif running is not None and "window_rows" in kernel["name"]:
            proposals.append(running)
            running = None
        if running is not None:
            running.append(kernel)
    if not proposals:
        return []
    usual = statistics.mode(len(each) for each in proposals)
    same = [each for each in proposals if len(each) == usual]
    return [
        {
            "kernel": str(same[0][index]["name"])[:60],
            "start_us": round(statistics.median(each[index]["ts"] - each[0]["ts"] for each in same), 2),
            "us": round(statistics.median(each[index]["dur"] for each in same), 2),
        }
        for index in range(usual)
    ]


def timed(parts: Assembled, plan: Plan, drafter: str, depth: int | None) -> dict[str, float]:
    """The best of some repeats of one answer, after the same one untimed."""
    best: dict[str, float] = {}
    for repeat in range(1 + plan.repeats):
        found = decode(parts, plan.prompt_tokens, plan.max_tokens, drafter, depth).figures()
        if repeat and found["tok_per_s"] > best.get("tok_per_s", 0.0):
            best = found
    best["step_ms"] = best["draft_ms"] + best["verify_ms"]
    return {name: round(value, 4) for name, value in best.items()}


@contextmanager
def running(
    model: Model, ops: Ops, drafters: dict[str, Drafter], plan: Plan, rates: Sequence[float]
) -> Iterator[Assembled]:
    """An engine whose loop runs; its memory is free again afterwards."""
    limit = min(model.max_context_tokens, plan.prompt_tokens + plan.max_tokens + 1024)
    options = EngineOptions(device=str(ops.device), synthetic_acceptance=tuple(rates))
    gc.collect()  # The engine before this one holds itself in circles.
    parts = assemble(model, ops, limit, drafters, options)
    parts.loop.start()
    try:
        yield parts
    finally:
        parts.loop.stop()
        del parts
        gc.collect()
        if ops.device.type == "cuda":
            torch.cuda.empty_cache()


def packed_weights(drafter: Any) -> list[Any]:
    """Every packed weight that the drafter reads for a draft, the target's own head included if it uses that."""
    network = drafter._network
    found: dict[int, Any] = {}
    _collect(network, found, depth=0)
    if network.draft_ids is None:
        _collect(network._model.head, found, depth=0)
    return list(found.values())


def _collect(item: Any, found: dict[int, Any], depth: int) -> None:
    if hasattr(item, "read_bytes") and hasattr(item, "shape"):
        found[id(item)] = item
    elif depth < 4 and type(item).__module__.startswith("localspec.") and not hasattr(item, "vocab_size"):
        for value in vars(item).values() if hasattr(item, "__dict__") else ():
            for part in value if isinstance(value, (list, tuple)) else (value,):
                _collect(part, found, depth + 1)


def _setup(plan: Plan, ops: Ops, model: Model, **more: Any) -> DrafterSetup:
    return DrafterSetup(ops, model, MAX_SLOTS, plan.prompt_tokens + plan.max_tokens + 1024, **more)


def _mtp(plan: Plan, ops: Ops, model: Model) -> Drafter:
    rows = min(plan.draft_head_rows, model.vocab_size)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(plan.config))
        checkpoint = SyntheticCheckpoint(plan.config, ops.device, seed=1, draft_head_rows=rows)
        return drafter_module("mtp").build(_setup(plan, ops, model, checkpoint=checkpoint, folder=Path(name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("scripts/results/h200_drafting.json"))
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    config = json.loads(json.dumps(QWEN3_5_27B))
    config["text_config"]["num_hidden_layers"] = arguments.layers
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(document: dict[str, Any]) -> None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")

    document = measure(Plan(config, device=arguments.device), keep)
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
