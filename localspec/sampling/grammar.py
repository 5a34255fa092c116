"""Grammars of requests on the host: which tokens may follow, for every row of a window, along its drafts.

Torch-free. Compiling may take long and happens on the caller's thread; a compiled request belongs to the decode thread
alone. Knows nothing of steps or slots. A grammar begins behind the thought of a request that thinks; in the thought
everything may be said but its end by a stop token.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING

from localspec.api.types import Grammar
from localspec.core.records import ThinkingRule

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 16
MAX_SOURCE_CHARS = 1 << 20
MAX_GBNF_CHARS = 1 << 16
"""Converted by a slow reader, and written by people."""
MAX_REASON_CHARS = 300
WHITESPACE = r"[ \t]{1,8}|\r?\n[ \t]{0,64}"
"""Between the parts of a JSON text: a few blanks or one line break with its indent, so that no answer drifts off."""


class GrammarRefused(ValueError):
    """The grammar does not compile; the message is one sentence with the compiler's words."""


class Where(Enum):
    """Where a text stands: before its first token (a thought may open), in the thought, or in the grammar."""

    START = "start"
    THOUGHT = "thought"
    ANSWER = "answer"


@dataclass(frozen=True)
class _Place:
    where: Where
    tail: tuple[int, ...] = ()
    """Last tokens of the thought, as many as its end marker has."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer, which is read when the first grammar comes. Thread-safe."""

    def __init__(self, tokenizer_file: Path, stop_ids: tuple[int, ...]) -> None:
        self._tokenizer_file = tokenizer_file
        self._stop_ids = stop_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def compile(
        self, grammar: Grammar, thinking: ThinkingRule | None = None, may_think: bool = False
    ) -> RequestGrammar:
        """A fresh matcher. `may_think`: the answer may begin with the marker that opens a thought.

        Raises GrammarRefused.
        """
        if not self._stop_ids:
            raise GrammarRefused("this model names no token that ends an answer, so it cannot follow a grammar")
        with self._lock:
            matcher = self._prototype(grammar).deep_copy()
            vocab_size = self._tokenizer.vocab_size if self._tokenizer is not None else 0
        where = Where.START if may_think and thinking is not None and len(thinking.start_ids) == 1 else Where.ANSWER
        if thinking is not None and thinking.open_at_start:
            where = Where.THOUGHT
        return RequestGrammar(matcher, vocab_size, self._stop_ids, thinking, where)

    def _prototype(self, grammar: Grammar) -> LLMatcher:
        known = self._compiled.pop(grammar, None)
        if known is None:
            library = _library()
            if self._tokenizer is None:
                self._tokenizer = library.LLTokenizer(str(self._tokenizer_file), eos_token=list(self._stop_ids))
            limits = library.LLParserLimits(verbose_errors=False)
            known = library.LLMatcher(self._tokenizer, _source(grammar, library.LLMatcher), log_level=0, limits=limits)
            if known.is_error():
                raise GrammarRefused(f"the {_NAMES[grammar.kind]} is refused: {_in_one_line(known.get_error())}")
            if _is_unsatisfiable(known):
                raise GrammarRefused(
                    f"the {_NAMES[grammar.kind]} allows no text at all, or repeats too much to follow; see that every "
                    "$ref or rule that names itself has another way out"
                )
        self._compiled[grammar] = known
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return known


class RequestGrammar:
    """What one request may still say. `error` is set once the matcher gives up (a limit was reached)."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        stop_ids: tuple[int, ...],
        thinking: ThinkingRule | None,
        where: Where,
    ) -> None:
        self._matcher = matcher
        self._stop_ids = frozenset(stop_ids)
        self._start_id = thinking.start_ids[0] if thinking is not None and thinking.start_ids else -1
        self._end_ids = thinking.end_ids if thinking is not None else ()
        closing = thinking.close_ids if thinking is not None and len(thinking.close_ids) == 1 else ()
        self._thought_mask = _mask_without((*stop_ids, *closing), vocab_size)
        self._stop_mask = _mask_of(stop_ids, vocab_size)
        self._place = _Place(where)
        self.error = ""

    def window_masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        """One packed mask (bit i of the little-endian bits: token i may be said) for each of 1 + len(drafts) rows.

        Row k follows the first k drafts; drafts of -1 are none. None where the row cannot be reached, because the
        grammar refuses a draft before it, or a draft before it ends the answer. The state stays as it was.
        """
        masks: list[bytes | None] = []
        place, consumed = self._place, 0
        for draft in (*drafts, -1):
            mask = self._mask(place)
            masks.append(mask)
            if draft < 0 or draft in self._stop_ids or not _allows(mask, draft):
                break
            place, fed = self._after(place, draft)
            consumed += fed
        if consumed:
            self._matcher.rollback(consumed)
        return masks + [None] * (1 + len(drafts) - len(masks))

    def advance(self, token_ids: Iterable[int]) -> None:
        """Tokens were emitted."""
        for token_id in token_ids:
            if token_id in self._stop_ids or self.error:
                return
            self._place, _ = self._after(self._place, token_id)
            if self._matcher.is_error():
                self.error = f"the grammar could not be followed: {_in_one_line(self._matcher.get_error())}"

    def _mask(self, place: _Place) -> bytes:
        if place.where is Where.THOUGHT:
            return self._thought_mask
        # A matcher that gives up here leaves a mask of the stop tokens: without a word the answer would end as if done.
        mask = bytes(self._matcher.compute_bitmask()) if not self._matcher.is_error() else b""
        if self._matcher.is_error():
            self.error = f"the grammar could not be followed: {_in_one_line(self._matcher.get_error())}"
            return self._stop_mask
        return mask if place.where is Where.ANSWER else _with_bit(mask, self._start_id)

    def _after(self, place: _Place, token_id: int) -> tuple[_Place, int]:
        """The place behind one more token, and how many tokens the matcher was fed."""
        if place.where is Where.START and token_id == self._start_id:
            return _Place(Where.THOUGHT), 0
        if place.where is Where.THOUGHT:
            tail = (*place.tail, token_id)[-len(self._end_ids) :]
            return (_Place(Where.ANSWER) if tail == self._end_ids else replace(place, tail=tail)), 0
        self._matcher.consume_token(token_id)
        return _Place(Where.ANSWER), 1


_GBNF_MARK = "::="
_LEFT_OUT = "<non-verbose/>"
"""Stands in the compiler's words for a dump of its state."""
_NAMES = {
    "json_object": "JSON grammar",
    "json_schema": "JSON schema",
    "lark": "Lark grammar",
    "regex": "regular expression",
}


def _library() -> ModuleType:
    """The grammar library, imported when the first grammar comes: nothing else needs it. Raises GrammarRefused."""
    try:
        import llguidance
    except ImportError as error:
        raise GrammarRefused(
            "grammars, JSON schemas and demanded tool calls need the package llguidance, which cannot be imported "
            f"here ({error}); install it with: pip install llguidance"
        ) from error
    return llguidance  # type: ignore[no-any-return]


def _source(grammar: Grammar, matcher: type[LLMatcher]) -> str:
    """The grammar in the compiler's own form. Raises GrammarRefused."""
    if len(grammar.source) > MAX_SOURCE_CHARS:
        raise GrammarRefused(f"the {_NAMES[grammar.kind]} is longer than {MAX_SOURCE_CHARS} characters")
    if grammar.kind == "lark":
        source = _from_gbnf(grammar.source) if _GBNF_MARK in grammar.source else grammar.source
        return str(matcher.grammar_from_lark(source))
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.source))
    schema = grammar.source if grammar.kind == "json_schema" else '{"type": "object"}'
    try:
        json.loads(schema)
        return str(matcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE}))
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"the JSON schema is no JSON: {error}") from error


def _from_gbnf(source: str) -> str:
    """The same grammar in Lark's notation, from that of llama.cpp. Raises GrammarRefused."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(source) > MAX_GBNF_CHARS:
        raise GrammarRefused(f"the GBNF grammar is longer than {MAX_GBNF_CHARS} characters")
    try:
        return str(gbnf_to_lark(source))
    except RecursionError:
        raise GrammarRefused("the GBNF grammar is nested too deeply") from None
    except Exception as error:  # the reader has no class of its own for what it refuses
        raise GrammarRefused(f"the GBNF grammar is refused: {_in_one_line(str(error))}") from error


def _is_unsatisfiable(matcher: LLMatcher) -> bool:
    """Whether no text begins as the grammar asks: such grammars compile, and give up at the first mask."""
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    return bool(probe.is_error())


def _in_one_line(text: str) -> str:
    return " ".join(text.replace(_LEFT_OUT, " ").split())[:MAX_REASON_CHARS] or "no reason given"


def _allows(mask: bytes, token_id: int) -> bool:
    byte = token_id >> 3
    return byte < len(mask) and bool(mask[byte] >> (token_id & 7) & 1)


def _with_bit(mask: bytes, token_id: int) -> bytes:
    out = bytearray(mask)
    out[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(out)


def _mask_of(token_ids: Iterable[int], vocab_size: int) -> bytes:
    mask = bytes(-(-vocab_size // 8))
    for token_id in token_ids:
        mask = _with_bit(mask, token_id)
    return mask


def _mask_without(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """Everything but these. Bits behind the vocabulary are not set: models have rows there that no tokenizer knows."""
    mask = bytearray(b"\xff" * (vocab_size // 8) + (bytes([(1 << vocab_size % 8) - 1]) if vocab_size % 8 else b""))
    for token_id in token_ids:
        mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
    return bytes(mask)
