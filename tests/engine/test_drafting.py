"""Drafters of an engine behind one call: who speaks first, who goes on behind whom, and what the host tells them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from localspec.api.types import Sampling
from localspec.cache.pool import CachePool
from localspec.core.cache_spec import CacheSpec
from localspec.core.records import MAX_SLOTS, Draft, Forward, HiddenNeeds, Request, Rows, SlotPlan, VerifyPlan
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths, Drafter
from localspec.drafters.ngram import NgramDrafter, NgramOptions
from localspec.engine.drafting import DrafterSet
from localspec.runner.slots import fill_slot, make_state

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
PHRASE = list(range(20, 40))


@dataclass
class Fixed:
    """Says what it was given, as deep as it may."""

    name: str
    words: list[int]
    max_depth: int = 7
    origins: tuple[str, ...] = ("fixed",)
    needs: HiddenNeeds = field(default_factory=HiddenNeeds)
    cache_spec: CacheSpec = field(default_factory=lambda: CacheSpec("fixed", "fixed"))
    asked: list[Depths] = field(default_factory=list)

    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        self.asked.append(depths)
        ids = torch.full((MAX_SLOTS, depths.max_depth), -1)
        for slot, depth in enumerate(depths.depths.tolist()):
            words = self.words[: min(depth, self.max_depth)]
            ids[slot, : len(words)] = torch.tensor(words, dtype=torch.int64)
        confidence = torch.where(ids >= 0, 0.75, 0.0)
        return Draft(ids, torch.zeros_like(ids), (ids >= 0).sum(dim=1), self.origins, confidence)

    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass


def request(prompt: list[int], prediction: tuple[int, ...] = ()) -> Request:
    return Request("r", tuple(prompt), Sampling(), 1, 50, (), prediction_ids=prediction)


def drafters(*parts: Drafter) -> DrafterSet:
    return DrafterSet({part.name: part for part in parts}, CachePool([], 2, MAX_SLOTS, CPU), CPU)


def propose(chosen: DrafterSet, requests: list[Request], plans: list[tuple[str, int]]) -> Draft:
    state = make_state(256, 100, CPU)
    slots = []
    for slot, (wanted, (drafter, depth)) in enumerate(zip(requests, plans, strict=True)):
        fill_slot(state, slot, wanted)
        chosen.admit(slot, wanted)
        slots.append(SlotPlan(slot, slot + 1, drafter, depth, len(wanted.prompt_ids)))
    return chosen.propose(VerifyPlan(tuple(slots)), state, sampled=False)


def ngram() -> NgramDrafter:
    return NgramDrafter(NgramOptions())


def test_an_ngram_goes_on_behind_a_models_words() -> None:
    text = [*PHRASE, 1, 2, *PHRASE[:5]]
    model = Fixed("mtp", PHRASE[5:9], max_depth=4)
    draft = propose(drafters(model, ngram()), [request(text), request(text)], [("ngram+mtp", 9), ("mtp", 9)])
    assert draft.token_ids[0].tolist() == PHRASE[5:14], "five equal tokens are not sure, nine are"
    names = [draft.origin_names[code] for code in draft.origins[0].tolist()]
    assert names == ["fixed"] * 4 + ["ngram"] * 5
    assert draft.token_ids[1].tolist() == [*PHRASE[5:9], *[-1] * 5] and draft.num_drafts.tolist() == [9, 4, 0, 0]
    assert draft.confidence is not None
    assert (draft.confidence[0, :4] == 0.75).all() and (draft.confidence[0, 4:] > 0.7).all()


def test_wrong_words_are_not_gone_on_behind() -> None:
    text = [*PHRASE, 1, 2, *PHRASE[:5]]
    draft = propose(drafters(Fixed("mtp", [7, 7, 7, 7], 4), ngram()), [request(text)], [("ngram+mtp", 9)])
    assert draft.token_ids[0].tolist() == [7, 7, 7, 7, *[-1] * 5]


def test_a_sure_match_speaks_before_a_model() -> None:
    text = [*PHRASE, 1, 2, *PHRASE[:9]]
    draft = propose(
        drafters(Fixed("mtp", [7] * 7), ngram()), [request(text), request([1, 2, 3])], [("ngram+mtp", 6)] * 2
    )
    assert draft.token_ids[0].tolist() == PHRASE[9:15] and draft.token_ids[1].tolist() == [7] * 6
    assert draft.confidence is not None and (draft.confidence[1] == 0.75).all()


@pytest.mark.parametrize("depth", [7, 8])
def test_windows_that_the_model_fills_are_searched_once(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    search: Callable[..., object] = NgramDrafter._search

    def counted(self: NgramDrafter, *arguments: object, **more: object) -> object:
        searched.append(1)
        return search(self, *arguments, **more)

    monkeypatch.setattr(NgramDrafter, "_search", counted)
    propose(drafters(Fixed("mtp", [7] * 7), ngram()), [request([1, 2, 3])], [("ngram+mtp", depth)])
    assert len(searched) == (1 if depth <= 7 else 2)


def test_a_prediction_is_drafted_from_and_its_length_told() -> None:
    model = Fixed("mtp", [7] * 7)
    chosen = drafters(model, ngram())
    predicted = tuple(PHRASE)
    draft = propose(chosen, [request([1, 2, *PHRASE[:3]], predicted), request([1, 2, 3])], [("ngram", 6), ("mtp", 2)])
    assert draft.token_ids[0].tolist() == PHRASE[3:9]
    assert model.asked[0].corpus_bound == chosen.corpus_bound() == 512
    chosen.admit(0, request([1], tuple(range(90)) * 6))
    assert chosen.corpus_bound() == 2048
    chosen.admit(0, request([1]))
    assert chosen.corpus_bound() == 0


def test_drafts_without_confidence_are_neither_sure_nor_hopeless() -> None:
    class Silent(Fixed):
        def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
            return replace(super().propose(depths, state, cache), confidence=None)

    draft = propose(drafters(Silent("mtp", [7] * 7)), [request([1, 2])], [("mtp", 2)])
    assert draft.confidence is not None and draft.confidence[0].tolist() == [0.5, 0.5]
