"""Decodes answers to made-up prompts through a running decode loop and says where their time went."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from localspec.api.types import EngineError, Sampling
from localspec.core.records import Request
from localspec.engine.build import Assembled
from localspec.engine.loop import EndNews, News, StepNews

WAIT_S = 120.0
IDENTITY_PROMPTS_TOKENS = (300, 511, 722, 933)


@dataclass
class Decoded:
    """What one request brought. Milliseconds are the device's own; seconds run from the first step to the end."""

    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    end: EndNews | None = None
    seconds: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    def see(self, news: News) -> None:
        """Takes the loop's news, on its thread."""
        if isinstance(news, StepNews):
            self.first_s = self.first_s or time.perf_counter()
            self.token_ids.extend(news.result.token_ids)
        elif isinstance(news, EndNews):
            self.end = news
            self.seconds = time.perf_counter() - (self.first_s or time.perf_counter())
            self.done.set()

    def figures(self) -> dict[str, float]:
        """Rate, share of time in which the device had nothing to do, tokens a step, and milliseconds a step."""
        assert self.end is not None
        timings = self.end.timings
        steps = max(timings.verify_steps, 1)
        busy_s = (timings.draft_ms + timings.verify_ms) / 1e3 * (steps - 1) / steps
        return {
            "tok_per_s": len(self.token_ids) / self.seconds if self.seconds else 0.0,
            "idle": 1 - busy_s / self.seconds if self.seconds else 0.0,
            "tokens_per_step": len(self.token_ids) / steps,
            "draft_ms": timings.draft_ms / steps,
            "verify_ms": timings.verify_ms / steps,
        }


def decode(parts: Assembled, prompt_tokens: int, max_tokens: int, drafter: str, depth: int | None) -> Decoded:
    """One greedy request on a loop that runs. Raises EngineError where it fails or does not end."""
    prompt = made_up_prompt(parts, prompt_tokens, 1)
    return decode_all(parts, [Request("", prompt, Sampling(), 1, max_tokens, (), drafter=drafter, depth=depth)])[0]


def decode_all(parts: Assembled, requests: Sequence[Request]) -> list[Decoded]:
    """Requests at once on a loop that runs. Raises EngineError where one fails or does not end."""
    all_seen = [Decoded() for _ in requests]
    for seen, request in zip(all_seen, requests, strict=True):
        parts.loop.submit(request, seen.see)
    for seen, request in zip(all_seen, requests, strict=True):
        if not seen.done.wait(WAIT_S):
            raise EngineError("internal", f"{request.max_tokens} tokens were not made within {WAIT_S:.0f} s")
        if seen.end is not None and seen.end.error is not None:
            raise seen.end.error
    return all_seen


def made_up_prompt(parts: Assembled, num_tokens: int, seed: int) -> tuple[int, ...]:
    """Token ids that repeat themselves a little, so that copying from them has something to copy."""
    vocab = min(parts.runner.model.vocab_size, 30000)
    return tuple((31 * i + 17 * seed + (i // 40) % 7) % vocab for i in range(num_tokens))


def identity(
    parts: Assembled,
    methods: Sequence[tuple[str, int | None]],
    max_tokens: int = 64,
    prompt_tokens: Sequence[int] = IDENTITY_PROMPTS_TOKENS,
) -> dict[str, int]:
    """Tokens that differ between answers drafted four at once and the same ones made plain, one after the other.

    Greedy and sampled; the promise is 0.
    """
    compared = differing = 0
    for law in (Sampling(), Sampling(temperature=0.8, top_k=20)):
        prompts = [made_up_prompt(parts, length, seed) for seed, length in enumerate(prompt_tokens)]
        plain = [
            decode_all(parts, [Request("", prompt, law, seed, max_tokens, (), drafter="off")])[0].token_ids
            for seed, prompt in enumerate(prompts)
        ]
        for name, depth in methods:
            requests = [
                Request("", prompt, law, seed, max_tokens, (), drafter=name, depth=depth)
                for seed, prompt in enumerate(prompts)
            ]
            for seen, expected in zip(decode_all(parts, requests), plain, strict=True):
                compared += len(expected)
                differing += sum(a != b for a, b in zip(seen.token_ids, expected, strict=True))
    return {"compared_tokens": compared, "differing_tokens": differing}
