"""A model folder as named weights: safetensors files, opened as hostile input, and the formats of their weights.

A format module offers `QUANT_METHODS` (names in config.json), `is_stored(tensors, name)` and
`weight(tensors, name, quantisation)`. It reads parts from a mapping that notes what was read, so that every stored
tensor is accounted for without the format having to say which parts it used. `IGNORED_SUFFIXES` names the parts that
it leaves alone on purpose.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from localspec import formats
from localspec.kernels.weights import LogicalWeight
from localspec.storage.safetensors import SafetensorsFile

MAX_CONFIG_BYTES = 16 << 20
MAX_FILES = 4096
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    # Scales that are powers of two: kept as bytes, their format decodes them.
    "F8_E8M0": torch.uint8,
}  # fmt: skip


class Format(Protocol):
    """What a module of this package offers for one family of weight formats."""

    QUANT_METHODS: tuple[str, ...]
    IGNORED_SUFFIXES: tuple[str, ...]

    def is_stored(self, tensors: Mapping[str, Tensor], name: str) -> bool: ...

    def weight(self, tensors: Mapping[str, Tensor], name: str, quantisation: Mapping[str, Any]) -> LogicalWeight: ...


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of several files by name, as views of the mapped bytes; `read` collects the names that were asked for."""

    def __init__(self, files: list[SafetensorsFile]) -> None:
        """Raises ValueError when two files hold the same name or a dtype has no counterpart."""
        self.read: set[str] = set()
        self._files: dict[str, SafetensorsFile] = {}
        for file in files:
            for name, entry in file.entries.items():
                if name in self._files:
                    raise ValueError(f"tensor {name} is in {self._files[name].path.name} and in {file.path.name}")
                if entry.dtype not in TORCH_DTYPES:
                    raise ValueError(f"tensor {name} has dtype {entry.dtype}, which no format here uses")
                self._files[name] = file

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[name]
        entry = file.entry(name)
        self.read.add(name)
        dtype = TORCH_DTYPES[entry.dtype]
        if entry.length_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        data = file.tensor_bytes(name)
        # PyTorch warns of buffers that cannot be written; nothing here writes to a weight.
        return _from_readonly(data, dtype).view(entry.shape)

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            file.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files


class FolderCheckpoint:
    """Meets `formats.Checkpoint` over a folder with config.json and *.safetensors.

    Files stay open until `close`; tensors that were handed out stay valid after it.
    """

    def __init__(self, tensors: StoredTensors, quantisation: Mapping[str, Any], fingerprint: str) -> None:
        """Use `open_checkpoint`. Raises ValueError for a quantisation that no format reads."""
        self.fingerprint = fingerprint
        self._tensors = tensors
        self._quantisation = quantisation
        self._formats = _formats_for(quantisation)

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self._tensors.close()

    def names(self) -> tuple[str, ...]:
        """Every stored tensor."""
        return tuple(self._tensors)

    def has(self, name: str) -> bool:
        """Whether a weight or vector of that name is present in any form."""
        return any(each.is_stored(self._tensors, name) for each in self._formats)

    def weight(self, name: str) -> LogicalWeight:
        """The matrix `name`. Raises ValueError if missing or malformed."""
        for each in self._formats:
            if each.is_stored(self._tensors, name):
                try:
                    return each.weight(self._tensors, name, self._quantisation)
                except KeyError as error:
                    raise ValueError(f"weight {name} is incomplete: {error.args[0]} is missing") from None
        raise ValueError(f"the checkpoint holds no weight {name}")

    def vector(self, name: str) -> Tensor:
        """An unquantised tensor of any rank, read-only. Raises ValueError if missing."""
        if name not in self._tensors:
            raise ValueError(f"the checkpoint holds no tensor {name}")
        return self._tensors[name]

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        """Raise ValueError naming tensors that nobody asked for and no prefix in `ignore` covers."""
        suffixes = tuple(suffix for each in self._formats for suffix in each.IGNORED_SUFFIXES)
        unread = [
            name
            for name in self._tensors
            if name not in self._tensors.read and not name.startswith(ignore) and not name.endswith(suffixes)
        ]
        if unread:
            shown = ", ".join(sorted(unread)[:5]) + (", ..." if len(unread) > 5 else "")
            raise ValueError(f"the model uses {len(unread)} stored tensors nowhere: {shown}; it may be another model")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ValueError if it is missing, too large or no JSON object."""
    return _read_json(folder / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; a model folder holds config.json and *.safetensors") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found


def _read_quantisation(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """quantization_config of config.json, or what older ModelOpt exports keep in a file of its own."""
    found = config.get("quantization_config")
    separate = folder / "hf_quant_config.json"
    if found is None and separate.is_file():
        found = _read_json(separate).get("quantization")
        if isinstance(found, dict):
            found = {"quant_method": "modelopt", **found}
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"{folder}: the quantisation settings must be an object")
    return found or {}


def open_checkpoint(folder: Path, fingerprint: str | None = None) -> FolderCheckpoint:
    """Open a model folder.

    `fingerprint`: of a folder whose manifest has one; otherwise it is computed from names, shapes and sampled bytes.
    Raises ValueError for a damaged or unsupported checkpoint, OSError where files cannot be read.
    """
    config = read_config(folder)
    quantisation = _read_quantisation(folder, config)
    paths = sorted(folder.glob("*.safetensors"))
    if not 1 <= len(paths) <= MAX_FILES:
        raise ValueError(f"{folder} holds {len(paths)} safetensors files; 1 to {MAX_FILES} are supported")
    files: list[SafetensorsFile] = []
    try:
        files = [SafetensorsFile.open(path) for path in paths]
        tensors = StoredTensors(files)
        return FolderCheckpoint(tensors, quantisation, fingerprint or _fingerprint(files, config))
    except BaseException:
        for file in files:
            file.close()
        raise


def _fingerprint(files: list[SafetensorsFile], config: Mapping[str, Any]) -> str:
    """sha256 over the config, and each tensor's name, dtype, shape and first and last 4 KiB: cheap and telling."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in files:
        for name, entry in file.entries.items():
            data = file.tensor_bytes(name) if entry.length_bytes else memoryview(b"")
            digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
            digest.update(data[:4096])
            digest.update(data[-4096:])
    return digest.hexdigest()


def _formats_for(quantisation: Mapping[str, Any]) -> tuple[Format, ...]:
    """The format of the quantisation method first, then plain weights."""
    plain = cast(Format, importlib.import_module(f"{formats.__name__}.bf16"))
    method = quantisation.get("quant_method")
    if method is None and not quantisation:
        return (plain,)
    known: list[str] = []
    for module in pkgutil.iter_modules(formats.__path__):
        found = importlib.import_module(f"{formats.__name__}.{module.name}")
        methods = tuple(getattr(found, "QUANT_METHODS", ()))
        known += methods
        if method in methods:
            return cast(Format, found), plain
    raise ValueError(f"quantisation method {method!r} is not supported; supported are {', '.join(sorted(known))}")


def _from_readonly(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor over read-only bytes, without a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=dtype)
