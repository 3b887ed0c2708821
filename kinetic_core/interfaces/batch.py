"""The row batch: what one step of the model runs on. Shared by the engine, backends and the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 256
"""Positions per KV block, and the grid that prompt batches and snapshots lie on."""


@attrs.frozen(eq=False)
class SequenceRows:
    """The consecutive rows that one sequence has in a batch: committed rows first, then drafts.

    Committed rows have consecutive positions from `start`; the step writes their keys and values to the sequence's
    blocks and advances its recurrent states in place. Drafts leave no trace: their keys, values and recurrence inputs
    stay with the step until `Executable.commit` makes an accepted path part of the sequence, or the next step.

    first_row:    index of the sequence's first row in the batch.
    start:        position of that row = number of tokens the sequence had before the step.
    n_committed:  rows that the step commits, at least 1.
    block_table:  i32[n_blocks], the KV block of each 256 positions; covers every committed row.
    slot:         the sequence's recurrent-state slot; -1 for a program without recurrent states.
    draft_parents: for each draft row, the offset (from first_row) of its parent row, which comes earlier; the
                  parent of the first level is the last committed row, n_committed - 1.
    snapshots:    (offset of a committed row, slot): after that row, copy the recurrent states to that slot.
    """

    first_row: int
    start: int
    n_committed: int
    block_table: npt.NDArray[np.int32]
    slot: int
    draft_parents: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def n_rows(self) -> int:
        """Committed rows and drafts together."""
        return self.n_committed + len(self.draft_parents)

    def committed_rows(self, accepted: Sequence[int] = ()) -> tuple[int, ...]:
        """Rows of the batch that are part of the sequence: the committed ones, then the `accepted` drafts (from 0)."""
        first_draft = self.first_row + self.n_committed
        return (*range(self.first_row, first_draft), *(first_draft + draft for draft in accepted))


@attrs.frozen
class HeadRequest:
    """What is wanted from the output layer for one row.

    row:    index of the row in the batch.
    top_k:  the best k tokens in (score descending, id ascending) order; 1 is greedy. None: the whole distribution.
    exact_ids: tokens whose scores are wanted whether or not they are among the best (penalties and bias name them).
    """

    row: int
    top_k: int | None
    exact_ids: tuple[int, ...] = ()


@attrs.frozen(eq=False)
class RowBatch:
    """One step's rows.

    token_ids: i32[rows]
    positions: i32[rows]; a draft's position is its parent's plus one
    sequences: the rows of each sequence, in row order, no sequence twice
    heads:     the rows whose logits are wanted, ascending by row
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    sequences: tuple[SequenceRows, ...]
    heads: Sequence[HeadRequest]

    @property
    def n_rows(self) -> int:
        """Rows in the step."""
        return len(self.token_ids)
