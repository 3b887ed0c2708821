"""Steps in a few words: parts of sequences in, all rows' logits out."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from kinetic_core.gguf import MemoryTensors
from kinetic_core.interfaces import Executable, HeadRequest, KernelBackend, LoadOptions, RowBatch, SequenceRows
from kinetic_core.program import Program, ProgramBuilder
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend, ReferenceExecutable
from kinetic_core.reference.head import FullHead


@attrs.frozen
class Part:
    """Rows of one sequence. drafts: (token, offset of the parent row)."""

    tokens: tuple[int, ...]
    start: int = 0
    table: tuple[int, ...] = (0,)
    slot: int = 0
    drafts: tuple[tuple[int, int], ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()


def make_batch(*parts: Part, heads: list[HeadRequest] | None = None) -> RowBatch:
    tokens: list[int] = []
    positions: list[int] = []
    sequences = []
    for part in parts:
        own = [part.start + i for i in range(len(part.tokens))]
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
    every = [HeadRequest(row, None) for row in range(len(tokens))]
    return RowBatch(
        np.array(tokens, np.int32), np.array(positions, np.int32), tuple(sequences), every if heads is None else heads
    )


def step(executable, *parts: Part) -> list[np.ndarray]:
    """Run one step; per part the logits of its rows, f32[rows, vocab]."""
    batch = make_batch(*parts)
    executable.run(batch)
    logits = np.array([executable.logits(row) for row in range(batch.n_rows)])  # a copy: valid until the next step
    return [logits[s.first_row : s.first_row + s.n_rows] for s in batch.sequences]


OPTIONS = LoadOptions(kv_type="f16", n_blocks=6, n_slots=6, max_rows=400, max_outputs=400)


def load(architecture, source, backend: type[KernelBackend] = ReferenceBackend, **options) -> Executable:
    program = record_program(architecture(source), FullHead(), source)
    return backend().load(program, source, attrs.evolve(OPTIONS, **options))


def load_program(
    tensors: dict[str, np.ndarray], build: Callable[[ProgramBuilder], object], **options
) -> ReferenceExecutable:
    """An executable of a hand-written program whose logits are what `build` returns, for every wanted row."""
    source = MemoryTensors({}, tensors)
    b = ProgramBuilder({name: info.shape for name, info in source.tensors.items()})
    hidden = build(b)
    program: Program = b.finish(hidden, b.gather_outputs(hidden))
    return ReferenceBackend().load(program, source, attrs.evolve(OPTIONS, **options))
