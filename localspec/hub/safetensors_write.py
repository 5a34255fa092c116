"""Writes one safetensors file tensor by tensor, so that no more than one tensor is in memory. Torch-free.

Knows the container only. Reading and checking files of others is `storage.safetensors`' work.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.hub.layout import private_opener

_ITEM_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4}
HEADER_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written: `load` is called once, when its turn comes, and gives exactly its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], npt.NDArray[Any]]

    @property
    def size_bytes(self) -> int:
        n_values = 1
        for size in self.shape:
            n_values *= size
        return n_values * _ITEM_BYTES[self.dtype]


def write_safetensors(path: Path, plans: Sequence[TensorPlan], on_bytes: Callable[[int], None]) -> str:
    """Writes the file (mode 0600, flushed to disk) and returns its sha256. `on_bytes` hears each tensor's size.

    Raises ValueError when a loaded tensor has another size than planned, OSError from the disk.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset_bytes = 0
    for plan in plans:
        end_bytes = offset_bytes + plan.size_bytes
        header[plan.name] = {"dtype": plan.dtype, "shape": plan.shape, "data_offsets": (offset_bytes, end_bytes)}
        offset_bytes = end_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    # Tensor bytes start aligned, so that a reader may map them.
    raw += b" " * (-(len(raw) + 8) % HEADER_ALIGNMENT_BYTES)
    digest = hashlib.sha256()
    with open(path, "xb", opener=private_opener) as file:
        for piece in (len(raw).to_bytes(8, "little"), raw):
            file.write(piece)
            digest.update(piece)
        for plan in plans:
            values = np.ascontiguousarray(plan.load())
            if values.nbytes != plan.size_bytes:
                raise ValueError(f"tensor {plan.name} has {values.nbytes} bytes, {plan.size_bytes} were planned")
            view = values.reshape(-1).view(np.uint8).data
            file.write(view)
            digest.update(view)
            on_bytes(plan.size_bytes)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
