"""Acceptance at a given rate: what is forced is a token that the model has."""

from __future__ import annotations

import pytest
import torch

from localspec.api.types import Sampling
from localspec.sampling.synthetic import SyntheticAcceptance
from tests.sampling.tables import draft_of, sequence_state, verify_rows

pytestmark = pytest.mark.torch
VOCAB = 40


@pytest.mark.parametrize("drafted", [0, 1, 17, VOCAB - 1])
def test_a_refused_draft_gives_way_to_another_token_of_the_vocabulary(drafted: int) -> None:
    state = sequence_state([[1, 2]], [Sampling()], VOCAB)
    draft = draft_of([[drafted] * 6], 6)
    rows = verify_rows(state, draft, [7], 7)
    taken = 0
    for seed in range(200):
        forced = SyntheticAcceptance((0.5,), torch.device("cpu"))(rows, draft, torch.tensor([seed])).forced
        assert forced is not None and forced[6] == -1
        assert bool(((forced[:6] >= 0) & (forced[:6] < VOCAB)).all())
        taken += int((forced[0] == drafted).item())
    assert 70 < taken < 130
