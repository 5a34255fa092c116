"""/v1/responses: events in the order that OpenAI documents, and the whole response made of the same steps.

Knows items and events; requests are read in `responses_request`.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localspec.api.closing import closing
from localspec.server.body import read_fields
from localspec.server.context import Port, port_of
from localspec.server.errors import ApiError
from localspec.server.fields import Fields
from localspec.server.generation import Finished, Progress, Step, new_id, run
from localspec.server.openai import ChatCall, read_chat
from localspec.server.responses_request import CUSTOM_ARGUMENT, custom_names, openai_form
from localspec.server.sse import frame, open_stream, until_client_leaves
from localspec.server.stream import CallArguments, CallEnd, CallStart, Piece, TextPiece

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
)

Event = tuple[str, dict[str, Any]]


async def responses(request: Request) -> Response:
    """POST /v1/responses."""
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    caller = port.caller(request, fields.text("model"))
    call = await read_chat(Fields(openai_form(fields)), caller, port)
    stream = ItemStream(caller.model.id, _echo(fields), custom_names(fields))
    if call.stream:

        def failed(error: ApiError) -> Iterable[bytes]:
            return map(stream.encode, stream.fail(error))

        return await open_stream(port.admit(_frames(port, call, stream)), failed, port.settings)
    with port.admitted():
        return JSONResponse(await until_client_leaves(request, _whole(port, call, stream)))


def _echo(fields: Fields) -> dict[str, Any]:
    """Request fields that a response repeats, with what clients expect where they are absent."""
    echoed = {name: fields.value(name) for name in _ECHOED}
    defaults: dict[str, Any] = {
        "metadata": {},
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
    }
    return {**echoed, **{name: value for name, value in defaults.items() if echoed[name] is None}}


async def _frames(port: Port, call: ChatCall, stream: ItemStream) -> AsyncGenerator[bytes, None]:
    async with closing(run(port.engine, call.request, call.choice.max_calls)) as steps:
        async for step in steps:
            for event in stream.take(step):
                yield stream.encode(event)


async def _whole(port: Port, call: ChatCall, stream: ItemStream) -> dict[str, Any]:
    async with closing(run(port.engine, call.request, call.choice.max_calls)) as steps:
        async for step in steps:
            for _ in stream.take(step):
                pass
    return stream.response()


@dataclass
class ItemStream:
    """Steps to events. Items open and close one after the other; the response holds the closed ones."""

    model: str
    echoed: dict[str, Any]
    customs: frozenset[str]
    id: str = field(default_factory=lambda: new_id("resp_"))
    created_s: int = field(default_factory=lambda: int(time.time()))
    _output: list[dict[str, Any]] = field(default_factory=list)
    _item: dict[str, Any] | None = None
    _text: list[str] = field(default_factory=list)
    _status: str = "in_progress"
    _finished: Finished | None = None
    _error: dict[str, Any] | None = None
    _sequence: int = 0
    _started: bool = False

    def encode(self, event: Event) -> bytes:
        """A frame with the next sequence number."""
        kind, data = event
        numbered = {"type": kind, "sequence_number": self._sequence, **data}
        self._sequence += 1
        return frame(numbered, kind)

    def response(self) -> dict[str, Any]:
        """The response as far as it is."""
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": self._status,
            "model": self.model,
            "output": list(self._output),
            "error": self._error,
            "incomplete_details": reason,
            "usage": self._usage(),
            "previous_response_id": None,
            "store": False,
            **self.echoed,
        }

    def take(self, step: Progress) -> Iterator[Event]:
        """Events of one step of the generation."""
        if not self._started:
            self._started = True
            yield "response.created", {"response": self.response()}
            yield "response.in_progress", {"response": self.response()}
        if isinstance(step, Step):
            for piece in step.pieces:
                yield from self._piece(piece)
        elif isinstance(step, Finished):
            cut = step.finish_reason == "length"
            yield from self._close("incomplete" if cut else "completed")
            self._finished, self._status = step, "incomplete" if cut else "completed"
            yield f"response.{self._status}", {"response": self.response()}

    def fail(self, error: ApiError) -> Iterator[Event]:
        """The last event of a stream that broke."""
        if not self._started:
            self._started = True
            yield "response.created", {"response": self.response()}
        self._status, self._error = "failed", {"code": error.code, "message": error.message}
        yield "response.failed", {"response": self.response()}

    def _piece(self, piece: Piece) -> Iterator[Event]:
        if isinstance(piece, TextPiece):
            yield from self._text_piece(piece)
        elif isinstance(piece, CallStart):
            yield from self._close("completed")
            yield from self._begin(self._call_item(piece))
        elif isinstance(piece, CallArguments):
            self._text.append(piece.text)
            # Free text is inside the JSON that the model writes, so it can be given only when that is whole.
            if self._item and self._item["type"] == "function_call":
                yield "response.function_call_arguments.delta", self._at(delta=piece.text)
        elif isinstance(piece, CallEnd):
            yield from self._close("completed")

    def _text_piece(self, piece: TextPiece) -> Iterator[Event]:
        kind = "reasoning" if piece.kind == "reasoning" else "message"
        if self._item is None or self._item["type"] != kind:
            yield from self._close("completed")
            if kind == "reasoning":
                yield from self._begin({"type": "reasoning", "id": new_id("rs_"), "summary": []})
                part: dict[str, Any] = {"type": "summary_text", "text": ""}
                yield "response.reasoning_summary_part.added", self._at(summary_index=0, part=part)
            else:
                item = {"type": "message", "id": new_id("msg_"), "status": "in_progress", "role": "assistant"}
                yield from self._begin({**item, "content": []})
                yield "response.content_part.added", self._at(content_index=0, part=_text_part(""))
        self._text.append(piece.text)
        if kind == "reasoning":
            yield "response.reasoning_summary_text.delta", self._at(summary_index=0, delta=piece.text)
        else:
            yield "response.output_text.delta", self._at(content_index=0, delta=piece.text, logprobs=[])

    def _call_item(self, piece: CallStart) -> dict[str, Any]:
        shared = {"call_id": piece.id, "name": piece.name, "status": "in_progress"}
        if piece.name in self.customs:
            return {"type": "custom_tool_call", "id": new_id("ctc_"), "input": "", **shared}
        return {"type": "function_call", "id": new_id("fc_"), "arguments": "", **shared}

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self._item, self._text = item, []
        yield "response.output_item.added", {"output_index": len(self._output), "item": dict(item)}

    def _close(self, status: str) -> Iterator[Event]:
        """The closing events of the open item."""
        item = self._item
        if item is None:
            return
        text = "".join(self._text)
        closers: dict[str, Callable[[dict[str, Any], str], Iterator[Event]]] = {
            "reasoning": self._close_reasoning,
            "message": self._close_message,
            "function_call": self._close_call,
            "custom_tool_call": self._close_custom,
        }
        yield from closers[item["type"]](item, text)
        if "status" in item:
            item["status"] = status
        yield "response.output_item.done", {"output_index": len(self._output), "item": dict(item)}
        self._output.append(item)
        self._item = None

    def _close_reasoning(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        part = {"type": "summary_text", "text": text}
        yield "response.reasoning_summary_text.done", self._at(summary_index=0, text=text)
        yield "response.reasoning_summary_part.done", self._at(summary_index=0, part=part)
        item["summary"] = [part]

    def _close_message(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        yield "response.output_text.done", self._at(content_index=0, text=text, logprobs=[])
        yield "response.content_part.done", self._at(content_index=0, part=_text_part(text))
        item["content"] = [_text_part(text)]

    def _close_call(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        yield "response.function_call_arguments.done", self._at(arguments=text, name=item["name"])
        item["arguments"] = text

    def _close_custom(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        free = _free_text(text)
        yield "response.custom_tool_call_input.delta", self._at(delta=free)
        yield "response.custom_tool_call_input.done", self._at(input=free)
        item["input"] = free

    def _at(self, **data: Any) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._output), **data}

    def _usage(self) -> dict[str, Any] | None:
        if self._finished is None:
            return None
        usage = self._finished.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _free_text(arguments: str) -> str:
    """The text of a tool with free text; what is no JSON object of that form is given as it is."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    found = value.get(CUSTOM_ARGUMENT) if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments
