"""Sends what arrives in quick succession in one piece, for a client that shows it a few times a second.

Each piece wakes the client and goes through its HTTP library; a token at a time that costs more than showing the text.
Knows nothing of what is in the frames.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator

from localspec.api.closing import closing


async def grouped(frames: AsyncIterator[bytes], pause_s: float) -> AsyncGenerator[bytes, None]:
    """The same bytes in pieces that are `pause_s` apart. The first frame and the last are not held back.

    Raises what `frames` raises, after what came before it.
    """
    waiting: list[bytes] = []
    news = asyncio.Event()

    async def read() -> None:
        try:
            async with closing(frames) as source:
                async for frame in source:
                    waiting.append(frame)
                    news.set()
        finally:
            news.set()

    reader = asyncio.create_task(read())
    next_s = 0.0
    try:
        while True:
            await news.wait()
            left_s = next_s - time.monotonic()
            if left_s > 0 and not reader.done():
                await asyncio.wait({reader}, timeout=left_s)
            news.clear()
            if waiting:
                piece = b"".join(waiting)
                waiting.clear()
                next_s = time.monotonic() + pause_s
                yield piece
            if reader.done() and not waiting:
                reader.result()
                return
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
