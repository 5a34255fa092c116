"""Decoding on a card never waits for it but at the one event of the result ring: PyTorch is told to refuse all else.

Nor do the layers of a prompt's chunk, once it has begun. Each case decodes twice. The first time kernels compile and
graphs are captured; the second time, from the third step to shortly before the end, an operation that synchronises
raises, which ends the request with that error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.api.types import Grammar, Sampling
from localspec.core.records import MAX_SLOTS, ThinkingRule
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine.build import Assembled, EngineOptions, assemble
from localspec.engine.loop import News, StepNews
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.kernels.table import choose
from localspec.models import architecture
from localspec.sampling.grammar import GrammarCompiler
from tests.helpers.engine import Collected, make_request
from tests.helpers.models import random_checkpoint
from tests.helpers.tiny_text import byte_tokenizer

pytestmark = [pytest.mark.torch, pytest.mark.gpu]
LIMIT, MAX_TOKENS, GUARDED_FROM, GUARDED_UNTIL = 1024, 160, 30, 120
TOKENIZER = byte_tokenizer()
END, THINK, END_THINK = (TOKENIZER.token_to_id(text) or 0 for text in ("<|end|>", "<think>", "</think>"))
PATTERN = Grammar("regex", "(ab|12|true,?){200,300}")
PROMPT = [(7 * index) % 11 + 60 for index in range(90)]


@dataclass
class Guarded(Collected):
    """Collects news, and forbids waiting while the middle of the answer is made. Called on the decode thread."""

    device: str = "cuda"
    forbid: bool = False
    guarded_tokens: int = 0
    before: list[int] = field(default_factory=list)

    def see(self, news: News) -> None:
        super().see(news)
        inside = self.forbid and GUARDED_FROM <= len(self.token_ids) < GUARDED_UNTIL and self.end is None
        if self.device == "cuda" and self.forbid:
            torch.cuda.set_sync_debug_mode("error" if inside else "default")
        if inside and isinstance(news, StepNews):
            self.guarded_tokens += len(news.result.token_ids)


def tiny_hybrid(folder: Path) -> Path:
    """A hybrid of sizes that the card's kernels take, with the vocabulary of the byte tokenizer."""
    config: dict[str, Any] = architecture("qwen3_5").tiny_config()
    config["text_config"] |= {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 32,
        "vocab_size": TOKENIZER.get_vocab_size() + 27,
        "num_token_ids": TOKENIZER.get_vocab_size(),
    }
    random_checkpoint("qwen3_5", 4, folder, config)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


def make_engine(folder: Path, device: str) -> Assembled:
    ops, _ = choose(device)
    ops.cache_dtype = torch.float8_e4m3fn
    with torch.inference_mode():
        model = architecture("qwen3_5").load(read_config(folder), open_checkpoint(folder), ops)
        setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=LIMIT)
        drafters = {name: drafter_module(name).tiny(setup) for name in ("ngram", "mtp")}
    return assemble(model, ops, LIMIT, drafters, EngineOptions(device=device))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def parts(folder: Path) -> Iterator[Assembled]:
    engine = make_engine(folder, "cuda")
    engine.loop.start()
    yield engine
    engine.loop.stop()


CASES: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "off"},
    "sampled": {"drafter": "off", "sampling": Sampling(temperature=0.8, top_k=20, top_p=0.95)},
    "penalised": {"drafter": "ngram", "depth": 4, "sampling": Sampling(temperature=0.8, presence_penalty=0.6)},
    "logprobs": {"drafter": "mtp", "depth": 2, "logprobs": 3},
    "ngram": {"drafter": "ngram", "depth": 7},
    "mtp": {"drafter": "mtp", "depth": 3},
    "ngram+mtp": {"drafter": "ngram+mtp", "depth": 4},
    "thinking": {"drafter": "mtp", "depth": 3, "thinking": ThinkingRule(50, (THINK,), (END_THINK,), True)},
    "grammar": {"drafter": "mtp", "depth": 3, "grammar": PATTERN},
}


def check(parts: Assembled, folder: Path, case: dict[str, Any], device: str) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", (END,))
    answers = []
    for forbid in (False, True):
        grammar = compiler.compile(case["grammar"], case.get("thinking")) if "grammar" in case else None
        request = make_request(PROMPT, max_tokens=MAX_TOKENS, cache_salt="again" if forbid else "first", **case)
        seen = Guarded(device=device, forbid=forbid)
        try:
            parts.loop.submit(request, seen.see, grammar)
            assert seen.done.wait(120), "the request did not end"
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        assert seen.end is not None and seen.end.error is None, seen.end
        answers.append(seen.token_ids)
        assert not forbid or seen.guarded_tokens > 60, "almost nothing was decoded while waiting was forbidden"
    assert answers[0] == answers[1] and len(answers[0]) == MAX_TOKENS


@pytest.mark.parametrize("name", CASES)
def test_decoding_does_not_wait(parts: Assembled, folder: Path, name: str) -> None:
    check(parts, folder, CASES[name], "cuda")


def test_the_guard_does_find_a_wait(parts: Assembled, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = parts.loop.stages.device
    verify = device.verify

    def waits(*arguments: Any) -> Any:
        result = verify(*arguments)
        try:
            result.num_emitted.tolist()
        finally:
            # Ending the request after an error may wait.
            torch.cuda.set_sync_debug_mode("default")
        return result

    monkeypatch.setattr(device, "verify", waits)
    with pytest.raises(AssertionError, match="synchroniz"):
        check(parts, folder, CASES["plain"], "cuda")


def test_the_layers_of_a_prompt_are_started_without_a_wait(
    parts: Assembled, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams beside a long prompt would wait with it."""
    device = parts.loop.stages.device
    advance, guarded = device.advance_prefill, list[bool]()

    def started(reading: Any, num_layers: int) -> bool:
        torch.cuda.set_sync_debug_mode("error")
        try:
            guarded.append(advance(reading, num_layers))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return guarded[-1]

    for forbid in (False, True):
        if forbid:
            monkeypatch.setattr(device, "advance_prefill", started)
        seen = Collected()
        parts.loop.submit(make_request(PROMPT * 4, max_tokens=4, cache_salt=f"read {forbid}"), seen.see)
        assert seen.done.wait(120), "the request did not end"
        assert seen.end is not None and seen.end.error is None, seen.end
    assert guarded and guarded[-1]
