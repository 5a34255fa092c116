"""/infill, /completion, /tokenize, /detokenize, /props, /slots as llama.cpp has them, and LM Studio's /api/v0/models.

What completion plugins use. Knows those shapes; knows nothing of generation.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localspec.api.closing import closing
from localspec.api.types import GenerateRequest, ModelInfo
from localspec.server.body import read_fields
from localspec.server.context import Port, port_of
from localspec.server.errors import ApiError, bad
from localspec.server.fields import MAX_TOKEN_IDS, Fields
from localspec.server.generation import Finished, Reply, Step, run
from localspec.server.infill import find_markers
from localspec.server.normalise import read_messages
from localspec.server.openai import openai_error_frames
from localspec.server.openai_reply import figures
from localspec.server.request import Caller, Choice, read_common, read_token_ids, read_tools
from localspec.server.sse import frame, open_stream, until_client_leaves

MAX_EXTRA_FILES = 256


@dataclass(frozen=True)
class _Job:
    """One completion; `deadline_s` is how long tokens may come, `fields` filters the answer."""

    request: GenerateRequest
    model: str
    deadline_s: float | None
    fields: tuple[str, ...]
    shows_text: bool = True


async def completion(request: Request) -> Response:
    """POST /completion: text or token ids in, text out."""
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    caller = port.caller(request, fields.text("model"))
    common = await read_common(fields, caller, Choice())
    prompt = fields.value("prompt")
    if isinstance(prompt, str):
        made = dataclasses.replace(common, prompt=prompt)
    elif isinstance(prompt, list) and prompt:
        made = dataclasses.replace(common, prompt_token_ids=read_token_ids(prompt, caller, "prompt"))
    else:
        raise bad("prompt must be a text or a list of token ids.", "prompt")
    return await _answer(request, port, fields, made, caller)


async def infill(request: Request) -> Response:
    """POST /infill: what stands between input_prefix and input_suffix; input_extra are chunks of other files."""
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    caller = port.caller(request, fields.text("model"))
    common = await read_common(fields, caller, Choice())
    made = dataclasses.replace(common, prompt=await _infill_prompt(fields, caller))
    return await _answer(request, port, fields, made, caller)


async def tokenize(request: Request) -> Response:
    """POST /tokenize: llama.cpp's `content`, vLLM's `prompt` or `messages`."""
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    caller = port.caller(request, fields.text("model"))
    if fields.has("messages"):
        choice = read_tools(fields)
        asked = GenerateRequest(messages=read_messages(fields.items("messages")), tools=choice.tools)
        return JSONResponse({"count": await port.engine.count_tokens(asked)})
    token_ids = await port.engine.tokenize(fields.need_text(fields.first("content", "prompt")))
    body: dict[str, Any] = {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": caller.model.context_limit_tokens,
    }
    if fields.flag("with_pieces"):
        pieces = [await port.engine.detokenize((token_id,)) for token_id in token_ids]
        body["tokens"] = [{"id": token_id, "piece": text} for token_id, text in zip(token_ids, pieces, strict=True)]
    return JSONResponse(body)


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    tokens = fields.items("tokens", MAX_TOKEN_IDS)
    if not all(type(token) is int for token in tokens):
        raise fields.wrong("tokens", "a list of token ids")
    text = await port.engine.detokenize(tuple(tokens))
    return JSONResponse({"content": text, "prompt": text})


async def props(request: Request) -> Response:
    """GET /props."""
    port = port_of(request)
    model = port.loaded()
    sampling = model.sampling
    settings = {
        "n_ctx": model.context_limit_tokens,
        "params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        },
    }
    return JSONResponse(
        {
            "default_generation_settings": settings,
            "total_slots": max(1, port.engine.metrics().active_requests),
            "model_alias": model.id,
            "model_path": model.id,
            "chat_template": "",
            "modalities": {"vision": False, "audio": False},
            "build_info": "localspec",
        }
    )


async def slots(request: Request) -> Response:
    """GET /slots: one entry a running request, at least one."""
    port = port_of(request)
    model, n_active = port.loaded(), port.engine.metrics().active_requests
    entries = [
        {"id": index, "n_ctx": model.context_limit_tokens, "is_processing": index < n_active}
        for index in range(max(1, n_active))
    ]
    return JSONResponse(entries)


async def lmstudio_models(request: Request) -> Response:
    """GET /api/v0/models and /api/v0/models/{id}."""
    model = port_of(request).engine.model()
    wanted = request.path_params.get("model")
    if wanted is None:
        return JSONResponse({"object": "list", "data": [_lmstudio_model(model)] if model else []})
    if model is None or wanted != model.id:
        raise ApiError(404, f"No model {wanted[:100]!r} is loaded.", code="model_not_found", param="model")
    return JSONResponse(_lmstudio_model(model))


def _lmstudio_model(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        "type": "llm",
        "publisher": "localspec",
        "arch": "localspec",
        "compatibility_type": "safetensors",
        "quantization": "",
        "state": "loaded",
        "max_context_length": model.context_limit_tokens,
        "loaded_context_length": model.context_limit_tokens,
        "capabilities": ["tool_use"] if model.has_chat_template else [],
    }


async def _infill_prompt(fields: Fields, caller: Caller) -> str:
    markers = await find_markers(caller)
    extras = fields.items("input_extra")
    if len(extras) > MAX_EXTRA_FILES:
        raise bad(f"input_extra may hold at most {MAX_EXTRA_FILES} chunks, not {len(extras)}.", "input_extra")
    parts = []
    if markers.file and extras:
        parts.append(f"{markers.repository}project\n")
        for index, item in enumerate(extras):
            extra = Fields(item, f"input_extra[{index}]")
            parts.append(f"{markers.file}{extra.text('filename') or 'file'}\n{extra.text('text') or ''}\n")
        parts.append(f"{markers.file}{fields.text('filename') or 'current'}\n")
    before, after = fields.text("input_prefix") or "", fields.text("input_suffix") or ""
    parts.append(f"{markers.prefix}{before}{markers.suffix}{after}{markers.middle}{fields.text('prompt') or ''}")
    return "".join(parts)


async def _answer(request: Request, port: Port, fields: Fields, made: GenerateRequest, caller: Caller) -> Response:
    limit_ms = fields.integer("t_max_predict_ms", -1, 1 << 40)
    wanted = fields.items("response_fields")
    # Nothing to predict means: read the prompt, so that the next request finds it in the cache.
    warms = fields.value("n_predict") == 0
    job = _Job(
        request=dataclasses.replace(made, max_tokens=1) if warms else made,
        model=caller.model.id,
        deadline_s=limit_ms / 1e3 if limit_ms and limit_ms > 0 else None,
        fields=tuple(name for name in wanted if isinstance(name, str)),
        shows_text=not warms,
    )
    port.note_unknown(fields)
    if fields.flag("stream"):
        return await open_stream(port.admit(_frames(port, job)), openai_error_frames, port.settings)
    with port.admitted():
        return JSONResponse(await until_client_leaves(request, _whole(port, job)))


async def _steps(port: Port, job: _Job) -> AsyncGenerator[Step | Finished, None]:
    """Steps until the end or the deadline, which counts from the first text."""
    first_s: float | None = None
    n_tokens = 0
    async with closing(run(port.engine, job.request, splits=False)) as steps:
        async for step in steps:
            if not isinstance(step, (Step, Finished)):
                continue
            yield step
            if isinstance(step, Step) and job.deadline_s is not None:
                n_tokens += len(step.delta.token_ids) if step.delta else 0
                first_s = first_s or time.monotonic()
                if time.monotonic() - first_s > job.deadline_s:
                    reply = Reply()
                    yield dataclasses.replace(
                        reply.finished,
                        finish_reason="length",
                        usage=dataclasses.replace(reply.finished.usage, completion_tokens=n_tokens),
                    )
                    return


async def _whole(port: Port, job: _Job) -> dict[str, Any]:
    reply = Reply()
    async with closing(_steps(port, job)) as steps:
        async for step in steps:
            reply.add(step)
    return _final(job, reply.finished, reply.content if job.shows_text else "", reply.token_ids)


async def _frames(port: Port, job: _Job) -> AsyncGenerator[bytes, None]:
    async with closing(_steps(port, job)) as steps:
        async for step in steps:
            if isinstance(step, Finished):
                yield frame(_final(job, step, "", []))
            elif job.shows_text:
                text = "".join(getattr(piece, "text", "") for piece in step.pieces)
                yield frame(
                    {"index": 0, "content": text, "tokens": step.delta.token_ids if step.delta else (), "stop": False}
                )


def _final(job: _Job, finished: Finished, text: str, token_ids: list[int]) -> dict[str, Any]:
    usage = finished.usage
    stop_type = "limit" if finished.finish_reason == "length" else "word" if finished.stop_text else "eos"
    body = {
        "index": 0,
        "content": text,
        "tokens": token_ids,
        "stop": True,
        "stop_type": stop_type,
        "stopping_word": finished.stop_text or "",
        "model": job.model,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "tokens_cached": usage.cached_tokens,
        "truncated": False,
        "generation_settings": {"n_predict": job.request.max_tokens or -1},
        "timings": figures(finished)["timings"],
    }
    return _filtered(body, job.fields) if job.fields else body


def _filtered(body: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The wanted fields only; a path with slashes becomes one key of that name, missing ones are left out."""
    found: dict[str, Any] = {}
    for name in names:
        value: Any = body
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found
