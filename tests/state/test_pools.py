from __future__ import annotations

import pytest

from kinetic_core.errors import CapacityError
from kinetic_core.state import BlockPool, SlotPool


def test_blocks_are_handed_out_lowest_first() -> None:
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    pool.release([1])
    assert pool.allocate() == 1
    assert (pool.n_used, pool.n_free) == (3, 1)


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share([block, block])
    assert pool.references(block) == 3
    for left in (2, 1, 0):
        assert pool.n_used == 1
        pool.release([block])
        assert pool.references(block) == left
    assert pool.n_used == 0


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="free block"):
        pool.release([0])
    with pytest.raises(ValueError, match="free block"):
        pool.share([0])
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
    slots = SlotPool(1)
    with pytest.raises(ValueError, match="free slot"):
        slots.release(0)


def test_an_empty_pool_says_so() -> None:
    pool = BlockPool(1)
    pool.allocate()
    assert not pool.make_room(1)
    with pytest.raises(CapacityError, match="no KV block"):
        pool.allocate()
    slots = SlotPool(1)
    assert slots.allocate() == 0
    assert not slots.make_room()
    with pytest.raises(CapacityError, match="slot"):
        slots.allocate()
    slots.release(0)
    assert (slots.allocate(), slots.n_used) == (0, 1)


def test_reclaimers_are_asked_in_turn_and_only_for_what_is_missing() -> None:
    pool = BlockPool(4)
    kept = [pool.allocate() for _ in range(4)]
    asked: list[tuple[str, int]] = []

    def first(count: int) -> None:
        asked.append(("first", count))
        pool.release([kept.pop()])

    def second(count: int) -> None:
        asked.append(("second", count))
        for _ in range(count):
            pool.release([kept.pop()])

    pool.add_reclaimer(first)
    pool.add_reclaimer(second)
    assert pool.make_room(3)
    assert asked == [("first", 3), ("second", 2)]
    asked.clear()
    assert pool.make_room(3)
    assert asked == []


def test_slots_of_a_program_without_states() -> None:
    slots = SlotPool(0, has_states=False)
    assert [slots.allocate() for _ in range(3)] == [-1, -1, -1]
    assert slots.make_room()
    slots.release(-1)
    assert slots.n_used == 0


def test_slots_reclaim() -> None:
    slots = SlotPool(1)
    slots.allocate()
    slots.add_reclaimer(lambda count: slots.release(0))
    assert slots.allocate() == 0
