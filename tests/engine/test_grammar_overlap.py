"""A grammar does not hold a card up: the next forward pass is on its way before the last step's words are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localspec.engine.build import Assembled
from localspec.sampling.grammar import GrammarCompiler
from tests.engine.test_graph_logic import END, PATTERN, TOKENIZER, folder, patient
from tests.helpers.engine import Collected, make_request

pytestmark = pytest.mark.torch
__all__ = ["folder", "patient"]


@pytest.mark.parametrize("depth", [0, 5])
def test_steps_overlap_and_masks_are_those_of_the_words_before(
    patient: Assembled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    grammar = GrammarCompiler(tmp_path / "tokenizer.json", (END,)).compile(PATTERN)
    loop, runner = patient.loop, patient.loop.stages.runner
    verify, window_masks = runner.verify, grammar.window_masks
    in_flight: list[int] = []
    left: list[int] = []

    def forward(*arguments: Any) -> Any:
        in_flight.append(len(loop._ring._in_flight))
        return verify(*arguments)

    def masks(drafts: Any) -> Any:
        left.append(len(loop._ring._in_flight))
        return window_masks(drafts)

    monkeypatch.setattr(runner, "verify", forward)
    monkeypatch.setattr(grammar, "window_masks", masks)
    prompt = TOKENIZER.encode("ab12ab12trueab12").ids
    drafter = {"drafter": "ngram", "depth": depth} if depth else {"drafter": "off"}
    collected = Collected()
    request = make_request(prompt, max_tokens=20, stop_ids=(END,), grammar=PATTERN, **drafter)
    loop.submit(request, collected.see, grammar)
    assert collected.done.wait(60)
    assert collected.end is not None and collected.end.error is None
    assert left and not any(left), "masks before the last words were known"
    assert in_flight.count(1) >= len(left) - 1, "the card waits for the host"
