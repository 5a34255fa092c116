"""Compiles a kernel for several cards at once and does the work that they share only once.

Within a family of cards Triton lowers most kernels to the same LLVM IR; that is made for the first card, and only the
code generator and the assembler run for each. `shared_with_family` names the kernels that are left out of it, and
test_compile.py compares samples of both ways. Knows Triton's stages; nothing of what the kernels compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The first of each is compiled from the source on. 100 leads because it alone has instructions that 90 and 120 lack.
FAMILIES = ((80, 86, 89), (100, 90, 120))


@dataclass(frozen=True)
class Assembled:
    """asm: "ptx" and "cubin", as of Triton's compiled kernels; shared_bytes: what a launch asks for."""

    asm: dict[str, Any]
    shared_bytes: int


def compile_all(
    compile_one: Callable[[int], Any], targets: tuple[int, ...], form: Callable[[int], Any]
) -> dict[int, Assembled]:
    """Each target's code. compile_one: Triton's kernel for a target; form: equal for targets of equal source."""
    found: dict[int, Assembled] = {}
    for family in FAMILIES:
        wanted = [target for target in family if target in targets]
        while wanted:
            first = wanted.pop(0)
            compiled = compile_one(first)
            found[first] = Assembled(compiled.asm, compiled.metadata.shared)
            if not shared_with_family(compiled):
                continue
            for target in [each for each in wanted if form(each) == form(first)]:
                wanted.remove(target)
                found[target] = assembled_for(compiled, target)
    return found


def shared_with_family(compiled: Any) -> bool:
    """Whether the other cards of the family get this LLVM IR too.

    Types below 16 bits have conversions of their own on some cards, a product that Triton lays out has its own
    instruction on 90 and on 100, and only 100 reduces floats within a warp by one instruction. Gluon kernels name
    the instruction of their products themselves.
    """
    ir, newer = compiled.asm["ttgir"], compiled.metadata.target.arch >= 90
    if re.search(r"\bf[48]E", ir):
        return False
    laid_out_by_triton = "ttir" in compiled.asm and re.search(r"\btt\.dot", compiled.asm["ttir"])
    own = laid_out_by_triton or "ttng." in ir or re.search(r"redux\.sync\.f", compiled.asm["llir"])
    return not (newer and own)


def assembled_for(compiled: Any, target: int) -> Assembled:
    """The LLVM IR of a compiled kernel, through the code generator and the assembler of another card.

    The assembler runs for every card: of the same PTX it makes other code for 89 than for 86 of some kernels.
    """
    from triton._C.libtriton import llvm, nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    # Neither is done yet where the compiled kernel came from Triton's cache.
    llvm.init_targets()
    nvidia.set_short_ptr()
    backend = make_backend(GPUTarget("cuda", target, 32))
    options = backend.parse_options({"enable_fp_fusion": compiled.metadata.enable_fp_fusion})
    ptx = backend.make_ptx(compiled.asm["llir"], {}, options, target)
    return Assembled({"ptx": ptx, "cubin": backend.make_cubin(ptx, {}, options, target)}, compiled.metadata.shared)


def instructions(ptx: str) -> str:
    """What a card executes: without line numbers and what only names the card."""
    code = ptx.split(".section\t.debug", maxsplit=1)[0]
    return re.sub(r"^\s*\.(target|version|loc|file)\b.*\n", "", code, flags=re.MULTILINE)
