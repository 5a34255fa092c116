"""What the decode thread asks of the tiers below the device, and an engine that has none: everything is done at once.

Knows no memory and no disk.
"""

from __future__ import annotations

from concurrent.futures import Future

from localspec.cache.pool import StateSnapshot
from localspec.engine.inbox import settle
from localspec.engine.tier_restore import Call
from localspec.scheduler.sequence import Sequence


class NoTiers:
    """An engine that keeps nothing below the device. Methods without a thread named are the decode thread's."""

    @property
    def restoring(self) -> bool:
        """Whether a restore holds pages or requests; its end comes as a command."""
        return False

    def start(self, call: Call) -> None:
        """`call` runs a function on the decode thread, which must run already."""

    def fetch(self, sequence: Sequence) -> None:
        """If the disk may hold more of a queued request's prompt than the tree, look there before admission."""

    def warm(self, token_ids: tuple[int, ...], chat_id: str | None, private: bool = False) -> Future[None]:
        """Any thread: bring the prefix of a conversation near; done when it is there or will not come."""
        return done()

    def retired(self, sequence: Sequence, ids: tuple[int, ...], states: list[tuple[int, StateSnapshot]]) -> None:
        """A sequence's tokens are in the tree; write them, and the states at their positions, when there is time."""

    def forget(self, chat_id: str) -> Future[None]:
        """Any thread: delete what only this chat has on disk, turns that wait to be written included."""
        return done()

    def forgotten(self, chat_id: str) -> None:
        """A chat leaves the device: what is on its way there or from there is not to be kept."""

    def see_prefill(self, num_tokens: int, milliseconds: float) -> None:
        """How fast this machine reads prompts."""

    def reset(self) -> None:
        """The tree was emptied because its contents are in doubt."""

    def close(self) -> None:
        """Any other thread: write what waits (for a limited time), end the threads. The decode thread still runs."""


def done() -> Future[None]:
    future: Future[None] = Future()
    settle(future)
    return future
