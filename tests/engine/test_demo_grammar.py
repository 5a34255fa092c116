"""The demo model under five schemas: every answer parses and validates, with and without drafts the same tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from localspec.api.types import Delta, Done, GenerateRequest, Grammar, Message, Sampling
from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine

pytestmark = [pytest.mark.demo, pytest.mark.torch]


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 16}
SCHEMAS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Describe Paris.", record(name=WORD, country=WORD, capital={"type": "boolean"})),
    ("How do you like rain?", record(mood={"enum": ["good", "bad", "so-so"]})),
    ("List three colours.", record(colours={"type": "array", "items": WORD, "minItems": 3, "maxItems": 3})),
    (
        "A point in the plane.",
        record(at=record(x={"type": "integer", "minimum": -9, "maximum": 99}, y={"anyOf": [WORD, {"type": "null"}]})),
    ),
    ("When was the moon landing?", record(date={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"})),
)
LAWS = (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=4))


@pytest.fixture(scope="module")
def engine(demo_folder: Path) -> Iterator[LocalEngine]:
    torch.set_num_threads(1)  # short steps: on a busy machine more threads wait for each other
    place = ModelPlace("demo", demo_folder, "demo", demo=True)
    local = LocalEngine(lambda model_id, report: place, EngineOptions(device="cpu", context_tokens=512))
    local.start("demo")
    asyncio.run(local.wait_ready())
    yield local
    asyncio.run(local.aclose())


async def answer(engine: LocalEngine, drafter: str, number: int) -> tuple[list[int], str, Done]:
    prompt, schema = SCHEMAS[number]
    request = GenerateRequest(
        messages=(Message("user", f"{prompt} Answer with JSON like {json.dumps(list(schema['properties']))}."),),
        sampling=LAWS[number % 2],
        max_tokens=120,
        drafter=drafter,
        depth=4,
        grammar=Grammar("json_schema", json.dumps(schema)),
    )
    ids: list[int] = []
    text = ""
    done: Done | None = None
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                ids.extend(event.token_ids)
                text += event.text
            elif isinstance(event, Done):
                done = event
    assert done is not None
    return ids, text, done


def test_answers_validate_and_drafting_changes_nothing(engine: LocalEngine) -> None:
    async def compare() -> None:
        found: dict[str, list[list[int]]] = {}
        for drafter in ("ngram", "off"):
            answers = await asyncio.gather(*(answer(engine, drafter, number) for number in range(4)))
            answers.append(await answer(engine, drafter, 4))
            for number, (_, text, done) in enumerate(answers):
                assert done.finish_reason == "stop", text
                jsonschema.validate(json.loads(text), SCHEMAS[number][1])
            found[drafter] = [ids for ids, _, _ in answers]
        # Alone too: neighbours change nothing.
        found["alone"] = [(await answer(engine, "off", 1))[0]]
        assert found["ngram"] == found["off"]
        assert found["alone"] == found["off"][1:2]

    asyncio.run(compare())
