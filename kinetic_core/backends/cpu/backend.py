"""The CPU backend: a program as a tape of compiled kernels, run by persistent threads."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu.kernels.constants import MAX_TOP_K
from kinetic_core.backends.cpu.layout import Lowered, Place, lay_out, resolve
from kinetic_core.backends.cpu.lowering import Lowering
from kinetic_core.backends.cpu.pools import KVPool, SlotPool, address_of, allocate, restore
from kinetic_core.backends.cpu.selection import Selection
from kinetic_core.backends.cpu.step import SKIPPED, StepArrays, check_prediction, check_table, refuse
from kinetic_core.backends.cpu.tape import Count, KernelCall, Tape, assign_phases, kernel_names
from kinetic_core.backends.cpu.target import choose_lowering
from kinetic_core.backends.cpu.weights import Weights, bytes_per_step
from kinetic_core.backends.cpu.workers import KERNELS, WorkerPool, default_threads
from kinetic_core.errors import BackendError, NumericalError, describe
from kinetic_core.interfaces.backend import BackendCapabilities, Executable, KernelBackend, LoadOptions
from kinetic_core.interfaces.batch import BLOCK_TOKENS, RowBatch, SequenceRows
from kinetic_core.program import ops, ranking
from kinetic_core.program.program import KV_BYTES
from kinetic_core.program.values import Value

if TYPE_CHECKING:
    from kinetic_core.gguf.source import TensorSource
    from kinetic_core.program.program import Program

PROFILE_VARIABLE = "KINETIC_PROFILE"
"""Set to 1: `statistics` says where the time of the steps went."""


@attrs.frozen(eq=False)
class _Pass:
    """The trunk or the prediction block, ready to run: its tape, and what is read after it.

    hidden: f32[max_rows, d_model]; logits: f32[max_outputs, vocab].
    """

    tape: Tape
    hidden: npt.NDArray[np.float32]
    logits: npt.NDArray[np.float32]


class CpuExecutable(Executable):
    """A program with its packed weights, pools, tapes and threads."""

    def __init__(self, program: Program, source: TensorSource, options: LoadOptions) -> None:
        self.program = program
        self.options = options
        self._n_threads = options.n_threads or default_threads()
        self._weights = Weights(program, source, self._n_threads, options.progress)
        self._blocks = KVPool(program.kv_layers, options.n_blocks, options.kv_type)
        self._slots = SlotPool(program.states, options.n_slots)
        vocab = min((op.weight.shape[0] for op in program.all_ops if isinstance(op, ops.Embedding)), default=2**31)
        self._step = StepArrays(program, options, vocab, self._n_threads)
        self._lowering = Lowering(
            program, self._weights, options, self._step, self._blocks, self._slots, self._n_threads
        )
        self._build()
        self._workers: WorkerPool | None = WorkerPool(self._n_threads)
        # For an executable that nobody closes: its threads end with it, at the latest at exit.
        weakref.finalize(self, self._workers.close)
        self._batch: RowBatch | None = None
        self._open_drafts: set[int] = set()
        self._bytes_per_step = bytes_per_step(program, self._weights)

    def _build(self) -> None:
        """Lower the trunk and the prediction block. Their activations share an arena: one runs after the other."""
        program, options, prediction = self.program, self.options, self.program.prediction
        self._selection = Selection(program.logits.width, self._step, options.max_outputs)
        trunk = self._lowering.run(program.ops)
        parts = [(trunk, program.hidden, program.logits)]
        self._given: npt.NDArray[np.float32] | None = None
        if prediction is not None:
            block = self._lowering.run(prediction.ops)
            self._given = block.given
            parts.append((block, prediction.hidden, prediction.logits))
        made = [self._lay_out(*part) for part in parts]
        self._arena = allocate(max(size for *_, size in made), np.uint8, "activations")
        names = kernel_names([*(call for calls, *_ in made for call in calls), *trunk.commit])
        kernel_compile.prepare([*names, *KERNELS], options.progress)
        passes = []
        for (_, hidden, logits), (calls, phases, offsets, _) in zip(parts, made, strict=True):
            tape = self._make_tape(calls, phases, offsets)
            hidden_rows = self._view(hidden, offsets, options.max_rows)
            passes.append(_Pass(tape, hidden_rows, self._view(logits, offsets, options.max_outputs)))
        self._trunk = self._last = passes[0]
        self._block = passes[1] if prediction is not None else None
        self._commit_tape = self._make_tape(trunk.commit, assign_phases(trunk.commit), {})
        self._profile: npt.NDArray[np.int64] | None = None
        self._profiled_steps = 0
        if os.environ.get(PROFILE_VARIABLE) == "1":
            self._profile = np.zeros((self._n_threads, len(self._trunk.tape.calls)), np.int64)

    def _lay_out(self, lowered: Lowered, hidden: Value, logits: Value) -> tuple[Any, ...]:
        """Calls, their phases, the offsets of their buffers in the arena, and its size."""
        calls = [*lowered.calls, *self._selection.calls(logits)]
        phases = assign_phases(calls)
        lasting = [("value", self._lowering.base(value)[0].index) for value in (hidden, logits)]
        return calls, phases, *lay_out(calls, phases, lowered.sizes, lasting)

    def _view(self, value: Value, offsets: dict[Any, int], n_rows: int) -> npt.NDArray[np.float32]:
        """A value where it lies in the arena: f32[n_rows, width]."""
        base, offset = self._lowering.base(value)
        at = offsets["value", base.index]
        rows = self._arena[at : at + 4 * n_rows * base.width].view(np.float32).reshape(n_rows, base.width)
        return rows[:, offset // 4 : offset // 4 + value.width]

    def _make_tape(self, calls: Sequence[KernelCall], phases: Sequence[int], offsets: dict[Any, int]) -> Tape:
        base = address_of(self._arena)

        def where(place: Place) -> int:
            return base + int(offsets[place.name]) + place.offset

        resolved = [
            KernelCall(
                call.kernel, resolve(call.args, where), call.items, call.reads, call.writes, call.grain, call.label
            )
            for call in calls
        ]
        return Tape(resolved, phases, lambda name: int(kernel_compile.get(name).address), self._n_threads)

    # running

    @property
    def max_rows(self) -> int:
        """As the options say."""
        return self.options.max_rows

    def run(self, batch: RowBatch) -> None:
        """Run one step. Raises BackendError for a batch that breaks the contract, NumericalError for a NaN logit."""
        self._begin(batch)
        if self._profile is not None:
            self._profiled_steps += 1
        self._run_pass(self._trunk, batch, self._profile)
        self._open_drafts = {sequence.first_row for sequence in batch.sequences}

    def predict(self, batch: RowBatch, hidden: npt.NDArray[np.float32]) -> None:
        """Run the prediction block. Raises BackendError without one, for drafts and for a bad batch or `hidden`."""
        self._check_open()
        if self._block is None or self._given is None:
            raise BackendError(describe("the model has no prediction block"))
        self._begin(batch)
        check_prediction(batch, hidden, self.program.hidden.width)
        # A copy, before anything is computed: `hidden` may be a view of what this run overwrites.
        self._given[: batch.n_rows] = hidden
        self._run_pass(self._block, batch)

    def _begin(self, batch: RowBatch) -> None:
        """Forget the last step, its drafts too; check the batch and fill in the arrays that kernels read."""
        self._check_open()
        self._batch = None
        self._open_drafts.clear()
        self._step.fill(batch)
        if self._lowering.rope_tables:
            n_positions = int(batch.positions.max()) + 1
            for table in self._lowering.rope_tables.values():
                table.ensure(n_positions)

    def _run_pass(self, part: _Pass, batch: RowBatch, profile: npt.NDArray[np.int64] | None = None) -> None:
        status = self._selection.status
        status[0] = 0
        part.tape.prepare(self._step.counts)
        self._check_open().run(part.tape, profile)
        self._last = part
        if status[0]:
            raise NumericalError(describe("a logit is NaN", where=self._nan_place(batch)))
        self._batch = batch

    def _nan_place(self, batch: RowBatch) -> str:
        for output, head in enumerate(batch.heads):
            if np.isnan(self._last.logits[output]).any():
                return f"row {head.row} of the step"
        return "the step"

    # results

    def logits(self, output: int) -> npt.NDArray[np.float32]:
        """f32[vocab] of an output whose `top_k` was None."""
        batch = self._output_batch(output)
        if batch.heads[output].top_k is not None:
            raise BackendError(describe(f"output {output} asked for candidates, not for the whole distribution"))
        return self._last.logits[output]

    def candidates(self, output: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """The best `top_k` tokens and their scores, best first; then those of `exact_ids` that are not among them."""
        head = self._output_batch(output).heads[output]
        if head.top_k is None:
            raise BackendError(describe(f"output {output} asked for the whole distribution, not for candidates"))
        k = min(head.top_k, self.program.logits.width)
        scores = self._last.logits[output]
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

    def hidden(self, first_row: int, n_rows: int) -> npt.NDArray[np.float32]:
        """f32[n_rows, d_model] of the last step, valid until the next."""
        self._check_open()
        if self._batch is None or not 0 <= first_row <= first_row + n_rows <= self._batch.n_rows:
            raise BackendError(describe("no such rows of the last step", got=f"{n_rows} from {first_row}"))
        return self._last.hidden[first_row : first_row + n_rows]

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
        self._check_open()
        figures: dict[str, Any] = {
            "n_threads": self._n_threads,
            "lowering": choose_lowering(),
            "bytes_per_token": self._bytes_per_step,
            "calls": len(self._trunk.tape.calls),
            "phases": self._trunk.tape.n_phases,
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
        for call, spent in zip(self._trunk.tape.calls, self._profile.sum(axis=0).tolist(), strict=True):
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
        del self._weights, self._lowering, self._step, self._selection, self._given
        del self._blocks, self._slots, self._arena, self._trunk, self._block, self._last, self._commit_tape

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

    capabilities = BackendCapabilities(
        supports_drafts=True, supports_snapshots=True, supports_prediction=True, kv_types=("f16", "f32")
    )

    def load(self, program: Program, source: TensorSource, options: LoadOptions) -> CpuExecutable:
        """Pack the weights, lower the program, compile what kernels are missing, start the threads."""
        if options.kv_type not in KV_BYTES:
            raise BackendError(describe("unknown type of the cache", got=options.kv_type, expected="f16 or f32"))
        return CpuExecutable(program, source, options)
