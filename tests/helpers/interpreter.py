"""Triton's interpreter under NumPy 2.4 and later.

Must be imported before any kernel, in a process of its own: `TRITON_INTERPRET` acts when kernels are defined.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_with_scalar_index(tensor: Any, scope: Any) -> None:
    # Scalars are arrays of one element there, which NumPy 2.4 no longer turns into integers by itself.
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_scalar_index


_patch_lang, _patched = interpreter._patch_lang, set[frozenset[str]]()


def _patch_lang_once(function: Any) -> Any:
    # It runs at every call of a device function, which is two fifths of an interpreted kernel's time. Here everything
    # is interpreted, so what was put in place stays, and no scope has anything to undo.
    languages = frozenset(name for name, value in function.__globals__.items() if value is tl or value is tl.core)
    if languages not in _patched:
        _patched.add(languages)
        _patch_lang(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_lang_once
