"""Plans without a device: admission, alternation, bounds, fairness of rows, cancellation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localspec.api.types import Sampling
from localspec.cache.pages import PagePool
from localspec.cache.prefix import PrefixTree
from localspec.core.records import (
    MAX_ROWS,
    PAGE_TOKENS,
    PrefillPlan,
    Request,
    SlotResult,
    ThinkingRule,
    VerifyPlan,
)
from localspec.scheduler.scheduler import Limits, QueueFull, Scheduler
from localspec.scheduler.sequence import Sequence, Stage


class FixedDepth:
    def __init__(self, depth: int) -> None:
        self.depth = depth

    def choose(self, sequence: Sequence, num_active: int) -> tuple[str, int]:
        return "ngram", self.depth

    def row_budget(self, num_active: int, wanted_rows: int) -> int | None:
        return 16

    def wants_all(self, sequence: Sequence) -> bool:
        return sequence.request.depth is not None


def make(
    depth: int = 4,
    num_pages: int = 200,
    context: int = 1024,
    max_queued: int = 8,
    shares_rows: bool = False,
    num_layers: int = 1,
) -> Scheduler:
    pool = PagePool(num_pages)
    tree = PrefixTree(pool, 4, lambda snapshot: None)
    limits = Limits(context, max_queued, shares_rows=shares_rows, num_layers=num_layers)
    return Scheduler(pool, tree, limits, FixedDepth(depth), needs_state=False)


def request(length: int = 10, max_tokens: int = 50, first: int = 0) -> Request:
    return Request("", tuple(range(first, first + length)), Sampling(), 1, max_tokens, ())


def admit_all(scheduler: Scheduler) -> list[Sequence]:
    admitted = []
    while (admission := scheduler.admit()) is not None:
        admitted.append(admission.sequence)
    return admitted


def finish_prefill(scheduler: Scheduler) -> list[PrefillPlan]:
    plans = []
    while any(s.stage is Stage.PREFILL for s in scheduler.active):
        plan = scheduler.plan()
        if isinstance(plan, PrefillPlan):
            plans.append(plan)
            scheduler.prefill_done(plan)
    return plans


def emit(scheduler: Scheduler, plan: VerifyPlan, count: int, finish: str = "") -> None:
    results = tuple(
        SlotResult(s.slot, s.sequence_id, (1,) * count, ("target",) * count, s.num_drafts, count - 1, "ngram", finish)  # type: ignore[arg-type]
        for s in plan.slots
    )
    scheduler.commit(plan, results)


def test_prefill_chunks_end_at_absolute_borders_and_leave_the_last_token() -> None:
    scheduler = make()
    scheduler.add(request(600))
    admit_all(scheduler)
    plans = finish_prefill(scheduler)
    assert [(p.start_tokens, p.end_tokens) for p in plans] == [(0, 256), (256, 512), (512, 599)]
    assert [p.tile_start_tokens for p in plans] == [0, 256, 512]


def test_a_long_prompt_stops_the_others_for_some_layers_of_one_chunk_at_most() -> None:
    scheduler = make(num_layers=32)
    scheduler.add(request(2))
    admit_all(scheduler)
    finish_prefill(scheduler)
    scheduler.add(request(500, first=1000))
    admit_all(scheduler)
    kinds, parts = [], []
    for _ in range(8):
        plan = scheduler.plan()
        kinds.append(type(plan).__name__)
        if isinstance(plan, PrefillPlan):
            parts.append((plan, scheduler.layers_now(plan)))
            scheduler.prefill_paused(plan)
        elif plan is not None:
            emit(scheduler, plan, 1)
    assert sorted(kinds[:2]) == ["PrefillPlan", "VerifyPlan"] and kinds == kinds[:2] * 4
    assert parts == [(parts[0][0], 4)] * 4, "the same chunk until it is done, an eighth at first"
    scheduler.prefill_done(parts[0][0])
    scheduler.plan()
    following = scheduler.plan()
    assert isinstance(following, PrefillPlan) and following.start_tokens == parts[0][0].end_tokens == 256


def test_a_chunk_half_read_is_dropped_with_its_sequence() -> None:
    scheduler = make(num_layers=32)
    scheduler.add(request(500))
    scheduler.add(request(300, first=1000))
    first, second = admit_all(scheduler)
    plan = scheduler.plan()
    assert isinstance(plan, PrefillPlan) and scheduler.layers_now(plan) is None, "nobody waits"
    scheduler.prefill_paused(plan)
    assert scheduler.plan() == plan, "no other prompt is begun meanwhile"
    gone, stays = (first, second) if plan.sequence_id == first.id else (second, first)
    scheduler.cancel(gone)
    scheduler.retire(gone, keep=True)
    other = scheduler.plan()
    assert isinstance(other, PrefillPlan) and other.sequence_id == stays.id
    assert scheduler.prefix.match(gone.request.prompt_ids, False).total_tokens == 0, "none of it counts as read"


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 4])
def test_rows_never_exceed_the_step(num_sequences: int) -> None:
    scheduler = make(depth=15)
    for index in range(num_sequences):
        scheduler.add(request(5, first=100 * index))
    admit_all(scheduler)
    finish_prefill(scheduler)
    plan = scheduler.plan()
    assert isinstance(plan, VerifyPlan)
    assert len(plan.slots) == num_sequences and plan.num_rows <= MAX_ROWS
    depths = [slot.num_drafts for slot in plan.slots]
    assert max(depths) - min(depths) <= 1 and plan.num_rows >= MAX_ROWS - num_sequences


def test_bounds_are_corrected_by_results() -> None:
    scheduler = make(depth=4)
    scheduler.add(request(10))
    [sequence] = admit_all(scheduler)
    finish_prefill(scheduler)
    plan = scheduler.plan()
    assert isinstance(plan, VerifyPlan) and sequence.length_bound_tokens == 15
    emit(scheduler, plan, 2)
    assert sequence.length_bound_tokens == 12 and sequence.emitted_ids == [1, 1]


def test_depth_never_reaches_past_the_last_token() -> None:
    scheduler = make(depth=15)
    scheduler.add(request(10, max_tokens=3))
    admit_all(scheduler)
    finish_prefill(scheduler)
    plan = scheduler.plan()
    assert isinstance(plan, VerifyPlan) and plan.slots[0].num_drafts == 2


def test_admission_waits_for_pages_and_evicts_what_is_only_cached() -> None:
    scheduler = make(num_pages=8)
    scheduler.add(request(200, max_tokens=50))
    scheduler.add(request(200, max_tokens=50, first=1000))
    [first] = admit_all(scheduler)
    assert [s.id for s in scheduler.waiting] == [2]
    finish_prefill(scheduler)
    scheduler.retire(first, keep=True)
    assert scheduler.prefix.num_pages == 4
    [second] = admit_all(scheduler)
    assert second.id == 2 and len(second.pages) == 5


@pytest.mark.parametrize("spare_pages", [0, 1])
def test_a_next_turn_fits_a_pool_of_one_context(spare_pages: int) -> None:
    """The page that is only copied from counts too: without one more the prompt is found as far as whole pages go."""
    context = 1024
    scheduler = make(num_pages=-(-(context + MAX_ROWS) // PAGE_TOKENS) + 1 + spare_pages, context=context)
    scheduler.add(request(100, max_tokens=context - 100))
    [first] = admit_all(scheduler)
    finish_prefill(scheduler)
    scheduler.retire(first, keep=True)
    scheduler.add(request(120, max_tokens=context - 120))
    [second] = admit_all(scheduler)
    assert second.cached_tokens == (99 if spare_pages else PAGE_TOKENS)
    assert len(set(second.pages)) == len(second.pages) == scheduler.pool.num_pages - 1 - spare_pages
    scheduler.retire(second, keep=False)
    scheduler.clear()
    assert scheduler.pool.num_free == scheduler.pool.num_pages - 1


def test_the_queue_is_bounded_and_cancelled_requests_leave_it() -> None:
    scheduler = make(max_queued=2)
    waiting = [scheduler.add(request()), scheduler.add(request())]
    with pytest.raises(QueueFull, match="2 requests"):
        scheduler.add(request())
    scheduler.cancel(waiting[0])
    late = scheduler.add(request())
    with pytest.raises(QueueFull, match="2 requests"):
        scheduler.add(request())
    assert [s.id for s in admit_all(scheduler)] == [2, late.id]


def test_every_page_comes_back() -> None:
    scheduler = make()
    for index in range(6):
        scheduler.add(request(100 + index, first=index))
    for _ in range(3):
        for sequence in admit_all(scheduler):
            scheduler.cancel(sequence)
        for sequence in scheduler.active:
            scheduler.retire(sequence, keep=True)
    assert scheduler.idle
    assert scheduler.pool.num_free + scheduler.prefix.num_pages == scheduler.pool.num_pages - 1
    scheduler.prefix.clear()
    assert scheduler.pool.num_free == scheduler.pool.num_pages - 1


def test_a_request_whose_prefix_is_being_fetched_is_passed_over() -> None:
    scheduler = make()
    held, other = scheduler.add(request(100)), scheduler.add(request(100, first=500))
    held.held = True
    assert [sequence.id for sequence in admit_all(scheduler)] == [other.id]
    assert not scheduler.idle
    scheduler.retire(other, keep=False)
    assert scheduler.idle, "nothing to do until the fetch is over"
    held.held = False
    assert not scheduler.idle
    assert [sequence.id for sequence in admit_all(scheduler)] == [held.id]


def test_chunks_end_where_a_state_will_be_wanted() -> None:
    pool = PagePool(200)
    scheduler = Scheduler(pool, PrefixTree(pool, 4, lambda snapshot: None), Limits(1024), FixedDepth(4), True)
    scheduler.add(request(500))
    [first] = admit_all(scheduler)
    assert [plan.end_tokens for plan in finish_prefill(scheduler)] == [256, 448, 499]
    assert first.state_positions == (448,)
    scheduler.retire(first, keep=True)
    # Shares 300 tokens, whose keys are cached but no state: one is taken on the last page of them.
    scheduler.add(Request("", (*range(300), *range(900, 1100)), Sampling(), 1, 10, ()))
    [second] = admit_all(scheduler)
    assert second.cached_tokens == 0 and second.state_positions == (256, 448)
    assert [plan.end_tokens for plan in finish_prefill(scheduler)] == [256, 448, 499]


def test_a_short_question_does_not_wait_for_a_long_text() -> None:
    scheduler = make(num_pages=400, context=8192)
    scheduler.add(request(4000))
    [long] = admit_all(scheduler)
    scheduler.plan()
    scheduler.add(request(200, first=5000))
    [short] = admit_all(scheduler)
    chunks_until_short = 0
    while short.stage is Stage.PREFILL:
        plan = scheduler.plan()
        assert isinstance(plan, PrefillPlan)
        scheduler.prefill_done(plan)
        chunks_until_short += 1
    assert chunks_until_short <= 2 and long.stage is Stage.PREFILL
    turns = [scheduler.plan() for _ in range(4)]
    assert [isinstance(plan, PrefillPlan) for plan in turns] == [True, False, True, False] or [
        isinstance(plan, PrefillPlan) for plan in turns
    ] == [False, True, False, True]


def test_parts_beside_a_stream_follow_the_measured_time() -> None:
    scheduler = make(num_pages=400, context=8192, num_layers=40)
    scheduler.add(request(10))
    [stream] = admit_all(scheduler)
    finish_prefill(scheduler)
    scheduler.add(request(4000, first=5000))
    admit_all(scheduler)
    counts = []
    for _ in range(12):
        plan = scheduler.plan()
        if isinstance(plan, PrefillPlan):
            counts.append(scheduler.layers_now(plan) or 0)
            scheduler.pace.see_layers(plan.end_tokens - plan.start_tokens, counts[-1], 2.0 * counts[-1])
            scheduler.prefill_done(plan)
        else:
            emit(scheduler, plan, 1)
    assert counts[0] == 5 and counts[-1] == 20 and stream.stage is Stage.DECODE


def test_rows_are_shared_by_worth_where_nobody_fixed_them() -> None:
    scheduler = make(depth=7, shares_rows=True)
    for number in range(3):
        scheduler.add(request(first=100 * number))
    admit_all(scheduler)
    finish_prefill(scheduler)
    plan = scheduler.plan()
    assert isinstance(plan, VerifyPlan) and plan.row_budget == MAX_ROWS
    assert [slot.num_drafts for slot in plan.slots] == [7, 7, 7] and plan.num_rows == MAX_ROWS
    assert plan.graph_key.num_rows == MAX_ROWS
    fixed = replace(request(first=900), depth=7)
    scheduler.add(fixed)
    admit_all(scheduler)
    finish_prefill(scheduler)
    plan = scheduler.plan()
    assert isinstance(plan, VerifyPlan) and plan.row_budget is None and plan.num_rows <= MAX_ROWS


def test_rows_are_not_shared_where_a_budget_may_dictate_drafts() -> None:
    scheduler = make(depth=7, shares_rows=True)
    rule = ThinkingRule(budget_tokens=5, start_ids=(1,), end_ids=(2,), open_at_start=False)
    scheduler.add(replace(request(), thinking=rule))
    scheduler.add(request(first=300))
    admit_all(scheduler)
    finish_prefill(scheduler)
    plan = scheduler.plan()
    assert isinstance(plan, VerifyPlan) and plan.row_budget is None and plan.num_rows <= MAX_ROWS


def test_phases_follow_the_markers_of_thoughts_and_calls() -> None:
    rule = ThinkingRule(budget_tokens=None, start_ids=(9, 1), end_ids=(2,), open_at_start=False, close_ids=(3,))
    sequence = Sequence(1, replace(request(), thinking=rule, call_ids=(3, 4)))
    seen = []
    for step in ((7,), (1,), (7, 2), (7, 3), (7,), (4,), (1, 7), (3,), (4, 3, 4)):
        sequence.see_phase(step)
        seen.append(sequence.phase)
    thinking, answer, call = "thinking", "answer", "tool_call"
    assert seen == [answer, thinking, answer, call, call, answer, thinking, call, answer]
    plain = Sequence(2, request())
    plain.see_phase((1, 2, 3, 4))
    assert plain.phase == answer
