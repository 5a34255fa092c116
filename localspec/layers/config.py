"""Reads a model's config.json as untrusted input: each key is checked when read, and unknown keys fail by name.

Knows no architecture; a model file says which keys it reads, which values it supports and which are harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HARMLESS_KEYS = (
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "attention_dropout", "model_type", "pad_token_id", "pretraining_tp", "quantization_config", "torch_dtype",
    "transformers_version", "transformers.js_config", "unsloth_fixed", "unsloth_version", "use_cache",
    "is_llama_config", "_attn_implementation_autoset",
)  # fmt: skip
"""Keys that describe a checkpoint without changing what the model computes."""
MAX_SIZE = 1 << 24


class ConfigReader:
    """Typed access to a config. `finish` refuses keys that nobody read and that are set to something."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config = config
        self._where = where
        self._read = set(HARMLESS_KEYS)

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value, or `default` where the key is missing or null."""
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A size from 1 to 2^24. Raises ValueError otherwise, or if missing without a default."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
            raise ValueError(f"{self._where}: {key} is {value!r}; a whole number from 1 to {MAX_SIZE} is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number. Raises ValueError otherwise."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ValueError(f"{self._where}: {key} is {value!r}; a positive number is needed")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value. Raises ValueError otherwise."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._where}: {key} is {value!r}; true or false is needed")
        return value

    def expect(self, key: str, *supported: Any) -> None:
        """Raise ValueError naming the key unless it is missing or one of the supported values."""
        value = self.get(key, supported[0])
        if value not in supported:
            known = ", ".join(repr(each) for each in supported)
            raise ValueError(f"{self._where}: {key} = {value!r} is not supported; supported: {known}")

    def section(self, key: str) -> ConfigReader | None:
        """A reader for a nested object, or None where it is missing. Raises ValueError for anything else."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._where}: {key} must be an object")
        return ConfigReader(value, f"{self._where}: {key}")

    def ignore(self, *keys: str) -> None:
        """Accept keys whose value does not change what is computed here."""
        self._read.update(keys)

    def finish(self) -> None:
        """Raise ValueError naming the keys that nobody read, unless they are off: null, false, zero or empty."""
        unknown = sorted(key for key, value in self._config.items() if key not in self._read and value)
        if unknown:
            raise ValueError(f"{self._where}: unknown settings {', '.join(unknown)}; this version cannot honour them")
