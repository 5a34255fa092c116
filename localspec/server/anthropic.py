"""/v1/messages and /v1/messages/count_tokens.

Turns Anthropic's form of a request into the OpenAI form that the rest of the port reads, and its pieces into
content blocks. Knows nothing of generation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localspec.api.closing import closing
from localspec.api.types import Prefill
from localspec.server.body import read_fields
from localspec.server.context import Port, port_of
from localspec.server.errors import ApiError, bad
from localspec.server.fields import Fields, check_count
from localspec.server.generation import Finished, Progress, Reply, Step, collect, new_id, run
from localspec.server.model_json import argument_object
from localspec.server.normalise import text_of
from localspec.server.openai import ChatCall, read_chat
from localspec.server.request import Caller, read_stops
from localspec.server.sse import frame, open_stream, until_client_leaves
from localspec.server.stream import CallArguments, CallEnd, CallStart, Piece, TextPiece

BILLING_LINE = "x-anthropic-billing-header:"
"""A block that one client puts before its instructions; it changes each time and would spoil the prompt cache."""


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    caller, call = await _read(fields, port, request)
    stream = BlockStream(caller.model.id)
    if call.stream:
        return await open_stream(port.admit(_frames(port, call, stream)), _error_frames, port.settings)
    with port.admitted():
        work = collect(port.engine, call.request, call.choice.max_calls)
        reply = await until_client_leaves(request, work)
    return JSONResponse(stream.whole(reply))


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens: length of the prompt that the same request would give, tools included."""
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    _, call = await _read(fields, port, request)
    return JSONResponse({"input_tokens": await port.engine.count_tokens(call.request)})


async def _read(fields: Fields, port: Port, request: Request) -> tuple[Caller, ChatCall]:
    name = fields.text("model")
    caller = port.caller(request, None if name and name.startswith("claude") else name)
    return caller, await read_chat(Fields(openai_form(fields)), caller, port)


def openai_form(fields: Fields) -> dict[str, Any]:
    """The same request in the form of /v1/chat/completions. Raises ApiError 400."""
    said: list[dict[str, Any]] = []
    system = _system_text(fields.value("system"))
    if system:
        said.append({"role": "system", "content": system})
    for index, item in enumerate(fields.items("messages")):
        said += _read_message(Fields(item, f"messages[{index}]"))
    if not said and fields.items("messages"):
        raise bad("messages hold no content; give at least one block of text.", "messages")
    body: dict[str, Any] = {"messages": said, "stop": list(read_stops(fields, "stop_sequences"))}
    for name in ("max_tokens", "temperature", "top_p", "top_k", "stream", "localspec", "seed"):
        if fields.has(name):
            body[name] = fields.value(name)
    tools = [tool for tool in map(_tool, fields.items("tools")) if tool is not None]
    if tools:
        body["tools"] = tools
    choice = fields.object("tool_choice")
    if choice is not None:
        body.update(_tool_choice(choice))
    thinking = fields.object("thinking")
    if thinking is not None:
        body.update(_thinking(thinking))
    form = _output_form(fields)
    if form is not None:
        body["response_format"] = form
    return body


def _output_form(fields: Fields) -> dict[str, Any] | None:
    form = (fields.object("output_config") or Fields({})).object("format") or fields.object("output_format")
    if form is None:
        return None
    if form.text("type") != "json_schema":
        raise bad(f"{form.name('type')} must be json_schema.", form.name("type"))
    return form.data


def _system_text(value: Any) -> str:
    if isinstance(value, list):
        value = [
            part
            for part in value
            if not str(part.get("text", "") if isinstance(part, dict) else part).startswith(BILLING_LINE)
        ]
    return text_of(value, "system")


def _read_message(fields: Fields) -> Iterator[dict[str, Any]]:
    """Messages of one message: results of tools come as messages of their own before the text."""
    role = fields.need_text("role")
    content = fields.value("content")
    if role not in ("user", "assistant", "system"):
        raise bad(f"{fields.name('role')} must be user or assistant, not {role!r}.", fields.name("role"))
    if isinstance(content, list):
        check_count(content, fields.name("content"))
    else:
        yield {"role": role, "content": text_of(content, fields.name("content"))}
        return
    said = _Blocks()
    for index, item in enumerate(content):
        block = Fields(item, fields.name(f"content[{index}]"))
        if block.text("type") == "tool_result":
            yield _tool_result(block)
        else:
            said.take(block)
    if said.texts or said.calls or said.thoughts:
        message: dict[str, Any] = {"role": role, "content": "".join(said.texts), "tool_calls": said.calls}
        if said.thoughts:
            message["reasoning_content"] = "".join(said.thoughts)
        yield message


@dataclass
class _Blocks:
    """Blocks of one message by kind; kinds that are not known are skipped."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def take(self, block: Fields) -> None:
        """Sort one block in. Raises ApiError 400 for what is not text."""
        kind = block.text("type", "text")
        if kind == "text":
            self.texts.append(block.text("text") or "")
        elif kind == "thinking":
            self.thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.need_text("name"), "arguments": block.mapping("input")}
            self.calls.append({"id": block.need_text("id"), "type": "function", "function": function})
        elif kind in ("image", "document"):
            raise bad(f"{block.path} is of type {kind!r}; this model reads text only.", block.path, "unsupported")


def _tool_result(block: Fields) -> dict[str, Any]:
    text = text_of(block.value("content"), block.name("content"))
    if block.flag("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.need_text("tool_use_id"), "content": text}


def _tool(item: Any) -> dict[str, Any] | None:
    """A tool of the client; tools that run at Anthropic have a type and are none of ours."""
    tool = Fields(item, "tools[]")
    if tool.text("type", "custom") != "custom":
        return None
    function = {
        "name": tool.need_text("name"),
        "description": tool.text("description") or "",
        "parameters": tool.mapping("input_schema"),
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Fields) -> dict[str, Any]:
    kind = choice.text("type", "auto")
    known = {"auto": "auto", "any": "required", "none": "none"}
    how: Any = known.get(kind or "")
    if kind == "tool":
        how = {"type": "function", "function": {"name": choice.need_text("name")}}
    if how is None:
        raise bad(f"{choice.name('type')} must be auto, any, tool or none.", choice.name("type"))
    return {"tool_choice": how, "parallel_tool_calls": not choice.flag("disable_parallel_tool_use")}


def _thinking(thinking: Fields) -> dict[str, Any]:
    kind = thinking.text("type")
    if kind == "enabled":
        budget = thinking.integer("budget_tokens", 0, 1 << 40)
        return {"enable_thinking": True, **({} if budget is None else {"thinking_budget": budget})}
    return {"enable_thinking": False} if kind == "disabled" else {}


@dataclass
class BlockStream:
    """Pieces to the events of a message; the same blocks make up a whole reply."""

    model: str
    id: str = field(default_factory=lambda: new_id("msg_"))
    _n_blocks: int = 0
    _open: str = ""
    _started: bool = False

    def take(self, step: Progress) -> Iterator[bytes]:
        """Events of one step."""
        if not self._started and not isinstance(step, Finished):
            self._started = True
            n_prompt = step.total_tokens if isinstance(step, Prefill) else 0
            n_cached = step.cached_tokens if isinstance(step, Prefill) else 0
            yield self._event("message_start", message=self._message([], None, None, _usage(n_prompt, n_cached, 0)))
            yield self._event("ping")
        if isinstance(step, Step):
            for piece in step.pieces:
                yield from self._piece(piece)
        elif isinstance(step, Finished):
            yield from self._close()
            reason, stop = _stop(step)
            delta = {"stop_reason": reason, "stop_sequence": stop}
            yield self._event("message_delta", delta=delta, usage=_usage_of(step))
            yield self._event("message_stop")

    def whole(self, reply: Reply) -> dict[str, Any]:
        """The reply that is not streamed."""
        blocks: list[dict[str, Any]] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content:
            blocks.append({"type": "text", "text": reply.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": argument_object(call.arguments)}
            for call in reply.calls
        ]
        reason, stop = _stop(reply.finished)
        return self._message(blocks, reason, stop, _usage_of(reply.finished))

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, TextPiece):
            thinks = piece.kind == "reasoning"
            empty = {"type": "thinking", "thinking": "", "signature": ""} if thinks else {"type": "text", "text": ""}
            yield from self._ensure(piece.kind, empty)
            kind, key = ("thinking_delta", "thinking") if thinks else ("text_delta", "text")
            yield self._delta({"type": kind, key: piece.text})
        elif isinstance(piece, CallStart):
            yield from self._close()
            start = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            yield from self._ensure("call", start)
        elif isinstance(piece, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": piece.text})
        elif isinstance(piece, CallEnd):
            yield from self._close()

    def _ensure(self, kind: str, start: dict[str, Any]) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield self._event("content_block_start", index=self._n_blocks, content_block=start)

    def _close(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield self._event("content_block_stop", index=self._n_blocks)
            self._n_blocks += 1

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", index=self._n_blocks, delta=delta)

    def _event(self, kind: str, **data: Any) -> bytes:
        return frame({"type": kind, **data}, kind)

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


async def _frames(port: Port, call: ChatCall, stream: BlockStream) -> AsyncGenerator[bytes, None]:
    async with closing(run(port.engine, call.request, call.choice.max_calls)) as steps:
        async for step in steps:
            for body in stream.take(step):
                yield body


def _error_frames(error: ApiError) -> Iterable[bytes]:
    return (frame(error.anthropic(), "error"),)


def _stop(finished: Finished) -> tuple[str, str | None]:
    if finished.stop_text is not None:
        return "stop_sequence", finished.stop_text
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(finished.finish_reason, "end_turn"), None


def _usage_of(finished: Finished) -> dict[str, int]:
    usage = finished.usage
    return _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _usage(n_prompt: int, n_cached: int, n_output: int) -> dict[str, int]:
    """Anthropic counts what came from the cache apart from the input."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_output,
    }
