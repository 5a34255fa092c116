"""/api/chat, /api/generate, /api/tags, /api/show, /api/ps, /api/version: what editors with an Ollama provider ask.

Turns requests into the OpenAI form that the rest of the port reads; answers in lines of JSON, tool arguments as
objects. Knows nothing of generation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from localspec.api.closing import closing
from localspec.api.types import GenerateRequest, ModelInfo
from localspec.server.body import read_fields
from localspec.server.context import Port, port_of
from localspec.server.errors import ApiError, bad
from localspec.server.fields import Fields
from localspec.server.generation import Finished, Reply, Step, collect, run
from localspec.server.infill import infill_prompt
from localspec.server.model_json import argument_object
from localspec.server.normalise import text_of
from localspec.server.openai import read_chat
from localspec.server.request import Caller, Choice, read_common
from localspec.server.sse import dump, open_stream, until_client_leaves
from localspec.server.stream import CallArguments, CallEnd, CallStart, TextPiece

NDJSON = "application/x-ndjson"
COMPATIBLE_VERSION = "0.13.0"
"""Version of Ollama's API that is spoken; clients refuse old ones."""
_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "num_predict",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)

Shape = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class _Job:
    """One request and the shape of its lines."""

    request: GenerateRequest
    max_calls: int | None
    splits: bool
    model: str
    shape: Shape


async def chat(request: Request) -> Response:
    """POST /api/chat."""
    port, fields, caller = await _open(request)
    if not fields.items("messages"):
        return JSONResponse(_loaded(caller.model.id, _chat_shape))
    body = {**_shared_form(fields), "messages": _messages(fields.items("messages")), "tools": fields.items("tools")}
    call = await read_chat(Fields(body), caller, port)
    job = _Job(call.request, call.choice.max_calls, True, caller.model.id, _chat_shape)
    return await _answer(request, port, fields, job)


async def generate(request: Request) -> Response:
    """POST /api/generate."""
    port, fields, caller = await _open(request)
    prompt, suffix = fields.text("prompt") or "", fields.text("suffix")
    if not prompt and not suffix:
        return JSONResponse(_loaded(caller.model.id, _generate_shape))
    body = _shared_form(fields)
    if fields.flag("raw") or suffix:
        plain = await infill_prompt(caller, prompt, suffix) if suffix else prompt
        common = await read_common(Fields(body), caller, Choice())
        job = _Job(replace(common, prompt=plain), None, False, caller.model.id, _generate_shape)
        return await _answer(request, port, fields, job)
    if fields.items("images"):
        raise bad("images are not supported; this model reads text only.", "images", "unsupported")
    system = fields.text("system")
    said = [{"role": "system", "content": system}] if system else []
    call = await read_chat(Fields({**body, "messages": [*said, {"role": "user", "content": prompt}]}), caller, port)
    return await _answer(request, port, fields, _Job(call.request, None, True, caller.model.id, _generate_shape))


async def tags(request: Request) -> Response:
    """GET /api/tags and /api/ps: the loaded model."""
    model = port_of(request).engine.model()
    entries = []
    if model is not None:
        entries.append(
            {
                "name": model.id,
                "model": model.id,
                "modified_at": _stamp(),
                "expires_at": "2100-01-01T00:00:00Z",
                "size": 0,
                "size_vram": 0,
                "digest": "",
                "details": _details(),
                "context_length": model.context_limit_tokens,
            }
        )
    return JSONResponse({"models": entries})


async def show(request: Request) -> Response:
    """POST /api/show."""
    _, _, caller = await _open(request)
    model = caller.model
    return JSONResponse(
        {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": _details(),
            "modified_at": _stamp(),
            "model_info": {
                "general.architecture": "localspec",
                "general.basename": model.title,
                "localspec.context_length": model.context_limit_tokens,
            },
            "capabilities": _capabilities(model),
        }
    )


async def version(request: Request) -> Response:
    """GET /api/version."""
    return JSONResponse({"version": COMPATIBLE_VERSION})


async def root(request: Request) -> Response:
    """GET /: what probes for a local server look for."""
    return PlainTextResponse("localspec is running")


def _capabilities(model: ModelInfo) -> list[str]:
    found = ["completion"]
    if model.has_chat_template:
        found.append("tools")
    return [*found, "thinking"] if model.thinks else found


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "localspec",
        "family": "localspec",
        "families": ["localspec"],
        "parameter_size": "",
        "quantization_level": "",
    }


async def _open(request: Request) -> tuple[Port, Fields, Caller]:
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    name = fields.text(fields.first("model", "name"))
    # Names come back with the tag that Ollama gives every model.
    return port, fields, port.caller(request, name.removesuffix(":latest") if name else None)


def _shared_form(fields: Fields) -> dict[str, Any]:
    """Options, format and thinking in OpenAI's names."""
    options = fields.object("options") or Fields({}, "options")
    body = {name: options.value(name) for name in _OPTIONS if options.has(name)}
    form = fields.value("format")
    if form == "json":
        body["response_format"] = {"type": "json_object"}
    elif isinstance(form, dict):
        body["response_format"] = {"type": "json_schema", "schema": form}
    elif form not in (None, ""):
        raise bad("format must be json or a JSON schema.", "format")
    think = fields.value("think")
    if isinstance(think, bool):
        body["enable_thinking"] = think
    elif isinstance(think, str):
        body["reasoning_effort"] = think
    return body


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form: calls get ids, results are matched to them by name or by order."""
    said: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    for index, item in enumerate(items):
        fields = Fields(item, f"messages[{index}]")
        if fields.items("images"):
            raise bad(f"{fields.name('images')}: this model reads text only.", fields.name("images"), "unsupported")
        message: dict[str, Any] = {
            "role": fields.need_text("role"),
            "content": text_of(fields.value("content"), fields.name("content")),
        }
        if fields.has("thinking"):
            message["reasoning_content"] = fields.text("thinking")
        calls = []
        for number, raw in enumerate(fields.items("tool_calls")):
            function = Fields(raw, fields.name(f"tool_calls[{number}]")).mapping("function")
            call_id = f"call_{index}_{number}"
            waiting.append((call_id, str(function.get("name"))))
            calls.append({"id": call_id, "type": "function", "function": dict(function)})
        if calls:
            message["tool_calls"] = calls
        if message["role"] == "tool" and waiting:
            name = fields.text(fields.first("tool_name", "name"))
            match = next((pair for pair in waiting if pair[1] == name), waiting[0])
            waiting.remove(match)
            message["tool_call_id"] = match[0]
        said.append(message)
    return said


async def _answer(request: Request, port: Port, fields: Fields, job: _Job) -> Response:
    if fields.flag("stream", True):
        return await open_stream(port.admit(_lines(port, job)), _error_lines, port.settings, NDJSON)
    with port.admitted():
        work = collect(port.engine, job.request, job.max_calls, job.splits)
        reply = await until_client_leaves(request, work)
    return JSONResponse(_whole(job, reply))


async def _lines(port: Port, job: _Job) -> AsyncGenerator[bytes, None]:
    pending: dict[int, tuple[str, list[str]]] = {}
    async with closing(run(port.engine, job.request, job.max_calls, job.splits)) as steps:
        async for step in steps:
            if isinstance(step, Finished):
                for name, parts in pending.values():
                    yield _line(job, "", "", [_call(name, "".join(parts))])
                yield (dump({**_head(job), **job.shape("", "", []), **_ending(step)}) + "\n").encode()
            elif isinstance(step, Step):
                for piece in step.pieces:
                    if isinstance(piece, TextPiece):
                        thought, said = (piece.text, "") if piece.kind == "reasoning" else ("", piece.text)
                        yield _line(job, said, thought, [])
                    elif isinstance(piece, CallStart):
                        pending[piece.index] = (piece.name, [])
                    elif isinstance(piece, CallArguments):
                        pending[piece.index][1].append(piece.text)
                    elif isinstance(piece, CallEnd):
                        name, parts = pending.pop(piece.index)
                        yield _line(job, "", "", [_call(name, "".join(parts))])


def _whole(job: _Job, reply: Reply) -> dict[str, Any]:
    calls = [_call(call.name, call.arguments) for call in reply.calls]
    return {**_head(job), **job.shape(reply.content, reply.reasoning, calls), **_ending(reply.finished)}


def _line(job: _Job, said: str, thought: str, calls: list[dict[str, Any]]) -> bytes:
    return (dump({**_head(job), **job.shape(said, thought, calls), "done": False}) + "\n").encode()


def _head(job: _Job) -> dict[str, Any]:
    return {"model": job.model, "created_at": _stamp()}


def _ending(finished: Finished) -> dict[str, Any]:
    usage, timings = finished.usage, finished.timings
    return {
        "done": True,
        "done_reason": "length" if finished.finish_reason == "length" else "stop",
        "total_duration": int((timings.prefill_ms + timings.decode_ms) * 1e6),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(timings.prefill_ms * 1e6),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(timings.decode_ms * 1e6),
    }


def _chat_shape(said: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if thought:
        message["thinking"] = thought
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def _generate_shape(said: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": said, "thinking": thought} if thought else {"response": said}


def _loaded(model: str, shape: Shape) -> dict[str, Any]:
    """The answer to an empty request, which asks to load the model."""
    body = {"model": model, "created_at": _stamp(), **shape("", "", [])}
    return {**body, "done": True, "done_reason": "load"}


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": argument_object(arguments)}}


def _error_lines(error: ApiError) -> Iterable[bytes]:
    return ((dump(error.ollama()) + "\n").encode(),)


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
