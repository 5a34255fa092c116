"""Large bodies leave the process as it was."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from localspec.server import trim
from localspec.server.trim import LARGE_BODY_BYTES, HeapTrimmer
from tests.server.conftest import says, serving


async def test_many_wishes_are_one_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(trim, "TRIM_AFTER_S", 0.01)
    heap = HeapTrimmer()
    monkeypatch.setattr(heap, "_trim", lambda keep_bytes: calls.append(keep_bytes) or 1)
    for expected in (1, 2):
        for _ in range(5):
            heap.later()
        await asyncio.sleep(0.05)
        assert calls == [0] * expected


@pytest.mark.parametrize(("size", "trims"), [(LARGE_BODY_BYTES // 2, 0), (LARGE_BODY_BYTES * 2, 1)])
async def test_only_a_large_body_asks_for_it(monkeypatch: pytest.MonkeyPatch, size: int, trims: int) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(HeapTrimmer, "later", lambda heap: asked.append(True))
    body = {"messages": [{"role": "user", "content": "x" * size}], "temperature": "hot"}
    async with serving(says("x")) as address, httpx.AsyncClient(base_url=address) as http:
        reply = await http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "temperature")
    assert len(asked) == trims


async def test_a_body_may_be_blank_or_marked() -> None:
    async with serving(says("x")) as address, httpx.AsyncClient(base_url=address) as http:
        marked = await http.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "a"}')
        blank = await http.post("/v1/completions", content=b" \r\n")
        torn = await http.post("/v1/completions", content=b'{"prompt": "\xff"}')
    assert marked.status_code == 200
    assert blank.status_code == 400 and "JSON" not in blank.json()["error"]["message"]
    assert torn.json()["error"]["message"] == "The body is not UTF-8 text."
