"""A scripted OpenAI server of another make on a real port: models, streamed answers, a /metrics page that moves."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Counters:
    """What a server counts; an answer moves it."""

    running: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0, 0, 0])


Page = Callable[[Counters], str | None]


def vllm_page(now: Counters) -> str:
    """As vLLM 0.1x writes it: labels of engine and model, `_total` and `_created` beside each other."""
    labels = 'engine="0",model_name="org/model-27b"'
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} {now.running}.0",
        f"vllm:num_requests_waiting{{{labels}}} 2.0",
        f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 2.0',
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.3412",
        f"vllm:prefix_cache_queries_total{{{labels}}} 200.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} 150.0",
        f"vllm:generation_tokens_total{{{labels}}} {float(now.tokens)}",
        f"vllm:generation_tokens_created{{{labels}}} 1.789056823729462e+09",
        f'vllm:iteration_tokens_total_bucket{{{labels},le="+Inf"}} 12.0',
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(now.drafts)}",
        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.789056823729462e+09",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(now.drafted)}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(sum(now.accepted_at))}",
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{at}"}} {float(count)}'
        for at, count in enumerate(now.accepted_at)
    ]
    return "\n".join(lines) + "\n"


def sglang_page(now: Counters) -> str:
    """As SGLang writes it: gauges by rank, the queue once in all and once by priority."""
    ranks = 'dp_rank="0",engine_type="unified",model_name="org/model-27b"'
    return "\n".join(
        [
            f'sglang:num_running_reqs{{{ranks},tp_rank="0"}} {now.running}.0',
            f'sglang:num_running_reqs{{{ranks},tp_rank="1"}} {now.running}.0',
            f'sglang:num_queue_reqs{{{ranks},priority="",tp_rank="0"}} 3.0',
            f'sglang:num_queue_reqs{{{ranks},priority="1",tp_rank="0"}} 3.0',
            f'sglang:gen_throughput{{{ranks},tp_rank="0"}} 99.5',
            f'sglang:token_usage{{{ranks},tp_rank="0"}} 0.25',
            f'sglang:cache_hit_rate{{{ranks},tp_rank="0"}} 0.75',
            f'sglang:spec_accept_length{{{ranks},tp_rank="0"}} 2.5',
            f'sglang:spec_accept_rate{{{ranks},tp_rank="0"}} 0.6',
            f'sglang:generation_tokens_total{{model_name="org/model-27b"}} {float(now.tokens)}',
        ]
    )


class OtherServer:
    """Answers with `text` word by word, three drafted tokens a step of which two are accepted."""

    def __init__(
        self, page: Callable[[Counters], str | None], text: str = "word " * 30, tok_per_s: float = 200
    ) -> None:
        self.page = page
        self.text = text
        self.tok_per_s = tok_per_s
        self.counters = Counters()
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.lists = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/metrics", self._metrics),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        self.lists += 1
        return JSONResponse({"data": [{"id": "org/model-27b", "owned_by": "vllm", "max_model_len": 32768}]})

    async def _metrics(self, request: Request) -> Response:
        page = self.page(self.counters)
        return PlainTextResponse("no such page", 404) if page is None else PlainTextResponse(page)

    async def _chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        now = self.counters
        now.running += 1
        words = self.text.split(" ")
        try:
            for at in range(0, len(words), 3):
                piece = " ".join(words[at : at + 3]) + (" " if at + 3 < len(words) else "")
                now.tokens += 3
                now.drafts += 1
                now.drafted += 3
                now.accepted_at[0] += 1
                now.accepted_at[1] += 1
                yield _frame({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
                await asyncio.sleep(3 / self.tok_per_s)
            yield _frame({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 9, "completion_tokens": now.tokens}
            yield _frame({"choices": [], "usage": usage}) + "data: [DONE]\n\n"
        finally:
            now.running -= 1


def _frame(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@asynccontextmanager
async def listening(server: OtherServer, port: int = 0) -> AsyncIterator[str]:
    """Address of a running server; it is gone afterwards."""
    with socket.socket() as here:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        here.bind(("127.0.0.1", port))
        config = uvicorn.Config(server.app(), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        running = uvicorn.Server(config)
        running.capture_signals = _no_signals  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(running.serve(sockets=[here]))
        while not running.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{here.getsockname()[1]}"
        finally:
            running.should_exit = True
            await task


class _no_signals:
    """The tests keep their own signal handlers."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...
