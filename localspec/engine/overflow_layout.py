"""A context that is larger than the device's memory: how much of it stays there, and the host memory for the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from localspec.api.types import EngineError
from localspec.cache.cold import ColdPages
from localspec.cache.pool import CachePool
from localspec.core.cache_spec import CacheSpec
from localspec.core.memory_budget import CHUNK_TOKENS
from localspec.core.records import MAX_ROWS, PAGE_TOKENS
from localspec.engine.memory_budget import MemoryLayout, fitting_tokens, lay_out
from localspec.engine.tier_memory import PIECE_BYTES, host_memory_for
from localspec.kernels.ops import Ops
from localspec.models import Model
from localspec.scheduler.overflow import SHARE_FOR_OTHERS

log = logging.getLogger(__name__)
HOST_SHARE = 0.5
"""Of the memory that is free now, for pages of a running conversation."""


@dataclass(frozen=True)
class SplitLayout:
    """`cold_pages` 0: everything fits the device."""

    memory: MemoryLayout
    cold_pages: int = 0


def split(
    model: Model,
    ops: Ops,
    specs: Sequence[CacheSpec],
    context_tokens: int,
    limit_bytes: int | None,
    resident_tokens: int | None,
) -> SplitLayout:
    """Pages for a context on the device, or for `resident_tokens` of it (None: as many as fit) and the rest in host
    memory. Raises what `lay_out` raises where host memory does not hold the rest either."""
    target = model.cache_spec
    num_layers = max(1, len(target.planes) // 2)
    wanted_pages = -(-(context_tokens + MAX_ROWS) // PAGE_TOKENS)
    page_bytes = PAGE_TOKENS * target.bytes_per_token
    # Where the pages of a layer land that are not there.
    landing_bytes = 2 * wanted_pages * page_bytes // num_layers
    if resident_tokens is None or resident_tokens >= context_tokens:
        try:
            return SplitLayout(lay_out(model, ops, specs, context_tokens, limit_bytes))
        except (ValueError, EngineError):
            fitting = fitting_tokens(model, ops, specs, limit_bytes, landing_bytes)
            resident_tokens = fitting // PAGE_TOKENS * PAGE_TOKENS
            if not 0 < resident_tokens < context_tokens:
                raise
    memory = lay_out(model, ops, specs, resident_tokens, limit_bytes, landing_bytes)
    if memory.chunk_tokens is not None:
        # The ring that a chunk is read into must leave room for pages that stay.
        memory = replace(memory, chunk_tokens=min(memory.chunk_tokens, CHUNK_TOKENS))
    cold_pages = wanted_pages - (memory.num_pages - 1 - memory.num_pages // SHARE_FOR_OTHERS)
    free_bytes = psutil.virtual_memory().available
    if cold_pages * page_bytes > free_bytes * HOST_SHARE:
        raise EngineError(
            "machine_cannot",
            f"A context of {context_tokens} tokens needs {cold_pages * page_bytes / 2**30:.1f} GiB beside the device, "
            f"more than half of the {free_bytes / 2**30:.1f} GiB of memory that are free; choose a smaller --context.",
        )
    log.info("contexts beyond %d tokens go on in host memory, more slowly", resident_tokens)
    return SplitLayout(memory, max(0, cold_pages))


def cold_pages_for(pool: CachePool, spec: CacheSpec, num_pages: int, table_pages: int) -> ColdPages:
    """Host memory for the cold pages of the target."""
    sizes = {plane.name: num_pages * PAGE_TOKENS * plane.bytes_per_token for plane in spec.planes}
    memory = host_memory_for(pool.device, 2 * sum(sizes.values()) + PIECE_BYTES)
    host = {}
    for name, size in sizes.items():
        buffer = memory.take(size, True)
        if buffer is None:
            raise EngineError("machine_cannot", f"{size / 1e9:.1f} GB of host memory could not be had for the cache.")
        host[name] = buffer
    return ColdPages(pool, host, num_pages, table_pages)
