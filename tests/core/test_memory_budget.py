"""The memory budget against sums done apart, and over many sizes: it never spends more than there is."""

from __future__ import annotations

import random

import pytest

from localspec.core.memory_budget import (
    FEW_GRAPHS,
    FIRST_SNAPSHOTS,
    LEAST_SNAPSHOTS,
    MANY_GRAPHS,
    MAX_SNAPSHOTS,
    Demand,
    plan_memory,
    row_scratch_bytes,
    workspace_bytes,
)
from localspec.core.records import MAX_ROWS, PAGE_TOKENS

GIB = 2**30
STATE = 48 * (48 * 128 * 128 * 4 + 10240 * 19 * 2)
RINGS = 48 * 4 * 16 * (16 * 128 + 48 * 128 + 48)
COMPACT_27B = Demand(
    weights=int(13.78 * GIB),
    kv_per_token=34 * 1024,
    context_limit_tokens=262_144,
    state=STATE + RINGS,
    snapshot=STATE,
    workspace=workspace_bytes(5120, 17408, 34816 * 5120, 248_320),
    row_scratch=row_scratch_bytes(5120, 17408),
    host=248_320 * 5120 * 2,
)


@pytest.mark.parametrize(("context", "bar_gib"), [(32_768, 17.5), (131_072, 20.5)])
def test_a_compact_27b_fits_where_it_must(context: int, bar_gib: float) -> None:
    budget = plan_memory(COMPACT_27B, int(bar_gib * GIB), context, contexts=6)
    assert budget.context_tokens == context and budget.total <= bar_gib * GIB
    assert set(budget.parts) == {
        "weights", "kv", "state", "snapshots", "workspace", "graphs", "context", "spare"
    }  # fmt: skip
    assert f"context of {context} tokens (weights 13.78, kv" in budget.told() and "host memory 2.37" in budget.told()
    assert plan_memory(COMPACT_27B, int((bar_gib - 0.5) * GIB), context).context_tokens == 0


def test_prompts_are_read_in_smaller_chunks_before_a_context_is_refused() -> None:
    row_bytes = 2 * (2 * 17408 + 7 * 5120)
    needed = COMPACT_27B.fixed + (2 + 32_768 // PAGE_TOKENS + 1) * PAGE_TOKENS * 34 * 1024
    for missing, chunk in (
        (0, 2048), (1, 1536), (512 * row_bytes, 1536), (1024 * row_bytes, 1024), (1024 * row_bytes + 1, 512)
    ):  # fmt: skip
        budget = plan_memory(COMPACT_27B, needed - missing, 32_768)
        assert (budget.context_tokens, budget.chunk_tokens) == (32_768, chunk) and budget.total <= needed - missing
    assert plan_memory(COMPACT_27B, needed - 1536 * row_bytes - 1, 32_768).context_tokens == 0
    roomy = plan_memory(COMPACT_27B, 20 * GIB, 32_768, contexts=6)
    assert (roomy.chunk_tokens, roomy.num_graphs, roomy.num_snapshots) == (2048, MANY_GRAPHS, FIRST_SNAPSHOTS)
    assert plan_memory(COMPACT_27B, needed, 32_768).num_graphs == FEW_GRAPHS
    ample = plan_memory(COMPACT_27B, 32 * GIB, 32_768, contexts=6)
    assert ample.chunk_tokens == 4096 and ample.is_ample(6) and not ample.is_ample(7)
    assert ample.demand.workspace == COMPACT_27B.workspace + 2048 * row_bytes


def test_what_is_left_goes_to_snapshots_then_pages_then_snapshots() -> None:
    demand = Demand(weights=100 << 20, kv_per_token=1024, context_limit_tokens=4096, state=1 << 20, snapshot=8 << 20)
    one_context = 4096 // PAGE_TOKENS + 1
    budgets = [plan_memory(demand, demand.fixed + (mib << 20), None, contexts=3) for mib in (5, 14, 32, 48, 4096)]
    assert [b.num_snapshots for b in budgets] == [1, 2, 4, 4 + 1, MAX_SNAPSHOTS]
    assert budgets[0].num_pages < 2 * one_context + 2 and budgets[-1].num_pages == 3 * one_context + 2
    assert plan_memory(demand, demand.fixed - 1).context_tokens == 0
    plain = Demand(weights=0, kv_per_token=10, context_limit_tokens=100)
    assert plan_memory(plain, 8 * GIB).num_snapshots == MAX_SNAPSHOTS


def test_nothing_is_spent_twice_and_the_context_is_whole() -> None:
    generator = random.Random(7)
    for _ in range(500):
        demand = Demand(
            weights=generator.randrange(20 * GIB),
            kv_per_token=generator.choice([0.5, 1152.0, 34816.0, 262144.0]),
            context_limit_tokens=generator.choice([2048, 8192, 262_144]),
            state=generator.choice([0, 200 << 20]),
            snapshot=generator.choice([0, 170 << 20]),
            workspace=generator.randrange(GIB),
        )
        available = generator.randrange(32 * GIB)
        asked = generator.choice([None, 100, 2048, 100_000])
        budget = plan_memory(demand, available, asked, contexts=generator.randrange(1, 7))
        if not budget.context_tokens:
            assert demand.fixed + (asked or 256) * demand.kv_per_token > available - 3 * PAGE_TOKENS * 262144.0
            continue
        assert budget.total <= available
        assert LEAST_SNAPSHOTS <= budget.num_snapshots <= MAX_SNAPSHOTS
        assert (budget.num_pages - 2) * PAGE_TOKENS >= budget.context_tokens + MAX_ROWS, "and a page to copy from"
        assert budget.context_tokens == min(asked, demand.context_limit_tokens) if asked else True
