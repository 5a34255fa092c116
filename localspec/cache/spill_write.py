"""One finished turn on its way to disk: which of its blocks are missing there, and their writing in order.

Torch-free. Blocks go out root first and their rows follow in groups, so that a process killed at any point leaves a
shorter chain and never one with a hole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from localspec.cache.spill import LAYOUTS, SpillStore
from localspec.cache.spill_index import INDEX_ERRORS, SEGMENT, STATE, Block
from localspec.cache.spill_keys import Place, id_bytes, root_key, segment_key, segment_places, state_place
from localspec.cache.spill_order import NoRoom, unlink_without_row
from localspec.cache.spill_rebuild import worth_of
from localspec.core.records import SEGMENT_TOKENS
from localspec.storage.blockfile import HEADER_BYTES, BlockHeader
from localspec.storage.files import Buffer

GROUP_BLOCKS = 16
NEWEST_STATES = 2
"""States kept of a chain beside its first, which is the one that other conversations share."""


class _Overtaken(Exception):
    """Another process removed part of this chain meanwhile."""


class TurnWriter:
    """Writes what the tier lacks of one chain. Every method returns quietly when writing had to stop."""

    def __init__(self, store: SpillStore, token_ids: Sequence[int], salt: str, chat_id: str | None) -> None:
        self._store = store
        self._chat_id = chat_id
        self._ids = id_bytes(token_ids)
        self._root = root_key(store.identity.fingerprint, salt)
        self._places = segment_places(self._root, self._ids)
        self._waiting: list[tuple[Block, bytes | None]] = []
        self._waiting_bytes = 0
        self.written_bytes = 0
        self.missing: tuple[Place, ...] = ()
        """Segments to write, in order."""
        self._own_keys = frozenset(place.key for place in self._places)
        with self._stopping():
            self.missing = self._find_missing()

    def add_segment(self, place: Place, payload: Sequence[Buffer]) -> bool:
        """Write one segment; False when nothing more can be written now."""
        return self._write(place, SEGMENT, payload, self._ids[4 * place.begin : 4 * place.end])

    def wants_state(self, position: int) -> bool:
        """Whether the state after `position` tokens is not there yet, while all the segments before it are."""
        wanted = False
        with self._stopping():
            self._publish()
            place = state_place(self._places, self._ids, position)
            index = self._store.index
            segment = self._places[(position - 1) // SEGMENT_TOKENS]
            wanted = index.get(place.key) is None and self._is_covered(segment, position)
        return wanted

    def add_state(self, position: int, payload: Sequence[Buffer]) -> bool:
        """Write the state after `position` tokens; False when nothing more can be written now."""
        return self._write(state_place(self._places, self._ids, position), STATE, payload, None)

    def finish(self) -> None:
        """Publish what waits, count the turn as a use of the whole chain, and let older states and tails go."""
        with self._stopping():
            self._publish()
            index = self._store.index
            keys = list(index.present([place.key for place in self._places]))
            states = self._own_states()
            with index.transaction() as db:
                index.use(db, [*keys, *(state.key for state in states)], self._chat_id)
            spare = states[1:-NEWEST_STATES] if len(states) > NEWEST_STATES + 1 else []
            self._remove_only(spare)
            self._remove_only(self._replaced_tails())

    def _find_missing(self) -> tuple[Place, ...]:
        index = self._store.index
        present = index.present([place.key for place in self._places])
        if present:
            # Young before anything is evicted for the rest of their chain.
            with index.transaction() as db:
                index.use(db, list(present), self._chat_id)
        missing = [place for place in self._places if place.key not in present]
        if missing and missing[-1].num_tokens < SEGMENT_TOKENS and self._is_covered(missing[-1], missing[-1].end):
            missing.pop()
        return tuple(missing)

    def _is_covered(self, segment: Place, position: int) -> bool:
        """Whether some segment on disk holds this chain's tokens from the segment's begin to `position`."""
        wanted = self._ids[4 * segment.begin : 4 * position]
        return any(ids.startswith(wanted) for _, ids in self._store.index.neighbours(segment.parent, wanted))

    def _write(self, place: Place, kind: int, payload: Sequence[Buffer], ids: bytes | None) -> bool:
        store, identity = self._store, self._store.identity
        with self._stopping():
            size = identity.state_bytes if kind == STATE else identity.token_bytes * place.num_tokens
            file_bytes = size + HEADER_BYTES
            store.room.check_budget(self._waiting_bytes + file_bytes)
            store.room.make(self._waiting_bytes + file_bytes, self._own_keys)
            header = BlockHeader(
                identity.fingerprint, place.key, place.parent, place.begin, place.end, LAYOUTS[kind], note=ids or b""
            )  # fmt: skip
            written = store.files.write(header, payload)
            if written.payload_bytes != size:
                raise ValueError(f"a block of {size} bytes was given {written.payload_bytes}")
            self._waiting.append((self._row(place, kind, file_bytes), ids))
            self._waiting_bytes += file_bytes
            if len(self._waiting) >= GROUP_BLOCKS:
                self._publish()
            return True
        return False

    def _row(self, place: Place, kind: int, file_bytes: int) -> Block:
        worth = worth_of(kind, place.begin, place.end, file_bytes, self._store.prefill_tok_per_s)
        return Block(
            place.key, self._store.identity.fingerprint, place.parent, kind, place.begin, place.end, file_bytes, worth
        )

    def _publish(self) -> None:
        if not self._waiting:
            return
        index = self._store.index
        with index.transaction() as db:
            for block, ids in self._waiting:
                # Another process may have evicted the same key since, or what it hangs on: no row without either.
                hangs = block.parent == self._root or index.has(block.parent)
                if not hangs or not self._store.path(block).exists():
                    raise _Overtaken
                index.add(db, block, ids)
            self._store.room.spend(db, self._waiting_bytes)
            if self._chat_id is not None:
                index.note_chat(db, [block.key for block, _ in self._waiting], self._chat_id)
        self.written_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0
        self._store.writes_again()

    def _own_states(self) -> list[Block]:
        """States of this very chain, in order."""
        begins = {place.parent: place for place in self._places}
        found = self._store.index.states_after(list(begins))
        own = [
            state
            for state in found
            if begins[state.parent].begin < state.token_end <= begins[state.parent].end
            and state_place(self._places, self._ids, state.token_end).key == state.key
        ]
        return sorted(own, key=lambda state: state.token_end)

    def _replaced_tails(self) -> list[Block]:
        """Shorter tails whose tokens a segment of this chain holds too."""
        index = self._store.index
        found: list[Block] = []
        for place in self._places[-2:]:
            if index.get(place.key) is not None:
                ids = self._ids[4 * place.begin : 4 * place.end]
                found += index.some([segment_key(place.parent, ids[: 4 * n]) for n in range(1, place.num_tokens)])
        return found

    def _remove_only(self, blocks: list[Block]) -> None:
        """Remove blocks on which nothing hangs and that others cover."""
        if not blocks:
            return
        with self._store.index.transaction() as db:
            self._store.index.remove(db, blocks)
        unlink_without_row(self._store.index, self._store.files, blocks)

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """A disk or index that refuses ends the writing, never the caller; files without rows are taken back."""
        try:
            yield
        except (NoRoom, OSError, _Overtaken, *INDEX_ERRORS) as error:
            with contextlib.suppress(OSError, *INDEX_ERRORS):
                unlink_without_row(self._store.index, self._store.files, [block for block, _ in self._waiting])
            self._waiting, self._waiting_bytes = [], 0
            if not isinstance(error, _Overtaken):
                self._store.stop_writing(str(error))
            if isinstance(error, INDEX_ERRORS):
                self._store.index_failed(error)
