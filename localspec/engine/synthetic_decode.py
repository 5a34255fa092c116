"""Decodes one long answer through a running decode loop and says where its time went."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from localspec.api.types import EngineError, Sampling
from localspec.core.records import Request
from localspec.engine.build import Assembled
from localspec.engine.loop import EndNews, News, StepNews

WAIT_S = 120.0


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
    vocab = min(parts.runner.model.vocab_size, 30000)
    prompt = tuple((31 * i + 17 + (i // 40) % 7) % vocab for i in range(prompt_tokens))
    seen = Decoded()
    parts.loop.submit(Request("", prompt, Sampling(), 1, max_tokens, (), drafter=drafter, depth=depth), seen.see)
    if not seen.done.wait(WAIT_S):
        raise EngineError("internal", f"a request of {max_tokens} tokens did not end within {WAIT_S:.0f} s")
    assert seen.end is not None
    if seen.end.error is not None:
        raise seen.end.error
    return seen
