"""Paged KV accounting: which block belongs to whom, which may be shared, which may be reused.

Integers only: no tensor, no sequence, no policy. A block is free, or held by one or more holders; a free block that
still holds a known prefix stays findable until it is reused, least recently freed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class BlockPool:
    """A pool of numbered blocks with reference counts and a prefix cache.

    Law: every block is either free (once, in one of the two free lists) or held (reference count > 0), and a key
    names at most one block.
    """

    __slots__ = ("_blank", "_cached", "_held", "_key", "_references", "blocks")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._references = [0] * blocks
        self._blank = list(range(blocks - 1, -1, -1))  # free, content worthless; taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, content findable; least recently freed first
        self._held: dict[Hashable, int] = {}  # key -> the block that holds this prefix, free or not
        self._key: dict[int, Hashable] = {}

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def used(self) -> int:
        return self.blocks - self.free

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """Blocks that hold the longest known prefix of `keys`. Takes nothing: see `share`."""
        found: list[int] = []
        for key in keys:
            block = self._held.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks count as free now: sharing them uses up so much of `free`."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for blocks that `find` returned."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of worthless content, each held once. `MemoryError` if there are not so many: ask first."""
        if count > self.free:
            raise MemoryError(f"{count} KV blocks wanted, {self.free} of {self.blocks} free")
        blank, references = self._blank, self._references
        if 0 < count <= len(blank):
            taken = blank[: -count - 1 : -1]
            del blank[-count:]
        else:
            taken = [self._take() for _ in range(count)]
        for block in taken:
            references[block] = 1
        return taken

    def _take(self) -> int:
        if self._blank:
            return self._blank.pop()
        block, _ = self._cached.popitem(last=False)
        del self._held[self._key.pop(block)]
        return block

    def publish(self, block: int, key: Hashable) -> None:
        """From now on `find` knows a held block's content. The first block with a key keeps it."""
        if not self._references[block]:
            raise RuntimeError(f"KV block {block} is free: its content is worthless")
        if key not in self._held and block not in self._key:
            self._held[key] = block
            self._key[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less. The tail of a prefix is worth least, so it is the first to be reused."""
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise RuntimeError(f"KV block {block} released more often than taken")
            self._references[block] = count
            if count == 0:
                if block in self._key:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def check(self) -> None:
        """The law, in full; for tests and idle moments. `AssertionError` names the first block that breaks it."""
        free = [*self._blank, *self._cached]
        assert len(free) == len(set(free)), "a block is free twice"
        for block, count in enumerate(self._references):
            assert count >= 0, f"block {block} has {count} holders"
        held = sum(count > 0 for count in self._references)
        assert held + len(free) == self.blocks, f"{held} held + {len(free)} free is not {self.blocks}"
        assert all(self._references[block] == 0 for block in free), "a free block has a holder"
        assert {block: key for key, block in self._held.items()} == self._key, "keys and blocks disagree"
        assert all(block in self._key for block in self._cached), "a block is kept for a prefix that nobody can find"
        assert not any(block in self._key for block in self._blank), "a block of worthless content can be found"
