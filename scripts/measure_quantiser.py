"""What NVFP4 costs a model: KL and top-1 agreement of each way to quantise its matrices, beside integer formats.

    python scripts/measure_quantiser.py MODEL_FOLDER [--name NAME] [--ways max,mse,...] [--dither] [--bits 5.25]
                                        [--calibration-windows 40] [--held-out-windows 8]

The source is the folder's weights as float32. All matrices of the layers are replaced, the embedding (and a tied head)
never. Calibration text: articles of pydoc_data.topics and modules of the standard library. Held-out text: the prose of
localspec/hub/calibration_text.py and other modules, 256 tokens each, teacher forced. Integer formats are quantised by
the rounding of the gguf package (Q4_0, Q4_1), and Q4_K by a search of our own over the format's grid, super-blocks
running on over the ends of rows. `--dither` adds uniform noise of one step of its grid to a source that was 4-bit
itself, so that integer formats cannot simply find that grid again. `mixed` spends `--bits` on matrices in FP8 as the
import does, by the KL of each group; `mixed_by_output` by output errors; `first` on the first layers' (the control).
Prints a table and one line of JSON, kept in scripts/results/quantiser.json by name; ways that are not run again keep
their figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from pydoc_data.topics import topics

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from localspec.formats.blocks import BlockWeight
from localspec.formats.checkpoint import FolderCheckpoint, open_checkpoint, read_config
from localspec.formats.compact import Stored, survey
from localspec.hub.calibration import TextModel, agreement
from localspec.hub.calibration_text import CALIBRATION_PROSE, HELD_OUT_PROSE
from localspec.hub.compact import group_losses
from localspec.hub.compact_report import allocate
from localspec.kernels.fp8_pack import quantise_fp8
from localspec.kernels.nvfp4_feedback import feedback_of, quantise_nvfp4_with_feedback
from localspec.kernels.nvfp4_pack import quantise_nvfp4

RESULTS = Path(__file__).parent / "results" / "quantiser.json"
WINDOW_TOKENS = 256
CALIBRATION_WINDOWS = 40
CALIBRATION_MODULES = ("textwrap", "heapq", "fractions", "shlex", "json.decoder")
HELD_OUT_MODULES = ("bisect", "sched", "colorsys")
SUPER_BLOCK = 256
EXACT_DB = 999.0
"""Stands for no error at all, which JSON has no number for."""
Way = Callable[[Tensor, Tensor], Tensor]


def q4_k(weight: Tensor, importance: Tensor | None = None) -> Tensor:
    """Values on the grid of Q4_K: 16 levels a block of 32, scale and minimum of 6 bits over a float16 each."""
    blocks = weight.reshape(-1, SUPER_BLOCK // 32, 32)
    counts = torch.ones_like(blocks) if importance is None else importance.expand_as(weight).reshape(blocks.shape)
    counts = counts / counts.mean(-1, keepdim=True).clamp(min=1e-30)
    low = blocks.amin(-1).clamp(max=0)
    width = (blocks.amax(-1) - low).clamp(min=1e-12)
    best = torch.full_like(low, torch.inf)
    best_scale, best_low = width / 15, low
    for shrink in range(-10, 11):
        codes = ((blocks - low[..., None]) * ((15 + 0.1 * shrink) / width)[..., None]).round().clamp(0, 15)
        # Least squares of scale * code + minimum.
        mean_code, mean = (counts * codes).mean(-1), (counts * blocks).mean(-1)
        spread = (counts * (codes - mean_code[..., None]).square()).sum(-1).clamp(min=1e-12)
        scale = (counts * (codes - mean_code[..., None]) * (blocks - mean[..., None])).sum(-1) / spread
        minimum = (mean - scale * mean_code).clamp(max=0)
        error = (counts * (codes * scale[..., None] + minimum[..., None] - blocks).square()).sum(-1)
        better = (error < best) & (scale > 0)
        best, best_scale = torch.where(better, error, best), torch.where(better, scale, best_scale)
        best_low = torch.where(better, minimum, best_low)
    scale_unit = (best_scale.amax(-1, keepdim=True) / 63).half().float().clamp(min=1e-8)
    low_unit = ((-best_low).amax(-1, keepdim=True) / 63).half().float().clamp(min=1e-8)
    scale = (best_scale / scale_unit).round().clamp(0, 63) * scale_unit
    minimum = -(-best_low / low_unit).round().clamp(0, 63) * low_unit
    codes = ((blocks - minimum[..., None]) / scale.clamp(min=1e-12)[..., None]).round().clamp(0, 15)
    return (codes * scale[..., None] + minimum[..., None]).reshape(weight.shape)


def by_gguf(kind: gguf.GGMLQuantizationType) -> Way:
    def way(weight: Tensor, moments: Tensor) -> Tensor:
        del moments
        packed = gguf.quants.quantize(weight.numpy(), kind)
        return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(packed, kind)))

    return way


WAYS: dict[str, tuple[float, Way]] = {
    "max": (4.5, lambda weight, moments: quantise_nvfp4(weight, "max").dequantise()),
    "mse": (4.5, lambda weight, moments: quantise_nvfp4(weight).dequantise()),
    "importance": (4.5, lambda weight, moments: quantise_nvfp4(weight, importance=moments.diagonal()).dequantise()),
    "feedback": (4.5, lambda weight, moments: quantise_nvfp4_with_feedback(weight, feedback_of(moments)).dequantise()),
    "q4_k": (4.5, lambda weight, moments: q4_k(weight)),
    "q4_k_importance": (4.5, lambda weight, moments: q4_k(weight, moments.diagonal())),
    "q4_0": (4.5, by_gguf(gguf.GGMLQuantizationType.Q4_0)),
    "q4_1": (5.0, by_gguf(gguf.GGMLQuantizationType.Q4_1)),
}


MIXED_WAYS = ("mixed", "mixed_by_output", "first")


def wide_matrices(
    checkpoint: FolderCheckpoint,
    moments: dict[str, Tensor],
    bits: float,
    way: str,
    losses: dict[tuple[str, ...], float],
) -> frozenset[str]:
    """Names of the matrices that get FP8 within a budget of bits a weight: by what they cost, or the first ones."""
    stored = survey(checkpoint)
    if way != "first":
        importance = {name: matrix.diagonal() for name, matrix in moments.items()}
        chosen = allocate(checkpoint, stored, importance, bits, losses if way == "mixed" else None)
        return frozenset(each.name for each in chosen if each.choice == "fp8")
    changing = [each for each in stored if each.choice == "nvfp4"]
    left_bytes = sum(each.num_values for each in changing) * (bits - 4.5) / 8
    found = set()
    for each in changing:
        cost_bytes = each.num_values * 3.5 / 8
        if cost_bytes <= left_bytes:
            left_bytes -= cost_bytes
            found.add(each.name)
    return frozenset(found)


def module_text(name: str) -> str:
    return Path(__import__(name, fromlist=["_"]).__file__).read_text(encoding="utf-8")


def texts(folder: Path, num_calibration: int, num_held_out: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Windows of token ids: for calibration, held out."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def windows(text: str) -> Iterator[tuple[int, ...]]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        yield from (tuple(ids[at : at + WINDOW_TOKENS]) for at in range(0, len(ids) - WINDOW_TOKENS + 1, WINDOW_TOKENS))

    prose = "\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2000)
    code = "\n".join(module_text(name)[:12000] for name in CALIBRATION_MODULES)
    half = num_calibration // 2
    calibration = [window for text in (prose, code) for window, _ in zip(windows(text), range(half), strict=False)]
    own_prose = "\n".join((HELD_OUT_PROSE, *CALIBRATION_PROSE))
    held_code = [next(windows(module_text(name))) for name in HELD_OUT_MODULES]
    held_out = [*windows(own_prose), *held_code]
    # A short run keeps prose and code.
    return calibration, held_out[:: -(-len(held_out) // num_held_out)]


def source_values(checkpoint: FolderCheckpoint, each: Stored, dither: bool) -> Tensor:
    """[N, K] float32: what the source means by a matrix, off its grid with `dither`."""
    weight = checkpoint.weight(each.name)
    values = weight.dequantise()
    if dither and each.choice != "kept" and isinstance(weight, BlockWeight):
        generator = torch.Generator().manual_seed(zlib.crc32(each.name.encode()))
        step = weight.scale.float().repeat_interleave(values.shape[1] // weight.scale.shape[1], dim=1)
        values = values + (torch.rand(values.shape, generator=generator) - 0.5) * step
    return values


def write_source(checkpoint: FolderCheckpoint, folder: Path, source: Path, dither: bool) -> None:
    """A folder with the values that every way is judged against, as float32."""
    _write(checkpoint, folder, source, lambda each: source_values(checkpoint, each, dither))


def write_variant(
    plain: FolderCheckpoint, folder: Path, source: Path, way: Way, moments: dict[str, Tensor], wide: frozenset[str]
) -> float:
    """A folder with the weights that a way gives, those of `wide` in FP8; returns its mean SQNR in dB."""
    ratios = []

    def values_of(each: Stored) -> Tensor:
        values = source_values(plain, each, dither=False)
        # A drafter's block does not run with the model, so nothing is known of its inputs.
        if each.choice == "kept" or each.name not in moments:
            return values
        found = quantise_fp8(values).dequantise() if each.name in wide else way(values, moments[each.name])
        error = (found - values).square().sum()
        if error > 0:
            ratios.append(float(10 * (values.square().sum() / error).log10()))
        return found

    _write(plain, folder, source, values_of)
    return statistics.mean(ratios) if ratios else EXACT_DB


def _write(checkpoint: FolderCheckpoint, folder: Path, source: Path, values_of: Callable[[Stored], Tensor]) -> None:
    folder.mkdir()
    config = read_config(source)
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        each.name: (values_of(each) if len(each.shape) == 2 else checkpoint.vector(each.name).clone()).contiguous()
        for each in survey(checkpoint)
    }
    save_file(tensors, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", default="demo")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--dither", action="store_true")
    parser.add_argument("--bits", type=float, default=5.25)
    parser.add_argument("--calibration-windows", type=int, default=CALIBRATION_WINDOWS)
    parser.add_argument("--held-out-windows", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calibration, held_out = texts(arguments.model, arguments.calibration_windows, arguments.held_out_windows)
    rows = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "plain"
        with closing(open_checkpoint(arguments.model)) as checkpoint:
            write_source(checkpoint, folder, arguments.model, arguments.dither)
        with closing(open_checkpoint(folder)) as plain:
            model = TextModel(folder, "cpu")
            expected = [model.log_probs(window) for window in held_out]
            names = frozenset(each.name for each in survey(plain) if each.choice == "nvfp4")
            moments = model.second_moments(calibration, names)
            importance = {name: matrix.diagonal() for name, matrix in moments.items()}
            begin = time.monotonic()
            needs_losses = "mixed" in arguments.ways.split(",")
            losses = group_losses(model, survey(plain), importance, tuple(calibration)) if needs_losses else {}
            arguments.losses_s = round(time.monotonic() - begin, 1)
            del model
            for name in arguments.ways.split(","):
                rows[name] = measure(name, plain, Path(scratch), (moments, losses), arguments, (expected, held_out))
    tokens = {"held_out": sum(map(len, held_out)), "calibration": sum(map(len, calibration))}
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    before = results.get(arguments.name, {})
    if before.get("tokens") == tokens and before.get("dither", False) == arguments.dither:
        rows = {**before["ways"], **rows}
    document = {"model": arguments.model.name, "dither": arguments.dither, "tokens": tokens, "ways": rows}
    if "max" in rows:
        base = rows["max"]["mean_kl_nats"]
        document["kl_below_max_scaling"] = {
            name: round(1 - row["mean_kl_nats"] / base, 3) for name, row in rows.items()
        }
    RESULTS.write_text(json.dumps({**results, arguments.name: document}, indent=1, allow_nan=False) + "\n")
    print(json.dumps(document))


def measure(
    name: str,
    plain: FolderCheckpoint,
    scratch: Path,
    known: tuple[dict[str, Tensor], dict[tuple[str, ...], float]],
    arguments: argparse.Namespace,
    judged: tuple[list[Tensor], list[tuple[int, ...]]],
) -> dict[str, object]:
    """One way's row of the table."""
    (moments, losses), (expected, held_out) = known, judged
    begin = time.monotonic()
    bits, way = (arguments.bits, WAYS["importance"][1]) if name in MIXED_WAYS else WAYS[name]
    wide = wide_matrices(plain, moments, bits, name, losses) if name in MIXED_WAYS else frozenset()
    folder = scratch / name
    sqnr_db = write_variant(plain, folder, arguments.model, way, moments, wide)
    quantise_s = time.monotonic() - begin
    other = TextModel(folder, "cpu")
    found = [other.log_probs(window) for window in held_out]
    shutil.rmtree(folder)
    whole = agreement(expected, found)
    each = [agreement([a], [b]).mean_kl for a, b in zip(expected, found, strict=True)]
    print(
        f"{name:16} {bits:4.2f} bits  KL {whole.mean_kl:.4f}  top-1 {100 * whole.top_1:.1f}%  "
        f"SQNR {sqnr_db:.2f} dB  {quantise_s:.0f} s" + (f"  {len(wide)} matrices in FP8" if wide else ""),
        flush=True,
    )
    return {
        "bits": bits,
        "mean_kl_nats": round(whole.mean_kl, 5),
        "same_top_1": round(whole.top_1, 4),
        "mean_sqnr_db": round(sqnr_db, 2),
        "kl_by_window": [round(value, 4) for value in each],
        "quantise_s": round(quantise_s, 1),
        **({"matrices_in_fp8": len(wide)} if wide else {}),
        **({"losses_s": arguments.losses_s} if name == "mixed" else {}),
    }


if __name__ == "__main__":
    main()
