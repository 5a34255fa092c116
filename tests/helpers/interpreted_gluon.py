"""Gluon kernels in Triton's interpreter: layouts are dropped, shared memory is an array, NaN until it is written.

Import after tests/helpers/interpreter.py. Knows what the GDN window uses of Gluon, and nothing of its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

_SAME = ("load", "store", "fma", "exp", "sum", "rsqrt", "sqrt", "where", "minimum", "maximum", "broadcast", "cdiv")
_SAME += ("static_range", "program_id", "num_programs", "atomic_add", "atomic_cas", "zeros_like")
_TYPES = ("float32", "int32", "int64", "constexpr")


class _Shared:
    """A piece of shared memory, float32."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.shape = data.shape

    def index(self, place: Any) -> _Shared:
        return _Shared(self.data[int(place)])

    def slice(self, start: int, length: int) -> _Shared:
        return _Shared(self.data[start : start + length])

    def load(self, layout: Any) -> Any:
        block = tl.block_type(tl.float32, list(self.shape))
        return tl.tensor(TensorHandle(self.data.copy(), tl.float32), block)

    def store(self, value: Any) -> None:
        assert value.handle.data.shape == self.shape, (value.handle.data.shape, self.shape)
        self.data[...] = value.handle.data


class _Semantic:
    """Of what is assigned, numbers become tensors; tuples and shared memory stay."""

    @staticmethod
    def to_tensor(value: Any, check_type: bool) -> Any:
        keeps = isinstance(value, (tuple, tl.tuple, _Shared)) or value is None
        return value if keeps else interpreter_semantic.to_tensor(value, check_type)


def _language() -> SimpleNamespace:
    # Looked up at each call: the interpreter puts its own in their place.
    same = {name: (lambda *args, _name=name, **kw: getattr(tl, _name)(*args, **kw)) for name in _SAME}
    return SimpleNamespace(
        **same,
        **{name: getattr(tl, name) for name in _TYPES},
        arange=lambda start, end, layout: tl.arange(start, end),
        zeros=lambda shape, dtype, layout: tl.zeros(shape, dtype),
        allocate_shared_memory=lambda dtype, shape, layout: _Shared(np.full(shape, np.nan, np.float32)),
        SliceLayout=lambda *_: None,
        BlockedLayout=lambda *_: None,
    )


def interpret(*modules: ModuleType) -> None:
    """Replace the kernels of these modules, and what they take from Gluon, by interpreted ones."""
    language = _language()
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    for module in modules:
        for name, member in list(vars(module).items()):
            if hasattr(member, "is_gluon") and member.is_gluon():
                kernel = triton.jit(member.fn)
                kinds = kernel.rewrite().__annotations__
                kinds.update({argument: str(kind).replace("gl.", "tl.") for argument, kind in kinds.items()})
                setattr(module, name, kernel)
            elif name.endswith("_layout") or name in ("block_barrier", "gdc_wait", "gdc_launch_dependents"):
                setattr(module, name, nothing)
        vars(module).update(gl=language, tl=tl, interpreter_semantic=_Semantic)
        if hasattr(module, "view_shared"):
            vars(module)["view_shared"] = lambda shared, dtype, shape, layout: _Shared(shared.data.reshape(shape))
