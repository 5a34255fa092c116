"""GPU tests and figures of the kernels beside the weight streams, on the card at hand.

Runs the tests marked `gpu` first and times nothing if one fails. Then the 27B hybrid's shapes with random values: every
figure is the median of CUDA graph replays over as many buffers as the model has layers, so caches are as cold as in a
step. Prints a table and ends with one line of JSON; --out writes it to a file. Less than five minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from localspec.kernels.backends.triton_sm80 import TritonOps  # noqa: E402
from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights, Norm, Paging  # noqa: E402
from localspec.kernels.triton import attention_prefill, gdn_window  # noqa: E402
from localspec.kernels.triton.norm_rope import norm_rope_store  # noqa: E402
from localspec.kernels.weights import DenseWeight  # noqa: E402

DEVICE = torch.device("cuda")
GDN_LAYERS, ATTENTION_LAYERS = 48, 16
HK, HV, DK, DV = 16, 48, 128, 128
H, HKV, D = 24, 4, 256
TESTS = ("gpu_rows", "gpu_gdn", "gpu_attention")


def run_tests(limit_s: int) -> dict[str, object]:
    files = [str(ROOT / "tests" / "kernels" / f"{name}.py") for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "200", "--tb=short", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
    print(run.stdout[-7000:], run.stderr[-800:], flush=True)
    return {"passed": run.returncode == 0, "last_line": run.stdout.strip().splitlines()[-1] if run.stdout else ""}


def time_graph_us(body: Callable[[], None], replays: int = 9) -> float:
    """Median of graph replays; the body runs once before capture, so that everything is compiled."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for _ in range(2):
        graph.replay()
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


@dataclass(frozen=True)
class GdnStack:
    """The states of all GDN layers and one layer's weights and projections."""

    inputs: GdnInputs
    weights: GdnWeights
    states: list[GdnState]


def gdn_stack(num_slots: int, num_rows: int, layers: int = GDN_LAYERS) -> GdnStack:
    channels, values = 2 * HK * DK + HV * DV, HV * DV
    joined = torch.randn(num_rows, channels + values + 2 * HV, device=DEVICE, dtype=torch.bfloat16)
    qkv, z, a, b = joined.split((channels, values, HV, HV), dim=1)
    weights = GdnWeights(
        torch.randn(channels, 4, device=DEVICE),
        torch.randn(HV, device=DEVICE) * 0.5,
        torch.randn(HV, device=DEVICE),
        torch.ones(DV, device=DEVICE),
        1e-6,
        HK,
        HV,
        DK,
        DV,
    )
    states = [
        GdnState(
            torch.randn(num_slots, HV, DV, DK, device=DEVICE),
            torch.randn(num_slots, channels, 19, device=DEVICE, dtype=torch.bfloat16),
            torch.randn(num_slots, 16, HK, DK, device=DEVICE) * 0.09,
            torch.randn(num_slots, 16, HV, DV, device=DEVICE),
            torch.rand(num_slots, 16, HV, device=DEVICE),
        )
        for _ in range(layers)
    ]
    each = num_rows // num_slots
    starts = torch.arange(num_slots, device=DEVICE) * each
    counts = torch.full((num_slots,), each, device=DEVICE)
    slots = torch.arange(num_rows, device=DEVICE) // each
    return GdnStack(GdnInputs(qkv, z, a, b, "verify", slots, starts, counts, counts), weights, states)


def measure_gdn(ops: TritonOps, figures: dict[str, float]) -> None:
    for num_slots, num_rows, pending in ((1, 1, 1), (1, 4, 3), (1, 8, 4), (1, 16, 8), (4, 4, 1), (4, 16, 3)):
        stack = gdn_stack(num_slots, num_rows)
        waiting = torch.full((num_slots,), pending, device=DEVICE)
        stack = replace(stack, inputs=replace(stack.inputs, pending_rows=waiting))
        name = f"gdn layer, {num_slots} slots {num_rows} rows {pending} pending"
        figures[name] = time_graph_us(gdn_body(ops, stack)) / GDN_LAYERS
    usual = gdn_window.window_shape
    for block, warps in ((128, 8), (128, 16), (64, 4), (64, 8), (32, 4)):
        gdn_window.window_shape = lambda *_, block=block, warps=warps: (block, warps)
        for num_rows in (1, 8):
            time_stack = gdn_body(ops, gdn_stack(1, num_rows))
            name = f"gdn layer, 1 slots {num_rows} rows all pending, {block} values {warps} warps"
            figures[name] = time_graph_us(time_stack) / GDN_LAYERS
    gdn_window.window_shape = usual


def gdn_body(ops: TritonOps, stack: GdnStack) -> Callable[[], None]:
    def body() -> None:
        for state in stack.states:
            ops.gdn(stack.inputs, stack.weights, state)

    return body


def paged(num_slots: int, length: int, layers: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    pages = -(-length // 64) + 1
    tables = (torch.randperm(num_slots * pages, device=DEVICE) + 1).view(num_slots, pages).int()
    pools = [
        [
            torch.randn(num_slots * pages + 1, 64, HKV, D, device=DEVICE, dtype=torch.bfloat16).to(dtype)
            for _ in range(layers)
        ]
        for _ in range(2)
    ]
    return pools[0], pools[1], tables


def attention_rows(num_slots: int, num_rows: int, length: int, tables: Tensor, bound: int) -> tuple[Paging, Tensor]:
    each = num_rows // num_slots
    slots = torch.arange(num_rows, device=DEVICE) // each
    end = length - each + 1 + torch.arange(num_rows, device=DEVICE) % each
    return Paging(tables, slots, bound), end


def attention_body(
    ops: TritonOps, pools: tuple[list[Tensor], list[Tensor]], where: Paging, end: Tensor
) -> Callable[[], None]:
    q = torch.randn(end.shape[0], H, D, device=DEVICE, dtype=torch.bfloat16)
    begin = torch.zeros_like(end)

    def body() -> None:
        for keys, values in zip(*pools, strict=True):
            ops.attention(q, keys, values, where, begin, end, 0.0625)

    return body


def measure_attention(ops: TritonOps, figures: dict[str, float]) -> None:
    """With a bound of 128k keys throughout, as a captured graph has, whatever the length."""
    cases = [(1, rows, 2048) for rows in (1, 4, 8, 16)] + [(4, 4, 2048), (4, 16, 2048)]
    cases += [(1, rows, 32768) for rows in (1, 8, 16)] + [(1, 1, 131072), (1, 1, 4096), (1, 1, 4200)]
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for num_slots, num_rows, length in cases:
            layers = ATTENTION_LAYERS if length <= 2048 else 4
            k, v, tables = paged(num_slots, length, layers, dtype)
            tables = torch.nn.functional.pad(tables, (0, 2048 - tables.shape[1])) if tables.shape[1] < 2048 else tables
            where, end = attention_rows(num_slots, num_rows, length, tables, 131072)
            name = f"attention layer, {num_slots} slots {num_rows} rows {length} keys {str(dtype)[6:]}"
            figures[name] = time_graph_us(attention_body(ops, (k, v), where, end)) / layers


def measure_small(ops: TritonOps, figures: dict[str, float]) -> None:
    """Row-wise kernels of an attention layer, and the two small projections of a GDN layer."""
    inv_freq = torch.rand(32, device=DEVICE)
    norms = Norm(torch.ones(D, device=DEVICE), 1e-6, True), Norm(torch.ones(D, device=DEVICE), 1e-6, True)
    k, v, tables = paged(1, 2048, 1, torch.float8_e4m3fn)
    small = ops.pack([DenseWeight(torch.randn(2 * HV, 5120, device=DEVICE))])
    norm = Norm(torch.ones(5120, device=DEVICE), 1e-6, True)
    table = torch.randn(20000, 5120).to(torch.bfloat16).pin_memory()
    for rows in (1, 8):
        joined = torch.randn(rows, 2 * H + 2 * HKV, D, device=DEVICE, dtype=torch.bfloat16)
        q, gate = joined[:, : 2 * H].view(rows, H, 2, D).unbind(2)
        keys, values = joined[:, 2 * H : 2 * H + HKV], joined[:, 2 * H + HKV :]
        where, end = attention_rows(1, rows, 2000, tables, 2048)
        at = end - 1
        x = torch.randn(rows, 5120, device=DEVICE, dtype=torch.bfloat16)
        mixed = torch.randn(rows, H, D, device=DEVICE, dtype=torch.bfloat16)
        ids = torch.randint(0, 20000, (rows,), device=DEVICE)
        pages = k[0], v[0]
        bodies: dict[str, Callable[[], object]] = {
            "norm_rope_store fused": partial(norm_rope_store, q, keys, values, norms, inv_freq, pages, where, at),
            "norm_rope q": partial(ops.norm_rope, q, norms[0], at, inv_freq),
            "store_kv": partial(ops.store_kv, values, v[0], where, at),
            "sigmoid_mul": partial(ops.sigmoid_mul, mixed, gate),
            "rms_norm": partial(ops.rms_norm, x, norm),
            "dense a, b with norm": partial(ops.linear, x, small, norm),
            "embed from pinned memory": partial(ops.embed, ids, table),
        }
        for name, one in bodies.items():
            figures[f"{name}, {rows} rows"] = time_graph_us(partial(repeat, one, 32)) / 32


def repeat(one: Callable[[], object], times: int) -> None:
    for _ in range(times):
        one()


def measure_prefill(ops: TritonOps, figures: dict[str, float]) -> None:
    stack = gdn_stack(1, 2048, layers=4)
    inputs = replace(stack.inputs, kind="prefill", pending_rows=torch.zeros(1, dtype=torch.int64, device=DEVICE))
    body = gdn_body(ops, replace(stack, inputs=inputs))
    figures["gdn layer, prefill of 2048 rows"] = time_graph_us(body, 5) / 4
    usual = attention_prefill.prefill_tile
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for start in (0, 6144):
            k, v, tables = paged(1, start + 2048, 1, dtype)
            end = torch.arange(start + 1, start + 2049, device=DEVICE)
            where = Paging(tables, torch.zeros(2048, dtype=torch.int64, device=DEVICE), start + 2048)
            name = f"attention layer, prefill of 2048 rows at {start} {str(dtype)[6:]}"
            figures[name] = time_graph_us(attention_body(ops, (k, v), where, end), 5)
            for sizes in ((128, 32, 1, 2, 8), (128, 64, 1, 2, 8), (64, 64, 1, 2, 4), (128, 64, 2, 3, 8)):
                tile = attention_prefill.PrefillTile(*sizes)
                attention_prefill.prefill_tile = lambda head_dim, major, tile=tile: tile
                figures[f"{name}, tile {sizes}"] = time_graph_us(attention_body(ops, (k, v), where, end), 5)
            attention_prefill.prefill_tile = usual


def profile_kernels(ops: TritonOps) -> list[str]:
    """Time of each kernel by itself, from the profiler: where a layer's time goes."""
    stack = gdn_stack(1, 1, layers=8)
    chunk = gdn_stack(1, 2048, layers=1)
    prefill = replace(chunk.inputs, kind="prefill", pending_rows=torch.zeros(1, dtype=torch.int64, device=DEVICE))
    k, v, tables = paged(1, 2048, 1, torch.bfloat16)
    where, end = attention_rows(1, 1, 2048, tables, 2048)
    q = torch.randn(1, H, D, device=DEVICE, dtype=torch.bfloat16)
    begin = torch.zeros_like(end)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(4):
            for state in stack.states:
                ops.gdn(stack.inputs, stack.weights, state)
            ops.gdn(prefill, chunk.weights, chunk.states[0])
            ops.attention(q, k[0], v[0], where, begin, end, 0.0625)
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
    return [f"{row.key[:60]:60} {row.count:5} {row.device_time:9.2f} us" for row in rows[:20]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--force", action="store_true", help="time kernels even where a test failed")
    options = parser.parse_args()
    began = time.perf_counter()
    properties = torch.cuda.get_device_properties(DEVICE)
    tests = run_tests(limit_s=280)
    figures: dict[str, float] = {}
    kernels: list[str] = []
    if tests["passed"] or options.force:
        ops = TritonOps(DEVICE)
        for measure in (measure_gdn, measure_attention, measure_small, measure_prefill):
            try:
                measure(ops, figures)
            except (RuntimeError, ValueError) as error:
                print(f"{measure.__name__}: {error}", flush=True)
            torch.cuda.empty_cache()
        kernels = profile_kernels(ops)
    for name, value in figures.items():
        print(f"{name:75} {value:9.2f} us")
    print("\n".join(kernels))
    result = {
        "card": properties.name,
        "torch": torch.__version__,
        "tests": tests,
        "figures_us": {name: round(value, 2) for name, value in figures.items()},
        "kernels": kernels,
        "wall_s": round(time.perf_counter() - began, 1),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if tests["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
