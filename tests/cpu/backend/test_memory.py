"""Memory of the pools: idle blocks and slots take none, slots begin as zeros, everything lies on cache lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kinetic_core.backends.cpu.pools import KVPool, SlotPool, address_of
from kinetic_core.program import KVLayer, RecurrentState

STATES = (RecurrentState(0, "memory", (1024, 1024)), RecurrentState(1, "window", (48,)))
N_SLOTS = 64
MIB = 2**20


def slot_pool() -> SlotPool:
    return SlotPool(STATES, N_SLOTS)


def kv_pool() -> KVPool:
    return KVPool([KVLayer(0, 8, 128), KVLayer(1, 8, 128)], 128, "f16")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("make", [slot_pool, kv_pool])
def test_what_is_idle_takes_no_memory(make: Callable[[], SlotPool | KVPool]) -> None:
    before = resident_bytes()
    pool = make()
    assert pool._data.nbytes >= 256 * MIB
    assert resident_bytes() - before < 16 * MIB
    pool.view(3)[:] = 1
    assert pool.view(3).nbytes <= resident_bytes() - before < 16 * MIB


def test_slots_begin_as_zeros() -> None:
    pool = slot_pool()
    assert not any(pool.view(slot).any() for slot in range(N_SLOTS))


@pytest.mark.parametrize("make", [slot_pool, kv_pool])
def test_pools_begin_on_a_cache_line(make: Callable[[], SlotPool | KVPool]) -> None:
    for _ in range(8):
        pool = make()
        assert address_of(pool._data) % 64 == 0
        assert address_of(pool.view(0)) == address_of(pool._data)
