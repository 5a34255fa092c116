"""`localspec import --compact`: installs a smaller copy of a model on this disk, its matrices in NVFP4.

Reads a checkpoint folder, installed or not, weighs errors by what the matrices see in a text, writes the ModelOpt
layout shard by shard, and says in report.json what it cost. Knows no network and no catalogue.
"""

from __future__ import annotations

import errno
import fnmatch
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from localspec.formats.checkpoint import FolderCheckpoint, open_checkpoint
from localspec.formats.compact import Compacted, Guide, Method, Stored, compact, survey
from localspec.hub import compact_report, layout, support
from localspec.hub.calibration import Agreement, TextModel, Texts, agreement, read_texts
from localspec.hub.catalogue import DEFAULT_INCLUDE, id_from_name
from localspec.hub.meter import ProgressMeter
from localspec.hub.records import EXIT_MACHINE_CANNOT, HubError, ProgressCallback, PullProgress, ignore_progress
from localspec.kernels.nvfp4_feedback import feedback_of
from localspec.kernels.nvfp4_pack import quantise_nvfp4
from localspec.kernels.weights import LogicalWeight
from localspec.storage.safetensors import TensorItem, write_safetensors

ID_SUFFIX = "-nvfp4"
REPORT_NAME = "report.json"
INDEX_NAME = "model.safetensors.index.json"
QUANTISATION_NAME = "hf_quant_config.json"
SHARD_BYTES = 1 << 30
MOMENT_BYTES = 2 << 30
RUNNING_BYTES_PER_WEIGHT = 4.5
"""Host memory for running a model on the CPU back end, which computes in float32, with some air."""
LOSS_TOKENS = 128
"""Of each of two windows: every group of matrices takes a pass over them."""
CARD_RESERVE_BYTES = 4 << 30
"""Beside the weights on a card: logits, scratch and the cache of one window."""
_REPLACED_FILES = (INDEX_NAME, QUANTISATION_NAME, "config.json", REPORT_NAME, layout.MANIFEST_NAME)


@dataclass(frozen=True)
class CompactOptions:
    """How to compact. `calibration`: a text file, None for the built-in text; `bits_per_weight`: budget of the
    matrices, or `budget_bytes` of all weights, None for NVFP4 throughout; `feedback`: each column makes up for the
    rounding of those before it; `measure`: run the model for importance and for the agreement."""

    model_id: str | None = None
    calibration: Path | None = None
    method: Method = "mse"
    bits_per_weight: float | None = None
    budget_bytes: int | None = None
    feedback: bool = False
    device: str = "cpu"
    measure: bool = True


@dataclass(frozen=True)
class CompactResult:
    """An installed compact model; `report` is what report.json holds."""

    model_id: str
    directory: Path
    report: Mapping[str, Any]


@dataclass(frozen=True)
class _Observed:
    """What running the source brought. importance: [K] by matrix name."""

    importance: Mapping[str, Tensor]
    log_probs: tuple[Tensor, ...]
    texts: Texts | None
    note: str
    model: TextModel | None = None
    """The source, while its matrices' inputs are still asked for."""
    losses: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    """What each group of matrices costs in NVFP4, where a budget is to be spent."""


def compact_model(
    path: Path, data_dir: Path, options: CompactOptions, progress: ProgressCallback = ignore_progress
) -> CompactResult:
    """Installs the compact form of a folder with config.json and *.safetensors, or of an installed model by its id.

    Raises HubError when there is nothing there, it is damaged or not supported, its id is taken, or this machine's disk
    or memory is too small. Nothing is installed then.
    """
    source = _find(path, data_dir)
    config = _readable_config(source)
    name = layout.check_model_id(options.model_id) if options.model_id else id_from_name(source.resolve().name)
    name = name if options.model_id else layout.check_model_id(f"{name}{ID_SUFFIX}")
    if (layout.models_directory(data_dir) / name).exists():
        raise HubError(f"a model {name} is already installed; remove it or import under another name")
    meter = ProgressMeter(progress)
    with _plain_errors(name, source, data_dir), closing(open_checkpoint(source)) as checkpoint:
        stored = survey(checkpoint)
        layout.refuse_small_disk(name, sum(each.planned_bytes for each in stored), data_dir)
        meter.start("convert", f"reading {source.name}")
        observed = _observe(source, stored, options)
        if observed.note:
            meter.note(observed.note)
        bits = compact_report.budget_bits(stored, options.bits_per_weight, options.budget_bytes)
        stored = compact_report.allocate(checkpoint, stored, observed.importance, bits, observed.losses)
        with layout.building(data_dir, name) as directory:
            meter.start("convert", f"compacting {source.name}", sum(each.bytes for each in stored))
            written = _write_weights(checkpoint, stored, directory, observed, options, meter)
            _write_settings(source, directory, config, written)
            observed = replace(observed, model=None)
            found = _measure(directory, observed, options)
            report = compact_report.make_report(stored, written, found, _tied(config))
            report |= {"source": layout.readable_path(source), "method": options.method, "feedback": options.feedback}
            report["note"] = observed.note
            report["calibration"] = observed.texts.source if observed.texts else None
            layout.write_json(directory / REPORT_NAME, report)
            meter.start("publish", f"installing {name}")
            target = _publish(source, directory, name, data_dir)
    progress(PullProgress("done", f"{name} is ready"))
    return CompactResult(name, target, report)


def _find(path: Path, data_dir: Path) -> Path:
    path = path.expanduser()
    if path.is_file():
        raise HubError(f"{path} is a file; import it first, then compact the installed model by its id")
    if path.is_dir():
        return path
    installed = data_dir / "models" / path.name
    if len(path.parts) == 1 and (installed / layout.MANIFEST_NAME).is_file():
        return installed
    raise HubError(f"{path} is neither a folder with config.json and *.safetensors nor an installed model")


def _readable_config(source: Path) -> dict[str, Any]:
    if not (source / "config.json").is_file() or not (source / "tokenizer.json").is_file():
        raise HubError(f"{source} has no config.json or no tokenizer.json; give the folder of one model")
    config = layout.read_json(source / "config.json")
    reason = support.why_unsupported(config, support.supported_model_types())
    if reason is not None:
        raise HubError(f"{source} cannot be compacted: {reason}")
    return config


@contextmanager
def _plain_errors(name: str, source: Path, data_dir: Path) -> Iterator[None]:
    """What readers, models and the disk raise, as one sentence for the user."""
    try:
        yield
    except ValueError as error:
        raise HubError(f"{source} cannot be compacted: {error}") from error
    except torch.OutOfMemoryError as error:
        raise HubError(f"{source} does not fit the card's memory; use --device cpu", EXIT_MACHINE_CANNOT) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full; free space or remove a model" if full else str(error)
        raise HubError(f"{name} cannot be written to {data_dir}: {reason}", EXIT_MACHINE_CANNOT) from error


def _observe(source: Path, stored: tuple[Stored, ...], options: CompactOptions) -> _Observed:
    """Runs the source if that was asked for and fits; an own text that could not be used is an error."""
    if not options.measure:
        return _Observed({}, (), None, "not measured, as asked")
    if options.device == "cpu":
        needed_bytes = int(RUNNING_BYTES_PER_WEIGHT * sum(each.num_values for each in stored))
        available_bytes = psutil.virtual_memory().available
    else:
        needed_bytes = sum(each.bytes for each in stored) + CARD_RESERVE_BYTES
        available_bytes = torch.cuda.mem_get_info(torch.device(options.device))[0]
    if needed_bytes > available_bytes:
        reason = f"running the source takes {needed_bytes / 1e9:.1f} GB of memory, {available_bytes / 1e9:.1f} are free"
        if options.calibration is not None:
            raise HubError(f"{source.name} cannot be calibrated here: {reason}", EXIT_MACHINE_CANNOT)
        return _Observed({}, (), None, f"not measured and not calibrated: {reason}")
    texts = read_texts(source, options.calibration)
    model = TextModel(source, options.device)
    importance = model.mean_squares(texts.calibration) if options.method == "mse" else {}
    log_probs = tuple(model.log_probs(window) for window in texts.held_out)
    has_budget = options.bits_per_weight is not None or options.budget_bytes is not None
    losses = group_losses(model, stored, importance, texts.calibration) if has_budget else {}
    return _Observed(importance, log_probs, texts, "", model if options.feedback else None, losses)


def group_losses(
    model: TextModel,
    stored: tuple[Stored, ...],
    importance: Mapping[str, Tensor],
    windows: tuple[tuple[int, ...], ...],
) -> dict[tuple[str, ...], float]:
    """What each group of matrices costs in NVFP4 alone, on a first and a last piece of the calibration text."""
    changing = {each.name for each in stored if each.choice == "nvfp4"}

    def narrow(name: str, weight: LogicalWeight) -> LogicalWeight | None:
        if name not in changing:
            return None
        return quantise_nvfp4(weight.dequantise(), importance=importance.get(name))

    return model.losses([window[:LOSS_TOKENS] for window in (windows[0], windows[-1])], narrow)


class _Guides:
    """What is known of each matrix's inputs. Second moments are gathered for as many matrices as MOMENT_BYTES hold."""

    def __init__(self, stored: tuple[Stored, ...], observed: _Observed, device: torch.device) -> None:
        self._observed, self._device = observed, device
        names = observed.importance.keys()
        self._left = {each.name: each.shape[1] for each in stored if each.choice == "nvfp4" and each.name in names}
        self._moments: dict[str, Tensor] = {}

    def of(self, name: str) -> Guide:
        """The guide of a matrix, asked for once each and in the order of the survey."""
        model, texts = self._observed.model, self._observed.texts
        if model is None or texts is None or name not in self._left:
            return self._observed.importance.get(name)
        if name not in self._moments:
            wanted: list[str] = []
            total_bytes = 0
            for each, columns in self._left.items():
                total_bytes += 4 * columns * columns
                if wanted and total_bytes > MOMENT_BYTES:
                    break
                wanted.append(each)
            self._moments = model.second_moments(texts.calibration, frozenset(wanted))
        del self._left[name]
        return feedback_of(self._moments.pop(name).to(self._device))


def _measure(directory: Path, observed: _Observed, options: CompactOptions) -> Agreement | None:
    if observed.texts is None:
        return None
    model = TextModel(directory, options.device)
    return agreement(observed.log_probs, [model.log_probs(window) for window in observed.texts.held_out])


def _write_weights(
    checkpoint: FolderCheckpoint,
    stored: tuple[Stored, ...],
    directory: Path,
    observed: _Observed,
    options: CompactOptions,
    meter: ProgressMeter,
) -> tuple[Compacted, ...]:
    """Weight files of at most about SHARD_BYTES and their index. What is returned holds no bytes."""
    device = torch.device(options.device)
    guides = _Guides(stored, observed, device)
    shards: list[list[str]] = []
    waiting: list[TensorItem] = []
    waiting_bytes = total_bytes = 0
    written: list[Compacted] = []

    def flush() -> None:
        shards.append([item[0] for item in waiting])
        write_safetensors(directory / f"shard-{len(shards)}.safetensors", waiting, {"format": "pt"})
        waiting.clear()

    for each in stored:
        found = compact(checkpoint, each, options.method, guides.of(each.name), device)
        waiting += found.items
        waiting_bytes += found.bytes
        total_bytes += found.bytes
        written.append(Compacted(found.name, found.form, found.bytes, found.sqnr_db, ()))
        meter.add(each.bytes)
        if waiting_bytes >= SHARD_BYTES:
            flush()
            waiting_bytes = 0
    if waiting:
        flush()
    _name_shards(directory, shards, total_bytes)
    return tuple(written)


def _name_shards(directory: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Names that other programs expect; how many files there are is known only at the end."""
    if len(shards) == 1:
        (directory / "shard-1.safetensors").rename(directory / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (directory / f"shard-{number}.safetensors").rename(directory / file_name)
        places |= dict.fromkeys(names, file_name)
    layout.write_json(directory / INDEX_NAME, {"metadata": {"total_size": total_bytes}, "weight_map": places})


def _write_settings(source: Path, directory: Path, config: dict[str, Any], written: tuple[Compacted, ...]) -> None:
    """config.json and hf_quant_config.json in ModelOpt's words; other files of the model as they are."""
    flat, separate = compact_report.quantisation_settings(written)
    layout.write_json(directory / "config.json", {**config, "quantization_config": flat})
    layout.write_json(directory / QUANTISATION_NAME, separate)
    for path in sorted(source.iterdir()):
        wanted = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in DEFAULT_INCLUDE)
        if not wanted or not path.is_file() or path.suffix == ".safetensors" or path.name in _REPLACED_FILES:
            continue
        target = directory / layout.check_file_name(path.name)
        shutil.copyfile(path.resolve(), target)
        target.chmod(0o600)


def _tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding, as the model files decide it."""
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings", False) if isinstance(text, dict) else False
    return bool(config.get("tie_word_embeddings", inner))


def _publish(source: Path, directory: Path, name: str, data_dir: Path) -> Path:
    licence = "not stated"
    if (source / layout.MANIFEST_NAME).is_file():
        licence = layout.read_manifest(source).licence
    files = layout.describe_files(directory, {})
    manifest = layout.Manifest(
        model_id=name,
        source=f"compacted from {layout.readable_path(source)}",
        licence=licence,
        files=files,
        fingerprint=layout.fingerprint_of(files),
    )
    return layout.publish(directory, manifest, data_dir)
