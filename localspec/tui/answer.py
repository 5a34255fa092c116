"""An answer while it grows: text, thought, who drafted what, and how it ended. Knows neither engine nor widgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from localspec.api.types import Delta, Done, Event, Phase, Prefill, Queued
from localspec.chats import Stored
from localspec.chats.records import State


@dataclass
class Answer:
    """Built up by `take`; read by whoever shows or saves it. `version` grows with each change."""

    clock: Callable[[], float] = time.monotonic
    on_change: Callable[[], None] = lambda: None
    """Called after each change, by whoever made it."""
    token_ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, str, str]] = field(default_factory=list)
    rejections: list[tuple[int, int]] = field(default_factory=list)
    state: State = "streaming"
    status: str = ""
    """What is being waited for, or why it ended early; empty while text flows."""
    version: int = 0
    prefill: Prefill | None = None
    done: Done | None = None
    reasoning_tokens: int = 0
    reasoning_s: float = 0.0
    _generated_chars: int = 0
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _thought_began_s: float | None = None

    @property
    def content(self) -> str:
        """The answer so far, without the thought."""
        return _joined(self._content)

    @property
    def reasoning(self) -> str:
        """The thought so far."""
        return _joined(self._reasoning)

    def take(self, event: Event) -> None:
        """Add one event of the engine."""
        self.version += 1
        if isinstance(event, Delta):
            self._take_delta(event)
        elif isinstance(event, Queued):
            self.status = f"waits for {event.position} other request{'s' if event.position != 1 else ''}"
        elif isinstance(event, Prefill):
            self.prefill = event
            cached = f", {event.cached_tokens} from the cache" if event.cached_tokens else ""
            self.status = f"reads the prompt: {event.done_tokens} of {event.total_tokens} tokens{cached}"
        else:
            self._end(event)
        self.on_change()

    def wait(self, status: str) -> None:
        """Say what is waited for."""
        if status != self.status:
            self.version += 1
            self.status = status
            self.on_change()

    def stop(self, state: State, status: str) -> None:
        """End without a `Done` event; the text so far stays."""
        self.version += 1
        self.state, self.status = state, status
        self.on_change()

    def stored(self, base: Stored) -> Stored:
        """The message to save, in the place of the tree that `base` has."""
        return Stored(
            role="assistant",
            content=self.content,
            parent_id=base.parent_id,
            reasoning=self.reasoning,
            state=self.state,
            model_id=base.model_id,
            token_ids=tuple(self.token_ids),
            spans=tuple(self.spans),
            rejections=tuple(self.rejections),
            stats=self.stats(),
            id=base.id,
            chat_id=base.chat_id,
            created_s=base.created_s,
        )

    def stats(self) -> Mapping[str, Any]:
        """Finish reason, usage and timings as JSON values."""
        values: dict[str, Any] = {}
        if self.reasoning:
            values.update(reasoning_tokens=self.reasoning_tokens, reasoning_s=round(self.reasoning_s, 3))
        if self.state != "streaming" and self.status:
            values["status"] = self.status
        if self.prefill is not None and self.prefill.miss_reason:
            values["cache_miss_reason"] = self.prefill.miss_reason
        if self.done is not None:
            values["finish_reason"] = self.done.finish_reason
            values["usage"] = asdict(self.done.usage)
            values["timings"] = asdict(self.done.timings)
        return values

    def _take_delta(self, delta: Delta) -> None:
        self.status = ""
        self.token_ids.extend(delta.token_ids)
        position = 0
        for span in delta.spans:
            self._add(delta.text[position : position + span.n_chars], span.origin, span.phase)
            position += span.n_chars
        # A server that does not say who drafted sends text without spans.
        self._add(delta.text[position:], "", Phase.ANSWER)
        if delta.rejected:
            self.rejections.append((self._generated_chars, delta.rejected))
        if delta.spans and delta.spans[0].phase == Phase.THINKING:
            self.reasoning_tokens += len(delta.token_ids)

    def _add(self, text: str, origin: str, phase: Phase) -> None:
        if phase == Phase.THINKING:
            # The tags that a local engine leaves in are tokens of their own, so they come whole.
            text = text.replace("<think>", "").replace("</think>", "")
        if not text:
            return
        self._generated_chars += len(text)
        if phase == Phase.THINKING:
            now = self.clock()
            began = self._thought_began_s if self._thought_began_s is not None else now
            self._thought_began_s = began
            self.reasoning_s = now - began
            self._reasoning.append(text)
        else:
            self._content.append(text)
        if self.spans and self.spans[-1][1:] == (origin, str(phase)):
            self.spans[-1] = (self.spans[-1][0] + len(text), origin, str(phase))
        else:
            self.spans.append((len(text), origin, str(phase)))

    def _end(self, done: Done) -> None:
        self.done = done
        self.reasoning_tokens = done.usage.reasoning_tokens or self.reasoning_tokens
        self.state = "cancelled" if done.finish_reason == "cancelled" else "done"
        if done.finish_reason == "error":
            self.state, self.status = "error", "the engine ended the answer with an error"
        elif done.finish_reason == "cancelled":
            self.status = "stopped"
        elif done.finish_reason == "length":
            self.status = (
                "the token limit was reached"
                if self.content.strip()
                else "the thought used the whole token limit: /think with a smaller budget, or a larger /set max_tokens"
            )
        else:
            self.status = ""


def _joined(parts: list[str]) -> str:
    # Joined when somebody looks, some ten times a second, and not with each token.
    if len(parts) > 1:
        parts[:] = ["".join(parts)]
    return parts[0] if parts else ""
