"""A plain chat of each Python client with the demo model, over a real socket: real words from real weights."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine
from tests.server.conftest import serving
from tests.server.test_contract import LLM_YAML

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
ollama = pytest.importorskip("ollama")
pytest.importorskip("llm")
pytestmark = pytest.mark.torch

ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
ANSWER = "The capital of France is Paris."


async def ask_openai(address: str) -> str:
    async with openai.AsyncOpenAI(base_url=address + "/v1", api_key="x") as client:
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True, temperature=0)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def ask_anthropic(address: str) -> str:
    async with anthropic.AsyncAnthropic(base_url=address, api_key="x") as client:
        reply = await client.messages.create(model="claude-x", max_tokens=30, messages=ASK, extra_body=GREEDY)
        assert reply.stop_reason == "end_turn"
        return str(reply.content[0].text)


async def ask_ollama(address: str) -> str:
    reply = await ollama.AsyncClient(address).chat("m", ASK, options={"temperature": 0})
    return str(reply.message.content)


async def ask_llm(address: str, home: Path) -> str:
    (home / "extra-openai-models.yaml").write_text(LLM_YAML.replace("BASE", address))
    command = [sys.executable, "-m", "llm", "-m", "local", "-o", "temperature", "0", ASK[0]["content"]]
    env = {**os.environ, "LLM_USER_PATH": str(home), "HOME": str(home)}
    done = await asyncio.to_thread(subprocess.run, command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_the_demo_model_answers_every_python_client(demo_folder: Path, tmp_path: Path) -> None:
    place = ModelPlace("smollm2-135m", demo_folder, "demo")
    engine = LocalEngine(lambda model_id, report: place, EngineOptions(device="cpu", context_tokens=512))
    engine.start("smollm2-135m")
    async with serving(engine) as address:
        await engine.wait_ready()
        said = [await ask_openai(address), await ask_anthropic(address), await ask_ollama(address)]
        said.append(await ask_llm(address, tmp_path))
        accepted = {client.name for client in engine.metrics().clients}
    assert said == [ANSWER] * 4
    assert len(accepted) == 4, "each client has counters of its own"
