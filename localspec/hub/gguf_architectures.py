"""The architectures of GGUF files that can be installed, by name, and the check that a file is one of them. Torch-free.

A file's architecture shows in its first bytes, so that another one is refused before its gigabytes are fetched.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from localspec.hub import gguf_hybrid, gguf_models
from localspec.hub.gguf import GgufFile
from localspec.hub.gguf_models import DENSE_KINDS, ROPE_FACTORS, MappedTensor
from localspec.hub.records import HubError

PEEK_BYTES = 64 << 10
ARCHITECTURE_KEY = "general.architecture"
SCALE_SUFFIXES = (".scale", ".input_scale")
"""Of NVFP4 weights: a factor for the whole tensor, and one of its inputs, which a weight-only engine has no use for."""


class AnyShape(Protocol):
    """What the conversion needs of any architecture's sizes."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...


@dataclass(frozen=True)
class Architecture:
    """How a file's sizes are read, and what follows from them."""

    read: Callable[[GgufFile], Any]
    config: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], list[MappedTensor]]
    optional: frozenset[str] = frozenset()
    """Tensors whose meaning is in the config already."""


def _dense(name: str) -> Architecture:
    kind = DENSE_KINDS[name]
    return Architecture(
        partial(gguf_models.read_shape, architecture=name),
        kind.config,
        partial(gguf_models.dense_tensors, kind=kind),
        frozenset({ROPE_FACTORS}) if name == "llama" else frozenset(),
    )


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {name: _dense(name) for name in DENSE_KINDS}
    | {gguf_hybrid.NAME: Architecture(gguf_hybrid.read_hybrid, gguf_hybrid.hybrid_config, gguf_hybrid.hybrid_tensors)}
)


def architecture_of(file: GgufFile) -> Architecture:
    """The file's architecture. Raises HubError listing the supported ones."""
    name = file.metadata.get(ARCHITECTURE_KEY)
    reason = why_unsupported(name)
    if reason is not None:
        raise HubError(f"{file.path.name} {reason}")
    n_parts = file.metadata.get("split.count", 1)
    if n_parts not in (0, 1):
        raise HubError(f"{file.path.name} is one of {n_parts!r} parts; join them first (llama-gguf-split --merge)")
    return ARCHITECTURES[str(name)]


def why_unsupported(name: object) -> str | None:
    """One clause that says why a file of this architecture cannot be installed, or None."""
    if isinstance(name, str) and name in ARCHITECTURES:
        return None
    return f"has the architecture {name!r}; GGUF import supports {', '.join(sorted(ARCHITECTURES))}"


def peek_architecture(head: bytes) -> str | None:
    """The architecture that the first bytes of a file name, or None where they do not say. Never raises.

    Writers put the key first; only plain values before it are stepped over.
    """
    try:
        if head[:4] != b"GGUF":
            return None
        position = 24
        for _ in range(min(16, struct.unpack_from("<Q", head, 16)[0])):
            key, position = _text(head, position)
            (kind,) = struct.unpack_from("<I", head, position)
            position += 4
            if kind == 8:
                value, position = _text(head, position)
                if key == ARCHITECTURE_KEY:
                    return value
            else:
                position += {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}[kind]
    except (struct.error, KeyError, ValueError):
        return None
    return None


def _text(head: bytes, position: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<Q", head, position)
    end = position + 8 + size
    if size > PEEK_BYTES or end > len(head):
        raise ValueError("a text runs past the bytes")
    return head[position + 8 : end].decode("utf-8"), end


def map_tensors(file: GgufFile, shape: AnyShape, architecture: Architecture) -> list[MappedTensor]:
    """Hub name, shape and orders of every tensor. Raises HubError for unknown, missing or misshapen tensors."""
    expected = {tensor.gguf_name: tensor for tensor in architecture.tensors(shape)}
    scales = {name for name in file.tensors if name.endswith(SCALE_SUFFIXES) and _scaled(name) in expected}
    unknown = sorted(set(file.tensors) - set(expected) - architecture.optional - scales)
    missing = sorted(set(expected) - set(file.tensors))
    if unknown or missing:
        what = f"the unknown tensor {unknown[0]!r}" if unknown else f"no tensor {missing[0]!r}"
        raise HubError(f"{file.path.name} has {what}; this build of the model is not supported")
    for name, mapped in expected.items():
        stored = file.tensors[name].shape
        if stored != mapped.shape:
            raise HubError(f"{file.path.name}: {name} has shape {stored}, its metadata needs {mapped.shape}")
    for name in scales:
        if file.tensors[name].shape != (1,) or file.tensors[name].type.name != "F32":
            raise HubError(f"{file.path.name}: {name} has shape {file.tensors[name].shape}, one number is needed")
    return [expected[name] for name in sorted(expected, key=lambda n: expected[n].name)]


def _scaled(name: str) -> str:
    """`blk.0.ffn_up.scale` belongs to `blk.0.ffn_up.weight`."""
    return f"{name.rpartition('.')[0]}.weight"


def scale_name(weight_name: str) -> str:
    """Where the factor of a whole weight stands, if it has one."""
    return f"{weight_name.removesuffix('.weight')}.scale"
