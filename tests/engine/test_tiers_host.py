"""Every tier gives back what the device had, bit for bit, and acceptance goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.cache.spill import SpillLimits
from localspec.cache.spill_limits import ChosenLimits, write_limits
from localspec.engine.build import Assembled
from localspec.engine.tiers import HostAndDisk, TierLimits
from tests.engine.tier_machine import LAW, Machine, compare_tiers, eager, facts, leave_only, prompt_ids, usable, wait
from tests.helpers.engine import make_request, run

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(request.param, tmp_path_factory.mktemp(request.param), ("ngram",))


def tiers_of(parts: Assembled) -> HostAndDisk:
    assert isinstance(parts.loop.tiers, HostAndDisk)
    return parts.loop.tiers


@pytest.mark.parametrize(("kind", "num_tokens", "count"), [("llama", 505, 3), ("qwen3_5", 257, 4)])
def test_each_tier_equals_the_device(tmp_path: Path, kind: str, num_tokens: int, count: int) -> None:
    """A few of the cuts that scripts/sweep_tiers.py takes."""
    machine = Machine(kind, tmp_path / "model", ("ngram", "mtp", "eagle3"))
    compared = compare_tiers(machine, tmp_path, num_tokens, count)
    assert compared.equal and compared.accepted > 0


def test_half_from_memory_and_half_from_disk(machine: Machine, tmp_path: Path) -> None:
    """A host budget that holds the head of a long chain only: attention takes the rest from disk."""
    first = prompt_ids(3, 900)
    ask = dict(max_tokens=8, logprobs=0, sampling=LAW)
    with machine.engine(tmp_path / "kv") as parts:
        needed = 3 * 256 * tiers_of(parts)._copies.token_bytes
    with machine.engine(tmp_path / "kv", host_bytes=needed) as parts:
        eager(parts)
        [one] = run(parts, [make_request(first, **ask)])
        leave_only(parts, "host")
        assert tiers_of(parts)._pool.stored_bytes <= needed
        [again] = run(parts, [make_request(first, **ask)])
        assert facts([again]) == facts([one]) and again.cached_tokens == usable(parts, 900)
        figures = parts.metrics.snapshot().tiers
        assert figures["ssd_restore_mb_per_s"] > 0 and figures["host_bytes"] <= needed
        assert parts.scheduler.needs_state or figures["host_restore_mb_per_s"] > 0


def test_memory_that_the_driver_does_not_pin_goes_through_the_ring(machine: Machine, tmp_path: Path) -> None:
    first = prompt_ids(4, 300)
    with machine.engine(tmp_path / "kv") as parts:
        tiers_of(parts)._memory.needs_ring = True
        [one] = run(parts, [make_request(first, max_tokens=4, logprobs=0)])
        leave_only(parts, "host")
        [again] = run(parts, [make_request(first, max_tokens=4, logprobs=0)])
        assert facts([again]) == facts([one]) and again.cached_tokens == usable(parts, 300)


def test_private_chats_stay_in_memory(machine: Machine, tmp_path: Path) -> None:
    first = prompt_ids(5, 300)
    with machine.engine(tmp_path / "kv") as parts:
        run(parts, [make_request(first, max_tokens=4, private=True, chat_id="p")])
        leave_only(parts, "host")
        [again] = run(parts, [make_request(first, max_tokens=4, private=True, chat_id="p")])
        assert again.cached_tokens == usable(parts, 300)
        wait(lambda: not tiers_of(parts)._waiting)
        parts.loop.forget("p").result(20)
        parts.loop.tiers.forget("p").result(20)
        assert tiers_of(parts)._pool.num_blocks == 0
    assert not list((tmp_path / "kv").rglob("*.blk"))


def test_a_disk_that_cannot_be_used_leaves_memory(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file where the directory should be")
    first = prompt_ids(6, 300)
    with machine.engine(tmp_path / "kv") as parts:
        [one] = run(parts, [make_request(first, max_tokens=4, logprobs=0)])
        leave_only(parts, "host")
        [again] = run(parts, [make_request(first, max_tokens=4, logprobs=0)])
        assert facts([again]) == facts([one]) and again.cached_tokens == usable(parts, 300)
        assert "ssd_bytes" not in parts.metrics.snapshot().tiers


def test_reading_that_does_not_pay_is_left_out_and_said(machine: Machine, tmp_path: Path) -> None:
    first = prompt_ids(6, 300)
    with machine.engine(tmp_path / "kv") as parts:
        run(parts, [make_request(first, max_tokens=4)])
    with machine.engine(tmp_path / "kv") as parts:
        figures = tiers_of(parts)._figures
        figures.prefill_tok_per_s, figures.read_bytes_per_s = 1e9, 1.0
        [again] = run(parts, [make_request(first, max_tokens=4)])
        assert again.cached_tokens == 0 and again.end is not None
        assert again.end.timings.cache_miss_reason.startswith("slow disk")


def test_what_other_arithmetic_computed_is_not_served(tmp_path: Path) -> None:
    machine, first = Machine("llama", tmp_path / "model", ("ngram",)), prompt_ids(9, 300)
    for arithmetic, cached in ((machine.ops.arithmetic, 0), (machine.ops.arithmetic, 299), ("another", 0)):
        machine.ops.arithmetic = arithmetic
        with machine.engine(tmp_path / "kv") as parts:
            [one] = run(parts, [make_request(first, max_tokens=1)])
            assert one.cached_tokens == cached


def test_why_a_prompt_was_not_found(machine: Machine, tmp_path: Path) -> None:
    first = prompt_ids(6, 600)
    edited = [*first[:500], *prompt_ids(9, 100)]
    with machine.engine(tmp_path / "kv") as parts:
        eager(parts)

        def reason(ids: list[int], chat_id: str | None = "a") -> str:
            [item] = run(parts, [make_request(ids, max_tokens=4, chat_id=chat_id)])
            assert item.end is not None
            return item.end.timings.cache_miss_reason.split(":")[0]

        assert reason(first) == "first time"
        assert reason(first) == ""
        assert reason(edited, "b") in ("first time", "no state")
        assert reason([*first[:450], *prompt_ids(8, 100)]) in ("edited message", "no state")
        wait(lambda: not tiers_of(parts)._waiting)
        tiers_of(parts)._pool.clear()
        parts.loop.tiers.forget("a").result(20)
        parts.loop.tiers.forget("b").result(20)
        parts.loop.call(lambda: parts.scheduler.prefix.evict(10_000)).result(20)
        assert reason(first) == "evicted"
    # The same chat under other drafters is another cache.
    other = Machine.__new__(Machine)
    other.__dict__.update(machine.__dict__, drafter_names=("ngram", "mtp"))
    with other.engine(tmp_path / "kv") as parts:
        [item] = run(parts, [make_request(first, max_tokens=4, chat_id="a")])
        assert item.end is not None and item.end.timings.cache_miss_reason.startswith("other model")


def test_caps_of_a_full_disk_do_not_reach_memory(machine: Machine, tmp_path: Path) -> None:
    first = prompt_ids(2, 300)
    with machine.engine(tmp_path / "kv", SpillLimits(cap_bytes=0, min_free_bytes=0)) as parts:
        run(parts, [make_request(first, max_tokens=4)])
        leave_only(parts, "host")
        [again] = run(parts, [make_request(first, max_tokens=4)])
        assert again.cached_tokens == usable(parts, 300)
        assert parts.metrics.snapshot().tiers["ssd_bytes"] == 0


def test_chosen_limits_hold_where_nothing_else_is_said(tmp_path: Path) -> None:
    write_limits(tmp_path, ChosenLimits(cap_bytes=5 << 20, host_bytes=1 << 20))
    assert TierLimits().or_chosen(tmp_path) == TierLimits(SpillLimits(5 << 20), 1 << 20)
    said = TierLimits(SpillLimits(cap_bytes=7, min_free_bytes=0), 3)
    assert said.or_chosen(tmp_path) == said
