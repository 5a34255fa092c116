"""A drafter that was idle, or a turn whose beginning comes from the cache: drafts are those of an unbroken run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from localspec.core.records import MAX_ROWS, MAX_SLOTS, SlotResult
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine.build import Assembled
from localspec.engine.keeping_up import MAX_LAST_PASSES, UnreadRows
from localspec.engine.verify_schedule import VerifySchedule
from tests.helpers.engine import make_request, run, token_engine
from tests.helpers.models import load_model, random_checkpoint, reference_ops

pytestmark = pytest.mark.torch
NAMES = ("mtp", "eagle3", "dflash", "dspark", "draft_model")
LIMIT = 640


@pytest.fixture(scope="module", params=NAMES)
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assembled]:
    torch.set_num_threads(1)
    ops = reference_ops()
    model = load_model(random_checkpoint("llama", 3, tmp_path_factory.mktemp(request.param)), ops)
    setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=LIMIT)
    with token_engine(model, ops, LIMIT, {request.param: drafter_module(request.param).tiny(setup)}) as engine:
        yield engine


@contextmanager
def confidences() -> Iterator[dict[int, list[list[float]]]]:
    """Of every window, by the drafts' sequence."""
    told: dict[int, list[list[float]]] = {}
    see = VerifySchedule.see

    def seen(self: VerifySchedule, result: SlotResult) -> list[float]:
        told.setdefault(result.sequence_id, []).append(list(result.confidence))
        return see(self, result)

    VerifySchedule.see = seen  # type: ignore[method-assign]
    try:
        yield told
    finally:
        VerifySchedule.see = see  # type: ignore[method-assign]


def drafts_of(parts: Assembled, prompt: list[int], name: str, salt: str) -> tuple[list[list[float]], list[int], int]:
    """Confidences of every window of an answer, its tokens, and how many of its prompt's tokens came from the cache."""
    with confidences() as told:
        found = run(parts, [make_request(prompt, drafter=name, depth=3, max_tokens=20, cache_salt=salt)])[0]
    return next(iter(told.values())), found.token_ids, found.cached_tokens


@pytest.mark.parametrize("idle_tokens", [9, 150])
def test_a_next_turn_drafts_as_if_it_had_read_everything_itself(parts: Assembled, idle_tokens: int) -> None:
    name = parts.loop.stages.drafters.names[0]
    prompt = [(7 * i + idle_tokens) % 90 for i in range(70 + idle_tokens)]
    answer = run(parts, [make_request(prompt, drafter="off", max_tokens=idle_tokens)])[0].token_ids
    turn = [*prompt, *answer, *((11 * i) % 90 for i in range(30))]
    found, tokens, cached = drafts_of(parts, turn, name, "")
    whole, expected, none = drafts_of(parts, turn, name, f"another {idle_tokens}")
    assert cached >= len(prompt) + idle_tokens - 1 and none == 0 and tokens == expected
    assert len(found) == len(whole) and sum(map(len, found)) > 20
    for window, wanted in zip(found, whole, strict=True):
        assert window == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def test_an_idle_drafter_loses_nothing(parts: Assembled) -> None:
    """Switched on after a long pause within one answer: at once it speaks, as after a prompt that it has read."""
    drafters = parts.loop.stages.drafters
    name = drafters.names[0]
    if not drafters.unread.waiters[name].loses_rows:
        return  # It reads the text itself, which is all there.
    prompt = [(5 * i) % 90 for i in range(40)]
    run(parts, [make_request(prompt, drafter="off", max_tokens=200)])
    assert max(drafters.unread.rows[name]) < 2 * MAX_ROWS


def test_rows_are_counted_as_they_are_shared() -> None:
    class Passes:
        loses_rows = True

        def catch_up(self, *arguments: object) -> None:
            pass

    unread = UnreadRows({"mtp": Passes()}, {"mtp": [0] * MAX_SLOTS})
    for slot, tokens in ((0, 3), (1, 20), (3, 9)):
        unread.landed(slot, tokens)
    assert unread.due() == ["mtp"]
    unread.ran("mtp", (0, 1, 3), MAX_ROWS)
    assert unread.rows["mtp"] == [0, 14, 0, 3]
    unread.ran("ngram", (0, 1, 3), MAX_ROWS)
    unread.ran("mtp", (1,), 8)
    assert unread.rows["mtp"] == [0, 6, 0, 3]
    unread.landed(1, 8)
    assert unread.last_passes(1) == ["mtp"] and unread.last_passes(0) == []
    unread.landed(1, 2)
    unread.landed(1, 40)
    assert unread.last_passes(1) == ["mtp"] * 4
    unread.landed(1, 4000)
    assert len(unread.last_passes(1)) == MAX_LAST_PASSES
    unread.admit(1)
    assert unread.rows["mtp"] == [0, 0, 0, 3] and unread.due() == []


def test_a_prompt_that_is_read_meanwhile_is_left_alone(parts: Assembled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a prompt beside an idle answer: nothing of them waits, though the drafter runs at every step."""
    monkeypatch.setattr(UnreadRows, "due", lambda self: list(self.waiters))
    name = parts.loop.stages.drafters.names[0]
    prompt = [(13 * i + 1) % 90 for i in range(420)]
    asked = make_request(prompt, drafter=name, depth=3, max_tokens=20, cache_salt="beside")
    with confidences() as told:
        run(parts, [make_request([5, 6, 7, 8], drafter="off", max_tokens=120), asked])
    beside = next(windows for windows in told.values() if any(windows))
    whole, _, _ = drafts_of(parts, prompt, name, "alone")
    for window, wanted in zip(beside, whole, strict=True):
        assert window == pytest.approx(wanted, rel=1e-3, abs=1e-5)
