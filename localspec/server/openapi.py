"""/openapi.json: what the public routes take and give, for tools that read such files.

A description, not a validator: fields that are not named here are ignored by the routes, and the tests hold the
routes to it.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TOKENS: Schema = {"type": "array", "items": COUNT, "maxItems": 4096}
OBJECT: Schema = {"type": "object"}
EMBEDDINGS = ("/v1/embeddings", "/embedding", "/api/embed", "/api/embeddings", "/api/v0/embeddings")
ROOM: Schema = {
    "type": "integer",
    "minimum": -1,
    "description": "Most tokens of the answer; 0 and -1 mean as many as the context has room for, like absence.",
}


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return JSONResponse(description())


def description() -> dict[str, Any]:
    """The document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "localspec",
            "version": "1",
            "description": "A local engine under the APIs of OpenAI, Anthropic, Ollama and llama.cpp. Paths of /v1 "
            "work without that prefix too. Fields that are not listed are ignored.",
        },
        "paths": {**_openai_paths(), **_other_paths(), **_plain_paths(), **_control_paths()},
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _openai_paths() -> dict[str, Any]:
    return {
        "/v1/models": _get("Models", _list_of(ref("Model"))),
        "/v1/models/{model}": _by_name("model", _get("The loaded model", ref("Model"))),
        "/v1/chat/completions": _post("A chat reply", ref("ChatRequest"), ref("Chat"), "text/event-stream"),
        "/v1/completions": _post(
            "Text that follows a prompt", _completion_request(), ref("Completion"), "text/event-stream"
        ),
        "/v1/responses": _post("A response", _responses_request(), ref("Response"), "text/event-stream"),
        **{path: _post("Refused: there is no embedding model", OBJECT, OBJECT) for path in EMBEDDINGS},
    }


def _other_paths() -> dict[str, Any]:
    return {
        "/v1/messages": _post("A message", _messages_request(), ref("Message"), "text/event-stream"),
        "/v1/messages/count_tokens": _post(
            "Tokens of a prompt", _messages_request(), _object(input_tokens=COUNT, need=["input_tokens"])
        ),
        "/api/chat": _post("A chat reply", _ollama_chat_request(), ref("OllamaReply"), "application/x-ndjson"),
        "/api/generate": _post("A reply", _ollama_generate_request(), ref("OllamaReply"), "application/x-ndjson"),
        "/api/tags": _get("Models", _object(models={"type": "array", "items": OBJECT}, need=["models"])),
        "/api/ps": _get("The loaded model", _object(models={"type": "array", "items": OBJECT}, need=["models"])),
        "/api/show": _post("About a model", _object(model=TEXT), _object(model_info=OBJECT, need=["model_info"])),
        "/api/version": _get("Version of the API", _object(version=TEXT, need=["version"])),
        "/api/v0/models": _get("Models", _list_of(OBJECT)),
        "/api/v0/models/{model}": _by_name("model", _get("The loaded model", OBJECT)),
        "/api/v0/chat/completions": _post("A chat reply", ref("ChatRequest"), ref("Chat"), "text/event-stream"),
        "/api/v0/completions": _post(
            "Text that follows a prompt", _completion_request(), ref("Completion"), "text/event-stream"
        ),
        "/completion": _post(
            "Text that follows", _llama_request(prompt=TEXT, need=["prompt"]), ref("Text"), "text/event-stream"
        ),
        "/infill": _post(
            "Text between two", _llama_request(input_prefix=TEXT, input_suffix=TEXT), ref("Text"), "text/event-stream"
        ),
        "/tokenize": _post("Token ids", _object(content=TEXT, with_pieces=FLAG, need=["content"]), OBJECT),
        "/detokenize": _post("Text of token ids", _object(tokens=TOKENS), _object(content=TEXT, need=["content"])),
    }


def _plain_paths() -> dict[str, Any]:
    slots: Schema = {"type": "array", "items": OBJECT}
    return {
        "/": _get("A word for probes", TEXT, "text/plain"),
        "/openapi.json": _get("This document", OBJECT),
        "/health": _get("Whether requests are served", _object(status=TEXT, need=["status"])),
        "/v1/health": _get("Whether requests are served", _object(status=TEXT, need=["status"])),
        "/metrics": _get("Counters", TEXT, "text/plain"),
        "/props": _get("The loaded model", _object(default_generation_settings=OBJECT, total_slots=COUNT)),
        "/slots": _get("Running requests", slots),
    }


def _control_paths() -> dict[str, Any]:
    """Calls of `localspec` itself: from this machine, with the key of the data directory."""
    calls = {
        "load": _object(model=TEXT, need=["model"]),
        "warm": ref("ChatRequest"),
        "forget": _object(chat_id=TEXT, need=["chat_id"]),
        "drafter": _object(drafter=TEXT, depth=COUNT),
        "count_tokens": ref("ChatRequest"),
        "tokenize": _object(text=TEXT, need=["text"]),
        "detokenize": _object(tokens=TOKENS, need=["tokens"]),
        "shutdown": OBJECT,
        "tuner": OBJECT,
        "explain": OBJECT,
    }
    posts = {f"/localspec/v1/{name}": _post(f"Control: {name}", body, OBJECT) for name, body in calls.items()}
    pull = _post("Control: fetch a model", _object(model=TEXT, need=["model"]), OBJECT, "text/event-stream")
    return {
        "/localspec/v1/state": _get("Control: model, figures, process", OBJECT),
        "/localspec/v1/metrics": _get("Control: figures as events", TEXT, "text/event-stream"),
        "/localspec/v1/pull": pull,
        **posts,
    }


def ref(name: str) -> Schema:
    """A reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(need: list[str] | None = None, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": need} if need else {})}


def _list_of(item: Schema) -> Schema:
    return _object(object=TEXT, data={"type": "array", "items": item}, need=["data"])


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _get(summary: str, schema: Schema, media_type: str = "application/json") -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _answers({media_type: {"schema": schema}})}}


def _by_name(name: str, operations: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": TEXT}], **operations}


def _post(summary: str, body: Schema, reply: Schema, stream: str | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": reply}}
    if stream:
        is_events = stream == "text/event-stream"
        content[stream] = {"schema": _object(event=TEXT, data=TEXT, need=["data"]) if is_events else TEXT}
    operation = {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _answers(content),
    }
    return {"post": operation}


def _answers(content: dict[str, Any]) -> dict[str, Any]:
    error = {"description": "Refused", "content": {"application/json": {"schema": ref("Error")}}}
    statuses = ("400", "401", "403", "404", "405", "413", "429", "500", "503")
    return {"200": {"description": "Done", "content": content}, **dict.fromkeys(statuses, error)}


def _sampling() -> dict[str, Schema]:
    return {
        "temperature": _number(0, 100),
        "top_p": _number(0, 1),
        "top_k": {"type": "integer", "minimum": -1},
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0.01, 100),
        "seed": {"type": "integer", "minimum": -(1 << 63), "maximum": 1 << 63},
        "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 16}]},
        "stream": FLAG,
    }


def _shared() -> dict[str, Schema]:
    """Fields of OpenAI's chat and completions."""
    own = _object(
        spans=FLAG,
        raw=FLAG,
        group_ms={"type": "integer", "minimum": 0, "maximum": 1000},
        drafter=TEXT,
        chat_id=TEXT,
        private=FLAG,
        depth={"type": "integer", "minimum": 0, "maximum": 64},
    )
    return {
        **_sampling(),
        "model": TEXT,
        "max_tokens": ROOM,
        "n": {"type": "integer", "minimum": 1, "maximum": 8},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": _number(-100, 100),
            "description": "Token ids and what is added to their logits.",
        },
        "stream_options": _object(include_usage=FLAG),
        "localspec": own,
    }


def _chat_request() -> Schema:
    return _object(
        need=["messages"],
        messages={"type": "array", "items": ref("ChatMessage"), "minItems": 1},
        **_shared(),
        max_completion_tokens=ROOM,
        tools={"type": "array", "items": ref("Tool")},
        tool_choice={"anyOf": [{"enum": ["auto", "none", "required"]}, OBJECT]},
        parallel_tool_calls=FLAG,
        response_format=OBJECT,
        grammar={**TEXT, "description": "In Lark's notation or in GBNF; for a schema see response_format."},
        logprobs=FLAG,
        top_logprobs={
            "type": "integer",
            "minimum": 0,
            "maximum": 20,
            "description": "Goes with logprobs: true only.",
        },
        prediction=_object(type=TEXT, content=TEXT),
        chat_template_kwargs=OBJECT,
        reasoning_effort=TEXT,
        enable_thinking=FLAG,
        thinking_budget={"type": "integer", "minimum": -1},
        continue_final_message={
            **FLAG,
            "description": "Go on with the assistant's message that is last, which is done without this field too.",
        },
    )


def _completion_request() -> Schema:
    prompt = {"anyOf": [TEXT, {**TOKENS, "minItems": 1}, {"type": "array", "items": TEXT, "minItems": 1}]}
    return _object(
        need=["prompt"],
        prompt=prompt,
        suffix=TEXT,
        echo={**FLAG, "description": "Begin the text with the prompt. Refused beside logprobs."},
        logprobs={"type": "integer", "minimum": 0, "maximum": 20},
        **_shared(),
    )


def _responses_request() -> Schema:
    return _object(
        need=["input"],
        input={"anyOf": [TEXT, {"type": "array", "items": OBJECT}]},
        instructions=TEXT,
        model=TEXT,
        max_output_tokens=ROOM,
        tools={"type": "array", "items": OBJECT},
        tool_choice={"anyOf": [TEXT, OBJECT]},
        text=_object(format=OBJECT),
        reasoning=_object(effort=TEXT),
        **_sampling(),
    )


def _messages_request() -> Schema:
    return _object(
        need=["messages"],
        messages={"type": "array", "items": _object(role=TEXT, content=ref("Content"), need=["role"]), "minItems": 1},
        system=ref("Content"),
        model=TEXT,
        max_tokens={"type": "integer", "minimum": 1},
        stop_sequences={"type": "array", "items": TEXT, "maxItems": 16},
        tools={"type": "array", "items": OBJECT},
        tool_choice=OBJECT,
        thinking=OBJECT,
        output_config=_object(format=OBJECT),
        stream=FLAG,
        temperature=_number(0, 1),
        top_p=_number(0, 1),
        top_k=COUNT,
    )


def _ollama_chat_request() -> Schema:
    return _object(
        need=["model", "messages"],
        model=TEXT,
        messages={"type": "array", "items": _object(role=TEXT, content=TEXT, need=["role", "content"])},
        tools={"type": "array", "items": ref("Tool")},
        **_ollama_shared(),
    )


def _ollama_generate_request() -> Schema:
    fields = {"model": TEXT, "prompt": TEXT, "suffix": TEXT, "system": TEXT, "raw": FLAG, **_ollama_shared()}
    return _object(need=["model"], **fields)


def _ollama_shared() -> dict[str, Schema]:
    return {
        "stream": FLAG,
        "think": {"anyOf": [FLAG, TEXT]},
        "format": {"anyOf": [{"const": "json"}, OBJECT]},
        "options": OBJECT,
    }


def _llama_request(need: list[str] | None = None, **properties: Schema) -> Schema:
    count = {"type": "integer", "minimum": -1}
    fields = {**properties, **_sampling(), "n_predict": count, "t_max_predict_ms": count}
    return _object(need=need, **fields, response_fields={"type": "array", "items": TEXT})


def _schemas() -> dict[str, Schema]:
    choices: Schema = {"type": "array", "items": OBJECT}
    reply = {"id": TEXT, "object": TEXT, "created": COUNT, "model": TEXT, "choices": choices, "usage": ref("Usage")}
    parts: Schema = {"type": "array", "items": _object(type=TEXT, text=TEXT)}
    return {
        "Model": _object(id=TEXT, object=TEXT, created=COUNT, owned_by=TEXT, meta=OBJECT, need=["id"]),
        "ChatRequest": _chat_request(),
        "Content": {"anyOf": [TEXT, parts]},
        "ChatMessage": _object(
            need=["role"],
            role={"enum": ["system", "developer", "user", "assistant", "tool"]},
            content={"anyOf": [TEXT, parts, {"type": "null"}]},
            reasoning_content=TEXT,
            tool_calls={"type": "array", "items": OBJECT},
            tool_call_id=TEXT,
            name=TEXT,
        ),
        "Tool": _object(
            need=["type", "function"],
            type={"const": "function"},
            function=_object(need=["name"], name=TEXT, description=TEXT, parameters=OBJECT),
        ),
        "Usage": _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT),
        "Chat": _object(
            **reply, timings=OBJECT, metrics=OBJECT, need=["id", "object", "created", "model", "choices", "usage"]
        ),
        "Completion": _object(**reply, timings=OBJECT, need=["id", "object", "created", "model", "choices", "usage"]),
        "Response": _object(
            id=TEXT,
            object=TEXT,
            status=TEXT,
            output=choices,
            usage={"anyOf": [OBJECT, {"type": "null"}]},
            need=["output"],
        ),
        "Message": _object(
            id=TEXT, type=TEXT, role=TEXT, content=choices, usage=OBJECT, need=["id", "content", "usage"]
        ),
        "OllamaReply": _object(
            model=TEXT, created_at=TEXT, done=FLAG, message=OBJECT, response=TEXT, need=["model", "done"]
        ),
        "Text": _object(content=TEXT, stop=FLAG, timings=OBJECT),
        "Error": _object(
            need=["error"],
            type=TEXT,
            error={"anyOf": [TEXT, _object(message=TEXT, type=TEXT, need=["message", "type"])]},
        ),
    }
