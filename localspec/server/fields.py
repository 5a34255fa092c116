"""Checked access to the fields of a JSON request: wrong types are a 400 that names the field, unknown ones pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.server.errors import bad

MAX_ITEMS = 16384
"""Entries of a list of messages, parts or tools: reading so many takes 0.2 s, in which nobody else is served."""
MAX_TOKEN_IDS = 1 << 20


def check_count(items: list[Any], path: str, at_most: int = MAX_ITEMS) -> None:
    """Raises ApiError 400 for a longer list."""
    if len(items) > at_most:
        raise bad(f"{path} may hold at most {at_most} entries, not {len(items)}.", path)


class Fields:
    """A JSON object of a request. `path` stands before field names in messages."""

    def __init__(self, data: Any, path: str = "") -> None:
        if not isinstance(data, dict):
            raise bad(f"{path or 'The body'} must be a JSON object.", path or None)
        self.data: dict[str, Any] = data
        self.path = path
        self._read: set[str] = set()

    def value(self, key: str) -> Any:
        """The field as it is, None when absent."""
        self._read.add(key)
        return self.data.get(key)

    def unread(self) -> list[str]:
        """Names of given fields that nobody asked for."""
        return [key for key in self.data if key not in self._read]

    def name(self, key: str) -> str:
        """Full name of a field."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.value(key) is not None

    def first(self, *keys: str) -> str:
        """The first of these names that is given, else the first."""
        return next((key for key in keys if self.has(key)), keys[0])

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string or the default."""
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def need_text(self, key: str) -> str:
        """A string that must be given."""
        value = self.text(key)
        if value is None:
            raise bad(f"{self.name(key)} is missing.", self.name(key))
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean or the default."""
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        """A number within bounds or None."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "a number")
        if not low <= value <= high:
            raise bad(f"{self.name(key)} must lie between {low:g} and {high:g}, not {_shown(value)}.", self.name(key))
        return float(value)

    def integer(self, key: str, low: int, high: int) -> int | None:
        """A whole number within bounds or None."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a whole number")
        if not low <= value <= high:
            raise bad(f"{self.name(key)} must lie between {low} and {high}, not {_shown(value)}.", self.name(key))
        return value

    def items(self, key: str, at_most: int = MAX_ITEMS) -> list[Any]:
        """A list; empty when absent. Raises ApiError 400 when it has more than `at_most` entries."""
        value = self.value(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        check_count(value, self.name(key), at_most)
        return value

    def object(self, key: str) -> Fields | None:
        """An object or None."""
        value = self.value(key)
        return None if value is None else Fields(value, self.name(key))

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object as it is; empty when absent."""
        found = self.object(key)
        return found.data if found else {}

    def wrong(self, key: str, what: str) -> Exception:
        """The error for a value of a wrong type."""
        return bad(f"{self.name(key)} must be {what}.", self.name(key))


def _shown(value: float) -> str:
    """A number for a message; JSON's whole numbers may have thousands of digits, more than a float can hold."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if abs(value) < 10**20 else f"a number of {len(str(abs(value)))} digits"
