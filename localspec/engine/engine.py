"""The local engine behind the api's Engine protocol: asyncio on one side, the decode thread on the other.

Text work (template, tokens, detokenising, stop strings) happens here, on the caller's side of the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from localspec.api.engine import DrafterChoice
from localspec.api.tuning import TunerReport
from localspec.api.types import (
    Delta,
    Done,
    EngineError,
    Event,
    FinishReason,
    GenerateRequest,
    MetricsSnapshot,
    ModelInfo,
    Prefill,
    TokenLogprob,
    Usage,
)
from localspec.cache.spill_admin import forget_chat_on_disk
from localspec.core.records import SlotResult
from localspec.engine.build import Built, EngineOptions, ModelPlace, build
from localspec.engine.loading import LoadedModels
from localspec.engine.loop import EndNews, News, PrefillNews, StepNews, Ticket
from localspec.engine.text import Prepared
from localspec.engine.text_stream import Piece, TextStream
from localspec.engine.tuner_report import report
from localspec.engine.tuner_work import Kept

log = logging.getLogger(__name__)


Locator = Callable[[str, Callable[[str], None]], ModelPlace]
"""Finds (or fetches, reporting stages) a model by id. Runs on a worker thread."""


@dataclass
class _Answer:
    """What one request has produced so far, on the text side."""

    prepared: Prepared
    stream: TextStream
    ids: list[int] = field(default_factory=list)
    accepted_prediction: int = 0
    rejected: int = 0


class LocalEngine:
    """Meets api.Engine. Loading runs in the background; requests wait for it."""

    def __init__(self, locate: Locator, options: EngineOptions) -> None:
        self._locate = locate
        self._options = options
        self._models: LoadedModels[Built] = LoadedModels(self._find)
        # One thread for long texts: each thread that computes makes the decode thread wait longer for its turn.
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgotten: set[str] = set()

    @property
    def _built(self) -> Built | None:
        return self._models.current

    def start(self, model_id: str) -> None:
        """Begin to load a model in the background."""
        self._models.begin(model_id)

    def model(self) -> ModelInfo | None:
        built = self._built
        return built.info if built is not None else None

    def metrics(self) -> MetricsSnapshot:
        built = self._built
        if built is not None:
            tuner = built.parts.tuner
            drafter, depth = tuner.default_drafter, tuner.default_depth or 0
            if drafter == "auto":
                drafter, depth = f"auto: {tuner.chosen[0]}", tuner.chosen[1]
            storage = built.tables.figures() if built.tables is not None else {}
            return replace(built.parts.metrics.snapshot(), drafter=drafter, depth=depth, storage=storage)
        attempt = self._models.last
        if attempt is None or self._models.is_closed:
            return MetricsSnapshot(state="stopped" if self._models.is_closed else "loading")
        if attempt.failure is not None:
            return MetricsSnapshot(state="failed", stage=attempt.failure.message, model_id=attempt.model_id)
        return MetricsSnapshot(state="loading", stage=attempt.stage, model_id=attempt.model_id)

    async def wait_ready(self) -> ModelInfo:
        if self._built is None:
            await self._models.until_settled()
        return self._ready().info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        await self.wait_ready()
        built = self._ready()
        if request.drafter is not None:
            self._check_drafter(built, request.drafter)
        prepared = await self._prepared(built, request)
        grammar = await asyncio.to_thread(built.text.constrain, request, prepared)
        stream, phases = built.text.stream(prepared, request.stop)
        answer = _Answer(prepared, stream)
        news: asyncio.Queue[News] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()
        ticket = built.parts.loop.submit(prepared.request, lambda item: _post(event_loop, news, item), grammar)
        try:
            async for event in self._events(built, ticket, answer, news):
                yield _with_reasoning(event, phases.thinking_tokens)
        finally:
            built.parts.loop.cancel(ticket)

    async def _prepared(self, built: Built, request: GenerateRequest) -> Prepared:
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, built.text.prepare, request)

    async def count_tokens(self, request: GenerateRequest) -> int:
        count = self._ready().text.count_tokens
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, count, request)

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return await asyncio.to_thread(self._ready().text.tokenizer.encode, text)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        tokenizer = self._ready().text.tokenizer
        if any(not 0 <= token_id < tokenizer.vocab_size for token_id in token_ids):
            raise EngineError("bad_request", f"token ids must lie between 0 and {tokenizer.vocab_size - 1}")
        return await asyncio.to_thread(tokenizer.decode, token_ids, False)

    async def warm(self, request: GenerateRequest) -> int:
        built = self._ready()
        prepared = await self._prepared(built, request)
        found: list[int] = []
        scheduler = built.parts.scheduler
        ids = prepared.request.prompt_ids[:-1]
        await asyncio.wrap_future(built.parts.loop.tiers.warm(ids, request.chat_id, request.private))
        future = built.parts.loop.call(
            lambda: found.append(scheduler.prefix.match(ids, scheduler.needs_state).total_tokens)
        )
        await asyncio.wrap_future(future)
        return found[0]

    async def forget(self, chat_id: str) -> None:
        self._forgotten.add(chat_id)
        # Who asks may leave; what is to be forgotten goes all the same.
        task = asyncio.ensure_future(self._forget(chat_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _forget(self, chat_id: str) -> None:
        if self._built is None:
            await self._models.until_settled()
        if self._built is None and self._options.kv_dir is not None:
            # No model could be loaded; what an earlier one left goes all the same.
            await asyncio.to_thread(forget_chat_on_disk, self._options.kv_dir, chat_id)
            return
        built = self._ready()
        built.text.tokenizer.memory.clear()
        if built.tables is not None:
            built.tables.forget(chat_id)
        loop = built.parts.loop
        for future in (loop.forget(chat_id), loop.tiers.forget(chat_id)):
            await asyncio.wrap_future(future)

    async def load(self, model_id: str) -> ModelInfo:
        """The model that runs answers until the new one is found; a caller that leaves does not stop the load."""
        await self._models.outcome(self._models.begin(model_id))
        return self._ready().info

    async def choose_drafter(self, choice: DrafterChoice) -> None:
        built = self._ready()
        self._check_drafter(built, choice.drafter)
        built.parts.tuner.default_drafter = choice.drafter
        built.parts.tuner.default_depth = choice.depth

    async def explain(self) -> TunerReport:
        parts, told = self._ready().parts, [TunerReport()]
        await asyncio.wrap_future(parts.loop.call(lambda: told.append(report(parts.tuner))))
        return told[-1]

    async def explain_tuner(self) -> list[str]:
        """What the tuner knows, in sentences; waits for the running step."""
        parts, lines = self._ready().parts, [""]
        await asyncio.wrap_future(parts.loop.call(lambda: lines.extend(parts.tuner.explain())))
        return [f"now: {parts.tuner.chosen[0]} {parts.tuner.chosen[1]} ({parts.tuner.reason})", *lines[1:]]

    async def reset_tuner(self) -> None:
        """Forget what the tuner learnt, on the disk too."""
        built = self._ready()
        if built.keeper is not None:
            await asyncio.to_thread(built.keeper.reset)
        else:
            await asyncio.wrap_future(built.parts.loop.call(built.parts.tuner.reset))

    async def swap_tuner(self, learnt: object | None) -> object:
        """Let the tuner go on with what an earlier call gave, or with nothing; what it knew until now. Waits for the
        running step. Raises TypeError for anything else."""
        if learnt is not None and not isinstance(learnt, Kept):
            raise TypeError("a tuner goes on with what it gave, or with nothing")
        parts, known = self._ready().parts, list[Kept]()
        await asyncio.wrap_future(parts.loop.call(lambda: known.append(parts.tuner.swap(learnt))))
        return known[0]

    async def capture_ahead(self) -> None:
        """Capture now the steps that requests like the last one may take, so that none is while something is
        measured."""
        loop, more = self._ready().parts.loop, [True]
        while more[-1]:
            await asyncio.wrap_future(loop.call(lambda: more.append(loop.capture_ahead())))

    async def aclose(self) -> None:
        self._text_thread.shutdown(wait=False)
        await self._models.close()

    def _find(self, model_id: str, report: Callable[[str], None]) -> Callable[[Callable[[str], None]], Built]:
        place = self._locate(model_id, report)
        return lambda report: build(place, self._options, report)

    def _ready(self) -> Built:
        built, attempt = self._built, self._models.last
        if built is not None:
            return built
        if attempt is not None and attempt.failure is not None:
            raise attempt.failure
        what = f"{attempt.model_id} is still loading: {attempt.stage}" if attempt is not None else "no model was chosen"
        raise EngineError("not_ready", what)

    def _check_drafter(self, built: Built, drafter: str) -> None:
        known = set(built.info.drafters)
        if not all(part in known for part in drafter.split("+")):
            names = ", ".join(built.info.drafters)
            raise EngineError("unsupported", f"drafter {drafter!r} is not available for this model; there are {names}")

    async def _events(
        self, built: Built, ticket: Ticket, answer: _Answer, news: asyncio.Queue[News]
    ) -> AsyncGenerator[Event, None]:
        while True:
            item = await news.get()
            if isinstance(item, PrefillNews):
                yield Prefill(item.done_tokens, item.total_tokens, item.cached_tokens, item.miss_reason)
            elif isinstance(item, StepNews):
                piece = self._push(answer, item.result)
                if piece.text or piece.token_ids:
                    yield self._delta(built, piece, item.result)
                if piece.stop_text is not None:
                    built.parts.loop.cancel(ticket)
                    _learn(built, answer)
                    yield self._done(answer, await _end(news), "stop", piece.stop_text)
                    return
            else:
                async for event in self._finish(built, answer, item):
                    yield event
                return

    async def _finish(self, built: Built, answer: _Answer, end: EndNews) -> AsyncGenerator[Event, None]:
        if end.error is not None:
            raise end.error
        tail = answer.stream.finish()
        if tail.text or tail.token_ids:
            yield Delta(tail.text, tail.token_ids, tail.spans)
        if end.finish in ("stop", "length"):
            if answer.prepared.request.chat_id not in self._forgotten:
                await asyncio.to_thread(built.text.remember, answer.prepared, tuple(answer.ids))
            _learn(built, answer)
        yield self._done(answer, end, end.finish, tail.stop_text)

    def _push(self, answer: _Answer, result: SlotResult) -> Piece:
        piece = answer.stream.push(result.token_ids, result.origins)
        answer.ids.extend(piece.token_ids)
        if answer.prepared.request.prediction_ids:
            answer.accepted_prediction += result.num_accepted
            answer.rejected += result.num_drafted - result.num_accepted
        return piece

    def _delta(self, built: Built, piece: Piece, result: SlotResult) -> Delta:
        decode = built.text.tokenizer.decode
        logprobs = tuple(
            TokenLogprob(
                token_id,
                decode([token_id], skip_special=False),
                logprob,
                tuple((i, decode([i], skip_special=False), p) for i, p in top),
            )
            for token_id, logprob, top in zip(
                piece.token_ids, result.logprobs, result.top or ((),) * len(piece.token_ids), strict=False
            )
        )
        rejected = result.num_drafted - result.num_accepted
        return Delta(piece.text, piece.token_ids, piece.spans, rejected, logprobs)

    def _done(self, answer: _Answer, end: EndNews, finish: str, stop_text: str | None) -> Done:
        reason: FinishReason = "stop" if stop_text is not None else _REASONS.get(finish, "error")
        usage = Usage(
            prompt_tokens=len(answer.prepared.request.prompt_ids),
            completion_tokens=len(answer.ids),
            cached_tokens=end.timings.cached_tokens,
            accepted_prediction_tokens=answer.accepted_prediction,
            rejected_prediction_tokens=answer.rejected,
        )
        return Done(reason, usage, end.timings, stop_text)


_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "cancelled"}


def _with_reasoning(event: Event, thinking_tokens: int) -> Event:
    if not isinstance(event, Done):
        return event
    return replace(event, usage=replace(event.usage, reasoning_tokens=thinking_tokens))


def _post(event_loop: asyncio.AbstractEventLoop, news: asyncio.Queue[News], item: News) -> None:
    """From the decode thread; a listener whose event loop is gone needs nothing more."""
    try:
        event_loop.call_soon_threadsafe(news.put_nowait, item)
    except RuntimeError:
        log.debug("a listener is gone")


def _learn(built: Built, answer: _Answer) -> None:
    """Hand an answer that came to its end to the n-gram table of the user's own."""
    if built.tables is not None:
        built.tables.remember(answer.prepared.request, tuple(answer.ids))


async def _end(news: asyncio.Queue[News]) -> EndNews:
    while True:
        item = await news.get()
        if isinstance(item, EndNews):
            return item
