"""Bookkeeping of a compact import: which matrix gets which form, what was gained and lost, the layout's settings.

Knows sizes, errors and ModelOpt's spelling of them; does not know folders or how a model is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

from localspec.formats.checkpoint import FolderCheckpoint
from localspec.formats.compact import Compacted, Form, Stored, relative_output_error
from localspec.hub.calibration import Agreement
from localspec.kernels.fp8_pack import quantise_fp8
from localspec.kernels.nvfp4_pack import quantise_nvfp4

GROUP_SIZE = 16
NOT_READ_EACH_TOKEN = ("visual.", "mtp.")
EMBEDDING = "embed_tokens."
WIDE_FORMS = ("bf16", "f16", "f32")


def budget_bits(stored: tuple[Stored, ...], bits_per_weight: float | None, budget_bytes: int | None) -> float | None:
    """Bits a weight for the matrices that may change, from a budget of bytes for everything; None: no budget.

    Raises ValueError, with the least that works, where the tensors that stay and NVFP4 take more already.
    """
    if budget_bytes is None:
        return bits_per_weight
    changing = [each for each in stored if each.choice == "nvfp4"]
    staying_bytes = sum(each.planned_bytes for each in stored if each.choice != "nvfp4")
    least_bytes = staying_bytes + sum(each.planned_bytes for each in changing)
    if budget_bytes < least_bytes or not changing:
        raise ValueError(
            f"a budget of {budget_bytes / 2**30:.2f} GiB is below the {least_bytes / 2**30:.2f} GiB that NVFP4 and the "
            "tensors that stay take"
        )
    return 8 * (budget_bytes - staying_bytes) / sum(each.num_values for each in changing)


def allocate(
    checkpoint: FolderCheckpoint,
    stored: tuple[Stored, ...],
    importance: Mapping[str, Tensor],
    bits_per_weight: float | None,
    losses: Mapping[tuple[str, ...], float] | None = None,
) -> tuple[Stored, ...]:
    """The choices that fit a budget of bits over all matrices that may change; without a budget those of the survey.

    Greedy: the matrices that cost most for a byte in NVFP4 get FP8, or stay if they are FP8 or wide already and that is
    affordable. What they cost is the measured KL of `losses` by the names of a group that goes together; without it,
    the energy of each matrix's output error relative to its output. Raises ValueError for a budget that NVFP4
    throughout does not meet.
    """
    if bits_per_weight is None:
        return stored
    changing = {each.name: each for each in stored if each.choice == "nvfp4"}
    num_values = sum(each.num_values for each in changing.values())
    budget_bytes = bits_per_weight * num_values / 8 - sum(each.planned_bytes for each in changing.values())
    if budget_bytes < 0:
        raise ValueError(f"a budget of {bits_per_weight:g} bits is below the 4.5 of NVFP4; give 4.5 or more")
    if losses:
        gains = {tuple(name for name in names if name in changing): loss for names, loss in losses.items()}
    else:
        gains = {(name,): _output_gain(checkpoint, each, importance.get(name)) for name, each in changing.items()}
    wide = {name: _wide_form(each) for name, each in changing.items()}
    costs = {
        name: replace(each, choice=wide[name]).planned_bytes - each.planned_bytes for name, each in changing.items()
    }
    steps = [(sum(costs[name] for name in names), gain, names) for names, gain in gains.items() if names]
    chosen: dict[str, Form] = {}
    for cost_bytes, _, names in sorted(steps, key=lambda step: (-step[1] / max(1, step[0]), step[2])):
        if cost_bytes <= budget_bytes:
            budget_bytes -= cost_bytes
            chosen |= {name: wide[name] for name in names}
    return tuple(replace(each, choice=chosen.get(each.name, each.choice)) for each in stored)


def _wide_form(each: Stored) -> Form:
    return "fp8" if each.form in WIDE_FORMS else "kept"


def _output_gain(checkpoint: FolderCheckpoint, each: Stored, importance: Tensor | None) -> float:
    """What the wider form takes off a matrix's relative output error."""
    weight = checkpoint.weight(each.name)
    narrow = relative_output_error(weight, importance, lambda rows: quantise_nvfp4(rows).dequantise())
    if each.form not in WIDE_FORMS:
        return narrow
    return narrow - relative_output_error(weight, importance, lambda rows: quantise_fp8(rows).dequantise())


def quantisation_settings(written: tuple[Compacted, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """quantization_config of config.json, and hf_quant_config.json. Mixed checkpoints list every quantised layer."""
    forms = {each.name.removesuffix(".weight"): each.form for each in written if each.name.endswith(".weight")}
    settings: dict[str, Any] = {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": GROUP_SIZE}
    excluded = [name for name, form in forms.items() if form != "nvfp4" and "norm" not in name]
    if "fp8" in forms.values():
        algorithms = {"nvfp4": "W4A16_NVFP4", "fp8": "FP8_PER_CHANNEL_PER_TOKEN"}
        layers = {name: {"quant_algo": algorithms[form]} for name, form in forms.items() if form in algorithms}
        settings |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        flat = {"quant_method": "modelopt", **settings}
    else:
        flat = {"quant_method": "modelopt", **settings, "ignore": excluded}
        settings["exclude_modules"] = excluded
    producer = {"name": "localspec", "version": _version()}
    return {**flat, "producer": producer}, {"producer": producer, "quantization": settings}


def _version() -> str:
    try:
        return version("localspec")
    except PackageNotFoundError:
        return "0"


def make_report(
    stored: tuple[Stored, ...], written: tuple[Compacted, ...], found: Agreement | None, tied: bool
) -> dict[str, Any]:
    """What report.json says: sizes before and after, agreement, and each matrix with its signal-to-noise ratio."""
    pairs = [(before, after) for before, after in zip(stored, written, strict=True)]
    read = [pair for pair in pairs if _read_each_token(pair[0].name, tied)]
    matrices = [pair for pair in pairs if len(pair[0].shape) == 2 and pair[0].choice != "kept"]
    ratios = [after.sqnr_db for _, after in matrices if after.sqnr_db is not None]
    return {
        "bytes_per_token": _before_after(read, bits=False),
        "bits_per_weight": _before_after(read, bits=True),
        "bits_per_weight_of_changed": _before_after(matrices, bits=True),
        "total_bytes": _before_after(pairs, bits=False),
        "mean_sqnr_db": sum(ratios) / len(ratios) if ratios else None,
        "agreement": None
        if found is None
        else {"mean_kl_nats": found.mean_kl, "same_top_1": found.top_1, "held_out_tokens": found.num_tokens},
        "tensors": [
            {
                "name": before.name,
                "shape": list(before.shape),
                "before": before.form,
                "after": after.form,
                "bytes_before": before.bytes,
                "bytes_after": after.bytes,
                "sqnr_db": after.sqnr_db,
            }
            for before, after in pairs
            if len(before.shape) == 2
        ],
    }


def _read_each_token(name: str, tied: bool) -> bool:
    """A tied embedding is read whole, as the head; otherwise one row of it."""
    return (tied or EMBEDDING not in name) and not any(part in name for part in NOT_READ_EACH_TOKEN)


def _before_after(pairs: list[tuple[Stored, Compacted]], bits: bool) -> dict[str, float]:
    num_values = max(1, sum(before.num_values for before, _ in pairs))
    sizes = {"before": sum(before.bytes for before, _ in pairs), "after": sum(after.bytes for _, after in pairs)}
    return {key: 8 * size / num_values for key, size in sizes.items()} if bits else dict(sizes)


def summary_lines(report: Mapping[str, Any]) -> list[str]:
    """A report for people: each matrix, then the totals."""
    lines = [
        f"{each['name']:60} {each['before']:>5} -> {each['after']:5} "
        f"{'exact' if each['sqnr_db'] is None else format(each['sqnr_db'], '.1f') + ' dB':>8}"
        for each in report["tensors"]
    ]
    for title, key, unit, scale in (
        ("read for each token", "bytes_per_token", "MB", 1e6),
        ("on disk", "total_bytes", "MB", 1e6),
        ("bits per weight", "bits_per_weight", "", 1.0),
        ("bits per weight that changed", "bits_per_weight_of_changed", "", 1.0),
    ):
        sizes = report[key]
        lines.append(f"{title}: {sizes['before'] / scale:.2f} -> {sizes['after'] / scale:.2f} {unit}".rstrip())
    found = report["agreement"]
    if found is None:
        lines.append(f"agreement with the source: {report['note']}")
    else:
        lines.append(
            f"agreement with the source on {found['held_out_tokens']} held-out tokens: "
            f"KL {found['mean_kl_nats']:.4f} nats, same first choice {100 * found['same_top_1']:.1f}%"
        )
    return lines
