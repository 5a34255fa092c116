"""Every kernel beside the weight streams compiles for every card, without one: no spills, shared memory that fits.

Shapes are those of the 27B hybrid.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.helpers.resources import resources
from tests.kernels.families import assembled_for, compile_all, instructions, shared_with_family

pytestmark = pytest.mark.torch

TARGETS = (80, 86, 89, 90, 100, 120)
FP4_TARGETS = (100, 120)
SMALL_SHARED_BYTES = 99 * 1024
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Spills that were measured to be faster than the tile without them: kernel, target, stack bytes.
MEASURED_SPILLS = {("attention_prefill_kernel", 90, 136)}
BF16, FP32, FP16, INT64, INT32, BYTES = "*bf16", "*fp32", "*fp16", "*i64", "*i32", "*u8"
_STEP = {"RING": 16, "PDL": False}
HEADS = {"HK": 16, "HV": 48, "DK": 128, "DV": 128}


@dataclass(frozen=True)
class Case:
    """One kernel with one configuration. Pointers are float32 unless `types` says otherwise; other values are i32."""

    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    by_target: dict[int, dict[str, Any]] = field(default_factory=dict)
    targets: tuple[int, ...] = TARGETS
    exact: bool = False
    """Compiled without contraction, as it is launched."""
    """Within the registers that a window over several slots is held to."""


_WINDOW_FORM = {**HEADS, **_STEP, "TAPS": 4, "GATE_PARTS": 3, "KI": 32, "EPS": 1e-6}
_WINDOW = {"starts_ptr": INT64, "counts_ptr": INT64, "pending_ptr": INT64, "slots_ptr": INT64}
_PROJECTED = {"qkv_ptr": BF16, "a_ptr": BF16, "b_ptr": BF16, "conv_ptr": BF16, "z_ptr": BF16, "out_ptr": BF16}
_HALVES = {"q_ptr": FP16, "k_ptr": FP16, "w_ptr": FP16, "scores_ptr": FP16}
_PAGED = {"q_ptr": BF16, "tables_ptr": INT32, "slots_ptr": INT64, "begin_ptr": INT64, "end_ptr": INT64, "out_ptr": BF16}
# The plain attention kernel serves small heads and odd types.
_KEYS = {"D": 32, "BLOCK": 32, "ROWS": 16, "PDL": False}
_SPLIT = {**_KEYS, "GROUP": 6, "HEADS_KV": 4, "PAGE": 64, "COARSE": 256, "PAIRS": 16, "STAGES": 3, "ASM": True}
_MERGE = {**_KEYS, "H": 24, "BLOCK_D": 32, "BLOCKS": 8, "MERGE": 16, "GATED": True}
_STREAM = {"GROUP": 6, "HEADS_KV": 4, "D": 256, "ROWS": 16, "SLOTS": 4}
_JOIN = {
    "H": 24,
    "GROUP": 6,
    "D": 256,
    "SLICE": 64,
    "BLOCK": 64,
    "PAIRS": 32,
    "STEPS": 16,
    "ROWS": 16,
    "SLOTS": 4,
    "GATED": True,
    "PDL": False,
}
_SMALL_BLOCK = {target: {"BLOCK": 16} for target in (80, 86, 89)}
_DEEP = {90: {"PDL": True, "STAGES": 5}, 100: {"PDL": True, "STAGES": 5}, 120: {"PDL": True}}
_DEPENDENT = {target: {"PDL": True} for target in (90, 100, 120)}
_PREFILL = {
    "H": 24,
    "HEADS_KV": 4,
    "D": 256,
    "PAGE": 64,
    "BLOCK_M": 64,
    "BLOCK_N": 32,
    "V_PARTS": 4,
    "STAGES": 2,
    "ASM": True,
}
_PREFILL_TILES = {target: {"BLOCK_N": 64} for target in (80, 86, 89)} | {120: {"V_PARTS": 2}}
_ROPE = {"D": 256, "D_PADDED": 256, "PAGE": 64, "NORM": True, "PLUS_ONE": True, "FP8": True, "PDL": False}
_ROPE_TYPES = {
    **{name: BF16 for name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr")},
    **{"positions_ptr": INT64, "slots_ptr": INT64, "tables_ptr": INT32, "k_pages_ptr": BYTES, "v_pages_ptr": BYTES},
}

_COUNTED = ("slots", "offsets", "drafts", "history", "lengths", "tokens", "positions", "drawn", "origins", "starts")
_COUNTED += ("counts", "remaining", "stops", "pending", "emitted", "taken", "accepted", "finish")
_TAKEN = ("slots", "positions", "begin", "end", "tokens", "depths", "lengths", "history", "done", "valid")
_DRAFTED = {f"{name}_ptr": INT64 for name in _TAKEN}
_ROUNDS = ("kept_position", "out_positions", "out_slots", "out_end")
_KEPT = {f"{name}_ptr": INT64 for name in _ROUNDS} | {"ready_ptr": BYTES, "hidden_ptr": BF16, "kept_ptr": BF16}
_STORED = _DRAFTED | {"starts_ptr": INT64, "counts_ptr": INT64, "sources_ptr": BF16, "kept_ptr": BF16}
_ROWS = {"sources_ptr": BF16, "kept_ptr": BF16, "table_ptr": BF16, "tickets_ptr": INT32}
_NOTED = ("ids", "tokens", "chosen", "depths", "drafts", "origins", "counts")
_BEST = {f"{name}_ptr": INT64 for name in _NOTED} | {
    "ready_ptr": BYTES,
    "partial_place_ptr": INT32,
    "tickets_ptr": INT32,
}
_BEST_FORM = {"DIVIDED": True, "MAPPED": True, "NOTED": True, "CHOSEN": True, "SLOTS": 4, "COLUMNS": 16}
_BEST_FORM |= {"CHUNK": 4096, "PARTS": 64}
_JOINED = {"ids_ptr": INT64, "table_ptr": BF16, "hidden_ptr": BF16, "out_ptr": BF16}
_JOINED_FORM = {"FIRST": 2, "SECOND": 2, "BEFORE": 2, "BLOCK_WIDTH": 8192, "PDL": False}
_NEWEST_FORM = {"ROWS": 16, "SLOTS": 4, "ROUNDS": 8, "BLOCK_WIDTH": 8192, "NORM": 2, "PDL": False}
_PROBED = {f"{name}_ptr": INT64 for name in ("history", "lengths", "depths", "words", "weights", "draft_lengths")}
_PROBED |= {f"{name}_ptr": INT64 for name in ("speaks", "orders", "tokens", "tables", "counts")} | {"bytes_ptr": BYTES}
_PROBED |= {"mix_first": "i64", "mix_second": "i64", "last_factor": "i64"}
_PROBE_FORM = {"ORDERS": 2, "FIRST_TAG": 12, "SECOND_TAG": 16, "TAIL": 16, "RECORD": 64, "FIRST_BYTE": 22, "WIDTH": 16}
_PLAIN = {f"{name}_ptr": BYTES for name in ("x", "x_scales", "w_scales", "codes", "scales")}
_PLAIN |= {"w_ptr": INT32, "out_ptr": BF16, "factor": "fp32"}
_COUNTERS = {f"{name}_ptr": INT64 for name in _COUNTED} | {"frozen_ptr": BYTES}


def stream_cases() -> tuple[Case, ...]:
    """The attention stream of the 27B hybrid as `stream_shape` lays it out: both caches, both tiles."""
    from localspec.kernels.triton.cache_values import fragment_asm

    cases = []
    for fp8, pairs in ((True, 16), (True, 32), (False, 16), (False, 32)):
        warps = 4 if pairs == 16 else 8
        by_target: dict[int, dict[str, Any]] = {}
        for target in TARGETS:
            convert = fp8 and target >= 89
            by_target[target] = {
                "CONVERT": convert,
                "PDL": target >= 90,
                "DEPTH": 3 if target in (90, 100) else 2,
                "ASM_KEYS": fragment_asm(False, convert),
                "ASM_VALUES": fragment_asm(True, convert),
            }
        cache = BYTES if fp8 else BF16
        constants = {**_STREAM, "FP8": fp8, "BLOCK": 64 if fp8 else 32, "PAIRS": pairs, "NW": warps}
        types = _PAGED | {"k_ptr": cache, "v_ptr": cache}
        cases.append(
            Case("attention_stream", "attention_stream_kernel", types, constants, warps, 1, by_target, exact=True)
        )
    return tuple(cases)


_WIDE_WINDOW = Case(
    "gdn_window",
    "gdn_window_kernel",
    _PROJECTED | _WINDOW | {"tickets_ptr": INT32},
    _WINDOW_FORM | {"BLOCK_V": 64, "NW": 8},
    num_warps=8,
    by_target=_DEPENDENT,
    exact=True,
    targets=(80, 89, 90, 100, 120),  # no card of 86 has room for all programs of a 27B
)
CASES = (
    _WIDE_WINDOW,
    replace(_WIDE_WINDOW, constants=_WIDE_WINDOW.constants | {"NW": 4}, num_warps=4),  # of several slots
    replace(
        _WIDE_WINDOW,
        constants=_WIDE_WINDOW.constants | {"BLOCK_V": 32, "NW": 4},
        num_warps=4,
        targets=(80, 86, 89, 120),  # those of 90 and 100 all have room
    ),
    Case("gdn_fold", "gdn_fold_kernel", _WINDOW, {**HEADS, "RING": 16, "KI": 16}, 8),
    Case("gdn_fold", "gdn_shift_kernel", _PROJECTED | _WINDOW, {"TAPS": 4, "COLUMNS": 19, "BLOCK": 128}),
    Case(
        "gdn_prefill",
        "gdn_chunk_prepare_kernel",
        _PROJECTED | _WINDOW | {"q_ptr": FP16, "k_ptr": FP16},
        {**HEADS, "TAPS": 4, "COLUMNS": 19, "SLOTS": 4, "TILE": 64, "PART": 16, "EPS": 1e-6},
    ),
    Case(
        "gdn_prefill",
        "gdn_chunk_solve_kernel",
        _HALVES,
        {**HEADS, "N": 64, "BLOCK": 32, "PRECISION": "tf32"},
        4,
        1,
        _SMALL_BLOCK,
    ),
    Case(
        "gdn_prefill",
        "gdn_chunk_scan_kernel",
        _HALVES | _WINDOW,
        {**HEADS, "N": 64, "BLOCK_V": 32, "SLOTS": 4, "PRECISION": "tf32"},
        num_stages=1,
    ),
    Case("gdn_prefill", "gdn_chunk_norm_kernel", _PROJECTED, {"HV": 48, "DV": 128, "TILE": 16}),
    Case(
        "gdn_prefill",
        "gdn_chunk_columns_kernel",
        _PROJECTED | _WINDOW,
        {"TAPS": 4, "COLUMNS": 19, "SLOTS": 4, "BLOCK": 128},
    ),
    Case(
        "attention_blocks",
        "attention_split_kernel",
        _PAGED | {"k_ptr": BYTES, "v_ptr": BYTES},
        {**_SPLIT, "FP8": True, "STAGES": 5},
        by_target=_DEPENDENT,
    ),
    Case(
        "attention_blocks",
        "attention_split_kernel",
        _PAGED | {"k_ptr": BF16, "v_ptr": BF16},
        {**_SPLIT, "FP8": False},
        by_target=_DEEP,
    ),
    Case(
        "attention_blocks",
        "attention_merge_kernel",
        _PAGED | {"gate_ptr": BF16},
        _MERGE,
        2,
        by_target=_DEPENDENT,
    ),
    *stream_cases(),
    Case(
        "attention_join", "attention_join_kernel", _PAGED | {"gate_ptr": BF16}, _JOIN, by_target=_DEPENDENT, exact=True
    ),
    Case(
        "attention_prefill",
        "attention_prefill_kernel",
        _PAGED | {"k_ptr": BYTES, "v_ptr": BYTES},
        {**_PREFILL, "FP8": True},
        by_target=_PREFILL_TILES,
        targets=(80, 86, 89, 120),
    ),
    Case(
        "attention_prefill",
        "attention_prefill_kernel",
        _PAGED | {"k_ptr": BYTES, "v_ptr": BYTES},
        {**_PREFILL, "FP8": True, "BLOCK_M": 128, "BLOCK_N": 64, "V_PARTS": 1},
        8,
        targets=(90, 100),
    ),
    Case(
        "norm_rope",
        "norm_rope_store_kernel",
        _ROPE_TYPES,
        {**_ROPE, "H": 24, "HEADS_KV": 4, "HEADS_V": 4},
        1,
        by_target=_DEPENDENT,
    ),
    Case(
        "elementwise", "rms_norm_kernel", {"x_ptr": BF16, "out_ptr": BF16}, {"PLUS_ONE": True, "BLOCK_WIDTH": 8192}, 16
    ),
    Case(
        "elementwise",
        "gate_kernel",
        {"x_ptr": BF16, "gate_ptr": BF16, "out_ptr": BF16},
        {"SILU": True, "BLOCK_WIDTH": 1024},
    ),
    Case(
        "elementwise",
        "embed_kernel",
        {"ids_ptr": INT64, "table_ptr": BF16, "out_ptr": BF16},
        {"BLOCK_WIDTH": 1024},
    ),
    Case("drafting", "joined_norms_kernel", _JOINED, _JOINED_FORM, 16, by_target=_DEPENDENT),
    Case("drafting", "best_tokens_kernel", _BEST, {**_BEST_FORM, "PDL": False}, 8, by_target=_DEPENDENT),
    Case("waiting_rows", "store_rows_kernel", _STORED, {"SLOTS": 4, "BLOCK": 1024}),
    Case(
        "waiting_rows",
        "take_rows_kernel",
        _DRAFTED | _ROWS,
        {"ROWS": 16, "SLOTS": 4, "FIRST": 2, "SECOND": 2, "BLOCK_WIDTH": 8192, "PDL": False},
        16,
        by_target=_DEPENDENT,
    ),
    Case("waiting_rows", "keep_newest_kernel", _DRAFTED | _KEPT, _NEWEST_FORM, 16, by_target=_DEPENDENT),
    Case("ngram_probe", "table_drafts_kernel", _PROBED, _PROBE_FORM, 1, targets=(80, 90)),
    Case(
        "fp4_prompts", "plain_codes_kernel", _PLAIN, {"TILE_ROWS": 128, "ROWS": 16, "GATED": True}, targets=FP4_TARGETS
    ),
    Case("fp4_prompts", "quantise_rows_kernel", _PLAIN | {"x_ptr": BF16}, {"COLUMNS": 1024}, targets=FP4_TARGETS),
    Case(
        "fp4_prompts",
        "fp4_matmul_kernel",
        _PLAIN | {"w_ptr": BYTES},
        {"TILE_ROWS": 128, "TILE": 64},
        targets=FP4_TARGETS,
    ),
    Case("settle", "window_rows_kernel", _COUNTERS, {"ROWS": 16}, 1),
    Case("settle", "settle_kernel", _COUNTERS, {"COLUMNS": 16, "STOPS": 16, "STOPS_PADDED": 16}, 1),
    Case(
        "dense_linear",
        "dense_split_kernel",
        {"x_ptr": BF16, "w_ptr": BF16},
        {"ROWS": 16, "BLOCK_N": 64, "BLOCK_K": 128, "STAGES": 4},
    ),
    Case(
        "dense_linear",
        "dense_finish_kernel",
        {"residual_ptr": BF16, "out_ptr": BF16},
        {"BIAS": True, "GATED": False, "RESIDUAL": True, "BLOCK": 256},
    ),
)


def compiled(case: Case, target: int) -> Any:
    """Triton's compiled kernel of a case for one target."""
    from importlib import import_module

    from localspec.kernels.compat import compile_for

    kernel = getattr(import_module(f"localspec.kernels.triton.{case.module}"), case.kernel)
    constants = case.constants | case.by_target.get(target, {})
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        default = (
            FP32 if name.endswith("_ptr") else "fp32" if name.endswith(("eps", "scale_log2", "out_scale")) else "i32"
        )
        signature[name] = case.types.get(name, default)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": not case.exact}
    return compile_for(kernel, target, signature, constants, options)


@pytest.mark.parametrize(("target", "conversions"), [(80, 0), (90, 192)])
def test_attention_decodes_its_cache_in_registers(target: int, conversions: int) -> None:
    """Decoded, a block of keys would be 64 stores of 4 bytes a thread; queries, weights, and the maxima and sums of
    blocks and quads are all there is."""
    ptx = compiled(stream_cases()[0], target).asm["ptx"]
    assert ptx.count("st.shared") + ptx.count("stmatrix") <= 30
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == conversions
    assert ptx.count("mma.sync") == 104


@pytest.mark.parametrize("target", FP4_TARGETS)
def test_prompts_in_fp4_use_the_card_s_own_product(target: int) -> None:
    """Both sides in FP4 with a scale for each 16 values, not decoded to something wider first."""
    case = next(case for case in CASES if case.kernel == "fp4_matmul_kernel")
    products = re.findall(r"(?:mma\.sync|tcgen05\.mma)[\w.:]*", compiled(case, target).asm["ptx"])
    # One modifier, spelled in two ways by the versions of PTX.
    own = re.compile(r"kind::mxf4nvf4\.block_scale\.(scale_vec::4X|block16)")
    assert products and all(own.search(each) for each in products)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kernel)
def test_every_kernel_fits_every_card(case: Case) -> None:
    found = compile_all(lambda target: compiled(case, target), case.targets, case.by_target.get)
    assert set(found) == set(case.targets)
    problems = []
    for target, assembled in found.items():
        needed = resources(assembled.asm["cubin"], assembled.shared_bytes)
        spills = needed.stack_bytes and (case.kernel, target, needed.stack_bytes) not in MEASURED_SPILLS
        if spills or needed.shared_bytes > SHARED_BYTES.get(target, SMALL_SHARED_BYTES):
            problems.append(f"sm_{target}: {needed}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("kernel", "first", "other"),
    [
        ("gdn_chunk_scan_kernel", 80, 89),
        ("attention_join_kernel", 100, 90),
        ("gdn_fold_kernel", 100, 90),
        ("rms_norm_kernel", 100, 120),
        ("dense_finish_kernel", 80, 86),
    ],
)
def test_cards_of_a_family_share_what_they_are_said_to(kernel: str, first: int, other: int) -> None:
    """Samples of every kind that is shared: with products and without, plain Triton and Gluon."""
    case = next(case for case in CASES if case.kernel == kernel)
    leader, whole = compiled(case, first), compiled(case, other)
    assert shared_with_family(leader)
    shared = assembled_for(leader, other)
    assert instructions(shared.asm["ptx"]) == instructions(whole.asm["ptx"])
    assert shared.shared_bytes == whole.metadata.shared
    assert resources(shared.asm["cubin"], 0) == resources(whole.asm["cubin"], 0)


@pytest.mark.parametrize("kernel", ["best_tokens_kernel", "dense_split_kernel", "fp4_matmul_kernel"])
def test_what_one_card_has_of_its_own_is_not_shared(kernel: str) -> None:
    """A reduction, a product that Triton lays out, and types of fewer bits."""
    case = next(case for case in CASES if case.kernel == kernel)
    assert not shared_with_family(compiled(case, 100))


def test_every_kernel_has_a_case() -> None:
    from importlib import import_module

    from triton.runtime.jit import JITFunction

    tested = {(case.module, case.kernel) for case in CASES}
    for module in {case.module for case in CASES}:
        for name, member in vars(import_module(f"localspec.kernels.triton.{module}")).items():
            own = isinstance(member, JITFunction) and member.fn.__module__.endswith(f".{module}")
            assert not (own and name.endswith("_kernel")) or (module, name) in tested, name
