"""One model at a time, the one asked for last: whoever changes his mind, leaves, mistypes or closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from localspec.api.types import EngineError
from localspec.engine.loading import LoadedModels

Report = Callable[[str], None]


@dataclass
class Fake:
    id: str
    log: list[str]

    def start(self) -> None:
        self.log.append(f"{self.id} starts")

    def close(self) -> None:
        self.log.append(f"{self.id} ends")


@dataclass
class Shelf:
    """Models by name; making one waits until the test lets it go on."""

    log: list[str] = field(default_factory=list)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    begun: dict[str, threading.Event] = field(default_factory=dict)

    def gate(self, name: str) -> threading.Event:
        self.begun[name] = threading.Event()
        return self.gates.setdefault(name, threading.Event())

    def find(self, name: str, report: Report) -> Callable[[Report], Fake]:
        report(f"finding {name}")
        if name.startswith("no "):
            raise EngineError("model_not_found", f"there is no model {name!r}")
        if name.startswith("broken "):
            raise RuntimeError("as asked")

        def make(report: Report) -> Fake:
            self.log.append(f"{name} is made")
            if name in self.gates:
                self.begun[name].set()
                assert self.gates[name].wait(60)
            report("done")
            return Fake(name, self.log)

        return make


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def models(shelf: Shelf) -> LoadedModels[Fake]:
    return LoadedModels(shelf.find)


def current_id(models: LoadedModels[Fake]) -> str:
    return models.current.id if models.current is not None else ""


async def load(models: LoadedModels[Fake], name: str) -> None:
    async with asyncio.timeout(60):
        await models.outcome(models.begin(name))


async def begun(shelf: Shelf, name: str) -> None:
    assert await asyncio.to_thread(shelf.begun[name].wait, 60)


async def test_one_model_takes_the_place_of_another(models: LoadedModels[Fake], shelf: Shelf) -> None:
    await load(models, "a")
    await load(models, "b")
    assert current_id(models) == "b"
    assert shelf.log == ["a is made", "a starts", "a ends", "b is made", "b starts"], "never two at once"
    await models.close()
    assert shelf.log[-1] == "b ends" and models.current is None


@pytest.mark.parametrize("name", ["no such", "broken place"])
async def test_a_name_that_cannot_be_found_takes_nothing_away(
    models: LoadedModels[Fake], shelf: Shelf, name: str
) -> None:
    await load(models, "a")
    with pytest.raises(EngineError, match=r"no such|broken place could not be loaded: as asked"):
        await load(models, name)
    assert current_id(models) == "a" and shelf.log == ["a is made", "a starts"]


async def test_who_changes_his_mind_gets_the_last_and_only_that(models: LoadedModels[Fake], shelf: Shelf) -> None:
    gate = shelf.gate("slow")
    slow = models.begin("slow")
    await begun(shelf, "slow")
    quick = models.begin("quick")
    with pytest.raises(EngineError, match="quick was asked for while slow"):
        await models.outcome(slow)
    ready = asyncio.create_task(models.until_settled())
    await asyncio.sleep(0.02)
    assert not ready.done() and "quick is made" not in shelf.log, "two models at once"
    gate.set()
    async with asyncio.timeout(60):
        await models.outcome(quick)
        await ready
    assert current_id(models) == "quick"
    assert [line for line in shelf.log if line.startswith("slow")] == ["slow is made"]


async def test_what_was_made_in_vain_goes(models: LoadedModels[Fake], shelf: Shelf) -> None:
    gate = shelf.gate("slow")
    make = shelf.find("slow", lambda stage: None)

    def find(name: str, report: Report) -> Callable[[Report], Fake]:
        # Says nothing once it is done, so it does not learn that it is in vain.
        return (lambda report: make(lambda stage: None)) if name == "slow" else shelf.find(name, report)

    models = LoadedModels(find)
    models.begin("slow")
    await begun(shelf, "slow")
    quick = models.begin("quick")
    gate.set()
    await models.outcome(quick)
    assert current_id(models) == "quick" and shelf.log.index("slow ends") < shelf.log.index("quick is made")


async def test_a_waiter_that_leaves_stops_nobody(models: LoadedModels[Fake], shelf: Shelf) -> None:
    gate = shelf.gate("a")
    loading = asyncio.create_task(models.outcome(models.begin("a")))
    others = [asyncio.create_task(models.until_settled()) for _ in range(2)]
    await begun(shelf, "a")
    for leaver in (loading, others[0]):
        leaver.cancel()
    await asyncio.gather(loading, others[0], return_exceptions=True)
    gate.set()
    async with asyncio.timeout(60):
        await others[1]
    assert current_id(models) == "a"


async def test_closing_releases_who_waits_and_what_comes_late(models: LoadedModels[Fake], shelf: Shelf) -> None:
    gate = shelf.gate("a")
    attempt = models.begin("a")
    waiting = asyncio.create_task(models.until_settled())
    await begun(shelf, "a")
    async with asyncio.timeout(60):
        await models.close()
        await waiting
        with pytest.raises(EngineError, match="was closed"):
            await models.outcome(attempt)
        with pytest.raises(EngineError, match="was closed"):
            await models.outcome(models.begin("b"))
    gate.set()
    assert attempt.thread is not None
    await asyncio.to_thread(attempt.thread.join, 60)
    assert models.current is None and "a starts" not in shelf.log


async def test_a_load_that_is_under_way_is_not_begun_again(models: LoadedModels[Fake], shelf: Shelf) -> None:
    gate = shelf.gate("a")
    first = models.begin("a")
    await begun(shelf, "a")
    assert models.begin("a") is first
    gate.set()
    await models.outcome(first)
    assert shelf.log == ["a is made", "a starts"]
    again = models.begin("a")
    await models.outcome(again)
    assert again is not first and shelf.log[2:] == ["a ends", "a is made", "a starts"]


async def test_closing_waits_for_what_a_model_that_is_replaced_writes(
    models: LoadedModels[Fake], shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(models, "a")
    reached, go_on = threading.Event(), threading.Event()

    def slow_end(self: Fake) -> None:
        reached.set()
        assert go_on.wait(60)
        shelf.log.append(f"{self.id} has written")

    monkeypatch.setattr(Fake, "close", slow_end)
    models.begin("b")
    assert await asyncio.to_thread(reached.wait, 60)
    closing = asyncio.create_task(models.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    go_on.set()
    async with asyncio.timeout(60):
        await closing
    assert "a has written" in shelf.log
