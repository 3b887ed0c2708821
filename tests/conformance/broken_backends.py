"""Backends that are wrong on purpose: the reference with one mistake each; and two that are honest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from kinetic_core.errors import BackendError, NumericalError
from kinetic_core.interfaces import (
    BackendCapabilities,
    RowBatch,
    SequenceRows,
)
from kinetic_core.reference.backend import ReferenceBackend, ReferenceExecutable


class _Broken(ReferenceBackend):
    executable: type[ReferenceExecutable]

    def load(self, program: Any, source: Any, options: Any) -> ReferenceExecutable:
        super().load(program, source, options)  # its checks
        return self.executable(program, source, options)


def broken(executable: type[ReferenceExecutable]) -> type[_Broken]:
    return type(executable.__name__ + "Backend", (_Broken,), {"executable": executable, "__module__": __name__})


def committed_rows(batch: RowBatch) -> list[int]:
    return [s.first_row + offset for s in batch.sequences for offset in range(s.n_committed)]


class _Nudged(ReferenceExecutable):
    """Adds a little to some rows' logits."""

    def rows(self, batch: RowBatch) -> Sequence[int]:
        raise NotImplementedError

    def run(self, batch: RowBatch) -> None:
        super().run(batch)
        wrong = set(self.rows(batch))
        assert self._step is not None
        logits = self._step.values[self.program.logits.index].copy()
        for output, head in enumerate(batch.heads):
            if head.row in wrong:
                logits[output] += np.float32(1e-3) * (1 + np.abs(logits[output]))
        self._step.values[self.program.logits.index] = logits


class DependsOnBatchSize(_Nudged):
    def rows(self, batch: RowBatch) -> Sequence[int]:
        return range(batch.n_rows) if batch.n_rows > 128 else ()


class DependsOnStepStart(_Nudged):
    """Rows of a step that begins in the middle of a tile of 64 and has several rows."""

    def rows(self, batch: RowBatch) -> Sequence[int]:
        return [s.first_row for s in batch.sequences if s.start % 64 and s.n_committed > 1]


class DependsOnNeighbours(_Nudged):
    def rows(self, batch: RowBatch) -> Sequence[int]:
        return range(batch.n_rows) if len(batch.sequences) > 2 else ()


class DependsOnBlocks(_Nudged):
    def rows(self, batch: RowBatch) -> Sequence[int]:
        return [r for s in batch.sequences if tuple(s.block_table) == (4, 2) for r in range(batch.n_rows)]


class DraftsSeeSiblings(_Nudged):
    """A draft row whose parent is not the row before it is off."""

    def rows(self, batch: RowBatch) -> Sequence[int]:
        rows = []
        for s in batch.sequences:
            rows += [
                s.first_row + s.n_committed + i for i, p in enumerate(s.draft_parents) if p != s.n_committed + i - 1
            ]
        return rows


class DraftsAreStored(ReferenceExecutable):
    """A step with drafts leaves the first draft's state, key and value behind."""

    def run(self, batch: RowBatch) -> None:
        super().run(batch)
        assert self._step is not None
        for s in batch.sequences:
            row = s.first_row + s.n_committed
            for state in self.program.states if s.draft_parents else ():
                self._slots.arrays[state.index][s.slot] = self._step.states[state.index, row]
            for index in self._step.keys if s.draft_parents else ():
                key, value = self._step.keys[index][row], self._step.vals[index][row]
                layer = self.program.kv_layers[index]
                self._blocks.write(layer, s.block_table, s.start + s.n_committed, key, value)


class CommitOffByOne(ReferenceExecutable):
    """Commits the state, key and value of the draft before the last."""

    def commit(self, sequence: SequenceRows, accepted: Sequence[int]) -> None:
        assert self._step is not None
        step = self._step
        if len(accepted) > 1:
            last, before = (sequence.first_row + offset for offset in (accepted[-1], accepted[-2]))
            for state in self.program.states:
                step.states[state.index, last] = step.states[state.index, before]
            for index in step.keys:
                step.keys[index][last] = step.keys[index][before]
                step.vals[index][last] = step.vals[index][before]
        super().commit(sequence, accepted)


class CopyIsShallow(ReferenceExecutable):
    """Copying a slot to a higher one forgets the last state."""

    def copy_slot(self, source: int, target: int) -> None:
        kept = [array[target].copy() for array in self._slots.arrays]
        super().copy_slot(source, target)
        for array, before in list(zip(self._slots.arrays, kept, strict=True))[-1:]:
            array[target] = before


class BytesAreRounded(ReferenceExecutable):
    """A restored slot has lost its last bits."""

    def write_slot(self, slot: int, data: bytes) -> None:
        values = np.frombuffer(data, np.float32).astype(np.float16).astype(np.float32)
        super().write_slot(slot, values.tobytes())


class SnapshotOneRowLate(ReferenceExecutable):
    def run(self, batch: RowBatch) -> None:
        late = [
            attrs.evolve(s, snapshots=tuple((min(offset + 1, s.n_committed - 1), slot) for offset, slot in s.snapshots))
            for s in batch.sequences
        ]
        super().run(RowBatch(batch.token_ids, batch.positions, tuple(late), batch.heads))


class ReadsPastTheEnd(ReferenceExecutable):
    """Remembers where a slot's sequence had come to; going back below 250 restores nothing of it."""

    def run(self, batch: RowBatch) -> None:
        reached = self.__dict__.setdefault("reached", {})
        for s in batch.sequences:
            if reached.get(s.slot, 0) > 260 and 0 < s.start < 260:
                for array in self._slots.arrays:
                    array[s.slot] = 0
                if not self._slots.arrays:
                    raise BackendError("a sequence that is longer than its start")
            reached[s.slot] = s.start + s.n_committed
        super().run(batch)


class BlockCopyIsPartial(ReferenceExecutable):
    """Does not copy the last layer's first values."""

    def copy_block(self, source: int, target: int) -> None:
        super().copy_block(source, target)
        if self._blocks.values:
            self._blocks.values[-1][target, :2] = 0


class ForgetsRestored(ReferenceExecutable):
    """A commit into a slot that was written from bytes drops the last draft."""

    def write_slot(self, slot: int, data: bytes) -> None:
        super().write_slot(slot, data)
        self.__dict__.setdefault("restored", set()).add(slot)

    def commit(self, sequence: SequenceRows, accepted: Sequence[int]) -> None:
        restored = self.__dict__.get("restored", set())
        super().commit(sequence, accepted[:-1] if sequence.slot in restored else accepted)


class TiesGoElsewhere(ReferenceExecutable):
    """In a step with drafts the best candidate is the second best."""

    def candidates(self, output: int) -> Any:
        ids, scores = super().candidates(output)
        assert self._step is not None
        drafted = any(s.draft_parents for s in self._step.batch.sequences)
        return (np.roll(ids, 1), np.roll(scores, 1)) if drafted and len(ids) > 1 else (ids, scores)

    def logits(self, output: int) -> Any:
        logits = super().logits(output)
        assert self._step is not None
        drafted = any(s.draft_parents for s in self._step.batch.sequences)
        return np.roll(logits, 1) if drafted else logits


class DependsOnThreads(_Nudged):
    def rows(self, batch: RowBatch) -> Sequence[int]:
        return range(batch.n_rows) if self.options.n_threads == 3 else ()


class DependsOnLowering(_Nudged):
    def rows(self, batch: RowBatch) -> Sequence[int]:
        return range(batch.n_rows) if os.environ.get("KINETIC_SIMD") == "generic" else ()


class Inaccurate(_Nudged):
    def rows(self, batch: RowBatch) -> Sequence[int]:
        return range(batch.n_rows)


class PredictionKeepsGuesses(ReferenceExecutable):
    """A prediction step does not overwrite what an earlier one wrote at its first position."""

    def predict(self, batch: RowBatch, hidden: Any) -> None:
        if batch.n_rows < 4:
            hidden = hidden + np.float32(1e-3) * (self.__dict__.setdefault("guessed", 0) > 0)
            self.__dict__["guessed"] = 1
        super().predict(batch, hidden)


class PredictionInaccurate(ReferenceExecutable):
    def predict(self, batch: RowBatch, hidden: Any) -> None:
        super().predict(batch, hidden + np.float32(0.05))


class CommitsAnything(ReferenceExecutable):
    def commit(self, sequence: SequenceRows, accepted: Sequence[int]) -> None:
        with contextlib.suppress(BackendError):
            super().commit(sequence, accepted)


class CandidatesById(ReferenceExecutable):
    def candidates(self, output: int) -> Any:
        ids, scores = super().candidates(output)
        order = np.argsort(ids)
        return ids[order], scores[order]


class TiesGoHigh(ReferenceExecutable):
    def candidates(self, output: int) -> Any:
        ids, scores = super().candidates(output)
        order = np.lexsort((-ids, -scores))
        return ids[order], scores[order]


class TiesGoHighInDrafts(TiesGoHigh):
    """Breaks ties otherwise, but only in a step's rows after the first output."""

    def candidates(self, output: int) -> Any:
        return super().candidates(output) if output else ReferenceExecutable.candidates(self, output)


class WrapsTokens(ReferenceExecutable):
    """A token that does not exist is another one."""

    def run(self, batch: RowBatch) -> None:
        super().run(attrs.evolve(batch, token_ids=batch.token_ids % np.int32(self._vocab)))


class CutsBytes(ReferenceExecutable):
    def write_slot(self, slot: int, data: bytes) -> None:
        super().write_slot(slot, data[: len(self.read_slot(slot))])


class OneDigest(ReferenceExecutable):
    @property
    def kernel_digest(self) -> str:
        return "always"


class OneScaleOff(ReferenceExecutable):
    """Takes 16 inputs of the output layer 1 % too large, as a kernel does that reads one scale of a block wrong."""

    def __init__(self, program: Any, source: Any, options: Any) -> None:
        super().__init__(program, source, options)
        self._weights["output.weight"][:, 300:316] *= 1.01


class AlmostTheWeights(ReferenceExecutable):
    """One matrix is 1 % too large: less than rounding activations to 8 bits does, and wrong."""

    factor = 1.01

    def __init__(self, program: Any, source: Any, options: Any) -> None:
        super().__init__(program, source, options)
        self._weights["blk.0.ffn_down.weight"] *= self.factor


class NotTheWeights(AlmostTheWeights):
    factor = 2.0


class PassesNaN(ReferenceExecutable):
    def run(self, batch: RowBatch) -> None:
        with contextlib.suppress(NumericalError):
            super().run(batch)


class NoDrafts(ReferenceBackend):
    """An honest backend that can do little."""

    capabilities = BackendCapabilities(kv_types=("f16", "f32"))


class DeniesF32(ReferenceBackend):
    """Says that it has no f32 cache, and has one."""

    capabilities = BackendCapabilities(True, True, True, ("f16",))


# Module-level, so that another process finds them.
BACKENDS: dict[str, type[_Broken]] = {}
for _name, _class in list(globals().items()):
    if isinstance(_class, type) and issubclass(_class, ReferenceExecutable) and _class is not ReferenceExecutable:
        globals()[f"{_name}Backend"] = BACKENDS[_name] = broken(_class)
