"""Paged attention of the reference: right against a plain softmax, and the same bits wherever and whenever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from localspec.kernels import reference_attention_fused
from localspec.kernels.ops import Paging
from localspec.kernels.reference_attention import Attend, attend
from localspec.kernels.reference_attention_fused import attend_fused, choose_attend
from tests.helpers.models import reference_ops

pytestmark = pytest.mark.torch
PAGES_PER_SLOT = 14


class Bed:
    """Two slots over one pool with the same keys and values; slot 0 in one piece, slot 1 scattered."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, length: int, way: Attend = attend_fused) -> None:
        generator = torch.Generator().manual_seed(heads * head_dim + length)
        self.ops, self.scale = reference_ops(), head_dim**-0.5
        self.ops.attend = way
        self.q = torch.randn(length, heads, head_dim, generator=generator)
        keys, values = torch.randn(2, length, kv_heads, head_dim, generator=generator)
        num_pages = 1 + 2 * PAGES_PER_SLOT
        # What was never written is large: a key that should be masked and is not would show.
        self.pools = [torch.full((num_pages, 64, kv_heads, head_dim), 99.0) for _ in range(2)]
        pages = torch.randperm(PAGES_PER_SLOT, generator=generator) + 1 + PAGES_PER_SLOT
        self.tables = torch.stack((torch.arange(1, 1 + PAGES_PER_SLOT), pages)).int()
        self.positions = torch.arange(length)
        for slot in (0, 1):
            paging = self.paging([slot] * length)
            for pool, rows in zip(self.pools, (keys, values), strict=True):
                self.ops.store_kv(rows, pool, paging, self.positions)
        group = heads // kv_heads
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), keys.double().repeat_interleave(group, 1)) * self.scale
        self.scores, self.values = scores, values.double().repeat_interleave(group, 1)

    def paging(self, slots: list[int]) -> Paging:
        return Paging(self.tables, torch.tensor(slots), len(self.q))

    def run(self, rows: torch.Tensor, slots: list[int], begin: torch.Tensor | None = None) -> torch.Tensor:
        begin = torch.zeros_like(rows) if begin is None else begin
        return self.ops.attention(self.q[rows], *self.pools, self.paging(slots), begin, rows + 1, self.scale)

    def expected(self, rows: torch.Tensor, begin: int = 0) -> torch.Tensor:
        keys = torch.arange(self.scores.shape[2])
        hidden = (keys > rows.view(-1, 1)) | (keys < begin)
        weights = self.scores[:, rows].masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, self.values)


@pytest.fixture(
    params=[(1, attend), (3, attend), (2, attend_fused), (3, attend_fused)],
    ids=lambda each: f"{each[1].__name__}-{each[0]}",
)
def way(request: pytest.FixtureRequest) -> Iterator[Attend]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param[0])
    yield request.param[1]
    torch.set_num_threads(before)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 2, 20), (6, 1, 256), (2, 2, 128)])
def test_attention_against_a_plain_softmax_and_itself(heads: int, kv_heads: int, head_dim: int, way: Attend) -> None:
    bed = Bed(heads, kv_heads, head_dim, 600, way)
    rows = torch.arange(600)
    whole = bed.run(rows, [0] * 600)
    assert (whole - bed.expected(rows)).abs().max() < 1e-5
    assert torch.equal(bed.run(rows, [1] * 600), whole), "scattered pages"
    for count in range(1, 17):
        for start in (0, 250, 600 - count):
            part = torch.arange(start, start + count)
            assert torch.equal(bed.run(part, [count % 2] * count), whole[part]), f"{count} rows from {start}"
    mixed = torch.tensor([5, 6, 590, 591, 592, 300])
    got = bed.run(torch.cat((mixed, mixed[:2])), [0, 0, 1, 1, 1, 0, -1, -1])
    assert torch.equal(got[:6], whole[mixed]) and not got[6:].any()


@pytest.mark.parametrize("way", [attend, attend_fused])
def test_keys_before_the_begin_are_not_seen(way: Attend) -> None:
    bed = Bed(4, 2, 32, 600, way)
    rows = torch.tensor([400, 401, 599])
    for begin in (1, 255, 256, 300):
        got = bed.run(rows, [1] * 3, torch.full_like(rows, begin))
        assert (got - bed.expected(rows, begin)).abs().max() < 1e-5


@pytest.mark.parametrize("way", [attend, attend_fused])
def test_later_keys_do_not_change_a_row(way: Attend) -> None:
    bed = Bed(3, 1, 64, 700, way)
    rows = torch.tensor([100])
    before = bed.run(rows, [0])
    # A neighbour in the step that sees many more keys makes the step read more splits.
    assert torch.equal(bed.run(torch.tensor([100, 699]), [0, 0])[:1], before)
    for pool in bed.pools:
        pool[1 + 100 // 64, 100 % 64 + 1 :] = -7.0
        pool[3:] = 5.0
    assert torch.equal(bed.run(rows, [0]), before)


def test_padding_rows_write_to_page_zero_only() -> None:
    bed = Bed(2, 2, 20, 200)
    before = bed.pools[0].clone()
    bed.ops.store_kv(torch.zeros(2, 2, 20), bed.pools[0], bed.paging([-1, -1]), torch.tensor([3, 70]))
    assert torch.equal(bed.pools[0][1:], before[1:])
    bed.ops.store_kv(torch.zeros(2, 2, 20), bed.pools[0], bed.paging([1, -1]), torch.tensor([70, 70]))
    changed = (bed.pools[0][1:] != before[1:]).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[int(bed.tables[1, 1]) - 1, 6]]


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.05), (torch.float8_e4m3fn, 0.3)])
def test_reduced_precision_pools_are_read_as_stored(dtype: torch.dtype, error: float) -> None:
    bed = Bed(4, 2, 32, 300)
    rows = torch.arange(300)
    whole = bed.run(rows, [0] * 300)
    keys = bed.pools[0][1:6].flatten(0, 1)[:300].clone()
    bed.pools = [pool.to(dtype) for pool in bed.pools]
    rounded = bed.run(rows, [1] * 300)
    assert 0 < (rounded - whole).abs().max() < error
    assert torch.equal(bed.run(rows[100:103], [0] * 3), rounded[100:103])
    bed.ops.store_kv(keys * 1000, bed.pools[0], bed.paging([0] * 300), rows)
    largest = 448.0 if dtype == torch.float8_e4m3fn else float("inf")
    expected = (keys * 1000).clamp(-largest, largest).to(dtype)
    assert torch.equal(bed.pools[0][1:6].flatten(0, 1)[:300].float(), expected.float())


def test_a_kernel_that_does_not_keep_a_rows_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert choose_attend(cpu) is attend_fused and choose_attend(torch.device("meta")) is attend
    sound = reference_attention_fused._fused

    def by_count(q: torch.Tensor, *rest: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        mixed, weight = sound(q, *rest)
        return mixed * (1 + 2e-7 * (q.shape[2] > 16)), weight

    def missing(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise AttributeError("no such operator")

    for broken in (by_count, missing):
        monkeypatch.setattr(reference_attention_fused, "_fused", broken)
        assert choose_attend(cpu) is attend
