"""On a card: steps that were captured before any request write the same tokens as those captured in mid-answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localspec.api.types import Sampling
from localspec.core.memory_budget import MANY_GRAPHS
from localspec.engine.build import Assembled
from localspec.engine.captured import Families
from tests.engine.gpu_no_sync import PROMPT, make_engine, tiny_hybrid
from tests.helpers.engine import make_request, run

pytestmark = [pytest.mark.torch, pytest.mark.gpu]
LAWS = (Sampling(), Sampling(temperature=0.8, top_k=20, top_p=0.95))
CHOICES = (("off", 0), ("mtp", 1), ("mtp", 3), ("ngram", 7), ("ngram+mtp", 4))


def answers(parts: Assembled) -> list[tuple[list[int], list[int]]]:
    """Two turns of a chat under each law with each choice."""
    found = []
    for law in LAWS:
        for drafter, depth in CHOICES:
            more: dict[str, Any] = {"drafter": drafter, "depth": depth, "sampling": law, "max_tokens": 60}
            salt = f"{drafter} {depth} {law.temperature}"
            [first] = run(parts, [make_request(PROMPT, cache_salt=salt, **more)])
            ids = [*PROMPT, *first.token_ids, *PROMPT[:9]]
            [second] = run(parts, [make_request(ids, cache_salt=salt, **more)])
            assert second.cached_tokens > len(PROMPT)
            found.append((first.token_ids, second.token_ids))
    return found


def test_steps_captured_ahead_write_what_others_write(tmp_path: Path) -> None:
    folder = tiny_hybrid(tmp_path)
    found = []
    for ahead in (False, True):
        parts = make_engine(folder, "cuda")
        step: Any = parts.loop.stages.device
        step.captured = Families(MANY_GRAPHS)
        parts.loop.start()
        try:
            if ahead:
                more = [True]
                while more[-1]:
                    parts.loop.call(lambda: more.append(parts.loop.capture_ahead())).result(300)  # noqa: B023
                captured = step.captured.num_graphs
                # For two laws each: drafts and the rest of a step; a plain step drafts nothing.
                assert captured >= 2 * sum(1 + (depth > 0) for _, depth in parts.tuner.foreseen())
                assert parts.tuner.known.verify_curve(0) and parts.tuner.known.draft_curve("mtp", 0)
            found.append(answers(parts))
            assert not ahead or step.captured.num_graphs == captured, "captured while an answer was written"
        finally:
            parts.loop.stop()
    assert found[0] == found[1]
    assert len({tuple(first) for first, _ in found[0]}) == len(LAWS), "drafting changed an answer"
