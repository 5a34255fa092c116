"""/v1/models, /v1/chat/completions, /v1/completions.

Reads requests and orders the frames of replies. The shapes are in `openai_reply`, the generation in `generation`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localspec.api.closing import closing
from localspec.api.engine import Engine
from localspec.api.types import Done, GenerateRequest, ModelInfo, Prefill
from localspec.server.body import read_fields
from localspec.server.context import Port, port_of
from localspec.server.errors import ApiError, bad
from localspec.server.fields import Fields
from localspec.server.generation import Finished, Reply, Step, collect, run
from localspec.server.grouping import grouped
from localspec.server.normalise import read_messages
from localspec.server.openai_reply import (
    DraftView,
    Head,
    chat_choice,
    chat_deltas,
    chat_logprobs,
    chat_message,
    figures,
    finish_word,
    raw_event,
    usage_json,
)
from localspec.server.request import Caller, Choice, read_common, read_tools
from localspec.server.sse import DONE, frame, open_stream, until_client_leaves


@dataclass(frozen=True)
class ChatCall:
    """One chat request, checked."""

    request: GenerateRequest
    choice: Choice
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    shows_spans: bool = False
    is_raw: bool = False
    group_s: float = 0.0
    """Of a raw stream: what comes within this time is sent in one piece."""
    shows_progress: bool = False


async def models(request: Request) -> Response:
    """GET /v1/models and /v1/models/{id}."""
    port = port_of(request)
    model = port.engine.model()
    entries = [_model_json(model, int(port.started_s))] if model else []
    wanted = request.path_params.get("model")
    if wanted is None:
        return JSONResponse({"object": "list", "data": entries, "models": entries})
    if model is None or wanted != model.id:
        raise ApiError(404, f"No model {wanted[:100]!r} is loaded.", code="model_not_found", param="model")
    return JSONResponse(entries[0])


def _model_json(model: ModelInfo, created_s: int) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "created": created_s,
        "owned_by": "localspec",
        "name": model.title,
        "max_model_len": model.context_limit_tokens,
        "context_length": model.context_limit_tokens,
        "meta": {
            "n_ctx": model.context_limit_tokens,
            "n_ctx_train": model.context_limit_tokens,
            "n_vocab": model.vocab_size,
            "demo": model.demo,
            "note": model.note,
        },
    }


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    caller = port.caller(request, fields.text("model"))
    call = await read_chat(fields, caller, port)
    port.note_unknown(fields)
    head = Head(caller.model.id)
    if call.stream:
        source = chat_frames(port, call, head)
        frames = port.admit(grouped(source, call.group_s) if call.is_raw and call.group_s else source)
        return await open_stream(frames, openai_error_frames, port.settings)
    with port.admitted():
        replies = await until_client_leaves(request, collect_choices(port.engine, call.request, call.n, call.choice))
    return JSONResponse(_whole_chat(port, call, head, replies))


async def read_chat(fields: Fields, caller: Caller, port: Port) -> ChatCall:
    """A checked chat request. Raises ApiError 400."""
    messages = fields.items("messages")
    choice = read_tools(fields)
    common = await read_common(fields, caller, choice)
    extra, options = fields.object("localspec"), fields.object("stream_options")
    request = _continuing(dataclasses.replace(common, messages=read_messages(messages)), fields)
    return ChatCall(
        request=request,
        choice=choice,
        n=fields.integer("n", 1, port.settings.max_choices) or 1,
        stream=fields.flag("stream"),
        include_usage=options.flag("include_usage") if options else False,
        shows_spans=extra.flag("spans") if extra else False,
        is_raw=extra.flag("raw") if extra else False,
        group_s=(extra.integer("group_ms", 0, 1000) or 0) / 1e3 if extra else 0.0,
        shows_progress=fields.flag("return_progress"),
    )


def _continuing(request: GenerateRequest, fields: Fields) -> GenerateRequest:
    """Where the model goes on with the last message: without a thought before it.

    That is so when asked, and for any text of the assistant's at the end unless the request says otherwise.
    """
    last = request.messages[-1]
    if fields.flag("continue_final_message") and last.role != "assistant":
        raise bad("continue_final_message needs an assistant message at the end.", "continue_final_message")
    is_begun = last.role == "assistant" and bool(last.content) and not last.tool_calls
    wanted = fields.flag("continue_final_message", is_begun and not fields.flag("add_generation_prompt"))
    if not wanted:
        return request
    thoughtless = {**request.template_options, "enable_thinking": False}
    return dataclasses.replace(request, template_options=thoughtless, continue_final_message=True)


def numbered(request: GenerateRequest, index: int) -> GenerateRequest:
    """The request of choice `index`: the same prompt under another seed."""
    seed = request.sampling.seed
    if seed is None or index == 0:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=seed + index))


async def collect_choices(
    engine: Engine, request: GenerateRequest, n: int, choice: Choice, splits: bool = True
) -> list[Reply]:
    """`n` whole replies, one after the other, so that they share the prompt's cache."""
    return [await collect(engine, numbered(request, index), choice.max_calls, splits) for index in range(n)]


def openai_error_frames(error: ApiError) -> Iterable[bytes]:
    """How a stream that has begun says that it failed."""
    return (frame(error.openai()), DONE)


async def chat_frames(port: Port, call: ChatCall, head: Head) -> AsyncGenerator[bytes, None]:
    """Frames of a streamed chat reply. Raises EngineError before the first frame for a request that cannot run."""
    ends: list[Finished] = []
    for index in range(call.n):
        source = _raw_choice(port, call, head, index, ends) if call.is_raw else _choice(port, call, head, index, ends)
        async with closing(source) as frames:
            async for body in frames:
                yield body
    if call.include_usage and ends:
        total = add_usage(ends)
        yield frame(head.chunk([], usage=usage_json(total.usage, call.request.prediction is not None)))
    yield DONE


async def _choice(
    port: Port, call: ChatCall, head: Head, index: int, ends: list[Finished]
) -> AsyncGenerator[bytes, None]:
    began_s, opened, view = time.monotonic(), False, DraftView()
    both_names = port.settings.emit_reasoning
    async with closing(run(port.engine, numbered(call.request, index), call.choice.max_calls)) as steps:
        async for step in steps:
            if not opened:
                opened = True
                yield frame(head.chunk([chat_choice(index, {"role": "assistant", "content": ""})]))
            if isinstance(step, Finished):
                ends.append(step)
                last = chat_choice(index, {}, finish_word(step, call.choice.is_named))
                yield frame(head.chunk([last], **figures(step)))
            elif isinstance(step, Step):
                for body in _step_frames(call, head, index, step, view, both_names):
                    yield body
            elif isinstance(step, Prefill) and call.shows_progress:
                yield frame(head.chunk([], prompt_progress=_progress(step, began_s)))


def _step_frames(
    call: ChatCall, head: Head, index: int, step: Step, view: DraftView, both_names: bool
) -> Iterable[bytes]:
    """Chunks of one step; log-probabilities and the draft view go with the first."""
    deltas = chat_deltas(step.pieces, both_names)
    logprobs = chat_logprobs(step.delta.logprobs) if step.delta else None
    extra = {"localspec": view.fields(step)} if call.shows_spans else {}
    if not deltas and (logprobs or extra):
        deltas = [{}]
    for delta in deltas:
        yield frame(head.chunk([chat_choice(index, delta, logprobs=logprobs)], **extra))
        logprobs, extra = None, {}


async def _raw_choice(
    port: Port, call: ChatCall, head: Head, index: int, ends: list[Finished]
) -> AsyncGenerator[bytes, None]:
    """The engine's own events in chunks, for clients that are interfaces themselves."""
    async with closing(port.engine.generate(numbered(call.request, index))) as events:
        async for event in events:
            finish = event.finish_reason if isinstance(event, Done) else None
            if isinstance(event, Done):
                ends.append(Finished(event.finish_reason, event.usage, event.timings, event.stop_text))
            yield frame(head.chunk([chat_choice(index, {}, finish)], localspec=raw_event(event)))


def _progress(prefill: Prefill, began_s: float) -> dict[str, Any]:
    return {
        "total": prefill.total_tokens,
        "cache": prefill.cached_tokens,
        "processed": prefill.done_tokens,
        "time_ms": round((time.monotonic() - began_s) * 1e3),
    }


def _whole_chat(port: Port, call: ChatCall, head: Head, replies: list[Reply]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": chat_message(reply, port.settings.emit_reasoning),
            "logprobs": chat_logprobs(reply.logprobs),
            "finish_reason": finish_word(reply.finished, call.choice.is_named),
        }
        for index, reply in enumerate(replies)
    ]
    total = add_usage([reply.finished for reply in replies])
    usage = usage_json(total.usage, call.request.prediction is not None)
    return head.whole(choices, usage=usage, **figures(total))


def add_usage(ends: list[Finished]) -> Finished:
    """Usage of several choices: the prompt counts once, the rest adds up; figures are the last one's."""
    last = ends[-1]
    if len(ends) == 1:
        return last
    parts = [end.usage for end in ends]
    usage = dataclasses.replace(
        parts[0],
        completion_tokens=sum(part.completion_tokens for part in parts),
        reasoning_tokens=sum(part.reasoning_tokens for part in parts),
        accepted_prediction_tokens=sum(part.accepted_prediction_tokens for part in parts),
        rejected_prediction_tokens=sum(part.rejected_prediction_tokens for part in parts),
    )
    return dataclasses.replace(last, usage=usage)
