"""Compiles the weight-stream kernels for every target without a card and reads facts off the machine code.

Knows PTX, SASS and the variants that `stream_linear` launches. Used by the tests, which compare the facts with
committed figures; nothing here runs on a card.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from localspec.kernels.compat import compile_for
from localspec.kernels.triton.tilings import TILE_ROWS, tiling_for
from localspec.kernels.triton.weight_decode import (
    FP8_CONSTRAINTS,
    NVFP4_CONSTRAINTS,
    fp8_decode_asm,
    nvfp4_decode_asm,
)
from localspec.kernels.triton.weight_stream import weight_stream_kernel

# Shared memory of a multiprocessor in bytes, by compute capability (CUDA programming guide).
SHARED_BYTES_PER_MULTIPROCESSOR = {80: 167936, 86: 102400, 89: 102400, 90: 233472, 100: 233472, 120: 102400}
TARGETS = tuple(SHARED_BYTES_PER_MULTIPROCESSOR)

Listing = list[tuple[int, str]]
"""(address, instruction) pairs of one function."""


@dataclass(frozen=True)
class Variant:
    """What one launch fixes at compile time. rows: 8 or 16; norm: fused, for K up to 8192.

    prepared, following: x comes, or the result goes, as `Prepared`.
    """

    format: str = "nvfp4"
    rows: int = 8
    epilogue: str = "none"
    norm: bool = False
    bias: bool = False
    group_scale: bool = False
    tile_rows: int = TILE_ROWS
    prepared: bool = False
    following: bool = False


@dataclass(frozen=True)
class Facts:
    """registers: per thread; stack_bytes: spills; loop_*: of the innermost loop around the matrix instructions.

    instructions_per_weight: loop instructions of one thread / weights it decodes in one turn of the loop.
    loop_shared_stores: stores to shared memory in the loop other than asynchronous copies; decoded weights that went
    through shared memory would show here.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    matrix_instructions: int
    loop_instructions: int
    loop_shared_stores: int
    loop_barriers: int
    instructions_per_weight: float


def fixed_of(variant: Variant, capability: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constants and the options that a launch fixes on a card of that capability; equal ones mean equal source."""
    nvfp4 = variant.format == "nvfp4"
    modern = capability >= 90
    tiling = tiling_for(variant.tile_rows, nvfp4, SHARED_BYTES_PER_MULTIPROCESSOR[capability], modern)
    constants: dict[str, Any] = {
        "BN": variant.tile_rows,
        "MP": variant.rows,
        "DEPTH": tiling.depth,
        "NW": tiling.warps,
        "NVFP4": nvfp4,
        "BLOCK_SCALE": variant.group_scale,
        "EPILOGUE": variant.epilogue,
        "HAS_BIAS": variant.bias,
        "NORM_BLOCK": 8192 if variant.norm else 0,
        "PLUS_ONE": True,
        "SQUARES": 64 if variant.prepared else 0,
        "FOLLOWING": 2 if variant.following else 0,
        "STEP": 8,
        "WIDE": tiling.wide_results,
        "PDL": tiling.dependent_launch,
        "ASM_EVEN": nvfp4_decode_asm(False, modern) if nvfp4 else fp8_decode_asm(modern),
        "ASM_ODD": nvfp4_decode_asm(True, modern) if nvfp4 else fp8_decode_asm(modern),
        "CONSTRAINTS": NVFP4_CONSTRAINTS if nvfp4 else FP8_CONSTRAINTS,
    }
    options = {"num_warps": tiling.warps, "maxnreg": tiling.max_registers, "enable_fp_fusion": False}
    return constants, options


def compile_variant(variant: Variant, capability: int) -> Any:
    """Triton's compiled kernel as `stream_linear` would launch it on a card of that capability."""
    signature = {name: "*fp32" for name in ("scale_ptr", "group_scale_ptr", "bias_ptr", "partial_ptr")}
    signature |= {name: "*fp32" for name in ("squares_ptr", "squares_out_ptr", "following_ptr")}
    signature |= {
        name: "*bf16" for name in ("x_ptr", "out_ptr", "residual_ptr", "norm_ptr", "normed_ptr", "weighted_ptr")
    }
    signature |= {"w_ptr": "*u8", "ready_ptr": "*i32", "ticket_ptr": "*i32", "eps": "fp32"}
    signature |= {name: "i32" for name in ("M", "K8", "N8", "tiles", "pairs", "x_stride8", "out_stride8")}
    signature["residual_stride8"] = "i32"
    constants, options = fixed_of(variant, capability)
    return compile_for(weight_stream_kernel, capability, signature, constants, options)


def check_variant(variant: Variant, cubin: bytes, shared_bytes: int, listings: dict[bytes, Listing]) -> Facts:
    """Read the facts off a variant's machine code.

    listings: by machine code, those made before; this one is added. Cards of a family may run the same code.
    Raises ValueError where the listing has no loop with matrix instructions.
    """
    code = _machine_code(cubin)
    if code not in listings:
        listings[code] = _disassemble(cubin)
    listing, usage = listings[code], _cuobjdump(cubin, "-res-usage")
    loop = _matrix_loop(listing)
    opcodes = Counter(_opcode(text) for text in loop)
    table = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if table is None:
        raise ValueError(f"cuobjdump printed no resource table: {usage[:200]}")
    threads = 32 * max(1, variant.tile_rows // 32)
    columns = 256 if variant.format == "nvfp4" else 128
    return Facts(
        registers=int(table[1]),
        stack_bytes=int(table[2]),
        shared_bytes=shared_bytes,
        matrix_instructions=sum(count for name, count in opcodes.items() if "MMA" in name),
        loop_instructions=len(loop),
        loop_shared_stores=opcodes["STS"] + opcodes["STSM"],
        loop_barriers=opcodes["BAR"],
        instructions_per_weight=len(loop) * threads / (variant.tile_rows * columns),
    )


def _machine_code(cubin: bytes) -> bytes:
    """The instructions of the only kernel in an ELF file."""
    (sections,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + index * size) for index in range(count)]
    for name, _, _, _, start, length in headers:
        if cubin.startswith(b".text.", headers[names][4] + name):
            return cubin[start : start + length]
    raise ValueError("the cubin has no section of instructions")


def _disassemble(cubin: bytes) -> Listing:
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", _cuobjdump(cubin, "-sass"), flags=re.MULTILINE)
    return [(int(address, 16), text) for address, text in found]


def _cuobjdump(cubin: bytes, flag: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, flag, file.name], check=True, capture_output=True, text=True).stdout


def _opcode(text: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]


def _matrix_loop(listing: Listing) -> list[str]:
    """Instructions of the shortest backward branch's body that holds a matrix instruction."""
    place = {address: index for index, (address, _) in enumerate(listing)}
    best: list[str] = []
    for index, (address, text) in enumerate(listing):
        branch = re.search(r"BRA.*?0x([0-9a-f]+)", text)
        target = int(branch[1], 16) if branch else address + 1
        if target >= address or target not in place:
            continue
        body = [line for _, line in listing[place[target] : index + 1]]
        if any("MMA" in line for line in body) and (not best or len(body) < len(best)):
            best = body
    if not best:
        raise ValueError("the kernel has no loop with matrix instructions")
    return best
