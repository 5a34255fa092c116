"""What the interface is started with and what a chat asks of the engine. Frozen; knows no widget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from localspec.api.types import GenerateRequest, Message, Sampling
from localspec.chats import Stored


class SettingError(Exception):
    """A setting that cannot be; the message says what would work."""


@dataclass(frozen=True)
class UiOptions:
    """How the interface is started. `models` are the installed ones with a word on each, for switching."""

    export_dir: Path
    """The working folder: exports are written and files are looked for here."""
    copy_file: Path
    """Where copied text is written besides the clipboard."""
    address: str = ""
    """The port that other programs can use, as shown in the panel."""
    find_address: Callable[[], str] = str
    """The same where it may change, as for an engine that is started anew. Asked only while `address` is empty."""
    models: tuple[tuple[str, str], ...] = ()
    private: bool = False
    no_color: bool = False
    over_ssh: bool = False
    still: bool = False
    """No blinking cursor and no animation, for pictures and tests."""
    caption: str = ""
    """A line under the transcript, for pictures whose figures need a word of explanation."""


@dataclass(frozen=True)
class ChatSettings:
    """What a chat asks of the engine beyond its messages. None and empty leave the choice to the model or engine."""

    sampling: Mapping[str, float | int] = field(default_factory=dict)
    max_tokens: int | None = None
    drafter: str | None = None
    depth: int | None = None
    thinking: bool | None = None
    thinking_budget_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Values that `from_json` reads back."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ChatSettings:
        """Settings of a stored chat; values of another form are left out, as an older version may have written them."""
        settings = cls()
        for name, value in values.items():
            if name == "sampling" and isinstance(value, dict):
                for key, number in value.items():
                    settings = _or_same(settings, str(key), str(number))
            elif value is not None and name in ("max_tokens", "depth", "thinking_budget_tokens"):
                settings = _or_same(settings, name, str(value))
            elif name == "drafter" and isinstance(value, str):
                settings = replace(settings, drafter=value)
            elif name == "thinking" and isinstance(value, bool):
                settings = replace(settings, thinking=value)
        return settings

    def request(
        self, messages: tuple[Stored, ...], system_prompt: str, base: Sampling, *, chat_id: str, private: bool
    ) -> GenerateRequest:
        """The request that answers the last of `messages`; `base` is the law that the model recommends."""
        sent = [Message("system", system_prompt)] if system_prompt else []
        # An answer that broke off before its first character would confuse the chat template.
        sent += [
            Message(m.role, m.content, m.reasoning or None) for m in messages if m.content or m.role != "assistant"
        ]
        options: dict[str, Any] = {} if self.thinking is None else {"enable_thinking": self.thinking}
        return GenerateRequest(
            messages=tuple(sent),
            sampling=replace(base, **self.sampling),  # type: ignore[arg-type]
            max_tokens=self.max_tokens,
            drafter=self.drafter,
            depth=self.depth,
            template_options=options,
            thinking_budget_tokens=self.thinking_budget_tokens,
            client="chat",
            chat_id=chat_id,
            private=private,
        )


# name: (type, lowest, highest)
_RANGES: dict[str, tuple[type[int] | type[float], float, float]] = {
    "temperature": (float, 0.0, 10.0),
    "top_p": (float, 0.0, 1.0),
    "top_k": (int, 0, 1_000_000),
    "min_p": (float, 0.0, 1.0),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, 0.1, 10.0),
    "seed": (int, 0, 2**63 - 1),
    "max_tokens": (int, 1, 10_000_000),
    "depth": (int, 0, 64),
    "thinking_budget_tokens": (int, 0, 10_000_000),
}
_OWN = ("max_tokens", "depth", "thinking_budget_tokens")
SETTING_NAMES = tuple(_RANGES)


def with_setting(settings: ChatSettings, name: str, value: str) -> ChatSettings:
    """Settings with one value changed; `default` leaves the choice to the model again. Raises SettingError."""
    if name not in _RANGES:
        raise SettingError(f"There is no setting {name!r}: use one of {', '.join(SETTING_NAMES)}.")
    if value == "default":
        if name in _OWN:
            return replace(settings, **{name: None})  # type: ignore[arg-type]
        return replace(settings, sampling={key: v for key, v in settings.sampling.items() if key != name})
    kind, low, high = _RANGES[name]
    try:
        number = kind(value)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        word = "a whole number" if kind is int else "a number"
        raise SettingError(f"{name} must be {word} from {low:g} to {high:g}, or `default`; got {value!r}.")
    if name in _OWN:
        return replace(settings, **{name: number})  # type: ignore[arg-type]
    return replace(settings, sampling={**settings.sampling, name: number})


def _or_same(settings: ChatSettings, name: str, value: str) -> ChatSettings:
    try:
        return with_setting(settings, name, value)
    except SettingError:
        return settings
