"""The law of the answer with drafters that know only part of the vocabulary: trimmed heads and foreign vocabularies."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from localspec.api.types import Sampling
from localspec.core.state import SequenceState
from localspec.drafters._drawing import Drawer, DrawnRows
from localspec.sampling.accept import accept
from tests.helpers.models import reference_ops
from tests.sampling.tables import (
    LogitFunction,
    draft_of,
    draw_rows_together,
    hashed_logits,
    sequence_state,
    verify_rows,
)
from tests.sampling.test_accept import law_of

pytestmark = pytest.mark.torch
VOCAB, COUNT, DRAFTS = 6, 1500, 2
OPS = reference_ops()
TRIMMED = Drawer(torch.tensor([4, 0, 3]))
"""A head of three rows; the other tokens are never drafted."""
FOREIGN = Drawer(torch.tensor([5, -1, 2, 0, -1]), has_holes=True)
"""Another vocabulary in another order; two of its tokens do not exist here."""
DRAWERS = {
    "trimmed": TRIMMED,
    "foreign": FOREIGN,
    "greedy trimmed": Drawer(TRIMMED.id_map, greedy=True),
    "greedy foreign": Drawer(FOREIGN.id_map, greedy=True, has_holes=True),
}
LAWS = {"whole": Sampling(temperature=1.2), "cut": Sampling(temperature=1.5, top_k=4, top_p=0.95)}


class Guesser:
    """Draft logits: the target's own over the known tokens, blurred by another table."""

    def __init__(self, drawer: Drawer, logits: LogitFunction) -> None:
        assert drawer.id_map is not None
        self._drawer, self._logits = drawer, logits
        self._blur = hashed_logits(len(drawer.id_map), scale=0.7)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def drafts(self, state: SequenceState) -> list[list[int]]:
        """For every slot, drawn with the noise that the target will draw with."""
        texts = [row[:length] for row, length in zip(state.history.tolist(), state.lengths.tolist(), strict=True)]
        for column in range(DRAFTS):
            rows = torch.stack([self._row(tuple(text)) for text in texts])
            drawn, _ = self._drawer.draw(OPS, rows, DrawnRows(state, state.lengths + column, sampled=True))
            texts = [[*text, token] for text, token in zip(texts, drawn.tolist(), strict=True)]
        return [text[-DRAFTS:] for text in texts]

    def _row(self, text: tuple[int, ...]) -> Tensor:
        if text not in self._known:
            ids = self._drawer.id_map
            assert ids is not None
            self._known[text] = self._logits(list(text))[ids.clamp(min=0)] + self._blur(list(text))
        return self._known[text]


@pytest.mark.parametrize(
    ("name", "law"),
    [("trimmed", "cut"), ("foreign", "cut"), ("greedy trimmed", "whole"), ("greedy foreign", "whole")],
)
def test_joint_law_of_what_is_emitted(name: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of the first two tokens over many seeds; drafts are drawn anew at each step."""
    draw_rows_together(monkeypatch)
    sampling, logits = LAWS[law], hashed_logits(VOCAB, scale=0.8)
    samplings = [Sampling(**{**sampling.__dict__, "seed": seed}) for seed in range(COUNT)]
    state = sequence_state([[1, 2]] * COUNT, samplings, VOCAB, capacity=12, max_tokens=2)
    guesser = Guesser(DRAWERS[name], logits)
    rows_seen: dict[tuple[int, ...], Tensor] = {}
    accepted = steps = 0
    while not bool(state.frozen.all()):
        drafts = guesser.drafts(state)
        texts = [row[:length] for row, length in zip(state.history.tolist(), state.lengths.tolist(), strict=True)]
        seen = [
            (*text, *words[:offset]) for text, words in zip(texts, drafts, strict=True) for offset in range(DRAFTS + 1)
        ]
        for history in set(seen) - rows_seen.keys():
            rows_seen[history] = logits(list(history))
        draft = draft_of(drafts, DRAFTS)
        rows = verify_rows(state, draft, [1 + DRAFTS] * COUNT, (1 + DRAFTS) * COUNT)
        going = ~state.frozen
        result = accept(torch.stack([rows_seen[history] for history in seen]), rows, draft, state, logprobs=None)
        accepted += int((result.num_accepted * going).clamp(max=1).sum())
        steps += int(going.sum())
    assert 0.1 < accepted / steps < 0.95, "the drafts were all right or all wrong, so nothing was tested"
    observed = Counter(tuple(row) for row in state.history[:, 2:4].tolist())
    chi_square, cells = 0.0, 0
    for tokens in itertools.product(range(VOCAB), repeat=2):
        probability = law_of(logits, [1, 2], sampling, VOCAB, 2)[tokens[0]]
        probability *= law_of(logits, [1, 2, tokens[0]], sampling, VOCAB, 2)[tokens[1]]
        if probability == 0:
            assert tokens not in observed
        elif probability * COUNT >= 5:
            chi_square += (observed[tokens] - probability * COUNT) ** 2 / (probability * COUNT)
            cells += 1
    assert cells > 8
    assert chi_square < cells + 5 * (2 * cells) ** 0.5
