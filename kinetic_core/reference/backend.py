"""Interprets a program with the functions of `kinetic_core.reference.ops`: slow, and plainly right.

Every row is computed by itself from its path: committed rows of a sequence one after the other, a draft row from its
parent's states and from the keys and values of its ancestors. Nothing is shared between rows, so a row's bits do not
depend on the others. `commit` stores what the step computed for the accepted drafts, which is what running the same
tokens plainly would have computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.errors import BackendError, NumericalError, TensorError, describe
from kinetic_core.gguf import read_tensor
from kinetic_core.interfaces.backend import BackendCapabilities, Executable, KernelBackend, LoadOptions
from kinetic_core.interfaces.batch import RowBatch, SequenceRows
from kinetic_core.program import ops
from kinetic_core.program.values import RecurrentState, Value, Weight
from kinetic_core.reference import ops as truth
from kinetic_core.reference.checks import check_batch, check_prediction, check_table
from kinetic_core.reference.ops import F32, F64
from kinetic_core.reference.state import KV_DTYPES, Floats, KVBlocks, StateSlots

if TYPE_CHECKING:
    from kinetic_core.gguf.source import TensorSource
    from kinetic_core.program.program import Program

Advance = Callable[[int, F32], tuple[F32, F32]]
"""(row of the batch, state before it) -> (output row, state after it)."""


def parent_offset(sequence: SequenceRows, offset: int) -> int:
    """Offset of a row's parent row in the same step; -1 for the sequence's first row, whose parent came earlier."""
    if offset < sequence.n_committed:
        return offset - 1
    return sequence.draft_parents[offset - sequence.n_committed]


def draft_path(sequence: SequenceRows, offset: int) -> list[int]:
    """Offsets of the draft rows on a row's path, ancestors first, the row itself last; empty for a committed row."""
    path: list[int] = []
    while offset >= sequence.n_committed:
        path.insert(0, offset)
        offset = parent_offset(sequence, offset)
    return path


@attrs.define(eq=False)
class _Step:
    """One step's values, and what its drafts left until somebody commits them.

    values: value index -> f32[rows or outputs, width].
    hidden, logits: the values that are read after the step.
    given: the hidden states that a prediction step starts from.
    keys, vals: KV layer index -> all rows' keys and values [rows, kv_heads, head_dim], rounded to the cache type.
    states: (state index, row of a draft) -> the state after that row.
    open_drafts: first rows of the sequences whose drafts may still be committed.
    """

    batch: RowBatch
    hidden: Value
    logits: Value
    given: F32 | None = None
    values: dict[int, F32] = attrs.field(factory=dict)
    keys: dict[int, Floats] = attrs.field(factory=dict)
    vals: dict[int, Floats] = attrs.field(factory=dict)
    states: dict[tuple[int, int], F32] = attrs.field(factory=dict)
    open_drafts: set[int] = attrs.field(factory=set)

    def __getitem__(self, value: Value) -> F32:
        return self.values[value.index]

    def put(self, value: Value, rows: Iterable[F32]) -> None:
        listed = list(rows)
        self.values[value.index] = np.stack(listed) if listed else np.zeros((0, value.width), np.float32)


class ReferenceExecutable(Executable):
    """A program with its weights in float64, and its pools."""

    def __init__(self, program: Program, source: TensorSource, options: LoadOptions) -> None:
        self.program = program
        self.options = options
        self._weights: dict[str, F64] = {}
        for number, weight in enumerate(program.weights):
            if options.progress is not None:
                options.progress("reading weights", number / len(program.weights))
            self._weights[weight.name] = _read(source, weight)
        if options.progress is not None:
            options.progress("reading weights", 1.0)
        self._blocks = KVBlocks(program.kv_layers, options.n_blocks, options.kv_type)
        self._slots = StateSlots(program.states, options.n_slots)
        self._vocab = min(op.weight.shape[0] for op in program.all_ops if isinstance(op, ops.Embedding))
        self._step: _Step | None = None
        self._closed = False

    # running

    @property
    def max_rows(self) -> int:
        """As the options say."""
        return self.options.max_rows

    def run(self, batch: RowBatch) -> None:
        """Run one step. Raises BackendError for a batch that breaks the contract, NumericalError for a NaN logit."""
        self._check_open()
        check_batch(self.program, batch, self.options, self._vocab)
        step = _Step(batch, self.program.hidden, self.program.logits)
        self._run_ops(self.program.ops, step)
        step.open_drafts = {sequence.first_row for sequence in batch.sequences}

    def predict(self, batch: RowBatch, hidden: npt.NDArray[np.float32]) -> None:
        """Run the prediction block. Raises BackendError without one, for drafts and for a bad batch or `hidden`."""
        self._check_open()
        prediction = self.program.prediction
        if prediction is None:
            raise BackendError(describe("the model has no prediction block"))
        check_batch(self.program, batch, self.options, self._vocab)
        check_prediction(batch, hidden, self.program.hidden.width)
        self._run_ops(prediction.ops, _Step(batch, prediction.hidden, prediction.logits, given=hidden))

    def _run_ops(self, program_ops: Sequence[ops.Op], step: _Step) -> None:
        self._step = None
        for op in program_ops:
            self._run_op(op, step)
        for output, head in enumerate(step.batch.heads):
            if np.isnan(step[step.logits][output]).any():
                raise NumericalError(describe("a logit is NaN", where=f"row {head.row} of the step"))
        self._step = step

    def _weight(self, weight: Weight) -> F64:
        return self._weights[weight.name]

    def _optional(self, weight: Weight | None) -> F64 | None:
        return None if weight is None else self._weights[weight.name]

    def _run_op(self, op: ops.Op, step: _Step) -> None:
        match op:
            case ops.Embedding():
                table = self._weight(op.weight)
                step.put(op.out, (truth.embedding(table, int(t), op.scale) for t in step.batch.token_ids))
            case ops.GatherOutputs():
                step.put(op.out, (step[op.x][head.row] for head in step.batch.heads))
            case ops.RmsNorm():
                weight = self._weight(op.weight)
                step.put(op.out, (truth.rms_norm(x, weight, op.eps, op.group_width) for x in step[op.x]))
            case ops.L2Norm():
                step.put(op.out, (truth.l2_norm(x, op.eps, op.group_width, op.scale) for x in step[op.x]))
            case ops.Linear():
                for out, matrix, bias_weight in zip(op.outs, op.weights, op.biases, strict=True):
                    weight, bias = self._weight(matrix), self._optional(bias_weight)
                    step.put(out, [truth.linear(x, weight, bias) for x in step[op.x]])
            case ops.Add():
                step.put(op.out, (truth.add(a, b, op.factor) for a, b in _rows(step[op.a], step[op.b])))
            case ops.Multiply():
                step.put(op.out, (truth.multiply(a, b) for a, b in _rows(step[op.a], step[op.b])))
            case ops.Scale():
                step.put(op.out, (truth.scale(x, op.factor) for x in step[op.x]))
            case ops.Slice():
                step.put(op.out, (x[op.start : op.start + op.out.width] for x in step[op.x]))
            case ops.SliceHeads():
                end = op.start + op.out.width // op.heads
                step.put(op.out, (x.reshape(op.heads, -1)[:, op.start : end].reshape(-1) for x in step[op.x]))
            case ops.Gate():
                step.put(op.out, (truth.gate(g, x, op.activation) for g, x in _rows(step[op.gate], step[op.x])))
            case ops.Sigmoid():
                step.put(op.out, (truth.sigmoid(x) for x in step[op.x]))
            case ops.DecayGate():
                a, dt_bias = self._weight(op.a), self._weight(op.dt_bias)
                step.put(op.out, (truth.decay_gate(x, a, dt_bias) for x in step[op.x]))
            case ops.Softplus():
                bias = self._optional(op.bias)
                step.put(op.out, (truth.softplus(x, bias) for x in step[op.x]))
            case ops.Concatenate():
                step.put(op.out, (np.concatenate([a, b]) for a, b in _rows(step[op.a], step[op.b])))
            case ops.HiddenInput():
                assert step.given is not None
                step.put(op.out, step.given)
            case ops.Route():
                self._run_route(op, step)
            case ops.Experts():
                matrices = [self._weight(weight) for weight in (op.gate, op.up, op.down)]
                routed = zip(step[op.x], step[op.experts], step[op.weights], strict=True)
                step.put(op.out, (truth.experts(x, chosen, w, *matrices) for x, chosen, w in routed))
            case ops.Mamba2Scan():
                self._run_mamba2_scan(op, step)
            case ops.Rope():
                self._run_rope(op, step)
            case ops.Attention():
                self._run_attention(op, step)
            case ops.ShortConv():
                self._run_short_conv(op, step)
            case ops.DeltaRule():
                self._run_delta_rule(op, step)

    def _run_route(self, op: ops.Route, step: _Step) -> None:
        bias, n_used = self._optional(op.bias), op.experts.width
        routed = [truth.route(x, n_used, op.scoring, bias, op.normalized, op.eps) for x in step[op.logits]]
        step.put(op.experts, (chosen for chosen, _ in routed))
        step.put(op.weights, (weights for _, weights in routed))

    def _run_mamba2_scan(self, op: ops.Mamba2Scan, step: _Step) -> None:
        x, b, c, dt = (step[value] for value in (op.x, op.b, op.c, op.dt))
        a, d = self._weight(op.a), self._weight(op.d)
        self._recur(
            step,
            op.out,
            op.state,
            lambda row, state: truth.mamba2_scan(x[row], b[row], c[row], dt[row], a, d, state, op.heads, op.groups),
        )

    def _run_rope(self, op: ops.Rope, step: _Step) -> None:
        factors = self._optional(op.factors)
        step.put(
            op.out,
            (
                truth.rope(x, int(position), op.head_dim, op.rotary_dim, op.base, op.interleaved, factors)
                for x, position in zip(step[op.x], step.batch.positions, strict=True)
            ),
        )

    def _run_attention(self, op: ops.Attention, step: _Step) -> None:
        layer = op.layer
        keys = self._blocks.rounded(step[op.k], layer)
        values = self._blocks.rounded(step[op.v], layer)
        step.keys[layer.index], step.vals[layer.index] = keys, values
        outs: list[F32] = []
        for sequence in step.batch.sequences:
            first, table = sequence.first_row, sequence.block_table
            for offset in range(sequence.n_committed):
                row = first + offset
                self._blocks.write(layer, table, sequence.start + offset, keys[row], values[row])
            for offset in range(sequence.n_rows):
                n_committed = sequence.start + min(offset + 1, sequence.n_committed)
                drafts = [first + ancestor for ancestor in draft_path(sequence, offset)]
                past_keys, past_values = self._blocks.read(layer, table, n_committed)
                seen_keys = np.concatenate([past_keys, keys[drafts]])
                seen_values = np.concatenate([past_values, values[drafts]])
                start = 0 if layer.window is None else max(0, len(seen_keys) - layer.window)
                start = max(start, layer.first_position)
                q = step[op.q][first + offset]
                outs.append(truth.attention(q, seen_keys[start:], seen_values[start:], op.heads, op.scale))
        step.put(op.out, outs)

    def _run_short_conv(self, op: ops.ShortConv, step: _Step) -> None:
        weight, bias, x = self._weight(op.weight), self._optional(op.bias), step[op.x]
        self._recur(
            step, op.out, op.state, lambda row, state: truth.short_conv(x[row], state, weight, bias, op.activation)
        )

    def _run_delta_rule(self, op: ops.DeltaRule, step: _Step) -> None:
        q, k, v, decay, beta = (step[value] for value in (op.q, op.k, op.v, op.decay, op.beta))
        self._recur(
            step,
            op.out,
            op.state,
            lambda row, state: truth.delta_rule(
                q[row], k[row], v[row], decay[row], beta[row], state, op.key_heads, op.value_heads
            ),
        )

    def _recur(self, step: _Step, out: Value, state: RecurrentState, advance: Advance) -> None:
        """Advance every sequence's state row by row; store it after the committed rows, keep it for the drafts."""
        pool = self._slots.arrays[state.index]
        outs: list[F32] = []
        for sequence in step.batch.sequences:
            after: list[F32] = []
            for offset in range(sequence.n_rows):
                before = after[parent_offset(sequence, offset)] if offset else pool[sequence.slot].copy()
                row_out, row_after = advance(sequence.first_row + offset, before)
                outs.append(row_out)
                after.append(row_after)
            pool[sequence.slot] = after[sequence.n_committed - 1]
            for offset, slot in sequence.snapshots:
                pool[slot] = after[offset]
            for offset in range(sequence.n_committed, sequence.n_rows):
                step.states[state.index, sequence.first_row + offset] = after[offset]
        step.put(out, outs)

    # results

    def logits(self, output: int) -> npt.NDArray[np.float32]:
        """f32[vocab] of an output whose `top_k` was None."""
        step = self._output_step(output)
        if step.batch.heads[output].top_k is not None:
            raise BackendError(describe(f"output {output} asked for candidates, not for the whole distribution"))
        return step[step.logits][output]

    def candidates(self, output: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """The best `top_k` tokens and their scores, best first; then those of `exact_ids` that are not among them."""
        step = self._output_step(output)
        head = step.batch.heads[output]
        if head.top_k is None:
            raise BackendError(describe(f"output {output} asked for the whole distribution, not for candidates"))
        scores = step[step.logits][output]
        # The minus makes -0 equal +0 and higher scores first; ties then go to the lower id.
        order = np.lexsort((np.arange(len(scores)), -scores))
        best = order[: head.top_k]
        others = order[head.top_k :]
        chosen = np.concatenate([best, others[np.isin(others, head.exact_ids)]])
        return chosen.astype(np.int32), scores[chosen]

    def hidden(self, first_row: int, n_rows: int) -> npt.NDArray[np.float32]:
        """f32[n_rows, d_model] of the last step."""
        self._check_open()
        step = self._step
        if step is None or not 0 <= first_row <= first_row + n_rows <= step.batch.n_rows:
            raise BackendError(describe("no such rows of the last step", got=f"{n_rows} from {first_row}"))
        return step[step.hidden][first_row : first_row + n_rows]

    def _output_step(self, output: int) -> _Step:
        self._check_open()
        if self._step is None or not 0 <= output < len(self._step.batch.heads):
            raise BackendError(describe("no such output of the last step", got=output))
        return self._step

    # drafts

    def commit(self, sequence: SequenceRows, accepted: Sequence[int]) -> None:
        """Store what the last step computed for the accepted drafts. Raises BackendError for what is not a path."""
        self._check_open()
        step = self._step
        if step is None or sequence.first_row not in step.open_drafts:
            raise BackendError(describe("no drafts of the last step to commit", got=f"row {sequence.first_row}"))
        ran = next(s for s in step.batch.sequences if s.first_row == sequence.first_row)
        where = f"the sequence at row {sequence.first_row}"
        parent = ran.n_committed - 1
        for offset in accepted:
            if not ran.n_committed <= offset < ran.n_rows or parent_offset(ran, offset) != parent:
                raise BackendError(
                    describe("not a path of drafts", where=where, got=list(accepted), expected="parent before child")
                )
            parent = offset
        first_position = ran.start + ran.n_committed
        if self.program.kv_layers:
            check_table(sequence, first_position + len(accepted), self.options, where)
        step.open_drafts.discard(ran.first_row)
        for index, keys in step.keys.items():
            layer, values = self.program.kv_layers[index], step.vals[index]
            for position, offset in enumerate(accepted, first_position):
                row = ran.first_row + offset
                self._blocks.write(layer, sequence.block_table, position, keys[row], values[row])
        if accepted:
            for state in self.program.states:
                self._slots.arrays[state.index][ran.slot] = step.states[state.index, ran.first_row + accepted[-1]]

    # state

    def copy_block(self, source: int, target: int) -> None:
        """Copy one KV block of every layer."""
        self._check_open()
        self._blocks.copy(source, target)

    def read_block(self, block: int) -> bytes:
        """Per layer keys, then values, in the cache type."""
        self._check_open()
        return self._blocks.to_bytes(block)

    def write_block(self, block: int, data: bytes) -> None:
        """Restore what `read_block` gave; BackendError when the length differs."""
        self._check_open()
        self._blocks.from_bytes(block, data)

    def clear_slot(self, slot: int) -> None:
        """Zero a slot's recurrent states."""
        self._check_open()
        self._slots.clear(slot)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy one slot's recurrent states."""
        self._check_open()
        self._slots.copy(source, target)

    def read_slot(self, slot: int) -> bytes:
        """The slot's states in the program's order, f32."""
        self._check_open()
        return self._slots.to_bytes(slot)

    def write_slot(self, slot: int, data: bytes) -> None:
        """Restore what `read_slot` gave; BackendError when the length differs."""
        self._check_open()
        self._slots.from_bytes(slot, data)

    @property
    def kernel_digest(self) -> str:
        """Of this package's sources, NumPy's version and the type of the cache."""
        digest = hashlib.sha256(f"reference numpy {np.__version__} kv {self.options.kv_type}".encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def statistics(self) -> dict[str, Any]:
        """Bytes of weights as held: float64."""
        self._check_open()
        return {"n_threads": 1, "lowering": "numpy", "weight_bytes": sum(w.nbytes for w in self._weights.values())}

    def close(self) -> None:
        """Free weights and pools."""
        self._closed = True
        self._step = None
        self._weights.clear()
        self._blocks = KVBlocks((), 0, self.options.kv_type)
        self._slots = StateSlots((), 0)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError(describe("the model was closed"))


def _rows(a: F32, b: F32) -> Iterable[tuple[F32, F32]]:
    return zip(a, b, strict=True)


def _read(source: TensorSource, weight: Weight) -> F64:
    array = read_tensor(source, weight.name)
    source.release(weight.name)
    if array.size != np.prod(weight.shape):
        raise TensorError(
            describe(f"the tensor {weight.name!r} has another shape", got=array.shape, expected=weight.shape)
        )
    return array.reshape(weight.shape).astype(np.float64)


class ReferenceBackend(KernelBackend):
    """The truth that other backends are compared with; any program, any batch, any tensor type, and slow."""

    capabilities = BackendCapabilities(
        supports_drafts=True, supports_snapshots=True, supports_prediction=True, kv_types=("f16", "f32")
    )

    def load(self, program: Program, source: TensorSource, options: LoadOptions) -> ReferenceExecutable:
        """Read the weights, dequantized; BackendError for an unknown type of the cache."""
        if options.kv_type not in KV_DTYPES:
            raise BackendError(describe("unknown type of the cache", got=options.kv_type, expected="f16 or f32"))
        return ReferenceExecutable(program, source, options)
