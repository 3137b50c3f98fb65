"""Keys and values of texts that were seen before, so that a prompt which begins like one of them is not computed again.

A tree of blocks: each holds up to `BLOCK_TOKENS` tokens that follow its parent's, and a copy of their keys and values.
The least recently used leaf goes first when memory is short. A token-exact match counts: of a block that only begins
like the prompt, the part that does is used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from treadle_plugin_api.backend import Array

from treadle_server.model.kv_cache import BLOCK_TOKENS, KVCache

Ids = npt.NDArray[np.int64]


@dataclass(eq=False, slots=True)
class _Block:
    """Tokens that follow the parent's, `[n] int64`, and their entries, `[layers, 2, kv_heads, n, head_dim]`."""

    parent: _Block | None
    ids: Ids
    entries: Array
    children: dict[int, list[_Block]] = field(default_factory=dict)  # by first token

    def followers(self, ids: Ids) -> list[_Block]:
        """Return the children that begin with the first of ids `[n]`."""
        return self.children.get(int(ids[0]), []) if len(ids) else []

    def num_common(self, ids: Ids) -> int:
        """Return how many tokens of this block ids `[n]` begin with."""
        count = min(len(ids), len(self.ids))
        differing = np.flatnonzero(self.ids[:count] != ids[:count])
        return int(differing[0]) if len(differing) else count


class PrefixCache:
    """A tree of blocks for each key, within a number of bytes in all. Belongs to the engine thread.

    A key says whose numbers they are: two runs of the same tokens under one key have the same keys and values.

    Attributes:
        max_bytes: memory of all entries, in bytes; 0 keeps nothing.
        num_bytes: what they take now.
        num_hit_tokens: tokens that did not have to be computed, since the start.
        num_queried_tokens: tokens that were looked for.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hit_tokens = 0
        self.num_queried_tokens = 0
        self._roots: dict[Hashable, _Block] = {}
        # Oldest first. Whoever touches a block touches its ancestors after it, so the oldest is always a leaf.
        self._recency: OrderedDict[_Block, Hashable] = OrderedDict()

    def load(self, key: Hashable, ids: Ids, cache: KVCache) -> int:
        """Fill an empty cache with the entries of as many first tokens of ids `[n]` as are known; return how many."""
        self.num_queried_tokens += len(ids)
        found = list(self._match(key, ids))
        count = sum(num for _, num in found)
        if found:
            cache.reserve(count)
            for block, num in found:
                cache.extend(block.entries[..., :num, :])
            self._touch(found[-1][0], key)
        self.num_hit_tokens += count
        return count

    def store(self, key: Hashable, ids: Ids, cache: KVCache) -> None:
        """Keep the entries of ids `[n]`, the first tokens in the cache, where they are not known yet."""
        node, start = self._known(key, ids)
        self._touch(node, key)
        path = {node}
        while start < len(ids):
            stop = min(start + BLOCK_TOKENS, len(ids))
            if not self._make_room(cache.entry_bytes(stop - start), path):
                break
            node = self._add(node, ids[start:stop], cache.copy_out(start, stop), key)
            path.add(node)
            start = stop
        self._touch(node, key)

    def clear(self) -> None:
        """Drop everything: no later prompt is computed as these were."""
        self._roots.clear()
        self._recency.clear()
        self.num_bytes = 0

    def _match(self, key: Hashable, ids: Ids) -> Iterator[tuple[_Block, int]]:
        """Yield the blocks that ids begin with, and how many tokens of each; only the last can be used in part."""
        node = self._roots.get(key)
        while node is not None and (children := node.followers(ids)):
            best = max(children, key=lambda child: child.num_common(ids))
            count = best.num_common(ids)
            yield best, count
            ids = ids[count:]
            node = best if count == BLOCK_TOKENS else None

    def _known(self, key: Hashable, ids: Ids) -> tuple[_Block, int]:
        """Return the last block on the way of ids that holds nothing but them, and the number of tokens down to it."""
        node, start = self._roots.setdefault(key, _Block(None, ids[:0], np.zeros(0))), 0
        for block, count in self._match(key, ids):
            if count < len(block.ids) and start + count < len(ids):
                break  # they part within this block
            if count < BLOCK_TOKENS and start + count < len(ids):
                self._drop(block)  # it is only the beginning of what is to be kept
                break
            node, start = block, start + count
        return node, start

    def _add(self, parent: _Block, ids: Ids, entries: Array, key: Hashable) -> _Block:
        block = _Block(parent, ids.copy(), entries)
        parent.children.setdefault(int(ids[0]), []).append(block)
        self.num_bytes += entries.nbytes
        self._recency[block] = key
        return block

    def _make_room(self, num_bytes: int, path: Collection[_Block]) -> bool:
        """Drop the oldest blocks until there is room for more bytes; False when only those of the path are left."""
        while self.num_bytes + num_bytes > self.max_bytes:
            oldest = next(iter(self._recency), None)
            if oldest is None or oldest in path:
                return False
            self._drop(oldest)
        return True

    def _touch(self, block: _Block | None, key: Hashable) -> None:
        """Make a block and its ancestors the most recently used ones, the root's child last."""
        while block is not None and block.parent is not None:
            self._recency[block] = key
            self._recency.move_to_end(block)
            block = block.parent

    def _drop(self, block: _Block) -> None:
        """Take a block out of the tree."""
        del self._recency[block]
        self.num_bytes -= block.entries.nbytes
        parent = block.parent
        if parent is not None:
            siblings = parent.children[int(block.ids[0])]
            siblings.remove(block)
            if not siblings:
                del parent.children[int(block.ids[0])]
