"""The block pool against a naive model of it: lists and counters, nothing clever."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from playground.core import Request
from playground.kv import BlockPool
from playground.rank import hash_tokens, prefix_keys

BLOCKS = 6
KEYS = st.sampled_from("abcdefgh")


class Pool(RuleBasedStateMachine):
    """Holders take and give back lists of blocks, as sequences do; the model knows who has what."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.holders: list[list[int]] = []
        self.blank = set(range(BLOCKS))
        self.cached: list[int] = []  # free and findable, least recently freed first
        self.where: dict[str, int] = {}

    @property
    def references(self) -> Counter:
        return Counter(block for holder in self.holders for block in holder)

    def known(self, keys) -> list[int]:
        found = []
        for key in keys:
            if key not in self.where:
                break
            found.append(self.where[key])
        return found

    @rule(count=st.integers(0, BLOCKS))
    def allocate(self, count):
        if count > len(self.blank) + len(self.cached):
            with pytest.raises(MemoryError, match=f"{count} KV blocks wanted"):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        blanks = min(count, len(self.blank))
        assert set(taken[:blanks]) <= self.blank, "a findable block was reused while a worthless one was free"
        assert taken[blanks:] == self.cached[: count - blanks], "not the least recently freed"
        self.blank -= set(taken)
        self.cached = self.cached[count - blanks :]
        self.where = {key: block for key, block in self.where.items() if block not in taken}
        self.holders.append(taken)

    @rule(keys=st.lists(KEYS, max_size=4, unique=True))
    def find(self, keys):
        assert self.pool.find(keys) == self.known(keys)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4, unique=True))
    def share(self, keys):
        found = self.pool.find(keys)
        idle = [block for block in found if block in self.cached]
        assert self.pool.idle(found) == len(idle)
        free = self.pool.free
        self.pool.share(found)
        assert self.pool.free == free - len(idle)
        self.cached = [block for block in self.cached if block not in found]
        self.holders.append(found)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), key=KEYS)
    def publish(self, data, key):
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.publish(block, key)
        if key not in self.where and block not in self.where.values():
            self.where[key] = block

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(holder)
        for block in reversed(holder):
            if self.references[block]:
                continue
            if block in self.where.values():
                self.cached.append(block)
            else:
                self.blank.add(block)

    @invariant()
    def agrees(self):
        self.pool.check()
        assert self.pool.free == len(self.blank) + len(self.cached)
        assert self.pool.used == len(self.references)
        for key in "abcdefgh":
            assert self.pool.find([key]) == self.known([key])

    def teardown(self):
        for holder in self.holders:
            self.pool.release(holder)
        assert self.pool.free == BLOCKS


TestPool = Pool.TestCase


def test_a_block_given_back_twice_is_an_error():
    pool = BlockPool(2)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(RuntimeError, match=f"block {taken[0]} released more often than taken"):
        pool.release(taken)


def test_a_free_block_cannot_be_published():
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="block 1 is free"):
        pool.publish(1, "a")


def test_a_pool_without_blocks_has_nothing_to_give():
    pool = BlockPool(0)
    assert pool.allocate(0) == [] and pool.free == 0
    with pytest.raises(MemoryError):
        pool.allocate(1)


def test_the_tail_of_a_freed_prefix_is_reused_first():
    pool = BlockPool(3)
    prefix = pool.allocate(3)
    for block, key in zip(prefix, "abc", strict=True):
        pool.publish(block, key)
    pool.release(prefix)
    pool.allocate(1)
    assert pool.find("abc") == prefix[:2]


def test_a_shared_block_is_free_only_when_its_last_holder_is_gone():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, "a")
    pool.share(pool.find("a"))
    pool.release([block])
    assert pool.free == 1
    pool.release([block])
    assert pool.free == 2 and pool.find("a") == [block]


def test_what_was_shared_in_time_is_not_reused():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, "a")
    pool.release([block])
    pool.share(pool.find("a"))
    assert pool.allocate(1) != [block]


def test_the_first_block_with_a_key_keeps_it():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, "a")
    pool.publish(second, "a")
    assert pool.find("a") == [first]


# --- keys of prompts


def test_keys_are_the_hashes_where_blocks_are_equally_long():
    assert prefix_keys(Request(0, 0.0, 35, 1, hashes=(7, 8, 9), hash_block=16), 16) == (7, 8)


def test_a_coarse_hash_vouches_for_every_block_it_covers():
    keys = prefix_keys(Request(0, 0.0, 20, 1, hashes=(7, 8), hash_block=16), 4)
    assert keys == ((7, 4), (7, 8), (7, 12), (7, 16), (8, 20))


def test_a_fine_hash_vouches_for_the_blocks_that_it_ends():
    keys = prefix_keys(Request(0, 0.0, 10, 1, hashes=(1, 2, 3, 4, 5), hash_block=2), 4)
    assert keys == ((2, 4), (4, 8))


def test_only_what_hashes_cover_has_keys():
    assert prefix_keys(Request(0, 0.0, 40, 1, hashes=(7,), hash_block=16), 4)[-1] == (7, 16)
    assert prefix_keys(Request(0, 0.0, 40, 1), 16) == ()


def test_hashes_of_tokens_are_chained():
    one, other = hash_tokens((1, 2, 3, 4, 5), 2), hash_tokens((9, 2, 3, 4), 2)
    assert len(one) == len(other) == 2
    assert one[1] != other[1], "the same block after another prefix is another block"
    assert hash_tokens((1, 2, 3, 4), 2) == one
