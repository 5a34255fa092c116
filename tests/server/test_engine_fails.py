"""A server whose engine's device failed for good ends with a word, so that who started it can start it again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from localspec.api.scripted import ScriptedEngine
from localspec.api.types import EngineError, MetricsSnapshot
from localspec.server import serve as serving
from localspec.server.settings import ServerSettings


class Failing(ScriptedEngine):
    has_failed = False

    def metrics(self) -> MetricsSnapshot:
        now = super().metrics()
        return replace(now, state="failed", stage="the device does not answer any more") if self.has_failed else now


async def test_a_server_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WATCH_S", 0.02)
    engine = Failing()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serving.serve(engine, ServerSettings(port=0, control_key="k"), None, address.set_result))
    async with httpx.AsyncClient(base_url=await address, timeout=20) as client:
        assert (await client.get("/health")).status_code == 200
        engine.has_failed = True
        with pytest.raises(EngineError, match="does not answer any more; start it again"):
            await asyncio.wait_for(task, 60)
