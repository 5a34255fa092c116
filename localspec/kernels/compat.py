"""What differs between the Triton versions that are supported, and nothing else.

Every kernel module takes gluon, its language and the helpers below from here, so that a new version is one file's work.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

OLDEST = (3, 6)
NEWEST_TRIED = (3, 9)

__all__ = [
    "async_copy",
    "block_barrier",
    "compile_for",
    "constexpr_function",
    "copy_to_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "mma_v2",
    "triton_version",
    "version_problem",
    "view_shared",
]


def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def version_problem() -> str | None:
    """None where the installed Triton is one the kernels were compiled and tested under, else one sentence."""
    version = triton_version()
    if OLDEST <= version <= NEWEST_TRIED:
        return None
    tried = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST_TRIED[0]}.{NEWEST_TRIED[1]}"
    return f"Triton {triton.__version__} was never tried with these kernels; install one of {tried}."


# The asynchronous copy to shared memory: renamed after 3.6.
copy_to_shared = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
# A barrier among the threads of one block: the name changed after 3.6.
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# The same shared memory in another shape and layout: the name lost its underscore after 3.6.
_shared = gl.shared_memory_descriptor
view_shared = _shared.reinterpret if hasattr(_shared, "reinterpret") else _shared._reinterpret


def compile_for(
    kernel: Any, capability: int, signature: dict[str, str], constants: dict[str, Any], options: dict[str, Any]
) -> Any:
    """Compile a Gluon or Triton kernel for compute capability `capability` (90 = 9.0) without a GPU.

    signature: argument name -> type spelling ("*bf16", "i32"); pointers are taken as 16-byte aligned.
    Returns Triton's compiled kernel, whose `asm` holds "ptx" and "cubin".
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = list(kernel.arg_names)
    spelled = {name: signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind[0] == "*"}
    source_class = GluonASTSource if kernel.is_gluon() else ASTSource
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = source_class(kernel, spelled, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
