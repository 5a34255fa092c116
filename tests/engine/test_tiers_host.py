"""Every tier gives back what the device had, bit for bit, and acceptance goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.api.types import Sampling
from localspec.cache.spill import SpillLimits
from localspec.engine.build import Assembled
from localspec.engine.tiers import HostAndDisk
from tests.engine.tier_machine import LAW, Machine, eager, facts, prompt_ids, usable, wait
from tests.helpers.engine import Collected, make_request, run

pytestmark = pytest.mark.torch
TIERS = ("device", "host", "disk")


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(request.param, tmp_path_factory.mktemp(request.param), ("ngram", "mtp", "eagle3"))


def tiers_of(parts: Assembled) -> HostAndDisk:
    assert isinstance(parts.loop.tiers, HostAndDisk)
    return parts.loop.tiers


def leave_only(parts: Assembled, tier: str) -> None:
    """Empty every tier above the named one, after the turns before have reached it."""
    tiers = tiers_of(parts)
    wait(lambda: not tiers._waiting)
    if tier != "device":
        parts.loop.call(parts.scheduler.prefix.clear).result(20)
    if tier == "disk":
        tiers._pool.clear()


def accepted(items: list[Collected]) -> list[tuple[int, ...]]:
    return [item.end.timings.accepted_per_position for item in items if item.end is not None]


# Ends of the first turn around the borders of a page, a tile, a segment and of two segments.
@pytest.mark.parametrize("num_tokens", [64, 250, 257, 505, 512])
def test_each_tier_equals_the_device(machine: Machine, tmp_path: Path, num_tokens: int) -> None:
    drafters = ("mtp", "eagle3", "ngram", "ngram+mtp")
    firsts = [prompt_ids(seed, num_tokens + 3 * seed) for seed in range(4)]
    # Hot, so that the shared noise decides and random drafters are right often; 4 x (1 + 3) rows fill a step, so no
    # window is cut because of who else happens to run.
    asks = [
        dict(drafter=d, depth=3, logprobs=0, sampling=Sampling(temperature=9.0), seed=s, chat_id=f"c{s}")
        for s, d in enumerate(drafters)
    ]
    seen: dict[str, list[Collected]] = {}
    for tier in TIERS:
        with machine.engine(tmp_path / tier) as parts:
            eager(parts)
            ones = run(parts, [make_request(f, max_tokens=8, **a) for f, a in zip(firsts, asks, strict=True)])
            seconds = [[*f, *o.token_ids, *prompt_ids(7, 9)] for f, o in zip(firsts, ones, strict=True)]
            leave_only(parts, tier)
            requests = [make_request(s, max_tokens=14, private=True, **a) for s, a in zip(seconds, asks, strict=True)]
            count = {64: 1, 250: 2, 257: 3}.get(num_tokens, 4)
            seen[tier] = run(parts, requests[:count])
            figures = parts.metrics.snapshot().tiers
            assert (figures["host_restore_mb_per_s"] > 0) == (tier == "host")
            assert (figures["ssd_restore_mb_per_s"] > 0) == (tier == "disk")
            for item, first in zip(seen[tier], firsts, strict=False):
                assert item.cached_tokens >= len(first) + 7
    assert facts(seen["host"]) == facts(seen["device"]) == facts(seen["disk"])
    assert accepted(seen["host"]) == accepted(seen["device"]) == accepted(seen["disk"])
    assert sum(map(sum, accepted(seen["host"]))) > 0


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
    other.__dict__.update(machine.__dict__, drafter_names=("ngram",))
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
