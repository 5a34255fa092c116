"""What an engine takes of a card's memory, use by use, and the context that is left: one arithmetic for all who ask.

Torch-free. Before a model is loaded the sizes come from its files, afterwards from what was loaded. What PyTorch and
the driver take beside tensors of known size was measured; the constants say where. Knows no card and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from localspec.core.records import MAX_ROWS, MAX_SLOTS, PAGE_TOKENS, SEGMENT_TOKENS

MIB = 1 << 20
CUDA_CONTEXT_BYTES = 640 * MIB
"""Of the driver: 625 MiB on an H200 with all weights loaded and nothing run; fewer multiprocessors take less."""
GRAPHS_BYTES = 200 * MIB
"""Compiled modules, 140 MiB with a 27B on an H200, and few captured steps, 0.6 MiB each and 1 to 2 with drafts."""
GRAPH_BYTES = 3 * MIB // 2
FEW_GRAPHS, MANY_GRAPHS = 64, 256
"""Captured steps that are kept at once; capturing one again holds an answer up for a moment."""
MATMUL_BYTES = 32 * MIB
"""Of cuBLAS, made with the first prompt."""
SPARE_BYTES = 128 * MIB
"""PyTorch's memory grows by 20 MiB in each of its pools, and parts of such pieces lie idle between others."""
UNPACKED_BYTES = 176 * MIB
"""Of a weight, the most that lies unpacked at once; the kernels take wider ones in slices."""
CHUNK_TOKENS = 2048
"""Rows of a prompt for which `Demand.workspace` is told."""
CHUNK_SIZES = (CHUNK_TOKENS, 1536, 1024, 512)
"""Rows of a prompt that are read at once on a card: the first with which the context fits."""
LARGE_CHUNK_TOKENS = 4096
"""Where nothing else wants the memory. A prompt of 8,192 goes 7% faster so than by 2,048 (H200, 27B)."""
LEAD_ROWS = 256
"""A chunk may begin within a tile: so many rows more."""
MAX_SNAPSHOTS = 16
LEAST_SNAPSHOTS = 1
FIRST_SNAPSHOTS = 4
"""As many are kept before memory goes to pages of further conversations."""
SPARE_PAGES = 2
"""Beside those of whole contexts: page 0, which is nobody's, and one from which a next turn's page is copied."""
WANTED_CONTEXTS = MAX_SLOTS + 2
"""Whole contexts: running ones, and finished conversations."""


@dataclass(frozen=True)
class Demand:
    """What a model with its drafters asks for, in bytes.

    `state`: one running sequence's, records of the last window included; `snapshot`: a saved one; `workspace`: scratch
    of the widest chunk of a prompt and of the widest step, `row_scratch`: what a row of a chunk has in it; `host`:
    pinned memory beside the card.
    """

    weights: int
    kv_per_token: float
    context_limit_tokens: int
    state: int = 0
    snapshot: int = 0
    workspace: int = 0
    row_scratch: int = 0
    host: int = 0
    context: int = CUDA_CONTEXT_BYTES
    graphs: int = GRAPHS_BYTES

    @property
    def fixed(self) -> int:
        """All that does not depend on the context, with the fewest snapshots."""
        running = MAX_SLOTS * self.state + LEAST_SNAPSHOTS * self.snapshot
        return self.weights + running + self.workspace + self.graphs + self.context + SPARE_BYTES


@dataclass(frozen=True)
class Budget:
    """How an amount of memory is spent. `context_tokens` 0: the model does not fit."""

    available: int
    demand: Demand
    context_tokens: int
    num_pages: int
    num_snapshots: int
    chunk_tokens: int = CHUNK_TOKENS
    num_graphs: int = FEW_GRAPHS

    @property
    def kv(self) -> int:
        """All pages, those of finished conversations included."""
        return int(self.num_pages * PAGE_TOKENS * self.demand.kv_per_token)

    def is_roomy(self) -> bool:
        """Whether the context fits with some snapshots."""
        return self.context_tokens > 0 and self.num_snapshots >= FIRST_SNAPSHOTS

    def is_ample(self, contexts: int) -> bool:
        """Whether `contexts` whole ones fit, and as many snapshots as are ever kept."""
        per_context = -(-(self.context_tokens + MAX_ROWS) // PAGE_TOKENS)
        fits = self.context_tokens > 0 and self.num_pages >= contexts * per_context + SPARE_PAGES
        return fits and self.num_snapshots == MAX_SNAPSHOTS

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes by use, on the card."""
        demand = self.demand
        return {
            "weights": demand.weights,
            "kv": self.kv,
            "state": MAX_SLOTS * demand.state,
            "snapshots": self.num_snapshots * demand.snapshot,
            "workspace": demand.workspace,
            "graphs": demand.graphs,
            "context": demand.context,
            "spare": SPARE_BYTES,
        }

    @property
    def total(self) -> int:
        """What the engine takes when all of it is in use."""
        return sum(self.parts.values())

    def told(self) -> str:
        """One line for a log."""
        spent = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in self.parts.items() if size)
        return (
            f"{self.total / 2**30:.2f} of {self.available / 2**30:.2f} GiB for a context of {self.context_tokens} "
            f"tokens ({spent}; in pinned host memory {self.demand.host / 2**30:.2f})"
        )


def workspace_bytes(hidden: int, inner: int, widest_matrix: int, vocab: int) -> int:
    """Scratch: a prompt's widest chunk (part of a matrix unpacked to bf16, and its rows) or a step's logits (float32,
    ten copies in acceptance), whichever is more; what captured steps keep for themselves, as much; tables of penalties
    and biases.

    hidden, inner: widths of the stream and of the feed-forward part; widest_matrix: values of the largest matrix but
    the head.
    """
    chunk = (CHUNK_TOKENS + LEAD_ROWS) * row_scratch_bytes(hidden, inner)
    logits = 10 * 4 * MAX_ROWS * vocab
    tables = 3 * 4 * MAX_SLOTS * vocab
    return min(2 * widest_matrix, UNPACKED_BYTES) + MATMUL_BYTES + max(chunk, logits) + logits + tables


def row_scratch_bytes(hidden: int, inner: int) -> int:
    """Of a row of a prompt, in bf16: the feed-forward part twice, and the stream seven times, while MTP follows it."""
    return 2 * (2 * inner + 7 * hidden)


def plan_memory(demand: Demand, available: int, context_tokens: int | None = None, contexts: int = 1) -> Budget:
    """Spend `available` bytes: one whole context first, then snapshots, then pages of up to `contexts` contexts.

    Prompts are read in the largest chunks with which a context fits; where there is room, in larger ones, and more
    captured steps are kept. Without a context asked for it is what fits, in
    steps of 256 tokens, up to the model's limit. A context that was asked for and does not fit gives a budget of 0
    tokens.
    """

    def spent(chunk_tokens: int, num_graphs: int) -> Budget:
        workspace = max(0, demand.workspace + (chunk_tokens - CHUNK_TOKENS) * demand.row_scratch)
        graphs = GRAPHS_BYTES + (num_graphs - FEW_GRAPHS) * GRAPH_BYTES
        budget = _spend(replace(demand, workspace=workspace, graphs=graphs), available, context_tokens, contexts)
        return replace(budget, chunk_tokens=chunk_tokens, num_graphs=num_graphs)

    if (most := spent(LARGE_CHUNK_TOKENS, MANY_GRAPHS)).is_ample(contexts):
        return most
    if context_tokens is not None and (more := spent(CHUNK_TOKENS, MANY_GRAPHS)).is_roomy():
        return more
    budgets = (spent(chunk_tokens, FEW_GRAPHS) for chunk_tokens in CHUNK_SIZES)
    return next((budget for budget in budgets if budget.context_tokens), spent(CHUNK_SIZES[-1], FEW_GRAPHS))


def _spend(demand: Demand, available: int, context_tokens: int | None, contexts: int) -> Budget:
    left = available - demand.fixed
    page_bytes = max(1.0, PAGE_TOKENS * demand.kv_per_token)
    fitting = max(0, int(left // page_bytes) - SPARE_PAGES) * PAGE_TOKENS - MAX_ROWS
    if context_tokens is None:
        tokens = max(0, min(fitting // SEGMENT_TOKENS * SEGMENT_TOKENS, demand.context_limit_tokens))
    else:
        tokens = min(context_tokens, demand.context_limit_tokens)
        tokens = tokens if tokens <= fitting else 0
    if not tokens:
        return Budget(available, demand, 0, 0, LEAST_SNAPSHOTS)
    per_context = -(-(tokens + MAX_ROWS) // PAGE_TOKENS)
    left -= int((per_context + SPARE_PAGES) * page_bytes)
    snapshots = LEAST_SNAPSHOTS
    if demand.snapshot:
        snapshots += min(FIRST_SNAPSHOTS - LEAST_SNAPSHOTS, left // demand.snapshot)
        left -= (snapshots - LEAST_SNAPSHOTS) * demand.snapshot
    more_pages = min((contexts - 1) * per_context, int(left // page_bytes))
    left -= int(more_pages * page_bytes)
    if demand.snapshot:
        snapshots += min(MAX_SNAPSHOTS - snapshots, left // demand.snapshot)
    else:
        snapshots = MAX_SNAPSHOTS
    return Budget(available, demand, tokens, per_context + SPARE_PAGES + more_pages, snapshots)
