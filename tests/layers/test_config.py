"""Settings of a model file are checked one by one, and errors say which file, which key and what would work."""

from __future__ import annotations

import pytest

from localspec.layers.config import ConfigReader
from localspec.layers.rope import rotary_frequencies

pytestmark = pytest.mark.torch


def test_values_are_checked_by_kind() -> None:
    reader = ConfigReader({"a": 3, "b": True, "c": 0.5, "d": None, "e": "x", "f": 1 << 40, "g": float("inf"), "h": 0})
    assert reader.integer("a") == 3 and reader.integer("d", 7) == 7 and reader.integer("missing", 2) == 2
    assert reader.number("c") == 0.5 and reader.number("a") == 3.0 and reader.flag("b", False) is True
    for key in ("b", "c", "d", "e", "f", "h", "missing"):
        with pytest.raises(ValueError, match=f"config.json: {key} is"):
            reader.integer(key)
    for key in ("b", "e", "g", "h"):
        with pytest.raises(ValueError, match=f"config.json: {key} is"):
            reader.number(key)
    with pytest.raises(ValueError, match="a is 3; true or false"):
        reader.flag("a", False)
    with pytest.raises(ValueError, match="must be an object"):
        reader.section("a")
    with pytest.raises(ValueError, match="supported: 'y', 'z'"):
        reader.expect("e", "y", "z")


def test_keys_that_nobody_read_are_refused_unless_they_are_off() -> None:
    reader = ConfigReader(
        {"read": 1, "off": False, "null": None, "architectures": ["X"], "skipped": 9, "zero": 0, "none": []}
    )
    reader.integer("read")
    reader.ignore("skipped")
    with pytest.raises(ValueError, match="unknown settings zero"):
        ConfigReader({"zero": 0.5}).finish()
    reader.finish()
    with pytest.raises(ValueError, match="unknown settings read, skipped"):
        ConfigReader({"skipped": 9, "read": 1}).finish()


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}, "'yarn' is not supported"),
        ({"rope_type": "default", "partial_rotary_factor": 0.3}, "must be even"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "must be even"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "default", "surprise": 2}, "surprise"),
    ],
)
def test_rope_settings_that_cannot_be_honoured(rope: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_frequencies(ConfigReader({"rope_parameters": rope}), 50)


def test_partial_rotation_in_both_spellings() -> None:
    nested = ConfigReader({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}})
    flat = ConfigReader({"rope_theta": 1e7, "partial_rotary_factor": 0.25})
    by_default = ConfigReader({"rope_theta": 1e7})
    frequencies = rotary_frequencies(nested, 256)
    assert frequencies.shape == (32,) and frequencies[0] == 1.0
    assert frequencies.equal(rotary_frequencies(flat, 256))
    assert frequencies.equal(rotary_frequencies(by_default, 256, default_fraction=0.25))
