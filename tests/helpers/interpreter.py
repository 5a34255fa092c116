"""Triton's interpreter under NumPy 2.4 and later.

Must be imported before any kernel, in a process of its own: `TRITON_INTERPRET` acts when kernels are defined.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_with_scalar_index(tensor: Any, scope: Any) -> None:
    # Scalars are arrays of one element there, which NumPy 2.4 no longer turns into integers by itself.
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_scalar_index
