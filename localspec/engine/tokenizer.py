"""Text to token ids and back, by the model's own tokenizer.json. Knows nothing of templates or requests."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from localspec.engine.token_bound import token_bound

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenMemory:
    """Remembers which token ids a text had when it was generated, so that history keeps its tokens.

    A tokenizer may split a text otherwise than the model wrote it; then the next turn would miss the cache from the
    answer on. Entries are whole texts (prompt and answer); a later prompt that begins with one takes its ids.
    Private texts are remembered like others: this lives in memory only. Any thread may ask.
    """

    def __init__(self, max_entries: int = 64) -> None:
        self._entries: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._max_entries = max_entries
        self._lock = Lock()

    def remember(self, text: str, token_ids: tuple[int, ...]) -> None:
        with self._lock:
            self._entries.pop(text, None)
            self._entries[text] = token_ids
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def longest_prefix(self, text: str) -> tuple[str, tuple[int, ...]]:
        """The longest remembered text that `text` begins with, and its ids; empty if none."""
        with self._lock:
            best = max((known for known in self._entries if text.startswith(known)), key=len, default="")
            return best, self._entries.get(best, ())

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


class Tokenizer:
    """Tokenizer of one model folder. Raises ValueError if tokenizer.json is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a missing or damaged file
            raise ValueError(f"{path} is missing or damaged ({error}); pull the model again") from error
        self.config: dict[str, Any] = _read_json(folder / "tokenizer_config.json")
        self.bound = token_bound(_read_json(path))
        self.memory = TokenMemory()

    @property
    def vocab_size(self) -> int:
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def token_id(self, text: str) -> int | None:
        """Id of a token by its exact text."""
        found: int | None = self._fast.token_to_id(text)
        return found

    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and the like, as templates read them."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        values = {name: self.config.get(name) for name in names}
        return {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in values.items()
            if isinstance(value, (str, dict))
        }

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text in which special tokens are recognised; no tokens are added."""
        # A batch of one: for a batch the library lets other threads run, for a single text it does not.
        return tuple(self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_keeping_history(self, text: str) -> tuple[int, ...]:
        """Like `encode`, but a beginning that was generated before keeps the ids that it had then."""
        known, ids = self.memory.longest_prefix(text)
        return (*ids, *self.encode(text[len(known) :])) if known else self.encode(text)

    def decode(self, token_ids: tuple[int, ...] | list[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that form no character yet come as replacement characters."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); pull the model again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold an object; pull the model again")
    return value
