"""An index made again from the files: each says in its header what it is and what it follows.

Torch-free. Chats are not in the files, so blocks without a chat go when any chat is forgotten: they may be that chat's.
Payloads are checked when they are read, as ever.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress

from localspec.cache.spill_index import REBUILT, SEGMENT, STATE, Block, ModelRow, SpillIndex
from localspec.cache.spill_keys import segment_key
from localspec.storage.blockfile import HEADER_BYTES, BlockStore
from localspec.storage.errors import DamagedFile, WrongOwner

KINDS = {"segment": SEGMENT, "state": STATE}
ASSUMED_PREFILL_TOK_PER_S = 1000.0
GROUP_ROWS = 256


def worth_of(kind: int, token_begin: int, token_end: int, file_bytes: int, prefill_tok_per_s: float | None) -> float:
    """log2 of the seconds of recomputing that a byte of a block saves; a state saves all tokens before it."""
    saved_tokens = token_end if kind == STATE else token_end - token_begin
    return math.log2(max(saved_tokens, 1) / (prefill_tok_per_s or ASSUMED_PREFILL_TOK_PER_S) / file_bytes)


def rebuild(index: SpillIndex, files: BlockStore) -> int:
    """Add rows for all files that hang together; returns how many. Raises sqlite3.Error, OSError."""
    num_rows = 0
    for fingerprint in list(_fingerprints(files)):
        blocks = _whole_chains(_blocks(files, fingerprint))
        needs_state = any(block.kind == STATE for block, _ in blocks)
        if not blocks:
            continue
        with index.transaction() as db:
            # Named when the model is loaded again.
            index.register(db, ModelRow(fingerprint, "?", "", needs_state), rename=False)
            index.set_counter(db, REBUILT, 1)
        for start in range(0, len(blocks), GROUP_ROWS):
            with index.transaction() as db:
                for block, ids in blocks[start : start + GROUP_ROWS]:
                    index.add(db, block, ids)
        num_rows += len(blocks)
    return num_rows


def _fingerprints(files: BlockStore) -> Iterator[bytes]:
    with os.scandir(files.root) as found:
        for item in found:
            if item.is_dir(follow_symlinks=False) and len(item.name) == 64:
                with suppress(ValueError):
                    yield bytes.fromhex(item.name)


def _blocks(files: BlockStore, fingerprint: bytes) -> Iterator[tuple[Block, bytes | None]]:
    """Every file with a sound header, and the token ids of segments."""
    for key, size in files.blocks(fingerprint):
        try:
            header = files.read_header(fingerprint, key)
        except (DamagedFile, WrongOwner, OSError):
            continue
        kind = KINDS.get(header.layout)
        if kind is None or size != HEADER_BYTES + header.payload_bytes or header.token_end <= header.token_begin:
            continue
        if kind == SEGMENT and segment_key(header.parent_key, header.note) != key:
            continue
        worth = worth_of(kind, header.token_begin, header.token_end, size, None)
        block = Block(key, fingerprint, header.parent_key, kind, header.token_begin, header.token_end, size, worth)
        yield block, header.note if kind == SEGMENT else None


def _whole_chains(blocks: Iterable[tuple[Block, bytes | None]]) -> list[tuple[Block, bytes | None]]:
    """Without those whose chain has a hole, and states that no segment covers; in the order of their chains."""
    kept: list[tuple[Block, bytes | None]] = []
    ends: dict[bytes, int] = {}
    covered: dict[bytes, int] = defaultdict(int)
    for block, ids in sorted(blocks, key=lambda item: (item[0].token_begin, item[0].kind, item[0].token_end)):
        if block.token_begin and ends.get(block.parent) != block.token_begin:
            continue
        if block.kind == STATE and covered[block.parent] < block.token_end:
            continue
        kept.append((block, ids))
        if block.kind == SEGMENT:
            ends[block.key] = block.token_end
            covered[block.parent] = max(covered[block.parent], block.token_end)
    return kept
