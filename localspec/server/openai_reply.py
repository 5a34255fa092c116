"""OpenAI's JSON for chat and completion replies, whole and in chunks.

Knows the shapes; the engine's figures ride along under `timings` and `metrics`. Knows nothing of requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from localspec.api.codec import event_to_json, to_json
from localspec.api.types import TARGET_ORIGIN, Delta, Event, Phase, Timings, TokenLogprob, Usage
from localspec.server.generation import Finished, Reply, SpanLedger, Step, new_id
from localspec.server.stream import CallArguments, CallStart, Piece, TextPiece

CUT_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


@dataclass(frozen=True)
class Head:
    """What all chunks of a reply share."""

    model: str
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created_s: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """One chunk of a chat stream."""
        return self._body("chat.completion.chunk", choices, extra)

    def whole(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """A chat reply that is not streamed."""
        return self._body("chat.completion", choices, extra)

    def completion(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """A completion, streamed or not."""
        return self._body("text_completion", choices, extra)

    def _body(self, kind: str, choices: list[dict[str, Any]], extra: dict[str, Any]) -> dict[str, Any]:
        body = {"id": self.id, "object": kind, "created": self.created_s, "model": self.model, "choices": choices}
        body.update(extra)
        return body


def chat_choice(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    """The choice of a chunk."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def chat_deltas(pieces: tuple[Piece, ...], both_names: bool) -> list[dict[str, Any]]:
    """Deltas that show these pieces, neighbours of one kind in one delta."""
    deltas: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, TextPiece):
            key = "content" if piece.kind == "content" else "reasoning_content"
            if deltas and key in deltas[-1]:
                deltas[-1][key] += piece.text
            else:
                deltas.append({key: piece.text})
        elif isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
            deltas.append({"tool_calls": [call]})
        elif isinstance(piece, CallArguments):
            _add_arguments(deltas, piece)
    if both_names:
        for delta in deltas:
            if "reasoning_content" in delta:
                delta["reasoning"] = delta["reasoning_content"]
    return deltas


def _add_arguments(deltas: list[dict[str, Any]], piece: CallArguments) -> None:
    last = deltas[-1].get("tool_calls") if deltas else None
    if last and last[0]["index"] == piece.index and "id" not in last[0]:
        last[0]["function"]["arguments"] += piece.text
    else:
        deltas.append({"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]})


def chat_message(reply: Reply, both_names: bool) -> dict[str, Any]:
    """The message of a whole reply."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
        if both_names:
            message["reasoning"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def finish_word(finished: Finished, is_named: bool) -> str:
    """finish_reason as clients know it; a call that the client named itself ends with `stop`."""
    if finished.finish_reason == "tool_calls" and is_named:
        return "stop"
    return finished.finish_reason


def usage_json(usage: Usage, predicted: bool) -> dict[str, Any]:
    """Usage; the counters of predictions only when the request sent one."""
    details: dict[str, Any] = {"reasoning_tokens": usage.reasoning_tokens}
    if predicted:
        details["accepted_prediction_tokens"] = usage.accepted_prediction_tokens
        details["rejected_prediction_tokens"] = usage.rejected_prediction_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }


def figures(finished: Finished) -> dict[str, Any]:
    """`timings` under our names and llama.cpp's, `metrics.speculative_decoding` under vLLM's."""
    timings, usage = finished.timings, finished.usage
    own: dict[str, Any] = to_json(timings)
    own.update(
        {
            "prompt_n": usage.prompt_tokens - usage.cached_tokens,
            "cache_n": usage.cached_tokens,
            "prompt_ms": timings.prefill_ms,
            "predicted_n": usage.completion_tokens,
            "predicted_ms": timings.decode_ms,
            "predicted_per_second": timings.tok_per_s,
            "draft_n_verif_steps": timings.verify_steps,
        }
    )
    return {"timings": own, "metrics": {"speculative_decoding": _speculative(timings)}}


def _speculative(timings: Timings) -> dict[str, Any]:
    steps = timings.verify_steps
    return {
        "mean_acceptance_length": 1 + timings.draft_n_accepted / steps if steps else 0.0,
        "draft_acceptance_rate": timings.draft_n_accepted / timings.draft_n if timings.draft_n else 0.0,
        "acceptance_histogram": list(timings.accepted_per_position),
        "num_spec_steps": steps,
        "num_draft_tokens": timings.draft_n,
        "num_accepted_tokens": timings.draft_n_accepted,
    }


def chat_logprobs(entries: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
    """Log-probabilities in chat's form, None for none."""
    if not entries:
        return None
    content = []
    for entry in entries:
        top = [_logprob(text, logprob) for text, logprob in _alternatives(entry)]
        content.append({**_logprob(entry.text, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _alternatives(entry: TokenLogprob) -> list[tuple[str, float]]:
    """Texts and values of the best tokens; those that top-k and its like cut have none worth showing."""
    return [(text, logprob) for _, text, logprob in entry.top if logprob > CUT_LOGPROB]


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, CUT_LOGPROB), "bytes": list(text.encode("utf-8", "replace"))}


def completion_logprobs(entries: list[TokenLogprob] | tuple[TokenLogprob, ...], offset: int) -> dict[str, Any] | None:
    """Log-probabilities in the completions' form; `offset` is the characters before the first entry."""
    if not entries:
        return None
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [max(entry.logprob, CUT_LOGPROB) for entry in entries],
        "top_logprobs": [
            # The chosen token is always among them, and last so that its own value stands.
            {**dict(_alternatives(entry)), entry.text: max(entry.logprob, CUT_LOGPROB)}
            for entry in entries
        ],
        "text_offset": offsets,
    }


class DraftView:
    """The opt-in field `localspec` of chunks: who wrote which characters, and where drafts were refused."""

    def __init__(self) -> None:
        self._ledger = SpanLedger()

    def fields(self, step: Step) -> dict[str, Any]:
        """`spans` cover the thought and answer text of this step's chunks in order.

        `rejected_at` is the number of shown characters before the target's own token that replaced refused
        drafts, null where none were refused.
        """
        if step.delta is not None:
            self._ledger.add(step.delta)
        spans: list[tuple[int, str, str]] = []
        for piece in step.pieces:
            if isinstance(piece, TextPiece):
                phase = Phase.ANSWER if piece.kind == "content" else Phase.THINKING
                spans += self._ledger.cut(piece.start, piece.end, phase)
        rejected = step.delta.rejected if step.delta else 0
        return {
            "spans": spans,
            "rejected_at": _rejected_at(spans) if rejected else None,
            "rejected": rejected,
            "token_ids": list(step.delta.token_ids) if step.delta else [],
        }


def _rejected_at(spans: list[tuple[int, str, str]]) -> int:
    total = sum(span[0] for span in spans)
    return total - spans[-1][0] if spans and spans[-1][1] == TARGET_ORIGIN else total


def raw_event(event: Event) -> dict[str, Any]:
    """The field `localspec` of a raw stream: the engine's event as it is."""
    if isinstance(event, Delta):
        # The hot one, spelt out.
        spans = [{"n_chars": span.n_chars, "origin": span.origin, "phase": span.phase.value} for span in event.spans]
        return {
            "event": {
                "kind": "delta",
                "text": event.text,
                "token_ids": event.token_ids,
                "spans": spans,
                "rejected": event.rejected,
                "logprobs": to_json(event.logprobs),
            }
        }
    return {"event": event_to_json(event)}
