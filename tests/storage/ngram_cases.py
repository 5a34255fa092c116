"""Real code as tokens, a reference that searches by brute force, and what every test of the n-gram store needs."""

from __future__ import annotations

import re
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localspec.storage.ngram_build import RunBuilder
from localspec.storage.ngram_choice import Continuation
from localspec.storage.ngram_runs import NgramTable

TOKENIZER = bytes(range(32))
OTHER_TOKENIZER = b"\x55" * 32
Tokens = NDArray[np.uint32]


def stdlib_documents(modules: Iterable[str]) -> list[Tokens]:
    """Word tokens of standard library sources, one vocabulary for all."""
    vocabulary: dict[str, int] = {}
    folder = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for module in modules:
        words = re.findall(r"\w+|[^\w\s]|\s+", (folder / f"{module}.py").read_text(encoding="utf-8", errors="replace"))
        documents.append(np.array([vocabulary.setdefault(word, len(vocabulary)) for word in words], dtype=np.uint32))
    return documents


def build(directory: Path, documents: Sequence[Tokens], **options: int) -> None:
    min_count = options.pop("min_count", 1)
    with RunBuilder(directory, TOKENIZER, **options) as builder:
        for number, tokens in enumerate(documents):
            builder.add(f"document {number}", tokens)
        builder.finish(min_count)


def settle(table: NgramTable) -> None:
    """Wait until every posted read was answered."""
    deadline = time.monotonic() + 120
    while table.pending_reads:
        assert time.monotonic() < deadline
        time.sleep(0.0002)


def look_up_waiting(table: NgramTable, context: Sequence[int]) -> Continuation | None:
    table.prefetch([context[:-1]])
    settle(table)
    return table.lookup(context)


class Occurrences:
    """Where each context of 8, 12 and 16 tokens occurs: what a suffix array would find."""

    ORDERS = (16, 12, 8)

    def __init__(self, documents: Sequence[Tokens]) -> None:
        self._documents = [tokens.tolist() for tokens in documents]
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for number, tokens in enumerate(self._documents):
            for order in self.ORDERS:
                for end in range(order, len(tokens)):
                    self._places[tuple(tokens[end - order : end])].append((number, end))

    def places(self, context: Sequence[int], order: int) -> list[tuple[int, int]]:
        return self._places.get(tuple(context[-order:]), []) if len(context) >= order else []

    def continuations(self, context: Sequence[int], order: int) -> list[list[int]]:
        return [self._documents[number][end : end + 14] for number, end in self.places(context, order)]

    def draft(self, context: Sequence[int]) -> tuple[list[int], int]:
        """Longest match first, then the most frequent path."""
        for order in self.ORDERS:
            paths = self.continuations(context, order)
            if paths:
                draft: list[int] = []
                while len(draft) < 14:
                    following = Counter(path[len(draft)] for path in paths if len(path) > len(draft))
                    if not following:
                        break
                    draft.append(following.most_common(1)[0][0])
                    paths = [path for path in paths if path[: len(draft)] == draft]
                return draft, order
        return [], 0
