from __future__ import annotations

from typing import Any, cast

import pytest

from kinetic_core.errors import CapacityError
from kinetic_core.interfaces import CachedPrefix, Executable
from kinetic_core.state import BlockPool, SequenceState, SlotPool
from kinetic_core.state.sequence import blocks_for


class Recorder:
    """Notes which copies an executable is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


class Pools:
    def __init__(self, n_blocks: int = 8, n_slots: int = 4) -> None:
        self.recorder = Recorder()
        self.blocks = BlockPool(n_blocks)
        self.slots = SlotPool(n_slots)

    def sequence(self, n_tokens: int = 0) -> SequenceState:
        state = SequenceState(cast(Executable, self.recorder), self.blocks, self.slots)
        assert state.reserve(n_tokens)
        state.advance(n_tokens)
        return state


def test_blocks_for() -> None:
    assert [blocks_for(n) for n in (0, 1, 255, 256, 257, 512)] == [0, 1, 1, 1, 2, 2]


def test_a_new_sequence_has_a_clear_slot_and_no_blocks() -> None:
    pools = Pools()
    state = pools.sequence()
    assert pools.recorder.calls == [("clear_slot", 0)]
    assert (state.n_tokens, state.block_table.tolist(), state.slot) == (0, [], 0)


def test_the_table_grows_and_old_tables_stay_as_they_were() -> None:
    pools = Pools()
    state = pools.sequence()
    assert state.reserve(256)
    before = state.block_table
    assert state.reserve(257)
    assert state.reserve(100)
    assert (before.tolist(), state.block_table.tolist()) == ([0], [0, 1])
    state.advance(512)
    with pytest.raises(ValueError, match="block table"):
        state.advance(1)


def test_reserving_takes_all_or_nothing() -> None:
    pools = Pools(n_blocks=3)
    state = pools.sequence(256)
    assert not state.reserve(4 * 256)
    assert (pools.blocks.n_used, state.block_table.tolist()) == (1, [0])
    assert state.reserve(3 * 256)


@pytest.mark.parametrize(("n_tokens", "shared", "copied"), [(300, [0], [1]), (512, [0, 1], []), (5, [], [0])])
def test_a_fork_copies_only_the_partly_filled_last_block(n_tokens: int, shared: list[int], copied: list[int]) -> None:
    pools = Pools()
    state = pools.sequence(n_tokens)
    pools.recorder.calls.clear()
    other = state.fork()
    assert other.n_tokens == n_tokens
    assert other.block_ids[: len(shared)] == shared
    assert len(other.block_ids) == blocks_for(n_tokens)
    assert [pools.blocks.references(block) for block in shared] == [2] * len(shared)
    copies = [call for call in pools.recorder.calls if call[0] == "copy_block"]
    assert copies == [("copy_block", block, other.block_ids[-1]) for block in copied]
    assert ("copy_slot", state.slot, other.slot) in pools.recorder.calls
    state.release()
    assert pools.blocks.n_used == blocks_for(n_tokens)
    other.release()
    other.release()
    assert (pools.blocks.n_used, pools.slots.n_used) == (0, 0)


def test_a_fork_ignores_blocks_reserved_ahead() -> None:
    pools = Pools()
    state = pools.sequence(256)
    assert state.reserve(600)
    other = state.fork()
    assert other.block_ids == [0]


@pytest.mark.parametrize("sizes", [{"n_blocks": 2}, {"n_slots": 1}])
def test_a_fork_without_room_takes_nothing(sizes: dict[str, int]) -> None:
    pools = Pools(**sizes)
    state = pools.sequence(300)
    with pytest.raises(CapacityError):
        state.fork()
    assert (pools.blocks.n_used, pools.slots.n_used) == (2, 1)
    assert [pools.blocks.references(block) for block in (0, 1)] == [1, 1]


def stored(pools: Pools, n_tokens: int) -> CachedPrefix:
    """A prefix as a cache hands it out: its own references, and one more for the caller."""
    blocks = tuple(pools.blocks.allocate() for _ in range(blocks_for(n_tokens)))
    slot = pools.slots.allocate()
    pools.blocks.share(blocks)
    return CachedPrefix(n_tokens, blocks, slot, "live")


def test_resuming_shares_full_blocks_and_copies_the_last() -> None:
    pools = Pools()
    prefix = stored(pools, 300)
    state = pools.sequence()
    pools.recorder.calls.clear()
    state.resume(prefix)
    assert (state.n_tokens, state.block_ids, state.block_table.tolist()) == (300, [0, 2], [0, 2])
    assert pools.recorder.calls == [("copy_block", 1, 2), ("copy_slot", prefix.slot, state.slot)]
    assert [pools.blocks.references(block) for block in (0, 1, 2)] == [2, 1, 1]
    state.release()
    assert [pools.blocks.references(block) for block in (0, 1, 2)] == [1, 1, 0]
    with_tokens = pools.sequence(3)
    with pytest.raises(ValueError, match="empty"):
        with_tokens.resume(prefix)


def test_resuming_on_the_grid_copies_nothing() -> None:
    pools = Pools()
    prefix = stored(pools, 512)
    state = pools.sequence()
    state.resume(prefix)
    assert state.block_ids == [0, 1]
    assert not [call for call in pools.recorder.calls if call[0] == "copy_block"]


def test_resuming_without_room_gives_the_references_back() -> None:
    pools = Pools(n_blocks=2)
    prefix = stored(pools, 300)
    state = pools.sequence()
    with pytest.raises(CapacityError):
        state.resume(prefix)
    assert [pools.blocks.references(block) for block in (0, 1)] == [1, 1]
    assert state.n_tokens == 0
