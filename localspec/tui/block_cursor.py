"""The cursor that walks through the blocks of a chat. Pure: it knows messages as lines, not where they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localspec.tui.message_lines import Block, Look, MessageLines


@dataclass(frozen=True)
class Mark:
    """What is marked: a message by its number, or one block of it."""

    item: int
    block: int | None = None


def next_message(items: Sequence[MessageLines], mark: Mark | None, step: int) -> Mark:
    """The message above (-1) or below (1); the last one if nothing is marked. `items` is not empty."""
    start = len(items) if mark is None else mark.item
    return Mark(max(0, min(len(items) - 1, start + step)))


def next_block(items: Sequence[MessageLines], look: Look, mark: Mark | None, step: int) -> Mark:
    """The block above (-1) or below (1), from one message to the next; the last one if nothing is marked."""

    def count(item: int) -> int:
        return len(items[item].blocks(look))

    if mark is None:
        item, block = len(items) - 1, count(len(items) - 1) - 1
    elif mark.block is None:
        # From a whole message down into it, or up into the one before.
        item, block = mark.item, 0 if step > 0 else -1
    else:
        item, block = mark.item, mark.block + step
    if block < 0 and item > 0 and mark is not None:
        item -= 1
        block = count(item) - 1
    elif block >= count(item) and item < len(items) - 1:
        item, block = item + 1, 0
    return Mark(item, max(0, min(block, count(item) - 1)) if count(item) else None)


def block_of(items: Sequence[MessageLines], look: Look, mark: Mark | None) -> Block | None:
    """The marked block; None if nothing or a whole message is marked. A growing answer may have changed its blocks."""
    if mark is None or mark.block is None:
        return None
    blocks = items[mark.item].blocks(look)
    return blocks[min(mark.block, len(blocks) - 1)] if blocks else None


def fold_of(items: Sequence[MessageLines], look: Look, mark: Mark) -> str:
    """What the fold key acts on: the marked block, or the first block of a marked message that folds."""
    block = block_of(items, look, mark)
    if block is not None:
        return block.fold
    return next((block.fold for block in items[mark.item].blocks(look) if block.fold), "")


def block_at(item: MessageLines, look: Look, line: int) -> tuple[int | None, bool]:
    """(number of the block on a line of a message, whether that line is the one with its triangle)."""
    for number, block in enumerate(item.blocks(look)):
        if block.start <= line < block.end:
            # The last line of a long text, the first line of everything else.
            at = block.end - 1 if block.part == "rest" else block.start
            return number, bool(block.fold) and line == at
    return None, False
