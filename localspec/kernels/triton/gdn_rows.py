"""The rows of a Gated DeltaNet window on one part of a value head's state: first what rows do not owe each other, for
all of them at once, then one row after the other. Likewise the records of the lazy fold.

Knows how rows, states and shared memory are laid out. Does not know rings nor who overwrites what (`gdn_window.py`).
Specification: `reference_gdn.py`.

A warp takes the query or the key of a row: convolution and l2 norm; others share the values, decays and betas. Loads
are under way together, and the results go to shared memory. Then the rows follow without a barrier and without a load
from global memory. A state is a tuple of tiles [V, 32 keys] of which eight lanes share a row, so that a sum over keys
takes three shuffles. A row's query is read beside the next one's key, both from the same state.

How it stays exact per row. What is summed for a row is summed in one warp in one order, however many rows there are.
FMA contraction is off at compile time, and the FMAs written here are the same for the first and every later row.
"""

from __future__ import annotations

from localspec.kernels.compat import (
    block_barrier,
    constexpr_function,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    view_shared,
)
from localspec.kernels.triton.gdn import softplus, update_state


@constexpr_function
def row_layout(width, warps):
    """[T, width] with whole rows in a warp."""
    return gl.BlockedLayout([1, max(1, width // 32)], [1, 32], [warps, 1], [1, 0])


@constexpr_function
def pair_layout(width, warps):
    """[T, 2, width] with a query or a key of a row in a warp, T half as many as warps."""
    return gl.BlockedLayout([1, 1, max(1, width // 32)], [1, 1, 32], [warps // 2, 2, 1], [2, 1, 0])


@constexpr_function
def value_layout(warps):
    """[T, V]: two warps to a row, which sum nothing."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps // 2, 2], [1, 0])


@constexpr_function
def tile_layout(values, inner, warps):
    """[values, inner] with four keys to a thread and up to two values, which lie side by side."""
    lanes = inner // 4
    own = max(1, min(2, values * lanes // (32 * warps)))
    return gl.BlockedLayout([own, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@constexpr_function
def plain_layout(rank):
    """Shared memory in the order of its indices."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])


@gluon.jit
def load_channels(conv, weight_ptr, channels, begin, TAPS: gl.constexpr, COLUMNS: gl.constexpr):
    """The TAPS - 1 conv columns before a window and the TAPS weights of some channels, oldest first."""
    columns, taps = (), ()
    for column in gl.static_range(TAPS - 1):
        columns += (gl.load(conv + channels * COLUMNS + (begin + column)),)  # type: ignore[assignment]
    for tap in gl.static_range(TAPS):
        taps += (gl.load(weight_ptr + channels * TAPS + tap).to(gl.float32),)  # type: ignore[assignment]
    return columns, taps


@gluon.jit
def stage(value):
    """A vector in shared memory of its own, so that no barrier lies between it and the next one."""
    shared = gl.allocate_shared_memory(gl.float32, [value.shape[0]], plain_layout(1))
    shared.store(value)
    return shared


@gluon.jit
def stage_channels(columns, taps):
    """What the rows need of `load_channels`, in shared memory as float32: of each of a window's first rows, what the
    columns before the window add to its convolution, and each tap's weights."""
    shares, weights = (), ()
    for row in gl.static_range(len(columns)):
        share = gl.zeros_like(taps[0])
        for tap in gl.static_range(len(columns) - row):
            share = gl.fma(columns[row + tap].to(gl.float32), taps[tap], share)
        shares += (stage(share),)
    for tap in gl.static_range(len(taps)):
        weights += (stage(taps[tap]),)
    return shares, weights


@gluon.jit
def load_weights(weights, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Of `stage_channels`, each tap's weights in the shape of one row."""
    taps = ()
    for tap in gl.static_range(len(weights)):
        row = view_shared(weights[tap], gl.float32, SHAPE, plain_layout(len(SHAPE)))
        taps += (row.load(layout),)  # type: ignore[assignment]
    return taps


@gluon.jit
def first_shares(shares, rows, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Of `stage_channels`, what the sums of these rows begin with, zero behind a window's first rows. rows: [T, 1] or
    [T, 1, 1]; SHAPE: of one row."""
    begun = gl.where(rows == 0, view_shared(shares[0], gl.float32, SHAPE, plain_layout(len(SHAPE))).load(layout), 0.0)
    for row in gl.static_range(1, len(shares)):
        share = view_shared(shares[row], gl.float32, SHAPE, plain_layout(len(SHAPE))).load(layout)
        begun = gl.where(rows == row, share, begun)
    return begun


@gluon.jit
def load_inputs(pointers, rows, count, stride, TAPS: gl.constexpr):
    """What each tap of each row sees of the window, as it lies there; zero where that is no row.

    pointers: to the newest column of each row. rows: [T, 1] or [T, 1, 1], from the window's first.
    """
    found = ()
    for tap in gl.static_range(TAPS):
        mask = gl.broadcast((rows >= TAPS - 1 - tap) & (rows < count), pointers)[0]
        found += (gl.load(pointers + (tap - (TAPS - 1)) * stride, mask=mask, other=0.0),)  # type: ignore[assignment]
    return found


@gluon.jit
def convolve_rows(begun, inputs, taps):
    """SiLU of the convolution, float32, in explicit FMAs from the oldest column on: a sum that begins at zero is never
    -0, so a column that is no row's adds nothing. begun: of `first_shares`, or zeros."""
    total = begun
    for tap in gl.static_range(len(taps)):
        total = gl.fma(inputs[tap].to(gl.float32), gl.broadcast(taps[tap], total)[0], total)
    return total / (1.0 + gl.exp(-total))


@gluon.jit
def gate_logits(a_ptr, row, stride, heads, inside, HV: gl.constexpr, PARTS: gl.constexpr):
    """A gate's input, given as a sum of PARTS: float32, added in order. row, heads: of any shapes that go together."""
    base = a_ptr + row * stride + heads
    total = gl.load(base, mask=inside, other=0.0).to(gl.float32)
    for part in gl.static_range(1, PARTS):
        total += gl.load(base + part * HV, mask=inside, other=0.0).to(gl.float32)
    return total


@gluon.jit
def allocate_rows(RING: gl.constexpr, DK: gl.constexpr, BLOCK_V: gl.constexpr):
    """Shared memory for what a window's rows bring: queries and keys, values, decays, betas."""
    pairs = gl.allocate_shared_memory(gl.float32, [2 * RING, DK], plain_layout(1))
    values = gl.allocate_shared_memory(gl.float32, [RING, BLOCK_V], plain_layout(1))
    decays = gl.allocate_shared_memory(gl.float32, [RING, 1], plain_layout(1))
    betas = gl.allocate_shared_memory(gl.float32, [RING, 1], plain_layout(1))
    return pairs, values, decays, betas


@gluon.jit
def prepare_gates(
    prepared, a_ptr, b_ptr, count, head, rate, bias, a_stride, b_stride,
    HV: gl.constexpr, RING: gl.constexpr, GATE_PARTS: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Decays and betas of all rows, a lane each."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    rows = gl.arange(0, RING, layout=lanes)
    a = gate_logits(a_ptr, rows, a_stride, head, rows < count, HV, GATE_PARTS)
    b = gate_logits(b_ptr, rows, b_stride, head, rows < count, HV, GATE_PARTS)
    view_shared(prepared[2], gl.float32, [RING], plain_layout(1)).store(gl.exp(-rate * softplus(a + bias)))
    view_shared(prepared[3], gl.float32, [RING], plain_layout(1)).store(1.0 / (1.0 + gl.exp(-b)))


@gluon.jit
def keep_keys(ring_k, mixed, rows, which, dims, count, stride):
    """Record the keys of some rows. mixed: [T, 2, DK], the queries first; rows, which, dims: its coordinates."""
    places = ring_k + gl.broadcast(rows * stride + dims, mixed)[0]
    gl.store(places, mixed, mask=gl.broadcast((rows < count) & (which == 1), mixed)[0])


@gluon.jit
def prepare_rows(
    prepared, qkv_ptr, a_ptr, b_ptr, ring_k, staged_qk, staged_v, count, head, key_head, part, keeper, rate, bias,
    qkv_stride, a_stride, b_stride,
    HK: gl.constexpr, HV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BLOCK_V: gl.constexpr,
    RING: gl.constexpr, TAPS: gl.constexpr, GATE_PARTS: gl.constexpr, EPS: gl.constexpr, PDL: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Wait for the kernel before, then fill `prepared`, of `allocate_rows`, for all rows; the keeper records the keys.

    Pointers lead to the window's first row, ring_k to the slot's part. A round takes half as many rows as there are
    warps; the next one's loads are under way meanwhile.
    """
    ROUND: gl.constexpr = NW // 2
    qk: gl.constexpr = pair_layout(DK, NW)
    own: gl.constexpr = value_layout(NW)
    pairs = view_shared(prepared[0], gl.float32, [RING // ROUND, ROUND, 2, DK], plain_layout(3))
    values = view_shared(prepared[1], gl.float32, [RING // ROUND, ROUND, BLOCK_V], plain_layout(2))
    rows = gl.arange(0, ROUND, layout=gl.SliceLayout(1, gl.SliceLayout(2, qk)))[:, None, None]
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, qk)))[None, :, None]
    dims = key_head * DK + gl.arange(0, DK, layout=gl.SliceLayout(0, gl.SliceLayout(1, qk)))[None, None, :]
    v_rows = gl.arange(0, ROUND, layout=gl.SliceLayout(1, own))[:, None]
    v_channels = 2 * HK * DK + head * DV + part * BLOCK_V
    v_channels += gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, own))[None, :]
    qk_inputs_ptr = qkv_ptr + (rows * qkv_stride + (which * (HK * DK) + dims))
    v_inputs_ptr = qkv_ptr + (v_rows * qkv_stride + v_channels)
    qk_taps, v_taps = load_weights(staged_qk[1], [1, 2, DK], qk), load_weights(staged_v[1], [1, BLOCK_V], own)
    qk_begun = first_shares(staged_qk[0], rows, [1, 2, DK], qk)
    v_begun = first_shares(staged_v[0], v_rows, [1, BLOCK_V], own)
    scale = gl.where(which == 0, 1.0 / gl.sqrt(DK * 1.0), 1.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # All loads first: one wait for memory.
    qk_inputs = load_inputs(qk_inputs_ptr, rows, count, qkv_stride, TAPS)
    v_inputs = load_inputs(v_inputs_ptr, v_rows, count, qkv_stride, TAPS)
    prepare_gates(prepared, a_ptr, b_ptr, count, head, rate, bias, a_stride, b_stride, HV, RING, GATE_PARTS, NW)
    for round in range(gl.cdiv(count, ROUND)):
        next_rows, next_v_rows = rows + ROUND, v_rows + ROUND
        next_qk, next_v = qk_inputs, v_inputs
        if (round + 1) * ROUND < count:
            qk_inputs_ptr += ROUND * qkv_stride
            v_inputs_ptr += ROUND * qkv_stride
            next_qk = load_inputs(qk_inputs_ptr, next_rows, count, qkv_stride, TAPS)
            next_v = load_inputs(v_inputs_ptr, next_v_rows, count, qkv_stride, TAPS)
        mixed = convolve_rows(qk_begun, qk_inputs, qk_taps)
        mixed = mixed * gl.rsqrt(gl.sum(mixed * mixed, axis=2) + EPS)[:, :, None]
        pairs.index(round).store(mixed * scale)
        values.index(round).store(convolve_rows(v_begun, v_inputs, v_taps))
        if keeper:
            keep_keys(ring_k, mixed, rows, which, dims, count, HK * DK)
        if ROUND < TAPS - 1:
            qk_begun = first_shares(staged_qk[0], next_rows, [1, 2, DK], qk)
            v_begun = first_shares(staged_v[0], next_v_rows, [1, BLOCK_V], own)
        else:
            qk_begun, v_begun = gl.zeros_like(qk_begun), gl.zeros_like(v_begun)
        qk_inputs, v_inputs, rows, v_rows = next_qk, next_v, next_rows, next_v_rows
    block_barrier()


@gluon.jit
def load_state(pointers, DK: gl.constexpr, KI: gl.constexpr):
    """The tiles of a state. pointers: to the first, [V, KI]."""
    state = ()
    for tile in gl.static_range(DK // KI):
        state += (gl.load(pointers + tile * KI),)  # type: ignore[assignment]
    return state


@gluon.jit
def store_state(pointers, state, KI: gl.constexpr):
    """Put what `load_state` read."""
    for tile in gl.static_range(len(state)):
        gl.store(pointers + tile * KI, state[tile])


@gluon.jit
def load_vector(row, DK: gl.constexpr, KI: gl.constexpr, layout: gl.constexpr):
    """A key or query [DK] of shared memory as the tiles need it: DK // KI times [KI]."""
    found = ()
    for tile in gl.static_range(DK // KI):
        found += (row.slice(tile * KI, KI).load(gl.SliceLayout(0, layout)),)  # type: ignore[assignment]
    return found


@gluon.jit
def next_state(state, decay, keys, update):
    """The recurrence's one update, tile by tile. keys: [KI] each; update: [V]; decay: [1, 1]."""
    following = ()
    for tile in gl.static_range(len(state)):
        following += (update_state(state[tile], decay, keys[tile][None, :], update[:, None]),)
    return following


@gluon.jit
def read_state(state, vector):
    """S vector -> [V]. vector: [KI] for each tile. Over tiles first, within a thread."""
    total = state[0] * vector[0][None, :]
    for tile in gl.static_range(1, len(state)):
        total = gl.fma(state[tile], gl.broadcast(vector[tile][None, :], total)[0], total)
    return gl.sum(total, axis=1)


@gluon.jit
def fold_state(
    state, prepared, keys_ptr, updates_ptr, decay_ptr, pending, key_stride, value_stride, decay_stride,
    DK: gl.constexpr, BLOCK_V: gl.constexpr, KI: gl.constexpr, RING: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Apply the first `pending` (at least one) records of one slot and value head, which are loaded all at once.

    `prepared`, of `allocate_rows`, holds them meanwhile. updates_ptr: the first of the program's own values.
    """
    tile: gl.constexpr = tile_layout(BLOCK_V, KI, NW)
    per_value: gl.constexpr = gl.SliceLayout(1, tile)
    wide: gl.constexpr = row_layout(DK, NW)
    own: gl.constexpr = row_layout(BLOCK_V, NW)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    rows = gl.arange(0, RING, layout=gl.SliceLayout(1, wide))[:, None]
    k_places = keys_ptr + (rows * key_stride + gl.arange(0, DK, layout=gl.SliceLayout(0, wide))[None, :])
    keys = gl.load(k_places, mask=gl.broadcast(rows < pending, k_places)[0], other=0.0)
    rows = gl.arange(0, RING, layout=gl.SliceLayout(1, own))[:, None]
    u_places = updates_ptr + (rows * value_stride + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, own))[None, :])
    updates = gl.load(u_places, mask=gl.broadcast(rows < pending, u_places)[0], other=0.0)
    rows = gl.arange(0, RING, layout=lanes)
    decays = gl.load(decay_ptr + rows * decay_stride, mask=rows < pending, other=0.0)
    view_shared(prepared[0], gl.float32, [2, RING, DK], plain_layout(2)).index(0).store(keys)
    view_shared(prepared[1], gl.float32, [RING, BLOCK_V], plain_layout(2)).store(updates)
    view_shared(prepared[2], gl.float32, [RING], plain_layout(1)).store(decays)
    block_barrier()
    for row in range(pending):
        key = load_vector(prepared[0].index(row), DK, KI, tile)
        update, decay = prepared[1].index(row).load(per_value), prepared[2].index(row).load(per_value)
        state = next_state(state, decay[:, None], key, update)
    return state


@gluon.jit
def run_rows(
    state, prepared, update_ptr, mixed_ptr, count, values,
    HV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BLOCK_V: gl.constexpr, KI: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """The rows of a window from its folded state and what `prepare_rows` made of them.

    update_ptr and mixed_ptr get a row of values each, from their first on; values: where in a row, [V].
    """
    tile: gl.constexpr = tile_layout(BLOCK_V, KI, NW)
    per_value: gl.constexpr = gl.SliceLayout(1, tile)
    pairs, new_values, decays, betas = prepared
    key = load_vector(pairs.index(1), DK, KI, tile)
    value, decay = new_values.index(0).load(per_value), decays.index(0).load(per_value)
    update = betas.index(0).load(per_value) * (value - decay * read_state(state, key))
    state = next_state(state, decay[:, None], key, update)
    gl.store(update_ptr + values, update)
    query = load_vector(pairs.index(0), DK, KI, tile)
    for row in range(1, count):
        key = load_vector(pairs.index(2 * row + 1), DK, KI, tile)
        value, decay = new_values.index(row).load(per_value), decays.index(row).load(per_value)
        beta = betas.index(row).load(per_value)
        gl.store(mixed_ptr + (row - 1) * (HV * DV) + values, read_state(state, query))
        query = load_vector(pairs.index(2 * row), DK, KI, tile)
        update = beta * (value - decay * read_state(state, key))
        state = next_state(state, decay[:, None], key, update)
        gl.store(update_ptr + row * (HV * DV) + values, update)
    gl.store(mixed_ptr + (count - 1) * (HV * DV) + values, read_state(state, query))
