"""The CPU backend: a program as a tape of compiled kernels, run by persistent threads."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu.kernels.constants import MAX_TOP_K
from kinetic_core.backends.cpu.layout import Place, lay_out, resolve
from kinetic_core.backends.cpu.lowering import Lowered, Lowering
from kinetic_core.backends.cpu.pools import KVPool, SlotPool, address_of, allocate, restore
from kinetic_core.backends.cpu.selection import lower_selection
from kinetic_core.backends.cpu.step import SKIPPED, StepArrays, check_table, refuse
from kinetic_core.backends.cpu.tape import Count, KernelCall, Tape, assign_phases
from kinetic_core.backends.cpu.target import choose_lowering
from kinetic_core.backends.cpu.weights import Weights, bytes_per_step
from kinetic_core.backends.cpu.workers import KERNELS, WorkerPool, default_threads
from kinetic_core.errors import BackendError, NumericalError, describe
from kinetic_core.interfaces.backend import BackendCapabilities, Executable, KernelBackend, LoadOptions
from kinetic_core.interfaces.batch import BLOCK_TOKENS, RowBatch, SequenceRows
from kinetic_core.program import ops, ranking
from kinetic_core.program.program import KV_BYTES

if TYPE_CHECKING:
    from kinetic_core.gguf.source import TensorSource
    from kinetic_core.program.program import Program

PROFILE_VARIABLE = "KINETIC_PROFILE"
"""Set to 1: `statistics` says where the time of the steps went."""


class CpuExecutable(Executable):
    """A program with its packed weights, pools, tape and threads."""

    def __init__(self, program: Program, source: TensorSource, options: LoadOptions) -> None:
        self.program = program
        self.options = options
        self._n_threads = options.n_threads or default_threads()
        self._weights = Weights(program, source, self._n_threads, options.progress)
        self._blocks = KVPool(program.kv_layers, options.n_blocks, options.kv_type)
        self._slots = SlotPool(program.states, options.n_slots)
        vocab = min((op.weight.shape[0] for op in program.ops if isinstance(op, ops.Embedding)), default=2**31)
        self._step = StepArrays(program, options, vocab, self._n_threads)
        self._lowering = Lowering(
            program, self._weights, options, self._step, self._blocks, self._slots, self._n_threads
        )
        self._build(self._lowering.run())
        self._workers: WorkerPool | None = WorkerPool(self._n_threads)
        # For an executable that nobody closes: its threads end with it, at the latest at exit.
        weakref.finalize(self, self._workers.close)
        self._batch: RowBatch | None = None
        self._open_drafts: set[int] = set()
        self._bytes_per_step = bytes_per_step(program, self._weights)

    def _build(self, lowered: Lowered) -> None:
        program, options = self.program, self.options
        logits_at = (Place(("value", program.logits.index)), 4 * program.logits.width)
        self._selection = lower_selection(program.logits, logits_at, self._step, options.max_outputs)
        calls = [*lowered.calls, *self._selection.calls]
        phases = assign_phases(calls)
        lasting = [("value", program.logits.index)]
        offsets, size = lay_out(calls, phases, lowered.sizes, lasting)
        self._arena = allocate(size, np.uint8, "activations")
        base = address_of(self._arena)

        def where(place: Place) -> int:
            return base + int(offsets[place.name]) + place.offset

        names = {call.kernel for call in (*calls, *lowered.commit)}
        kernel_compile.prepare([*names, *KERNELS], options.progress)
        self._tape = self._make_tape(calls, phases, where)
        self._commit_tape = self._make_tape(lowered.commit, assign_phases(lowered.commit), where)
        at = offsets["value", program.logits.index]
        n_bytes = 4 * options.max_outputs * program.logits.width
        self._logits = self._arena[at : at + n_bytes].view(np.float32).reshape(options.max_outputs, -1)
        self._profile: npt.NDArray[np.int64] | None = None
        self._profiled_steps = 0
        if os.environ.get(PROFILE_VARIABLE) == "1":
            self._profile = np.zeros((self._n_threads, len(calls)), np.int64)

    def _make_tape(self, calls: Sequence[KernelCall], phases: Sequence[int], where: Any) -> Tape:
        resolved = [
            KernelCall(
                call.kernel, resolve(call.args, where), call.items, call.reads, call.writes, call.grain, call.label
            )
            for call in calls
        ]
        return Tape(resolved, phases, lambda name: int(kernel_compile.get(name).address), self._n_threads)

    # running

    def run(self, batch: RowBatch) -> None:
        """Run one step. Raises BackendError for a batch that breaks the contract, NumericalError for a NaN logit."""
        workers = self._check_open()
        self._batch = None
        self._open_drafts.clear()
        step = self._step
        step.fill(batch)
        if self._lowering.rope_tables:
            n_positions = int(batch.positions.max()) + 1
            for table in self._lowering.rope_tables.values():
                table.ensure(n_positions)
        status = self._selection.status
        status[0] = 0
        self._tape.prepare(step.counts)
        if self._profile is not None:
            self._profiled_steps += 1
        workers.run(self._tape, self._profile)
        if status[0]:
            raise NumericalError(describe("a logit is NaN", where=self._nan_place(batch)))
        self._open_drafts = {sequence.first_row for sequence in batch.sequences}
        self._batch = batch

    def _nan_place(self, batch: RowBatch) -> str:
        for output, head in enumerate(batch.heads):
            if np.isnan(self._logits[output]).any():
                return f"row {head.row} of the step"
        return "the step"

    # results

    def logits(self, output: int) -> npt.NDArray[np.float32]:
        """f32[vocab] of an output whose `top_k` was None."""
        batch = self._output_batch(output)
        if batch.heads[output].top_k is not None:
            raise BackendError(describe(f"output {output} asked for candidates, not for the whole distribution"))
        return self._logits[output]

    def candidates(self, output: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """The best `top_k` tokens and their scores, best first; then those of `exact_ids` that are not among them."""
        head = self._output_batch(output).heads[output]
        if head.top_k is None:
            raise BackendError(describe(f"output {output} asked for the whole distribution, not for candidates"))
        k = min(head.top_k, self.program.logits.width)
        scores = self._logits[output]
        if head.top_k <= MAX_TOP_K:
            ids, best = self._selection.ids[output, :k].copy(), self._selection.scores[output, :k].copy()
        else:
            ids = ranking.best(scores, k).astype(np.int32)
            best = scores[ids]
        if head.exact_ids:
            others = np.setdiff1d(np.array(head.exact_ids, np.int32), ids)
            others = others[np.argsort(-scores[others], kind="stable")]
            ids, best = np.concatenate([ids, others]), np.concatenate([best, scores[others]])
        return ids, best

    def _output_batch(self, output: int) -> RowBatch:
        self._check_open()
        if self._batch is None or not 0 <= output < len(self._batch.heads):
            raise BackendError(describe("no such output of the last step", got=output))
        return self._batch

    # drafts

    def commit(self, sequence: SequenceRows, accepted: Sequence[int]) -> None:
        """Store the accepted drafts' keys and values, replay their recurrences. Raises BackendError for no path."""
        workers = self._check_open()
        batch = self._batch
        if batch is None or sequence.first_row not in self._open_drafts:
            raise BackendError(describe("no drafts of the last step to commit", got=f"row {sequence.first_row}"))
        ran = next(s for s in batch.sequences if s.first_row == sequence.first_row)
        where = f"the sequence at row {sequence.first_row}"
        parent = ran.n_committed - 1
        for offset in accepted:
            drafted = ran.n_committed <= offset < ran.n_rows
            if not drafted or ran.draft_parents[offset - ran.n_committed] != parent:
                refuse("not a path of drafts", where, list(accepted), "parent before child")
            parent = offset
        n_tokens = ran.start + ran.n_committed + len(accepted)
        if self.program.kv_layers:
            check_table(sequence, n_tokens, self.options, where)
        self._open_drafts.discard(ran.first_row)
        if not accepted:
            return
        step = self._step
        rows = np.array([ran.first_row + offset for offset in accepted], np.int64)
        step.row_blocks[: step.n_rows] = SKIPPED
        if self.program.kv_layers:
            table = np.asarray(sequence.block_table)
            step.row_blocks[rows] = table[step.positions[rows] // BLOCK_TOKENS]
        kept = step.sequences[0].copy()
        numbers = np.searchsorted(step.draft_rows[: step.n_drafts], rows)
        step.sequences[0] = (0, len(rows), 0, ran.slot, address_of(numbers), 0, 0, 0)
        counts = [0] * len(Count)
        counts[Count.FIXED], counts[Count.ROWS], counts[Count.SEQUENCES] = 1, step.n_rows, 1
        self._commit_tape.prepare(counts)
        workers.run(self._commit_tape)
        step.sequences[0] = kept

    # state

    def copy_block(self, source: int, target: int) -> None:
        """Copy one KV block of every layer."""
        self._check_open()
        self._blocks.view(target)[:] = self._blocks.view(source)

    def read_block(self, block: int) -> bytes:
        """The block's bytes: per layer and key head keys, then values, in the cache type."""
        self._check_open()
        return self._blocks.view(block).tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        """Restore what `read_block` gave; BackendError when the length differs."""
        self._check_open()
        restore(self._blocks.view(block), data, "a KV block")

    def clear_slot(self, slot: int) -> None:
        """Zero a slot's recurrent states."""
        self._check_open()
        self._slots.view(slot)[:] = 0

    def copy_slot(self, source: int, target: int) -> None:
        """Copy one slot's recurrent states."""
        self._check_open()
        self._slots.view(target)[:] = self._slots.view(source)

    def read_slot(self, slot: int) -> bytes:
        """The slot's states in the program's order, f32."""
        self._check_open()
        return self._slots.view(slot).tobytes()

    def write_slot(self, slot: int, data: bytes) -> None:
        """Restore what `read_slot` gave; BackendError when the length differs."""
        self._check_open()
        restore(self._slots.view(slot), data, "a slot")

    @property
    def kernel_digest(self) -> str:
        """Of the machine code, the backend's own files and the type of the cache."""
        return backend_digest(self.options.kv_type)

    def statistics(self) -> dict[str, Any]:
        """Threads, lowering, bytes of the file that a step reads, what was converted, and the profile if asked for."""
        figures: dict[str, Any] = {
            "n_threads": self._n_threads,
            "lowering": choose_lowering(),
            "bytes_per_token": self._bytes_per_step,
            "calls": len(self._tape.calls),
            "phases": self._tape.n_phases,
            "notices": list(self._weights.notices),
        }
        if self._profile is not None:
            figures["profiled_steps"] = self._profiled_steps
            figures["profile"] = self._profile_shares()
        return figures

    def _profile_shares(self) -> dict[str, float]:
        """Share of the kernels' time by label, the largest first; all threads together."""
        assert self._profile is not None
        ticks: dict[str, int] = {}
        for call, spent in zip(self._tape.calls, self._profile.sum(axis=0).tolist(), strict=True):
            ticks[call.label] = ticks.get(call.label, 0) + spent
        total = max(1, sum(ticks.values()))
        return {label: spent / total for label, spent in sorted(ticks.items(), key=lambda item: -item[1])}

    def close(self) -> None:
        """Stop the threads, free weights and pools."""
        if self._workers is None:
            return
        self._workers.close()
        self._workers = None
        self._batch = None
        # The lowering holds the pools, the rope tables and the room of drafts, too.
        del self._weights, self._lowering, self._step, self._selection
        del self._blocks, self._slots, self._arena, self._logits, self._tape, self._commit_tape

    def _check_open(self) -> WorkerPool:
        if self._workers is None:
            raise BackendError(describe("the model was closed"))
        return self._workers


def backend_digest(kv_type: str) -> str:
    """Names everything that could change a bit of a saved state: machine code, this package's files, cache type."""
    from pathlib import Path

    digest = hashlib.sha256(f"{kernel_compile.kernel_digest()} kv {kv_type}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


class CpuBackend(KernelBackend):
    """Compiled SIMD kernels on the cores of this computer."""

    capabilities = BackendCapabilities(supports_drafts=True, supports_snapshots=True, kv_types=("f16", "f32"))

    def load(self, program: Program, source: TensorSource, options: LoadOptions) -> CpuExecutable:
        """Pack the weights, lower the program, compile what kernels are missing, start the threads."""
        if options.kv_type not in KV_BYTES:
            raise BackendError(describe("unknown type of the cache", got=options.kv_type, expected="f16 or f32"))
        return CpuExecutable(program, source, options)
