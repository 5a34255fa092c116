"""Tool calls of an answer: found by what the engine says, read in each notation, shown folded and unfolded."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.api.remote import RemoteEngine, RemoteSettings
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.chats import Stored
from localspec.tui.calls import pretty, read_calls, split_calls
from localspec.tui.markdown import MarkdownRenderer
from localspec.tui.message_lines import Look, MessageLines
from tests.tui.fakes import ask, started, until
from tests.tui.openai_server import OtherServer, listening, vllm_page

LOOK = Look(50, MarkdownRenderer())
OPEN = Look(50, LOOK.renderer, thoughts_open=True)
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
QWEN = (
    "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
    "def f():\n    return 1\n</parameter>\n</function>\n</tool_call>"
)


def answer(*parts: tuple[str, str], state: str = "done") -> Stored:
    spans = tuple((len(text), "target", phase) for phase, text in parts)
    return Stored("assistant", "".join(text for _, text in parts), spans=spans, state=state)  # type: ignore[arg-type]


def shown(message: Stored, look: Look = LOOK) -> list[str]:
    return [strip.text.rstrip() for strip in MessageLines(message).strips(look)][1:-1]


def test_calls_are_folded_lines_between_the_text() -> None:
    message = answer(("answer", "I look it up.\n\n"), ("tool_call", HERMES + "\n" + QWEN), ("answer", "\n\nDone."))
    assert shown(message) == [
        "I look it up.",
        "",
        '▸ Call get_weather(city: "Paris", days: 3)',
        '▸ Call write_file(path: "a.py", text: "def f():\\n…',
        "",
        "Done.",
    ]
    assert shown(message, OPEN)[2:11] == [
        "▾ Call get_weather",
        '  city: "Paris"',
        "  days: 3",
        "▾ Call write_file",
        '  path: "a.py"',
        "  text:",
        "    def f():",
        "        return 1",
        "",
    ]
    blocks = MessageLines(message).blocks(LOOK)
    assert [(block.part, block.start, block.end) for block in blocks] == [
        ("text", 1, 2), ("call", 3, 4), ("call", 4, 5), ("text", 6, 7),
    ]  # fmt: skip
    assert json.loads(blocks[1].text)["name"] == "get_weather"


def test_an_answer_that_only_talks_of_calls_has_none() -> None:
    text = f"Write it so:\n\n```\n{HERMES}\n```\n"
    assert split_calls(text, ((len(text), "target", "answer"),)) == [(False, text)]
    assert split_calls(text, ()) == [(False, text)]
    assert "▸" not in "".join(shown(answer(("answer", text))))


def test_each_call_folds_by_itself() -> None:
    message = answer(("tool_call", HERMES + "\n" + QWEN))
    view = MessageLines(message)
    first, second = view.blocks(LOOK)
    view.toggle(second.fold, LOOK)
    assert [strip.text.rstrip() for strip in view.strips(LOOK)][1:4] == [
        '▸ Call get_weather(city: "Paris", days: 3)',
        "▾ Call write_file",
        '  path: "a.py"',
    ]
    view.toggle(second.fold, LOOK)
    view.toggle(first.fold, LOOK)
    assert [block.end - block.start for block in view.blocks(LOOK)] == [3, 1]


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"name": "f", "parameters": {"a": [1, {"b": null}]}}', "f", 'a: [\n  1,\n  {\n    "b": null\n  }\n]'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "f", "a: 1"),
        ('{"name": "f", "arguments": "plain"}', "f", '"plain"'),
        ('{"name": "f"}', "f", ""),
        ('{"name": "f", "arguments": {"a": 1', "f", '{"name": "f", "arguments": {"a": 1'),
        ("nothing known", "", "nothing known"),
        ("[" * 5000, "", "[" * 5000),
        ("<function=f>\n</function>", "f", ""),
        ("<function=f>\n<parameter=a>\n1\n", "f", 'a: "1"'),
        ('{"name": "e\\u001b[2Jv", "arguments": {"k\\u009b": "\\u001b]52;"}}', "e\ufffd[2Jv", 'k\ufffd: "\\u001b]52;"'),
    ],
)
def test_notations(body: str, name: str, arguments: str) -> None:
    (call,) = read_calls(f"<tool_call>\n{body}\n</tool_call>")
    assert (call.name, call.arguments.replace("\ufffd", "\ufffd")) == (name, arguments)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "\n", '{"name": "f", "arguments": ', '{"a": "b"}', "}", "<function=g>",
             "<parameter=p>", "</parameter>", "text", "\x1b[1m", "é🙂", '"', "\\"]
        ),
        max_size=14,
    ).map("".join),
    st.integers(2, 60),
    st.integers(0, 2**32),
)  # fmt: skip
def test_streamed_calls_equal_fresh_ones_and_stay_in_their_lines(text: str, width: int, seed: int) -> None:
    rng, view, position = random.Random(seed), MessageLines(Stored("assistant", "", state="streaming")), 0
    look = Look(width, LOOK.renderer, thoughts_open=bool(seed % 2))
    parts = [("answer", "Before.\n\n"), ("tool_call", text), ("answer", "\n\nAfter")]
    whole = answer(*parts)
    while position < len(whole.content):
        position += rng.randint(1, 7)
        spans, left = [], position
        for phase, part in parts:
            spans.append((max(0, min(left, len(part))), "target", phase))
            left -= len(part)
        view.update(Stored("assistant", whole.content[:position], spans=tuple(spans), state="streaming"))
        view.strips(look)
    view.update(whole)
    fresh = MessageLines(whole)
    assert view.strips(look) == fresh.strips(look)
    assert view.blocks(look) == fresh.blocks(look)
    for strip in fresh.strips(look):
        assert strip.cell_length <= max(2, width)
        assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in strip.text)


def test_results_are_pretty_and_long_ones_fold() -> None:
    message = Stored("tool", json.dumps({"rows": list(range(30)), "ok": True}))
    lines = shown(message)
    assert lines[:3] == ["{", '  "rows": [', "    0,"] and lines[-1] == "▸ 29 more lines"
    assert len(lines) == 7
    view = MessageLines(message)
    (block,) = view.blocks(LOOK)
    view.toggle(block.fold, LOOK)
    opened = [strip.text.rstrip() for strip in view.strips(LOOK)][1:-1]
    assert opened[-2:] == ["}", "▾ 35 lines"] and len(opened) == 36
    assert block.text == message.content
    assert shown(Stored("tool", "plain\x1b[1m")) == ["plain\ufffd[1m"]
    assert pretty("[" * 9999) == "[" * 9999


def test_a_call_that_is_being_written_says_so() -> None:
    part = '<tool_call>\n{"name": "get_weather", "arguments": {"ci'
    assert shown(answer(("tool_call", part), state="streaming"))[0].startswith("▸ Calling get_weather(")
    assert shown(answer(("tool_call", HERMES), state="streaming"))[0].startswith("▸ Call get_weather(")
    assert shown(answer(("tool_call", part), state="cancelled"))[0].startswith("▸ Call get_weather(")


async def test_calls_of_the_local_engine(tmp_path: Path) -> None:
    engine = ScriptedEngine(Script(replies=(Reply("Let me see.\n\n" + HERMES + "\n"),), thinks=True))
    async with started(engine, tmp_path) as (app, pilot):
        await ask(app, pilot, "weather?")
        assert '▸ Call get_weather(city: "Paris", days: 3)' in app.chat.transcript.plain_text
        assert "<tool_call>" not in app.chat.transcript.plain_text
        await pilot.press("ctrl+t")
        assert '  city: "Paris"' in app.chat.transcript.plain_text


class CallingServer(OtherServer):
    """Streams two calls argument by argument, as vLLM does."""

    async def _stream(self):  # type: ignore[no-untyped-def, override]
        def frame(delta: object, finish: str | None = None) -> str:
            return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n"

        yield frame({"role": "assistant", "content": "Two calls."})
        for index, (name, words) in enumerate((("get_weather", '{"city": "Oslo"}'), ("stop", "{}"))):
            call = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": ""}}
            yield frame({"tool_calls": [call]})
            for at in range(0, len(words), 4):
                yield frame({"tool_calls": [{"index": index, "function": {"arguments": words[at : at + 4]}}]})
        yield frame({}, "tool_calls") + "data: [DONE]\n\n"


async def test_calls_of_another_server(tmp_path: Path) -> None:
    async with listening(CallingServer(vllm_page)) as address:
        engine = RemoteEngine(RemoteSettings(address, poll_s=0.1))
        async with started(engine, tmp_path) as (app, pilot):
            await engine.wait_ready()
            await ask(app, pilot, "weather?")
            text = app.chat.transcript.plain_text
            assert 'Two calls.\n\n▸ Call get_weather(city: "Oslo")\n▸ Call stop\n' in text
            await pilot.press("alt+up", "down", "down", "enter", "c")
            assert '▾ Call get_weather\n  city: "Oslo"\n▸ Call stop' in app.chat.transcript.plain_text
            await until((tmp_path / "copied.txt").exists)
            copied = json.loads((tmp_path / "copied.txt").read_text())
            assert copied == {"name": "get_weather", "arguments": {"city": "Oslo"}}
        await engine.aclose()
