"""From api requests to core requests: template, tokens, limits, stop ids. Runs outside the decode thread."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from localspec.api.types import EngineError, GenerateRequest, Grammar, Sampling
from localspec.core.records import Request, ThinkingRule
from localspec.engine.prompt_borders import SharedBeginnings
from localspec.engine.template import ChatTemplate
from localspec.engine.text_stream import PhaseTracker, TextStream
from localspec.engine.tokenizer import Tokenizer
from localspec.engine.tool_grammar import CallRule, argument_grammars, tool_call_grammar
from localspec.sampling.grammar import GrammarCompiler, GrammarRefused, RequestGrammar

THINK_START, THINK_END = "<think>", "</think>"
TOOL_START, TOOL_END = "<tool_call>", "</tool_call>"
_SEED_BITS = 62
MOST = 100.0
"""Of a temperature and of a repetition penalty."""
LEAST_SHARE = 1e-6
LEAST_TEMPERATURE = 1e-30
"""A logit divided by less may leave float32; far above it the best token is the only one left."""


@dataclass(frozen=True)
class Prepared:
    """A request in tokens, and the text that its ids spell (what the token memory is keyed by)."""

    request: Request
    prompt_text: str | None
    thinking_open: bool


class TextStage:
    """Tokenizer, template and generation defaults of one installed model."""

    def __init__(self, folder: Path, context_limit_tokens: int) -> None:
        self.tokenizer = Tokenizer(folder)
        self.context_limit_tokens = context_limit_tokens
        self.generation = _generation_config(folder)
        self.stop_ids = self._stop_ids()
        source = self.tokenizer.config.get("chat_template")
        special = self.tokenizer.special_tokens()
        self.template = ChatTemplate(source, special, datetime.now) if isinstance(source, str) else None
        self._template_source = source if isinstance(source, str) else ""
        self._shared = SharedBeginnings(self.template, self.tokenizer)
        self._grammars = GrammarCompiler(folder / "tokenizer.json", self.stop_ids)

    @property
    def thinks(self) -> bool:
        return self.tokenizer.token_id(THINK_END) is not None

    def default_sampling(self) -> Sampling:
        """Sampling that the model's authors recommend; greedy where they say nothing."""
        if not self.generation.get("do_sample", self.generation.get("temperature") is not None):
            return Sampling()
        return Sampling(
            temperature=self._recommended("temperature", 1.0, 0.0, MOST),
            top_p=self._recommended("top_p", 1.0, LEAST_SHARE, 1.0),
            top_k=int(self._recommended("top_k", 0, 0, self.tokenizer.vocab_size)),
            repetition_penalty=self._recommended("repetition_penalty", 1.0, LEAST_SHARE, MOST),
        )

    def _recommended(self, name: str, default: float, low: float, high: float) -> float:
        """What no request could ask for is as if the authors said nothing: null, -1 for off, a zero penalty."""
        value = self.generation.get(name)
        return float(value) if isinstance(value, int | float) and low <= value <= high else default

    def count_tokens(self, request: GenerateRequest) -> int:
        """Tokens of the prompt of a request, whether there is room for it or not. Raises EngineError."""
        return len(self._prompt(request, must_fit=False)[1])

    def prepare(self, request: GenerateRequest) -> Prepared:
        """Raises EngineError: `bad_request`, or `context_length_exceeded` with both numbers."""
        text, ids = self._prompt(request)
        if not ids:
            raise EngineError("bad_request", "the prompt is empty; send at least one token", "prompt")
        size = self.tokenizer.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            bad = next(i for i in ids if not 0 <= i < size)
            raise EngineError("bad_request", f"token id {bad} is outside the vocabulary of {size}", "prompt")
        room = self.context_limit_tokens - len(ids)
        if room < 1:
            raise EngineError(
                "context_length_exceeded",
                f"the prompt is too long: it has {len(ids)} tokens, and this model's maximum context length is "
                f"{self.context_limit_tokens} tokens; shorten it",
            )
        wanted = request.max_tokens if request.max_tokens is not None and request.max_tokens > 0 else room
        thinking_open = text is not None and text.rstrip().endswith(THINK_START)
        sampling = request.sampling
        grammar = self._tool_grammar(request) or request.grammar
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(_SEED_BITS)
        core = Request(
            request_id=request.request_id,
            prompt_ids=ids,
            sampling=self._checked(sampling),
            seed=seed % (1 << _SEED_BITS),
            max_tokens=min(wanted, room),
            stop_ids=self.stop_ids if grammar is not None or not request.ignore_eos else (),
            drafter=request.drafter or "auto",
            depth=request.depth,
            prediction_ids=self.tokenizer.encode(request.prediction) if request.prediction else (),
            thinking=self._thinking_rule(request, thinking_open),
            grammar=grammar,
            logprobs=request.logprobs,
            chat_id=request.chat_id,
            private=request.private,
            client=request.client,
            shared_tokens=self._shared.tokens(request, text, ids),
            call_ids=self._call_ids(),
        )
        return Prepared(core, text, thinking_open)

    def constrain(self, request: GenerateRequest, prepared: Prepared) -> RequestGrammar | None:
        """The compiled grammar of a request; may take a while. Raises EngineError (`bad_request`).

        A chat's answer may begin with a thought unless the prompt closed it, continues a message or asks for none.
        """
        grammar = prepared.request.grammar
        if grammar is None:
            return None
        closed = (prepared.prompt_text or "").rstrip().endswith(THINK_END) or request.continue_final_message
        may_think = (
            bool(request.messages) and not closed and request.template_options.get("enable_thinking") is not False
        )
        thinking = prepared.request.thinking
        try:
            return self._compiled(grammar, thinking, may_think)
        except EngineError as error:
            if grammar is request.grammar:
                raise
            if self._call_rule(request).is_demanded:
                self._refuse_arguments(request)
                raise EngineError(error.code, error.message, "tools") from error
        # Tools that may be called, not must: they work without a grammar, the port reads what the model writes.
        return self._compiled(request.grammar, thinking, may_think)

    def _refuse_arguments(self, request: GenerateRequest) -> None:
        """Raises EngineError for the first tool whose schema does not compile, in words about that tool."""
        for name, grammar in argument_grammars(request.tools):
            try:
                self._grammars.compile(grammar)
            except GrammarRefused as error:
                raise EngineError(
                    "bad_request", f"the parameters of the tool {name!r} cannot be demanded: {error}", "tools"
                ) from error

    def _compiled(
        self, grammar: Grammar | None, thinking: ThinkingRule | None, may_think: bool
    ) -> RequestGrammar | None:
        if grammar is None:
            return None
        try:
            return self._grammars.compile(grammar, thinking, may_think)
        except GrammarRefused as error:
            raise EngineError("bad_request", str(error), "response_format") from error

    def stream(self, prepared: Prepared, stops: tuple[str, ...]) -> tuple[TextStream, PhaseTracker]:
        """The text side of a running request."""
        token_id = self.tokenizer.token_id
        phases = PhaseTracker(
            prepared.thinking_open,
            (token_id(THINK_START), token_id(THINK_END)),
            (token_id(TOOL_START), token_id(TOOL_END)),
        )
        prompt_ids = prepared.request.prompt_ids
        return TextStream(self.tokenizer, stops, self.stop_ids, phases, prompt_ids), phases

    def remember(self, prepared: Prepared, emitted_ids: tuple[int, ...]) -> None:
        """Keep the ids of prompt and answer for the next turn. A stop id stays: templates write it again."""
        if prepared.prompt_text is None:
            return
        text = prepared.prompt_text + self.tokenizer.continuation(prepared.request.prompt_ids, emitted_ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.tokenizer.memory.remember(text, (*prepared.request.prompt_ids, *emitted_ids))

    def _prompt(self, request: GenerateRequest, must_fit: bool = True) -> tuple[str | None, tuple[int, ...]]:
        given = [bool(request.messages), request.prompt is not None, bool(request.prompt_token_ids)]
        if sum(given) != 1:
            raise EngineError("bad_request", "give exactly one of messages, prompt and prompt token ids")
        if request.prompt_token_ids:
            return None, request.prompt_token_ids
        text = request.prompt if request.prompt is not None else self._render(request)
        if must_fit:
            self._refuse_what_cannot_fit(text)
        return text, self.tokenizer.encode_keeping_history(text)

    def _refuse_what_cannot_fit(self, text: str) -> None:
        """Before the tokens are counted, which takes a second a megabyte."""
        least_tokens = self.tokenizer.bound.least_tokens(text)
        if least_tokens >= self.context_limit_tokens:
            raise EngineError(
                "context_length_exceeded",
                f"the prompt is too long: it has at least {least_tokens} tokens, and this model's maximum context "
                f"length is {self.context_limit_tokens} tokens; shorten it",
            )

    def _render(self, request: GenerateRequest) -> str:
        if self.template is None:
            what = "this model has no chat template; send a plain prompt instead of messages"
            raise EngineError("unsupported", what, "messages")
        last = request.messages[-1]
        if not (request.continue_final_message and last.role == "assistant"):
            return self.template.render(request.messages, request.tools, request.template_options)
        # The template closes every message, so the text to continue from is found by a marker behind the content.
        marker = f"\x00{secrets.token_hex(8)}\x00"
        marked = type(last)(role=last.role, content=last.content + marker, name=last.name)
        messages = (*request.messages[:-1], marked)
        text = self.template.render(messages, request.tools, request.template_options, add_generation_prompt=False)
        head, found, _ = text.partition(marker)
        if not found:
            raise EngineError(
                "bad_request", "this model's template cannot continue the last assistant message", "messages"
            )
        return head

    def _checked(self, sampling: Sampling) -> Sampling:
        if not 0.0 <= sampling.temperature <= MOST:
            raise EngineError("bad_request", "temperature must lie between 0 and 100", "temperature")
        if not 0.0 < sampling.top_p <= 1.0:
            raise EngineError("bad_request", "top_p must lie above 0 and at most 1", "top_p")
        if not 0.0 <= sampling.min_p <= 1.0:
            raise EngineError("bad_request", "min_p must lie between 0 and 1", "min_p")
        if sampling.top_k < 0:
            raise EngineError("bad_request", "top_k must not be negative", "top_k")
        if not sampling.repetition_penalty > 0.0:
            raise EngineError("bad_request", "repetition_penalty must be above 0", "repetition_penalty")
        size = self.tokenizer.vocab_size
        if any(not 0 <= token_id < size for token_id, _ in sampling.logit_bias):
            what = f"logit_bias names a token id outside the vocabulary of {size}"
            raise EngineError("bad_request", what, "logit_bias")
        return replace(sampling, temperature=0.0) if sampling.temperature < LEAST_TEMPERATURE else sampling

    def _thinking_rule(self, request: GenerateRequest, thinking_open: bool) -> ThinkingRule | None:
        start, end = self.tokenizer.token_id(THINK_START), self.tokenizer.token_id(THINK_END)
        if start is None or end is None:
            return None
        tool = self.tokenizer.token_id(TOOL_START)
        return ThinkingRule(
            request.thinking_budget_tokens, (start,), (end,), thinking_open, () if tool is None else (tool,)
        )

    def _call_ids(self) -> tuple[int, int] | None:
        start, end = self.tokenizer.token_id(TOOL_START), self.tokenizer.token_id(TOOL_END)
        return None if start is None or end is None else (start, end)

    def _tool_grammar(self, request: GenerateRequest) -> Grammar | None:
        """What tools ask of the answer, in the form in which this model's template writes calls."""
        marks = tuple(self.tokenizer.token_id(mark) for mark in (TOOL_START, TOOL_END))
        try:
            return tool_call_grammar(request.tools, self._template_source, marks, self._call_rule(request))
        except RecursionError:
            raise EngineError("bad_request", "the schema of a tool is nested too deeply", "tools") from None

    def _call_rule(self, request: GenerateRequest) -> CallRule:
        options = request.template_options
        return CallRule(
            is_demanded=options.get("tool_choice") == "required",
            several=options.get("parallel_tool_calls") is not False,
            answer=request.grammar,
        )

    def _stop_ids(self) -> tuple[int, ...]:
        value = self.generation.get("eos_token_id")
        ids = [value] if isinstance(value, int) else [i for i in value or () if isinstance(i, int)]
        eos = self.tokenizer.special_tokens().get("eos_token")
        named = self.tokenizer.token_id(eos) if eos else None
        if named is not None and named not in ids:
            ids.append(named)
        return tuple(ids)


def _generation_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); pull the model again") from error
    return value if isinstance(value, dict) else {}
