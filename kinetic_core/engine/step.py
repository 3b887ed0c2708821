"""One step's rows: from what each sequence is to run to the batch, and what is to be read from its outputs."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from kinetic_core.engine.history import History
from kinetic_core.engine.sequence import Sequence
from kinetic_core.errors import CapacityError
from kinetic_core.interfaces.batch import HeadRequest, RowBatch, SequenceRows
from kinetic_core.interfaces.drafter import DraftTree
from kinetic_core.state import SlotPool

NO_DRAFT = DraftTree((), ())


@attrs.frozen
class Head:
    """One output of a step: the next token after a row, or the scores of a prompt row.

    node: for a draft row its index in the tree; -1 for a committed row.
    """

    sequence: Sequence
    position: int
    top_k: int | None
    chooses: bool
    node: int = -1


@attrs.frozen
class Snapshot:
    """The states of a sequence after `n_tokens` tokens are copied to `slot` (-1: the program has none)."""

    sequence: Sequence
    n_tokens: int
    slot: int


@attrs.frozen(eq=False)
class Step:
    """A batch, and what belongs to its outputs and sequences. heads[i] is output i."""

    batch: RowBatch
    heads: tuple[Head, ...]
    parts: Mapping[Sequence, SequenceRows]
    trees: Mapping[Sequence, DraftTree]
    snapshots: tuple[Snapshot, ...]


def build_step(rows: Mapping[Sequence, int], trees: Mapping[Sequence, DraftTree], slots: SlotPool) -> Step:
    """The batch of these committed rows per sequence, with the drafts of those that have one.

    Snapshots that a cache wants are taken where a slot is free for them.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    heads: list[Head] = []
    requests: list[HeadRequest] = []
    parts: dict[Sequence, SequenceRows] = {}
    snapshots: list[Snapshot] = []
    for sequence, n_rows in rows.items():
        state = sequence.state
        assert state is not None
        first, start, end = len(token_ids), state.n_tokens, state.n_tokens + n_rows
        tree = trees.get(sequence, NO_DRAFT)
        token_ids.extend(sequence.history.tokens[start:end])
        token_ids.extend(tree.token_ids)
        positions.extend(range(start, end))
        positions.extend(_draft_positions(tree, end))
        for head in _committed_heads(sequence, start, end):
            heads.append(head)
            requests.append(HeadRequest(first + head.position - start, head.top_k))
        for head in _draft_heads(sequence, tree, end):
            heads.append(head)
            requests.append(HeadRequest(first + n_rows + head.node, head.top_k))
        taken = _snapshots(sequence, start, end, slots)
        snapshots.extend(taken)
        parts[sequence] = SequenceRows(
            first_row=first,
            start=start,
            n_committed=n_rows,
            block_table=state.block_table,
            slot=state.slot,
            draft_parents=tuple(n_rows + parent for parent in tree.parents),
            snapshots=tuple((entry.n_tokens - start - 1, entry.slot) for entry in taken if entry.slot >= 0),
        )
    batch = RowBatch(
        np.array(token_ids, np.int32), np.array(positions, np.int32), tuple(parts.values()), tuple(requests)
    )
    return Step(batch, tuple(heads), parts, trees, tuple(snapshots))


def _committed_heads(sequence: Sequence, start: int, end: int) -> list[Head]:
    heads: list[Head] = []
    last = len(sequence.history.tokens) - 1
    answers = sequence.active.request.max_tokens != 0
    if sequence.active.reads_prompt_rows:
        heads = [
            Head(sequence, position, None, chooses=False)
            for position in range(start, end)
            if sequence.wants_row(position) and not (answers and position == last)
        ]
    if end > last and answers:
        heads.append(Head(sequence, last, sequence.sampler.head_top_k(sequence.history), chooses=True))
    return heads


def _draft_positions(tree: DraftTree, end: int) -> list[int]:
    positions: list[int] = []
    for parent in tree.parents:
        positions.append(end if parent < 0 else positions[parent] + 1)
    return positions


def _draft_heads(sequence: Sequence, tree: DraftTree, end: int) -> list[Head]:
    """Every draft row is scored; penalties see its own path (rule 9)."""
    heads = []
    pushed: list[int] = []  # nodes whose tokens are in the history now: a path from the root
    for node, position in enumerate(_draft_positions(tree, end)):
        path = _path(tree, node)
        shared = 0
        while shared < len(pushed) and pushed[shared] == path[shared]:
            shared += 1
        _pop(sequence.history, len(pushed) - shared)
        for ancestor in path[shared:]:
            sequence.history.push(tree.token_ids[ancestor])
        pushed = path
        heads.append(Head(sequence, position, sequence.sampler.head_top_k(sequence.history), chooses=True, node=node))
    _pop(sequence.history, len(pushed))
    return heads


def _path(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


def _pop(history: History, count: int) -> None:
    for _ in range(count):
        history.pop()


def _snapshots(sequence: Sequence, start: int, end: int, slots: SlotPool) -> list[Snapshot]:
    taken = []
    while sequence.snapshots and sequence.snapshots[0] <= end:
        n_tokens = sequence.snapshots.pop(0)
        if n_tokens <= start:
            continue
        try:
            taken.append(Snapshot(sequence, n_tokens, slots.allocate()))
        except CapacityError:
            continue  # running sequences come first
    return taken
