"""Plugins that are wrong on purpose, each in one way: the reference with one mistake, the miniature with another."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from kinetic_core.errors import BackendError, NumericalError, TensorError
from kinetic_core.interfaces import (
    ArchitectureCapabilities,
    BackendCapabilities,
    Draft,
    Drafter,
    DrafterCapabilities,
    DraftTree,
    RowBatch,
    SequenceRows,
    TinyVariant,
)
from kinetic_core.reference.backend import ReferenceBackend, ReferenceExecutable
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.tiny_hybrid import TinyHybrid


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


# Module-level, so that another process finds them.
BACKENDS: dict[str, type[_Broken]] = {}
for _name, _class in list(globals().items()):
    if isinstance(_class, type) and issubclass(_class, ReferenceExecutable) and _class is not ReferenceExecutable:
        globals()[f"{_name}Backend"] = BACKENDS[_name] = broken(_class)


# architectures


class IgnoresUnknown(TinyHybrid):
    """Lists as ignored whatever it does not know."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._names = [name for name in source.tensors if "unheard_of" in name]

    def ignored_tensors(self) -> Sequence[str]:
        return self._names


class ToleratesMissing(TinyHybrid):
    """Without its feed-forward layer a block goes on as it is."""

    def _feed_forward(self, block: Any, y: Any, suffix: str = "") -> Any:
        return super()._feed_forward(block, y, suffix) if block.has(f"ffn_up{suffix}.weight") else y

    def ignored_tensors(self) -> Sequence[str]:
        return [f"blk.{n}.ffn_{m}.weight" for n in range(self.n_layers) for m in ("gate", "down")]


class NamelessShapeError(TinyHybrid):
    def build(self, b: Any) -> Any:
        try:
            return super().build(b)
        except TensorError as error:
            raise TensorError("something does not fit" if "shape" in str(error) else str(error)) from None


class GuessesMissingKeys(TinyHybrid):
    def __init__(self, source: Any) -> None:
        from kinetic_core.gguf import MemoryTensors, read_tensor

        if "tiny-hybrid.rope.freq_base" not in source.metadata:
            metadata = {**source.metadata.raw, "tiny-hybrid.rope.freq_base": 10000.0}
            source = MemoryTensors(metadata, {name: read_tensor(source, name) for name in source.tensors})
        super().__init__(source)


class RouterBiasIsOptional(TinyHybrid):
    """Routes by sigmoid without the bias where the file has none, although its metadata asks for it."""

    def _experts(self, b: Any, block: Any, y: Any) -> Any:
        asked, self.sigmoid_routing = self.sigmoid_routing, block.has("exp_probs_b.bias")
        mixed = super()._experts(b, block, y)
        self.sigmoid_routing = asked
        return mixed


class DeclaresTooMuch(TinyHybrid):
    """Says that norms are optional, and needs them."""

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        return [dataclasses.replace(v, optional=(*v.optional, "blk.*.ssm_norm.weight")) for v in super().tiny()]


class NeverWithoutOutput(TinyHybrid):
    """Shows no file without an output layer, and says that there are some."""

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        return [variant for variant in super().tiny() if "output.weight" in variant.tensors]


class NamesAnotherKey(TinyHybrid):
    def __init__(self, source: Any) -> None:
        if "tiny-hybrid.rope.freq_base" not in source.metadata:
            source.metadata.get_float("tiny-hybrid.rope.frequency_base")
        super().__init__(source)


class AnotherDefault(TinyHybrid):
    """Uses three experts where the key is missing, and says that it uses one."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        if "tiny-hybrid.expert_used_count" not in source.metadata:
            self.n_experts_used = 3


class ReadsPastTheReads(TinyHybrid):
    """Takes a key from the raw metadata, so that nobody knows that it matters."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.embedding_scale *= source.metadata.raw.get("tiny-hybrid.extra", 1.0)

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        return [dataclasses.replace(v, metadata={**v.metadata, "extra": 2.0}) for v in super().tiny()]


class DeniesWindow(TinyHybrid):
    capabilities = ArchitectureCapabilities(has_recurrent_state=True, has_prediction_block=True, has_experts=True)


class ClaimsExperts(TinyHybrid):
    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        return [variant for variant in super().tiny() if "experts" not in variant.name]


class TwoOfAName(TinyHybrid):
    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        variants = list(super().tiny())
        return [*variants, variants[0]]


class Narrow(TinyHybrid):
    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        return [variant for variant in super().tiny() if "wide" not in variant.name]


class NoDrafts(ReferenceBackend):
    """An honest backend that can do little."""

    capabilities = BackendCapabilities(kv_types=("f16", "f32"))


class DeniesF32(ReferenceBackend):
    """Says that it has no f32 cache, and has one."""

    capabilities = BackendCapabilities(True, True, True, ("f16",))


# drafters


class LastTokens(Drafter):
    """Proposes the sequence's own last three tokens: honest, and rarely right."""

    capabilities = DrafterCapabilities()

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.executable: Any = None

    def attach(self, executable: Any) -> None:
        self.executable = executable

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        self.tokens[sequence_id] = list(token_ids)

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        self.tokens[sequence_id].extend(token_ids)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        tokens = self.tokens[sequence_id][-min(3, max_tokens) :]
        return Draft(DraftTree.chain(tokens), (0.5,) * len(tokens))

    def end(self, sequence_id: int) -> None:
        del self.tokens[sequence_id]


class MeddlesWithState(LastTokens):
    """Changes the model's state while it guesses."""

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        for slot in range(6):
            self.executable.clear_slot(slot)
        return super().propose(sequence_id, max_tokens)


class FailsBesideOthers(LastTokens):
    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        if self.tokens:
            raise RuntimeError("one at a time")
        super().begin(sequence_id, token_ids, salt)


class TooLong(LastTokens):
    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        tokens = (1,) * (max_tokens + 1)
        return Draft(DraftTree.chain(tokens), (0.5,) * len(tokens))


class Branches(LastTokens):
    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        n = min(2, max_tokens)
        return Draft(DraftTree((1, 2)[:n], (-1, -1)[:n]), (0.5,) * n)


class LooksAtHidden(LastTokens):
    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        self.executable.hidden(0, 1)
        return super().propose(sequence_id, max_tokens)


class Remembers(LastTokens):
    """Proposes what another sequence ended with."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[int] = [0]

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        return Draft(DraftTree.chain(self.last[-1:]), (0.5,))

    def end(self, sequence_id: int) -> None:
        self.last = self.tokens[sequence_id]
        super().end(sequence_id)


class MixesTenants(Remembers):
    capabilities = DrafterCapabilities(learns_across_requests=True)


# heads


class ScaledHead(FullHead):
    """Multiplies the logits: the same order, other scores."""

    def record(self, b: Any, hidden: Any, weight: Any, scale: float) -> Any:
        return super().record(b, hidden, weight, scale * 1.5)


class ReversedHead(FullHead):
    def record(self, b: Any, hidden: Any, weight: Any, scale: float) -> Any:
        return super().record(b, hidden, weight, -scale)
