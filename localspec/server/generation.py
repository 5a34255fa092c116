"""One generation as every protocol of the port sees it: progress, split pieces with their origins, the end.

Runs the engine and the splitter and adds up what a whole reply needs. Knows nothing of any protocol's JSON.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from localspec.api.closing import closing
from localspec.api.engine import Engine
from localspec.api.types import (
    Delta,
    Done,
    EngineError,
    FinishReason,
    GenerateRequest,
    Phase,
    Prefill,
    Queued,
    Span,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
)
from localspec.server.stream import CallArguments, CallStart, Piece, SplitOptions, Splitter, TextPiece

MAX_TOKENS_BEHIND_CALLS = 8
"""How long to wait, when all wanted calls are there, for the engine to end by itself: a tag and the end token."""


@dataclass(frozen=True)
class Step:
    """What one delta of the engine brought; `delta` is None for text that was held back until the end."""

    pieces: tuple[Piece, ...]
    delta: Delta | None


@dataclass(frozen=True)
class Finished:
    """The end. `finish_reason` says `tool_calls` when the answer called any."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    stop_text: str | None = None


Progress = Queued | Prefill | Step | Finished


@dataclass
class Reply:
    """A whole reply, added up from the steps that a stream would show."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: Finished = field(default_factory=lambda: Finished("stop", Usage(0, 0), Timings()))

    def add(self, step: Progress) -> None:
        """Take in one step."""
        if isinstance(step, Finished):
            self.finished = step
        if not isinstance(step, Step):
            return
        if step.delta is not None:
            self.logprobs += step.delta.logprobs
            self.token_ids += step.delta.token_ids
        for piece in step.pieces:
            if isinstance(piece, TextPiece) and piece.kind == "reasoning":
                self.reasoning += piece.text
            elif isinstance(piece, TextPiece):
                self.content += piece.text
            elif isinstance(piece, CallStart):
                self.calls.append(ToolCall(piece.id, piece.name, ""))
            elif isinstance(piece, CallArguments):
                call = self.calls[piece.index]
                self.calls[piece.index] = ToolCall(call.id, call.name, call.arguments + piece.text)


def new_id(prefix: str) -> str:
    """A fresh id in the form that clients expect."""
    return prefix + secrets.token_hex(12)


async def run(
    engine: Engine, request: GenerateRequest, max_calls: int | None = None, splits: bool = True
) -> AsyncGenerator[Progress, None]:
    """Progress of one request. `splits` False passes the text on as it is (plain completions).

    Raises EngineError as the engine does, and for an answer that the engine broke off: what came of it must not pass
    for a whole one. Close it to cancel.
    """
    splitter: Splitter | None = None
    usage, done, n_behind = _Count(), None, 0
    async with closing(engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Done):
                done = _whole(event)
            elif isinstance(event, Delta):
                usage.add(event)
                if splitter is None and event.text:
                    splitter = _splitter(request, event, max_calls, splits)
                n_behind += len(event.token_ids) if splitter and splitter.done else 0
                yield Step(tuple(splitter.feed(event.text)) if splitter else (), event)
                if n_behind > MAX_TOKENS_BEHIND_CALLS:
                    break
            else:
                usage.prompt_tokens = event.total_tokens if isinstance(event, Prefill) else usage.prompt_tokens
                yield event
    if splitter is not None:
        rest = splitter.finish()
        if rest:
            yield Step(tuple(rest), None)
    yield _finished(done, usage, splitter)


async def collect(engine: Engine, request: GenerateRequest, max_calls: int | None = None, splits: bool = True) -> Reply:
    """The whole reply. Raises EngineError."""
    reply = Reply()
    async with closing(run(engine, request, max_calls, splits)) as steps:
        async for step in steps:
            reply.add(step)
    return reply


class SpanLedger:
    """Origins of the raw text, to be looked up for the pieces that are shown of it."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, Span]] = []
        self._end = 0

    def add(self, delta: Delta) -> None:
        """Note the spans of a delta."""
        for span in delta.spans:
            self._end += span.n_chars
            self._spans.append((self._end, span))

    def cut(self, start: int, end: int, phase: Phase) -> list[tuple[int, str, str]]:
        """(characters, origin, phase) of raw characters start..end; what lies before is forgotten."""
        found: list[tuple[int, str, str]] = []
        while self._spans and start < end:
            span_end, span = self._spans[0]
            n_chars = min(span_end, end) - start
            if n_chars > 0:
                found.append((n_chars, span.origin, phase.value))
                start += n_chars
            if span_end > end:
                break
            self._spans.pop(0)
        return found


@dataclass
class _Count:
    """Tokens seen so far, for an answer that the port ends before the engine does."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, delta: Delta) -> None:
        n_accepted = max(0, len(delta.token_ids) - 1)
        self.completion_tokens += len(delta.token_ids)
        self.steps += 1
        self.accepted += n_accepted
        self.drafted += n_accepted + delta.rejected


def _splitter(request: GenerateRequest, first: Delta, max_calls: int | None, splits: bool) -> Splitter:
    numbers = itertools.count()
    if not splits:
        return _PlainText()
    opened = bool(first.spans) and first.spans[0].phase is Phase.THINKING
    prefix = new_id("call_")
    return Splitter(SplitOptions(opened, request.tools, max_calls), lambda: f"{prefix}{next(numbers)}")


class _PlainText(Splitter):
    """Shows the text as it is."""

    def __init__(self) -> None:
        super().__init__(SplitOptions(), str)
        self._step = self._content


def _whole(done: Done) -> Done:
    """The end of an answer that ended by itself. Raises EngineError for one that was cut."""
    if done.finish_reason == "cancelled":
        raise EngineError(
            "not_ready",
            "The answer broke off: the server is stopping or loads another model. Ask again when /health answers 200.",
        )
    if done.finish_reason == "error":
        raise EngineError("internal", "The answer broke off: the engine failed. Its log has the details.")
    return done


def _finished(done: Done | None, count: _Count, splitter: Splitter | None) -> Finished:
    if done is None:
        timings = Timings(verify_steps=count.steps, draft_n=count.drafted, draft_n_accepted=count.accepted)
        return Finished("tool_calls", Usage(count.prompt_tokens, count.completion_tokens), timings)
    reason: FinishReason = done.finish_reason
    # The wanted calls are whole, though the room may have ended within the tag that closes the last.
    if splitter is not None and (splitter.done or (splitter.n_calls and reason == "stop")):
        reason = "tool_calls"
    return Finished(reason, done.usage, done.timings, done.stop_text)
