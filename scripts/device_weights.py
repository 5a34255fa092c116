"""Weight-stream kernels on a card: their GPU tests, then time against what the card can read.

Prints a table and ends with one line of JSON; --out writes it to a file. Random weights. "Sequence" is every matmul of
one step of a 27B hybrid with all linears in NVFP4 (64 layers and the head, 14.45 GB), captured in one CUDA graph: each
weight is read once a replay, so the L2 cache is cold for it. Times nothing if a test fails. Three minutes on an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from localspec.kernels.fp8_pack import random_packed_fp8  # noqa: E402
from localspec.kernels.nvfp4_pack import PackedNvfp4, random_packed  # noqa: E402
from localspec.kernels.ops import Norm  # noqa: E402
from localspec.kernels.triton import stream_launch  # noqa: E402
from localspec.kernels.triton.stream_launch import Fusion, StreamWorkspace, stream_linear  # noqa: E402
from localspec.kernels.triton.tilings import Tiling  # noqa: E402
from localspec.kernels.triton.unpack_weights import unpack_bfloat16  # noqa: E402

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
ROWS = (1, 2, 4, 8, 9, 16)
# Tilings beside the table's that fill a multiprocessor exactly: tile rows, warps, depth, blocks, registers, dependent.
ALTERNATIVES = (
    Tiling(128, 4, 2, 2, True, 128, False),
    Tiling(64, 2, 2, 3, True, 128, True),
    Tiling(256, 8, 2, 1, True, 128, True),
    Tiling(128, 8, 2, 2, True, 64, True),
)


@triton.jit
def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Sum of BLOCK * UNROLL words: a plain read at full width."""
    total = tl.zeros((BLOCK,), tl.int32)
    start = tl.program_id(0).to(tl.int64) * (BLOCK * UNROLL)
    for i in tl.static_range(UNROLL):
        total += tl.load(x_ptr + start + i * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def time_graph_ms(body: Callable[[], object], replays: int = 11) -> float:
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


def read_words(words: Tensor, sums: Tensor, block: int = 2048, warps: int = 8) -> None:
    read_kernel[(words.numel() // (block * 4),)](words, sums, BLOCK=block, UNROLL=4, num_warps=warps)


def ceilings() -> dict[str, float]:
    words = torch.randint(0, 1 << 30, (1 << 31,), dtype=torch.int32, device=DEVICE)
    sums = torch.empty(1 << 20, dtype=torch.int32, device=DEVICE)
    best_ms = min(time_graph_ms(partial(read_words, words, sums, *way), 7) for way in ((2048, 8), (4096, 8)))
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    matmul_ms = time_graph_ms(partial(torch.mm, a, b), 9)
    return {
        "read_tb_per_s": words.numel() * 4 / best_ms / 1e9,
        "bf16_matmul_tflops": 2 * 8192**3 / matmul_ms / 1e9,
    }


def run_tests() -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--timeout", "120"]
    tests = subprocess.run(
        [*command, str(ROOT / "tests/kernels/gpu_weights.py")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(tests.stdout[-5000:], tests.stderr[-500:], flush=True)
    lines = tests.stdout.strip().splitlines()
    return {"passed": tests.returncode == 0, "last_line": lines[-1] if lines else ""}


class Weights:
    """All weights of the sequence; a layer's are named in, out, gate_up, down."""

    def __init__(self, tile_rows: int) -> None:
        self.layers: list[dict[str, PackedNvfp4]] = []
        for layer in range(64):
            names = {"in": "in_attention" if layer % 4 == 3 else "in_gdn", "out": "out", "gate_up": "gate_up"}
            names["down"] = "down"
            self.layers.append({key: self.make(name, tile_rows, layer) for key, name in names.items()})
        self.head = self.make("head", tile_rows, 64)

    @staticmethod
    def make(name: str, tile_rows: int, seed: int) -> PackedNvfp4:
        return random_packed(*SHAPES[name], DEVICE, seed, tile_rows, gated=name == "gate_up")

    def all(self) -> list[PackedNvfp4]:
        return [weight for layer in self.layers for weight in layer.values()] + [self.head]


def sequence(
    weights: Weights, workspace: StreamWorkspace, rows: int, norms: bool, tiling: Tiling | None = None
) -> Callable[[], None]:
    inner = torch.randn(rows, INNER, device=DEVICE).bfloat16()
    middle = torch.empty(rows, MIDDLE, device=DEVICE, dtype=torch.bfloat16)
    wide = torch.empty(rows, 16384, device=DEVICE, dtype=torch.bfloat16)
    stream = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
    logits = torch.empty(rows, VOCABULARY, device=DEVICE, dtype=torch.float32)
    norm = Norm(torch.zeros(HIDDEN, device=DEVICE, dtype=torch.bfloat16), 1e-6, True) if norms else None
    residual = Fusion(epilogue="residual", residual=stream)

    def body() -> None:
        for layer in weights.layers:
            stream_linear(stream, layer["in"], Fusion(norm), workspace, wide[:, : layer["in"].shape[0]], tiling)
            stream_linear(inner, layer["out"], residual, workspace, stream, tiling)
            stream_linear(stream, layer["gate_up"], Fusion(norm, "silu_mul"), workspace, middle, tiling)
            stream_linear(middle, layer["down"], residual, workspace, stream, tiling)
        stream_linear(stream, weights.head, Fusion(norm), workspace, logits, tiling)

    return body


def per_shape(weights: Weights, workspace: StreamWorkspace, rows: int) -> dict[str, dict[str, float]]:
    """Each shape in a chain of its own."""
    groups = {"in_gdn": [layer["in"] for i, layer in enumerate(weights.layers) if i % 4 != 3]}
    groups |= {key: [layer[key] for layer in weights.layers] for key in ("out", "gate_up", "down")}
    groups["head"] = [weights.head]
    result = {}
    for name, packs in groups.items():
        us = time_graph_ms(chain(packs, workspace, rows)) * 1000 / len(packs)
        result[name] = {"us": us, "tb_per_s": packs[0].read_bytes / us / 1e6}
        print(f"{rows:2d} rows {name:8s} {us:7.2f} us {result[name]['tb_per_s']:.2f} TB/s", flush=True)
    return result


def chain(packs: list[Any], workspace: StreamWorkspace, rows: int) -> Callable[[], None]:
    n, k = packs[0].shape
    x = torch.randn(rows, k, device=DEVICE).bfloat16()
    out = torch.empty(rows, n // 2 if packs[0].gated else n, device=DEVICE, dtype=torch.bfloat16)
    fusion = Fusion(epilogue="silu_mul" if packs[0].gated else "none")

    def body() -> None:
        for packed in packs:
            stream_linear(x, packed, fusion, workspace, out)

    return body


def unpack_all(packs: list[Any], out: Tensor) -> None:
    for packed in packs:
        unpack_bfloat16(packed, out)


def measure(report: dict[str, Any], workspace: StreamWorkspace) -> None:
    weights = Weights(128)
    report["read_bytes"] = sum(weight.read_bytes for weight in weights.all())
    report["floor_ms"] = report["read_bytes"] / report["ceilings"]["read_tb_per_s"] / 1e9
    report["rows_ms"], report["rows_with_norms_ms"] = {}, {}
    for rows in ROWS:
        report["rows_ms"][rows] = time_graph_ms(sequence(weights, workspace, rows, False))
        report["rows_with_norms_ms"][rows] = time_graph_ms(sequence(weights, workspace, rows, True))
        print(
            f"{rows:2d} rows: {report['rows_ms'][rows]:.3f} ms, with norms {report['rows_with_norms_ms'][rows]:.3f}",
            flush=True,
        )
    report["shapes"] = {rows: per_shape(weights, workspace, rows) for rows in (1, 16)}
    sums = torch.empty(1 << 16, dtype=torch.int32, device=DEVICE)
    flat = [weight.data.view(torch.int32) for weight in weights.all()]
    report["plain_reads_ms"] = time_graph_ms(lambda: [read_words(words, sums) for words in flat])
    decode = stream_launch.nvfp4_decode_asm
    stream_launch.nvfp4_decode_asm = lambda odd, native: "\n".join(f"mov.b32 ${i}, ${16 + i % 4};" for i in range(16))
    report["without_decode_ms"] = time_graph_ms(sequence(weights, workspace, 1, False))
    stream_launch.nvfp4_decode_asm = decode
    print(
        f"plain reads, one launch each {report['plain_reads_ms']:.3f} ms; no decoding {report['without_decode_ms']:.3f}"
    )
    fp8 = [random_packed_fp8(*SHAPES["gate_up"], DEVICE, seed) for seed in range(8)]
    report["fp8_tb_per_s"] = {
        rows: fp8[0].read_bytes * 8 / time_graph_ms(chain(fp8, workspace, rows)) / 1e9 for rows in (1, 16)
    }
    print(f"fp8 34816 x 5120, TB/s by rows: {report['fp8_tb_per_s']}")
    for name, packs in (("nvfp4", [layer["gate_up"] for layer in weights.layers[:8]]), ("fp8", fp8)):
        whole = torch.empty(packs[0].shape, device=DEVICE, dtype=torch.bfloat16)
        us = time_graph_ms(partial(unpack_all, packs, whole)) * 1000 / len(packs)
        report[f"unpack_{name}_us"] = us
        print(
            f"unpack {name} 34816 x 5120: {us:.1f} us, {(whole.numel() * 2 + packs[0].read_bytes) / us / 1e6:.2f} TB/s"
        )
    report["alternatives"] = {}
    for tiling in ALTERNATIVES:
        if weights.head.tile_rows != tiling.tile_rows:
            del weights
            weights = Weights(tiling.tile_rows)
        space = dataclasses.replace(workspace, shared_bytes_per_multiprocessor=1 << 30)
        times = {rows: time_graph_ms(sequence(weights, space, rows, True, tiling), 7) for rows in (1, 16)}
        report["alternatives"][str(dataclasses.astuple(tiling))] = times
        print(f"{dataclasses.astuple(tiling)} with norms: {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.time()
    torch.manual_seed(0)
    report: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["triton"] = triton.__version__
    report["tests"] = run_tests()
    if not report["tests"]["passed"]:
        print(json.dumps(report))
        sys.exit("a kernel is wrong; nothing is timed")
    report["ceilings"] = ceilings()
    print(report["ceilings"], f"after {time.time() - began:.0f} s", flush=True)
    measure(report, StreamWorkspace.create(DEVICE, 8192, MIDDLE))
    report["wall_s"] = time.time() - began
    text = json.dumps(report)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
