"""Fields that several protocols share: sampling, stops, tools, thinking, grammars, limits, drafting.

Knows every name that clients use for them and maps it to a GenerateRequest; knows nothing of replies.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localspec.api.codec import from_json
from localspec.api.engine import Engine
from localspec.api.types import EngineError, GenerateRequest, Grammar, ModelInfo, Sampling
from localspec.server.errors import bad
from localspec.server.fields import Fields
from localspec.server.normalise import text_of

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
LEAST_TOP_P = 1e-6
_SEED_RANGE = 1 << 63
_GIVEN_TO_TEMPLATES = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True)
class Caller:
    """Who asks: the model that answers, and the name that its counters go under."""

    engine: Engine
    model: ModelInfo
    client: str


@dataclass(frozen=True)
class Choice:
    """Tools that the model may call, how many times, and what the template is told about it."""

    tools: tuple[Mapping[str, Any], ...] = ()
    max_calls: int | None = None
    is_named: bool = False
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


async def read_common(fields: Fields, caller: Caller, choice: Choice) -> GenerateRequest:
    """Everything but the prompt itself. Raises ApiError 400."""
    extra = fields.object("localspec") or Fields({}, "localspec")
    logprobs = read_logprobs(fields)
    return GenerateRequest(
        sampling=await read_sampling(fields, caller),
        max_tokens=read_max_tokens(fields),
        stop=read_stops(fields),
        ignore_eos=fields.flag("ignore_eos"),
        drafter=extra.text("drafter"),
        depth=extra.integer("depth", 0, 64),
        tools=choice.tools,
        template_options={**read_template_options(fields), **choice.template_options},
        thinking_budget_tokens=_thinking_budget(fields),
        prediction=read_prediction(fields),
        logprobs=logprobs,
        grammar=read_grammar(fields),
        client=caller.client,
        chat_id=extra.text("chat_id"),
        private=extra.flag("private"),
    )


async def read_sampling(fields: Fields, caller: Caller) -> Sampling:
    """The model's own law with what the request sets."""
    found = {
        "temperature": fields.number("temperature", 0, 100),
        "top_p": _top_p(fields),
        "min_p": fields.number("min_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number(fields.first("repetition_penalty", "repeat_penalty"), 0.01, 100),
        "top_k": fields.integer("top_k", -1, 1 << 31),
        "seed": fields.integer("seed", -_SEED_RANGE, 2 * _SEED_RANGE),
    }
    given: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    given["top_k"] = max(0, given.get("top_k", caller.model.sampling.top_k))
    if given.get("seed", 0) == -1:  # a habit of llama.cpp's clients for "any"
        del given["seed"]
    if fields.has("logit_bias"):
        given["logit_bias"] = await _read_logit_bias(fields, caller)
    return dataclasses.replace(caller.model.sampling, **given)


def _top_p(fields: Fields) -> float | None:
    """Clients send 0 for the likeliest token alone; the engine draws from shares above 0."""
    share = fields.number("top_p", 0, 1)
    return None if share is None else max(share, LEAST_TOP_P)


async def _read_logit_bias(fields: Fields, caller: Caller) -> tuple[tuple[int, float], ...]:
    raw = fields.value("logit_bias")
    if isinstance(raw, dict) and not all(key.isascii() and key.isdigit() for key in raw):
        # In an object keys are token ids (OpenAI); a text would be guesswork. Pairs may hold texts (llama.cpp).
        key = next(key for key in raw if not (key.isascii() and key.isdigit()))
        raise bad(f'logit_bias: {key[:40]!r} is no token id; keys are ids such as "65".', "logit_bias")
    pairs = list(raw.items()) if isinstance(raw, dict) else raw
    if not isinstance(pairs, list) or len(pairs) > MAX_LOGIT_BIAS:
        raise bad(f"logit_bias must be an object with at most {MAX_LOGIT_BIAS} entries.", "logit_bias")
    out = []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise bad("logit_bias must hold pairs of a token and a number.", "logit_bias")
        key, bias = pair
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or abs(bias) > 1e4:
            raise bad(f"logit_bias of {str(key)[:40]!r} must be a number.", "logit_bias")
        out.append((await _token_id(key, caller), float(bias)))
    return tuple(out)


async def _token_id(key: Any, caller: Caller) -> int:
    if isinstance(key, str) and not (key.isascii() and key.isdigit()):
        token_ids = await caller.engine.tokenize(key)
        if len(token_ids) != 1:
            raise bad(f"logit_bias: {key[:40]!r} is {len(token_ids)} tokens, not one; use ids.", "logit_bias")
        return token_ids[0]
    token_id = int(key) if isinstance(key, (str, int)) and len(str(key)) < 12 else -1
    if not 0 <= token_id < caller.model.vocab_size:
        raise bad(f"logit_bias: no token {str(key)[:40]!r}; ids end at {caller.model.vocab_size - 1}.", "logit_bias")
    return token_id


def read_token_ids(items: list[Any], caller: Caller, path: str) -> tuple[int, ...]:
    """Token ids of a prompt. Raises ApiError 400, EngineError (`context_length_exceeded`) before it reads too many."""
    limit = caller.model.context_limit_tokens
    if len(items) >= limit:
        raise EngineError(
            "context_length_exceeded",
            f"The prompt is too long: it has {len(items)} tokens, and this model's maximum context length is {limit} "
            "tokens; shorten it.",
        )
    for item in items:
        if type(item) is not int:
            raise bad(f"{path} must be a text or a list of token ids.", path)
        if not 0 <= item < caller.model.vocab_size:
            raise bad(f"{path}: no token {str(item)[:20]}; ids end at {caller.model.vocab_size - 1}.", path)
    return tuple(items)


def read_max_tokens(fields: Fields) -> int | None:
    """The newest name wins; 0, -1 and absence mean the room that is left."""
    key = fields.first("max_output_tokens", "max_completion_tokens", "max_tokens", "n_predict", "num_predict")
    value = fields.integer(key, -2, 1 << 40)
    return value if value is not None and value > 0 else None


def read_stops(fields: Fields, key: str = "stop") -> tuple[str, ...]:
    """A string or up to 16 of them; empty ones mean nothing."""
    value = fields.value(key)
    stops = [value] if isinstance(value, str) else fields.items(key)
    if len(stops) > MAX_STOPS:
        raise bad(f"{key} may hold at most {MAX_STOPS} strings, not {len(stops)}.", key)
    if not all(isinstance(stop, str) for stop in stops):
        raise fields.wrong(key, "a string or a list of strings")
    return tuple(stop for stop in stops if stop)


def read_logprobs(fields: Fields) -> int | None:
    """Number of alternatives, None for no log-probabilities; chat's and completion's form."""
    value = fields.value("logprobs")
    if isinstance(value, bool) or value is None:
        top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
        if value:
            return top or 0
        if top:
            raise bad("top_logprobs needs logprobs: true beside it.", "top_logprobs")
        return None
    return fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)


def read_prediction(fields: Fields) -> str | None:
    """Text that the client expects; a form that we do not know is ignored, never refused."""
    value = fields.value("prediction")
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, (str, list)):
        return None
    return text_of(content, "prediction.content") or None


def read_template_options(fields: Fields) -> dict[str, Any]:
    """chat_template_kwargs and every other name for switching thoughts on and off. Raises ApiError 400."""
    options = dict(fields.mapping("chat_template_kwargs"))
    for name in _GIVEN_TO_TEMPLATES:
        if name in options:
            raise bad(f"chat_template_kwargs may not set {name}; the server does.", f"chat_template_kwargs.{name}")
    enabled = fields.value("enable_thinking")
    if isinstance(enabled, bool):
        options["enable_thinking"] = enabled
    effort = fields.value("reasoning_effort") or fields.mapping("reasoning").get("effort")
    if isinstance(effort, str):
        options["reasoning_effort"] = effort
        options.setdefault("enable_thinking", effort not in ("none", "minimal"))
    return options


def _thinking_budget(fields: Fields) -> int | None:
    key = fields.first("thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget")
    if fields.has(key):
        budget = fields.integer(key, -1, 1 << 40)
    else:
        budget = (fields.object("reasoning") or Fields({})).integer("max_tokens", -1, 1 << 40)
    return None if budget is None or budget < 0 else budget


def read_grammar(fields: Fields) -> Grammar | None:
    """response_format in OpenAI's and llama.cpp's form, the names of other servers, and our own record."""
    own = (fields.object("localspec") or Fields({})).object("grammar")
    if own is not None:
        try:
            return from_json(Grammar, own.data)
        except ValueError as reason:
            raise bad(f"{own.path}: {reason}.", own.path) from None
    if fields.has("response_format"):
        return grammar_of_format(fields.object("response_format") or Fields({}))
    outputs = fields.object("structured_outputs") or Fields({})
    found = _guided(outputs, "") or _guided(fields, "guided_")
    if found is not None:
        return found
    if fields.has("json_schema"):
        return _schema_grammar(fields.data["json_schema"], "json_schema")
    source = fields.text("grammar")
    return Grammar("lark", source) if source else None


def _guided(fields: Fields, prefix: str) -> Grammar | None:
    """What vLLM's clients ask for: a schema, an expression, one of several texts, or a grammar."""
    schema, choices = fields.value(prefix + "json"), fields.items(prefix + "choice")
    if schema is not None:
        return _schema_grammar(schema, fields.name(prefix + "json"))
    expression = fields.text(prefix + "regex")
    if expression is not None:
        return Grammar("regex", expression)
    if choices:
        if not all(isinstance(choice, str) for choice in choices):
            raise fields.wrong(prefix + "choice", "a list of strings")
        return Grammar("lark", "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))
    source = fields.text(prefix + "grammar")
    return Grammar("lark", source) if source else None


def grammar_of_format(form: Fields) -> Grammar | None:
    """Grammar of `{type: text | json_object | json_schema, ...}`."""
    kind = form.text("type", "text")
    nested = form.object("json_schema")
    schema = nested.data.get("schema") if nested else form.value("schema")
    if kind == "text":
        return None
    if kind == "json_schema" or (kind == "json_object" and schema is not None):
        if schema is None:
            raise bad(f"{form.path} lacks a schema.", form.path)
        return _schema_grammar(schema, form.path)
    if kind == "json_object":
        return Grammar("json_object")
    raise bad(f"{form.name('type')} must be text, json_object or json_schema, not {kind!r}.", form.name("type"))


def _schema_grammar(schema: Any, path: str) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise bad(f"{path} is not a JSON schema.", path) from None
    if not isinstance(schema, (dict, bool)):
        raise bad(f"{path} is not a JSON schema.", path)
    return Grammar("json_schema", json.dumps(schema))


def read_tools(fields: Fields) -> Choice:
    """Function tools and how they may be called; tools of other types are not for us and skipped."""
    tools = tuple(tool for tool in map(_function_tool, fields.items("tools")) if tool is not None)
    max_calls = None if fields.flag("parallel_tool_calls", True) else 1
    how = fields.value("tool_choice")
    if isinstance(how, dict) and how.get("type") == "allowed_tools":
        how, tools = _allowed(fields.object("tool_choice") or Fields({}), tools)
    if how in (None, "auto"):
        return _choice(tools, max_calls)
    if how == "none":
        return Choice()
    if how in ("required", "any"):
        return _choice(_need(tools), max_calls, is_demanded=True)
    if not isinstance(how, dict):
        raise bad("tool_choice must be auto, none, required or the name of a function.", "tool_choice")
    inner = how.get("function", how)
    name = inner.get("name") if isinstance(inner, dict) else None
    return _choice(_named(tools, {name}), 1, is_demanded=True, is_named=True)


def _choice(
    tools: tuple[Mapping[str, Any], ...], max_calls: int | None, is_demanded: bool = False, is_named: bool = False
) -> Choice:
    """With what the engine makes a grammar of; the names are those that OpenAI has for them."""
    options: dict[str, Any] = {"tool_choice": "required"} if is_demanded else {}
    if tools and max_calls == 1:
        options["parallel_tool_calls"] = False
    return Choice(tools, max_calls, is_named, options)


def _allowed(choice: Fields, tools: tuple[Mapping[str, Any], ...]) -> tuple[Any, tuple[Mapping[str, Any], ...]]:
    """Mode and tools of `allowed_tools`, nested (chat) or flat (responses)."""
    inner = choice.object("allowed_tools") or choice
    listed = [Fields(item, inner.name("tools[]")) for item in inner.items("tools")]
    names = {(item.object("function") or item).text("name") for item in listed}
    return inner.text("mode", "auto"), _named(tools, names) if names else tools


def _named(tools: tuple[Mapping[str, Any], ...], names: set[str | None]) -> tuple[Mapping[str, Any], ...]:
    named = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if not named:
        words = ", ".join(repr(name)[:60] for name in names)
        raise bad(f"tool_choice names {words}, which is not among the tools.", "tool_choice")
    return named


def _need(tools: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
    if not tools:
        raise bad("tool_choice asks for a call, but there are no function tools.", "tool_choice")
    return tools


def _function_tool(item: Any) -> Mapping[str, Any] | None:
    """The nested OpenAI form of a function tool, also from the flat one of /v1/responses; None for other types."""
    tool = Fields(item, "tools[]")
    if tool.text("type", "function") != "function":
        return None
    function = tool.object("function") or tool
    name = function.need_text("name")
    description = function.text("description") or ""
    parameters = function.mapping("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
