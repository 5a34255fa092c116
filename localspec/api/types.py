"""Records that cross the line between engine and interfaces: requests, events, timings, metrics.

All are frozen and hold plain Python values, so that they travel through queues, JSON and tests unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

TARGET_ORIGIN = "target"
"""Origin of a token that no drafter proposed. Every other origin is the name that a drafter declares."""

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


class Phase(StrEnum):
    """Kind of text that a token belongs to; acceptance is counted apart for each."""

    THINKING = "thinking"
    ANSWER = "answer"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True)
class Sampling:
    """The law that tokens are drawn from. Temperature 0 is greedy. `seed` None draws a fresh seed."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation, as the chat template sees it."""

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Grammar:
    """What the answer must match; `source` is a JSON schema, a Lark or GBNF grammar, a regular expression or empty."""

    kind: Literal["json_object", "json_schema", "lark", "regex"]
    source: str = ""


@dataclass(frozen=True)
class GenerateRequest:
    """One generation. Exactly one of `messages`, `prompt` and `prompt_token_ids` is given.

    `drafter` and `depth` None leave the choice to the engine; `drafter` names one drafter or a `+` chain.
    `chat_id` groups the requests of a conversation; `private` keeps everything of it off the disk.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    drafter: str | None = None
    depth: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget_tokens: int | None = None
    continue_final_message: bool = False
    prediction: str | None = None
    logprobs: int | None = None
    grammar: Grammar | None = None
    request_id: str = ""
    client: str = ""
    chat_id: str | None = None
    private: bool = False


@dataclass(frozen=True)
class Span:
    """A run of characters of a delta with one origin and phase. Spans of a delta cover its text in order."""

    n_chars: int
    origin: str
    phase: Phase


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target's processed law, with the best alternatives."""

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class Queued:
    """The request waits; `position` counts those before it."""

    position: int


@dataclass(frozen=True)
class Prefill:
    """Progress of reading the prompt. `cached_tokens` of it came from a cache; `miss_reason` says why not more."""

    done_tokens: int
    total_tokens: int
    cached_tokens: int = 0
    miss_reason: str = ""


@dataclass(frozen=True)
class Delta:
    """New text. `token_ids` are the tokens that completed it; `rejected` counts drafts that the step refused."""

    text: str
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    rejected: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Where the time of a request went and what drafting gained.

    `speedup_vs_plain` is emitted tokens per second over the rate of the same engine without drafts, measured on
    this machine; None until a plain step has been measured. `draft_steps` counts the steps in which something was
    drafted, `drafted_per_position` and `accepted_per_position` the drafts at offset 1, 2, ... of their window. `work`
    says the same by drafter and phase.
    """

    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    tok_per_s: float = 0.0
    verify_steps: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    speedup_vs_plain: float | None = None
    cached_tokens: int = 0
    cache_miss_reason: str = ""
    """Why not more of the prompt came from a cache; empty where nothing is missing."""
    draft_steps: int = 0
    drafted_per_position: tuple[int, ...] = ()
    work: tuple[WorkMetrics, ...] = ()


@dataclass(frozen=True)
class Done:
    """The last event of every generation that did not raise."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    stop_text: str | None = None


Event = Queued | Prefill | Delta | Done


@dataclass(frozen=True)
class DrafterMetrics:
    """Counters of one drafter since the engine started."""

    name: str
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    draft_ms: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 before the first draft."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


@dataclass(frozen=True)
class ClientMetrics:
    """Counters of one client of the port."""

    name: str
    requests: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class WorkMetrics:
    """Counters of one drafter (or chain, or off) in one phase for one client.

    Milliseconds are this work's share of its steps. `accepted_per_position` over `drafts` is the marginal rate of a
    position, over `drafted_per_position` times the rate before it the conditional one. `plain_ms` is what its tokens
    would have cost without drafts.
    """

    drafter: str
    phase: str
    client: str
    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    plain_ms: float = 0.0

    @property
    def tok_per_s(self) -> float:
        """Over the time of its own steps."""
        ms = self.draft_ms + self.verify_ms
        return self.tokens / ms * 1e3 if ms else 0.0

    @property
    def speedup(self) -> float:
        """Against the same tokens without drafts; 0 before anything was measured."""
        ms = self.draft_ms + self.verify_ms
        return self.plain_ms / ms if ms else 0.0

    @property
    def marginal_rates(self) -> tuple[float, ...]:
        """Of all windows with drafts, the share in which the draft at each position was accepted."""
        return tuple(accepted / self.drafts for accepted in self.accepted_per_position)

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """Of the drafts whose predecessors were all accepted, the share that was accepted too."""
        before = (self.drafts, *self.accepted_per_position)
        reached = (min(a, b) for a, b in zip(before, self.drafted_per_position, strict=False))
        return tuple(a / b if b else 0.0 for a, b in zip(self.accepted_per_position, reached, strict=False))


EngineState = Literal["loading", "ready", "failed", "stopped"]


@dataclass(frozen=True)
class MetricsSnapshot:
    """One moment of the engine, cheap to take at 2 Hz.

    `stage` says in words what a loading engine does. `mean_accepted_run` is tokens a step where something was drafted,
    the target's own included. `memory_bytes` is by use (weights, kv, state, other).
    `tiers` and `storage` hold the figures of caches below the GPU, by name.
    """

    state: EngineState = "loading"
    stage: str = ""
    model_id: str = ""
    device: str = ""
    drafter: str = "off"
    depth: int = 0
    drafter_reason: str = ""
    context_limit_tokens: int = 0
    context_used_tokens: int = 0
    active_requests: int = 0
    queued_requests: int = 0
    requests_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0
    tok_per_s: float = 0.0
    plain_tok_per_s: float | None = None
    speedup_vs_plain: float | None = None
    mean_accepted_run: float = 0.0
    verify_steps: int = 0
    verify_ms: float = 0.0
    draft_ms: float = 0.0
    prefill_done_tokens: int = 0
    prefill_total_tokens: int = 0
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    drafters: tuple[DrafterMetrics, ...] = ()
    clients: tuple[ClientMetrics, ...] = ()
    work: tuple[WorkMetrics, ...] = ()
    tiers: Mapping[str, float] = field(default_factory=dict)
    storage: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelInfo:
    """What an interface needs to know of the loaded model. `demo` models are named so wherever they are shown."""

    id: str
    title: str
    context_limit_tokens: int
    vocab_size: int
    demo: bool = False
    note: str = ""
    drafters: tuple[str, ...] = ("off",)
    has_chat_template: bool = True
    thinks: bool = False
    sampling: Sampling = Sampling()


class EngineError(Exception):
    """A request or control call that the engine refuses.

    `code` is a stable word (`context_length_exceeded`, `bad_request`, `not_ready`, `overloaded`, `unsupported`,
    `model_not_found`, `machine_cannot`, `internal`); `message` is one sentence that says what would work; `param` names
    the field of the request that it is about, by OpenAI's name for it.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
