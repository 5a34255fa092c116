"""Memory of the engine's device: checked before loading, shared out after it, so that nothing runs out later.

On a card everything of known size is allocated at once, and a warm-up reaches the peak of what is not: the context that
was promised fits from then on. A CPU's memory is the user's desktop's too, so there pages take a share of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from localspec.api.types import EngineError
from localspec.core.cache_spec import CacheSpec
from localspec.core.memory_budget import (
    CUDA_CONTEXT_BYTES,
    MAX_SNAPSHOTS,
    WANTED_CONTEXTS,
    Budget,
    Demand,
    plan_memory,
    row_scratch_bytes,
    workspace_bytes,
)
from localspec.core.records import MAX_ROWS, PAGE_TOKENS
from localspec.hub.fit import cache_shape, demand_of, weights_of
from localspec.hub.layout import read_json
from localspec.hub.records import HubError
from localspec.kernels.ops import Ops
from localspec.layers.decoder import Decoder
from localspec.models import Model

log = logging.getLogger(__name__)
DEFAULT_CPU_CONTEXT_TOKENS = 8192
CPU_CONTEXTS = 3
"""Whole contexts on a CPU, running and finished."""
CPU_MEMORY_SHARE = 0.5
"""Share of the memory that is free at start which the pages may come to fill."""
DRAFTERS_SHARE = 8
"""Before drafters are loaded, their caches are taken for one part in so many of the target's."""
HUB_NAMES: Mapping[torch.dtype, str] = {torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class MemoryLayout:
    """What the engine allocates. `parts`: bytes by use; `budget` is None on a CPU."""

    num_pages: int
    num_snapshots: int
    parts: Mapping[str, int]
    budget: Budget | None = None
    chunk_tokens: int | None = None
    """Of a prompt that are read at once, where the budget says so."""


def prepare_allocator(device: str) -> None:
    """Before anything lies on a card: PyTorch is to keep its memory in segments that grow and shrink page by page.

    Otherwise each tensor of some MiB has a segment of its own, and what is left over in them cannot be used: 260 to 390
    MiB of a 27B on an H200. Not there on Windows, where PyTorch ignores it.
    """
    if device.startswith("cuda"):
        new_name = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (new_name or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def check_before_loading(folder: Path, ops: Ops, context_tokens: int | None, limit_bytes: int | None) -> Budget | None:
    """Whether a model's files fit the card, from their headers. Raises EngineError (`machine_cannot`) with the sums.

    None where there is no card, or the files do not tell.
    """
    if ops.device.type != "cuda":
        return None
    try:
        weights = weights_of(folder)
        shape = cache_shape(read_json(folder / "config.json"))
        demand = demand_of(weights, shape, HUB_NAMES.get(ops.cache_dtype, "bf16"), weights.mtp > 0)
    except HubError as error:
        log.info("the memory that is needed cannot be told before loading: %s", error)
        return None
    budget = plan_memory(demand, available_bytes(ops.device, limit_bytes), context_tokens)
    if not budget.context_tokens:
        raise _does_not_fit(budget, context_tokens)
    return budget


def context_limit(model: Model, ops: Ops, context_tokens: int | None, limit_bytes: int | None) -> int:
    """What was asked for, else the model's own limit within what this device's memory can hold."""
    limit = model.max_context_tokens
    if context_tokens is not None:
        return max(PAGE_TOKENS, min(limit, context_tokens))
    if ops.device.type == "cpu":
        return min(limit, DEFAULT_CPU_CONTEXT_TOKENS)
    demand = _demand(model, ops, [model.cache_spec])
    guessed = replace(demand, kv_per_token=demand.kv_per_token * (1 + 1 / DRAFTERS_SHARE))
    budget = plan_memory(guessed, available_bytes(ops.device, limit_bytes))
    if not budget.context_tokens:
        raise _does_not_fit(budget, None)
    return budget.context_tokens


def fitting_tokens(
    model: Model, ops: Ops, specs: Sequence[CacheSpec], limit_bytes: int | None, beside_bytes: int
) -> int:
    """The largest context for which `lay_out` finds room with the same arguments, 0 if there is none; on a processor
    the usual one."""
    if ops.device.type != "cuda":
        return context_limit(model, ops, None, limit_bytes)
    torch.cuda.empty_cache()
    available = available_bytes(ops.device, limit_bytes)
    return plan_memory(_demand(model, ops, specs), available - beside_bytes).context_tokens


def lay_out(
    model: Model,
    ops: Ops,
    specs: Sequence[CacheSpec],
    context_tokens: int,
    limit_bytes: int | None,
    beside_bytes: int = 0,
) -> MemoryLayout:
    """Pages and snapshots for a context that was settled, with `beside_bytes` of the card left to the caller. Raises
    ValueError, or EngineError for a card, if it does not fit."""
    if ops.device.type != "cuda":
        return _lay_out_host(model, specs, context_tokens)
    torch.cuda.empty_cache()
    available = available_bytes(ops.device, limit_bytes)
    demand = _demand(model, ops, specs)
    budget = plan_memory(demand, available - beside_bytes, context_tokens, WANTED_CONTEXTS)
    if not budget.context_tokens:
        raise _does_not_fit(budget, context_tokens)
    log.info("memory: %s", budget.told())
    _keep_within(ops.device, available - budget.demand.context - budget.demand.graphs)
    return MemoryLayout(budget.num_pages, budget.num_snapshots, budget.parts, budget, budget.chunk_tokens)


def available_bytes(device: torch.device, limit_bytes: int | None) -> int:
    """What this process may take of a card in all, its CUDA context and weights included."""
    free_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) + CUDA_CONTEXT_BYTES
    return free_bytes if limit_bytes is None else min(free_bytes, limit_bytes)


def _keep_within(device: torch.device, num_bytes: int) -> None:
    """PyTorch keeps what was freed as long as the card has more; at a limit it gives such memory back first. What
    captured steps take is not its, and must be there when they are captured."""
    total_bytes = torch.cuda.mem_get_info(device)[1]
    share = min(1.0, max(0, num_bytes) / total_bytes)
    torch.cuda.set_per_process_memory_fraction(share, device)


def _demand(model: Model, ops: Ops, specs: Sequence[CacheSpec]) -> Demand:
    """From what was loaded: all that PyTorch holds now counts as weights, holes between them included."""
    states = [state for spec in specs for state in spec.states]
    table_bytes = 0
    workspace = row_scratch = 0
    if isinstance(model, Decoder):
        table = model.vocabulary.table
        table_bytes = 0 if table.is_cuda else table.nbytes
        inner = max(layer.mlp.down.shape[1] for layer in model.layers)
        row_scratch = row_scratch_bytes(model.hidden_size, inner)
        workspace = workspace_bytes(model.hidden_size, inner, 2 * inner * model.hidden_size, model.vocab_size)
    return Demand(
        weights=torch.cuda.memory_reserved(ops.device) if ops.device.type == "cuda" else model.read_bytes_per_token,
        kv_per_token=sum(spec.bytes_per_token for spec in specs),
        context_limit_tokens=model.max_context_tokens,
        state=sum(state.total_bytes for state in states),
        snapshot=sum(state.total_bytes for state in states if not state.ring_rows),
        workspace=workspace,
        row_scratch=row_scratch,
        host=table_bytes,
    )


def _lay_out_host(model: Model, specs: Sequence[CacheSpec], context_tokens: int) -> MemoryLayout:
    per_context = -(-(context_tokens + MAX_ROWS) // PAGE_TOKENS)
    page_bytes = PAGE_TOKENS * sum(spec.bytes_per_token for spec in specs)
    free_bytes = psutil.virtual_memory().available
    affordable = int(free_bytes * CPU_MEMORY_SHARE) // max(page_bytes, 1)
    if affordable < per_context + 1:
        raise ValueError(
            f"a context of {context_tokens} tokens needs {per_context * page_bytes / 2**30:.1f} GiB for its cache, "
            f"more than half of the {free_bytes / 2**30:.1f} GiB that are free; choose a smaller --context"
        )
    num_pages = min(per_context * CPU_CONTEXTS + 1, affordable)
    parts = {"weights": model.read_bytes_per_token, "kv": num_pages * page_bytes}
    return MemoryLayout(num_pages, MAX_SNAPSHOTS, {**parts, "state": 4 * sum(spec.state_bytes for spec in specs)})


def _does_not_fit(budget: Budget, context_tokens: int | None) -> EngineError:
    demand = budget.demand
    wanted = context_tokens or PAGE_TOKENS
    needed = demand.fixed + wanted * demand.kv_per_token
    cure = "choose a smaller --context or model, or end what else uses the card"
    return EngineError(
        "machine_cannot",
        f"The model needs {needed / 2**30:.1f} GiB on the card for a context of {wanted} tokens "
        f"({demand.weights / 2**30:.1f} of them weights); {budget.available / 2**30:.1f} GiB can be had: {cure}.",
    )
