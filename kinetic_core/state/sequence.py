"""The state of one sequence: which blocks and which slot hold it, and how many tokens it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kinetic_core.errors import CapacityError, describe
from kinetic_core.interfaces.batch import BLOCK_TOKENS

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Executable
    from kinetic_core.interfaces.cache import CachedPrefix
    from kinetic_core.state.pools import BlockPool, SlotPool


def blocks_for(n_tokens: int) -> int:
    """KV blocks that `n_tokens` positions take."""
    return -(-n_tokens // BLOCK_TOKENS)


class SequenceState:
    """Blocks and slot of one sequence.

    Its last block may be partly filled and is then nobody else's: sharing (`fork`, `resume`) copies it. Full blocks are
    never written again, so any number of sequences may hold them.

    n_tokens: positions that the model has run and committed.
    slot:     recurrent-state slot; -1 for a program without recurrent states.
    """

    def __init__(self, executable: Executable, blocks: BlockPool, slots: SlotPool) -> None:
        """An empty sequence. Raises CapacityError when no slot is free."""
        self._executable = executable
        self._blocks = blocks
        self._slots = slots
        self._table: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.block_ids: list[int] = []
        self.n_tokens = 0
        self.slot = slots.allocate()
        if self.slot >= 0:
            executable.clear_slot(self.slot)

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """i32[n_blocks]: the block of each 256 positions. Not changed in place when the sequence grows."""
        return self._table

    def reserve(self, n_tokens: int) -> bool:
        """Make the table cover `n_tokens` positions; False, with nothing taken, when the pool has too few blocks."""
        missing = blocks_for(n_tokens) - len(self.block_ids)
        if missing <= 0:
            return True
        if not self._blocks.make_room(missing):
            return False
        self.block_ids.extend(self._blocks.allocate() for _ in range(missing))
        self._table = np.array(self.block_ids, np.int32)
        return True

    def advance(self, n_rows: int) -> None:
        """The model committed `n_rows` more positions."""
        if blocks_for(self.n_tokens + n_rows) > len(self.block_ids):
            raise ValueError(describe("the block table does not cover the new positions", got=self.n_tokens + n_rows))
        self.n_tokens += n_rows

    def fork(self) -> SequenceState:
        """A second sequence with the same tokens: full blocks are shared, a partly filled last one and the slot copied.

        Raises CapacityError, with nothing taken, when there is no block or no slot.
        """
        n_full, n_partial = self.n_tokens // BLOCK_TOKENS, int(self.n_tokens % BLOCK_TOKENS > 0)
        if not self._blocks.make_room(n_partial):
            raise CapacityError(describe("no KV block is free for a fork", got=f"{self._blocks.n_blocks} in use"))
        other = SequenceState(self._executable, self._blocks, self._slots)
        shared = self.block_ids[:n_full]
        self._blocks.share(shared)
        other.block_ids = list(shared)
        if n_partial:
            own = self._blocks.allocate()
            self._executable.copy_block(self.block_ids[n_full], own)
            other.block_ids.append(own)
        if self.slot >= 0:
            self._executable.copy_slot(self.slot, other.slot)
        other._table = np.array(other.block_ids, np.int32)
        other.n_tokens = self.n_tokens
        return other

    def resume(self, prefix: CachedPrefix) -> None:
        """Start this empty sequence from a stored prefix, whose block references become this sequence's.

        The prefix's slot stays the cache's; its states are copied. Raises CapacityError (and gives the references
        back) when there is no block for a partly filled last one.
        """
        if self.n_tokens or self.block_ids:
            raise ValueError(describe("only an empty sequence can resume", got=f"{self.n_tokens} tokens"))
        blocks = list(prefix.blocks)
        if prefix.n_tokens % BLOCK_TOKENS and self._blocks.references(blocks[-1]) > 1:
            try:
                own = self._blocks.allocate()
            except CapacityError:
                self._blocks.release(blocks)
                raise
            self._executable.copy_block(blocks[-1], own)
            self._blocks.release(blocks[-1:])
            blocks[-1] = own
        if self.slot >= 0:
            self._executable.copy_slot(prefix.slot, self.slot)
        self.block_ids = blocks
        self._table = np.array(blocks, np.int32)
        self.n_tokens = prefix.n_tokens

    def release(self) -> None:
        """Give everything back. Idempotent."""
        self._blocks.release(self.block_ids)
        self._slots.release(self.slot)
        self.block_ids = []
        self._table = np.empty(0, np.int32)
        self.slot = -1
        self.n_tokens = 0
