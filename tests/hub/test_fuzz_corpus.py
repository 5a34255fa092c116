"""Replays every input that the fuzzer once found to be taken badly, and a short fresh round."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hub_fuzz import CORPUS, TARGETS, damage, problem_with, seeds


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda p: p.name)
def test_found_input_is_taken_well(path: Path) -> None:
    assert problem_with(path.name.partition("-")[0], path.read_bytes()) is None


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_good_input_is_accepted_and_damage_is_survived(kind: str, tmp_path: Path) -> None:
    rng, good = random.Random(7), seeds()[kind]
    for number, raw in enumerate(good if kind != "index" else []):
        (tmp_path / str(number)).mkdir()
        TARGETS[kind](raw, tmp_path / str(number))
    for _ in range(60):
        raw = damage(rng.choice(good), rng)
        assert problem_with(kind, raw) is None, raw[:200]
