"""Pages for one whole context and no more, as a tight card has them: conversations go on, nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.core.records import MAX_ROWS, PAGE_TOKENS
from localspec.engine import memory_budget
from tests.helpers.engine import make_request, run, token_engine
from tests.helpers.models import load_model, random_checkpoint, reference_ops

pytestmark = pytest.mark.torch
LIMIT = 512
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 12


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_the_second_turn_and_a_stranger_behind_it_end(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "CPU_CONTEXTS", 1)
    ops = reference_ops()
    with token_engine(load_model(random_checkpoint(kind, 3, tmp_path), ops), ops, LIMIT, {}) as parts:
        assert parts.scheduler.pool.num_pages == -(-(LIMIT + MAX_ROWS) // PAGE_TOKENS) + 1
        [first] = run(parts, [make_request(PROMPT, max_tokens=20)])
        second = [*PROMPT, *first.token_ids, 5, 6]
        asks = [make_request(second, max_tokens=LIMIT - len(second)), make_request([1, 2, 3], max_tokens=3)]
        answers = run(parts, asks, timeout_s=60.0)
        assert [len(answer.token_ids) for answer in answers] == [LIMIT - len(second), 3]
        parts.loop.call(parts.scheduler.clear).result(20)
        [again] = run(parts, asks[:1])
        assert again.token_ids == answers[0].token_ids and again.cached_tokens == 0
