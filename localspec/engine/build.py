"""From an installed model's folder to a running decode loop: the composition root of the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from localspec.api.types import EngineError, MetricsSnapshot, ModelInfo
from localspec.cache.cold import ring_pages
from localspec.cache.pages import PagePool
from localspec.cache.pool import CachePool
from localspec.cache.prefix import PrefixTree
from localspec.cache.spill import SpillLimits
from localspec.core.cache_spec import CacheSpec
from localspec.core.memory_budget import FEW_GRAPHS
from localspec.core.records import MAX_ROWS, MAX_SLOTS, PAGE_TOKENS
from localspec.drafters import Drafter, drafter_module
from localspec.drafters._ngram_device import DeviceNgramDrafter
from localspec.engine.capture_ahead import CaptureAhead, CapturingStep
from localspec.engine.device_step import DeviceStep, EagerStep
from localspec.engine.drafter_loading import NGRAM_DISK, DrafterPlaces, load_drafters
from localspec.engine.drafting import DrafterSet, union_of_needs
from localspec.engine.kernel_check import check_kernels
from localspec.engine.loop import DecodeLoop, Stages
from localspec.engine.memory_budget import MemoryLayout, check_before_loading, context_limit, prepare_allocator
from localspec.engine.metrics import MetricsRecorder
from localspec.engine.ngram_feed import FeedingRing
from localspec.engine.ngram_tables import NgramTables
from localspec.engine.no_tiers import NoTiers
from localspec.engine.overflow_layout import cold_pages_for, split
from localspec.engine.packed_weights import PackedCheckpoint, load_packed
from localspec.engine.ring import ResultRing
from localspec.engine.text import TextStage
from localspec.engine.tiers import CacheOwner, TierLimits, open_tiers
from localspec.engine.token_count import with_token_count
from localspec.engine.tuner import Tuner
from localspec.engine.tuner_store import TunerKeeper, TunerKey, TunerStore
from localspec.engine.verify_schedule import VerifySchedule
from localspec.engine.warm_up import warm_up
from localspec.formats.checkpoint import FolderCheckpoint, open_checkpoint
from localspec.hub.corpus import tokenizer_fingerprint
from localspec.hub.fit import keeps_fp8
from localspec.kernels.fp4_prompts import FP4_BACKEND, Fp4Prompts
from localspec.kernels.ops import Ops
from localspec.kernels.table import Refusal, choose
from localspec.models import Model, architecture
from localspec.runner.runner import Runner
from localspec.sampling.synthetic import SyntheticAcceptance
from localspec.scheduler.overflow import OverflowLimits
from localspec.scheduler.scheduler import Limits, Scheduler

CACHE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}
)
Report = Callable[[str], None]
LoadedCheckpoint = FolderCheckpoint | PackedCheckpoint


@dataclass(frozen=True)
class EngineOptions:
    """How to run. `context_tokens` None takes what the model and the machine allow."""

    device: str = "auto"
    context_tokens: int | None = None
    drafter: str = "auto"
    depth: int | None = None
    max_queued: int = 64
    synthetic_acceptance: tuple[float, ...] = ()
    """Marginal rates at which drafts are accepted whatever the model says; benchmarks only."""
    drafters_dir: Path | None = None
    """Where installed drafters lie, as `<model id>.<kind>`; None runs without."""
    ngram_dir: Path | None = None
    """Where n-gram tables lie; None runs without."""
    ngram_learn: bool = True
    """Keep answers, never private ones, in a table of the user's own under `ngram_dir`."""
    tuner_dir: Path | None = None
    """Where the tuner keeps what it learnt; None forgets it at the end."""
    resident_tokens: int | None = None
    """Tokens of a context whose keys and values the device holds, the rest lies in host memory; None: what fits."""
    kv_dir: Path | None = None
    """Where finished conversations are kept for their next turn; None keeps them in memory only."""
    kv_cache: str = "auto"
    """How keys and values are kept, one of CACHE_DTYPES; `auto`: fp8 on a card where the model's keys are normed."""
    fp4_prompts: bool = False
    """Multiply the rows of prompts as FP4, on cards that can; experimental, and it changes answers."""
    checks_dir: Path | None = None
    """Where it is remembered that this card's kernels were tested; None tests them at every start."""
    memory_limit_bytes: int | None = None
    """Of a card's memory, all that this process may take; None takes what is free."""
    kv_limits: SpillLimits = field(default_factory=SpillLimits)
    host_bytes: int | None = None
    """Memory for copies of conversations beside `kv_dir`; None takes a share of what is free at start."""


@dataclass(frozen=True)
class ModelPlace:
    """Where an installed model lies and how it is called."""

    id: str
    folder: Path
    title: str
    note: str = ""
    demo: bool = False


@dataclass(frozen=True)
class Assembled:
    """The running parts of an engine in tokens: everything but text."""

    loop: DecodeLoop
    metrics: MetricsRecorder
    tuner: Tuner
    runner: Runner
    scheduler: Scheduler


@dataclass(frozen=True)
class Built:
    """A loaded model ready to run."""

    info: ModelInfo
    text: TextStage
    parts: Assembled
    tables: NgramTables | None = None
    keeper: TunerKeeper | None = None

    def start(self) -> None:
        """Begin to take requests."""
        self.parts.loop.start()

    def close(self) -> None:
        """End the loop and what must outlive it."""
        self.parts.loop.stop()
        for part in (self.keeper, self.tables):
            if part is not None:
                part.close()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ValueError naming the file and the cure."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({error}); pull the model again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path} names no model_type; this is not a model folder that localspec can read")
    return config


def load_model(
    folder: Path, device: str, options: EngineOptions | None = None, report: Report = lambda text: None
) -> tuple[Model, Ops, LoadedCheckpoint]:
    """Weights of a folder on a device, with every tensor accounted for; the checkpoint serves its drafters too.

    The caller closes the checkpoint once nothing more is loaded. Raises ValueError in plain words, EngineError
    (`machine_cannot`) where no back end runs on the device.
    """
    config = with_token_count(read_config(folder), folder)
    try:
        prepare_allocator(resolved := resolve_device(device))
        ops, refusals = choose(resolved)
    except ValueError as error:
        raise EngineError("machine_cannot", f"{error}; use --device cpu, or see what the driver says") from error
    options = options or EngineOptions(device)
    ops.cache_dtype = cache_dtype(ops, options.kv_cache, keeps_fp8(folder))
    if options.fp4_prompts:
        _take_fp4(ops, refusals)
    check_kernels(ops, options.checks_dir, report)
    try:
        planned = check_before_loading(folder, ops, options.context_tokens, options.memory_limit_bytes)
    except EngineError:
        # A context that is too large goes on in host memory; a model that is too large does not.
        planned = check_before_loading(folder, ops, None, options.memory_limit_bytes)
    if planned is not None:
        report(f"memory: {planned.told()}")
    with torch.inference_mode():
        found = load_packed(folder, config, ops, report)
        if found is not None:
            return found[0], ops, found[1]
        report("reading weights")
        checkpoint = open_checkpoint(folder)
        return architecture(config["model_type"]).load(config, checkpoint, ops), ops, checkpoint


def _take_fp4(ops: Ops, refusals: Sequence[Refusal]) -> None:
    if not isinstance(ops, Fp4Prompts):
        reason = next((each.reason for each in refusals if each.backend == FP4_BACKEND), f"{ops.name} has none")
        raise EngineError(
            "machine_cannot", f"Prompts cannot be read in FP4 here: {reason}; leave --experimental-fp4-prompts out."
        )
    ops.fp4_prompts = True


def cache_dtype(ops: Ops, kv_cache: str, holds_fp8: bool = True) -> torch.dtype:
    """The dtype of cache pages for an option; `holds_fp8`: see `keeps_fp8`. Raises EngineError for an unknown one."""
    if kv_cache == "auto":
        return ops.activation_dtype if ops.device.type == "cpu" or not holds_fp8 else torch.float8_e4m3fn
    if kv_cache not in CACHE_DTYPES:
        raise EngineError(
            "bad_request", f"the cache type {kv_cache!r} is not known; known are {', '.join(CACHE_DTYPES)}"
        )
    return CACHE_DTYPES[kv_cache]


def resolve_device(device: str) -> str:
    """`auto` is the first NVIDIA card, or the CPU where there is none. Raises EngineError where a card is missing."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineError("machine_cannot", "PyTorch finds no NVIDIA card or driver here; use --device cpu")
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def assemble(
    model: Model,
    ops: Ops,
    limit: int,
    drafters: dict[str, Drafter],
    options: EngineOptions,
    place: ModelPlace | None = None,
) -> Assembled:
    """Memory, stages and the decode loop around a loaded model. Raises ValueError if the cache does not fit."""
    specs = [model.cache_spec, *(drafter.cache_spec for drafter in drafters.values())]
    layout = split(model, ops, specs, limit, options.memory_limit_bytes, options.resident_tokens)
    memory = layout.memory
    pool = CachePool(specs, memory.num_pages, MAX_SLOTS, ops.device, layout.cold_pages, memory.num_snapshots)
    runner = Runner(model, ops, pool, limit, union_of_needs(drafters))
    if layout.cold_pages:
        table_pages = runner.state.block_tables.shape[1]
        runner.cold = cold_pages_for(pool, model.cache_spec, layout.cold_pages, table_pages)
    schedule = VerifySchedule(host_knows=ops.waits)
    drafter_set = DrafterSet(drafters, pool, ops.device, schedule)
    tuner = _tuner(drafter_set, options, schedule)
    pages = PagePool(memory.num_pages)
    scheduler = Scheduler(
        pool=pages,
        prefix=PrefixTree(pages, memory.num_snapshots, lambda snapshot: None),
        limits=replace(_limits(memory, limit, options, layout.cold_pages), num_layers=model.num_layers + 1),
        policy=tuner,
        needs_state=pool.has_states,
    )
    metrics = MetricsRecorder(_first_snapshot(memory, ops, limit, options))
    ring = _ring(ops, drafters, scheduler)
    device = _device_step(runner, drafter_set, options, memory)
    stages = Stages(runner, drafter_set, device)
    ahead = CaptureAhead(runner, drafter_set, device, tuner, limit) if isinstance(device, CapturingStep) else None
    tiers = _tiers(options, place, specs, runner, scheduler, metrics)
    loop = DecodeLoop(stages, scheduler, ring, tuner, metrics, tiers, ahead)
    return Assembled(loop, metrics, tuner, runner, scheduler)


def build(place: ModelPlace, options: EngineOptions, report: Report) -> Built:
    """Load everything and return it stopped; the caller starts the loop. Raises ValueError in plain words."""
    model, ops, checkpoint = load_model(place.folder, options.device, options, report)
    with ExitStack() as if_it_fails:
        with closing(checkpoint):
            limit = context_limit(model, ops, options.context_tokens, options.memory_limit_bytes)
            text = TextStage(place.folder, limit)
            tables = open_tables(place.folder, options, report)
            if tables is not None:
                if_it_fails.callback(tables.close)
            places = DrafterPlaces(place.id, place.folder, checkpoint, options.drafters_dir)
            handles = tables.handles if tables is not None else ()
            drafters = load_drafters(model, ops, limit, handles, places, report)
        report("laying out memory")
        assembled = assemble(model, ops, limit, drafters, options, place)
        if ops.device.type == "cuda":
            report("compiling kernels")
            limits = assembled.scheduler.limits
            held_tokens = min(limits.context_tokens, (assembled.scheduler.pool.num_pages - 1) * PAGE_TOKENS)
            warm_up(assembled.loop.stages, held_tokens, limits.chunk_tokens)
        if_it_fails.pop_all()
    info = ModelInfo(
        id=place.id,
        title=place.title,
        context_limit_tokens=limit,
        vocab_size=model.vocab_size,
        demo=place.demo,
        note=place.note,
        drafters=("auto", "off", *drafters),
        has_chat_template=text.template is not None,
        thinks=text.thinks,
        sampling=text.default_sampling(),
    )
    assembled.metrics.update(model_id=place.id)
    disk = drafters.get(NGRAM_DISK)
    if tables is not None and isinstance(disk, DeviceNgramDrafter):
        tables.before_close(disk.close)
    return Built(info, text, assembled, tables, _keeper(assembled, place, ops.device, options))


def open_tables(folder: Path, options: EngineOptions, report: Report) -> NgramTables | None:
    """The n-gram tables that fit the tokenizer of a model's folder, or None if the options name no place for any."""
    if options.ngram_dir is None:
        return None
    return NgramTables(options.ngram_dir, tokenizer_fingerprint(folder), options.ngram_learn, report)


def _ring(ops: Ops, drafters: dict[str, Drafter], scheduler: Scheduler) -> ResultRing:
    lag = 0 if ops.waits else 1
    disk = drafters.get(NGRAM_DISK)
    return FeedingRing(lag, scheduler, disk.follow) if isinstance(disk, DeviceNgramDrafter) else ResultRing(lag)


def _version() -> str:
    try:
        return metadata.version("localspec")
    except metadata.PackageNotFoundError:
        return "unknown"


def _keeper(parts: Assembled, place: ModelPlace, device: torch.device, options: EngineOptions) -> TunerKeeper | None:
    """Restores what the tuner learnt before and keeps it; not where acceptance is made up."""
    if options.tuner_dir is None or options.synthetic_acceptance:
        return None
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    kept = str(parts.runner.ops.cache_dtype).removeprefix("torch.")
    arithmetic = parts.runner.ops.arithmetic
    build_name = f"localspec {_version()}, torch {torch.__version__}, cache {kept}, {arithmetic}"
    store = TunerStore(options.tuner_dir, TunerKey(card, place.id, tuple(parts.tuner.depth_limits), build_name))
    store.restore(parts.tuner)
    return TunerKeeper(parts.tuner, store, parts.loop.call, lambda: parts.metrics.snapshot().verify_steps)


def _tiers(
    options: EngineOptions,
    place: ModelPlace | None,
    specs: list[CacheSpec],
    runner: Runner,
    scheduler: Scheduler,
    metrics: MetricsRecorder,
) -> NoTiers:
    """The disk below the device; none where acceptance is made up, because the cache then holds made-up answers."""
    if options.kv_dir is None or options.synthetic_acceptance:
        return NoTiers()
    device = runner.ops.device
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    backend = f"{runner.ops.arithmetic} {card} torch {torch.__version__} localspec {_version()}"
    owner = CacheOwner(place.id if place else "", str(place.folder) if place else "", backend, device)
    limits = TierLimits(options.kv_limits, options.host_bytes)
    return open_tiers(options.kv_dir, limits, owner, specs, runner.pool, scheduler, metrics)


def _device_step(runner: Runner, drafters: DrafterSet, options: EngineOptions, memory: MemoryLayout) -> DeviceStep:
    device = runner.ops.device
    rates = options.synthetic_acceptance
    acceptance = SyntheticAcceptance(rates, device) if rates else None
    if device.type != "cuda":
        return EagerStep(runner, drafters, acceptance)
    from localspec.engine.graphs import GraphStep

    return GraphStep(
        runner, drafters, acceptance, memory.budget.num_graphs if memory.budget is not None else FEW_GRAPHS
    )


def _limits(memory: MemoryLayout, context_tokens: int, options: EngineOptions, cold_pages: int) -> Limits:
    """A card reads prompts in larger chunks: each chunk unpacks every weight once."""
    limits = Limits(context_tokens=context_tokens, max_queued=options.max_queued, shares_rows=True)
    if memory.chunk_tokens is not None:
        limits = replace(limits, chunk_tokens=memory.chunk_tokens, steady_depth=True)
    return replace(limits, overflow=OverflowLimits(cold_pages, ring_pages(limits.chunk_tokens, MAX_ROWS)))


def _tuner(drafters: DrafterSet, options: EngineOptions, schedule: VerifySchedule) -> Tuner:
    # A table speaks only after long matches, so it goes before whatever speaks more often.
    chains = [f"{NGRAM_DISK}+{name}" for name in drafters.names if name != NGRAM_DISK and drafters.knows(NGRAM_DISK)]
    # A sure match in the text itself goes before a drafter with weights.
    chains += [f"ngram+{name}" for name in drafters.names if drafter_module(name).needs_weights]
    limits = {name: drafters.max_depth(name) for name in (*drafters.names, *chains)}
    return Tuner(
        limits,
        default_drafter=options.drafter,
        default_depth=options.depth,
        fixed_rows=not schedule.host_knows,
        shares_rows=True,
        budget=schedule.budget,
    )


def _first_snapshot(memory: MemoryLayout, ops: Ops, limit: int, options: EngineOptions) -> MetricsSnapshot:
    return MetricsSnapshot(
        state="ready",
        device=str(ops.device),
        drafter=options.drafter,
        depth=options.depth or 0,
        context_limit_tokens=limit,
        memory_bytes=memory.parts,
    )
