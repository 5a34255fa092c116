"""Weight-stream kernels on a card: correctness, row invariance, and time against what the card can read.

Prints a table and ends with one line of JSON; --out writes it to a file. Random weights. "Sequence" is every matmul of
one step of a 27B hybrid with all linears in NVFP4 (64 layers and the head, 14.45 GB), captured in one CUDA graph: each
weight is read once a replay, so the L2 cache is cold for it. Refuses to time a kernel that fails its checks.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent.parent))

from localspec.kernels.fp8_pack import Fp8Weight, pack_fp8, random_packed_fp8
from localspec.kernels.nvfp4_pack import PackedNvfp4, random_packed
from localspec.kernels.ops import Norm
from localspec.kernels.packed_reference import packed_linear
from localspec.kernels.triton import stream_launch
from localspec.kernels.triton.stream_launch import Fusion, StreamWorkspace, normalise_rows, stream_linear
from localspec.kernels.triton.tilings import Tiling

DEVICE = torch.device("cuda")
HIDDEN, INNER, MIDDLE, VOCABULARY = 5120, 6144, 17408, 248320
SHAPES = {
    "in_gdn": (16384, HIDDEN),
    "in_attention": (14336, HIDDEN),
    "out": (HIDDEN, INNER),
    "gate_up": (2 * MIDDLE, HIDDEN),
    "down": (HIDDEN, MIDDLE),
    "head": (VOCABULARY, HIDDEN),
}
TilingOf = Callable[[int, int], Tiling]


@triton.jit
def read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    start = tl.program_id(0).to(tl.int64) * (BLOCK * UNROLL)
    for i in tl.static_range(UNROLL):
        total += tl.load(x_ptr + start + i * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def time_graph_ms(body: Callable[[], None], replays: int = 15) -> float:
    """Median of graph replays in ms; the body runs once before capture, so that everything is compiled."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for _ in range(3):
        graph.replay()
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    words = torch.randint(0, 1 << 30, (1 << 31,), dtype=torch.int32, device=DEVICE)
    best = 0.0
    for block, unroll, warps in ((1024, 4, 4), (2048, 4, 8), (4096, 4, 8), (4096, 8, 8)):
        grid = words.numel() // (block * unroll)
        out = torch.empty(grid, dtype=torch.int32, device=DEVICE)
        ms = time_graph_ms(lambda: read_kernel[(grid,)](words, out, 0, BLOCK=block, UNROLL=unroll, num_warps=warps), 7)
        best = max(best, words.numel() * 4 / ms / 1e9)
    del words
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    ms = time_graph_ms(lambda: torch.mm(a, b), 10)
    return {"read_tb_per_s": best, "bf16_matmul_tflops": 2 * 8192**3 / ms / 1e9}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def poisoned(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)


def check_case(name: str, packed, workspace: StreamWorkspace, tiling: Tiling | None, epilogue: str) -> dict:
    """Error against float32 for several row counts, then bitwise row invariance for 1..16 rows."""
    generator = torch.Generator(device=DEVICE).manual_seed(7)
    n, k = packed.shape
    columns = n // 2 if packed.gated else n
    x = torch.randn(16, k, device=DEVICE, generator=generator).bfloat16()
    residual = torch.randn(16, columns, device=DEVICE, generator=generator).bfloat16()
    norm = Norm(torch.randn(k, device=DEVICE, generator=generator), 1e-6, True) if epilogue == "silu_mul" else None

    def run(rows: torch.Tensor) -> torch.Tensor:
        workspace.partials.fill_(float("nan"))
        fusion = Fusion(norm, epilogue, residual[rows] if epilogue == "residual" else None)
        return stream_linear(x[rows], packed, fusion, workspace, poisoned(len(rows), columns), tiling)

    everything = torch.arange(16, device=DEVICE)
    full = run(everything)
    wanted = packed_linear(x, packed, norm, epilogue, residual if epilogue == "residual" else None)
    error = relative_error(full, wanted)
    differing = 0
    for rows in range(1, 17):
        for picked in (everything[:rows], torch.randperm(16, device=DEVICE)[:rows]):
            differing += int((run(picked) != full[picked]).sum())
    ok = error < (3e-5 if norm is None else 2e-3) and differing == 0 and int(workspace.tickets.sum()) == 0
    print(f"check {name:28s} {epilogue:9s} error {error:.1e} differing bits {differing} {'ok' if ok else 'WRONG'}")
    return {"case": name, "epilogue": epilogue, "error": error, "differing": differing, "ok": ok}


def checks(workspace: StreamWorkspace) -> list[dict]:
    results = []
    tilings = [Tiling(32, 1, 2, 8), Tiling(64, 2, 2, 4), Tiling(128, 4, 2, 2), Tiling(256, 8, 2, 1), Tiling(256, 16, 2, 1, 64)]
    for tiling in tilings:
        packed = random_packed(5120, 6144, DEVICE, 1, tiling.tile_rows)
        results.append(check_case(f"nvfp4 5120x6144 {tiling.tile_rows}", packed, workspace, tiling, "residual"))
    for rows, columns in ((1000, 272), (48, 5120), (34816, 5120)):
        packed = random_packed(rows, columns, DEVICE, 2, 128)
        results.append(check_case(f"nvfp4 {rows}x{columns}", packed, workspace, None, "none"))
    packed = random_packed(34816, 5120, DEVICE, 3, 128, gated=True)
    results.append(check_case("nvfp4 gated 34816x5120", packed, workspace, None, "silu_mul"))
    packed = random_packed(5120, 17408, DEVICE, 4, 64)
    results.append(check_case("nvfp4 5120x17408", packed, workspace, None, "residual"))
    for gated in (False, True):
        codes = torch.randint(0, 120, (2048, 1304), device=DEVICE, dtype=torch.uint8)
        codes |= torch.randint(0, 2, codes.shape, device=DEVICE, dtype=torch.uint8) << 7
        weight = Fp8Weight(
            codes.view(torch.float8_e4m3fn),
            torch.rand(2048, device=DEVICE) + 0.5,
            torch.rand(16, 11, device=DEVICE) * 1e-2,
        )
        epilogue = "silu_mul" if gated else "none"
        results.append(check_case("fp8 blocks 2048x1304", pack_fp8(weight, 128, gated), workspace, None, epilogue))
    results.append(check_case("fp8 5120x6144", random_packed_fp8(5120, 6144, DEVICE, 5, 64), workspace, None, "none"))
    return results


class Weights:
    """All weights of the sequence, made once; a change of tile height re-draws them in place."""

    def __init__(self, tiling_of: TilingOf) -> None:
        self.layers: list[dict[str, PackedNvfp4]] = []
        for layer in range(64):
            names = {"in": "in_attention" if layer % 4 == 3 else "in_gdn", "out": "out", "gate_up": "gate_up"}
            names["down"] = "down"
            self.layers.append({key: self._make(name, tiling_of, layer) for key, name in names.items()})
        self.head = self._make("head", tiling_of, 64)

    @staticmethod
    def _make(name: str, tiling_of: TilingOf, seed: int) -> PackedNvfp4:
        n, k = SHAPES[name]
        return random_packed(n, k, DEVICE, seed, tiling_of(n, k).tile_rows, gated=name == "gate_up")

    @property
    def read_bytes(self) -> int:
        return self.head.read_bytes + sum(p.read_bytes for layer in self.layers for p in layer.values())


def run_sequence(weights: Weights, workspace: StreamWorkspace, tiling_of: TilingOf, rows: int, fused: bool) -> Callable:
    x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
    inner = torch.randn(rows, INNER, device=DEVICE).bfloat16()
    middle = torch.empty(rows, MIDDLE, device=DEVICE, dtype=torch.bfloat16)
    wide = torch.empty(rows, 16384, device=DEVICE, dtype=torch.bfloat16)
    stream = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
    logits = torch.empty(rows, VOCABULARY, device=DEVICE, dtype=torch.float32)
    norm = Norm(torch.zeros(HIDDEN, device=DEVICE, dtype=torch.bfloat16), 1e-6, True) if fused else None
    residual = Fusion(epilogue="residual", residual=stream)
    plain = Fusion(norm)

    launches = itertools.count()

    def go(x_in: torch.Tensor, packed: PackedNvfp4, fusion: Fusion, out: torch.Tensor) -> None:
        stream_linear(x_in, packed, fusion, workspace, out, tiling_of(*packed.shape), next(launches) % 2)

    def body() -> None:
        source = stream if fused else x
        for layer in weights.layers:
            go(source, layer["in"], plain, wide[:, : layer["in"].shape[0]])
            go(inner, layer["out"], residual, stream)
            go(source, layer["gate_up"], Fusion(norm, "silu_mul"), middle)
            go(middle, layer["down"], residual, stream)
        go(source, weights.head, plain, logits)

    return body


def per_shape(weights: Weights, workspace: StreamWorkspace, tiling_of: TilingOf, rows: int) -> dict[str, dict]:
    result = {}
    groups = {"in_gdn": [w["in"] for i, w in enumerate(weights.layers) if i % 4 != 3]}
    for key in ("out", "gate_up", "down"):
        groups[key] = [w[key] for w in weights.layers]
    groups["head"] = [weights.head]
    for name, packs in groups.items():
        n, k = packs[0].shape
        x = torch.randn(rows, k, device=DEVICE).bfloat16()
        out = torch.empty(rows, n // 2 if packs[0].gated else n, device=DEVICE, dtype=torch.bfloat16)
        epilogue = "silu_mul" if packs[0].gated else "none"

        def body(x=x, packs=packs, out=out, epilogue=epilogue) -> None:
            for packed in packs:
                stream_linear(x, packed, Fusion(epilogue=epilogue), workspace, out, tiling_of(*packed.shape))

        us = time_graph_ms(body, 9) * 1000 / len(packs)
        result[name] = {"us": us, "tb_per_s": packs[0].read_bytes / us / 1e6}
    return result


def tiling_by_height(low: Tiling, high: Tiling) -> TilingOf:
    return lambda n, k: low if n <= 8192 else high


def uniform(*choice) -> TilingOf:
    tiling = Tiling(*choice)
    return lambda n, k: tiling


A, B, C = (128, 4, 2, 2), (64, 2, 2, 4), (128, 8, 2, 2, 64)
D, E = (64, 4, 2, 4, 64), (256, 8, 2, 1)


def mixed_in(n: int, k: int) -> Tiling:
    return Tiling(64, 4, 2, 2, 64, True) if n == 16384 else Tiling(*A)


def mixed_whole(n: int, k: int) -> Tiling:
    if n == VOCABULARY:
        return Tiling(64, 2, 2, 8, 112, True)
    return mixed_in(n, k)


def mixed_low(n: int, k: int) -> Tiling:
    return Tiling(*B) if n == HIDDEN else Tiling(*A)


def variants() -> dict[str, tuple[TilingOf, dict]]:
    """name -> (tiling of a shape, launch options: when the next kernel may start, polling, units asked for ahead)."""
    result: dict[str, tuple[TilingOf, dict]] = {}
    for name, choice in (("A", A), ("B", B), ("C", C), ("D", D), ("E", E)):
        for mode in (0, 2, 3):
            result[f"{name} {choice} launch {mode}"] = (uniform(*choice), {"dependent_launch": mode})
    polls = ((2, 0), (2, 2), (2, 4), (3, 0), (3, 4))
    for mode, ahead in polls:
        options = {"dependent_launch": mode, "poll": True, "ahead_units": ahead}
        result[f"A launch {mode} poll ahead {ahead}"] = (uniform(*A), options)
    result["A launch 2 ahead 2"] = (uniform(*A), {"dependent_launch": 2, "ahead_units": 2})
    result["B launch 2 poll"] = (uniform(*B), {"dependent_launch": 2, "poll": True})
    result["B launch 2 poll ahead 4"] = (uniform(*B), {"dependent_launch": 2, "poll": True, "ahead_units": 4})
    result["A, whole tiles of 64 for in, launch 2"] = (mixed_in, {"dependent_launch": 2})
    result["A, whole tiles for in and head, launch 2"] = (mixed_whole, {"dependent_launch": 2})
    result["A, B below, launch 2"] = (mixed_low, {"dependent_launch": 2})
    return result


SHAPE_TILINGS = (
    A, B, C, D, E, (128, 4, 2, 3), (128, 8, 2, 3, 80), (64, 2, 2, 6), (256, 8, 2, 2), (128, 8, 2, 1, 128, True),
    (64, 4, 2, 2, 64, True), (64, 2, 2, 4, 128, True), (32, 1, 2, 8, 128, True), (32, 2, 2, 8, 80, True), (128, 4, 2, 2, 128, True),
)


def sweep(workspace: StreamWorkspace) -> dict:
    """us of each shape by tiling, 1 and 16 rows, in a chain of their own with dependent launch."""
    space = dataclasses.replace(workspace, dependent_launch=2)
    result = {}
    for choice in SHAPE_TILINGS:
        tiling = Tiling(*choice)
        row: dict = {}
        for name, copies in (("in_gdn", 10), ("out", 24), ("gate_up", 6), ("down", 10), ("head", 1)):
            n, k = SHAPES[name]
            packs = [random_packed(n, k, DEVICE, seed, tiling.tile_rows) for seed in range(copies)]
            for rows in (1, 16):
                x = torch.randn(rows, k, device=DEVICE).bfloat16()
                out = torch.empty(rows, n, device=DEVICE, dtype=torch.bfloat16)
                try:
                    ms = time_graph_ms(lambda: [stream_linear(x, p, Fusion(), space, out, tiling) for p in packs] and None, 9)
                    row[f"{name} {rows}"] = ms * 1000 / copies
                except Exception as error:
                    row[f"{name} {rows}"] = str(error)[:80]
        result[str(choice)] = row
        cells = " ".join(f"{key}:{v:.1f}" if isinstance(v, float) else f"{key}:{v[:20]}" for key, v in row.items())
        print(f"{choice!s:22s} {cells}", flush=True)
    return result


def profile(workspace: StreamWorkspace) -> None:
    space = dataclasses.replace(workspace, dependent_launch=0)
    for choice in ((128, 4, 2, 2), (256, 16, 2, 1, 64), (64, 2, 2, 6)):
        packed = random_packed(*SHAPES["gate_up"], DEVICE, 1, choice[0])
        x = torch.randn(1, HIDDEN, device=DEVICE).bfloat16()
        out = torch.empty(1, SHAPES["gate_up"][0], device=DEVICE, dtype=torch.bfloat16)
        for _ in range(2):
            stream_linear(x, packed, Fusion(), space, out, Tiling(*choice))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", action="store_true", help="run a few kernels once, for a profiler around it")
    parser.add_argument("--variants", action="store_true", help="time every tiling of the list, not only the table's")
    arguments = parser.parse_args()
    began = time.time()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    workspace = StreamWorkspace.create(DEVICE, 8192, MIDDLE)
    if arguments.profile:
        return profile(workspace)
    report["ceilings"] = ceilings()
    print(report["ceilings"])
    report["checks"] = [*checks(workspace), check_chain(workspace)]
    if not all(check["ok"] for check in report["checks"]):
        print(json.dumps(report))
        sys.exit("a kernel is wrong; nothing is timed")
    print(f"checked after {time.time() - began:.0f} s")
    measure(report, workspace)
    report["sweep"] = sweep(workspace)
    report["wall_s"] = time.time() - began
    text = json.dumps(report)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


def check_chain(workspace: StreamWorkspace) -> dict:
    """A chain of dependent launches gives the bits of the same chain launched one by one, many times over."""
    tiling_of = uniform(*A)
    names = ("in_gdn", "out", "gate_up", "down")
    packs = [Weights._make(name, tiling_of, seed) for seed, name in enumerate(names)]
    norm = Norm(torch.zeros(HIDDEN, device=DEVICE), 1e-6, True)
    differing = 0
    for rows in (1, 5, 16):
        first = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()

        def chain(options: dict, first=first, rows=rows) -> torch.Tensor:
            space = dataclasses.replace(workspace, **options)
            stream = first.clone()
            for step in range(8):
                wide = poisoned(rows, 16384, torch.bfloat16)
                stream_linear(stream, packs[0], Fusion(norm), space, wide, None, 0)
                fusion = Fusion(epilogue="residual", residual=stream)
                stream_linear(wide[:, :INNER], packs[1], fusion, space, stream, None, 1)
                middle = poisoned(rows, MIDDLE, torch.bfloat16)
                stream_linear(stream, packs[2], Fusion(norm, "silu_mul"), space, middle, None, 0)
                stream_linear(middle, packs[3], Fusion(epilogue="residual", residual=stream), space, stream, None, 1)
            return stream

        wanted = chain({"dependent_launch": 0})
        for options in ({"dependent_launch": 2}, {"dependent_launch": 3}, {"dependent_launch": 2, "poll": True}):
            for _ in range(5):
                differing += int((chain(options) != wanted).sum()) + int(wanted.isnan().sum())
    print(f"check chain of dependent launches: differing bits {differing}")
    return {"case": "chain", "differing": differing, "ok": differing == 0}


def measure(report: dict, workspace: StreamWorkspace) -> None:
    """All variants at one row, the promising ones at 16; then rows, norms, shapes for the best."""
    report["variants"] = {}
    weights, heights, best = None, None, None
    for name, (tiling_of, options) in variants().items():
        now = tuple(tiling_of(*shape).tile_rows for shape in SHAPES.values())
        if now != heights:
            weights = None
            weights, heights = Weights(tiling_of), now
        space = dataclasses.replace(workspace, **options)
        try:
            ms = time_graph_ms(run_sequence(weights, space, tiling_of, 1, False), 9)
            entry = {"ms": ms, "tb_per_s": weights.read_bytes / ms / 1e9}
            if best is None or ms < report["variants"][best]["ms"] * 1.03:
                entry["ms_16_rows"] = time_graph_ms(run_sequence(weights, space, tiling_of, 16, False), 7)
                entry["ms_norms"] = time_graph_ms(run_sequence(weights, space, tiling_of, 1, True), 7)
                entry["ms_norms_16_rows"] = time_graph_ms(run_sequence(weights, space, tiling_of, 16, True), 7)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:100]}")
            report["variants"][name] = {"error": str(error)[:200]}
            continue
        print(f"{name:42s} " + " ".join(f"{key} {value:.3f}" for key, value in entry.items()), flush=True)
        report["variants"][name] = entry
        if best is None or ms < report["variants"][best]["ms"]:
            best = name
    tiling_of, options = variants()[best]
    weights = None
    weights = Weights(tiling_of)
    space = dataclasses.replace(workspace, **options)
    report["best"], report["read_bytes"] = best, weights.read_bytes
    report["rows_ms"], report["rows_with_norms_ms"] = {}, {}
    for rows in (1, 2, 4, 8, 9, 16):
        report["rows_ms"][rows] = time_graph_ms(run_sequence(weights, space, tiling_of, rows, False))
        report["rows_with_norms_ms"][rows] = time_graph_ms(run_sequence(weights, space, tiling_of, rows, True))
    print(f"best {best}: rows {report['rows_ms']}; with norms {report['rows_with_norms_ms']}")
    report["shapes"] = {rows: per_shape(weights, space, tiling_of, rows) for rows in (1, 16)}
    for rows, table in report["shapes"].items():
        for name, entry in table.items():
            print(f"{rows:2d} rows {name:8s} {entry['us']:.2f} us {entry['tb_per_s']:.2f} TB/s")
    measure_parts(report, weights, space, tiling_of)


def measure_parts(report: dict, weights: Weights, space: StreamWorkspace, tiling_of: TilingOf) -> None:
    """Norm launches alone, the sequence without decoding, and FP8."""
    x = torch.randn(1, HIDDEN, device=DEVICE).bfloat16()
    norm = Norm(torch.zeros(HIDDEN, device=DEVICE), 1e-6, True)
    for mode in (0, 2):
        one = dataclasses.replace(space, dependent_launch=mode)
        report[f"norm_us_launch_{mode}"] = 10 * time_graph_ms(lambda: [normalise_rows(x, norm, one) for _ in range(100)] and None)
    flat = [p.data.view(torch.int32) for layer in weights.layers for p in layer.values()] + [weights.head.data.view(torch.int32)]
    sums = torch.empty(1 << 16, dtype=torch.int32, device=DEVICE)

    def reads() -> None:
        for words in flat:
            read_kernel[(words.numel() // 8192,)](words, sums, 0, BLOCK=2048, UNROLL=4, num_warps=8)

    report["plain_reads_ms"] = time_graph_ms(reads)
    print(f"plain reads of the same weights, one launch each: {report['plain_reads_ms']:.3f} ms")
    original = stream_launch.nvfp4_decode_asm
    stream_launch.nvfp4_decode_asm = lambda odd, native: "\n".join(f"mov.b32 ${i}, ${16 + i % 4};" for i in range(16))
    report["without_decode_ms"] = time_graph_ms(run_sequence(weights, space, tiling_of, 1, False))
    stream_launch.nvfp4_decode_asm = original
    packs = [random_packed_fp8(34816, HIDDEN, DEVICE, seed, 128) for seed in range(8)]
    for rows in (1, 16):
        x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
        out = torch.empty(rows, 34816, device=DEVICE, dtype=torch.bfloat16)
        ms = time_graph_ms(lambda: [stream_linear(x, p, Fusion(), space, out) for p in packs] and None)
        report[f"fp8_34816x5120_{rows}_tb_per_s"] = packs[0].read_bytes * len(packs) / ms / 1e9
    for key in ("norm_us_launch_0", "norm_us_launch_2", "without_decode_ms", "fp8_34816x5120_1_tb_per_s", "fp8_34816x5120_16_tb_per_s"):
        print(f"{key} {report[key]:.3f}")


if __name__ == "__main__":
    main()
