"""Steps in a few words: parts of sequences in, the logits of all rows out; and comparing them bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.conformance.suite import Fault
from kinetic_core.interfaces import Executable, HeadRequest, RowBatch, SequenceRows

F32 = npt.NDArray[np.float32]
Tokens = tuple[int, ...]


@attrs.frozen
class Part:
    """Rows of one sequence in a step.

    tokens: committed tokens. drafts: (token, offset of the parent row). Others as in `SequenceRows`.
    """

    tokens: Tokens
    start: int = 0
    table: tuple[int, ...] = (0, 1)
    slot: int = 0
    drafts: tuple[tuple[int, int], ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()


def make_batch(*parts: Part, heads: Sequence[HeadRequest] | None = None) -> RowBatch:
    """The batch of these parts; heads: None asks for every row's whole distribution."""
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[SequenceRows] = []
    for part in parts:
        own = list(range(part.start, part.start + len(part.tokens)))
        for _, parent in part.drafts:
            own.append(own[parent] + 1)
        sequences.append(
            SequenceRows(
                first_row=len(tokens),
                start=part.start,
                n_committed=len(part.tokens),
                block_table=np.array(part.table, np.int32),
                slot=part.slot,
                draft_parents=tuple(parent for _, parent in part.drafts),
                snapshots=part.snapshots,
            )
        )
        tokens += [*part.tokens, *(token for token, _ in part.drafts)]
        positions += own
    if heads is None:
        heads = [HeadRequest(row, None) for row in range(len(tokens))]
    return RowBatch(np.array(tokens, np.int32), np.array(positions, np.int32), tuple(sequences), tuple(heads))


def run(executable: Executable, batch: RowBatch) -> list[F32]:
    """Run a batch that asks for every row; per sequence the logits of its rows, f32[rows, vocab]."""
    executable.run(batch)
    logits = np.array([executable.logits(row) for row in range(batch.n_rows)])  # a copy: valid until the next step
    return [logits[s.first_row : s.first_row + s.n_rows] for s in batch.sequences]


def step(executable: Executable, *parts: Part) -> list[F32]:
    """Run one step of these parts; per part the logits of its rows, f32[rows, vocab]."""
    return run(executable, make_batch(*parts))


def prompt(
    executable: Executable, tokens: Tokens, sizes: Sequence[int], table: tuple[int, ...] = (0, 1), slot: int = 0
) -> F32:
    """Run a prompt in steps of these sizes, the last one repeated: f32[tokens, vocab]."""
    rows: list[F32] = []
    at = 0
    while at < len(tokens):
        size = sizes[min(len(rows), len(sizes) - 1)]
        rows.append(step(executable, Part(tokens[at : at + size], at, table, slot))[0])
        at += size
    return np.concatenate(rows)


def require_rows(got: F32, expected: F32, what: str, first: int = 0) -> None:
    """Raise Fault unless the rows are the same bits. what: says what was compared; first: number of the first row."""
    if got.shape != expected.shape:
        raise Fault(f"{what}: got logits of shape {got.shape}, expected {expected.shape}")
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if ours.tobytes() != theirs.tobytes():
            differing = np.flatnonzero(ours.view(np.uint32) != theirs.view(np.uint32))
            token = int(differing[0])
            raise Fault(
                f"{what}: the logits of row {first + number} differ in {len(differing)} of {len(ours)} tokens, the "
                f"first is token {token}: got {ours[token]!r}, expected {theirs[token]!r}"
            )


def require_bytes(got: bytes, expected: bytes, what: str) -> None:
    """Raise Fault unless the bytes are the same."""
    if got == expected:
        return
    if len(got) != len(expected):
        raise Fault(f"{what}: got {len(got)} bytes, expected {len(expected)}")
    differing = np.flatnonzero(np.frombuffer(got, np.uint8) != np.frombuffer(expected, np.uint8))
    raise Fault(f"{what}: {len(differing)} of {len(got)} bytes differ, the first at offset {int(differing[0])}")
