"""A model's weights as its kernels read them, kept beside it on disk: the second start reads them and computes nothing.

The file holds what loading made, in the order in which it was made. Loading from it runs the same code over weights
that have shapes but no values, and gives it the stored result wherever it packs one. A file that does not fit the
model's files, the packed forms of this version or the order of loading is made again from the source.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine.token_count import with_token_count
from localspec.formats._packed_file import PackedHeader, PackedWriter, read_header
from localspec.formats._packed_ring import PackedRing
from localspec.formats.blocks import BlockWeight
from localspec.formats.checkpoint import TORCH_DTYPES, FolderCheckpoint, open_checkpoint, read_config
from localspec.formats.compact import form_of
from localspec.hub.layout import PACKED_NAME
from localspec.kernels.fp8_pack import Fp8Weight
from localspec.kernels.nvfp4_pack import Nvfp4Weight, nvfp4_without_values
from localspec.kernels.ops import Ops
from localspec.kernels.weights import DenseWeight, LogicalWeight
from localspec.layers.decoder import Decoder
from localspec.layers.host_table import StoredTable
from localspec.models import Model, architecture
from localspec.storage.errors import DamagedFile
from localspec.storage.files import sweep_temporary_files

if TYPE_CHECKING:
    from localspec.kernels.packed_forms import PackedForm

log = logging.getLogger(__name__)
LAYOUT_VERSION = 1
FREE_SHARE = 0.5
"""Of what is free on the disk, the most that a packed copy may take."""
TABLE = "embed_tokens.weight"
DERIVED = "?"
"""Stands for a part that loading computed from others."""
_DTYPE_NAMES = {dtype: name for name, dtype in reversed(TORCH_DTYPES.items())}
Report = Callable[[str], None]


class OutdatedFile(ValueError):
    """The file was written for other weights, kernels or another order of loading."""


def can_pack() -> bool:
    """Whether the kernels whose forms are kept are installed here; a card is not needed."""
    return importlib.util.find_spec("triton") is not None


def source_key(folder: Path) -> str:
    """What the packed file depends on: names, sizes and times of the weight files, and the settings."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@dataclass
class _Recording:
    """Meets `Checkpoint`: hands out another's weights and remembers their names by identity while loading runs."""

    source: FolderCheckpoint

    def __post_init__(self) -> None:
        self.fingerprint = self.source.fingerprint
        self.forms: dict[str, dict[str, Any]] = {}
        self.vectors: dict[str, Tensor] = {}
        self._given: dict[int, tuple[str, LogicalWeight]] = {}

    def names(self) -> tuple[str, ...]:
        return self.source.names()

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def weight(self, name: str) -> LogicalWeight:
        weight = self.source.weight(name)
        self.forms[name] = _facts_of(weight)
        self._given[id(weight)] = (name, weight)
        return weight

    def vector(self, name: str) -> Tensor:
        self.vectors[name] = self.source.vector(name)
        return self.vectors[name]

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        self.source.finish(ignore)

    def names_of(self, parts: Sequence[LogicalWeight]) -> list[str]:
        """Names of parts that were handed out; those are let go."""
        return [self._given.pop(id(part), (DERIVED, None))[0] for part in parts]


def write_packed(folder: Path, device: str = "cpu", report: Report = lambda text: None) -> int:
    """Pack a model's weights on `device` and keep them in its folder. Returns the file's bytes.

    Raises ValueError where the model cannot be loaded, OSError where the file cannot be written.
    """
    if not can_pack():
        raise ValueError("Triton is not installed, so its packed forms cannot be made")
    config = with_token_count(read_config(folder), folder)
    sweep_temporary_files(folder)
    needed = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = shutil.disk_usage(folder).free
    if needed > FREE_SHARE * free:
        raise OSError(f"{needed / 1e9:.1f} GB in {folder} would take too much of the {free / 1e9:.1f} GB that are free")
    with closing(open_checkpoint(folder)) as source, PackedWriter(folder / PACKED_NAME) as writer:
        with torch.inference_mode():
            facts = _write_all(folder, config, _Recording(source), writer, torch.device(device), report)
        writer.finish({**facts, "fingerprint": source.fingerprint, **_wanted_facts(folder)})
    return (folder / PACKED_NAME).stat().st_size


def _write_all(
    folder: Path, config: dict[str, Any], recording: _Recording, writer: PackedWriter, device: torch.device,
    report: Report,
) -> dict[str, Any]:  # fmt: skip
    """Load the model and its own drafting block with every packed weight going to the file."""
    from localspec.kernels.packed_forms import describe
    from localspec.kernels.saving_ops import SavingOps

    packs: list[dict[str, Any]] = []

    def sink(parts: Sequence[LogicalWeight], packed: PackedForm) -> None:
        facts, tensors = describe(packed)
        numbers = {name: _add(writer, tensor) for name, tensor in tensors.items()}
        packs.append({"parts": recording.names_of(parts), "facts": facts, "tensors": numbers})
        report(f"packing weights: {writer.written_bytes / 1e9:.1f} GB")

    ops = SavingOps(device, sink)
    model = architecture(config["model_type"]).load(config, recording, ops)
    tables = {}
    if isinstance(model, Decoder):
        [name] = [name for name in recording.forms if name.endswith(TABLE)]
        tables[name] = _add(writer, model.vocabulary.table)
    if any(name.startswith("mtp.") for name in recording.names()):
        setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=0)
        drafter_module("mtp").build(replace(setup, checkpoint=recording, folder=folder))
    vectors = {name: _add(writer, vector) for name, vector in recording.vectors.items()}
    return {"weights": recording.forms, "packs": packs, "tables": tables, "vectors": vectors}


def _wanted_facts(folder: Path) -> dict[str, Any]:
    """What a file must say to be of use here and now."""
    from localspec.kernels.packed_forms import layout_probe

    return {"layout": LAYOUT_VERSION, "probe": layout_probe(), "source": source_key(folder)}


class PackedCheckpoint:
    """Meets `Checkpoint` and `WeightStore` over a packed file: weights without values, and what loading makes of them.

    Vectors and tables have their values. Close it after loading; what was handed out stays valid.
    """

    def __init__(self, path: Path, header: PackedHeader, device: torch.device) -> None:
        """Use `open_packed`. Raises OutdatedFile where the facts are none that this version writes."""
        facts = header.facts
        try:
            self.fingerprint = str(facts["fingerprint"])
            self._weights: Mapping[str, Any] = dict(facts["weights"])
            self._packs: Sequence[Any] = list(facts["packs"])
            self._tables: Mapping[str, int] = dict(facts["tables"])
            self._vectors: Mapping[str, int] = dict(facts["vectors"])
        except (KeyError, TypeError, ValueError) as error:
            raise OutdatedFile(f"the file does not say what it holds ({error})") from None
        self._ring = PackedRing(path, header, device)
        self._host = PackedRing(path, header, torch.device("cpu"), 1)
        self._given: dict[int, tuple[str, LogicalWeight]] = {}
        self._turn = 0
        self.before_close: Callable[[], None] = lambda: None

    def names(self) -> tuple[str, ...]:
        """Every weight and vector by its logical name."""
        return (*self._weights, *self._vectors)

    def has(self, name: str) -> bool:
        """Whether a weight or vector of that name was used when the file was written."""
        return name in self._weights or name in self._vectors

    def weight(self, name: str) -> LogicalWeight:
        """A stand-in with the shape and form of the weight. Raises ValueError if missing."""
        if name not in self._weights:
            raise ValueError(f"the checkpoint holds no weight {name}")
        weight = _without_values(self._weights[name])
        if name in self._tables:
            number = self._tables[name]
            # Whatever the source's form, the file holds the table as it is gathered from.
            without_values = torch.empty(weight.shape, device="meta")
            weight = StoredTable(without_values, lambda target: self._ring.read_into(number, target))
        self._given[id(weight)] = (name, weight)
        return weight

    def vector(self, name: str) -> Tensor:
        """The tensor in host memory. Raises ValueError if missing."""
        if name not in self._vectors:
            raise ValueError(f"the checkpoint holds no tensor {name}")
        return self._host.tensor(self._vectors[name])

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        """Every tensor was accounted for when the file was written."""

    def find(self, parts: Sequence[LogicalWeight], gated: bool) -> PackedForm | None:
        """The next packed weight, or None for parts that have values. Raises OutdatedFile for another order."""
        from localspec.kernels.packed_forms import restore

        if not _is_without_values(parts[0]):
            return None
        names = [self._given.pop(id(part), (DERIVED, None))[0] for part in parts]
        stored = self._packs[self._turn] if self._turn < len(self._packs) else {"parts": None, "facts": {}}
        if stored["parts"] != names or stored["facts"].get("gated") != gated:
            raise OutdatedFile(f"{', '.join(names)} are packed otherwise now")
        self._turn += 1
        try:
            tensors = {name: self._ring.tensor(number) for name, number in stored["tensors"].items()}
            packed = restore(stored["facts"], tensors)
        except DamagedFile:
            raise
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise OutdatedFile(f"{', '.join(names)}: {error}") from None
        rows = sum(part.shape[0] for part in parts)
        if packed.shape != (rows, parts[0].shape[1]):
            raise OutdatedFile(f"{', '.join(names)} have another shape in the file")
        return packed

    def close(self) -> None:
        """End the reading threads."""
        self.before_close()
        self._ring.close()
        self._host.close()


def open_packed(folder: Path, device: torch.device) -> PackedCheckpoint:
    """The packed weights of a folder. Raises OutdatedFile, DamagedFile or OSError where there are none of use."""
    path = folder / PACKED_NAME
    header = read_header(path)
    for name, value in _wanted_facts(folder).items():
        if header.facts.get(name) != value:
            raise OutdatedFile(f"{path} was written for another {name}")
    return PackedCheckpoint(path, header, device)


def load_packed(
    folder: Path, config: dict[str, Any], ops: Ops, report: Report
) -> tuple[Model, PackedCheckpoint] | None:
    """A model from its packed file, which is made where there is none of use; None where that cannot be.

    Only the Triton back end has packed forms that are worth keeping.
    """
    if ops.device.type != "cuda" or not can_pack():
        return None
    from localspec.kernels.backends.triton_sm80 import TritonOps

    packed = prepared(folder, ops.device, report) if isinstance(ops, TritonOps) else None
    if packed is None or not isinstance(ops, TritonOps):
        return None
    report("reading packed weights")
    ops.store = packed
    packed.before_close = partial(setattr, ops, "store", None)
    try:
        return architecture(config["model_type"]).load(config, packed, ops), packed
    except (OutdatedFile, DamagedFile) as error:
        log.warning("the packed weights are of no use and go: %s", error)
        packed.close()
        (folder / PACKED_NAME).unlink(missing_ok=True)
        return None
    except BaseException:
        packed.close()
        raise


def prepared(folder: Path, device: torch.device, report: Report) -> PackedCheckpoint | None:
    """The packed weights for a card, made now if there are none of use; None where they cannot be had, said in the log.

    Loading goes on from the source then.
    """
    try:
        return open_packed(folder, device)
    except (OutdatedFile, DamagedFile, OSError) as error:
        log.info("weights are packed anew: %s", error)
    try:
        report("packing weights for this card, once")
        write_packed(folder, str(device), report)
        return open_packed(folder, device)
    except (OutdatedFile, DamagedFile, OSError, ValueError, RuntimeError) as error:
        log.warning("weights are not kept packed: %s", error)
        return None


def _add(writer: PackedWriter, tensor: Tensor) -> int:
    """Write a tensor of any device, row slab by row slab."""
    dtype = _DTYPE_NAMES[tensor.dtype]
    flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return writer.add(dtype, tuple(tensor.shape), (part.cpu().numpy() for part in torch.split(flat, 64 << 20)))


def _facts_of(weight: LogicalWeight) -> dict[str, Any]:
    facts: dict[str, Any] = {"form": form_of(weight), "shape": list(weight.shape)}
    if isinstance(weight, BlockWeight):
        facts["blocks"] = weight.method
    return facts


def _without_values(facts: Mapping[str, Any]) -> LogicalWeight:
    rows, columns = facts["shape"]
    if facts["form"] == "nvfp4":
        return nvfp4_without_values(rows, columns)
    if facts["form"] == "fp8":
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta")
        return Fp8Weight(codes, torch.empty(rows, device="meta"))
    if "blocks" in facts:
        block = 16 if facts["blocks"] == "q6_k" else 32
        codes = torch.empty(rows, columns, dtype=torch.int8, device="meta")
        return BlockWeight(facts["blocks"], codes, torch.empty(rows, columns // block, device="meta"), None)
    return DenseWeight(torch.empty(rows, columns, dtype=TORCH_DTYPES[facts["form"].upper()], device="meta"))


def _is_without_values(weight: LogicalWeight) -> bool:
    if isinstance(weight, Nvfp4Weight | Fp8Weight | BlockWeight):
        return weight.codes.is_meta
    return isinstance(weight, DenseWeight) and weight.tensor.is_meta
