import random

import pytest

from tightwire.server.engine.block_pool import BlockPool


def test_every_block_is_allocated_once() -> None:
    pool = BlockPool(5)
    taken = pool.allocate(3) + pool.allocate(2)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.free(taken[1:4])
    assert sorted(pool.allocate(3)) == sorted(taken[1:4])


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="asked for 3 blocks, 2 of 4 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(0) == [] and pool.num_free == 2
    with pytest.raises(ValueError):
        pool.allocate(-1)


def test_double_free_is_an_error() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(ValueError, match=f"block {block} is freed but has no holder"):
        pool.free([block])
    with pytest.raises(ValueError, match="block 4 is freed"):
        pool.free([4])
    with pytest.raises(ValueError, match="block -1 is freed"):
        pool.free([-1])
    assert pool.num_free == 4


def test_kept_blocks_are_allocated_last_in_lru_order() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(3)
    for block in taken[:2]:
        pool.keep(block)
    pool.free([taken[1], taken[0], taken[2]])
    assert pool.num_free == 4 and pool.is_kept(taken[0]) and not pool.is_kept(taken[2])
    assert set(pool.allocate(2)).isdisjoint(taken[:2])
    assert pool.allocate(2) == [taken[1], taken[0]]
    assert not pool.is_kept(taken[0])


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.share([block])
    pool.free([block])
    assert pool.num_used == 1
    pool.free([block])
    assert pool.num_used == 0
    pool.share([block])  # from among the free
    assert pool.num_used == 1 and pool.allocate(1) != [block]
    with pytest.raises(ValueError, match="0 of 2 are free"):
        pool.allocate(1)


def test_a_spoiled_block_is_not_kept() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.spoil([block])
    pool.free([block])
    assert not pool.is_kept(block)


def test_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_random_owners_never_share() -> None:
    rng, pool, owners = random.Random(1), BlockPool(17), [[] for _ in range(6)]
    for _ in range(500):
        owner = rng.choice(owners)
        if owner and rng.random() < 0.5:
            pool.free(owner)
            owner.clear()
        else:
            owner += pool.allocate(rng.randint(0, pool.num_free))
        held = [block for blocks in owners for block in blocks]
        assert len(set(held)) == len(held) == pool.num_used
