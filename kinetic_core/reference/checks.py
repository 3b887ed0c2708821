"""Refuses a batch that breaks the contract of `kinetic_core.interfaces.batch`, saying what and where."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kinetic_core.errors import BackendError, describe
from kinetic_core.interfaces.backend import LoadOptions
from kinetic_core.interfaces.batch import BLOCK_TOKENS, HeadRequest, RowBatch, SequenceRows
from kinetic_core.program.program import Program


def check_batch(program: Program, batch: RowBatch, options: LoadOptions, vocab: int) -> None:
    """Raise BackendError unless `batch` is one that a backend loaded with `options` must run.

    vocab: tokens that have an embedding.
    """
    _check_rows(batch, options, vocab)
    for number, sequence in enumerate(batch.sequences):
        _check_tree(sequence, f"sequence {number} of the batch")
    _check_positions(batch)
    written: dict[int, int] = {}
    for number, sequence in enumerate(batch.sequences):
        where = f"sequence {number} of the batch"
        if program.kv_layers:
            _check_blocks(sequence, number, written, options, where)
        if program.states:
            _check_slots(sequence, options, where)
    if program.kv_layers:
        _check_unshared(batch, written)
    if program.states:
        slots = [sequence.slot for sequence in batch.sequences]
        slots += [slot for sequence in batch.sequences for _, slot in sequence.snapshots]
        if len(set(slots)) != len(slots):
            _refuse("a slot is used twice", "the batch", slots, "every sequence and snapshot with its own")
    last_row = -1
    for output, head in enumerate(batch.heads):
        _check_head(head, last_row, batch.n_rows, program.logits.width, f"output {output} of the batch")
        last_row = head.row
    if len(batch.heads) > options.max_outputs:
        _refuse("too many outputs", "the batch", len(batch.heads), f"at most {options.max_outputs}")


def check_prediction(batch: RowBatch, hidden: npt.NDArray[np.float32], d_model: int) -> None:
    """Raise BackendError for a batch or hidden states that a prediction step cannot take; see `Executable.predict`."""
    for number, sequence in enumerate(batch.sequences):
        where = f"sequence {number} of the batch"
        if sequence.draft_parents or sequence.snapshots:
            _refuse("a prediction step takes no drafts and no snapshots", where, sequence.n_rows, "committed rows only")
        if sequence.start < 1:
            _refuse("a prediction step needs a hidden state before each row", where, sequence.start, "from 1 on")
    if hidden.dtype != np.float32 or hidden.shape != (batch.n_rows, d_model):
        _refuse(
            "bad hidden", "the step", f"{hidden.dtype} of shape {hidden.shape}", f"float32 [{batch.n_rows}, {d_model}]"
        )


def _refuse(what: str, where: str, got: object, expected: object) -> NoReturn:
    raise BackendError(describe(what, where=where, got=got, expected=expected))


def _check_rows(batch: RowBatch, options: LoadOptions, vocab: int) -> None:
    n = batch.n_rows
    if not 1 <= n <= options.max_rows:
        _refuse("bad number of rows", "the batch", n, f"1 to {options.max_rows}")
    for name, array in (("token_ids", batch.token_ids), ("positions", batch.positions)):
        if array.dtype != np.int32 or array.shape != (n,):
            _refuse(f"bad {name}", "the batch", f"{array.dtype} of shape {array.shape}", f"int32 of shape ({n},)")
    outside = batch.token_ids[(batch.token_ids < 0) | (batch.token_ids >= vocab)]
    if outside.size:
        _refuse("a token outside the vocabulary", "the batch", int(outside[0]), f"0 to {vocab - 1}")
    row = 0
    for number, sequence in enumerate(batch.sequences):
        if sequence.first_row != row:
            _refuse("rows out of order", f"sequence {number} of the batch", sequence.first_row, row)
        row += sequence.n_rows
    if row != n:
        _refuse("the sequences do not make up the batch", "the batch", f"{row} rows", f"{n} rows")


def _check_positions(batch: RowBatch) -> None:
    for number, sequence in enumerate(batch.sequences):
        got = batch.positions[sequence.first_row : sequence.first_row + sequence.n_rows].tolist()
        expected = list(range(sequence.start, sequence.start + sequence.n_committed))
        for parent in sequence.draft_parents:
            expected.append(expected[parent] + 1)
        if got != expected:
            _refuse("wrong positions", f"sequence {number} of the batch", got, expected)


def _check_tree(sequence: SequenceRows, where: str) -> None:
    if sequence.n_committed < 1 or sequence.start < 0:
        _refuse("no committed row", where, f"{sequence.n_committed} from {sequence.start}", "at least 1, from 0 on")
    for index, parent in enumerate(sequence.draft_parents):
        offset = sequence.n_committed + index
        if not sequence.n_committed - 1 <= parent < offset:
            _refuse(f"bad parent of the row at {offset}", where, parent, f"{sequence.n_committed - 1} to {offset - 1}")


def _check_blocks(
    sequence: SequenceRows, number: int, written: dict[int, int], options: LoadOptions, where: str
) -> None:
    check_table(sequence, sequence.start + sequence.n_committed, options, where)
    first = sequence.start // BLOCK_TOKENS
    last = (sequence.start + sequence.n_committed - 1) // BLOCK_TOKENS
    for block in sequence.block_table[first : last + 1].tolist():
        if block in written:
            _refuse("a block is written for two places", where, block, "a block of its own")
        written[block] = number


def check_table(sequence: SequenceRows, n_tokens: int, options: LoadOptions, where: str) -> None:
    """Raise BackendError unless the block table covers positions 0 to `n_tokens` - 1 with blocks that exist."""
    table = sequence.block_table
    needed = -(-n_tokens // BLOCK_TOKENS)
    if table.dtype != np.int32 or table.ndim != 1 or len(table) < needed:
        _refuse("bad block table", where, f"{table.dtype} of shape {table.shape}", f"int32, at least {needed} blocks")
    outside = table[:needed][(table[:needed] < 0) | (table[:needed] >= options.n_blocks)]
    if outside.size:
        _refuse("a block that does not exist", where, int(outside[0]), f"0 to {options.n_blocks - 1}")


def _check_unshared(batch: RowBatch, written: dict[int, int]) -> None:
    for number, sequence in enumerate(batch.sequences):
        for block in sequence.block_table.tolist():
            if written.get(block, number) != number:
                _refuse("a block is written that another sequence reads", f"sequence {number}", block, "a copy")


def _check_slots(sequence: SequenceRows, options: LoadOptions, where: str) -> None:
    for slot in (sequence.slot, *(slot for _, slot in sequence.snapshots)):
        if not 0 <= slot < options.n_slots:
            _refuse("a slot that does not exist", where, slot, f"0 to {options.n_slots - 1}")
    for offset, _ in sequence.snapshots:
        if not 0 <= offset < sequence.n_committed:
            _refuse("a snapshot after a row that is not committed", where, offset, f"0 to {sequence.n_committed - 1}")


def _check_head(head: HeadRequest, last_row: int, n_rows: int, vocab: int, where: str) -> None:
    if not max(last_row, 0) <= head.row < n_rows:
        _refuse("bad row", where, head.row, f"{max(last_row, 0)} to {n_rows - 1}, ascending")
    if head.top_k is not None and head.top_k < 1:
        _refuse("bad top_k", where, head.top_k, "at least 1, or None for all")
    for token_id in head.exact_ids:
        if not 0 <= token_id < vocab:
            _refuse("a token outside the vocabulary", where, token_id, f"0 to {vocab - 1}")
