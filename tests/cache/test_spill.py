"""The tier's index and policy with made-up payloads: chains, caps, forgetting, damage, full disks, dead processes."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localspec.cache import spill
from localspec.cache.spill import Found, ModelIdentity, SpillLimits, SpillStore
from localspec.cache.spill_admin import SpillAdmin
from localspec.cache.spill_index import AGE_TURNS, SEGMENT, STATE, Block, SpillIndex
from localspec.cache.spill_keys import fingerprint, id_bytes, root_key, segment_places, state_place
from localspec.cache.spill_write import TurnWriter
from localspec.core.records import SEGMENT_TOKENS
from localspec.storage.blockfile import HEADER_BYTES
from localspec.storage.errors import DamagedFile, WrongOwner
from localspec.storage.files import TEMPORARY_PREFIX

TOKEN_BYTES, STATE_BYTES = 24, 500
WIDE = SpillLimits(cap_bytes=1 << 30, min_free_bytes=0)


def identity(name: str = "m", needs_state: bool = False, folder: str = "") -> ModelIdentity:
    return ModelIdentity(fingerprint([name]), name, folder, TOKEN_BYTES, STATE_BYTES if needs_state else 0, needs_state)


def ids_of(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(50_000) for _ in range(count)]


def payload(ids: list[int], begin: int, end: int) -> bytes:
    """Bytes that depend on every token before them, as keys and values do."""
    return random.Random(str(ids[:end])).randbytes(TOKEN_BYTES * (end - begin))


def write(
    store: SpillStore, ids: list[int], states: tuple[int, ...] = (), salt: str = "", chat: str | None = None
) -> TurnWriter:
    writer = TurnWriter(store, ids, salt, chat)
    for place in writer.missing:
        if not writer.add_segment(place, [payload(ids, place.begin, place.end)]):
            break
    for position in states:
        if writer.wants_state(position):
            writer.add_state(position, [random.Random(str(ids[:position])).randbytes(STATE_BYTES)])
    writer.finish()
    return writer


def check_found(store: SpillStore, found: Found, ids: list[int]) -> None:
    """Read every block as a restore does and compare it with what those tokens mean."""
    end = 0
    for block in found.segments:
        assert block.token_begin == end
        end = block.token_end
        data = store.path(block).read_bytes()
        body = bytes(store.check(block, memoryview(data)))
        # A tail that goes on otherwise shares only its first tokens, whose bytes depend on nothing later.
        if block.token_end <= found.num_tokens and block.token_end <= len(ids):
            assert body == payload(ids, block.token_begin, block.token_end)
    assert end >= found.num_tokens
    if found.state is not None:
        data = store.path(found.state).read_bytes()
        assert bytes(store.check(found.state, memoryview(data))) == random.Random(
            str(ids[: found.num_tokens])
        ).randbytes(STATE_BYTES)


@pytest.fixture
def store(tmp_path: Path) -> SpillStore:
    return SpillStore(tmp_path / "kv", identity(), WIDE)


@pytest.mark.parametrize("count", [1, 63, 255, 256, 257, 511, 512, 700])
def test_what_was_written_is_found_for_every_cut(store: SpillStore, count: int) -> None:
    ids = ids_of(1, count)
    write(store, ids)
    for cut in {1, count // 2, count - 1, count} - {0}:
        found = store.lookup([*ids[:cut], 99_999, 7])
        assert found.num_tokens == cut
        check_found(store, found, ids)
    assert store.lookup(ids_of(2, count)).num_tokens == 0
    assert store.lookup(ids, salt="other").num_tokens == 0
    assert store.lookup([]).num_tokens == 0


def test_a_tail_is_replaced_as_it_grows(store: SpillStore) -> None:
    ids = ids_of(1, 700)
    for count in (10, 40, 300, 301, 512, 600):
        write(store, ids[:count])
        assert store.lookup(ids).num_tokens == count
    lengths = sorted(
        block.token_end - block.token_begin for block in store.index.all_blocks(store.identity.fingerprint)
    )
    assert lengths == [88, 256, 256]
    assert len(list(store.files.blocks(store.identity.fingerprint))) == 3
    assert not write(store, ids[:550]).missing, "a longer tail covers it"
    branch = [*ids[:550], 1, 2, 3]
    write(store, branch)
    assert store.lookup(branch).num_tokens == 553
    assert store.lookup(ids).num_tokens == 600


def test_states_decide_how_much_is_usable(tmp_path: Path) -> None:
    store = SpillStore(tmp_path / "kv", identity(needs_state=True), WIDE)
    ids = ids_of(3, 900)
    write(store, ids[:400], (300, 400))
    write(store, ids, (256, 600, 900))
    for length, usable in ((900, 900), (899, 600), (599, 256), (255, 0), (901, 900)):
        found = store.lookup([*ids, 5][:length])
        assert found.num_tokens == usable
        check_found(store, found, ids)
    assert store.lookup([*ids[:610], 1, 2, 3]).num_tokens == 600


def test_of_a_chain_the_first_and_the_newest_states_stay(tmp_path: Path) -> None:
    store = SpillStore(tmp_path / "kv", identity(needs_state=True), WIDE)
    ids = ids_of(3, 1300)
    for end in range(100, 1301, 100):
        write(store, ids[:end], (end,))
    states = [b for b in store.index.all_blocks(store.identity.fingerprint) if b.kind == STATE]
    assert sorted(state.token_end for state in states) == [100, 1200, 1300]


def test_tails_go_before_heads_and_old_before_young(tmp_path: Path) -> None:
    segment_bytes = HEADER_BYTES + TOKEN_BYTES * SEGMENT_TOKENS
    store = SpillStore(tmp_path / "kv", identity(), SpillLimits(cap_bytes=6 * segment_bytes, min_free_bytes=0))
    old, young, new = ids_of(1, 768), ids_of(2, 768), ids_of(3, 512)
    write(store, old)
    write(store, young)
    assert store.index.total_bytes() == 6 * segment_bytes
    assert store.stored_bytes() == 6 * segment_bytes
    write(store, new)
    assert [store.lookup(ids).num_tokens for ids in (old, young, new)] == [256, 768, 512]
    store.use(store.lookup(old), None)
    write(store, ids_of(4, 256))
    assert [store.lookup(ids).num_tokens for ids in (old, young, new)] == [256, 512, 512]
    assert len(list(store.files.blocks(store.identity.fingerprint))) == 6


def test_a_chain_longer_than_the_cap_ends_early(tmp_path: Path) -> None:
    segment_bytes = HEADER_BYTES + TOKEN_BYTES * SEGMENT_TOKENS
    store = SpillStore(tmp_path / "kv", identity(), SpillLimits(cap_bytes=20 * segment_bytes, min_free_bytes=0))
    ids = ids_of(1, 30 * 256)
    write(store, ids)
    assert store.index.total_bytes() <= 20 * segment_bytes
    assert store.off_reason
    found = store.lookup(ids)
    assert found.num_tokens >= 16 * 256
    check_found(store, found, ids)


def test_a_state_and_what_only_it_makes_useful_go_together(tmp_path: Path) -> None:
    store = SpillStore(tmp_path / "kv", identity(needs_state=True), WIDE)
    ids, branch = ids_of(1, 1000), [*ids_of(1, 600), *ids_of(9, 300)]
    write(store, ids, (300, 1000))
    write(store, branch, (900,))
    index = store.index

    def ends(kind: int) -> list[int]:
        return sorted(b.token_end for b in index.all_blocks(store.identity.fingerprint) if b.kind == kind)

    assert ends(SEGMENT) == [256, 512, 768, 768, 900, 1000]
    store.drop(next(b for b in index.all_blocks(store.identity.fingerprint) if b.token_end == 1000 and b.kind == STATE))
    assert ends(SEGMENT) == [256, 512, 768, 900]
    store.drop(next(b for b in index.all_blocks(store.identity.fingerprint) if b.token_end == 900 and b.kind == STATE))
    assert (ends(SEGMENT), ends(STATE)) == ([256, 512], [300])
    store.drop(next(b for b in index.all_blocks(store.identity.fingerprint) if b.token_end == 512))
    assert (ends(SEGMENT), ends(STATE)) == ([], []), "a state without the tokens before it, and what it made useful"
    assert not list(store.files.blocks(store.identity.fingerprint))


def test_caps_hold_at_start(tmp_path: Path) -> None:
    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    for seed in range(10):
        write(store, ids_of(seed, 512))
    store.close()
    small = SpillStore(tmp_path / "kv", identity(), SpillLimits(cap_bytes=30_000, min_free_bytes=0))
    assert small.index.total_bytes() <= 30_000
    assert sum(size for _, size in small.files.blocks(small.identity.fingerprint)) <= 30_000
    full = SpillStore(tmp_path / "kv", identity(), SpillLimits(cap_bytes=1 << 30, min_free_bytes=1 << 60))
    assert full.index.total_bytes() == 0
    write(full, ids_of(1, 300))
    assert full.off_reason and full.lookup(ids_of(1, 300)).num_tokens == 0


def test_the_daily_budget_and_a_clock_that_goes_back(tmp_path: Path) -> None:
    day = [100]
    limits = SpillLimits(cap_bytes=1 << 30, min_free_bytes=0, daily_write_bytes=25_000)
    store = SpillStore(tmp_path / "kv", identity(), limits, today=lambda: day[0])
    write(store, ids_of(1, 512))
    write(store, ids_of(2, 512))
    assert store.lookup(ids_of(2, 512)).num_tokens == 0 and "today" in store.off_reason
    for other in (101, 3):
        day[0] = other
        write(store, ids_of(other, 512))
        assert store.lookup(ids_of(other, 512)).num_tokens == 512
        assert not store.off_reason
    assert store.lookup(ids_of(1, 512)).num_tokens == 512


def test_forgetting_a_chat_deletes_what_only_it_used(store: SpillStore) -> None:
    shared, one, two = ids_of(1, 512), ids_of(2, 300), ids_of(3, 300)
    write(store, [*shared, *one], chat="one")
    write(store, [*shared, *two], chat="two")
    assert store.forget_chat("one") == 2
    assert store.lookup([*shared, *one]).num_tokens == 512
    assert store.lookup([*shared, *two]).num_tokens == 812
    assert store.forget_chat("two") == 4 and store.forget_chat("two") == 0
    assert not list(store.files.blocks(store.identity.fingerprint))
    assert store.index.connection().execute("SELECT count(*) FROM segment_ids").fetchone() == (0,)


def test_a_use_that_comes_after_the_forgetting_leaves_no_trace(store: SpillStore) -> None:
    ids = ids_of(1, 300)
    write(store, ids, chat="a")
    found = store.lookup(ids)
    store.forget_chat("a")
    store.use(found, "a")
    assert store.index.connection().execute("SELECT count(*) FROM chat").fetchone() == (0,)


def test_modes(store: SpillStore) -> None:
    write(store, ids_of(1, 300))
    for path in store.folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert store.folder.stat().st_mode & 0o777 == 0o700


def test_foreign_files_and_litter_are_swept(tmp_path: Path) -> None:
    gone, other = tmp_path / "gone", tmp_path / "other"
    gone.mkdir()
    other.mkdir()
    for name, folder in (("gone", gone), ("other", other)):
        each = SpillStore(tmp_path / "kv", identity(name, folder=str(folder)), WIDE)
        write(each, ids_of(1, 300))
        each.close()
    gone.rmdir()
    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    write(store, ids_of(1, 300))
    foreign = tmp_path / "kv" / ("ab" * 32) / "00"
    foreign.mkdir(parents=True)
    (foreign / f"{'00' * 32}.blk").write_bytes(b"x" * 100)
    block = next(store.index.all_blocks(store.identity.fingerprint))
    shard = store.path(block).parent
    (shard / f"{TEMPORARY_PREFIX}dead").write_bytes(b"y")
    fresh = shard / f"{shard.name}{'11' * 31}.blk"
    stale = [shard / f"{shard.name}{digits * 31}.blk" for digits in ("22", "33")]
    for path in (fresh, *stale):
        path.write_bytes(b"z" * 50)
    now_s = time.time()
    os.utime(stale[0], (now_s - 7200, now_s - 7200))
    os.utime(stale[1], (now_s + 7200, now_s + 7200))
    assert store.sweep() > 0
    assert not foreign.exists() and not list((tmp_path / "kv").rglob(f"{TEMPORARY_PREFIX}*"))
    assert fresh.exists(), "its writer may be about to add the row"
    assert not any(path.exists() for path in stale)
    names = sorted(row.model_id for row in store.index.models())
    assert names == ["m", "other"]
    assert store.lookup(ids_of(1, 300)).num_tokens == 300


@pytest.mark.parametrize("needs_state", [False, True])
def test_a_disk_that_fills_at_any_write(tmp_path: Path, needs_state: bool) -> None:
    ids = ids_of(1, 900)
    for last in range(0, 14):
        count = [0]

        def failing(fd: int, data: memoryview, last: int = last, count: list[int] = count) -> int:
            count[0] += 1
            if count[0] > last:
                # As a real disk: some of the bytes, then no more.
                os.write(fd, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return os.write(fd, data)

        store = SpillStore(tmp_path / f"kv{last}", identity(needs_state=needs_state), WIDE, write_function=failing)
        write(store, ids, (300, 900) if needs_state else ())
        assert ("No space" in store.off_reason) == (last < (12 if needs_state else 8))
        assert not list(store.folder.rglob(f"{TEMPORARY_PREFIX}*"))
        found = store.lookup(ids)
        check_found(store, found, ids)
        on_disk = {key for key, _ in store.files.blocks(store.identity.fingerprint)}
        assert on_disk == {block.key for block in store.index.all_blocks(store.identity.fingerprint)}
        if store.off_reason:
            assert not store.may_write
            store._off_until_s = 0.0
            store.files._write_function = os.write
            write(store, ids, (900,) if needs_state else ())
            assert store.may_write and store.lookup(ids).num_tokens == 900
        store.close()


def test_every_flipped_bit_is_seen(store: SpillStore) -> None:
    ids = ids_of(1, 300)
    write(store, ids)
    generator = random.Random(3)
    for block in list(store.index.all_blocks(store.identity.fingerprint)):
        data = bytearray(store.path(block).read_bytes())
        for _ in range(60):
            place, bit = generator.randrange(len(data)), 1 << generator.randrange(8)
            data[place] ^= bit
            with pytest.raises((DamagedFile, WrongOwner)):
                store.check(block, memoryview(data))
            data[place] ^= bit
        for size in (0, 10, HEADER_BYTES, len(data) - 1):
            with pytest.raises((DamagedFile, WrongOwner)):
                store.check(block, memoryview(data[:size]))
        store.check(block, memoryview(data))


def test_a_block_moved_to_another_place_is_refused(store: SpillStore) -> None:
    one, two = ids_of(1, 256), ids_of(2, 256)
    write(store, one)
    write(store, two)
    left, right = store.lookup(one).segments[0], store.lookup(two).segments[0]
    with pytest.raises(WrongOwner):
        store.check(left, memoryview(store.path(right).read_bytes()))


def test_an_index_that_lies_serves_nothing_wrong(store: SpillStore) -> None:
    """SQLite has no checksums: whatever a flipped bit makes of a row, the keys must be those of the tokens."""
    ids = ids_of(1, 300)
    write(store, ids)
    db = store.index.connection()
    other = id_bytes(ids_of(2, 44))
    db.execute("UPDATE segment_ids SET ids = ? WHERE length(ids) = 176", (other,))
    lie = [*ids[:256], *ids_of(2, 44)]
    assert store.lookup(lie).num_tokens == 256
    db.execute("UPDATE block SET token_end = 512 WHERE token_end = 256")
    found = store.lookup(ids)
    assert found.num_tokens == 256
    check_found(store, found, ids)


def test_random_bytes_in_the_index_never_raise(tmp_path: Path) -> None:
    """But where a chat is to be forgotten: who asks for that must know that some of it is left."""
    generator = random.Random(11)
    ids = ids_of(1, 700)
    for round_ in range(25):
        folder = tmp_path / f"kv{round_}"
        store = SpillStore(folder, identity(), WIDE)
        write(store, ids, chat="a")
        store.index.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store.close()
        path = folder / "index.sqlite3"
        data = bytearray(path.read_bytes())
        if round_ % 2:
            del data[generator.randrange(len(data)) :]
        else:
            for _ in range(40):
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        again = SpillStore(folder, identity(), WIDE)
        check_found(again, again.lookup(ids), ids)
        write(again, ids, chat="a")
        with contextlib.suppress(OSError):
            again.forget_chat("b")
        again.sweep()
        found = again.lookup(ids)
        check_found(again, found, ids)
        again.close()


CHILD = """
import random, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.cache.test_spill import WIDE, identity, ids_of, write
from localspec.cache.spill import SpillStore
store = SpillStore(Path({folder!r}), identity(needs_state=True), WIDE)
print("ready", flush=True)
for seed in range({first}, {first} + 10_000):
    ids = ids_of(seed % 7, 300 + 97 * (seed % 13))
    write(store, ids, (len(ids) // 2, len(ids)), chat=str(seed % 5))
    if seed % 11 == 0:
        store.forget_chat(str(seed % 5))
"""


def start_writer(folder: Path, first: int) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    code = CHILD.format(root=root, folder=str(folder), first=first)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def check_everything(folder: Path) -> int:
    """Whatever a lookup promises is there and right; returns how many tokens were promised."""
    store = SpillStore(folder, identity(needs_state=True), WIDE)
    promised = 0
    for seed in range(7):
        ids = ids_of(seed, 300 + 97 * 12)
        found = store.lookup(ids)
        check_found(store, found, ids)
        promised += found.num_tokens
    rows = {block.key for block in store.index.all_blocks(store.identity.fingerprint)}
    assert rows <= {key for key, _ in store.files.blocks(store.identity.fingerprint)}
    store.sweep()
    store.close()
    return promised


def test_killed_at_random_points(tmp_path: Path) -> None:
    """The short form of scripts/kill_spill.py."""
    generator = random.Random(1)
    promised = 0
    for round_ in range(6):
        child = start_writer(tmp_path / "kv", round_ * 3)
        time.sleep(generator.random() * 0.15)
        child.send_signal(signal.SIGKILL)
        child.wait()
        promised += check_everything(tmp_path / "kv")
    assert promised


def test_two_processes_write_one_store(tmp_path: Path) -> None:
    children = [start_writer(tmp_path / "kv", first) for first in (0, 5)]
    end = time.monotonic() + 2.0
    store = SpillStore(tmp_path / "kv", identity(needs_state=True), WIDE)
    num_found = 0
    while time.monotonic() < end:
        ids = ids_of(num_found % 7, 300 + 97 * 12)
        found = store.lookup(ids)
        # Forgotten between the look and the read: an engine computes it again.
        with contextlib.suppress(FileNotFoundError):
            check_found(store, found, ids)
        num_found += 1
    for child in children:
        assert child.poll() is None, "a writer died"
        child.terminate()
        child.wait()
    store.close()
    check_everything(tmp_path / "kv")


def fill(index: SpillIndex, owner: ModelIdentity, num_segments: int, chain_segments: int = 128) -> list[int]:
    """Rows for that many segments in chains of 32k tokens; returns the ids of the last chain."""
    ids: list[int] = []
    with index.transaction() as db:
        for chain in range(num_segments // chain_segments):
            ids = [(chain * 7919 + i * 31) % 50_000 for i in range(chain_segments * SEGMENT_TOKENS)]
            data = id_bytes(ids)
            rows = []
            for place in segment_places(root_key(owner.fingerprint, ""), data):
                row = Block(place.key, owner.fingerprint, place.parent, SEGMENT, place.begin, place.end, 8 << 20, -30.0)
                rows.append((row, data[4 * place.begin : 4 * place.end]))
            db.executemany(
                "INSERT INTO block VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (b.key, b.fingerprint, b.parent, b.kind, b.token_begin, b.token_end, b.file_bytes, b.worth, b.worth)
                    for b, _ in rows
                ],
            )
            db.executemany("INSERT INTO segment_ids VALUES (?, ?, ?)", [(b.parent, part, b.key) for b, part in rows])
    return ids


def test_many_segments(tmp_path: Path) -> None:
    """The short form of scripts/measure_spill.py, which does it with a million."""
    owner = identity()
    limits = SpillLimits(cap_bytes=1 << 60, min_free_bytes=0)
    store = SpillStore(tmp_path / "kv", owner, limits)
    ids = fill(store.index, owner, 12_800)
    store.close()
    started_s = time.perf_counter()
    store = SpillStore(tmp_path / "kv", owner, limits)
    assert store.index.total_bytes() == 12_800 * (8 << 20)
    assert time.perf_counter() - started_s < 2.0
    assert store.lookup(ids).num_tokens == len(ids)
    times_s = []
    for cut in range(1000, len(ids), 997):
        started_s = time.perf_counter()
        found = store.lookup([*ids[:cut], 60_000])
        times_s.append(time.perf_counter() - started_s)
        assert found.num_tokens == cut
    assert sorted(times_s)[len(times_s) // 2] < 0.005, "a tenth of this on a quiet machine"


def test_admin(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SpillAdmin(tmp_path / "kv")
    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    write(store, ids_of(1, 600), chat="one")
    write(store, ids_of(2, 300), chat="two")
    with SpillAdmin(tmp_path / "kv") as admin:
        assert [(row.chat_id, row.num_blocks, row.tokens) for row in admin.chats()] == [
            ("one", 3, 600),
            ("two", 2, 300),
        ]
        assert admin.models()[0].stored_bytes == store.index.total_bytes() > 0
        victim = store.lookup(ids_of(1, 600)).segments[1]
        data = bytearray(store.path(victim).read_bytes())
        data[-1] ^= 1
        store.path(victim).write_bytes(data)
        *_, (_, checked) = admin.verify()
        assert len(checked.damaged) == 1 and checked.num_blocks == 5
        assert store.lookup(ids_of(1, 600)).num_tokens == 256
        assert admin.remove_chat("two") == 2
        assert admin.wipe() > 0
    assert store.lookup(ids_of(1, 600)).num_tokens == 0
    assert not list(store.folder.rglob("*.blk"))
    assert id_bytes(ids_of(1, 600)[:20]) not in (store.folder / "index.sqlite3").read_bytes()
    write(store, ids_of(1, 600))
    assert store.lookup(ids_of(1, 600)).num_tokens == 600


def test_keys_differ_wherever_they_must() -> None:
    ids = id_bytes(ids_of(1, 600))
    one = segment_places(root_key(fingerprint(["a"]), ""), ids)
    assert [(place.begin, place.end) for place in one] == [(0, 256), (256, 512), (512, 600)]
    assert one[1].parent == one[0].key
    for other in (("b", ""), ("a", "salt")):
        two = segment_places(root_key(fingerprint([other[0]]), other[1]), ids)
        assert {place.key for place in one}.isdisjoint(place.key for place in two)
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert state_place(one, ids, 512).parent == one[0].key
    assert state_place(one, ids, 513).parent == one[1].key
    assert state_place(one, ids, 512).key != one[1].key
    assert AGE_TURNS > 1 and spill.LITTER_AGE_S > 60
