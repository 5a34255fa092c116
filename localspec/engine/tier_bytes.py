"""Pages and states as bytes and back: the layout of a cached block, and the copies between device and host.

Knows planes, pages and streams; knows nothing of files or of which tokens the pages hold. A segment is layer-major:
for each owner and plane in order, the rows of its tokens. Rows beyond the last token are never copied, because a page
may still hold rows of an earlier owner.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localspec.cache.pool import CachePool, StateSnapshot
from localspec.core.cache_spec import CacheSpec
from localspec.core.records import PAGE_TOKENS
from localspec.storage.buffers import aligned_memory, use_ahead

log = logging.getLogger(__name__)


class BlockBytes:
    """Copies for the planes and states of these specs. Copies may run on any thread; the pages must be held."""

    def __init__(self, specs: Sequence[CacheSpec], pool: CachePool, device: torch.device) -> None:
        self._device = device
        self._pool = pool
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._planes: list[Tensor] = []  # each [num_pages * PAGE_TOKENS * row bytes] uint8, a view of the plane
        self._row_bytes: list[int] = []
        self._views: list[memoryview] = []
        """The planes again, where they are memory of a CPU."""
        self._states: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
        for spec in specs:
            for plane in spec.planes:
                buffer = pool.cache(spec.owner).planes[plane.name]
                self._planes.append(buffer.view(-1).view(torch.uint8))
                self._row_bytes.append(plane.bytes_per_token)
                if device.type == "cpu":
                    self._views.append(self._planes[-1].numpy().data)
            for state in spec.states:
                if not state.ring_rows:
                    dtype: torch.dtype = getattr(torch, state.dtype)
                    self._states.append((f"{spec.owner}/{state.name}", state.shape, dtype, state.total_bytes))

    def with_own_stream(self) -> BlockBytes:
        """The same planes by a stream of its own, so that one direction never waits behind the other."""
        other = copy.copy(self)
        other._stream = torch.cuda.Stream(self._device) if self._stream is not None else None  # type: ignore[no-untyped-call]
        return other

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all planes."""
        return sum(self._row_bytes)

    @property
    def reaches_pages(self) -> bool:
        """Whether `places` gives memory."""
        return bool(self._views)

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot; 0 where nothing has a state."""
        return sum(size for _, _, _, size in self._states)

    def room(self, give_up: Callable[[], bool]) -> StateSnapshot | None:
        """See `CachePool.room`."""
        return self._pool.room(give_up)

    def moment(self) -> Any:
        """A mark after all that was started on the device's main stream so far; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def host_memory(self, num_bytes: int) -> Tensor:
        """Page-aligned host memory [num_bytes] uint8, pinned where the driver allows it."""
        if self._stream is not None:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                # WSL refuses beyond a few GiB; copies are slower then, nothing else changes.
                log.info("no pinned memory for the cache on disk: %s", error)
        return torch.from_numpy(aligned_memory(num_bytes))

    def save_pages(self, pages: Sequence[int], num_tokens: int, target: Tensor, since: Any) -> None:
        """Copy the first `num_tokens` rows of `pages` into `target` ([token_bytes * num_tokens] uint8, host)."""
        with self._side_stream(since):
            for plane, row_bytes, offset, length in self._runs(pages, 0, num_tokens):
                start = plane[1] * row_bytes
                self._copy(target[offset : offset + length], plane[0][start : start + length])
        self._wait()

    def load_pages(self, source: Tensor, pages: Sequence[int], num_tokens: int, skip_tokens: int, since: Any) -> Any:
        """Start to copy rows [skip, num_tokens) of a segment of `num_tokens` tokens into `pages`, its pages from the
        first. Returns a mark: `source` must stay as it is until `finish` was called with it."""
        with self._side_stream(since):
            for plane, row_bytes, offset, length in self._runs(pages, skip_tokens, num_tokens, source.numel()):
                start = plane[1] * row_bytes
                self._copy(plane[0][start : start + length], source[offset : offset + length])
            if self._stream is None:
                return None
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(self._stream)
            return mark

    def places(self, pages: Sequence[int], num_tokens: int) -> list[memoryview]:
        """The memory of the first `num_tokens` rows of `pages` in a segment's order; none where it is no CPU's."""
        found: list[memoryview] = []
        runs = self._page_runs(pages, 0, num_tokens) if self._views else []
        for view, row_bytes in zip(self._views, self._row_bytes, strict=False):
            found += [view[row * row_bytes : (row + count) * row_bytes] for row, _, count in runs]
        return found

    def use_ahead(self, num_tokens: int) -> None:
        """Place the memory of the first pages, where it is a CPU's and costs time to be used for the first time."""
        num_rows = min(PAGE_TOKENS + num_tokens, self._planes[0].numel() // self._row_bytes[0])
        for plane, row_bytes in zip(self._planes[: len(self._views)], self._row_bytes, strict=False):
            use_ahead(plane.data_ptr(), num_rows * row_bytes)

    @staticmethod
    def finish(mark: Any) -> None:
        """Wait for a copy that was started."""
        if mark is not None:
            mark.synchronize()

    def save_state(self, snapshot: StateSnapshot, target: Tensor, since: Any) -> None:
        """Copy a snapshot into `target` ([state_bytes] uint8, host). Raises KeyError if a state is missing in it."""
        offset = 0
        with self._side_stream(since):
            for key, _, _, size in self._states:
                part = snapshot[key].contiguous().view(-1).view(torch.uint8)
                self._copy(target[offset : offset + size], part)
                offset += size
        self._wait()

    def load_state(self, source: Tensor, room: StateSnapshot) -> None:
        """Fill the room of a snapshot from [state_bytes] uint8, once whoever had it before has read it."""
        offset = 0
        with self._side_stream(self.moment()):
            for key, _, _, size in self._states:
                self._copy(room[key].view(-1).view(torch.uint8), source[offset : offset + size])
                offset += size
        self._wait()

    def _runs(
        self, pages: Sequence[int], begin: int, end: int, stored_bytes: int | None = None
    ) -> Iterator[tuple[tuple[Tensor, int], int, int, int]]:
        """((plane, first row), row bytes, offset in the segment, bytes) of every run of neighbouring pages."""
        segment_tokens = end if stored_bytes is None else stored_bytes // self.token_bytes
        runs = self._page_runs(pages, begin, end)
        base = 0
        for plane, row_bytes in zip(self._planes, self._row_bytes, strict=True):
            for first_row, first, count in runs:
                yield (plane, first_row), row_bytes, base + first * row_bytes, count * row_bytes
            base += segment_tokens * row_bytes

    @staticmethod
    def _page_runs(pages: Sequence[int], begin: int, end: int) -> list[tuple[int, int, int]]:
        """(first row in a plane, first token, tokens) of every run of neighbouring pages."""
        runs: list[tuple[int, int, int]] = []
        token = begin
        while token < end:
            row = pages[token // PAGE_TOKENS] * PAGE_TOKENS + token % PAGE_TOKENS
            count = min(PAGE_TOKENS - token % PAGE_TOKENS, end - token)
            if runs and runs[-1][0] + runs[-1][2] == row:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + count)
            else:
                runs.append((row, token, count))
            token += count
        return runs

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self._stream is not None:
            target.copy_(source, non_blocking=True)
        else:
            # PyTorch would share each copy among threads and wait for the slowest: on busy cores 20 times as long.
            np.copyto(target.numpy(), source.numpy())

    def _side_stream(self, since: Any) -> Any:
        if self._stream is None:
            return nullcontext()
        if since is not None:
            self._stream.wait_event(since)
        return torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def layout_parts(specs: Sequence[CacheSpec], backend: str) -> list[str]:
    """What the bytes of a block depend on, in words: weights, planes, states, and the back end that computed them."""
    parts = [backend]
    for spec in specs:
        if spec.planes or spec.states:
            parts.append(f"{spec.owner} {spec.fingerprint}")
            parts += [f"plane {plane.name} {plane.shape} {plane.dtype}" for plane in spec.planes]
            parts += [f"state {state.name} {state.shape} {state.dtype} {state.ring_rows}" for state in spec.states]
    return parts
