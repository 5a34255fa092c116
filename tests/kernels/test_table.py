"""The back end is chosen once, by priority, and every refusal has its reason."""

from __future__ import annotations

import types

import pytest

from localspec.kernels import backends, table
from localspec.kernels.backends import reference

pytestmark = pytest.mark.torch


def _module(name: str, priority: int, reason: str | None) -> types.ModuleType:
    module = types.ModuleType(f"{backends.__name__}.{name}")
    module.PRIORITY = priority  # type: ignore[attr-defined]
    module.supports = lambda device: reason  # type: ignore[attr-defined]
    module.create = reference.create  # type: ignore[attr-defined]
    return module


def test_the_cpu_gets_the_reference() -> None:
    ops, _ = table.choose("cpu", "reference")
    assert ops.name == "reference" and ops.waits and ops.prefill_row_multiple == 4


def test_the_highest_that_supports_the_device_wins_and_refusals_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"fast": _module("fast", 20, "needs a card"), "good": _module("good", 10, None), "reference": reference}
    monkeypatch.setattr(table, "backend_names", lambda: (*found, "broken"))

    def fake_import(name: str) -> types.ModuleType:
        if name.endswith("broken"):
            raise ImportError("no module named triton")
        return found[name.rsplit(".", 1)[1]]

    monkeypatch.setattr(table.importlib, "import_module", fake_import)
    chosen = []
    monkeypatch.setattr(found["good"], "create", lambda device: chosen.append(device) or reference.create(device))
    _, refusals = table.choose("cpu")
    assert chosen == ["cpu"]
    assert [(each.backend, each.reason.split(":")[0]) for each in refusals] == [
        ("broken", "it cannot be imported"),
        ("fast", "needs a card"),
    ]
    with pytest.raises(ValueError, match="needs a card"):
        table.choose("cpu", "fast")


def test_an_unknown_name_lists_what_is_known() -> None:
    with pytest.raises(ValueError, match="reference"):
        table.choose("cpu", "nonsense")
