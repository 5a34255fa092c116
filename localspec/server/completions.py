"""/v1/completions: plain text in, plain text out; nothing is split, no template is applied."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localspec.api.closing import closing
from localspec.api.engine import Engine
from localspec.api.types import Done, GenerateRequest
from localspec.server.body import read_fields
from localspec.server.context import Port, port_of
from localspec.server.errors import bad
from localspec.server.fields import Fields
from localspec.server.generation import Finished, Reply, Step, collect, new_id, run
from localspec.server.infill import infill_prompt
from localspec.server.openai import add_usage, numbered, openai_error_frames
from localspec.server.openai_reply import DraftView, Head, completion_logprobs, figures, raw_event, usage_json
from localspec.server.request import Caller, Choice, read_common, read_token_ids
from localspec.server.sse import DONE, frame, open_stream, until_client_leaves

MAX_PROMPTS = 16


@dataclass(frozen=True)
class CompletionCall:
    """One completion request, checked: a generation for each prompt and choice, in the order of their index."""

    requests: tuple[GenerateRequest, ...]
    n_prompts: int
    echoes: tuple[str, ...]
    stream: bool
    include_usage: bool
    shows_spans: bool
    is_raw: bool


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    caller = port.caller(request, fields.text("model"))
    call = await _read(fields, caller, port)
    port.note_unknown(fields)
    head = Head(caller.model.id, new_id("cmpl-"))
    if call.stream:
        return await open_stream(port.admit(_frames(port, call, head)), openai_error_frames, port.settings)
    with port.admitted():
        replies = await until_client_leaves(request, _collect(port.engine, call))
    choices = [
        _choice(index, call.echoes[index] + reply.content, _finish(reply.finished), reply.logprobs, 0)
        for index, reply in enumerate(replies)
    ]
    total = _total([reply.finished for reply in replies], call)
    usage = usage_json(total.usage, call.requests[0].prediction is not None)
    return JSONResponse(head.completion(choices, usage=usage, **figures(total)))


async def _read(fields: Fields, caller: Caller, port: Port) -> CompletionCall:
    common = await read_common(fields, caller, Choice())
    n = fields.integer("n", 1, port.settings.max_choices) or 1
    options, extra = fields.object("stream_options"), fields.object("localspec")
    requests, echoes, echo = [], [], fields.flag("echo")
    if echo and common.logprobs is not None:
        # Those of the prompt are not computed; an answer without them would pass for one with them.
        raise bad("echo goes without logprobs here: a prompt has no log-probabilities.", "echo", "unsupported")
    prompts = _prompts(fields, caller)
    for prompt in prompts:
        request = await _with_prompt(common, prompt, fields, caller)
        shown = request.prompt
        if echo and shown is None:
            shown = await caller.engine.detokenize(request.prompt_token_ids)
        for index in range(n):
            requests.append(numbered(request, index))
            echoes.append(shown or "" if echo else "")
    return CompletionCall(
        requests=tuple(requests),
        n_prompts=len(prompts),
        echoes=tuple(echoes),
        stream=fields.flag("stream"),
        include_usage=options.flag("include_usage") if options else False,
        shows_spans=extra.flag("spans") if extra else False,
        is_raw=extra.flag("raw") if extra else False,
    )


def _prompts(fields: Fields, caller: Caller) -> list[str | tuple[int, ...]]:
    """A text, token ids, or a list of either."""
    value = fields.value("prompt")
    if isinstance(value, str):
        return [value]
    items = fields.items("prompt", sys.maxsize)
    if not items:
        raise bad("prompt is missing; give a text or token ids.", "prompt")
    if _is_token_id(items[0]):
        return [read_token_ids(items, caller, "prompt")]
    if len(items) > MAX_PROMPTS:
        raise bad(f"prompt may hold at most {MAX_PROMPTS} prompts, not {len(items)}.", "prompt")
    prompts: list[str | tuple[int, ...]] = []
    for item in items:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item:
            prompts.append(read_token_ids(item, caller, "prompt"))
        else:
            raise bad("prompt must be a text, a list of texts, token ids or a list of them.", "prompt")
    return prompts


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def _with_prompt(
    common: GenerateRequest, prompt: str | tuple[int, ...], fields: Fields, caller: Caller
) -> GenerateRequest:
    suffix = fields.text("suffix")
    if isinstance(prompt, str):
        if suffix:
            prompt = await infill_prompt(caller, prompt, suffix)
        return dataclasses.replace(common, prompt=prompt)
    if suffix:
        raise bad("suffix needs a prompt that is text.", "suffix")
    return dataclasses.replace(common, prompt_token_ids=prompt)


async def _collect(engine: Engine, call: CompletionCall) -> list[Reply]:
    return [await collect(engine, request, splits=False) for request in call.requests]


async def _frames(port: Port, call: CompletionCall, head: Head) -> AsyncGenerator[bytes, None]:
    ends: list[Finished] = []
    for index in range(len(call.requests)):
        source = (_raw_frames if call.is_raw else _choice_frames)(port, call, head, index, ends)
        async with closing(source) as frames:
            async for body in frames:
                yield body
    if call.include_usage:
        total = _total(ends, call)
        usage = usage_json(total.usage, call.requests[0].prediction is not None)
        yield frame(head.completion([], usage=usage))
    yield DONE


async def _choice_frames(
    port: Port, call: CompletionCall, head: Head, index: int, ends: list[Finished]
) -> AsyncGenerator[bytes, None]:
    n_chars, view = 0, DraftView()
    if call.echoes[index]:
        n_chars = len(call.echoes[index])
        yield frame(head.completion([_choice(index, call.echoes[index])]))
    async with closing(run(port.engine, call.requests[index], splits=False)) as steps:
        async for step in steps:
            if isinstance(step, Finished):
                ends.append(step)
                yield frame(head.completion([_choice(index, "", _finish(step))], **figures(step)))
            elif isinstance(step, Step):
                text = "".join(getattr(piece, "text", "") for piece in step.pieces)
                logprobs = step.delta.logprobs if step.delta else ()
                extra = {"localspec": view.fields(step)} if call.shows_spans else {}
                if text or logprobs or extra:
                    yield frame(head.completion([_choice(index, text, None, logprobs, n_chars)], **extra))
                n_chars += len(text)


async def _raw_frames(
    port: Port, call: CompletionCall, head: Head, index: int, ends: list[Finished]
) -> AsyncGenerator[bytes, None]:
    async with closing(port.engine.generate(call.requests[index])) as events:
        async for event in events:
            if isinstance(event, Done):
                ends.append(Finished(event.finish_reason, event.usage, event.timings, event.stop_text))
            finish = event.finish_reason if isinstance(event, Done) else None
            yield frame(head.completion([_choice(index, "", finish)], localspec=raw_event(event)))


def _choice(index: int, text: str, finish: str | None = None, logprobs: Any = (), offset: int = 0) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": completion_logprobs(logprobs, offset),
        "finish_reason": finish,
    }


def _finish(finished: Finished) -> str:
    return "length" if finished.finish_reason == "length" else "stop"


def _total(ends: list[Finished], call: CompletionCall) -> Finished:
    """Usage of all prompts and choices; each prompt counts once."""
    total = add_usage(ends)
    n_choices = len(call.requests) // call.n_prompts
    prompt_tokens = sum(end.usage.prompt_tokens for end in ends[::n_choices])
    return dataclasses.replace(total, usage=dataclasses.replace(total.usage, prompt_tokens=prompt_tokens))
