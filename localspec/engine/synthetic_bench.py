"""A model at full size with random weights, measured in one run: rates of the device, steps, prefill, drafting, memory.

Every figure is of random weights, and where acceptance is made up it says so. Sections run on even if one before them
failed, and say what failed; those that a time limit leaves no time for are named.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from localspec.api.types import EngineError
from localspec.core.records import GRAPH_ROWS, MAX_SLOTS
from localspec.drafters import Drafter, DrafterSetup, drafter_module
from localspec.engine.build import EngineOptions, assemble, cache_dtype, resolve_device
from localspec.engine.memory_budget import context_limit, prepare_allocator
from localspec.engine.rates import read_rate_bytes_per_s
from localspec.engine.step_bench import StepBench, StepTime, matmul_rate_flop_per_s, step_table
from localspec.engine.step_profile import group_table, verdict
from localspec.engine.synthetic_decode import Decoded, decode, identity
from localspec.engine.warm_up import warm_up
from localspec.hub.gpus import read_gpus
from localspec.kernels import self_test
from localspec.kernels.table import choose
from localspec.models import Model, architecture
from localspec.runner.synthetic import SyntheticCheckpoint, tensor_shapes

log = logging.getLogger(__name__)
PUBLISHED_MTP = (0.917, 0.837, 0.648, 0.538, 0.451, 0.348)
"""Share of drafts of Qwen's own MTP block that were accepted, by position, as published for 27B."""
GIB = 2**30
DRAFT_HEAD_ROWS = 32768
CPU_BYTES_PER_VALUE = 4.5
"""The CPU back end computes in float32, with some air."""
MARGIN_TOKENS = 4096
"""Of the context limit beyond the longest one measured."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class SyntheticPlan:
    """What to measure. `fits`: contexts that must fit an amount of memory, (tokens, bytes), on a card."""

    model: str
    config: Mapping[str, Any]
    device: str = "auto"
    kv_cache: str = "auto"
    contexts: tuple[int, ...] = (2048, 32768, 131072)
    prefills: tuple[int, ...] = (2048, 8192, 32768)
    chunk_tokens: int | None = None
    """Of a prompt that are read at once; None: as many as the engine would."""
    repeats: int = 20
    depths: tuple[int, ...] = (1, 3, 5)
    decode_tokens: int = 400
    decode_prompt_tokens: int = 2000
    fits: tuple[tuple[int, int], ...] = ((32768, int(17.5 * GIB)), (131072, int(20.5 * GIB)))
    self_test_s: float = 60.0
    identity: bool = False
    """Also compare drafted answers with plain ones, token by token."""
    read_bytes: int = 8 << 30
    matmul_size: int = 8192
    time_limit_s: float = 480.0


def plan_for(model: str, config: Mapping[str, Any], device: str, kv_cache: str = "auto") -> SyntheticPlan:
    """What is measured on a device: on a CPU less of everything. Raises EngineError where its memory is too small."""
    plan = SyntheticPlan(model, config, device, kv_cache)
    if resolve_device(device) != "cpu":
        return plan
    needed_bytes = int(CPU_BYTES_PER_VALUE * sum(map(math.prod, tensor_shapes(config).values())))
    available_bytes = psutil.virtual_memory().available
    if needed_bytes > available_bytes:
        raise EngineError(
            "machine_cannot",
            f"{model} at full size takes {needed_bytes / 1e9:.0f} GB of this computer's memory, "
            f"{available_bytes / 1e9:.0f} are free; measure a smaller model, or one on a card.",
        )
    sizes: dict[str, Any] = {"contexts": (512, 2048), "prefills": (512,), "repeats": 5, "chunk_tokens": 256}
    sizes |= {"decode_tokens": 64, "decode_prompt_tokens": 128, "read_bytes": 1 << 30, "matmul_size": 1024}
    return replace(plan, **sizes)


@dataclass
class SyntheticBench:
    """One run. `document` grows section by section and is plain JSON."""

    plan: SyntheticPlan
    say: Say = lambda text: None
    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = time.perf_counter()
        prepare_allocator(device := resolve_device(self.plan.device))
        self._ops, _ = choose(device)
        normed = any(name.endswith("self_attn.k_norm.weight") for name in tensor_shapes(self.plan.config))
        self._ops.cache_dtype = cache_dtype(self._ops, self.plan.kv_cache, normed)
        self._rates: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """All sections; returns the document. Raises ValueError where not even the model can be made."""
        device = self._ops.device
        name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        )
        self.document |= {"model": self.plan.model, "weights": "random", "device": name, "failed": [], "skipped": []}
        self.document |= {"kv_cache": str(self._ops.cache_dtype).removeprefix("torch."), "torch": torch.__version__}
        self._section("self_test", self._test_kernels)
        self._section("rates", self._measure_rates)
        if not self._rates:
            raise ValueError("the device's own rates cannot be measured, so there is nothing to compare with")
        model, drafters = self._load()
        if device.type == "cuda":
            for tokens, limit_bytes in self.plan.fits:
                self._section(f"memory_{tokens}", partial(self._fits, model, drafters, tokens, limit_bytes))
        self._measure_steps(model, drafters)
        gc.collect()
        self._measure_decoding(model, drafters)
        self.document["wall_s"] = round(time.perf_counter() - self._started, 1)
        return self.document

    def _section(self, name: str, function: Callable[[], Any]) -> None:
        started = time.perf_counter()
        if started - self._started > self.plan.time_limit_s:
            self.document["skipped"].append(name)
            return
        try:
            self.document[name] = function()
            self.say(f"{name}: {time.perf_counter() - started:.1f} s  {json.dumps(self.document[name])[:600]}")
        except Exception as error:
            log.exception("section %s failed", name)
            self.document["failed"].append(name)
            self.say(f"{name} failed: {type(error).__name__}: {error}")

    def _test_kernels(self) -> dict[str, Any]:
        report = self_test.run(self._ops, self._ops.device, self.plan.self_test_s)
        self.say("\n".join(report.lines()))
        if report.failures:
            raise RuntimeError(report.summary)
        return {"summary": report.summary, "error": {each.group: each.error for each in report.results}}

    def _measure_rates(self) -> dict[str, float]:
        device, plan = self._ops.device, self.plan
        self._rates = {
            "read": read_rate_bytes_per_s(device, plan.read_bytes),
            "matmul": matmul_rate_flop_per_s(device, plan.matmul_size),
        }
        return {"read_gb_per_s": self._rates["read"] / 1e9, "matmul_tflop_per_s": self._rates["matmul"] / 1e12}

    def _load(self) -> tuple[Model, dict[str, Drafter]]:
        plan, ops, config = self.plan, self._ops, self.plan.config
        started = time.perf_counter()
        limit = max(plan.contexts) + MARGIN_TOKENS
        with torch.inference_mode():
            checkpoint = SyntheticCheckpoint(config, ops.device)
            model = architecture(config["model_type"]).load(config, checkpoint, ops)
            setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=limit)
            drafters = {"ngram": drafter_module("ngram").build(setup)}
            if any(name.startswith("mtp.") for name in checkpoint.names()):
                drafters["mtp"] = self._mtp(setup, min(DRAFT_HEAD_ROWS, model.vocab_size))
        if ops.device.type == "cuda":
            torch.cuda.empty_cache()
        self.document["load"] = {
            "seconds": time.perf_counter() - started,
            "read_gb_per_token": model.read_bytes_per_token / 1e9,
            "kv_bytes_per_token": sum(
                spec.bytes_per_token for spec in (model.cache_spec, *(each.cache_spec for each in drafters.values()))
            ),
        }
        return model, drafters

    def _mtp(self, setup: DrafterSetup, head_rows: int) -> Drafter:
        config, ops = self.plan.config, setup.ops
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "config.json").write_text(json.dumps(config))
            checkpoint = SyntheticCheckpoint(config, ops.device, seed=1, draft_head_rows=head_rows)
            with_weights = DrafterSetup(
                ops=ops, model=setup.model, num_slots=setup.num_slots, folder=Path(name), checkpoint=checkpoint,
                context_limit_tokens=setup.context_limit_tokens,
            )  # fmt: skip
            return drafter_module("mtp").build(with_weights)

    def _options(self, **more: Any) -> EngineOptions:
        return EngineOptions(device=str(self._ops.device), kv_cache=self.plan.kv_cache, **more)

    def _fits(self, model: Model, drafters: dict[str, Drafter], tokens: int, limit_bytes: int) -> dict[str, Any]:
        """Memory as the driver reports it with an engine that promises `tokens` within a limit, all warmed up.

        Making random weights leaves holes in PyTorch's memory that loading from a file does not: they are told apart.
        """
        device = self._ops.device
        gc.collect()
        torch.cuda.empty_cache()
        holes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        parts = assemble(model, self._ops, tokens, drafters, self._options(memory_limit_bytes=limit_bytes + holes))
        limits = parts.scheduler.limits
        seconds = warm_up(parts.loop.stages, limits.context_tokens, limits.chunk_tokens)
        found = {
            "bar_gib": limit_bytes / GIB,
            "all_on_card": parts.runner.cold is None,
            "driver_gib": (driver_bytes(device) - holes) / GIB,
            "holes_gib": holes / GIB,
            "chunk_tokens": limits.chunk_tokens,
            "planned_gib": sum(parts.metrics.snapshot().memory_bytes.values()) / GIB,
            "reserved_gib": torch.cuda.memory_reserved(device) / GIB,
            "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "warm_up_s": seconds,
            "parts_gib": {name: size / GIB for name, size in parts.metrics.snapshot().memory_bytes.items()},
        }
        del parts
        gc.collect()
        torch.cuda.empty_cache()
        return found

    def _measure_steps(self, model: Model, drafters: dict[str, Drafter]) -> None:
        limit = min(max(self.plan.contexts) + MARGIN_TOKENS, model.max_context_tokens)
        if self._ops.device.type == "cuda":
            # Contexts that this card cannot hold are left out.
            limit = min(limit, context_limit(model, self._ops, None, None))
        parts = assemble(model, self._ops, limit, drafters, self._options())
        bench = StepBench(parts, self._rates["read"])
        first = self.plan.contexts[0]
        for context in self.plan.contexts:
            self._section(f"steps_{context}", partial(self._steps, bench, context, context == first))
            if context == first:
                self._section("groups", partial(self._groups, bench, first))
                for tokens in self.plan.prefills:
                    self._section(f"prefill_{tokens}", partial(self._prefill, bench, tokens))

    def _steps(self, bench: StepBench, context: int, every_row_count: bool) -> list[dict[str, float]]:
        """Rows of one sequence, then sequences of one row, then of four rows."""
        rows = GRAPH_ROWS if every_row_count else (1, 8, 16)
        shapes = [(1, count) for count in rows] + [(2, 1), (4, 1), (4, 4)]
        times: list[StepTime] = []
        for slots, count in shapes:
            if bench.holds(slots, context):
                times.append(bench.verify(slots, count, context, self.plan.repeats))
        self.say(step_table(times))
        one = times[0].step_ms if times else 1.0
        return [
            {
                "slots": each.slots,
                "rows": each.rows,
                "ms": each.step_ms,
                "floor_ms": each.floor_ms,
                "over_floor": each.over_floor,
                "over_one_row": each.step_ms / one,
            }
            for each in times
        ]

    def _groups(self, bench: StepBench, context: int) -> dict[str, Any]:
        groups, sentence = verdict(bench.groups(1, 1, context), bench.floors_ms(1, context))
        self.say(f"{group_table(groups)}\n{sentence}")
        of_group = {each.group: {"ms": each.ms, "floor_ms": each.floor_ms} for each in groups}
        return {"context": context, "groups": of_group, "verdict": sentence}

    def _prefill(self, bench: StepBench, tokens: int) -> dict[str, float]:
        chunk_tokens = self.plan.chunk_tokens or bench.chunk_tokens
        rate = bench.prefill_tok_per_s(tokens, chunk_tokens)
        flop = rate * prefill_flop_per_token(self.plan.config)
        return {"tok_per_s": rate, "matmul_share": flop / self._rates["matmul"], "chunk_tokens": chunk_tokens}

    def _measure_decoding(self, model: Model, drafters: dict[str, Drafter]) -> None:
        self._section("decode_off", partial(self._decode, model, drafters, "off", None, ()))
        if self.plan.identity:
            self._section("identity", partial(self._identity, model, drafters))
        if "mtp" not in drafters:
            return
        for depth in self.plan.depths:
            name = f"decode_mtp_{depth}_synthetic_acceptance"
            self._section(name, partial(self._decode, model, drafters, "mtp", depth, PUBLISHED_MTP))

    def _identity(self, model: Model, drafters: dict[str, Drafter]) -> dict[str, int]:
        limit = min(model.max_context_tokens, 2 * MARGIN_TOKENS)
        parts = assemble(model, self._ops, limit, drafters, self._options())
        parts.loop.start()
        try:
            return identity(parts, [("ngram", 7), *((("mtp", 3), ("mtp", 7)) if "mtp" in drafters else ())])
        finally:
            parts.loop.stop()

    def _decode(
        self, model: Model, drafters: dict[str, Drafter], name: str, depth: int | None, rates: tuple[float, ...]
    ) -> dict[str, float]:
        plan = self.plan
        limit = min(model.max_context_tokens, plan.decode_prompt_tokens + plan.decode_tokens + MARGIN_TOKENS)
        parts = assemble(model, self._ops, limit, drafters, self._options(synthetic_acceptance=rates))
        parts.loop.start()
        try:
            # The same request first, so that every graph of the measured one is captured.
            for _ in range(2):
                found: Decoded = decode(parts, plan.decode_prompt_tokens, plan.decode_tokens, name, depth)
        finally:
            parts.loop.stop()
        return found.figures()


def driver_bytes(device: torch.device) -> int:
    """What the driver says this process holds of the card; all that anybody holds where it does not tell processes."""
    index = device.index or 0
    processes = [process for gpu in read_gpus().gpus if gpu.index == index for process in gpu.processes]
    own = [process.used_bytes for process in processes if process.pid == os.getpid() and process.used_bytes]
    if own:
        return own[0]
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


def prefill_flop_per_token(config: Mapping[str, Any]) -> float:
    """Floating-point operations of the layers' matrices for one token of a prompt: two for each value."""
    counted = [
        shape
        for name, shape in tensor_shapes(config).items()
        if len(shape) == 2 and ".layers." in name and not name.startswith("mtp.")
    ]
    return 2.0 * sum(rows * columns for rows, columns in counted)
