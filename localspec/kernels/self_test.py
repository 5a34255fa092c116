"""Every kernel group once, on small shapes, against the reference on the CPU: whether this card computes what it must.

Goes through `Ops` alone, so it serves every back end. A group passes when its error is below its bound and a row has
the same bits alone as among sixteen. Knows no models and keeps nothing; who calls decides what a failure means.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from localspec.kernels.backends.reference import ReferenceOps
from localspec.kernels.fp4_prompts import fp4_product, reads_in_fp4
from localspec.kernels.fp8_pack import quantise_fp8
from localspec.kernels.nvfp4_pack import Nvfp4Weight, quantise_nvfp4
from localspec.kernels.ops import PAGE_TOKENS, Epilogue, GdnInputs, GdnState, GdnWeights, Norm, Ops, Paging
from localspec.kernels.self_test_drafting import drafting_error, worst
from localspec.kernels.weights import DenseWeight, LogicalWeight

ROWS = 16
BF16_BOUND = 6e-3
"""A result in bfloat16, with a normed operand that may have been rounded to a neighbour."""
TF32_BOUND = 1e-2
FP4_GROUP = "prompts in fp4"
HEADS = ((6, 1, 256), (4, 2, 128), (4, 4, 64))
"""Query heads, key heads and head size of attention cases."""


@dataclass(frozen=True)
class GroupResult:
    """One group. `problem` is empty where it passed; error: relative, of the worst case, or NaN if it did not run."""

    group: str
    error: float
    bound: float
    seconds: float
    problem: str = ""


@dataclass(frozen=True)
class SelfTestReport:
    """All groups that there was time for; `skipped` names the others."""

    results: tuple[GroupResult, ...]
    skipped: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return not any(result.problem for result in self.results)

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence for each group that is wrong."""
        return tuple(f"{result.group}: {result.problem}" for result in self.results if result.problem)

    @property
    def summary(self) -> str:
        """What was tested, in one sentence."""
        told = f"{len(self.results)} kernel groups agree with their reference, {self.seconds:.1f} s"
        if self.failures:
            told = f"{len(self.failures)} of {len(self.results)} kernel groups are wrong"
        return f"{told}; no time was left for {', '.join(self.skipped)}" if self.skipped else told

    def lines(self) -> list[str]:
        """One line a group, for people."""
        lines = [
            f"{each.group:20} {'passed' if not each.problem else 'WRONG':7} error {each.error:.1e} of at most "
            f"{each.bound:.0e}, {each.seconds:.2f} s{'  ' + each.problem if each.problem else ''}"
            for each in self.results
        ]
        return [*lines, *(f"{name:20} skipped: no time was left" for name in self.skipped)]


def run(ops: Ops, device: torch.device, seconds_budget: float = 60.0) -> SelfTestReport:
    """Test the groups one after the other; none begins once the budget is spent. Never raises for a kernel's sake."""
    test = _Test(ops, device)
    caches = {"attention fp8": torch.float8_e4m3fn, "attention bf16": torch.bfloat16}
    # The cache that is in use is tested first and with every head size: each one is kernels to be compiled.
    first, second = sorted(caches, key=lambda name: caches[name] != ops.cache_dtype)
    groups: dict[str, tuple[Callable[[], float], float]] = {
        "nvfp4 linear": (lambda: test.linear(quantise_nvfp4), BF16_BOUND),
        first: (lambda: test.attention(caches[first], HEADS), BF16_BOUND),
        "gdn window": (test.gdn_window, BF16_BOUND),
        "norms and embedding": (test.norms, BF16_BOUND),
        "drafting": (test.drafting, BF16_BOUND),
        "attention of prompts": (test.prompt_attention, BF16_BOUND),
        "gdn of prompts": (test.gdn_prompt, TF32_BOUND),
        "fp8 linear": (lambda: test.linear(quantise_fp8), BF16_BOUND),
        "bf16 linear": (lambda: test.linear(lambda matrix: DenseWeight(matrix.bfloat16())), BF16_BOUND),
        second: (lambda: test.attention(caches[second], HEADS[1:2]), BF16_BOUND),
    }
    if reads_in_fp4(ops):
        groups[FP4_GROUP] = test.fp4_prompts, BF16_BOUND
    started = time.perf_counter()
    results: list[GroupResult] = []
    skipped: list[str] = []
    for name, (function, bound) in groups.items():
        if time.perf_counter() - started > seconds_budget:
            skipped.append(name)
        else:
            results.append(_result(name, function, bound))
    return SelfTestReport(tuple(results), tuple(skipped), time.perf_counter() - started)


def _result(name: str, function: Callable[[], float], bound: float) -> GroupResult:
    started = time.perf_counter()
    error, problem = float("nan"), ""
    try:
        with torch.inference_mode():
            error = function()
        if not error <= bound:
            problem = "the results are too far from the reference's"
    except _RowsDiffer as differ:
        problem = str(differ)
    except (RuntimeError, ValueError) as failure:
        problem = f"{type(failure).__name__}: {str(failure).splitlines()[0][:200] if str(failure) else 'no reason'}"
    return GroupResult(name, error, bound, time.perf_counter() - started, problem)


class _RowsDiffer(Exception):
    """A row's bits depend on its neighbours."""


class _Test:
    """Random inputs, the back end under test, and the reference that says what must come out."""

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops, self._device = ops, device
        self._reference = ReferenceOps(torch.device("cpu"))
        self._generator = torch.Generator().manual_seed(11)

    def linear(self, store: Callable[[Tensor], LogicalWeight]) -> float:
        """Rows 1 and 16 with norm and silu, 8 rows with a residual, and a chunk of a prompt."""
        columns, width = 512, 272
        gate_up = [store(self._randn(width, columns) / columns**0.5) for _ in range(2)]
        down = store(self._randn(columns, 512) / columns**0.5)
        norm = Norm(self._randn(columns) * 0.1, 1e-6, plus_one=True)
        x, residual = self._bf16(ROWS, columns), self._bf16(ROWS, columns)
        errors = [
            self._linear(gate_up, x, norm, "silu_mul", None),
            self._linear([down], x[:8], None, "residual", residual[:8]),
        ]
        if not (reads_in_fp4(self._ops) and isinstance(down, Nvfp4Weight)):
            errors.append(self._linear([down], self._bf16(256, columns), norm, "none", None))
        return worst(errors)

    def fp4_prompts(self) -> float:
        """A chunk of a prompt: gate and up, and a weight whose result is added to something."""
        ops, there = self._ops, self._device
        gate, up, down = (quantise_nvfp4(self._randn(272, 512) / 512**0.5) for _ in range(3))
        x, residual = self._bf16(256, 512), self._bf16(256, 272)
        halves = [fp4_product(x, half).bfloat16().float() for half in (gate, up)]
        found = ops.linear(x.to(there), ops.pack([gate, up], gated=True), epilogue="silu_mul")
        added = ops.linear(x.to(there), ops.pack([down]), epilogue="residual", residual=residual.to(there))
        gated = torch.nn.functional.silu(halves[0]) * halves[1]
        return worst([_error(found, gated), _error(added, fp4_product(x, down) + residual.float())])

    def _linear(
        self, parts: list[LogicalWeight], x: Tensor, norm: Norm | None, epilogue: Epilogue, residual: Tensor | None
    ) -> float:
        gated = epilogue == "silu_mul"
        packed, expected_weight = self._ops.pack(parts, gated), self._reference.pack(parts, gated)
        expected = self._reference.linear(x.float(), expected_weight, norm, epilogue, _float(residual))
        there = None if norm is None else Norm(norm.weight.to(self._device), norm.eps, norm.plus_one)

        def rows(part: slice) -> Tensor:
            added = None if residual is None else residual[part].to(self._device)
            return self._ops.linear(x[part].to(self._device), packed, there, epilogue, added)

        found = rows(slice(0, len(x)))
        if len(x) <= ROWS:
            _same_bits(found, rows)
        return _error(found, expected)

    def norms(self) -> float:
        """Norm of rows, embedding, and the per-head norm with its turn."""
        x, heads = self._bf16(ROWS, 640), self._bf16(ROWS, 6, 64)
        norm, head_norm = Norm(self._randn(640) * 0.1, 1e-6, True), Norm(self._randn(64) * 0.1, 1e-6, True)
        table, ids = self._bf16(50, 640), torch.arange(ROWS) * 3
        inv_freq = 1e4 ** -torch.arange(0, 1, 1 / 16)
        positions = torch.arange(ROWS) * 5
        there = self._device
        pairs = [
            (self._ops.rms_norm(x.to(there), _moved(norm, there)), self._reference.rms_norm(x.float(), norm)),
            (self._ops.embed(ids.to(there), table.to(there)), table[ids].float()),
            (
                self._ops.norm_rope(heads.to(there), _moved(head_norm, there), positions.to(there), inv_freq.to(there)),
                self._reference.norm_rope(heads.float(), head_norm, positions, inv_freq),
            ),
        ]
        return worst(_error(found, expected) for found, expected in pairs)

    def drafting(self) -> float:
        """What lies between a drafter's matmuls."""
        return drafting_error(self._ops, self._device, self._reference, self._generator)

    def attention(self, dtype: torch.dtype, heads: Sequence[tuple[int, int, int]]) -> float:
        """Windows over scattered pages, grouped heads, some head sizes, an output gate, rows of two sequences."""
        errors = []
        for num_heads, num_kv_heads, head_dim in heads:
            lengths = (700, 90)
            k, v, tables = self._pages(lengths, num_kv_heads, head_dim, dtype)
            q, gate = self._bf16(ROWS, num_heads, head_dim), self._bf16(ROWS, num_heads, head_dim)
            slots = torch.tensor([0] * 10 + [1] * 6)
            ends = torch.tensor([*range(690, 700), *range(84, 90)])
            errors.append(self._attention(q, (k, v), Paging(tables, slots, 701), ends, gate))
        return worst(errors)

    def prompt_attention(self) -> float:
        """A chunk of 256 rows at the end of a prompt."""
        k, v, tables = self._pages((600,), 2, 128, torch.float8_e4m3fn)
        q, ends = self._bf16(256, 4, 128), torch.arange(344, 600) + 1
        return self._attention(q, (k, v), Paging(tables, torch.zeros(256, dtype=torch.int64), 601), ends, None)

    def _attention(
        self, q: Tensor, pages: tuple[Tensor, Tensor], paging: Paging, ends: Tensor, gate: Tensor | None
    ) -> float:
        begins, scale = torch.zeros_like(ends), q.shape[2] ** -0.5
        # The reference reads the same rounded values.
        full_k, full_v = pages[0].float(), pages[1].float()
        expected = self._reference.attention(q.float(), full_k, full_v, paging, begins, ends, scale, _float(gate))
        there = self._device
        k, v, tables = pages[0].to(there), pages[1].to(there), paging.block_tables.to(there)

        def rows(part: slice) -> Tensor:
            where = Paging(tables, paging.slots[part].to(there), paging.max_key_bound)
            own = None if gate is None else gate[part].to(there)
            bounds = begins[part].to(there), ends[part].to(there)
            return self._ops.attention(q[part].to(there), k, v, where, *bounds, scale, own)

        found = rows(slice(0, len(q)))
        if len(q) == ROWS:
            _same_bits(found, rows)
        return _error(found, expected)

    def gdn_window(self) -> float:
        """A window of four rows with three pending ones of the window before, its records, and the fold after it."""
        # As many heads and values as a 27B, so that the form which this card gives its steps is the one tested.
        weights, state = self._gdn((16, 48, 128, 128))
        inputs = self._gdn_inputs(weights, "verify", 4, pending=3)
        return self._gdn_case(inputs, weights, state, fold=4)

    def gdn_prompt(self) -> float:
        """A chunk of 256 rows, of which 150 are a prompt's."""
        weights, state = self._gdn((2, 4, 64, 64))
        inputs = self._gdn_inputs(weights, "prefill", 150, pending=0, num_rows=256)
        return self._gdn_case(inputs, weights, state, fold=0)

    def _gdn_case(self, inputs: GdnInputs, weights: GdnWeights, state: GdnState, fold: int) -> float:
        there = self._device
        ours = GdnState(*(getattr(state, field.name).to(there, copy=True) for field in fields(GdnState)))
        expected = self._reference.gdn(_as_float(inputs), weights, state)
        found = self._ops.gdn(_inputs_on(inputs, there), _weights_on(weights, there), ours)
        pending = torch.tensor([fold])
        self._reference.gdn_fold(state, pending)
        self._ops.gdn_fold(ours, pending.to(there))
        count = int(inputs.window_rows[0])
        errors = [_error(found[:count], expected[:count]), _error(ours.recurrent, state.recurrent)]
        return worst(errors)

    def _gdn(self, heads: tuple[int, int, int, int]) -> tuple[GdnWeights, GdnState]:
        hk, hv, dk, dv = heads
        channels = 2 * hk * dk + hv * dv
        vectors = (self._randn(channels, 4) * 0.5, self._randn(hv) * 0.5, self._randn(hv), self._randn(dv).abs() + 0.5)
        weights = GdnWeights(*vectors, 1e-6, hk, hv, dk, dv)
        state = GdnState(
            self._randn(1, hv, dv, dk) * 0.3,
            self._bf16(1, channels, 3 + ROWS),
            torch.nn.functional.normalize(self._randn(1, ROWS, hk, dk), dim=-1),
            self._randn(1, ROWS, hv, dv) * 0.3,
            torch.rand(1, ROWS, hv, generator=self._generator),
        )
        return weights, state

    def _gdn_inputs(
        self, weights: GdnWeights, kind: str, count: int, pending: int, num_rows: int | None = None
    ) -> GdnInputs:
        rows = num_rows or count
        heads = weights.num_value_heads
        values = heads * weights.value_head_dim
        channels = 2 * weights.num_key_heads * weights.key_head_dim + values
        one = torch.ones(1, dtype=torch.int64)
        slots = torch.where(torch.arange(rows) < count, 0, -1)
        projections = (self._bf16(rows, channels), self._bf16(rows, values))
        gates = (self._bf16(rows, 1, heads), self._bf16(rows, 1, heads))
        return GdnInputs(*projections, *gates, kind, slots, 0 * one, count * one, pending * one)  # type: ignore[arg-type]

    def _pages(
        self, lengths: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(k, v) [pages, 64, Hkv, D] of `dtype` and block tables; pages lie in a random order."""
        counts = [-(-length // PAGE_TOKENS) + 1 for length in lengths]
        order = torch.randperm(sum(counts), generator=self._generator).int() + 1
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for slot, pages in enumerate(torch.split(order, counts)):
            tables[slot, : len(pages)] = pages
        shape = (sum(counts) + 1, PAGE_TOKENS, heads, head_dim)
        return self._randn(*shape).to(dtype), self._randn(*shape).to(dtype), tables

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _bf16(self, *shape: int) -> Tensor:
        return self._randn(*shape).bfloat16()


def _same_bits(whole: Tensor, rows: Callable[[slice], Tensor]) -> None:
    """Raise unless rows alone and in a part have their bits among all."""
    for part in (slice(0, 1), slice(5, 8), slice(len(whole) - 1, len(whole))):
        if not torch.equal(rows(part), whole[part]):
            raise _RowsDiffer("a row has other bits alone than among others")


def _error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; values that are no numbers make it NaN, which passes no bound."""
    difference = found.cpu().double() - expected.cpu().double()
    return float(difference.norm() / expected.double().norm())


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _moved(norm: Norm, device: torch.device) -> Norm:
    return replace(norm, weight=norm.weight.to(device))


def _inputs_on(inputs: GdnInputs, device: torch.device) -> GdnInputs:
    return replace(inputs, **_tensors_on(inputs, device))


def _weights_on(weights: GdnWeights, device: torch.device) -> GdnWeights:
    return replace(weights, **_tensors_on(weights, device))


def _tensors_on(record: GdnInputs | GdnWeights, device: torch.device) -> dict[str, Any]:
    named = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value.to(device) for name, value in named.items() if isinstance(value, Tensor)}


def _as_float(inputs: GdnInputs) -> GdnInputs:
    return replace(inputs, qkv=inputs.qkv.float(), z=inputs.z.float(), a=inputs.a.float(), b=inputs.b.float())
