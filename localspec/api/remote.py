"""An engine behind a port: our own, or any OpenAI server.

Meets the Engine protocol, so that an interface does not care where the engine is. Against our own port raw
events travel and, with the control key, metrics are pushed and control calls work; against others thoughts,
answers and calls are put together from chunks, and acceptance is read from /metrics. Reconnects by itself.
The one module of this package that needs more than the standard library (httpx).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from localspec.api.codec import from_json, to_json
from localspec.api.engine import DrafterChoice
from localspec.api.remote_metrics import NO_PAGE, UNKNOWN, MetricsReader
from localspec.api.remote_settings import RemoteSettings
from localspec.api.remote_stream import (
    check,
    foreign_events,
    foreign_model,
    json_or_text,
    metrics_page,
    payloads,
    raw_events,
    words,
)
from localspec.api.remote_wire import error_of, foreign_body, our_body, prompt_fields
from localspec.api.tuning import TunerReport
from localspec.api.types import (
    Done,
    EngineError,
    Event,
    GenerateRequest,
    MetricsSnapshot,
    ModelInfo,
    Timings,
    Usage,
)

__all__ = ["CONTROL_HEADER", "RemoteEngine", "RemoteSettings"]

CONTROL_HEADER = "x-localspec-key"
# Other servers write a line of their log for each look at the list.
LIST_INTERVAL_S = 5.0

Kind = Literal["unknown", "localspec", "other"]


class RemoteEngine:
    """Client of a port. Begins to watch the port at the first call that is awaited, or at `connect`."""

    def __init__(self, settings: RemoteSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        parts = urlsplit(settings.root)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{settings.url!r} is no address of a server; give one like http://127.0.0.1:8012/v1.")
        self._settings = settings
        headers = {"x-localspec-client": settings.client_name}
        if settings.api_key:
            headers["authorization"] = f"Bearer {settings.api_key}"
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        self._http = httpx.AsyncClient(
            base_url=settings.root,
            headers=headers,
            timeout=httpx.Timeout(settings.read_timeout_s, connect=5.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=not local,  # a proxy must not stand between this machine and itself
            transport=transport,
        )
        self._kind: Kind = "unknown"
        self._must_look = True
        self._model: ModelInfo | None = None
        self._snapshot = MetricsSnapshot(stage="connecting", device=settings.root)
        self._watcher: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._unreachable_since_s: float | None = None
        self._refused: EngineError | None = None
        self._reader = MetricsReader()
        self._listed_s = 0.0
        self._closed = False

    def model(self) -> ModelInfo | None:
        """The model that the port last said."""
        return self._model

    @property
    def address(self) -> str:
        """Where the port is now; an engine that is started anew has another."""
        return self._settings.root

    def metrics(self) -> MetricsSnapshot:
        """The last snapshot that arrived; `loading` with a stage while the port cannot be reached."""
        return self._snapshot

    async def connect(self) -> None:
        """Begin to watch the port; returns at once."""
        if self._watcher is None and not self._closed:
            self._watcher = asyncio.create_task(self._watch())

    async def wait_ready(self) -> ModelInfo:
        """Wait through loading. Raises EngineError (`not_ready`) when nothing answers or loading failed."""
        await self.connect()
        began_s = time.monotonic()
        while True:
            if self._refused is not None:
                raise self._refused
            if self._model is not None and self._snapshot.state == "ready":
                return self._model
            if self._snapshot.state in ("failed", "stopped"):
                raise EngineError("not_ready", f"The engine {self._snapshot.state}: {self._snapshot.stage}")
            since_s = self._unreachable_since_s
            if since_s is not None and time.monotonic() - max(since_s, began_s) > self._settings.connect_timeout_s:
                raise self._settings.no_answer()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.2)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Stream one request; see Engine.generate. A lost connection raises EngineError (`internal`)."""
        if self._closed:
            raise EngineError("not_ready", "This connection was closed.")
        path = "/v1/chat/completions" if request.messages else "/v1/completions"
        headers = {"x-localspec-client": request.client} if request.client else {}
        begun = False
        while True:
            model = self._model if self._model is not None else await self.wait_ready()
            ours = self._kind == "localspec"
            body = our_body(request, model.id, self._settings.group_s) if ours else foreign_body(request, model.id)
            try:
                async with self._http.stream("POST", path, json=body, headers=headers) as response:
                    await check(response)
                    async for event in raw_events(response) if ours else foreign_events(response):
                        begun = True
                        yield event
                return
            except EngineError as error:
                # Our own port loads another model, or it is another process than the one that was ready.
                if begun or not ours or error.code != "not_ready" or self._snapshot.state in ("failed", "stopped"):
                    raise
                self._note_not_ready()
            except httpx.HTTPError as error:
                if self._closed:
                    yield Done("cancelled", Usage(0, 0), Timings())
                    return
                if not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
                    raise self._settings.broken(error, begun) from error
                if self._settings.find_url is None:
                    raise self._settings.no_answer() from error
                self._note_lost(error)

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Tokens of the prompt. Raises EngineError (`unsupported`) for servers that do not say."""
        if self._controls():
            data = await self._control("count_tokens", {**our_body(request, ""), "stream": False})
            return int(data["tokens"])
        data = await self._post("/tokenize", {"model": await self._model_id(), **prompt_fields(request)})
        return int(data["count"]) if isinstance(data.get("count"), int) else len(data.get("tokens", ()))

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids. Raises EngineError (`unsupported`) for servers without /tokenize."""
        if self._controls():
            return tuple((await self._control("tokenize", {"text": text}))["tokens"])
        body = {"model": await self._model_id(), "prompt": text, "content": text, "add_special_tokens": False}
        return tuple((await self._post("/tokenize", body)).get("tokens", ()))

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Text of ids; see Engine.detokenize."""
        if self._controls():
            return str((await self._control("detokenize", {"tokens": list(token_ids)}))["text"])
        data = await self._post("/detokenize", {"model": await self._model_id(), "tokens": list(token_ids)})
        return str(data.get("prompt", data.get("content", "")))

    async def warm(self, request: GenerateRequest) -> int:
        """Ask our own engine; 0 elsewhere."""
        if not self._controls():
            return 0
        return int((await self._control("warm", {**our_body(request, ""), "stream": False}))["cached_tokens"])

    async def forget(self, chat_id: str) -> None:
        """Ask our own engine; other servers keep nothing under that name."""
        if self._controls():
            await self._control("forget", {"chat_id": chat_id})

    async def load(self, model_id: str) -> ModelInfo:
        """Switch our own engine's model, or talk to another one of the server's list."""
        if self._controls():
            self._model = from_json(ModelInfo, (await self._control("load", {"model": model_id}))["model"])
            return self._model
        listed = await self._list_models()
        names = [entry["id"] for entry in listed]
        if model_id not in names:
            raise EngineError("model_not_found", f"No model {model_id!r} there; it has {', '.join(names)}.")
        self._settings = replace(self._settings, model=model_id)
        self._model = foreign_model(listed[names.index(model_id)])
        return self._model

    async def choose_drafter(self, choice: DrafterChoice) -> None:
        """Ask our own engine. Raises EngineError (`unsupported`) where the server chooses by itself."""
        if self._controls():
            await self._control(
                "drafter", {name: value for name, value in to_json(choice).items() if value is not None}
            )
        elif choice.drafter != "auto":
            raise EngineError("unsupported", "This server chooses its drafter itself; set it where it was started.")

    async def explain(self) -> TunerReport:
        """Ask our own engine. Raises EngineError (`unsupported`) elsewhere."""
        if not self._controls():
            raise EngineError("unsupported", "This server does not tell how it chooses its drafter.")
        return from_json(TunerReport, (await self._control("explain", {}))["report"])

    async def shutdown(self) -> None:
        """Stop our own engine process."""
        await self._control("shutdown", {})

    def pull(self, model_id: str) -> AsyncGenerator[Mapping[str, Any], None]:
        """Progress of fetching a model through our own engine."""
        return self._pull(model_id)

    async def aclose(self) -> None:
        """Close the connection: running requests end with `cancelled`; the engine goes on."""
        self._closed = True
        self._snapshot = replace(self._snapshot, state="stopped", stage="closed", active_requests=0)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._http.aclose()

    # Watching

    async def _watch(self) -> None:
        """Keep model and metrics fresh for ever; every failure is tried again."""
        pause_s = 0.1
        while True:
            try:
                await self._find_kind()
                if self._controls():
                    await self._follow_metrics()
                else:
                    await self._poll()
                pause_s = 0.1
                self._note_reached()
            except EngineError as error:
                self._refused, self._model = error, None
                self._snapshot = replace(self._snapshot, state="failed", stage=error.message, active_requests=0)
                self._changed.set()
                return
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                self._note_lost(error)
                pause_s = min(2.0, pause_s * 2)
            await asyncio.sleep(pause_s if self._unreachable_since_s else self._settings.poll_s)

    async def _find_kind(self) -> None:
        if not self._must_look:
            return
        if self._settings.find_url is not None:
            self._settings = replace(self._settings, url=await asyncio.to_thread(self._settings.find_url))
            self._http.base_url = httpx.URL(self._settings.root)
        listed = await self._list_models(patient=True)
        ours = any(entry.get("owned_by") == "localspec" for entry in listed)
        if not listed:
            # Our own port lists nothing while it loads, and says so under /health.
            ours = "stage" in await self._health()
            if not ours:
                raise ValueError("the server lists no models")
        self._kind, self._must_look = ("localspec" if ours else "other"), False

    async def _follow_metrics(self) -> None:
        headers = {CONTROL_HEADER: self._settings.control_key or ""}
        timeout = httpx.Timeout(30.0, connect=5.0)
        path = f"/localspec/v1/metrics?hz={1 / self._settings.poll_s:.3g}"
        async with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            await check(response)
            async for data in payloads(response):
                self._take_state(data)
                self._note_reached()

    def _take_state(self, state: dict[str, Any]) -> None:
        self._model = from_json(ModelInfo, state["model"]) if state.get("model") is not None else None
        self._snapshot = from_json(MetricsSnapshot, state["metrics"])
        if self._snapshot.state == "stopped" and self._settings.find_url is not None:
            self._note_not_ready()
        self._changed.set()

    async def _poll(self) -> None:
        if self._model is None or time.monotonic() - self._listed_s > LIST_INTERVAL_S:
            listed = await self._list_models(patient=True)
            if not listed:
                health = await self._health()
                failed = health.get("status") == "failed"
                stage = str(health.get("stage", ""))
                self._snapshot = replace(self._snapshot, state="failed" if failed else "loading", stage=stage)
                self._changed.set()
                return
            wanted = self._settings.model
            self._model = foreign_model(next((entry for entry in listed if entry["id"] == wanted), listed[0]))
            self._listed_s = time.monotonic()
        base = MetricsSnapshot(
            state="ready",
            model_id=self._model.id,
            device=self._settings.root,
            drafter=UNKNOWN,
            drafter_reason="chosen by the server",
            context_limit_tokens=self._model.context_limit_tokens,
        )
        page = await metrics_page(self._http)
        known = None if page is None else self._reader.read(page, base, time.monotonic())
        self._snapshot = known or replace(base, drafter_reason=NO_PAGE)
        self._changed.set()

    async def _health(self) -> dict[str, Any]:
        data = json_or_text(await self._http.get("/health"))
        return data if isinstance(data, dict) else {}

    def _note_reached(self) -> None:
        self._unreachable_since_s = None

    def _note_lost(self, error: Exception) -> None:
        if self._unreachable_since_s is None:
            self._unreachable_since_s = time.monotonic()
        self._must_look = True
        root = self._settings.root
        ours = self._settings.find_url is not None
        self._note_not_ready("starting the engine" if ours else f"no answer from {root} ({words(error)}), trying again")

    def _note_not_ready(self, stage: str = "waiting for the model") -> None:
        self._model = None
        self._snapshot = replace(
            self._snapshot, state="loading", stage=stage, active_requests=0, queued_requests=0, tok_per_s=0.0
        )
        self._changed.set()

    # Calls

    def _controls(self) -> bool:
        return self._settings.control_key is not None and self._kind != "other"

    async def _control(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._settings.control_key is None:
            raise EngineError("unsupported", "This needs the control key of an engine on this machine.")
        return await self._post(f"/localspec/v1/{call}", body, {CONTROL_HEADER: self._settings.control_key})

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        try:
            response = await self._http.post(path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise self._settings.no_answer() from error
        if response.status_code == 404 and not path.startswith("/localspec"):
            raise EngineError("unsupported", f"The server at {self._settings.root} has no {path}.")
        if response.status_code != 200:
            raise error_of(json_or_text(response), response.status_code)
        data = json_or_text(response)
        if not isinstance(data, dict):
            raise EngineError("internal", f"The server answered {path} with something that is no JSON object.")
        return data

    async def _list_models(self, patient: bool = False) -> list[dict[str, Any]]:
        """Models of the server. A refused key raises EngineError; `patient` lets httpx errors through."""
        try:
            response = await self._http.get("/v1/models", timeout=10.0)
        except httpx.HTTPError as error:
            if patient:
                raise
            raise self._settings.no_answer() from error
        if response.status_code in (401, 403, 404):
            raise error_of(json_or_text(response), response.status_code)
        data = json_or_text(response)
        entries = data.get("data") if isinstance(data, dict) else None
        if response.status_code != 200 or not isinstance(entries, list):
            raise httpx.RemoteProtocolError(f"status {response.status_code} from /v1/models")
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    async def _model_id(self) -> str:
        return (self._model or await self.wait_ready()).id

    async def _pull(self, model_id: str) -> AsyncGenerator[Mapping[str, Any], None]:
        headers = {CONTROL_HEADER: self._settings.control_key or ""}
        body = {"model": model_id}
        async with self._http.stream("POST", "/localspec/v1/pull", json=body, headers=headers) as response:
            await check(response)
            async for data in payloads(response):
                yield data
