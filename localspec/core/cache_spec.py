"""How a model or drafter declares what it keeps per token and per sequence.

Torch-free. Pages hold PAGE_TOKENS tokens of every plane; the same block table addresses all planes, the target's
and the drafters'. States are per sequence and are saved and restored whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int64": 8, "int32": 4}


@dataclass(frozen=True)
class PlaneSpec:
    """One value kept for each token: `shape` without the token axis, e.g. (num_kv_heads, head_dim)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StateSpec:
    """One value kept for each sequence, e.g. the recurrent state of a layer.

    `ring_rows` > 0 marks a record of the last window (lazy fold): it is folded before the state is saved and never
    saved itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    ring_rows: int = 0

    @property
    def total_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class CacheSpec:
    """Everything an owner keeps. `owner` names it ("target" or a drafter); `fingerprint` ties it to its weights."""

    owner: str
    fingerprint: str
    planes: tuple[PlaneSpec, ...] = ()
    states: tuple[StateSpec, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        return sum(plane.bytes_per_token for plane in self.planes)

    @property
    def state_bytes(self) -> int:
        return sum(state.total_bytes for state in self.states)
