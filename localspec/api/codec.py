"""Records of `types` to plain JSON values and back, for recordings and for the wire.

Knows the field types of the records; knows nothing of files or HTTP. What comes in is checked: unknown keys are
ignored, so that a newer program may add some, and a wrong type raises ValueError with the path of the value.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from localspec.api.types import Delta, Done, Event, Phase, Prefill, Queued, Span

Record = TypeVar("Record")

_EVENT_KINDS: dict[str, type[Any]] = {"queued": Queued, "prefill": Prefill, "delta": Delta, "done": Done}
_PHASES = {phase.value: phase for phase in Phase}
_KIND_OF_EVENT = {record: kind for kind, record in _EVENT_KINDS.items()}


def to_json(value: Any) -> Any:
    """Plain JSON values of a record: dataclasses become objects, tuples become lists, enums their value."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {name: to_json(getattr(value, name)) for name in _field_names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def from_json(record: type[Record], data: Any) -> Record:
    """Build `record` from what `to_json` gave. Raises ValueError that names the value of a wrong type."""
    return typing.cast(Record, _build(record, data, record.__name__))


def event_to_json(event: Event) -> dict[str, Any]:
    """An event with its `kind`."""
    data: dict[str, Any] = {"kind": _KIND_OF_EVENT[type(event)]}
    data.update(to_json(event))
    return data


def event_from_json(data: Any) -> Event:
    """The event of `event_to_json`. Raises ValueError for anything else."""
    if not isinstance(data, dict) or data.get("kind") not in _EVENT_KINDS:
        raise ValueError(f"an event needs a kind out of {', '.join(_EVENT_KINDS)}")
    if data["kind"] == "delta" and (delta := _plain_delta(data)) is not None:
        return delta
    return typing.cast(Event, from_json(_EVENT_KINDS[data["kind"]], data))


def _plain_delta(data: dict[str, Any]) -> Delta | None:
    """The event that comes hundreds of times a second, spelt out; None where anything is unusual or wrong."""
    text, ids, spans = data.get("text"), data.get("token_ids"), data.get("spans")
    rejected = data.get("rejected", 0)
    if type(text) is not str or type(ids) is not list or type(spans) is not list or type(rejected) is not int:
        return None
    if data.get("logprobs", ()) not in ([], ()) or any(type(number) is not int for number in ids):
        return None
    read = []
    for span in spans:
        if type(span) is not dict:
            return None
        count, origin, phase = span.get("n_chars"), span.get("origin"), span.get("phase")
        if type(count) is not int or type(origin) is not str or type(phase) is not str or phase not in _PHASES:
            return None
        read.append(Span(count, origin, _PHASES[phase]))
    return Delta(text, tuple(ids), tuple(read), rejected)


@cache
def _field_names(record: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(record))


@cache
def _hints(record: Any) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _build(hint: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _build_union(typing.get_args(hint), data, path)
    if origin is typing.Literal:
        return _expect(data in typing.get_args(hint), data, path, f"one of {typing.get_args(hint)}")
    if origin is tuple:
        return _build_tuple(typing.get_args(hint), data, path)
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(data, dict), data, path, "an object")
        return {key: _build(typing.get_args(hint)[1], item, f"{path}.{key}") for key, item in data.items()}
    if hint is Any:
        return data
    if isinstance(hint, type) and is_dataclass(hint):
        return _build_record(hint, data, path)
    return _build_scalar(hint, data, path)


def _build_record(record: Any, data: Any, path: str) -> Any:
    _expect(isinstance(data, dict), data, path, "an object")
    hints = _hints(record)
    values: dict[str, Any] = {}
    for item in fields(record):
        if item.name in data:
            values[item.name] = _build(hints[item.name], data[item.name], f"{path}.{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{path} lacks {item.name}")
    return record(**values)


def _build_union(options: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in options:
        return None
    reasons = []
    for option in options:
        if option is not type(None):
            try:
                return _build(option, data, path)
            except ValueError as reason:
                reasons.append(str(reason))
    raise ValueError("; ".join(reasons))


def _build_tuple(items: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    _expect(isinstance(data, (list, tuple)), data, path, "a list")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_build(items[0], item, f"{path}[{index}]") for index, item in enumerate(data))
    _expect(len(data) == len(items), data, path, f"a list of {len(items)} values")
    return tuple(
        _build(hint, item, f"{path}[{index}]") for index, (hint, item) in enumerate(zip(items, data, strict=True))
    )


def _build_scalar(hint: Any, data: Any, path: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(data)
        except ValueError:
            return _expect(False, data, path, f"one of {[item.value for item in hint]}")
    if hint is float:
        _expect(isinstance(data, (int, float)) and not isinstance(data, bool), data, path, "a number")
        return float(data)
    if hint is int:
        return _expect(isinstance(data, int) and not isinstance(data, bool), data, path, "a whole number")
    return _expect(isinstance(data, hint), data, path, f"a {hint.__name__}")


def _expect(holds: bool, data: Any, path: str, what: str) -> Any:
    if not holds:
        raise ValueError(f"{path} must be {what}, not {type(data).__name__}")
    return data
