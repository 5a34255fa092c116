"""Text in and out: template, history that keeps its tokens, characters and stop strings across token borders."""

from __future__ import annotations

import json
import random
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.api.types import EngineError, GenerateRequest, Message, Phase, Sampling
from localspec.engine.template import ChatTemplate
from localspec.engine.text import TextStage
from localspec.engine.text_stream import PhaseTracker, TextStream
from localspec.engine.token_bound import TokenBound, token_bound
from localspec.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.demo
TEXTS = (
    "Plain words, then 12345 and 日本語 and emoji 👩‍👩‍👧‍👦 family, naïve café.\n\n```python\nprint('x')\n```",
    "ﬀ ligature, Ω≈ç√, tabs\tand  spaces   , \u202e right to left, 🏳️‍🌈🇩🇪",
    "кириллица, العربية, हिन्दी, 한국어, ไทย",
)


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer(demo_folder)


@pytest.fixture(scope="module")
def text(demo_folder: Path) -> TextStage:
    return TextStage(demo_folder, 512)


def phases() -> PhaseTracker:
    return PhaseTracker(False, (None, None), (None, None))


def streamed(tokenizer: Tokenizer, ids: tuple[int, ...], stops: tuple[str, ...], seed: int) -> tuple[str, str | None]:
    """Text and stop string of `counted`."""
    return counted(tokenizer, ids, stops, seed)[:2]


def counted(
    tokenizer: Tokenizer, ids: tuple[int, ...], stops: tuple[str, ...], seed: int
) -> tuple[str, str | None, int]:
    """Push ids in random runs; checks that spans cover the text and that no piece holds half a character.

    Returns the text, the stop string that ended it, and how many tokens counted.
    """
    stream = TextStream(tokenizer, stops, (), phases())
    generator = random.Random(seed)
    out, index, seen = "", 0, 0
    while index < len(ids):
        run = ids[index : index + generator.randint(1, 5)]
        index += len(run)
        piece = stream.push(run, ["target"] * len(run))
        assert sum(span.n_chars for span in piece.spans) == len(piece.text)
        assert "\N{REPLACEMENT CHARACTER}" not in piece.text
        out += piece.text
        seen += len(piece.token_ids)
        if piece.stop_text is not None:
            return out, piece.stop_text, seen
    tail = stream.finish()
    assert seen + len(tail.token_ids) == len(ids)
    return out + tail.text, tail.stop_text, len(ids)


@pytest.mark.parametrize("source", TEXTS)
def test_streamed_text_is_the_text(tokenizer: Tokenizer, source: str) -> None:
    ids = tokenizer.encode(source)
    for seed in range(5):
        assert streamed(tokenizer, ids, (), seed) == (source, None)


@settings(max_examples=80, deadline=None)
@given(source=st.text(alphabet="ab\n 🙂é日", min_size=1, max_size=60), cut=st.data())
def test_a_stop_string_ends_the_text_wherever_tokens_part(
    tokenizer: Tokenizer, source: str, cut: st.DataObject
) -> None:
    start = cut.draw(st.integers(0, len(source) - 1))
    stop = source[start : start + cut.draw(st.integers(1, 6))]
    ids = tokenizer.encode(source)
    whole, _ = streamed(tokenizer, ids, (), 1)
    assert whole == source
    shown, found = streamed(tokenizer, ids, (stop, "never to be seen"), 1)
    assert found == stop and shown == source[: source.index(stop)]


def test_what_follows_a_stop_string_in_a_run_does_not_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("1. 1\n2. 2\n3. 3\n4. 4\n")
    counts = {counted(tokenizer, ids, ("\n2. 2",), seed) for seed in range(8)}
    [(text, stop, tokens)] = counts
    assert (text, stop) == ("1. 1", "\n2. 2") and tokens < len(ids) / 2


def test_a_half_stop_string_is_shown_in_the_end(tokenizer: Tokenizer) -> None:
    shown, found = streamed(tokenizer, tokenizer.encode("one two thr"), ("three",), 3)
    assert (shown, found) == ("one two thr", None)


def test_bytes_that_are_no_character_are_shown_in_the_end(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("日")[:1]
    stream = TextStream(tokenizer, (), (), phases())
    assert stream.push(half, ["target"]).text == ""
    assert stream.finish().text == "\N{REPLACEMENT CHARACTER}"


def test_origins_follow_the_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    stream = TextStream(tokenizer, (), (), phases())
    piece = stream.push(ids, ["target", "ngram", "ngram"])
    assert [(span.origin, span.n_chars) for span in piece.spans] == [("target", 3), ("ngram", 10)]


def test_phases_follow_the_markers() -> None:
    tracker = PhaseTracker(True, (10, 11), (20, 21))
    seen = [tracker.see(token) for token in (1, 2, 11, 3, 20, 4, 21, 5)]
    think, answer, tool = Phase.THINKING, Phase.ANSWER, Phase.TOOL_CALL
    assert seen == [think, think, think, answer, tool, tool, tool, answer]
    assert tracker.thinking_tokens == 3


def test_history_keeps_its_tokens(text: TextStage) -> None:
    first = (Message("user", "Say something."),)
    prepared = text.prepare(GenerateRequest(messages=first))
    # The model may split a word otherwise than the tokenizer would.
    odd = (*text.tokenizer.encode("Hel"), *text.tokenizer.encode("lo"), *text.stop_ids[:1])
    assert odd[:-1] != text.tokenizer.encode("Hello")
    text.remember(prepared, odd)
    second = (*first, Message("assistant", "Hello"), Message("user", "Again."))
    again = text.prepare(GenerateRequest(messages=second)).request.prompt_ids
    whole = (*prepared.request.prompt_ids, *odd)
    assert again[: len(whole)] == whole
    assert text.tokenizer.decode(again, skip_special=False).endswith("<|im_start|>assistant\n")


def test_context_overflow_names_both_numbers(text: TextStage) -> None:
    with pytest.raises(EngineError, match=r"it has \d+ tokens, .* maximum context length is 512 tokens") as caught:
        text.prepare(GenerateRequest(prompt="word " * 600))
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_that_does_not_fit_is_counted(text: TextStage) -> None:
    asked = GenerateRequest(messages=(Message("user", "word " * 60_000),))
    with pytest.raises(EngineError, match="too long"):
        text.prepare(asked)
    assert 60_000 < text.count_tokens(asked) < 60_100
    fits = GenerateRequest(messages=(Message("user", "one word"),))
    assert text.count_tokens(fits) == len(text.prepare(fits).request.prompt_ids)
    with pytest.raises(EngineError, match="exactly one"):
        text.count_tokens(GenerateRequest())


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(text: TextStage, monkeypatch: Any) -> None:
    most_chars = text.tokenizer.bound.most_chars
    assert most_chars is not None
    # The longest token itself, again and again: the fewest tokens that so much text can have.
    longest = max(
        (text.tokenizer.decode([i], skip_special=False) for i in range(text.tokenizer.vocab_size)),
        key=lambda piece: len(piece) if len(text.tokenizer.encode(piece)) == 1 else 0,
    )
    assert len(longest) <= most_chars
    assert len(text.prepare(GenerateRequest(prompt=longest * 400)).request.prompt_ids) <= 512
    monkeypatch.setattr(text.tokenizer, "encode", lambda _: pytest.fail("tokenised"))
    with pytest.raises(
        EngineError, match=r"it has at least 512 tokens, .* maximum context length is 512 tokens"
    ) as caught:
        text.prepare(GenerateRequest(prompt="a" * (511 * most_chars + 1)))
    assert caught.value.code == "context_length_exceeded"


def test_other_threads_run_while_a_text_is_tokenised(tokenizer: Tokenizer) -> None:
    gaps_s: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last_s = time.monotonic()
        while not done.wait(0.002):
            gaps_s.append(time.monotonic() - last_s)
            last_s = time.monotonic()

    ticker = threading.Thread(target=tick)
    ticker.start()
    began_s = time.monotonic()
    tokenizer.encode("word " * 300_000)
    took_s = time.monotonic() - began_s
    done.set()
    ticker.join()
    assert max(gaps_s) < took_s / 2


BYTES = dict.fromkeys([*map(chr, range(0x21, 0x144)), "abcd"], 0)
BYTE_LEVEL: dict[str, Any] = {"model": {"type": "BPE", "vocab": BYTES}, "pre_tokenizer": {"type": "ByteLevel"}}
REMOVES = {"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"}]}


@pytest.mark.parametrize(
    ("change", "most_chars"),
    [
        ({}, 4),
        ({"normalizer": {"type": "NFC"}}, 16),
        ({"added_tokens": [{"content": "<|end|>", "lstrip": False, "rstrip": False}]}, 7),
        ({"added_tokens": [{"content": "<mask>", "lstrip": True, "rstrip": False}]}, None),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}}, None),
        ({"pre_tokenizer": REMOVES}, None),
        ({"pre_tokenizer": {"type": "Metaspace"}}, None),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "ab": 1}}}, None),
        ({"model": {"type": "WordPiece", "vocab": BYTES}}, None),
        ({"truncation": {"max_length": 8}}, None),
    ],
)
def test_where_the_length_of_tokens_is_bounded(change: dict[str, Any], most_chars: int | None) -> None:
    assert token_bound({**BYTE_LEVEL, **change}) == TokenBound(most_chars)


@given(st.text(st.sampled_from("ab \x04\x06\U000c1234é日\n"), max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_text_has_fewer_tokens_than_told(tokenizer: Tokenizer, source: str) -> None:
    assert "\x04" in tokenizer.bound.dropped
    assert tokenizer.bound.least_tokens(source * 9) <= len(tokenizer.encode(source * 9))


@pytest.mark.parametrize(
    ("request_", "words", "param"),
    [
        (GenerateRequest(), "exactly one of", None),
        (GenerateRequest(prompt="a", prompt_token_ids=(1,)), "exactly one of", None),
        (GenerateRequest(prompt=""), "the prompt is empty", "prompt"),
        (GenerateRequest(prompt_token_ids=(1, 49999)), "49999", "prompt"),
        (GenerateRequest(prompt="a", sampling=Sampling(temperature=-1)), "temperature", "temperature"),
        (GenerateRequest(prompt="a", sampling=Sampling(top_p=0)), "top_p", "top_p"),
        (GenerateRequest(prompt="a", sampling=Sampling(min_p=2)), "min_p", "min_p"),
        (GenerateRequest(prompt="a", sampling=Sampling(top_k=-1)), "top_k", "top_k"),
        (GenerateRequest(prompt="a", sampling=Sampling(logit_bias=((60000, 1.0),))), "logit_bias", "logit_bias"),
    ],
)
def test_wrong_requests_say_what_is_wrong(
    text: TextStage, request_: GenerateRequest, words: str, param: str | None
) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        text.prepare(request_)
    assert (caught.value.code, caught.value.param) == ("bad_request", param)


def test_the_last_assistant_message_can_be_continued(text: TextStage) -> None:
    messages = (Message("user", "Count."), Message("assistant", "One, two,"))
    prepared = text.prepare(GenerateRequest(messages=messages, continue_final_message=True))
    assert prepared.prompt_text is not None and prepared.prompt_text.endswith("One, two,")


def test_the_template_equals_the_authors_rendering(demo_folder: Path, text: TextStage) -> None:
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_file=str(demo_folder / "tokenizer.json"))
    source = text.tokenizer.config["chat_template"]
    for messages in (
        [Message("user", "Hi <b>")],
        [Message("system", "Be terse."), Message("user", "Hi"), Message("assistant", "Yo"), Message("user", "Bye")],
    ):
        plain = [{"role": m.role, "content": m.content} for m in messages]
        expected = other.apply_chat_template(plain, chat_template=source, tokenize=False, add_generation_prompt=True)
        assert text.template is not None and text.template.render(messages, (), {}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ '{missing}'.format() }}",
    ],
)
def test_a_hostile_template_is_refused(source: str) -> None:
    template = ChatTemplate(source, {}, lambda: datetime(2026, 1, 1))
    with pytest.raises(EngineError):
        template.render([Message("user", "x")], (), {})


def with_defaults(demo_folder: Path, folder: Path, defaults: dict[str, Any]) -> TextStage:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(demo_folder / name)
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return TextStage(folder, 512)


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, Sampling(temperature=0.6, top_k=20)),
        ({"do_sample": True, "temperature": None, "top_k": None, "top_p": None}, Sampling(temperature=1.0)),
        ({"temperature": None, "top_p": None}, Sampling()),
        ({"temperature": 0.5, "top_k": -1, "top_p": 0.0, "repetition_penalty": 0}, Sampling(temperature=0.5)),
        ({"temperature": 1000.0, "top_k": "many"}, Sampling(temperature=1.0)),
    ],
)
def test_defaults_that_no_request_could_ask_for_are_none(
    demo_folder: Path, tmp_path: Path, defaults: dict[str, Any], expected: Sampling
) -> None:
    text = with_defaults(demo_folder, tmp_path, defaults)
    assert text.default_sampling() == expected
    text.prepare(GenerateRequest(prompt="x", sampling=text.default_sampling()))


@pytest.mark.parametrize(("temperature", "prepared"), [(1e-38, 0.0), (5e-324, 0.0), (1e-5, 1e-5)])
def test_a_temperature_that_logits_cannot_be_divided_by_is_none(
    text: TextStage, temperature: float, prepared: float
) -> None:
    """Logits that became infinite would make the lowest token id win."""
    request = GenerateRequest(prompt="x", sampling=Sampling(temperature=temperature))
    assert text.prepare(request).request.sampling.temperature == prepared


def test_a_demanded_tool_whose_schema_does_not_compile_is_named(text: TextStage) -> None:
    def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    good = tool("good", {"type": "object", "properties": {"a": {"type": "string"}}})
    odd = tool("odd", {"type": "object", "properties": {"a": {"type": "string", "pattern": r"(a)\1"}}})
    ask = {"messages": (Message("user", "x"),), "tools": (good, odd)}
    demanded = GenerateRequest(**ask, template_options={"tool_choice": "required"})
    with pytest.raises(
        EngineError, match=r"parameters of the tool 'odd' cannot be demanded: .*backreferences"
    ) as caught:
        text.constrain(demanded, text.prepare(demanded))
    assert caught.value.code == "bad_request"
    free = GenerateRequest(**ask, template_options={"parallel_tool_calls": False})
    assert text.constrain(free, text.prepare(free)) is None
