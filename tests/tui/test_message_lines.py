"""One message as strips, and the answer that it is made of."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from localspec.api.types import Delta, Done, Phase, Prefill, Queued, Span, Timings, Usage
from localspec.chats import Stored
from localspec.tui.answer import Answer
from localspec.tui.draft_view import draft_runs, draft_summary
from localspec.tui.markdown import MarkdownRenderer
from localspec.tui.message_lines import Look, MessageLines, answer_figures
from localspec.tui.origins import style_of
from localspec.tui.wrap import wrap_runs, wrap_text

LOOK = Look(40, MarkdownRenderer())
LOOK_STYLE = Style(bold=True)


def delta(text: str, origin: str = "target", phase: Phase = Phase.ANSWER, rejected: int = 0) -> Delta:
    return Delta(text, (1,), (Span(len(text), origin, phase),), rejected)


def lines(message: Stored, look: Look = LOOK, note: str = "") -> list[str]:
    view = MessageLines(message)
    view.update(message, note)
    return [strip.text.rstrip() for strip in view.strips(look)]


def test_answer_collects_text_thought_origins_and_refusals() -> None:
    ticks = iter([10.0, 12.5])
    answer = Answer(clock=lambda: next(ticks))
    answer.take(Queued(1))
    assert answer.status == "waits for 1 other request"
    answer.take(Prefill(10, 20, 5, "new system prompt"))
    assert answer.status == "reads the prompt: 10 of 20 tokens, 5 from the cache"
    answer.take(delta("<think>", phase=Phase.THINKING))
    answer.take(delta("hm ", phase=Phase.THINKING, rejected=1))
    answer.take(delta("so</think>", "ngram", Phase.THINKING))
    answer.take(delta("Ye", "ngram"))
    answer.take(delta("s", "ngram", rejected=3))
    answer.take(Done("stop", Usage(20, 5, 5, 2), Timings(tok_per_s=8.0, draft_n=4, draft_n_accepted=3)))
    assert (answer.reasoning, answer.content, answer.state, answer.status) == ("hm so", "Yes", "done", "")
    assert answer.reasoning_s == 2.5
    assert answer.spans == [(3, "target", "thinking"), (2, "ngram", "thinking"), (3, "ngram", "answer")]
    assert answer.rejections == [(3, 1), (8, 3)]
    stored = answer.stored(Stored("assistant", "", 7, id=8, chat_id="c", model_id="m"))
    assert (stored.parent_id, stored.id, stored.chat_id, stored.model_id) == (7, 8, "c", "m")
    assert stored.stats["cache_miss_reason"] == "new system prompt"
    assert answer_figures(stored) == "5 tokens · 5/20 cached · 8.0 tok/s · 75% accepted"


@pytest.mark.parametrize(
    ("reason", "content", "said"),
    [
        ("length", "text", "the token limit was reached"),
        ("length", " ", "the thought used the whole"),
        ("stop", "x", ""),
    ],
)
def test_an_early_end_is_said(reason: str, content: str, said: str) -> None:
    answer = Answer()
    answer.take(delta(content))
    answer.take(Done(reason, Usage(1, 1), Timings()))  # type: ignore[arg-type]
    assert answer.status.startswith(said) and bool(answer.status) == bool(said)


def test_text_of_a_server_without_spans_is_kept() -> None:
    answer = Answer()
    answer.take(Delta("plain ", (), ()))
    answer.take(Delta("words", (), ()))
    message = replace(answer.stored(Stored("assistant", "")), state="done")
    assert answer.content == "plain words"
    assert draft_summary(message) == "This server does not say who drafted what."
    assert "".join(text for text, _ in draft_runs(message)) == "plain words"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_draft_view_shows_every_character_once(seed: int) -> None:
    rng = random.Random(seed)
    answer, refused = Answer(), 0
    phases = [Phase.THINKING] * rng.randint(0, 4) + [Phase.ANSWER] * rng.randint(1, 8)
    for phase in phases:
        text = "".join(rng.choice("ab \n€") for _ in range(rng.randint(0, 6)))
        count = rng.choice([0, 0, 1, 5])
        refused += count
        answer.take(delta(text, rng.choice(["target", "ngram"]), phase, count))
    message = answer.stored(Stored("assistant", ""))
    parts = [text for text, _ in draft_runs(message)]
    counts = [int(text.strip()[1:]) for text in parts if text.startswith("  ×")]
    shown = "".join(text for text in parts if not text.startswith("  ×"))
    wanted = message.reasoning + message.content
    assert shown.replace("\n", "") == wanted.replace("\n", "")
    assert sum(counts) == refused


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab €中🙂\t\n", max_size=80), st.integers(1, 30))
def test_wrapping_loses_no_character_and_no_width(text: str, width: int) -> None:
    strips = wrap_text(text, width)
    assert all(sum(segment.cell_length for segment in strip) <= max(width, 2) for strip in strips)
    kept = "".join(strip.text for strip in strips)
    assert "".join(kept.split()) == "".join(text.split())


def test_wrapping_keeps_styles_with_their_characters() -> None:
    strips = wrap_runs([("aaa bb", None), ("b cc\ncc", LOOK_STYLE), ("d", None)], 4)
    assert [strip.text for strip in strips] == ["aaa", "bbb", "cc", "ccd"]
    styled = "".join(segment.text for strip in strips for segment in strip if segment.style == LOOK_STYLE)
    assert styled == "bcccc"


def test_thought_is_folded_until_asked_for() -> None:
    message = Stored("assistant", "Done.", reasoning="one\ntwo", stats={"reasoning_s": 3.21, "reasoning_tokens": 12})
    assert lines(message) == ["Assistant", "▸ Thought 3.2 s · 12 tokens", "Done.", ""]
    opened = lines(message, replace(LOOK, thoughts_open=True))
    assert opened == ["Assistant", "▾ Thought 3.2 s · 12 tokens", "one", "two", "", "Done.", ""]
    thinking = replace(message, content="", state="streaming")
    assert lines(thinking)[1].startswith("▸ Thinking")


def test_how_an_answer_ended_is_shown() -> None:
    assert lines(Stored("assistant", "So", state="interrupted"))[-3:-1] == [
        "(cut off when localspec ended; /retry",
        "answers again)",
    ]
    assert lines(Stored("assistant", "", state="streaming"), note="reads the prompt")[-2] == "(reads the prompt)"
    assert lines(Stored("user", "a\x1b[1mb"))[1] == "a\ufffd[1mb"
    assert lines(Stored("assistant", "x", model_id="evil\x1b[2J\n"))[0] == "evil\ufffd[2J"


def test_header_drops_whole_figures_where_there_is_no_room() -> None:
    timings = {"tok_per_s": 121.74, "draft_n": 100, "draft_n_accepted": 76, "speedup_vs_plain": 0.76}
    usage = {"completion_tokens": 1200, "prompt_tokens": 1300, "cached_tokens": 1100}
    message = Stored("assistant", "x", None, model_id="smollm2-135m", stats={"timings": timings, "usage": usage})

    def header(width: int) -> str:
        return lines(message, Look(width, LOOK.renderer))[0].strip()

    assert header(90) == "smollm2-135m  1.2k tokens · 1.1k/1.3k cached · 121.7 tok/s · 76% accepted · ×0.76"
    assert header(78) == "smollm2-135m  1.2k tokens · 121.7 tok/s · 76% accepted · ×0.76"
    assert header(56) == "smollm2-135m  121.7 tok/s · 76% accepted · ×0.76"
    assert header(40) == "smollm2-135m  121.7 tok/s · ×0.76"
    assert header(14) == "smollm2-135m"


def test_growing_message_keeps_its_closed_lines() -> None:
    view = MessageLines(Stored("assistant", "", state="streaming"))
    text = "First paragraph.\n\nSecond one.\n\nThird"
    view.update(Stored("assistant", text[:30], state="streaming"))
    before = view.strips(LOOK)[1]
    view.update(Stored("assistant", text, state="streaming"))
    assert view.strips(LOOK)[1] is before
    view.update(Stored("assistant", text))
    assert [s.text.rstrip() for s in view.strips(LOOK)] == lines(Stored("assistant", text))


def test_drafters_can_be_told_apart_without_colour() -> None:
    names = ("target", "ngram", "ngram_disk", "mtp", "eagle3", "dflash", "dspark", "draft_model")
    looks = {name: (s.bold, s.italic, s.underline) for name in names for s in [style_of(name)]}
    assert len(set(looks.values())) == len(names)
    assert style_of("table:own") == style_of("ngram_disk")
    assert style_of("a drafter of elsewhere") == style_of("a drafter of elsewhere") != style_of("target")


_SIGNS = [
    "a", " ", "中", "é", "👩", "\u200d", "🚀", "👨\u200d👩\u200d👧", "\ufe0f", "⚠", "🏽", "🇩", "🇪", "1\ufe0f\u20e3",
    "\u00ad", "\u202e", "\u2066", "\u200b", "\ufeff", "\U000e0041", "ש", "\t", "ｶﾞ", "क्\u200dष",
]  # fmt: skip
ODD = st.lists(st.sampled_from(_SIGNS), max_size=30).map("".join)


@settings(max_examples=150, deadline=None)
@given(ODD | st.text(), st.integers(8, 40), st.booleans())
def test_every_terminal_counts_the_cells_of_a_line_alike(text: str, width: int, is_answer: bool) -> None:
    message = Stored("assistant", text) if is_answer else Stored("user", text)
    for strip in MessageLines(message).strips(Look(width, LOOK.renderer)):
        assert sum(map(cell_len, strip.text)) == strip.cell_length <= width
        assert not re.search("[\u202a-\u202e\u2066-\u2069\ufe0f\u00ad]", strip.text)


def test_what_is_copied_keeps_every_sign() -> None:
    text = "👩🏽\u200d🚀 ⚠\ufe0f"
    (block,) = MessageLines(Stored("assistant", text)).blocks(LOOK)
    assert block.text == text
    assert lines(Stored("assistant", text))[1] == "👩🚀 ⚠"


def test_a_picture_is_a_link_in_its_place() -> None:
    assert (
        lines(Stored("assistant", "See ![the map](http://x/y.png) here."))[1] == "See !the map (http://x/y.png) here."
    )


_FIGURES = st.sampled_from([None, True, -1, 3, 2.5, float("nan"), float("inf"), 10**400, "x", [], {"a": 1}])
_NAMES = st.sampled_from(["tok_per_s", "draft_n", "draft_n_accepted", "speedup_vs_plain", "completion_tokens"])
_COUNTS = st.dictionaries(_NAMES, _FIGURES)
_STATS = st.fixed_dictionaries(
    {"timings": _COUNTS | _FIGURES, "usage": _COUNTS | _FIGURES, "reasoning_s": _FIGURES, "reasoning_tokens": _FIGURES}
)
_PHASES = st.sampled_from(["thinking", "tool_call", ""])
_SPANS = st.lists(st.tuples(st.integers(0, 2**62) | st.integers(0, 9), st.text(max_size=3), _PHASES), max_size=4)
_REFUSALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2**62)), max_size=4)


@settings(max_examples=100, deadline=None)
@given(_STATS, _SPANS, _REFUSALS, st.booleans(), st.booleans())
def test_nothing_that_an_import_lets_in_breaks_the_drawing(
    stats: dict[str, object],
    spans: list[tuple[int, str, str]],
    refusals: list[tuple[int, int]],
    opened: bool,
    drafts: bool,
) -> None:
    message = Stored(
        "assistant", "an answer", reasoning="why", stats=stats, spans=tuple(spans), rejections=tuple(refusals)
    )
    look = Look(30, LOOK.renderer, opened, drafts)
    view = MessageLines(message)
    assert all(strip.cell_length <= 30 for strip in view.strips(look)) and view.blocks(look)
    answer_figures(message)
