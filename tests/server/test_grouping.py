"""What arrives in quick succession is sent in one piece: same bytes, fewer pieces, ended with its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from localspec.api.closing import closing
from localspec.api.remote import RemoteEngine, RemoteSettings
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import EngineError
from localspec.server.grouping import grouped
from tests.api.test_remote import REQUEST, collect, timeless
from tests.server.conftest import serving


async def frames(count: int, gap_s: float, error: Exception | None = None) -> AsyncGenerator[bytes, None]:
    for number in range(count):
        yield b"%d," % number
        await asyncio.sleep(gap_s)
    if error is not None:
        raise error


async def pieces_of(source: AsyncGenerator[bytes, None], pause_s: float) -> list[tuple[float, bytes]]:
    began_s = time.monotonic()
    async with closing(grouped(source, pause_s)) as found:
        return [(time.monotonic() - began_s, piece) async for piece in found]


async def test_same_bytes_in_few_pieces_and_the_first_at_once() -> None:
    pieces = await pieces_of(frames(40, 0.005), 0.1)
    assert b"".join(piece for _, piece in pieces) == b"".join(b"%d," % number for number in range(40))
    assert pieces[0][1] == b"0," and pieces[0][0] < 0.1
    assert 2 <= len(pieces) <= 40 * 0.02 / 0.1 + 3


async def test_slow_frames_are_not_held_back() -> None:
    pieces = await pieces_of(frames(3, 0.06), 0.02)
    assert [piece for _, piece in pieces] == [b"0,", b"1,", b"2,"]


async def test_the_end_is_not_held_back() -> None:
    began_s = time.monotonic()
    assert len(await pieces_of(frames(2, 0.0), 30.0)) <= 2
    assert time.monotonic() - began_s < 25.0


async def test_an_error_comes_after_what_came_before_it() -> None:
    seen = b""
    with pytest.raises(EngineError, match="gone"):
        async with closing(grouped(frames(3, 0.0, EngineError("internal", "gone")), 0.01)) as found:
            async for piece in found:
                seen += piece
    assert seen == b"0,1,2,"


async def test_leaving_closes_the_source() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    async with closing(grouped(endless(), 0.01)) as found:
        async for _ in found:
            break
    assert closed.is_set()


async def test_a_grouped_answer_has_the_same_events() -> None:
    script = Script(replies=(Reply("A rather long answer, " * 12),), seed=3, tok_per_s=400.0)
    direct = await collect(ScriptedEngine(script))
    async with serving(ScriptedEngine(script)) as address:
        remote = RemoteEngine(RemoteSettings(address, group_s=0.05))
        assert timeless(await collect(remote, REQUEST)) == timeless(direct)
        await remote.aclose()
