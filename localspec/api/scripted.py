"""An engine without weights that says given texts in random run lengths.

Everything an interface can meet is here and repeatable from a seed: runs of accepted drafts, refused drafts,
thoughts, tool calls, failures before and after the first event, queues, slow loads, moving counters. Knows
nothing of models; its tokens are bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from localspec.api import toy_text
from localspec.api.engine import DrafterChoice
from localspec.api.scripted_metrics import Counters
from localspec.api.scripted_text import StopHold, fake_logprobs, spans
from localspec.api.tuning import Candidate, TunerChoice, TunerReport
from localspec.api.types import (
    TARGET_ORIGIN,
    Delta,
    Done,
    EngineError,
    Event,
    FinishReason,
    GenerateRequest,
    MetricsSnapshot,
    ModelInfo,
    Phase,
    Prefill,
    Queued,
    Timings,
    Usage,
)


@dataclass(frozen=True)
class Reply:
    """What one request gets. `text` or `token_ids`; errors come before the first event or after some tokens."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    thought_is_open: bool = False
    refuse: EngineError | None = None
    fail_after_tokens: int | None = None

    def tokens(self) -> tuple[int, ...]:
        """Token ids of the reply before stops and limits."""
        return self.token_ids or toy_text.encode(self.text)


@dataclass(frozen=True)
class Script:
    """How the engine behaves. `tok_per_s` 0 is as fast as it goes; `max_run` is drafts a step plus one."""

    replies: tuple[Reply, ...] = (Reply("Scripted answer."),)
    seed: int = 0
    tok_per_s: float = 0.0
    max_run: int = 6
    acceptance: float = 0.7
    slots: int = 4
    load_s: float = 0.0
    load_error: str = ""
    prefill_s: float = 0.0
    prefill_chunk_tokens: int = 256
    context_limit_tokens: int = 65536
    model_id: str = "scripted"
    models: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ("off", "ngram")
    thinks: bool = False


Chooser = Callable[[GenerateRequest, int], Reply]


@dataclass
class _Run:
    """One running request: what is out so far."""

    request: GenerateRequest
    prompt_tokens: int
    room_tokens: int
    random: random.Random
    text: str = ""
    emitted_tokens: int = 0
    reasoning_tokens: int = 0
    stop_text: str | None = None
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    drafted_at: list[int] = dataclasses.field(default_factory=list)
    accepted_at: list[int] = dataclasses.field(default_factory=list)


class ScriptedEngine:
    """Meets the Engine protocol. Request k gets `choose(request, k)`, by default the replies in turn."""

    def __init__(self, script: Script | None = None, choose: Chooser | None = None) -> None:
        self._script = script or Script()
        self._choose = choose or self._next_reply
        self._counters = Counters()
        self._slots = asyncio.Semaphore(self._script.slots)
        self._stopped = asyncio.Event()
        self._started_s = time.monotonic()
        self._n_requests = 0
        self._model_id = self._script.model_id
        self._choice = DrafterChoice()

    def model(self) -> ModelInfo | None:
        """The scripted model once its load time has passed."""
        return None if self._loading_s() > 0 or self._script.load_error else self._info()

    def metrics(self) -> MetricsSnapshot:
        """Counters since the start."""
        base = MetricsSnapshot(
            model_id=self._model_id,
            device="none (scripted)",
            drafter=self._drafter(),
            depth=self._depth(),
            drafter_reason="scripted",
            context_limit_tokens=self._script.context_limit_tokens,
            memory_bytes={"weights": 0, "kv": 0},
        )
        if self._stopped.is_set():
            return self._counters.snapshot(base, "stopped", "")
        if self._loading_s() > 0:
            return self._counters.snapshot(base, "loading", "waiting for the scripted load time")
        if self._script.load_error:
            return self._counters.snapshot(base, "failed", self._script.load_error)
        return self._counters.snapshot(base, "ready", "")

    async def wait_ready(self) -> ModelInfo:
        """Wait for the scripted load time. Raises EngineError (`not_ready`) for a scripted load error."""
        await asyncio.sleep(self._loading_s())
        if self._script.load_error:
            raise EngineError("not_ready", self._script.load_error)
        return self._info()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Replay the reply of this request; see Engine.generate."""
        if self._stopped.is_set() or self.model() is None:
            raise EngineError("not_ready", "The model is not loaded yet; ask again when /health answers 200.")
        index = self._n_requests
        self._n_requests += 1
        reply = self._choose(request, index)
        if reply.refuse is not None:
            raise reply.refuse
        run = self._admit(request, index)
        self._counters.queued += 1
        if self._slots.locked():
            yield Queued(self._counters.queued - 1)
        try:
            await self._slots.acquire()
        finally:
            self._counters.queued -= 1
        try:
            self._counters.begin(request.client or "-", run.prompt_tokens)
            async with aclosing(self._speak(run, reply)) as events:
                async for event in events:
                    yield event
        finally:
            self._counters.end()
            self._slots.release()

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Bytes of the made-up template."""
        return len(toy_text.render_prompt(request))

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Bytes, and one id for each tag."""
        return toy_text.encode(text)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Text of ids; see Engine.detokenize."""
        return toy_text.decode(token_ids)

    async def warm(self, request: GenerateRequest) -> int:
        """There is no cache: 0."""
        return 0

    async def forget(self, chat_id: str) -> None:
        """There is nothing to forget."""

    async def load(self, model_id: str) -> ModelInfo:
        """Take another name out of `Script.models`."""
        known = {self._script.model_id, *self._script.models}
        if model_id not in known:
            raise EngineError("model_not_found", f"No model {model_id!r}; installed: {', '.join(sorted(known))}.")
        self._model_id = model_id
        return self._info()

    async def choose_drafter(self, choice: DrafterChoice) -> None:
        """Note the choice; `auto` and every name of the model are known."""
        self._check_drafter(choice.drafter)
        self._choice = choice

    async def explain(self) -> TunerReport:
        """One choice with made-up figures: every drafter in its order, each better than the one before."""
        candidates = tuple(
            Candidate(name, min(number, 1) * (self._script.max_run - 1), 20.0 * (number + 1), number + 1.0, 50.0, 8, 3)
            for number, name in enumerate(self._script.drafters)
        )
        choice = TunerChoice(Phase.ANSWER, 1, 0, self._drafter(), self._depth(), "scripted", 8, "", candidates[::-1])
        by_hand = self._choice.drafter != "auto"
        return TunerReport(self._drafter(), self._depth(), "scripted", by_hand, (choice,))

    async def aclose(self) -> None:
        """Running requests end with `cancelled` at their next step."""
        self._stopped.set()

    def _next_reply(self, request: GenerateRequest, index: int) -> Reply:
        return self._script.replies[index % len(self._script.replies)]

    def _loading_s(self) -> float:
        return max(0.0, self._started_s + self._script.load_s - time.monotonic())

    def _info(self) -> ModelInfo:
        return ModelInfo(
            id=self._model_id,
            title="Scripted engine, no model",
            context_limit_tokens=self._script.context_limit_tokens,
            vocab_size=toy_text.VOCAB_SIZE,
            demo=True,
            note="Replays given texts; its figures are made up.",
            drafters=self._script.drafters,
            thinks=self._script.thinks,
        )

    def _drafter(self) -> str:
        return self._script.drafters[-1] if self._choice.drafter == "auto" else self._choice.drafter

    def _depth(self) -> int:
        full = self._script.max_run - 1 if self._choice.depth is None else self._choice.depth
        return 0 if self._drafter() == "off" else full

    def _check_drafter(self, drafter: str) -> None:
        for name in drafter.split("+"):
            if name != "auto" and name not in self._script.drafters:
                known = ", ".join(("auto", *self._script.drafters))
                raise EngineError("unsupported", f"No drafter {name!r} for this model; it has {known}.")

    def _admit(self, request: GenerateRequest, index: int) -> _Run:
        """Check what can be checked before the first event."""
        given = (bool(request.messages), request.prompt is not None, bool(request.prompt_token_ids))
        if sum(given) != 1:
            raise EngineError("bad_request", "Give exactly one of messages, prompt and prompt token ids.")
        if request.drafter is not None:
            self._check_drafter(request.drafter)
        n_prompt, limit = len(toy_text.render_prompt(request)), self._script.context_limit_tokens
        if n_prompt >= limit:
            raise EngineError(
                "context_length_exceeded",
                f"The prompt is too long: it has {n_prompt} tokens, and this model's maximum context length is {limit} "
                "tokens; shorten it.",
            )
        room = limit - n_prompt
        if request.max_tokens is not None:
            room = min(room, request.max_tokens)
        return _Run(request, n_prompt, room, random.Random(f"{self._script.seed}/{index}"))

    async def _speak(self, run: _Run, reply: Reply) -> AsyncGenerator[Event, None]:
        began_s = time.monotonic()
        for done in (*range(0, run.prompt_tokens, self._script.prefill_chunk_tokens), run.prompt_tokens):
            yield Prefill(done, run.prompt_tokens)
            await asyncio.sleep(self._script.prefill_s)
        prefill_s, began_s = time.monotonic() - began_s, time.monotonic()
        finish: FinishReason = "stop"
        # `closing` runs even when the consumer closes us between two runs.
        async with aclosing(self._runs(run, reply)) as deltas:
            async for delta in deltas:
                self._counters.emit(len(delta.token_ids))
                yield delta
        if self._stopped.is_set():
            finish = "cancelled"
        elif run.stop_text is None and run.emitted_tokens >= run.room_tokens:
            finish = "length" if run.emitted_tokens < len(reply.tokens()) or run.room_tokens == 0 else "stop"
        yield Done(finish, self._usage(run), self._timings(run, prefill_s, time.monotonic() - began_s), run.stop_text)

    async def _runs(self, run: _Run, reply: Reply) -> AsyncGenerator[Delta, None]:
        """Deltas of the reply, cut at a stop string, at the room and at a scripted failure."""
        tokens, decoder = reply.tokens(), toy_text.Decoder()
        phases = toy_text.PhaseTracker(reply.thought_is_open)
        limit, at = min(len(tokens), run.room_tokens), 0
        held = StopHold(run.request.stop)
        while at < limit and run.stop_text is None and not self._stopped.is_set():
            if reply.fail_after_tokens is not None and at >= reply.fail_after_tokens:
                raise EngineError("internal", "The script says that the engine fails here.")
            n_accepted, n_drafted = self._draw(run)
            chunk = tokens[at : min(at + n_accepted + 1, limit)]
            at += len(chunk)
            n_accepted = min(n_accepted, len(chunk))
            self._note_step(run, n_drafted, n_accepted)
            await asyncio.sleep(len(chunk) / self._script.tok_per_s if self._script.tok_per_s else 0)
            origins = [self._drafter()] * n_accepted + [TARGET_ORIGIN] * (len(chunk) - n_accepted)
            pieces = []
            for token_id, origin in zip(chunk, origins, strict=True):
                phase = phases.step(token_id)
                run.reasoning_tokens += phase is Phase.THINKING
                pieces.append((decoder.feed(token_id), origin, phase))
            run.emitted_tokens += len(chunk)
            if at >= limit:
                pieces.append((decoder.finish(), TARGET_ORIGIN, phases.phase))
            shown, run.stop_text = held.feed(pieces, last=at >= limit)
            logprobs = fake_logprobs(chunk, run.request.logprobs)
            yield Delta("".join(text for text, _, _ in shown), chunk, spans(shown), n_drafted - n_accepted, logprobs)

    def _draw(self, run: _Run) -> tuple[int, int]:
        """Accepted and drafted tokens of one step: drafts are kept up to the first one that fails its coin."""
        drafter = run.request.drafter or self._drafter()
        depth = self._depth() if run.request.depth is None else run.request.depth
        if drafter == "off" or depth <= 0:
            return 0, 0
        n_drafted = run.random.randint(0, depth)
        n_accepted = 0
        while n_accepted < n_drafted and run.random.random() < self._script.acceptance:
            n_accepted += 1
        return n_accepted, n_drafted

    def _note_step(self, run: _Run, n_drafted: int, n_accepted: int) -> None:
        run.steps += 1
        run.drafted += n_drafted
        run.accepted += n_accepted
        run.draft_steps += n_drafted > 0
        for counts, reached in ((run.drafted_at, n_drafted), (run.accepted_at, n_accepted)):
            counts.extend([0] * (reached - len(counts)))
            for position in range(reached):
                counts[position] += 1
        self._counters.step(self._drafter(), n_drafted, n_accepted)

    def _usage(self, run: _Run) -> Usage:
        predicted = run.request.prediction is not None
        return Usage(
            run.prompt_tokens,
            run.emitted_tokens,
            reasoning_tokens=run.reasoning_tokens,
            accepted_prediction_tokens=run.accepted if predicted else 0,
            rejected_prediction_tokens=run.drafted - run.accepted if predicted else 0,
        )

    def _timings(self, run: _Run, prefill_s: float, decode_s: float) -> Timings:
        return Timings(
            prefill_ms=prefill_s * 1e3,
            decode_ms=decode_s * 1e3,
            tok_per_s=run.emitted_tokens / decode_s if decode_s > 0 else 0.0,
            verify_steps=run.steps,
            draft_n=run.drafted,
            draft_n_accepted=run.accepted,
            draft_steps=run.draft_steps,
            drafted_per_position=tuple(run.drafted_at),
            accepted_per_position=tuple(run.accepted_at),
        )
