"""Memory of the device: what does not fit is refused before loading, what was planned is what is allocated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.api.types import EngineError
from localspec.core.memory_budget import (
    CUDA_CONTEXT_BYTES,
    FEW_GRAPHS,
    GRAPH_BYTES,
    GRAPHS_BYTES,
    MANY_GRAPHS,
)
from localspec.core.records import MAX_SLOTS, PAGE_TOKENS
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine import memory_budget, overflow_layout
from localspec.engine.build import EngineOptions, assemble
from localspec.engine.memory_budget import check_before_loading, context_limit, fitting_tokens, lay_out
from localspec.engine.warm_up import warm_up
from localspec.kernels.backends.reference import ReferenceOps
from tests.helpers.engine import make_request, run, token_engine
from tests.helpers.models import load_model, random_checkpoint, reference_ops

pytestmark = pytest.mark.torch
MIB = 1 << 20
SHARES: list[float] = []
"""Of the card's memory, what PyTorch was told to stay within."""


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> ReferenceOps:
    """A back end that says it is on a card of which the tests set the memory."""
    ops = reference_ops()
    ops.device = torch.device("cuda")
    ops.cache_dtype = torch.float8_e4m3fn
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 120 * MIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: SHARES.append(share))
    _free(monkeypatch, 4096)
    return ops


def _free(monkeypatch: pytest.MonkeyPatch, mib: float) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(mib * MIB), 1 << 40))


def test_a_model_that_does_not_fit_is_refused_before_loading(
    on_a_card: ReferenceOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_checkpoint("qwen3_5", 3, tmp_path)
    budget = check_before_loading(folder, on_a_card, 2048, None)
    assert budget is not None and budget.context_tokens == 2048 and budget.demand.weights < 1 * MIB
    assert budget.demand.kv_per_token == 2 * 2 * 24 * 1, "one full layer, FP8"
    assert check_before_loading(folder, reference_ops(), 2048, None) is None
    assert check_before_loading(tmp_path / "nothing", on_a_card, None, None) is None
    with pytest.raises(EngineError, match=r"needs 1\.\d GiB on the card for a context of 2048 tokens .* can be had"):
        check_before_loading(folder, on_a_card, 2048, limit_bytes=600 * MIB)
    _free(monkeypatch, 0)
    with pytest.raises(EngineError, match="smaller --context") as caught:
        check_before_loading(folder, on_a_card, None, None)
    assert caught.value.code == "machine_cannot"


def test_what_is_laid_out_fits_what_there_is(
    on_a_card: ReferenceOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load_model(random_checkpoint("qwen3_5", 3, tmp_path))
    assert context_limit(model, on_a_card, None, None) == 4096 and context_limit(model, on_a_card, 10, None) == 64
    for mib in (4096, 500, 600):
        _free(monkeypatch, mib)
        limit = context_limit(model, on_a_card, None, None)
        layout = lay_out(model, on_a_card, [model.cache_spec], limit, None)
        assert layout.budget is not None and layout.budget.demand.weights == 120 * MIB
        assert sum(layout.parts.values()) <= (mib + 120) * MIB + CUDA_CONTEXT_BYTES
        pages = layout.num_pages * 64 * model.cache_spec.bytes_per_token
        assert layout.parts["kv"] == pages
        assert layout.parts["state"] == MAX_SLOTS * model.cache_spec.state_bytes
        assert layout.budget.demand.fixed > 800 * MIB
    with pytest.raises(EngineError, match="can be had"):
        lay_out(model, on_a_card, [model.cache_spec], 4096, 800 * MIB)


@pytest.mark.parametrize("drafted", [False, True])
def test_a_context_somewhat_too_large_is_split_and_not_refused(
    on_a_card: ReferenceOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafted: bool
) -> None:
    """What stays leaves room for the ground where the others land, whatever drafters keep beside it."""
    model: Any = load_model(random_checkpoint("qwen3", 3, tmp_path))
    own = model.cache_spec
    planes = tuple(dataclasses.replace(plane, name=f"{plane.name}{n}") for n in range(8) for plane in own.planes)
    model.cache_spec, model.max_context_tokens = dataclasses.replace(own, planes=planes), 1 << 22
    specs = [model.cache_spec, *([dataclasses.replace(own, owner="drafter")] if drafted else [])]
    for mib in (1300, 1301, 1400, 1600):
        fitting = fitting_tokens(model, on_a_card, specs, mib * MIB, 0)
        for context in (fitting + 256, fitting + 4096, fitting * 5 // 4, fitting * 2):
            try:
                whole = lay_out(model, on_a_card, specs, context, mib * MIB).num_pages
            except EngineError:
                whole = 0
            layout = overflow_layout.split(model, on_a_card, specs, context, mib * MIB, None)
            landing = 2 * context * model.cache_spec.bytes_per_token * 2 // len(planes)
            assert sum(layout.memory.parts.values()) + (0 if whole else landing) <= mib * MIB
            assert whole or layout.memory.num_pages * PAGE_TOKENS < context


def test_pytorch_stays_within_a_limit(on_a_card: ReferenceOps, tmp_path: Path) -> None:
    model: Any = load_model(random_checkpoint("qwen3_5", 3, tmp_path))
    lay_out(model, on_a_card, [model.cache_spec], 256, 2048 * MIB)
    graphs = GRAPHS_BYTES + (MANY_GRAPHS - FEW_GRAPHS) * GRAPH_BYTES
    assert SHARES[-1] * (1 << 40) == 2048 * MIB - CUDA_CONTEXT_BYTES - graphs
    lay_out(model, on_a_card, [model.cache_spec], 256, None)
    assert SHARES[-1] * (1 << 40) == (4096 + 120) * MIB - graphs, "captured steps find room"
    beside = lay_out(model, on_a_card, [model.cache_spec], 256, 1300 * MIB, 100 * MIB)
    alone = lay_out(model, on_a_card, [model.cache_spec], 256, 1200 * MIB)
    assert beside.parts == alone.parts


def test_a_cpu_gives_half_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = reference_ops()
    model = load_model(random_checkpoint("qwen3", 3, tmp_path), ops)
    assert context_limit(model, ops, None, None) == 4096
    page_bytes = 64 * model.cache_spec.bytes_per_token

    class Memory:
        available = 2 * page_bytes * 70

    monkeypatch.setattr(memory_budget.psutil, "virtual_memory", Memory)
    assert lay_out(model, ops, [model.cache_spec], 4096, None).num_pages == 70
    with pytest.raises(ValueError, match="choose a smaller --context"):
        lay_out(model, ops, [model.cache_spec], 4600, None)
    layout = lay_out(model, ops, [model.cache_spec], 64, None)
    assert layout.num_pages == 3 * 2 + 1 and layout.budget is None


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_warm_up_changes_no_answer(kind: str, tmp_path: Path) -> None:
    ops = reference_ops()
    model = load_model(random_checkpoint(kind, 3, tmp_path), ops)
    request = make_request(list(range(40, 90)), max_tokens=12)
    with token_engine(model, ops, 256, {}) as parts:
        [expected] = run(parts, [request])
    setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=256)
    drafters = {name: drafter_module(name).tiny(setup) for name in ("ngram", "mtp")}
    parts = assemble(model, ops, 256, drafters, EngineOptions(device="cpu"))
    limits = parts.scheduler.limits
    assert warm_up(parts.loop.stages, limits.context_tokens, limits.chunk_tokens) > 0
    assert int(parts.runner.state.block_tables.abs().sum()) == 0
    parts.loop.start()
    try:
        [found] = run(parts, [request])
        [drafted] = run(parts, [dataclasses.replace(request, drafter="mtp", depth=4, cache_salt="other")])
    finally:
        parts.loop.stop()
    assert found.token_ids == drafted.token_ids == expected.token_ids


def test_memory_that_runs_out_in_the_warm_up_is_said_plainly(tmp_path: Path) -> None:
    ops = reference_ops()
    parts = assemble(
        load_model(random_checkpoint("qwen3", 3, tmp_path), ops), ops, 256, {}, EngineOptions(device="cpu")
    )

    class Full:
        def admit(self, slot: int, request: Any) -> None:
            """Has room for this."""

        def prefill(self, plan: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    full = dataclasses.replace(parts.loop.stages, device=Full())  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="A context of 256 tokens does not fit this card"):
        warm_up(full, 256, 64)
