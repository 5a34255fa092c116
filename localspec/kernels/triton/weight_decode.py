"""Decoding of packed weights in registers: the PTX of both formats, and the matrix steps of one chunk.

Knows bits and fragments: words arrive as the MMA's A operand, rows of x as its B operand. Knows nothing of rings,
tiles or launches. Decoded weights stay in registers.
"""

from __future__ import annotations

from localspec.kernels.compat import constexpr_function, gl, gluon, mma_v2
from localspec.kernels.nvfp4_pack import FIELD_MASK, FIELD_ROTATIONS, MIX_MASK, MIX_ROTATION


def nvfp4_decode_asm(odd_chunk: bool, native_multiply: bool) -> str:
    """PTX that decodes 4 words (two blocks of 16) of one row.

    Outputs $0..$15: register 2 r + h holds the pair h of MMA r; MMAs 0..3 take block 0, 4..7 block 1. Inputs: words
    $16..$19, scale bytes $20 (0, 1 for the even chunk of a pair, 2, 3 for the odd one).
    bf16x2 multiply needs sm_90; before it fma with -0.0 gives the same bits.
    """
    multiply = "mul.rn.bf16x2 {0}, t, sc;" if native_multiply else "fma.rn.bf16x2 {0}, t, sc, nz;"
    lines = ["{ .reg .b32 t, c, sc, nz; mov.b32 nz, 0x80008000;"]
    for block in range(2):
        byte = block + (2 if odd_chunk else 0)
        words = (f"${16 + 2 * block}", f"${17 + 2 * block}", "c")
        lines.append(f"prmt.b32 sc, $20, 0, 0x4{byte}4{byte}; mad.lo.u32 sc, sc, 16, 0x73007300;")
        lines.append(f"shf.l.wrap.b32 t, {words[1]}, {words[1]}, {MIX_ROTATION};")
        lines.append(f"lop3.b32 c, {MIX_MASK:#x}, t, {words[0]}, 0xCA;")
        for field, (source, rotation) in enumerate(FIELD_ROTATIONS):
            word = words[source]
            if rotation > 6:
                lines.append(f"shf.l.wrap.b32 t, {word}, {word}, {rotation};")
            elif rotation:
                # No bit wraps below the mask's lowest; a plain shift can run on the multiplier's pipe.
                lines.append(f"shl.b32 t, {word}, {rotation};")
            lines.append(f"and.b32 t, {'t' if rotation else word}, {FIELD_MASK:#x};")
            lines.append(multiply.format(f"${8 * block + field}"))
    return "\n".join([*lines, "}"])


def fp8_decode_asm(native_multiply: bool) -> str:
    """PTX that decodes 4 words (16 e4m3 codes) of one row: word r feeds MMA r; outputs $0..$7, inputs $8..$11.

    bfloat16 bits sign | (byte & 0x7F) << 4 are value * 2^-120, exact with subnormals; the multiply by 2^120 is exact.
    The first pair lies under 0x87F0 of each half. The second has the upper magnitude bits at 14..11, the lower ones at
    2..0, and its signs at bit 3 of the *other* half, so that one rotation by 28 serves both.
    """
    multiply = "mul.rn.bf16x2 {0}, {1}, sc;" if native_multiply else "fma.rn.bf16x2 {0}, {1}, sc, nz;"
    lines = ["{ .reg .b32 t, c, sc, nz; mov.b32 nz, 0x80008000; mov.b32 sc, 0x7B807B80;"]
    for word_index in range(4):
        word = f"${8 + word_index}"
        lines.append(f"and.b32 t, {word}, 0x87F087F0;")
        lines.append(multiply.format(f"${2 * word_index}", "t"))
        lines.append(f"shf.l.wrap.b32 t, {word}, {word}, 28; shl.b32 c, {word}, 4; and.b32 c, c, 0x00700070;")
        lines.append("lop3.b32 t, t, 0x87808780, c, 0xEA;")
        lines.append(multiply.format(f"${2 * word_index + 1}", "t"))
    return "\n".join([*lines, "}"])


NVFP4_CONSTRAINTS = ",".join(["=r"] * 16 + ["r"] * 5)
FP8_CONSTRAINTS = ",".join(["=r"] * 8 + ["r"] * 4)


@constexpr_function
def _x_fragment_layout(MP, KC, NW):
    """Layout of an x chunk [MP, KC] whose registers are the B fragments of all MMAs of the chunk."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8]]
    if KC == 128:
        registers = [*registers, [0, 64]]
    if MP == 16:
        registers = [*registers, [8, 0]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    warps = [[0, 0]] * (NW.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [MP, KC])


@gluon.jit
def _split4(x, layout: gl.constexpr):
    """[16, MP, 2, 2] (r1, r0) -> the four [16, MP] B operands in the order of r."""
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (
        gl.convert_layout(x0, layout, assert_trivial=True),
        gl.convert_layout(x1, layout, assert_trivial=True),
        gl.convert_layout(x2, layout, assert_trivial=True),
        gl.convert_layout(x3, layout, assert_trivial=True),
    )


@gluon.jit
def _nvfp4_chunk(
    words, scales, x, acc0, acc1, MP: gl.constexpr, layout: gl.constexpr, ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """words [BN, 16] int32, scales [BN, 16] uint8, x [MP, 128]: 8 MMA steps."""
    w0, w1, w2, w3, w4, w5, w6, w7 = gl.inline_asm_elementwise(
        ASM,
        CONSTRAINTS,
        [words, scales],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    # k = 64 b + 16 quad + 4 r + 2 h + p; an MMA's k index is (quad, h, p).
    fragments = gl.permute(gl.reshape(x, [MP, 2, 4, 4, 2, 2]), [2, 4, 5, 0, 3, 1])
    low, high = gl.split(gl.reshape(fragments, [16, MP, 4, 2]))
    x0, x1, x2, x3 = _split4(gl.reshape(low, [16, MP, 2, 2]), layout)
    x4, x5, x6, x7 = _split4(gl.reshape(high, [16, MP, 2, 2]), layout)
    acc0 = mma_v2(w0, x0, acc0)
    acc1 = mma_v2(w1, x1, acc1)
    acc0 = mma_v2(w2, x2, acc0)
    acc1 = mma_v2(w3, x3, acc1)
    acc0 = mma_v2(w4, x4, acc0)
    acc1 = mma_v2(w5, x5, acc1)
    acc0 = mma_v2(w6, x6, acc0)
    acc1 = mma_v2(w7, x7, acc1)
    return acc0, acc1


@gluon.jit
def _fp8_chunk(
    words, x, acc0, acc1,
    MP: gl.constexpr, layout: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """words [BN, 16] int32, x [MP, 64]: 4 MMA steps."""
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        ASM,
        CONSTRAINTS,
        [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    # k = 16 quad + 4 r + 2 h + p; an MMA's k index is (quad, h, p).
    fragments = gl.permute(gl.reshape(x, [MP, 4, 4, 2, 2]), [1, 3, 4, 0, 2])
    x0, x1, x2, x3 = _split4(gl.reshape(fragments, [16, MP, 2, 2]), layout)
    acc0 = mma_v2(w0, x0, acc0)
    acc1 = mma_v2(w1, x1, acc1)
    acc0 = mma_v2(w2, x2, acc0)
    acc1 = mma_v2(w3, x3, acc1)
    return acc0, acc1


@gluon.jit
def multiply_chunk(
    words, scales, x, acc0, acc1, MP: gl.constexpr, NW: gl.constexpr, KC: gl.constexpr, NVFP4: gl.constexpr,
    mma: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """Add one chunk from the rings to the sums. scales: the unit's scale bytes in registers, NVFP4 only."""
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    codes = words.load(gl.DotOperandLayout(0, mma, 4))
    rows = x.load(_x_fragment_layout(MP, KC, NW))
    if NVFP4:
        acc0, acc1 = _nvfp4_chunk(codes, scales, rows, acc0, acc1, MP, layout, ASM, CONSTRAINTS)
    else:
        acc0, acc1 = _fp8_chunk(codes, rows, acc0, acc1, MP, layout, ASM, CONSTRAINTS)
    return acc0, acc1
