"""One step's batch as the arrays that kernels read, at addresses that never change."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu.kernels.constants import (
    ALL_CHUNKS,
    MAX_PATH,
    MAX_TOP_K,
    MERGE_WORDS,
    PART_HEADER,
    SEQUENCE_WORDS,
    TILE_WORDS,
)
from kinetic_core.backends.cpu.pools import address_of, allocate
from kinetic_core.errors import BackendError, describe
from kinetic_core.interfaces.backend import LoadOptions
from kinetic_core.interfaces.batch import BLOCK_TOKENS, RowBatch, SequenceRows
from kinetic_core.program.ops import Attention
from kinetic_core.program.program import Program

TILE_ROWS = 4
"""Rows of an attention tile: they share the loads of keys and values."""
LEAST_ITEMS = 2
"""Tiles and key heads per thread that a tile of several drafts has to leave."""
LEAST_CHUNKS = 4
"""A row with fewer chunks is not worth sharing among threads."""
MAX_PARTS = 1024
"""Parts of long rows in one step."""
DRAFT, SKIPPED = -1, -2
"""In place of a row's KV block: the row is a draft, or is not stored."""


def refuse(what: str, where: str, got: object, expected: object) -> NoReturn:
    """Raise BackendError for a batch that breaks the contract of `kinetic_core.interfaces.batch`."""
    raise BackendError(describe(what, where=where, got=got, expected=expected))


class StepArrays:
    """The arrays of one step. `fill` checks the batch and fills them in.

    token_ids: i32[rows]; positions, row_blocks: i64[rows]; gathered: i64[outputs], row of each output; top_k:
    i64[outputs], 0 where all logits are wanted; draft_rows: i64[drafts]; tiles, sequences: records as
    kernels/attention.py, kernels/short_conv.py and kernels/strips.py read them.
    """

    def __init__(self, program: Program, options: LoadOptions, vocab: int, n_threads: int = 1) -> None:
        self._program, self._options, self._vocab = program, options, vocab
        self._uses_blocks, self._uses_slots = bool(program.kv_layers), bool(program.states)
        n = options.max_rows
        self.token_ids = np.zeros(n, np.int32)
        self.positions = np.zeros(n, np.int64)
        self.row_blocks = np.zeros(n, np.int64)
        self.gathered = np.zeros(options.max_outputs, np.int64)
        self.top_k = np.zeros(options.max_outputs, np.int64)
        self.draft_rows = np.zeros(n, np.int64)
        self.tiles = np.zeros((n + MAX_PARTS, TILE_WORDS), np.int64)
        self.merges = np.zeros((n, MERGE_WORDS), np.int64)
        self._n_threads = n_threads
        layers = program.kv_layers
        self._fewest_heads = min((layer.kv_heads for layer in layers), default=1)
        heads = [op.heads * (PART_HEADER + op.layer.head_dim) for op in program.all_ops if isinstance(op, Attention)]
        self._part_bytes = 4 * max(heads, default=0)
        self._parts = allocate(MAX_PARTS * self._part_bytes if n_threads > 1 else 0, np.uint8, "attention")
        self.sequences = np.zeros((n, SEQUENCE_WORDS), np.int64)
        self.n_rows = self.n_outputs = self.n_tiles = self.n_sequences = self.n_drafts = self.n_split = 0
        self._kept: list[npt.NDArray[np.generic]] = []

    @property
    def counts(self) -> tuple[int, ...]:
        """The step's counts in the order of `tape.Count`."""
        return (1, self.n_rows, self.n_outputs, self.n_tiles, self.n_sequences, self.n_drafts, self.n_split)

    def fill(self, batch: RowBatch) -> None:
        """Check the batch and fill in the arrays. Raises BackendError for a batch that breaks the contract."""
        self._check(batch)
        n = self.n_rows = batch.n_rows
        self.token_ids[:n] = batch.token_ids
        self.positions[:n] = batch.positions
        self.n_tiles = self.n_drafts = 0
        self._kept.clear()
        for number, sequence in enumerate(batch.sequences):
            self._fill_sequence(number, sequence)
        self.n_split = 0
        if self._uses_blocks and self._n_threads > 1 and self.n_tiles * self._fewest_heads < 4 * self._n_threads:
            self._split_long_rows(int(batch.positions.max()))
        self.n_sequences = len(batch.sequences)
        self.n_outputs = len(batch.heads)
        for output, head in enumerate(batch.heads):
            self.gathered[output] = head.row
            top_k = head.top_k
            self.top_k[output] = 0 if top_k is None or top_k > MAX_TOP_K else top_k

    def _keep(self, array: npt.NDArray[np.generic]) -> int:
        """Keep an array until the next step; its address."""
        self._kept.append(array)
        return address_of(array)

    def _fill_sequence(self, number: int, sequence: SequenceRows) -> None:
        first, n = sequence.first_row, sequence.n_committed
        if self._uses_blocks:
            table = np.ascontiguousarray(sequence.block_table, np.int32)
            at = self._keep(table)
            if n == 1:
                self.row_blocks[first] = table[sequence.start // BLOCK_TOKENS]
            else:
                self.row_blocks[first : first + n] = table[self.positions[first : first + n] // BLOCK_TOKENS]
            for offset in range(0, n, TILE_ROWS):
                rows = min(TILE_ROWS, n - offset)
                self.tiles[self.n_tiles] = (
                    first + offset,
                    rows,
                    sequence.start + offset,
                    at,
                    0,
                    0,
                    0,
                    0,
                    ALL_CHUNKS,
                    0,
                )
                self.n_tiles += 1
        parents = 0
        if sequence.draft_parents:
            parents = self._keep(np.array(sequence.draft_parents, np.int64))
            self._fill_drafts(sequence, at if self._uses_blocks else 0)
        if self._uses_slots:
            pairs = self._keep(np.array(sequence.snapshots, np.int64)) if sequence.snapshots else 0
            n_snapshots = len(sequence.snapshots)
            self.sequences[number] = (first, n, sequence.n_rows, sequence.slot, parents, n_snapshots, pairs, 0)

    def _fill_drafts(self, sequence: SequenceRows, table: int) -> None:
        first, n, n_drafts = sequence.first_row, sequence.n_committed, len(sequence.draft_parents)
        rows = range(first + n, first + n + n_drafts)
        self.draft_rows[self.n_drafts : self.n_drafts + n_drafts] = rows
        self.n_drafts += n_drafts
        if not self._uses_blocks:
            return
        self.row_blocks[rows.start : rows.stop] = DRAFT
        paths: list[list[int]] = []
        for row, parent in zip(rows, sequence.draft_parents, strict=True):
            paths.append([*(paths[parent - n] if parent >= n else []), row])
        lengths = np.array([len(path) for path in paths], np.int64)
        ends = self._keep(np.array([row for path in paths for row in path], np.int64)) + 8 * np.cumsum(lengths)
        of_rows = np.stack((ends - 8 * lengths, lengths), axis=1)
        at = self._keep(of_rows)
        held = sequence.start + n
        tile_rows = self._draft_tile_rows(n_drafts)
        for offset in range(0, n_drafts, tile_rows):
            count = min(tile_rows, n_drafts - offset)
            last = held - 1 + int(lengths[offset : offset + count].max())
            self.tiles[self.n_tiles] = (
                rows[offset],
                count,
                last,
                table,
                held,
                at + of_rows.strides[0] * offset,
                1,
                0,
                ALL_CHUNKS,
                0,
            )
            self.n_tiles += 1

    def _draft_tile_rows(self, n_drafts: int) -> int:
        """Drafts of a sequence in a tile: as many as leave work for every thread."""
        rows = TILE_ROWS
        while rows > 1 and (1 + -(-n_drafts // rows)) * self._fewest_heads < LEAST_ITEMS * self._n_threads:
            rows //= 2
        return rows

    def _split_long_rows(self, last_position: int) -> None:
        """Turn tiles of one row that see many chunks into parts of one chunk each; tile[2] is the row's position."""
        if last_position // BLOCK_TOKENS + 1 < LEAST_CHUNKS:
            return
        tiles = self.tiles[: self.n_tiles].copy()
        self.n_tiles = n_parts = 0
        base = address_of(self._parts)
        for tile in tiles:
            n_chunks = int(tile[2]) // BLOCK_TOKENS + 1
            if tile[1] != 1 or n_chunks < LEAST_CHUNKS or n_parts + n_chunks > MAX_PARTS:
                self.tiles[self.n_tiles] = tile
                self.n_tiles += 1
                continue
            first = base + n_parts * self._part_bytes
            self.merges[self.n_split] = (tile[0], n_chunks, first, self._part_bytes)
            self.n_split += 1
            parts = self.tiles[self.n_tiles : self.n_tiles + n_chunks]
            chunks = np.arange(n_chunks)
            parts[:] = tile
            parts[:, 7], parts[:, 8], parts[:, 9] = chunks, chunks + 1, first + chunks * self._part_bytes
            self.n_tiles += n_chunks
            n_parts += n_chunks

    # the contract

    def _check(self, batch: RowBatch) -> None:
        options = self._options
        n = batch.n_rows
        if not 1 <= n <= options.max_rows:
            refuse("bad number of rows", "the batch", n, f"1 to {options.max_rows}")
        for name, array in (("token_ids", batch.token_ids), ("positions", batch.positions)):
            if array.dtype != np.int32 or array.shape != (n,):
                refuse(f"bad {name}", "the batch", f"{array.dtype} of shape {array.shape}", f"int32 of shape ({n},)")
        if batch.token_ids.min() < 0 or batch.token_ids.max() >= self._vocab:
            outside = batch.token_ids[(batch.token_ids < 0) | (batch.token_ids >= self._vocab)]
            refuse("a token outside the vocabulary", "the batch", int(outside[0]), f"0 to {self._vocab - 1}")
        row = 0
        written: dict[int, int] = {}
        for number, sequence in enumerate(batch.sequences):
            where = f"sequence {number} of the batch"
            if sequence.first_row != row:
                refuse("rows out of order", where, sequence.first_row, row)
            row += sequence.n_rows
            self._check_rows(sequence, batch, where)
            if self._uses_blocks:
                check_table(sequence, sequence.start + sequence.n_committed, options, where)
                first, last = sequence.start, sequence.start + sequence.n_committed - 1
                for block in sequence.block_table[first // BLOCK_TOKENS : last // BLOCK_TOKENS + 1].tolist():
                    if block in written:
                        refuse("a block is written for two places", where, block, "a block of its own")
                    written[block] = number
        if row != n:
            refuse("the sequences do not make up the batch", "the batch", f"{row} rows", f"{n} rows")
        if self._uses_blocks and len(batch.sequences) > 1:
            for number, sequence in enumerate(batch.sequences):
                for block in sequence.block_table.tolist():
                    if written.get(block, number) != number:
                        refuse("a block is written that another sequence reads", f"sequence {number}", block, "a copy")
        if self._uses_slots:
            self._check_slots(batch)
        self._check_heads(batch)

    def _check_rows(self, sequence: SequenceRows, batch: RowBatch, where: str) -> None:
        first, n, start = sequence.first_row, sequence.n_committed, sequence.start
        if n < 1 or start < 0:
            refuse("no committed row", where, f"{n} from {start}", "at least 1, from 0 on")
        if len(sequence.draft_parents) > MAX_PATH:
            refuse("too many drafts", where, len(sequence.draft_parents), f"at most {MAX_PATH}")
        got = batch.positions[first : first + sequence.n_rows].tolist()
        expected = list(range(start, start + n))
        for index, parent in enumerate(sequence.draft_parents):
            if not n - 1 <= parent < n + index:
                refuse(f"bad parent of the row at {n + index}", where, parent, f"{n - 1} to {n + index - 1}")
            expected.append(expected[parent] + 1)
        if got != expected:
            refuse("wrong positions", where, got, expected)

    def _check_slots(self, batch: RowBatch) -> None:
        used: list[int] = []
        for number, sequence in enumerate(batch.sequences):
            where = f"sequence {number} of the batch"
            for slot in (sequence.slot, *(slot for _, slot in sequence.snapshots)):
                if not 0 <= slot < self._options.n_slots:
                    refuse("a slot that does not exist", where, slot, f"0 to {self._options.n_slots - 1}")
                used.append(slot)
            for offset, _ in sequence.snapshots:
                if not 0 <= offset < sequence.n_committed:
                    last = sequence.n_committed - 1
                    refuse("a snapshot after a row that is not committed", where, offset, f"0 to {last}")
        if len(set(used)) != len(used):
            refuse("a slot is used twice", "the batch", used, "every sequence and snapshot with its own")

    def _check_heads(self, batch: RowBatch) -> None:
        if len(batch.heads) > self._options.max_outputs:
            refuse("too many outputs", "the batch", len(batch.heads), f"at most {self._options.max_outputs}")
        last, vocab = 0, self._program.logits.width
        for output, head in enumerate(batch.heads):
            where = f"output {output} of the batch"
            if not last <= head.row < batch.n_rows:
                refuse("bad row", where, head.row, f"{last} to {batch.n_rows - 1}, ascending")
            last = head.row
            if head.top_k is not None and head.top_k < 1:
                refuse("bad top_k", where, head.top_k, "at least 1, or None for all")
            for token_id in head.exact_ids:
                if not 0 <= token_id < vocab:
                    refuse("a token outside the vocabulary", where, token_id, f"0 to {vocab - 1}")


def check_prediction(batch: RowBatch, hidden: npt.NDArray[np.float32], d_model: int) -> None:
    """Raise BackendError for a batch or hidden states that `Executable.predict` does not take."""
    for number, sequence in enumerate(batch.sequences):
        where = f"sequence {number} of the batch"
        if sequence.draft_parents or sequence.snapshots:
            refuse("a prediction step takes no drafts and no snapshots", where, sequence.n_rows, "committed rows only")
        if sequence.start < 1:
            refuse("a prediction step needs a hidden state before each row", where, sequence.start, "from 1 on")
    if hidden.dtype != np.float32 or hidden.shape != (batch.n_rows, d_model):
        got, expected = f"{hidden.dtype} of shape {hidden.shape}", f"float32 of shape ({batch.n_rows}, {d_model})"
        refuse("bad hidden states", "the prediction step", got, expected)


def check_table(sequence: SequenceRows, n_tokens: int, options: LoadOptions, where: str) -> None:
    """Raise BackendError unless the block table covers positions 0 to `n_tokens` - 1 with blocks that exist."""
    table = sequence.block_table
    needed = -(-n_tokens // BLOCK_TOKENS)
    if table.dtype != np.int32 or table.ndim != 1 or len(table) < needed:
        refuse("bad block table", where, f"{table.dtype} of shape {table.shape}", f"int32, at least {needed} blocks")
    used = table[:needed]
    if used.min() < 0 or used.max() >= options.n_blocks:
        outside = used[(used < 0) | (used >= options.n_blocks)]
        refuse("a block that does not exist", where, int(outside[0]), f"0 to {options.n_blocks - 1}")
