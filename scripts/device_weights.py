"""Weight-stream kernels on a card: correctness, row invariance, and time against what the card can read.

Prints a table and ends with one line of JSON; --out writes it to a file. Random weights. "Sequence" is every matmul of
one step of a 27B hybrid with all linears in NVFP4 (64 layers and the head, 14.45 GB), captured in one CUDA graph: each
weight is read once a replay, so the L2 cache is cold for it. Refuses to time a kernel that fails its checks.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from localspec.kernels.reference_linear import reference_linear
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
    wanted = reference_linear(x, packed, norm, epilogue, residual if epilogue == "residual" else None)
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
    tilings = [Tiling(32, 1, 3, 6), Tiling(64, 2, 3, 4), Tiling(128, 4, 3, 2), Tiling(256, 8, 2, 1)]
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

    def go(x_in: torch.Tensor, packed: PackedNvfp4, fusion: Fusion, out: torch.Tensor) -> None:
        stream_linear(x_in, packed, fusion, workspace, out, tiling_of(*packed.shape))

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


def variants() -> dict[str, tuple[TilingOf, int]]:
    """name -> (tiling of a shape, dependent launch: 0 off, 1 after the last load, 2 early)."""
    t64, t128 = Tiling(64, 2, 3, 4), Tiling(128, 4, 3, 2)
    return {
        "base": (tiling_by_height(t64, t128), 1),
        "no dependent launch": (tiling_by_height(t64, t128), 0),
        "early launch": (tiling_by_height(t64, t128), 2),
        "all 128/4w/2b/3s": (tiling_by_height(t128, t128), 1),
        "all 64/2w/4b/3s": (tiling_by_height(t64, t64), 1),
        "64/2w/6b/2s 128/4w/3b/2s": (tiling_by_height(Tiling(64, 2, 2, 6), Tiling(128, 4, 2, 3)), 1),
        "64/2w/5b/3s 128/4w/3b/3s": (tiling_by_height(Tiling(64, 2, 3, 5), Tiling(128, 4, 3, 3)), 1),
        "64/2w/2b/5s 128/4w/1b/5s": (tiling_by_height(Tiling(64, 2, 5, 2), Tiling(128, 4, 5, 1)), 1),
        "64/2w/4b/3s 256/8w/1b/2s": (tiling_by_height(t64, Tiling(256, 8, 2, 1)), 1),
        "64/2w/4b/3s 256/8w/1b/3s": (tiling_by_height(t64, Tiling(256, 8, 3, 1)), 1),
        "64/4w/3b/3s 128/8w/2b/3s": (tiling_by_height(Tiling(64, 4, 3, 3), Tiling(128, 8, 3, 2, 64)), 1),
        "32/1w/6b/3s 128/4w/2b/3s": (tiling_by_height(Tiling(32, 1, 3, 6), t128), 1),
        "64/2w/3b/3s 128/4w/2b/4s": (tiling_by_height(Tiling(64, 2, 3, 3), Tiling(128, 4, 4, 2)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variants", action="store_true", help="time every tiling of the list, not only the table's")
    arguments = parser.parse_args()
    began = time.time()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    workspace = StreamWorkspace.create(DEVICE, 8192, MIDDLE)
    report["ceilings"] = ceilings()
    print(report["ceilings"])
    report["checks"] = checks(workspace)
    if not all(check["ok"] for check in report["checks"]):
        print(json.dumps(report))
        sys.exit("a kernel is wrong; nothing is timed")
    print(f"checked after {time.time() - began:.0f} s")
    measure(report, workspace)
    report["wall_s"] = time.time() - began
    text = json.dumps(report)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


def measure(report: dict, workspace: StreamWorkspace) -> None:
    """All variants at one row; then rows, shapes, norms and a copy without arithmetic for the best one."""
    report["variants"] = {}
    weights, heights, best = None, None, None
    for name, (tiling_of, mode) in variants().items():
        now = tuple(tiling_of(*shape).tile_rows for shape in SHAPES.values())
        if now != heights:
            del weights
            weights, heights = Weights(tiling_of), now
        space = dataclasses.replace(workspace, dependent_launch=mode)
        try:
            ms = time_graph_ms(run_sequence(weights, space, tiling_of, 1, False))
        except Exception as error:  # a tiling that does not fit is a result of the sweep
            print(f"{name}: {type(error).__name__} {str(error)[:100]}")
            report["variants"][name] = {"error": str(error)[:200]}
            continue
        rate = weights.read_bytes / ms / 1e9
        ms8 = time_graph_ms(run_sequence(weights, space, tiling_of, 8, False), 7)
        ms16 = time_graph_ms(run_sequence(weights, space, tiling_of, 16, False), 7)
        print(f"{name:28s} 1 row {ms:.3f} ms {rate:.2f} TB/s; 8 rows {ms8:.3f}; 16 rows {ms16:.3f}", flush=True)
        report["variants"][name] = {"ms": ms, "tb_per_s": rate, "ms_8_rows": ms8, "ms_16_rows": ms16}
        if best is None or ms < report["variants"][best]["ms"]:
            best = name
    tiling_of, mode = variants()[best]
    weights = None
    weights = Weights(tiling_of)
    space = dataclasses.replace(workspace, dependent_launch=mode)
    report["best"], report["read_bytes"] = best, weights.read_bytes
    report["rows_ms"] = {r: time_graph_ms(run_sequence(weights, space, tiling_of, r, False)) for r in (1, 2, 4, 8, 9, 16)}
    report["rows_with_norms_ms"] = {r: time_graph_ms(run_sequence(weights, space, tiling_of, r, True)) for r in (1, 8, 16)}
    print(f"best {best}: rows {report['rows_ms']}; with norms {report['rows_with_norms_ms']}")
    report["shapes"] = {rows: per_shape(weights, space, tiling_of, rows) for rows in (1, 16)}
    for rows, table in report["shapes"].items():
        for name, entry in table.items():
            print(f"{rows:2d} rows {name:8s} {entry['us']:.2f} us {entry['tb_per_s']:.2f} TB/s")
    x = torch.randn(1, HIDDEN, device=DEVICE).bfloat16()
    norm = Norm(torch.zeros(HIDDEN, device=DEVICE), 1e-6, True)
    ms = time_graph_ms(lambda: [normalise_rows(x, norm, space) for _ in range(100)] and None)
    report["norm_us"] = ms * 10
    original = stream_launch.nvfp4_decode_asm
    stream_launch.nvfp4_decode_asm = lambda odd, native: "\n".join(f"mov.b32 ${i}, ${16 + i % 4};" for i in range(16))
    report["without_decode_ms"] = time_graph_ms(run_sequence(weights, space, tiling_of, 1, False))
    stream_launch.nvfp4_decode_asm = original
    print(f"norm {report['norm_us']:.2f} us; without decoding {report['without_decode_ms']:.3f} ms")


if __name__ == "__main__":
    main()
