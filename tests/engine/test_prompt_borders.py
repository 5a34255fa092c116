"""Where system message and tools end, and that a state is kept there from the first conversation on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.api.types import GenerateRequest, Message
from localspec.core.records import PAGE_TOKENS
from localspec.engine.build import Assembled, EngineOptions, ModelPlace, build
from localspec.engine.text import TextStage
from tests.helpers.engine import run
from tests.helpers.tiny_text import tiny_text_model

pytestmark = pytest.mark.torch
SYSTEM = Message("system", "You answer in one short sentence and never in two. " * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text_model("qwen3_5", 1, tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(folder: Path) -> TextStage:
    return TextStage(folder, 1024)


@pytest.fixture
def parts(folder: Path) -> Iterator[Assembled]:
    options = EngineOptions(device="cpu", context_tokens=1024)
    parts = build(ModelPlace("tiny", folder, "tiny"), options, lambda stage: None).parts
    parts.loop.start()
    yield parts
    parts.loop.stop()


def asked(*messages: Message, **more: object) -> GenerateRequest:
    return GenerateRequest(messages=messages, max_tokens=4, **more)  # type: ignore[arg-type]


def test_what_every_conversation_begins_with(text: TextStage) -> None:
    one = text.prepare(asked(SYSTEM, Message("user", "Where is the river?"))).request
    two = text.prepare(asked(SYSTEM, Message("user", "Who are you?"), Message("assistant", "I."))).request
    shared = one.shared_tokens
    assert shared == two.shared_tokens and one.prompt_ids[:shared] == two.prompt_ids[:shared]
    rendered = text.tokenizer.decode(one.prompt_ids[:shared], skip_special=False)
    assert rendered.startswith("[system]" + SYSTEM.content) and "river" not in rendered and len(rendered) < 180


def test_nothing_is_shared_without_system_message_and_tools(text: TextStage) -> None:
    assert text.prepare(asked(Message("user", "Where is the river?"))).request.shared_tokens == 0
    assert text.prepare(GenerateRequest(prompt="Where is it?", max_tokens=4)).request.shared_tokens == 0


def test_the_second_conversation_resumes_after_the_system_message(parts: Assembled, text: TextStage) -> None:
    requests = [
        text.prepare(asked(SYSTEM, Message("user", question))).request
        for question in ("Where is the river? " * 9, "Who has seen the lake? " * 9)
    ]
    first, second = [run(parts, [request])[0] for request in requests]
    assert first.cached_tokens == 0
    assert second.cached_tokens == requests[0].shared_tokens // PAGE_TOKENS * PAGE_TOKENS > 0
