"""A TOML table that is read key by key, with the type of each, and refused for keys that nobody asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from localspec.hub.records import HubError

T = TypeVar("T")

MAX_SIZE = 1 << 53
"""8 PiB in bytes; a float holds every whole number up to here."""


class Table:
    """A TOML table from which keys are taken with their type; whatever is left at `finish` is an error."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self.where = where

    def take(self, key: str, kind: type[T], default: T | None = None) -> T:
        if key not in self._values:
            if default is None:
                raise HubError(f"{self.where}: the key {key!r} is missing")
            return default
        value = self._values.pop(key)
        # bool is an int to isinstance; `demo = 1` and `top_k = true` are mistakes.
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise HubError(f"{self.where}: {key!r} is {value!r}, a {kind.__name__} is needed")
        if isinstance(value, str) and not value.isprintable():
            raise HubError(
                f"{self.where}: {key!r} is {value!r}; a text of one line without control characters is needed"
            )
        return value

    def text(self, key: str, pattern: re.Pattern[str], default: str | None = None) -> str:
        value = self.take(key, str, default)
        if not pattern.fullmatch(value):
            raise HubError(f"{self.where}: {key!r} is {value!r}, which is not of the form {pattern.pattern}")
        return value

    def choice(self, key: str, options: tuple[str, ...]) -> str:
        value = self.take(key, str)
        if value not in options:
            raise HubError(f"{self.where}: {key!r} is {value!r}; one of {', '.join(options)} is needed")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.take(key, int, default)
        if value < 0:
            raise HubError(f"{self.where}: {key!r} is {value}, it cannot be negative")
        if value > MAX_SIZE:
            raise HubError(f"{self.where}: {key!r} is larger than anything that could be meant")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values: list[Any] = self.take(key, list, [])
        if not all(isinstance(value, str) for value in values):
            raise HubError(f"{self.where}: {key!r} must be a list of texts")
        return tuple(values)

    def tables(self, key: str) -> list[Table]:
        values: list[Any] = self.take(key, list, [])
        if not all(isinstance(value, dict) for value in values):
            raise HubError(f"{self.where}: {key!r} must be a list of tables")
        return [Table(value, f"{self.where}, {key} {i + 1}") for i, value in enumerate(values)]

    def items(self, key: str) -> list[tuple[str, Any]]:
        values: dict[str, Any] = self.take(key, dict, {})
        return list(values.items())

    def finish(self) -> None:
        if self._values:
            raise HubError(f"{self.where}: the key {min(self._values)!r} is not known; remove it or correct its name")
