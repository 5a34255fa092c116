"""A chat that is deleted while something of it is on its way: an answer that runs, a prefix that comes back."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from localspec.api.types import EngineError
from localspec.engine.build import Assembled
from localspec.engine.tiers import HostAndDisk
from tests.engine.tier_machine import Machine, eager, leave_only, prompt_ids, wait
from tests.helpers.engine import Collected, make_request, run

pytestmark = pytest.mark.torch
CHAT = "deleted"


def forget(parts: Assembled) -> None:
    for future in (parts.loop.forget(CHAT), parts.loop.tiers.forget(CHAT)):
        future.result(20)


def left(parts: Assembled, prompt: list[int]) -> tuple[int, int, int]:
    """Of the chat: tokens on the device, blocks that were in host memory until now, blocks on disk."""
    tiers = parts.loop.tiers
    assert isinstance(tiers, HostAndDisk) and tiers.store is not None
    wait(lambda: not tiers.num_waiting)
    tokens: list[int] = []
    parts.loop.call(lambda: tokens.append(parts.scheduler.prefix.match(tuple(prompt), False).total_tokens)).result(20)
    return tokens[0], tiers._pool.forget_chat(CHAT), len(tiers.store.index.of_chat(CHAT))


@pytest.mark.parametrize(("kind", "cancelled"), [("llama", False), ("qwen3_5", False), ("llama", True)])
def test_nothing_is_kept_of_an_answer_that_ran(kind: str, cancelled: bool, tmp_path: Path) -> None:
    prompt = prompt_ids(3, 300)
    with Machine(kind, tmp_path, drafters=("ngram",)).engine() as parts:
        running, queued = Collected(), Collected()
        blockers = [Collected() for _ in range(3)]
        for index, blocker in enumerate(blockers):
            parts.loop.submit(make_request([index, 7, 8], max_tokens=60), blocker.see)
        ticket = parts.loop.submit(make_request(prompt, max_tokens=60, chat_id=CHAT), running.see)
        parts.loop.submit(make_request(prompt_ids(4, 200), max_tokens=3, chat_id=CHAT), queued.see)
        wait(lambda: len(running.token_ids) > 3)
        if cancelled:
            parts.loop.cancel(ticket)
        forget(parts)
        for each in (running, queued, *blockers):
            assert each.done.wait(60) and each.end is not None and each.end.error is None
        assert running.end is not None and running.end.finish == ("cancelled" if cancelled else "length")
        assert left(parts, prompt) == left(parts, prompt_ids(4, 200)) == (0, 0, 0)
        run(parts, [make_request(prompt, max_tokens=3, chat_id=CHAT)])
        assert min(left(parts, prompt)) > 0, "what is asked afterwards is kept as ever"


def test_memory_and_disk_come_after_the_decode_thread(tmp_path: Path) -> None:
    """A turn that ends before that thread hears of it would be kept behind the deletion."""
    prompt = prompt_ids(3, 300)
    with Machine("llama", tmp_path, drafters=("ngram",)).engine() as parts:
        run(parts, [make_request(prompt, max_tokens=3, chat_id=CHAT)])
        tiers = parts.loop.tiers
        assert isinstance(tiers, HostAndDisk)
        wait(lambda: not tiers.num_waiting)
        reached, go_on = threading.Event(), threading.Event()

        def busy() -> None:
            reached.set()
            assert go_on.wait(60)

        parts.loop.call(busy)
        assert reached.wait(60)
        futures = (parts.loop.forget(CHAT), parts.loop.tiers.forget(CHAT))
        time.sleep(0.1)
        assert tiers._pool.num_blocks > 0
        go_on.set()
        for future in futures:
            future.result(20)
        assert left(parts, prompt) == (0, 0, 0)


@pytest.mark.parametrize("private", [False, True])
def test_a_prefix_on_its_way_back_does_not_arrive(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_ids(3, 500)
    with Machine("llama", tmp_path, drafters=("ngram",)).engine() as parts:
        eager(parts)
        run(parts, [make_request(prompt, max_tokens=4, chat_id=CHAT)])
        leave_only(parts, "host")
        tiers = parts.loop.tiers
        assert isinstance(tiers, HostAndDisk)
        loaded, go_on = threading.Event(), threading.Event()
        load = tiers._restorer._load

        def slow(*arguments: Any) -> Any:
            result = load(*arguments)
            loaded.set()
            assert go_on.wait(60)
            return result

        monkeypatch.setattr(tiers._restorer, "_load", slow)
        asked = Collected()
        if private:
            parts.loop.submit(make_request(prompt, max_tokens=4, chat_id=CHAT, private=True), asked.see)
        warmed = None if private else tiers.warm(tuple(prompt), CHAT)
        assert loaded.wait(60)
        forget(parts)
        go_on.set()
        if warmed is not None:
            warmed.result(20)
        else:
            assert asked.done.wait(60) and asked.end is not None and asked.end.error is None
            assert asked.cached_tokens == 0
        time.sleep(0.05)
        assert left(parts, prompt) == (0, 0, 0)
        assert parts.scheduler.pool.num_free == parts.scheduler.pool.num_pages - 1


def test_tiers_that_are_closed_keep_nobody_waiting(tmp_path: Path) -> None:
    """The model is switched while a chat is opened, asked and deleted."""
    prompt = prompt_ids(3, 300)
    with Machine("llama", tmp_path, drafters=("ngram",)).engine() as parts:
        [first] = run(parts, [make_request(prompt, max_tokens=3, chat_id=CHAT)])
        leave_only(parts, "host")
        tiers = parts.loop.tiers
        tiers.close()
        tiers.warm(tuple(prompt), CHAT).result(20)
        [again] = run(parts, [make_request(prompt, max_tokens=3, chat_id=CHAT)], timeout_s=20.0)
        assert again.token_ids == first.token_ids and again.cached_tokens == 0
        assert isinstance(tiers.forget(CHAT).exception(20), EngineError), "it is still on disk"


def test_a_disk_that_fails_is_said_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    prompt = prompt_ids(3, 300)
    with Machine("llama", tmp_path, drafters=("ngram",)).engine() as parts:
        tiers = parts.loop.tiers
        assert isinstance(tiers, HostAndDisk) and tiers.store is not None
        run(parts, [make_request(prompt, max_tokens=3, chat_id=CHAT)])
        wait(lambda: not tiers.num_waiting)
        with monkeypatch.context() as broken:
            broken.setattr(tiers.store.files, "delete", failing)
            with pytest.raises(EngineError, match="cannot be deleted"):
                tiers.forget(CHAT).result(20)
        assert tiers.forget(CHAT).result(20) is None
        assert left(parts, prompt)[2] == 0
