"""The table of places: what it finds while it grows and shrinks."""

from __future__ import annotations

import random

import numpy as np
from kinetic_drafters.places import BUCKET_BYTES, GROUP, PlaceTable
from kinetic_drafters.tenant import DOCUMENT, MOST_LOAD


def test_a_table_that_grew_and_shrank_finds_what_fits() -> None:
    source = random.Random(6)
    hashes = np.array([source.randrange(1 << 32) for _ in range(5000)], dtype=np.uint32)
    addresses = np.arange(5000, dtype=np.int32)
    worth = np.array([1, 1, 0], dtype=np.uint8)
    table = PlaceTable()
    for start in range(0, 5000, 500):
        while table.n_entries * MOST_LOAD < start + 500:
            before = table.held_bytes + table.growth_bytes
            table.grow()
            assert table.held_bytes == before
        table.enter(hashes[start : start + 500], addresses[start : start + 500], worth)

    def missing(first: int) -> int:
        return sum(address not in table.look_up(int(hashes[address])) for address in range(first, 5000))

    assert missing(0) < 25
    for n_buckets in (table.n_buckets + 1 * GROUP, 31 * GROUP):
        while table.n_buckets < n_buckets:
            table.grow()
        assert missing(0) < 25
    worth[0] = 0  # the first document leaves: the others have room in less
    for n_groups in (17, 16, 15, 9, 3):
        table.shrink(n_groups * GROUP, worth)
        assert table.n_buckets == n_groups * GROUP and missing(DOCUMENT) < 10
    table.shrink(GROUP, worth)
    assert table.held_bytes == GROUP * BUCKET_BYTES and 10 < missing(DOCUMENT) < 100
    assert sum(len(table.look_up(int(value))) for value in hashes[:DOCUMENT]) < 10


def test_the_oldest_of_a_bucket_gives_way_after_growing_too() -> None:
    """Hashes that fall in one bucket however large the table is: the turn is kept."""
    worth = np.array([1, 1, 0], dtype=np.uint8)
    table = PlaceTable()
    same = np.full(20, 7, dtype=np.uint32)
    table.enter(same, np.arange(20, dtype=np.int32), worth)
    for _ in range(5):
        table.grow()
    table.enter(same[:3], np.arange(20, 23, dtype=np.int32), worth)
    assert sorted(table.look_up(7)) == list(range(7, 23))
    table.shrink(GROUP, worth)
    assert sorted(table.look_up(7)) == list(range(7, 23))
    table.enter(same[:1], np.array([30], dtype=np.int32), worth)
    assert sorted(table.look_up(7)) == [*range(8, 23), 30]
