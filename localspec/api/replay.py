"""Recordings of an engine: `record` writes what another engine says, ReplayEngine says it again with its timing.

A recording is JSON lines: a header with the model, one line an event with its request number and the seconds since
that request began, and the engine's figures after each request. Knows the file format; knows nothing of tokenizers or
templates.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from localspec.api import toy_text
from localspec.api.closing import closing
from localspec.api.codec import event_from_json, event_to_json, from_json, to_json
from localspec.api.engine import DrafterChoice, Engine
from localspec.api.tuning import TunerReport
from localspec.api.types import Done, EngineError, Event, GenerateRequest, MetricsSnapshot, ModelInfo, Timings, Usage

RECORDING_VERSION = 1
MAX_LINE_CHARS = 4 << 20


@dataclass(frozen=True)
class _Line:
    """One event, or the error that ended a request, `at_s` seconds after the request began."""

    at_s: float
    event: Event | None
    error: EngineError | None


class ReplayEngine:
    """Meets the Engine protocol: the k-th request gets the k-th recording of the file, then from the start again.

    `speed` 1 keeps the recorded pace, 0 waits for nothing. Tokens of other calls are bytes.
    """

    def __init__(self, path: Path, speed: float = 1.0) -> None:
        """Read the whole file. Raises ValueError that names the line of a bad recording, OSError for no file."""
        recording = _read(path)
        self._info, self._runs, self._report = recording.info, recording.runs, recording.report
        self._figures, self._shown = recording.figures, recording.final
        self._speed = speed
        self._n_requests = 0
        self._active = 0
        self._tokens = 0
        self._stopped = asyncio.Event()

    def model(self) -> ModelInfo | None:
        """The recorded model."""
        return self._info

    def metrics(self) -> MetricsSnapshot:
        """Recorded snapshot with the counters of the replay."""
        return replace(
            self._shown,
            state="stopped" if self._stopped.is_set() else "ready",
            stage="",
            model_id=self._info.id,
            device=f"{self._shown.device or 'none'} (replay)",
            context_limit_tokens=self._info.context_limit_tokens,
            active_requests=self._active,
            queued_requests=0,
            requests_total=self._n_requests,
            completion_tokens_total=self._tokens,
        )

    async def wait_ready(self) -> ModelInfo:
        """Ready at once."""
        return self._info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The next recorded request, event by event."""
        if self._stopped.is_set():
            raise EngineError("not_ready", "The replay was stopped.")
        number = self._n_requests % len(self._runs)
        lines = self._runs[number]
        self._n_requests += 1
        self._active += 1
        began_s = time.monotonic()
        try:
            for line in lines:
                await self._wait_until(began_s, line.at_s)
                if self._stopped.is_set():
                    yield Done("cancelled", Usage(0, 0), Timings())
                    return
                if line.error is not None:
                    raise line.error
                if line.event is not None:
                    self._tokens += len(getattr(line.event, "token_ids", ()))
                    yield line.event
        finally:
            self._active -= 1
            self._shown = self._figures.get(number, self._shown)

    async def _wait_until(self, began_s: float, at_s: float) -> None:
        wait_s = began_s + at_s / self._speed - time.monotonic() if self._speed > 0 else 0.0
        if wait_s <= 0:
            await asyncio.sleep(0)
            return
        try:
            await asyncio.wait_for(self._stopped.wait(), wait_s)
        except TimeoutError:
            return

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Bytes of the made-up template."""
        return len(toy_text.render_prompt(request))

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Bytes of the text."""
        return toy_text.encode(text)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Text of bytes; see Engine.detokenize."""
        return toy_text.decode(token_ids)

    async def warm(self, request: GenerateRequest) -> int:
        """There is no cache: 0."""
        return 0

    async def forget(self, chat_id: str) -> None:
        """There is nothing to forget."""

    async def load(self, model_id: str) -> ModelInfo:
        """Only the recorded model can be loaded."""
        if model_id != self._info.id:
            raise EngineError("model_not_found", f"No model {model_id!r}; the recording is of {self._info.id}.")
        return self._info

    async def choose_drafter(self, choice: DrafterChoice) -> None:
        """A recording cannot change its drafter; names that the model has are accepted, others refused."""
        for name in choice.drafter.split("+"):
            if name not in ("auto", *self._info.drafters):
                raise EngineError("unsupported", f"No drafter {name!r}; it has {', '.join(self._info.drafters)}.")

    async def explain(self) -> TunerReport:
        """What the recorded engine knew of drafting at its end."""
        return self._report

    async def aclose(self) -> None:
        """Running replays end with `cancelled`."""
        self._stopped.set()


class RecordingEngine:
    """Passes every call on to another engine and writes what it generates."""

    def __init__(self, engine: Engine, file: TextIO) -> None:
        self._engine = engine
        self._file = file
        self._n_requests = 0

    def model(self) -> ModelInfo | None:
        """Of the recorded engine."""
        return self._engine.model()

    def metrics(self) -> MetricsSnapshot:
        """Of the recorded engine."""
        return self._engine.metrics()

    async def wait_ready(self) -> ModelInfo:
        """Of the recorded engine."""
        return await self._engine.wait_ready()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Pass events on, each written before it is seen."""
        if self._n_requests == 0:
            info = to_json(await self._engine.wait_ready())
            self._write({"localspec_recording": RECORDING_VERSION, "model": info})
        number = self._n_requests
        self._n_requests += 1
        began_s = time.monotonic()
        try:
            async with closing(self._engine.generate(request)) as events:
                async for event in events:
                    at_s = round(time.monotonic() - began_s, 4)
                    self._write({"request": number, "at_s": at_s, "event": event_to_json(event)})
                    yield event
        except EngineError as error:
            said = {"code": error.code, "message": error.message}
            self._write({"request": number, "at_s": round(time.monotonic() - began_s, 4), "error": said})
            raise
        self._write({"request": number, "figures": to_json(self._engine.metrics())})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._file.flush()

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Of the recorded engine."""
        return await self._engine.count_tokens(request)

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Of the recorded engine."""
        return await self._engine.tokenize(text)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Of the recorded engine."""
        return await self._engine.detokenize(token_ids)

    async def warm(self, request: GenerateRequest) -> int:
        """Of the recorded engine."""
        return await self._engine.warm(request)

    async def forget(self, chat_id: str) -> None:
        """Of the recorded engine."""
        await self._engine.forget(chat_id)

    async def load(self, model_id: str) -> ModelInfo:
        """Of the recorded engine."""
        return await self._engine.load(model_id)

    async def choose_drafter(self, choice: DrafterChoice) -> None:
        """Of the recorded engine."""
        await self._engine.choose_drafter(choice)

    async def explain(self) -> TunerReport:
        """Of the recorded engine."""
        return await self._engine.explain()

    async def aclose(self) -> None:
        """Write the last counters, close the file and the engine."""
        if not self._file.closed:
            if self._n_requests:
                self._write({"final": to_json(self._engine.metrics())})
                with contextlib.suppress(EngineError):
                    self._write({"explain": to_json(await self._engine.explain())})
            self._file.close()
        await self._engine.aclose()


def record(engine: Engine, path: Path) -> RecordingEngine:
    """An engine that does what `engine` does and writes it to `path` (new file, 0600). Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    return RecordingEngine(engine, os.fdopen(descriptor, "w", encoding="utf-8"))


@dataclass(frozen=True)
class _Recording:
    """A file that was read. `figures` are those after each request, by its place in `runs`."""

    info: ModelInfo
    runs: list[list[_Line]]
    figures: dict[int, MetricsSnapshot]
    final: MetricsSnapshot
    report: TunerReport


def _read(path: Path) -> _Recording:
    info: ModelInfo | None = None
    final, report = MetricsSnapshot(), TunerReport()
    figures: dict[int, MetricsSnapshot] = {}
    runs: dict[int, list[_Line]] = {}
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(iter(lambda: file.readline(MAX_LINE_CHARS), ""), start=1):
            try:
                data = json.loads(text)
                if "localspec_recording" in data:
                    if data["localspec_recording"] != RECORDING_VERSION:
                        raise ValueError(f"version {data['localspec_recording']} is not {RECORDING_VERSION}")
                    info = from_json(ModelInfo, data["model"])
                elif "final" in data:
                    final = from_json(MetricsSnapshot, data["final"])
                elif "figures" in data:
                    figures[int(data["request"])] = from_json(MetricsSnapshot, data["figures"])
                elif "explain" in data:
                    report = from_json(TunerReport, data["explain"])
                else:
                    runs.setdefault(int(data["request"]), []).append(_line(data))
            except (ValueError, KeyError, TypeError, RecursionError) as reason:
                raise ValueError(f"{path.name} line {number} is not a line of a recording: {reason}") from reason
    if info is None or not runs:
        raise ValueError(f"{path.name} holds no recording; make one with record(engine, path).")
    numbers = sorted(runs)
    shown = {place: figures[number] for place, number in enumerate(numbers) if number in figures}
    return _Recording(info, [runs[number] for number in numbers], shown, final, report)


def _line(data: dict[str, Any]) -> _Line:
    if "error" in data:
        return _Line(float(data["at_s"]), None, EngineError(data["error"]["code"], data["error"]["message"]))
    return _Line(float(data["at_s"]), event_from_json(data["event"]), None)
