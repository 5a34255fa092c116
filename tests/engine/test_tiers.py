"""The disk below the engine: what comes back is what was there, bit for bit, and no failure reaches a generation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from localspec.api.types import Sampling
from localspec.engine.tier_bytes import BlockBytes
from localspec.engine.tiers import HostAndDisk
from tests.engine.tier_machine import LAW, Machine, eager, facts, prompt_ids, usable, wait
from tests.helpers.engine import Collected, make_request, run

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(request.param, tmp_path_factory.mktemp(request.param))


# Prompt lengths whose last cached token falls around the borders of a page, a tile and a segment.
@pytest.mark.parametrize("num_tokens", [63, 65, 66, 192, 255, 256, 257, 258, 320, 511, 513, 530])
def test_a_restored_turn_equals_the_unbroken_run(machine: Machine, tmp_path: Path, num_tokens: int) -> None:
    first = prompt_ids(num_tokens, num_tokens)
    ask = dict(drafter="ngram", depth=5, logprobs=0, sampling=LAW)
    with machine.engine(tmp_path / "kv") as parts:
        [one] = run(parts, [make_request(first, max_tokens=9, **ask)])
        second = [*first, *one.token_ids, *prompt_ids(7, 21)]
        [unbroken] = run(parts, [make_request(second, max_tokens=16, **ask)])
    with machine.engine_without() as parts:
        [fresh] = run(parts, [make_request(second, max_tokens=16, **ask)])
        assert fresh.cached_tokens == 0
    with machine.engine(tmp_path / "kv") as parts:
        eager(parts)
        # What the second turn left is longer than its prompt, so cut it: the first turn's end must do.
        [restored] = run(parts, [make_request(second, max_tokens=16, **ask)])
        tiers = parts.metrics.snapshot().tiers
    assert restored.cached_tokens >= unbroken.cached_tokens == num_tokens + 8
    assert facts([restored]) == facts([unbroken]) == facts([fresh])
    assert tiers["ssd_hit_rate"] == 1.0


def test_four_streams_after_a_restart(machine: Machine, tmp_path: Path) -> None:
    system = prompt_ids(1, 270)
    prompts = [[*system, *prompt_ids(seed, 40 * seed)] for seed in range(1, 5)]
    asks = [
        dict(drafter=drafter, depth=3, logprobs=0, sampling=LAW, seed=seed, max_tokens=12, chat_id=f"c{seed}")
        for seed, drafter in enumerate(("off", "ngram", "mtp", "ngram+mtp"))
    ]
    with machine.engine(tmp_path / "kv") as parts:
        first = run(parts, [make_request(p, **ask) for p, ask in zip(prompts, asks, strict=True)])
        nexts = [[*p, *f.token_ids, *prompt_ids(9, 5)] for p, f in zip(prompts, first, strict=True)]
        unbroken = run(parts, [make_request(p, **ask) for p, ask in zip(nexts, asks, strict=True)])
    for count in (1, 2, 4):
        with machine.engine(tmp_path / "kv") as parts:
            eager(parts)
            restored = run(parts, [make_request(p, **ask) for p, ask in zip(nexts, asks, strict=True)][:count])
        assert facts(restored) == facts(unbroken[:count])
        assert all(item.cached_tokens >= len(p) + 11 for item, p in zip(restored, prompts, strict=False))


def test_acceptance_after_a_restore_is_that_of_the_unbroken_run(machine: Machine, tmp_path: Path) -> None:
    """Hot, so that the shared noise decides and random drafters are right often."""
    first = prompt_ids(4, 300)
    ask = dict(drafter="mtp", depth=4, max_tokens=30, logprobs=0, sampling=Sampling(temperature=9.0))
    with machine.engine(tmp_path / "kv") as parts:
        [one] = run(parts, [make_request(first, **ask)])
        second = [*first, *one.token_ids, 5, 6, 7]
        [unbroken] = run(parts, [make_request(second, private=True, **ask)])
    with machine.engine(tmp_path / "kv") as parts:
        eager(parts)
        [restored] = run(parts, [make_request(second, private=True, **ask)])
    assert restored.cached_tokens == unbroken.cached_tokens == 329
    assert facts([restored]) == facts([unbroken])
    assert restored.end is not None and unbroken.end is not None
    counts = [item.end.timings.accepted_per_position for item in (restored, unbroken) if item.end is not None]
    assert counts[0] == counts[1] and sum(counts[0]) > 0


def test_a_departure_inside_a_segment(machine: Machine, tmp_path: Path) -> None:
    """An edited message: attention takes every common token, a hybrid the nearest state before the edit."""
    first = prompt_ids(5, 400)
    with machine.engine(tmp_path / "kv") as parts:
        run(parts, [make_request(first, max_tokens=80)])
    edited = [*first[:390], 1, 2, 3, 4]
    regenerated = [*first]
    with machine.engine(tmp_path / "kv") as parts:
        eager(parts)
        [one] = run(parts, [make_request(edited, max_tokens=8, logprobs=0)])
        assert one.cached_tokens == (usable(parts, 400) if parts.scheduler.needs_state else 390)
    with machine.engine(tmp_path / "kv") as parts:
        eager(parts)
        [two] = run(parts, [make_request(regenerated, max_tokens=8, logprobs=0)])
        assert two.cached_tokens == usable(parts, 400)
    with machine.engine_without() as parts:
        fresh = run(parts, [make_request(edited, max_tokens=8, logprobs=0)])
        assert facts(fresh) == facts([one])


def test_a_template_that_rewrites_the_end_of_the_prompt(machine: Machine, tmp_path: Path) -> None:
    """An opened thought is gone once it is history: the next turn departs a few tokens before the prompt's end."""
    first = [*prompt_ids(5, 500), 91, 92, 93]
    ask = dict(max_tokens=20, logprobs=0)
    with machine.engine(tmp_path / "kv") as parts:
        [one] = run(parts, [make_request(first, **ask)])
        second = [*first[:500], 94, *one.token_ids[8:], 95, 96]
        [unbroken] = run(parts, [make_request(second, private=True, **ask)])
    with machine.engine(tmp_path / "kv") as parts:
        eager(parts)
        [restored] = run(parts, [make_request(second, private=True, **ask)])
        assert restored.cached_tokens == (usable(parts, 503) if parts.scheduler.needs_state else 500)
    with machine.engine_without() as parts:
        assert facts([restored]) == facts([unbroken]) == facts(run(parts, [make_request(second, **ask)]))


def test_a_shared_beginning_gets_a_state_of_its_own(machine: Machine, tmp_path: Path) -> None:
    """The second conversation with a system prompt leaves a state at its end, the third resumes there."""
    system = prompt_ids(1, 330)
    chats = [[*system, 100 + seed, *prompt_ids(seed, 200)] for seed in (2, 3, 4)]
    with machine.engine(tmp_path / "kv") as parts:
        for chat in chats[:2]:
            run(parts, [make_request(chat, max_tokens=4)])
        needs_state = parts.scheduler.needs_state
    with machine.engine(tmp_path / "kv") as parts:
        eager(parts)
        [third] = run(parts, [make_request(chats[2], max_tokens=4, logprobs=0)])
    assert third.cached_tokens == (320 if needs_state else 330)
    with machine.engine_without() as parts:
        assert facts([third]) == facts(run(parts, [make_request(chats[2], max_tokens=4, logprobs=0)]))


def test_warm_brings_a_chat_before_its_request(machine: Machine, tmp_path: Path) -> None:
    first = prompt_ids(6, 300)
    with machine.engine(tmp_path / "kv") as parts:
        run(parts, [make_request(first, max_tokens=4, chat_id="a")])
    with machine.engine(tmp_path / "kv") as parts:
        eager(parts)
        parts.loop.tiers.warm(tuple(first[:-1]), "a").result(20)
        found: list[int] = []
        prefix, needs_state = parts.scheduler.prefix, parts.scheduler.needs_state
        parts.loop.call(lambda: found.append(prefix.match(tuple(first[:-1]), needs_state).total_tokens)).result(20)
        assert found == [usable(parts, 300)]


def test_private_and_forgotten_chats_leave_nothing(machine: Machine, tmp_path: Path) -> None:
    kv_dir = tmp_path / "kv"
    with machine.engine(kv_dir) as parts:
        run(parts, [make_request(prompt_ids(1, 300), max_tokens=4, chat_id="p", private=True)])
        run(parts, [make_request(prompt_ids(2, 300), max_tokens=4, chat_id="a")])
        run(parts, [make_request(prompt_ids(2, 280) + [3] * 40, max_tokens=4, chat_id="b")])
        parts.loop.forget("a").result(20)
        parts.loop.tiers.forget("a").result(20)
    with machine.engine(kv_dir) as parts:
        eager(parts)
        [private] = run(parts, [make_request(prompt_ids(1, 300), max_tokens=4)])
        [other] = run(parts, [make_request(prompt_ids(2, 280) + [3] * 40, max_tokens=4)])
        assert private.cached_tokens == 0 and other.cached_tokens == 319
        parts.loop.tiers.forget("b").result(20)
    with machine.engine(kv_dir) as parts:
        run(parts, [make_request(prompt_ids(1, 300), max_tokens=4, chat_id="p", private=True)])
    modes = {oct(path.stat().st_mode & 0o777) for path in kv_dir.rglob("*") if path.is_file()}
    assert modes == {"0o600"}


def test_damage_is_at_most_a_recompute(machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv_dir = tmp_path / "kv"
    first = prompt_ids(8, 600)
    with machine.engine(kv_dir) as parts:
        [one] = run(parts, [make_request(first, max_tokens=8, logprobs=0)])
    generator = random.Random(5)
    num_said = 0
    for round_ in range(6):
        files = sorted(path for path in kv_dir.rglob("*.blk"))
        victim = files[generator.randrange(len(files))]
        data = bytearray(victim.read_bytes())
        if round_ % 3 == 0:
            victim.write_bytes(data[: generator.randrange(len(data))])
        elif round_ % 3 == 1:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            victim.write_bytes(data)
        else:
            victim.unlink()
        with machine.engine(kv_dir) as parts:
            eager(parts)
            [again] = run(parts, [make_request(first, max_tokens=8, logprobs=0)])
            assert facts([again]) == facts([one]), victim
        num_said += "computed again" in caplog.text
        caplog.clear()
    assert num_said >= 3, "a state that this prompt does not need may break unseen, a segment may not"


def test_a_lost_index_is_made_again(machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv_dir = tmp_path / "kv"
    first = prompt_ids(8, 400)
    with machine.engine(kv_dir) as parts:
        [one] = run(parts, [make_request(first, max_tokens=8, logprobs=0)])
    for content in (b"", b"not an index at all" * 500):
        for path in kv_dir.glob("index*"):
            path.unlink()
        (kv_dir / "index.sqlite3").write_bytes(content)
        with machine.engine(kv_dir) as parts:
            eager(parts)
            tiers = parts.loop.tiers
            assert isinstance(tiers, HostAndDisk) and tiers._store is not None
            index = tiers._store.index
            wait(lambda index=index: not index.is_new)  # type: ignore[misc]
            wait(lambda index=index: index.total_bytes() > 0)  # type: ignore[misc]
            [again] = run(parts, [make_request(first, max_tokens=8, logprobs=0)])
            assert facts([again]) == facts([one])
            assert again.cached_tokens >= usable(parts, 400)
    assert "made again from the files" in caplog.text


def test_two_engines_on_one_directory(machine: Machine, tmp_path: Path) -> None:
    kv_dir = tmp_path / "kv"
    prompts = [prompt_ids(seed, 300) for seed in range(4)]
    with machine.engine(kv_dir) as left, machine.engine(kv_dir) as right:
        eager(left)
        eager(right)
        one = run(left, [make_request(p, max_tokens=6, logprobs=0) for p in prompts[:3]])
        two = run(right, [make_request(p, max_tokens=6, logprobs=0) for p in prompts[1:]])
        assert facts(one[1:]) == facts(two[:2])
        tiers = left.loop.tiers
        assert isinstance(tiers, HostAndDisk)
        wait(lambda: not tiers._waiting)
        [seen] = run(right, [make_request(prompts[0], max_tokens=6, logprobs=0)])
        assert seen.cached_tokens == usable(right, 300) and facts([seen]) == facts(one[:1])


def test_an_unusable_directory_costs_nothing_but_the_cache(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "kv").symlink_to(tmp_path)
    with machine.engine(tmp_path / "kv") as parts:
        [one] = run(parts, [make_request(prompt_ids(3, 100), max_tokens=4)])
        assert len(one.token_ids) == 4


def test_streams_go_on_while_a_restore_is_slow(machine: Machine, tmp_path: Path) -> None:
    kv_dir = tmp_path / "kv"
    long = prompt_ids(3, 500)
    with machine.engine(kv_dir) as parts:
        run(parts, [make_request(long, max_tokens=4)])
    with machine.engine(kv_dir) as parts:
        eager(parts)
        tiers = parts.loop.tiers
        assert isinstance(tiers, HostAndDisk)
        go: list[bool] = []
        lookup = tiers._store.lookup

        def slow(*args: object, **more: object) -> object:
            wait(lambda: bool(go))
            return lookup(*args, **more)  # type: ignore[arg-type]

        tiers._store.lookup = slow  # type: ignore[method-assign, assignment]
        held = Collected()
        parts.loop.submit(make_request(long, max_tokens=4), held.see)
        short = run(parts, [make_request([1, 2, 3], max_tokens=30)])
        assert len(short[0].token_ids) == 30 and not held.token_ids
        cancelled = Collected()
        ticket = parts.loop.submit(make_request([*long, 1], max_tokens=4), cancelled.see)
        parts.loop.cancel(ticket)
        assert cancelled.done.wait(20)
        go.append(True)
        assert held.done.wait(20) and held.cached_tokens == usable(parts, 500)


def test_memory_is_placed_for_what_is_stored_within_a_bound(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[int] = []
    monkeypatch.setattr(BlockBytes, "use_ahead", lambda self, num_tokens: placed.append(num_tokens))
    with machine.engine(tmp_path / "kv") as parts:
        run(parts, [make_request(prompt_ids(3, 400), max_tokens=8)])
    with machine.engine(tmp_path / "kv"):
        monkeypatch.setattr("localspec.engine.tiers.MOST_USED_AHEAD_BYTES", 4096)
    with machine.engine(tmp_path / "kv"):
        assert placed[0] == 0 and placed[1] >= 400 > placed[2]
