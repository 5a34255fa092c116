"""JSON between a client and an OpenAI port: requests to bodies, chunks to events.

Knows our own port and what vLLM, SGLang and llama.cpp do differently; does no network calls itself.
"""

from __future__ import annotations

import re
import time
from typing import Any

from localspec.api.codec import to_json
from localspec.api.types import (
    TARGET_ORIGIN,
    Delta,
    Done,
    EngineError,
    Event,
    FinishReason,
    GenerateRequest,
    Message,
    Phase,
    Prefill,
    Sampling,
    Span,
    Timings,
    TokenLogprob,
    Usage,
)

KNOWN_CODES = frozenset(
    (
        "context_length_exceeded",
        "bad_request",
        "not_ready",
        "overloaded",
        "unsupported",
        "model_not_found",
        "internal",
    )
)
_CODE_OF_STATUS = {404: "model_not_found", 429: "overloaded", 503: "not_ready"}
_OVERFLOW = re.compile(r"context (length|size|window)|maximum context|too many tokens", re.I)


def our_body(request: GenerateRequest, model: str, group_s: float = 0.0) -> dict[str, Any]:
    """Body for our own port: everything the request says, the answer as raw events, those of `group_s` in one piece."""
    sampling = to_json(request.sampling)
    sampling["logit_bias"] = {str(token_id): bias for token_id, bias in request.sampling.logit_bias}
    extra: dict[str, Any] = {
        "raw": True,
        "group_ms": round(group_s * 1e3) or None,
        "drafter": request.drafter,
        "depth": request.depth,
        "chat_id": request.chat_id,
        "private": request.private,
        "grammar": to_json(request.grammar),
    }
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        **prompt_fields(request),
        **{name: value for name, value in sampling.items() if value is not None},
        "ignore_eos": request.ignore_eos,
        "chat_template_kwargs": dict(request.template_options),
        "thinking_budget": request.thinking_budget_tokens,
        "continue_final_message": request.continue_final_message,
        "prediction": request.prediction,
        "localspec": {name: value for name, value in extra.items() if value is not None},
        **_common_fields(request),
    }
    return {name: value for name, value in body.items() if value is not None}


def foreign_body(request: GenerateRequest, model: str) -> dict[str, Any]:
    """Body for any OpenAI server: only what differs from its own defaults, since some refuse fields they lack."""
    given, plain = request.sampling, Sampling()
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": given.temperature,
        **prompt_fields(request),
        **_common_fields(request),
    }
    for name in ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"):
        if getattr(given, name) != getattr(plain, name):
            body[name] = getattr(given, name)
    if given.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in given.logit_bias}
    if request.template_options:
        body["chat_template_kwargs"] = dict(request.template_options)
    if request.prediction is not None:
        body["prediction"] = {"type": "content", "content": request.prediction}
    if request.grammar is not None:
        if request.grammar.kind != "json_object":
            raise EngineError("unsupported", f"A {request.grammar.kind} grammar cannot be sent to this server.")
        body["response_format"] = {"type": "json_object"}
    return body


def prompt_fields(request: GenerateRequest) -> dict[str, Any]:
    """The field that holds the prompt."""
    if request.messages:
        return {"messages": [message_json(message) for message in request.messages]}
    if request.prompt is not None:
        return {"prompt": request.prompt}
    return {"prompt": list(request.prompt_token_ids)}


def message_json(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form."""
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
    if message.tool_calls:
        data["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        data["name"] = message.name
    return data


def _common_fields(request: GenerateRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.max_tokens is not None:
        fields["max_tokens"] = request.max_tokens
    if request.stop:
        fields["stop"] = list(request.stop)
    if request.tools:
        fields["tools"] = [dict(tool) for tool in request.tools]
    if request.logprobs is not None and request.messages:
        fields.update(logprobs=True, top_logprobs=request.logprobs)
    elif request.logprobs is not None:
        fields["logprobs"] = request.logprobs
    return fields


def error_of(data: Any, status: int) -> EngineError:
    """The engine's error behind an error body, ours or another server's."""
    inner = data.get("error", data) if isinstance(data, dict) else data
    message, code = (inner.get("message"), inner.get("code")) if isinstance(inner, dict) else (inner, None)
    text = str(message or f"The server answered with status {status}.")[:2000]
    if isinstance(code, str) and code in KNOWN_CODES:
        return EngineError(code, text)
    if status in (401, 403):
        return EngineError("bad_request", f"The server refused the key: {text}")
    if status < 500 and _OVERFLOW.search(text):
        return EngineError("context_length_exceeded", text)
    return EngineError(_CODE_OF_STATUS.get(status, "bad_request" if status < 500 else "internal"), text)


class ForeignReply:
    """Chunks of any OpenAI server to events. Thoughts and calls get the tags that a raw answer would have."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._first_s: float | None = None
        self._phase = Phase.ANSWER
        self._call_index: int | None = None
        self._finish: FinishReason = "stop"
        self._usage = Usage(0, 0)
        self._timings: dict[str, Any] = {}
        self._n_deltas = 0

    def read(self, chunk: dict[str, Any]) -> list[Event]:
        """Events of one chunk. Raises EngineError for an error chunk."""
        if chunk.get("error"):
            raise error_of(chunk, 500)
        self._read_figures(chunk)
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return []
        choice = choices[0]
        self._finish = _finish(choice.get("finish_reason")) or self._finish
        parts = self._parts(choice.get("delta") or {}, choice.get("text"))
        text = "".join(part for part, _ in parts)
        if not text:
            return []
        self._n_deltas += 1
        first = [] if self._first_s else [Prefill(0, 0)]
        self._first_s = self._first_s or time.monotonic()
        spans = tuple(Span(len(part), TARGET_ORIGIN, phase) for part, phase in parts if part)
        return [*first, Delta(text, (), spans, logprobs=_logprobs(choice))]

    def end(self) -> list[Event]:
        """Closing tags, if the answer ended inside a thought or a call, and the last event."""
        closing = self._turn_to(Phase.ANSWER)
        spans = tuple(Span(len(part), TARGET_ORIGIN, phase) for part, phase in closing)
        events: list[Event] = [Delta(part, (), spans) for part, _ in closing]
        return [*events, Done(self._finish, self._usage, self._figures())]

    def _parts(self, delta: dict[str, Any], plain: Any) -> list[tuple[str, Phase]]:
        parts: list[tuple[str, Phase]] = []
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            parts += [*self._turn_to(Phase.THINKING), (thought, Phase.THINKING)]
        said = delta.get("content") or plain
        if isinstance(said, str) and said:
            parts += [*self._turn_to(Phase.ANSWER), (said, Phase.ANSWER)]
        for call in delta.get("tool_calls") or ():
            parts += self._call_parts(call)
        return parts

    def _call_parts(self, call: dict[str, Any]) -> list[tuple[str, Phase]]:
        function = call.get("function") or {}
        parts: list[tuple[str, Phase]] = []
        if self._phase is not Phase.TOOL_CALL or call.get("index") != self._call_index:
            parts += self._turn_to(Phase.ANSWER) + self._turn_to(Phase.TOOL_CALL)
            self._call_index = call.get("index")
            name = str(function.get("name", "")).replace('"', "")
            parts.append((f'{{"name": "{name}", "arguments": ', Phase.TOOL_CALL))
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments:
            parts.append((arguments, Phase.TOOL_CALL))
        return parts

    def _turn_to(self, phase: Phase) -> list[tuple[str, Phase]]:
        """Tags between the phase so far and another."""
        if phase is self._phase:
            return []
        tags: list[tuple[str, Phase]] = []
        if self._phase is not Phase.ANSWER:
            closed = "\n</think>\n\n" if self._phase is Phase.THINKING else "}\n</tool_call>\n"
            tags.append((closed, self._phase))
        if phase is not Phase.ANSWER:
            tags.append(("<think>\n" if phase is Phase.THINKING else "<tool_call>\n", phase))
        self._phase = phase
        return tags

    def _read_figures(self, chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            prompt, completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
            self._usage = Usage(
                prompt_tokens=_count(usage, "prompt_tokens"),
                completion_tokens=_count(usage, "completion_tokens"),
                cached_tokens=_count(prompt, "cached_tokens"),
                reasoning_tokens=_count(completion, "reasoning_tokens"),
                accepted_prediction_tokens=_count(completion, "accepted_prediction_tokens"),
                rejected_prediction_tokens=_count(completion, "rejected_prediction_tokens"),
            )
        if isinstance(chunk.get("timings"), dict):
            self._timings = chunk["timings"]

    def _figures(self) -> Timings:
        """Measured here; counters of drafts where the server (llama.cpp) gives them."""
        now_s = time.monotonic()
        first_s = self._first_s or now_s
        n_tokens = self._usage.completion_tokens or self._n_deltas
        return Timings(
            prefill_ms=(first_s - self._began_s) * 1e3,
            decode_ms=(now_s - first_s) * 1e3,
            tok_per_s=n_tokens / (now_s - first_s) if now_s > first_s and n_tokens else 0.0,
            draft_n=_count(self._timings, "draft_n"),
            draft_n_accepted=_count(self._timings, "draft_n_accepted"),
            cached_tokens=self._usage.cached_tokens,
        )


def _count(data: Any, key: str) -> int:
    value = data.get(key) if isinstance(data, dict) else 0
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _finish(value: Any) -> FinishReason | None:
    if value is None:
        return None
    return "length" if value == "length" else "tool_calls" if value in ("tool_calls", "function_call") else "stop"


def _logprobs(choice: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    content = (choice.get("logprobs") or {}).get("content") or ()
    return tuple(
        TokenLogprob(-1, str(entry.get("token", "")), float(entry.get("logprob", 0.0)))
        for entry in content
        if isinstance(entry, dict)
    )
