"""Prefix tree over cached pages: which tokens are already computed, and in which pages.

Torch-free. A node is one page's worth of tokens (the last of a branch may be shorter). Sequences share whole pages;
a page that is only partly wanted is copied by the caller. Models with recurrent state can resume only where a
snapshot was taken: a hit is the longest position that has keys, values and, if needed, a snapshot.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from localspec.cache.miss import Evidence
from localspec.cache.pages import PagePool
from localspec.core.records import PAGE_TOKENS

Snapshot = object
LONE_REFERENCES = 2
"""To a snapshot that only the tree holds: its node's and the one that asks."""
NO_CHAT = ""
"""Owner of what came without a chat id; nothing forgets it."""
REMEMBERED_PAGES = 1 << 16
"""Of which the tree knows that it once had them, so that it can say that they were evicted."""


@dataclass(frozen=True)
class Match:
    """What a prompt finds. `pages` hold the first `num_tokens` tokens in whole pages; `partial_page` holds
    `partial_tokens` more and must be copied before it is written. `snapshot` is the state at the end of the hit."""

    num_tokens: int
    pages: tuple[int, ...]
    partial_page: int | None
    partial_tokens: int
    snapshot: Snapshot | None

    @property
    def total_tokens(self) -> int:
        return self.num_tokens + self.partial_tokens


@dataclass
class _Node:
    parent: _Node | None
    token_ids: tuple[int, ...]
    page: int
    last_used: int = 0
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """By number of tokens of this page that the state has seen."""
    chat_ids: set[str] = field(default_factory=set)
    chain: int = 0
    """Hash of all tokens up to the end of this page."""


class PrefixTree:
    """Cached prefixes of one model and salt-free key space. Each node holds one reference to its page.

    `drop_snapshot` is called for each snapshot that leaves the tree.
    """

    def __init__(self, pool: PagePool, max_snapshots: int, drop_snapshot: Callable[[Snapshot], None]) -> None:
        self._pool = pool
        self._max_snapshots = max_snapshots
        self._drop_snapshot = drop_snapshot
        self._roots: dict[str, _Node] = {}
        self._clock = 0
        self._seen: dict[int, None] = {}

    @property
    def num_pages(self) -> int:
        return sum(1 for _ in self._nodes())

    @property
    def num_snapshots(self) -> int:
        return sum(len(node.snapshots) for node in self._nodes())

    def match(self, token_ids: tuple[int, ...], needs_state: bool, salt: str = "") -> Match:
        """The longest usable prefix of `token_ids`. Takes no references: the caller retains what it uses at once."""
        path, partial, partial_tokens = self._walk(token_ids, salt)
        self._clock += 1
        for node in path:
            node.last_used = self._clock
        if partial is not None:
            partial.last_used = self._clock
        if not needs_state:
            page = partial.page if partial is not None else None
            return Match(len(path) * PAGE_TOKENS, tuple(n.page for n in path), page, partial_tokens, None)
        return self._match_with_state(path, partial, partial_tokens)

    def evidence(self, token_ids: tuple[int, ...], usable_tokens: int, chat_id: str | None, salt: str = "") -> Evidence:
        """What is known of a prompt of which `usable_tokens` were found, for saying why not more."""
        path, partial, partial_tokens = self._walk(token_ids, salt)
        matched = len(path) * PAGE_TOKENS + partial_tokens
        node = path[-1] if path else self._roots.get(salt)
        following = [partial] if partial is not None else list(node.children.values()) if node is not None else []
        next_ids = following[0].token_ids[partial_tokens:] if following else ()
        if partial is not None and not next_ids:
            following = list(partial.children.values())
        owners = {chat for each in following for chat in each.chat_ids}
        last_border = (matched - 1) // PAGE_TOKENS if matched else 0
        lost = any(
            self._state_mark(n.chain) in self._seen for n in path[usable_tokens // PAGE_TOKENS : last_border + 1]
        )
        return Evidence(
            prompt_tokens=len(token_ids),
            matched_tokens=matched,
            usable_tokens=usable_tokens,
            known_tokens=self._known_tokens(token_ids, path, salt),
            next_ids=next_ids,
            same_chat=None if chat_id is None else chat_id in owners,
            state_lost=lost,
        )

    def insert(self, token_ids: tuple[int, ...], pages: list[int], chat_id: str | None = None, salt: str = "") -> None:
        """Remember that `pages` hold `token_ids`. Pages already known under the same tokens are not taken again."""
        self._clock += 1
        node = self._roots.setdefault(salt, _Node(None, (), 0, chain=hash(salt)))
        for index in range(0, len(token_ids), PAGE_TOKENS):
            chunk = token_ids[index : index + PAGE_TOKENS]
            child = node.children.get(chunk)
            if child is None:
                page = pages[index // PAGE_TOKENS]
                self._pool.retain((page,))
                child = _Node(node, chunk, page, chain=hash((node.chain, chunk)))
                node.children[chunk] = child
                if len(chunk) == PAGE_TOKENS:
                    self._remember(child.chain)
                self._absorb_shorter_sibling(node, child)
            child.last_used = self._clock
            child.chat_ids.add(chat_id or NO_CHAT)
            node = child

    def add_snapshot(self, token_ids: tuple[int, ...], snapshot: Snapshot, salt: str = "") -> bool:
        """Attach the state after exactly `token_ids`, which were inserted before. False if they are not there."""
        path, partial, partial_tokens = self._walk(token_ids, salt)
        if len(path) * PAGE_TOKENS + partial_tokens != len(token_ids) or not token_ids:
            return False
        node, offset = (partial, partial_tokens) if partial is not None else (path[-1], len(path[-1].token_ids))
        old = node.snapshots.get(offset)
        if old is not None:
            self._drop_snapshot(old)
        node.snapshots[offset] = snapshot
        self._remember(self._state_mark(node.chain))
        self._trim_snapshots(keep=node)
        return True

    def give_up_snapshot(self) -> bool:
        """Drop the snapshot that was not used for longest of those that nobody else holds; False if there is none.

        What is being copied or read somewhere would stay where it is, and be lost here for nothing.
        """
        for node in sorted((node for node in self._nodes() if node.snapshots), key=lambda node: node.last_used):
            for offset in sorted(node.snapshots):
                if sys.getrefcount(node.snapshots[offset]) <= LONE_REFERENCES:
                    self._drop_snapshot(node.snapshots.pop(offset))
                    return True
        return False

    def evict(self, count: int) -> int:
        """Free up to `count` pages that only the tree holds, least recently used leaves first. Returns how many."""
        if count <= 0:
            return 0
        # One walk, then only what becomes a leaf: a walk for each page would hold a step up for a second.
        leaves = [(n.last_used, order, n) for order, n in enumerate(self._nodes()) if self._is_free_leaf(n)]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < count:
            _, order, node = heapq.heappop(leaves)
            parent = node.parent
            self._remove(node)
            freed += 1
            if parent is not None and self._is_free_leaf(parent):
                heapq.heappush(leaves, (parent.last_used, order, parent))
        return freed

    def num_evictable(self) -> int:
        """Pages that `evict` could free."""
        return sum(1 for node in self._nodes() if self._pool.references(node.page) == 1)

    def forget_chat(self, chat_id: str) -> None:
        """Drop everything that only this chat put here."""
        # Parents come before their children, so the other way round a branch goes from its end.
        for node in reversed(list(self._nodes())):
            if chat_id not in node.chat_ids or not chat_id:
                continue
            node.chat_ids.discard(chat_id)
            if not node.children and not node.chat_ids:
                self._remove(node)

    def clear(self) -> None:
        """Drop everything."""
        for node in list(self._nodes()):
            for snapshot in node.snapshots.values():
                self._drop_snapshot(snapshot)
            self._pool.release((node.page,))
        self._roots.clear()
        self._seen.clear()

    def _is_free_leaf(self, node: _Node) -> bool:
        return node.parent is not None and not node.children and self._pool.references(node.page) == 1

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _walk(self, token_ids: tuple[int, ...], salt: str) -> tuple[list[_Node], _Node | None, int]:
        """Whole pages of the prefix, then the child that shares the longest part of what follows."""
        node = self._roots.get(salt)
        path: list[_Node] = []
        index = 0
        while node is not None:
            child = node.children.get(token_ids[index : index + PAGE_TOKENS])
            if child is None or len(child.token_ids) < PAGE_TOKENS:
                break
            path.append(child)
            node = child
            index += PAGE_TOKENS
        best: _Node | None = None
        best_tokens = 0
        rest = token_ids[index : index + PAGE_TOKENS]
        for child in node.children.values() if node is not None else ():
            common = common_length(child.token_ids, rest)
            if common > best_tokens:
                best, best_tokens = child, common
        return path, best, best_tokens

    def _match_with_state(self, path: list[_Node], partial: _Node | None, partial_tokens: int) -> Match:
        if partial is not None:
            for offset in sorted(partial.snapshots, reverse=True):
                if offset <= partial_tokens:
                    pages = tuple(node.page for node in path)
                    return Match(len(pages) * PAGE_TOKENS, pages, partial.page, offset, partial.snapshots[offset])
        for depth in range(len(path), 0, -1):
            node = path[depth - 1]
            pages = tuple(n.page for n in path[: depth - 1])
            for offset in sorted(node.snapshots, reverse=True):
                whole = offset == PAGE_TOKENS
                return Match(
                    (depth - 1) * PAGE_TOKENS + (offset if whole else 0),
                    (*pages, node.page) if whole else pages,
                    None if whole else node.page,
                    0 if whole else offset,
                    node.snapshots[offset],
                )
        return Match(0, (), None, 0, None)

    def _known_tokens(self, token_ids: tuple[int, ...], path: list[_Node], salt: str) -> int:
        """Tokens of whole pages that are in the tree or were."""
        chain, end = (path[-1].chain if path else hash(salt)), len(path) * PAGE_TOKENS
        while end + PAGE_TOKENS <= len(token_ids):
            chain = hash((chain, token_ids[end : end + PAGE_TOKENS]))
            if chain not in self._seen:
                break
            end += PAGE_TOKENS
        return end

    def _remember(self, mark: int) -> None:
        self._seen.pop(mark, None)
        self._seen[mark] = None
        if len(self._seen) > REMEMBERED_PAGES:
            del self._seen[next(iter(self._seen))]

    @staticmethod
    def _state_mark(chain: int) -> int:
        return hash((chain, "state"))

    def _absorb_shorter_sibling(self, parent: _Node, child: _Node) -> None:
        """A tail that grew replaces its shorter self, snapshots included, unless the tail has other users."""
        for other in list(parent.children.values()):
            shorter = len(other.token_ids) < len(child.token_ids)
            if other is child or other.children or not shorter:
                continue
            if child.token_ids[: len(other.token_ids)] == other.token_ids:
                child.snapshots.update(other.snapshots)
                child.chat_ids |= other.chat_ids
                other.snapshots = {}
                self._remove(other)

    def _remove(self, node: _Node) -> None:
        for snapshot in node.snapshots.values():
            self._drop_snapshot(snapshot)
        assert node.parent is not None
        del node.parent.children[node.token_ids]
        self._pool.release((node.page,))

    def _trim_snapshots(self, keep: _Node) -> None:
        holders = [node for node in self._nodes() if node.snapshots]
        total = sum(len(node.snapshots) for node in holders)
        for node in sorted(holders, key=lambda n: n.last_used):
            for offset in sorted(node.snapshots):
                if total <= self._max_snapshots:
                    return
                if node is keep:
                    continue
                self._drop_snapshot(node.snapshots.pop(offset))
                total -= 1


def common_length(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Tokens that both begin with."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
