"""Which program of the attention stream has which rows and keys: everything exactly once, and within its buffers.

The kernel's own functions run here, with NumPy in the place of the device's language and all programs at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
from localspec.kernels.triton import attention_tiles
from localspec.kernels.triton.attention import MAX_STREAM_SLOTS, StreamGrid, StreamShape, stream_grid
from localspec.kernels.triton.attention_blocks import MAX_ROWS

pytestmark = pytest.mark.torch


class Values(np.ndarray[Any, Any]):
    """What a kernel calls a tensor, as far as these functions use it."""

    def to(self, dtype: type) -> Any:
        return self.astype(dtype)


@dataclass(frozen=True)
class Pointer:
    """values: what lies there; at: places that were added."""

    values: Any
    at: Any = 0

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.values, self.at + places)


def load(pointer: Pointer, mask: Any, other: int) -> Any:
    inside = np.where(mask, pointer.at, 0)
    assert (inside < len(pointer.values)).all(), "a read beyond the rows"
    return np.where(mask, pointer.values[inside], other).view(Values)


def chosen(condition: Any, yes: Any, no: Any) -> Any:
    return np.where(condition, yes, no).view(Values)


def language(programs: Any) -> SimpleNamespace:
    """`programs`: numbers of the programs, [P]; rows are [ROWS, 1], so that both go together."""
    return SimpleNamespace(
        constexpr=object,
        int32=np.int32,
        int64=np.int64,
        BlockedLayout=lambda *sizes: None,
        arange=lambda start, stop, layout: np.arange(start, stop)[:, None].view(Values),
        program_id=lambda axis: programs,
        load=load,
        where=chosen,
        maximum=np.maximum,
        minimum=np.minimum,
        sum=lambda values, axis: np.sum(values, axis=axis),
        min=lambda values, axis: np.min(values, axis=axis),
        max=lambda values, axis: np.max(values, axis=axis),
        cdiv=lambda a, b: -(-a // b),
        static_range=range,
    )


def functions(programs: Any) -> dict[str, Any]:
    """Those of attention_tiles.py by name, to be called from Python."""
    found: dict[str, Any] = {"gl": language(programs)}
    for name, value in vars(attention_tiles).items():
        code: Callable[..., Any] | None = getattr(value, "fn", None)
        if code is not None:
            found[name] = FunctionType(code.__code__, found, name)
        elif name.isupper():
            found[name] = value.value
    return found


@dataclass(frozen=True)
class Step:
    """Rows of a step: slots, -1 for padding; keys that each sees, at least one."""

    slots: list[int]
    begin: list[int]
    end: list[int]
    num_slots: int
    group: int

    @property
    def rows(self) -> tuple[int, int, int]:
        return len(self.slots), self.num_slots, self.group


def written(step: Step, shape: StreamShape, grid: StreamGrid) -> dict[int, set[int]]:
    """Parts of each pair of (row, head); asserts that blocks are read once and parts written once."""
    programs = np.arange(max(grid.programs, grid.most_tiles)).view(Values)
    tiles = functions(programs)
    pointers = [Pointer(np.array(values, dtype=np.int64)) for values in (step.slots, step.begin, step.end)]
    bounds = tiles["tile_bounds"](
        *pointers, len(step.slots), grid.programs, grid.least_tiles,
        step.group, shape.pairs, shape.block_keys, MAX_ROWS, step.num_slots, shape.num_warps,
    )  # fmt: skip
    _, index, each, _, _, shift, first_key, last_key, _, _ = bounds
    own = tiles["own_blocks"](first_key, last_key, index, each, shift, shape.block_keys)
    columns = [np.broadcast_to(np.asarray(value), programs.shape).tolist() for value in (*bounds, *own)]
    parts: dict[int, set[int]] = {}
    blocks: dict[tuple[int, int], list[int]] = {}
    for slot, _, _, first_pair, pairs, shift, first_key, last_key, inner_first, inner_stop, block, stop in zip(
        *columns, strict=True
    ):
        if block >= stop:
            continue
        assert slot >= 0 and pairs > 0 and block >= 0 and stop * shape.block_keys < last_key + shape.block_keys
        mine = range(first_pair, first_pair + pairs)
        rows = {pair // step.group for pair in mine}
        assert {step.slots[row] for row in rows} == {slot}
        assert first_key == min(step.begin[row] for row in rows) and last_key == max(step.end[row] for row in rows)
        assert inner_first == max(step.begin[row] for row in rows) and inner_stop == min(step.end[row] for row in rows)
        blocks.setdefault((first_pair, pairs), []).extend(range(block, stop))
        # As the stream stores: where a part of 2^shift blocks is full, and behind the last block.
        for part in {current >> shift for current in range(block, stop)}:
            assert 0 <= part < grid.max_parts
            for pair in mine:
                assert part not in parts.setdefault(pair, set()), "a part is written twice"
                parts[pair].add(part)
    for (first_pair, pairs), read in blocks.items():
        rows = {pair // step.group for pair in range(first_pair, first_pair + pairs)}
        first_key, last_key = min(step.begin[row] for row in rows), max(step.end[row] for row in rows)
        assert sorted(read) == list(range(first_key // shape.block_keys, -(-last_key // shape.block_keys)))
    return parts


def check(step: Step, shape: StreamShape, kv_heads: int, bound: int) -> int:
    """Asserts that the join finds what it reads of each row; gives log2 of the blocks of its parts."""
    grid = stream_grid(shape, step.rows, kv_heads, bound)
    parts = written(step, shape, grid)
    tiles = functions(np.zeros(1, dtype=np.int64).view(Values))
    padded = np.array(step.slots + [-1] * (MAX_ROWS - len(step.slots)), dtype=np.int64)[:, None].view(Values)
    counts = tiles["rows_by_slot"](padded)
    each = tiles["programs_of_tile"](counts, grid.programs, grid.least_tiles, step.group, shape.pairs, step.num_slots)
    shift = 0
    for row, slot in enumerate(step.slots):
        if slot < 0:
            assert all(row * step.group + head not in parts for head in range(step.group))
            continue
        longest = max(end for other, end in zip(step.slots, step.end, strict=True) if other == slot)
        shift = int(np.max(tiles["part_shift"](np.int32(longest), each, shape.block_keys)))
        part_keys = shape.block_keys << shift
        wanted = set(range(step.begin[row] // part_keys, -(-step.end[row] // part_keys)))
        for head in range(step.group):
            assert wanted <= parts.get(row * step.group + head, set())
    return shift


def random_step(numbers: random.Random, num_rows: int, bound: int) -> Step:
    """Runs of rows of some slots in any order, padding between and behind them, and windows that begin anywhere."""
    num_slots = numbers.randint(1, MAX_STREAM_SLOTS)
    order = [*numbers.sample(range(num_slots), num_slots), -1]
    numbers.shuffle(order)
    slots: list[int] = []
    for slot in order:
        slots += [slot] * numbers.choice([0, 1, 1, 2, 5, 16])
    slots = (slots + [-1] * num_rows)[:num_rows]
    longest = [numbers.choice([1, numbers.randint(1, bound), bound]) for _ in range(num_slots + 1)]
    end = [max(1, longest[slot] - numbers.choice([0, 1, 3, longest[slot] // 2])) for slot in slots]
    begin = [numbers.choice([0, 0, numbers.randrange(last), last - 1]) for last in end]
    return Step(slots, begin, end, num_slots, numbers.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16]))


@pytest.mark.parametrize("bound", [1, 63, 300, 2100, 9000, 40000])
def test_every_pair_and_block_is_covered_once(bound: int) -> None:
    numbers = random.Random(bound)
    shifts = set()
    for _ in range(60):
        step = random_step(numbers, numbers.randint(1, MAX_ROWS), bound)
        pairs = numbers.choice([16, 32])
        shape = StreamShape(pairs, 4, 2, numbers.choice([32, 64]), numbers.choice([1, 7, 40, 132, 264, 340]))
        loose = numbers.choice([bound, bound, -(-bound // 4096) * 4096])
        shifts.add(check(step, shape, numbers.choice([1, 2, 4, 8]), loose))
    assert shifts >= ({0} if bound < 300 else {0, 2} if bound < 2000 else {0, 2, 4})


def test_full_steps_of_every_size() -> None:
    """One slot with all rows, each row a slot of its own, and nothing but padding."""
    shape = StreamShape(16, 4, 2, 64, 264)
    for num_rows in range(1, MAX_ROWS + 1):
        several = min(num_rows, MAX_STREAM_SLOTS)
        for slots in ([0] * num_rows, sorted(row % several for row in range(num_rows)), [-1] * num_rows):
            check(Step(slots, [0] * num_rows, [5000] * num_rows, MAX_STREAM_SLOTS, 6), shape, 4, 5001)
