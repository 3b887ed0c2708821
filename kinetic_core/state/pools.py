"""The pools: KV blocks with reference counts, and recurrent-state slots."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from kinetic_core.errors import CapacityError, describe

Reclaimer = Callable[[int], None]
"""Asked to give back at least this many blocks (or slots), if it can: how a prefix cache yields to running requests."""


class BlockPool:
    """Ids 0 … n_blocks - 1 of KV blocks; several sequences may hold one block.

    The lowest free id is handed out first, so the memory that a backend touches grows with what is used.
    """

    def __init__(self, n_blocks: int) -> None:
        if n_blocks < 1:
            raise ValueError(describe("a pool needs blocks", got=n_blocks, expected="at least 1"))
        self.n_blocks = n_blocks
        self._references = [0] * n_blocks
        self._free = list(range(n_blocks))
        self._reclaimers: list[Reclaimer] = []

    @property
    def n_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Blocks that somebody holds."""
        return self.n_blocks - len(self._free)

    def references(self, block: int) -> int:
        """How many holders a block has."""
        return self._references[block]

    def add_reclaimer(self, reclaimer: Reclaimer) -> None:
        """Have `reclaimer` called when more blocks are wanted than are free."""
        self._reclaimers.append(reclaimer)

    def make_room(self, count: int) -> bool:
        """Are `count` blocks free, if need be after the reclaimers gave some back?"""
        for reclaimer in self._reclaimers:
            if len(self._free) >= count:
                break
            reclaimer(count - len(self._free))
        return len(self._free) >= count

    def allocate(self) -> int:
        """A free block, with one reference. Raises CapacityError when there is none."""
        if not self.make_room(1):
            raise CapacityError(describe("no KV block is free", got=f"{self.n_blocks} in use"))
        block = heapq.heappop(self._free)
        self._references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each of these blocks, which are in use."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(describe("a free block cannot be shared", got=block))
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give one reference to each of these blocks back."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(describe("a free block cannot be released", got=block))
            self._references[block] -= 1
            if not self._references[block]:
                heapq.heappush(self._free, block)


class SlotPool:
    """Ids of recurrent-state slots, one per running sequence.

    A program without recurrent states needs none: then every sequence has slot -1.
    """

    def __init__(self, n_slots: int, *, has_states: bool = True) -> None:
        self.n_slots = n_slots
        self.has_states = has_states
        self._free = list(range(n_slots)) if has_states else []
        self._used: set[int] = set()
        self._reclaimers: list[Reclaimer] = []

    @property
    def n_used(self) -> int:
        """Slots in use."""
        return len(self._used)

    def add_reclaimer(self, reclaimer: Reclaimer) -> None:
        """Have `reclaimer` called when a slot is wanted and none is free."""
        self._reclaimers.append(reclaimer)

    def make_room(self) -> bool:
        """Is a slot free (or none needed), if need be after the reclaimers gave some back?"""
        for reclaimer in self._reclaimers:
            if self._free or not self.has_states:
                break
            reclaimer(1)
        return bool(self._free) or not self.has_states

    def allocate(self) -> int:
        """A free slot, or -1 where none is needed. Raises CapacityError when there is none."""
        if not self.has_states:
            return -1
        if not self.make_room():
            raise CapacityError(describe("no recurrent-state slot is free", got=f"{self.n_slots} in use"))
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; -1 is ignored."""
        if slot < 0:
            return
        if slot not in self._used:
            raise ValueError(describe("a free slot cannot be released", got=slot))
        self._used.remove(slot)
        heapq.heappush(self._free, slot)
