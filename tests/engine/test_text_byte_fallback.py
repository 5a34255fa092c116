"""Tokenizers that fall back to bytes and put a space before a text: what is shown and remembered is the text."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from localspec.engine.text_stream import PhaseTracker, TextStream
from localspec.engine.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = "\u2581abcdefghijklmnopqrstuvwxyz"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Letters and bytes alone, with the rules of sentencepiece models."""
    vocab = {token: i for i, token in enumerate(("<unk>", *BYTES, *LETTERS))}
    fast = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path_factory.mktemp("byte_fallback")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def shown(tokenizer: Tokenizer, ids: tuple[int, ...], prompt_ids: tuple[int, ...] = ()) -> str:
    phases = PhaseTracker(False, (None, None), (None, None))
    stream = TextStream(tokenizer, (), (), phases, prompt_ids)
    return "".join(stream.push((i,), ("target",)).text for i in ids) + stream.finish().text


SOURCES = ("hello world", "ab " + "🙂é漢" * 40 + " and on" * 20, "漢字仮名交文" * 30, "é" * 99)


@pytest.mark.parametrize("source", SOURCES, ids=("letters", "mixed", "three_bytes", "two_bytes"))
def test_text_in_bytes_is_shown_whole_behind_any_prompt(tokenizer: Tokenizer, source: str) -> None:
    ids = tokenizer.encode(source)
    assert tokenizer.decode(ids) == source
    assert shown(tokenizer, ids) == source
    for cut in (1, 2, 7, 18):
        before = tokenizer.encode(source[:cut])
        assert shown(tokenizer, ids[len(before) :], before) == source[cut:]
        assert tokenizer.continuation(before, ids[len(before) :]) == source[cut:]


def test_the_first_space_of_an_answer_is_kept(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("once upon a time")
    before = tokenizer.encode("once upon")
    assert shown(tokenizer, ids[len(before) :], before) == " a time"


def test_behind_a_special_token_a_text_begins_anew(tokenizer: Tokenizer) -> None:
    before = tokenizer.encode("<s>ask</s>")
    assert shown(tokenizer, tokenizer.encode("tell"), before) == "tell"


def test_half_a_character_spoils_only_itself(tokenizer: Tokenizer) -> None:
    whole, half = tokenizer.encode("漢" * 9), tokenizer.encode("字")[1:2]
    assert shown(tokenizer, (*whole, *half)) == "漢" * 9 + REPLACEMENT
    assert shown(tokenizer, (*whole, *half, *tokenizer.encode("a b"))) == "漢" * 9 + REPLACEMENT + " a b"


@pytest.mark.parametrize(
    ("rest", "keeps"), [("time", False), (" time", False), (" " * 40 + "a", False), ("</s>", True), ("</s>time", True)]
)
def test_history_is_joined_only_where_it_is_the_text(tokenizer: Tokenizer, rest: str, keeps: bool) -> None:
    known = "<s>once upon"
    # Other ids than the tokenizer's own tell whether they were kept.
    odd = (*tokenizer.encode("<s>once up"), *(tokenizer.token_id(byte) or 0 for byte in ("<0x6F>", "<0x6E>")))
    assert tokenizer.continuation((), odd) == tokenizer.decode(tokenizer.encode(known), skip_special=False)
    tokenizer.memory.clear()
    tokenizer.memory.remember(known, odd)
    found = tokenizer.encode_keeping_history(known + rest)
    assert tokenizer.decode(found) == tokenizer.decode(tokenizer.encode(known + rest))
    assert (found[: len(odd)] == odd) is keeps
