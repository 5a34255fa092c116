"""The index of cached blocks in SQLite: which blocks are whole on disk, how they hang together, which goes first.

Torch-free; opens no block file. A row is written after its file and removed before it, so that a row without a file is
rare and a file without a row is litter. Ages are counted in turns, never in seconds, so that a clock that is set back
or forward changes nothing. Any thread may call; each has its own connection, and other processes may have theirs.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from localspec.cache.spill_schema import TABLES, VERSION
from localspec.storage.files import make_private_file

_Value = TypeVar("_Value")
SEGMENT, STATE = 0, 1
BUSY_TIMEOUT_S = 10.0
AGE_TURNS = 32.0
"""A block that was not used for as many turns must be worth twice as much per byte to stay."""
INDEX_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What a damaged or busy index may raise; SQLite's own messages may quote bytes that are no text."""
REBUILT = "rebuilt"
"""Counter of an index that was made again from the files: some rows have no chats."""
_FEW_KEYS = 64
_COLUMNS = "key, fingerprint, parent, kind, token_begin, token_end, file_bytes, worth"


class Block(NamedTuple):
    """A row: one whole file. `worth` is log2 of the seconds of recomputing that a byte saves."""

    key: bytes
    fingerprint: bytes
    parent: bytes
    kind: int
    token_begin: int
    token_end: int
    file_bytes: int
    worth: float = 0.0


@dataclass(frozen=True)
class ModelRow:
    """What is stored for one fingerprint. Rates are None until they were measured."""

    fingerprint: bytes
    model_id: str
    folder: str
    needs_state: bool
    stored_bytes: int = 0
    num_blocks: int = 0
    prefill_tok_per_s: float | None = None
    read_bytes_per_s: float | None = None


class SpillIndex:
    """One SQLite file. Methods that change anything take the connection of a `transaction`."""

    def __init__(self, path: Path) -> None:
        """Open or create; an unreadable index, or one of another version, is replaced by an empty one."""
        self.path = path
        self.was_lost = False
        self.is_new = False
        """Made empty; files may lie beside it."""
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._epoch = 0
        self._inode = 0
        self._open()

    def _open(self) -> None:
        existed = self.path.exists() and self.path.stat().st_size > 0
        try:
            db = self.connection()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == VERSION:
                db.execute("SELECT count(*) FROM model").fetchone()
                return
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            pass
        self.was_lost = existed
        self.reset()

    def reopen_if_replaced(self) -> bool:
        """Follow a file that somebody deleted or put another one in the place of; whether that was so."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == self._inode:
                return False
        self.close()
        self._open()
        return True

    def reset(self) -> None:
        """Start again with an empty index; every block on disk becomes litter."""
        self.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        db = self.connection()
        self.is_new = True
        db.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")

    def connection(self) -> sqlite3.Connection:
        """This thread's connection."""
        held: tuple[int, sqlite3.Connection] | None = getattr(self._local, "held", None)
        if held is not None and held[0] == self._epoch:
            return held[1]
        # SQLite would create it with the umask's mode, and its journals copy the mode.
        make_private_file(self.path)
        db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        with self._lock:
            self._connections.append(db)
            self._inode = self.path.stat().st_ino
        self._local.held = (self._epoch, db)
        # A row with the ids of a whole segment must fit a page four times, or SQLite gives each a page of its own.
        db.execute("PRAGMA page_size = 8192")
        db.execute("PRAGMA journal_mode = WAL")
        # A power cut may undo the last turns; it cannot harm the file.
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA cache_size = -16000")
        # Rows hold the ids of tokens: what is deleted is overwritten, not only unlinked.
        db.execute("PRAGMA secure_delete = ON")
        return db

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, one writer at a time over all processes."""
        db = self.connection()
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")

    def close(self) -> None:
        """Close every thread's connection; nobody may be inside a call."""
        with self._lock:
            connections, self._connections = self._connections, []
            self._epoch += 1
        for db in connections:
            db.close()

    def scrub(self) -> None:
        """Empty the journal, which still holds rows as they were before they were deleted. What other processes read
        at this moment goes with their next turn."""
        self.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def has(self, key: bytes) -> bool:
        """Whether a block is indexed."""
        return self._exists("key = ?", key)

    def present(self, keys: Sequence[bytes]) -> dict[bytes, Block]:
        """The rows of these keys up to the first that is missing; keys in the order of a chain."""
        found: dict[bytes, Block] = {}
        for start in range(0, len(keys), _FEW_KEYS):
            few = keys[start : start + _FEW_KEYS]
            for block in self._select(f"WHERE key IN ({_marks(few)})", few):
                found[block.key] = block
            if len(found) < start + len(few):
                break
        return found

    def states_after(self, parents: Sequence[bytes]) -> list[Block]:
        """States that belong to any of these chains."""
        found: list[Block] = []
        for start in range(0, len(parents), _FEW_KEYS):
            few = parents[start : start + _FEW_KEYS]
            found += self._select(f"WHERE kind = {STATE} AND parent IN ({_marks(few)})", few)
        return found

    def neighbours(self, parent: bytes, ids: bytes) -> list[tuple[Block, bytes]]:
        """The segments after `parent` whose ids sort next to `ids`: the longest common prefix is among them."""
        found: list[tuple[Block, bytes]] = []
        for compare, order in (("<=", "DESC"), (">", "ASC")):
            row = self.connection().execute(
                f"SELECT key, ids FROM segment_ids WHERE parent = ? AND ids {compare} ? ORDER BY ids {order} LIMIT 1",
                (parent, ids),
            ).fetchone()  # fmt: skip
            if row is not None:
                held = _expect(row[1], bytes)
                found += [(block, held) for block in self._select("WHERE key = ?", (row[0],))]
        return found

    def some(self, keys: Sequence[bytes]) -> list[Block]:
        """The rows of those keys that have one."""
        found: list[Block] = []
        for start in range(0, len(keys), _FEW_KEYS):
            few = keys[start : start + _FEW_KEYS]
            found += self._select(f"WHERE key IN ({_marks(few)})", few)
        return found

    def keys_in_shard(self, fingerprint: bytes, shard: int) -> set[bytes]:
        """Keys of a model whose first byte is `shard`, as files lie in folders."""
        rows = self.connection().execute(
            "SELECT key FROM block WHERE key >= ? AND key < ? AND fingerprint = ?",
            (bytes([shard]), bytes([shard, *b"\xff" * 32]), fingerprint),
        )
        return {row[0] for row in rows}

    def get(self, key: bytes) -> Block | None:
        """The row of a key."""
        found = self._select("WHERE key = ?", (key,))
        return found[0] if found else None

    def children(self, parent: bytes) -> list[Block]:
        """Segments and states right after a chain."""
        return self._select("WHERE parent = ?", (parent,))

    def has_child(self, parent: bytes) -> bool:
        return self._exists("parent = ?", parent)

    def has_state(self, parent: bytes) -> bool:
        """Whether any state stands in the segments right after a chain."""
        return self._exists(f"parent = ? AND kind = {STATE}", parent)

    def leaf_segments(self, parent: bytes) -> list[Block]:
        """Segments right after a chain on which nothing hangs."""
        return self._select(
            f"WHERE parent = ? AND kind = {SEGMENT} AND NOT EXISTS (SELECT 1 FROM block c WHERE c.parent = block.key)",
            (parent,),
        )

    def below(self, key: bytes) -> list[Block]:
        """A block and everything that hangs on it."""
        return self._select(
            "WHERE key IN (WITH RECURSIVE hanging(key) AS (SELECT ? UNION SELECT b.key FROM block b "
            "JOIN hanging h ON b.parent = h.key) SELECT key FROM hanging)",
            (key,),
        )

    def first_to_go(self) -> Block | None:
        """Least worth per byte and turn; of equals the one furthest from the root, so tails go before heads."""
        found = self._select("ORDER BY priority, token_end DESC LIMIT 1", ())
        return found[0] if found else None

    def of_chat(self, chat_id: str) -> list[Block]:
        """Blocks that only this chat used, longest chains first; after a loss of the index also those that no chat is
        known to have used, because they may be this one's."""
        found = self._select(
            "WHERE key IN (SELECT c.key FROM chat c WHERE c.chat_id = ? AND NOT EXISTS "
            "(SELECT 1 FROM chat o WHERE o.key = c.key AND o.chat_id <> c.chat_id)) ORDER BY token_end DESC",
            (chat_id,),
        )
        if self.counter(REBUILT):
            found += self._select("WHERE key NOT IN (SELECT key FROM chat) ORDER BY token_end DESC", ())
        return found

    def all_blocks(self, fingerprint: bytes) -> Iterator[Block]:
        """Every row of a model, in no order."""
        rows = self.connection().execute(f"SELECT {_COLUMNS} FROM block WHERE fingerprint = ?", (fingerprint,))
        return (_block(row) for row in rows)

    def models(self) -> list[ModelRow]:
        """Every model that stored anything."""
        rows = self.connection().execute(
            "SELECT fingerprint, model_id, folder, needs_state, stored_bytes, num_blocks, prefill_tok_per_s, "
            "read_bytes_per_s FROM model"
        )  # fmt: skip
        return [_model(row) for row in rows]

    def total_bytes(self) -> int:
        """Of all files that have a row."""
        (total,) = self.connection().execute("SELECT coalesce(sum(stored_bytes), 0) FROM model").fetchone()
        return _expect(total, int)

    def counter(self, name: str) -> int:
        """A stored number; 0 before its first change."""
        row = self.connection().execute("SELECT value FROM counter WHERE name = ?", (name,)).fetchone()
        return _expect(row[0], int) if row is not None else 0

    def set_counter(self, db: sqlite3.Connection, name: str, value: int) -> None:
        db.execute("INSERT INTO counter VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", (name, value))

    def register(self, db: sqlite3.Connection, model: ModelRow, rename: bool = True) -> None:
        """Remember a model; its totals and rates stay, its name too unless `rename`."""
        update = "model_id = excluded.model_id, folder = excluded.folder, needs_state = excluded.needs_state"
        db.execute(
            "INSERT INTO model(fingerprint, model_id, folder, needs_state) VALUES (?, ?, ?, ?) "
            f"ON CONFLICT DO {f'UPDATE SET {update}' if rename else 'NOTHING'}",
            (model.fingerprint, model.model_id, model.folder, model.needs_state),
        )

    def set_rates(self, db: sqlite3.Connection, fingerprint: bytes, prefill: float | None, read: float | None) -> None:
        db.execute(
            "UPDATE model SET prefill_tok_per_s = coalesce(?, prefill_tok_per_s), "
            "read_bytes_per_s = coalesce(?, read_bytes_per_s) WHERE fingerprint = ?",
            (prefill, read, fingerprint),
        )

    def add(self, db: sqlite3.Connection, block: Block, ids: bytes | None) -> None:
        """A file is whole: its row; `ids` of a segment."""
        db.execute(
            f"INSERT INTO block({_COLUMNS}, priority) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (block.key, block.fingerprint, block.parent, block.kind, block.token_begin, block.token_end,
             block.file_bytes, block.worth, block.worth + self.counter("turn") / AGE_TURNS),
        )  # fmt: skip
        if ids is not None:
            db.execute("INSERT OR REPLACE INTO segment_ids VALUES (?, ?, ?)", (block.parent, ids, block.key))

    def use(self, db: sqlite3.Connection, keys: Sequence[bytes], chat_id: str | None) -> None:
        """A turn used these blocks: they become young, and the chat is noted where there is one."""
        turn = self.counter("turn") + 1
        self.set_counter(db, "turn", turn)
        db.executemany("UPDATE block SET priority = worth + ? WHERE key = ?", [(turn / AGE_TURNS, k) for k in keys])
        if chat_id is not None:
            self.note_chat(db, keys, chat_id)

    def note_chat(self, db: sqlite3.Connection, keys: Sequence[bytes], chat_id: str) -> None:
        """A chat used these blocks, as far as they are there; they go with it unless another chat used them too."""
        sql = "INSERT OR IGNORE INTO chat SELECT ?, key FROM block WHERE key = ?"
        db.executemany(sql, [(chat_id, key) for key in keys])

    def remove(self, db: sqlite3.Connection, blocks: Iterable[Block]) -> None:
        db.executemany("DELETE FROM block WHERE key = ?", [(block.key,) for block in blocks])

    def forget_model(self, db: sqlite3.Connection, fingerprint: bytes) -> None:
        db.execute("DELETE FROM block WHERE fingerprint = ?", (fingerprint,))
        db.execute("DELETE FROM model WHERE fingerprint = ?", (fingerprint,))

    def owners_of_chat(self, chat_id: str) -> set[bytes]:
        """Fingerprints of the models that have blocks of a chat."""
        rows = self.connection().execute(
            "SELECT DISTINCT b.fingerprint FROM chat c JOIN block b ON b.key = c.key WHERE c.chat_id = ?", (chat_id,)
        )
        return {_expect(row[0], bytes) for row in rows}

    def chats(self) -> list[tuple[str, bytes, int, int, int]]:
        """(chat, fingerprint, blocks, bytes, longest chain in tokens) of every chat and model."""
        rows = self.connection().execute(
            "SELECT c.chat_id, b.fingerprint, count(*), sum(b.file_bytes), max(b.token_end) "
            "FROM chat c JOIN block b ON b.key = c.key GROUP BY c.chat_id, b.fingerprint ORDER BY 4 DESC"
        )
        return [(_expect(row[0], str), _expect(row[1], bytes), *row[2:]) for row in rows]

    def _exists(self, condition: str, value: bytes) -> bool:
        row = self.connection().execute(f"SELECT EXISTS (SELECT 1 FROM block WHERE {condition})", (value,)).fetchone()
        return bool(row[0])

    def _select(self, condition: str, values: Sequence[object]) -> list[Block]:
        rows = self.connection().execute(f"SELECT {_COLUMNS} FROM block {condition}", tuple(values))
        return [_block(row) for row in rows]


def _block(row: tuple[object, ...]) -> Block:
    """A row, checked: a flipped bit in the file can make anything of a value."""
    block = Block._make(row)
    for key in (block.key, block.fingerprint, block.parent):
        if type(key) is not bytes or len(key) != 32:
            raise sqlite3.DatabaseError("a row of the index holds impossible keys")
    for number in (block.kind, block.token_begin, block.token_end, block.file_bytes):
        if type(number) is not int or number < 0:
            raise sqlite3.DatabaseError("a row of the index holds impossible numbers")
    return block


def _model(row: tuple[object, ...]) -> ModelRow:
    rates = [value if isinstance(value, float) and value > 0 else None for value in row[6:8]]
    return ModelRow(
        _expect(row[0], bytes), _expect(row[1], str), _expect(row[2], str), bool(row[3]), _expect(row[4], int),
        _expect(row[5], int), *rates,
    )  # fmt: skip


def _expect(value: object, kind: type[_Value]) -> _Value:
    if not isinstance(value, kind):
        raise sqlite3.DatabaseError("a row of the index holds a value of the wrong type")
    return value


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))
