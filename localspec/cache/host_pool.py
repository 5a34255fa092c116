"""Blocks in host memory: which are there, which go first when the budget is reached, what they hang on.

Torch-free: a payload is whatever the allocator gives. Promises the same shape as the index on disk: no block without
the one before it, and, for a model that resumes from states only, no segment that no state makes useful once its state
has gone. A payload that somebody still reads lives on until the reader lets go of it. Safe for threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.cache.spill_index import AGE_TURNS, SEGMENT, STATE, Block
from localspec.cache.spill_keys import Place, state_place
from localspec.cache.spill_lookup import ModelIdentity

Allocate = Callable[[int, bool], Any]
"""(bytes, whether it is a state) -> memory, or None while there is no room."""


@dataclass
class _Held:
    block: Block
    ids: bytes
    payload: Any
    priority: float
    chat_ids: set[str] = field(default_factory=set)


class HostPool:
    """Payloads of one model's blocks by key, within what `allocate` gives."""

    def __init__(self, identity: ModelIdentity, allocate: Allocate) -> None:
        self.identity = identity
        self._allocate = allocate
        self._held: dict[bytes, _Held] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._lock = threading.RLock()
        self._turn = 0
        self._stored_bytes = 0
        self.num_evicted = 0

    @property
    def stored_bytes(self) -> int:
        """Payload bytes held now."""
        return self._stored_bytes

    @property
    def num_blocks(self) -> int:
        return len(self._held)

    def payload(self, key: bytes) -> Any:
        """The memory of a block, or None; it stays whole while it is referred to."""
        with self._lock:
            held = self._held.get(key)
            return held.payload if held is not None else None

    def has(self, key: bytes) -> bool:
        return key in self._held

    def neighbours(self, parent: bytes, ids: bytes) -> list[tuple[Block, bytes]]:
        """Every segment after `parent`: branches are few here."""
        with self._lock:
            return [(held.block, held.ids) for held in self._after(parent) if held.block.kind == SEGMENT]

    def states_after(self, parents: Sequence[bytes]) -> list[Block]:
        with self._lock:
            return [held.block for parent in parents for held in self._after(parent) if held.block.kind == STATE]

    def reserve(self, num_bytes: int, is_state: bool, keep: frozenset[bytes]) -> Any:
        """Memory for a payload; evicts what is worth least, never a block of `keep`. None if that is not enough."""
        with self._lock:
            while (memory := self._allocate(num_bytes, is_state)) is None:
                if not self._evict(keep):
                    return None
            return memory

    def add(self, place: Place, kind: int, ids: bytes, payload: Any, chat_id: str | None, root: bytes) -> bool:
        """A payload is whole; `ids` of a segment. False where the block before it has gone meanwhile."""
        identity = self.identity
        size = identity.state_bytes if kind == STATE else identity.token_bytes * place.num_tokens
        # Seconds of recomputing a byte saves, in arbitrary units: blocks of one model share the rate.
        worth = math.log2((place.end if kind == STATE else place.num_tokens) / max(size, 1))
        block = Block(place.key, identity.fingerprint, place.parent, kind, place.begin, place.end, size, worth)
        with self._lock:
            if place.parent != root and place.parent not in self._held:
                return False
            if place.key not in self._held:
                self._held[place.key] = _Held(block, ids, payload, worth + self._turn / AGE_TURNS)
                self._children.setdefault(place.parent, set()).add(place.key)
                self._stored_bytes += size
            self._note([place.key], chat_id)
            return True

    def use(self, keys: Iterable[bytes], chat_id: str | None) -> None:
        """A turn used these blocks: they become young."""
        with self._lock:
            self._turn += 1
            found = [key for key in keys if key in self._held]
            for key in found:
                self._held[key].priority = self._held[key].block.worth + self._turn / AGE_TURNS
            self._note(found, chat_id)

    def settle(self, places: Sequence[Place], ids: bytes, newest_states: int) -> None:
        """Let go of this chain's states between its first and its newest ones, and of tails that grew."""
        with self._lock:
            own = [
                held.block
                for place in places
                for held in self._after(place.parent)
                if held.block.kind == STATE
                and place.begin < held.block.token_end <= place.end
                and state_place(places, ids, held.block.token_end).key == held.block.key
            ]
            own.sort(key=lambda block: block.token_end)
            for block in own[1:-newest_states] if len(own) > newest_states + 1 else []:
                self._remove(block.key)
            for place in places[-2:]:
                for held in self._after(place.parent) if place.key in self._held else []:
                    shorter = held.block.kind == SEGMENT and len(held.ids) < 4 * place.num_tokens
                    if shorter and ids[4 * place.begin :].startswith(held.ids):
                        self._remove(held.block.key)

    def covers(self, place: Place, ids: bytes) -> bool:
        """Whether some segment holds the tokens of `place`; `ids` of the whole chain."""
        wanted = ids[4 * place.begin : 4 * place.end]
        with self._lock:
            return any(h.block.kind == SEGMENT and h.ids.startswith(wanted) for h in self._after(place.parent))

    def prune(self, chain: bytes) -> None:
        """For a model that resumes from states: remove the end of a chain that no state makes useful."""
        with self._lock:
            if self.identity.needs_state:
                self._remove_useless(chain)

    def drop(self, key: bytes) -> None:
        """Remove a block and what hangs on it."""
        with self._lock:
            self._remove_with_dependants(key)

    def forget_chat(self, chat_id: str) -> int:
        """Remove what only this chat used; returns how many blocks went."""
        with self._lock:
            before = len(self._held)
            mine = [held for held in self._held.values() if chat_id in held.chat_ids]
            for held in sorted(mine, key=lambda held: -held.block.token_end):
                held.chat_ids.discard(chat_id)
                if not held.chat_ids and held.block.key in self._held:
                    self._remove_with_dependants(held.block.key)
            return before - len(self._held)

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._held.clear()
            self._children.clear()
            self._stored_bytes = 0

    def _after(self, parent: bytes) -> list[_Held]:
        return [self._held[key] for key in self._children.get(parent, ())]

    def _note(self, keys: Iterable[bytes], chat_id: str | None) -> None:
        if chat_id is not None:
            for key in keys:
                self._held[key].chat_ids.add(chat_id)

    def _evict(self, keep: frozenset[bytes]) -> bool:
        """Remove the leaf of least worth per byte and turn; of equals the one furthest from the root."""
        leaves = [held for key, held in self._held.items() if key not in keep and not self._children.get(key)]
        if not leaves:
            return False
        self._remove_with_dependants(min(leaves, key=lambda h: (h.priority, -h.block.token_end)).block.key)
        self.num_evicted += 1
        return True

    def _remove_with_dependants(self, key: bytes) -> None:
        held = self._held.get(key)
        if held is None:
            return
        parent = held.block.parent
        doomed = [key]
        for each in doomed:
            doomed += self._children.get(each, ())
        for each in doomed:
            self._remove(each)
        if held.block.kind == SEGMENT:
            # States inside a segment need the segment's tokens up to them.
            covered = max((h.block.token_end for h in self._after(parent) if h.block.kind == SEGMENT), default=-1)
            for state in self._after(parent):
                if state.block.kind == STATE and state.block.token_end > covered:
                    self._remove(state.block.key)
        if self.identity.needs_state:
            self._remove_useless(parent)

    def _remove_useless(self, chain: bytes) -> None:
        """Segments up the chain that no state stands in or after."""
        while not any(held.block.kind == STATE for held in self._after(chain)):
            for held in self._after(chain):
                if not self._children.get(held.block.key):
                    self._remove(held.block.key)
            above = self._held.get(chain)
            if above is None or self._children.get(chain):
                return
            chain = above.block.parent

    def _remove(self, key: bytes) -> None:
        held = self._held.pop(key, None)
        if held is None:
            return
        self._stored_bytes -= held.block.file_bytes
        siblings = self._children[held.block.parent]
        siblings.discard(key)
        if not siblings:
            del self._children[held.block.parent]
