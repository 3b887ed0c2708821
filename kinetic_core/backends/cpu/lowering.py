"""From a program to kernel calls: one pass over its operations, with what can share a pass over memory fused.

Fused are: the residual sum and the norm after it; norm or gate and the quantization that the next linear layer wants;
the rope of the keys and their write to the cache. A slice is no call at all: it is an address and the stride of what
it is a slice of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu.experts import ExpertCalls, route_call
from kinetic_core.backends.cpu.kernels import constants
from kinetic_core.backends.cpu.kernels.constants import MAX_HEAD_DIM, n_groups, quantized_bytes
from kinetic_core.backends.cpu.layout import Lowered, Place
from kinetic_core.backends.cpu.packing import row_offsets
from kinetic_core.backends.cpu.pools import KVPool, RopeSpec, RopeTable, SlotPool, address_of, allocate
from kinetic_core.backends.cpu.step import StepArrays
from kinetic_core.backends.cpu.tape import Block, Count, KernelCall
from kinetic_core.backends.cpu.weights import Matrix, Weights, activation_kind, short_name
from kinetic_core.errors import BackendError, describe
from kinetic_core.interfaces.backend import LoadOptions
from kinetic_core.interfaces.batch import BLOCK_TOKENS
from kinetic_core.program import ops
from kinetic_core.program.values import Axis, RecurrentState, Value, Weight

if TYPE_CHECKING:
    from kinetic_core.program.program import Program

Args = tuple[Any, ...]

_CHUNK_BYTES = 32 << 10
"""Weights of a chunk of a linear layer: a few microseconds of one core."""


class Lowering:
    """Lowers a program for one executable, its trunk and its prediction block; the tables it used stay with it."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        options: LoadOptions,
        step: StepArrays,
        blocks: KVPool,
        slots: SlotPool,
        n_threads: int,
    ) -> None:
        self._program, self._weights, self._options, self._step = program, weights, options, step
        self._blocks, self._slots, self._n_threads = blocks, slots, n_threads
        self._result = Lowered()
        self._kept: list[npt.NDArray[Any]] = []
        self._fixed: dict[int, int] = {}
        self._slices: dict[int, tuple[Value, int]] = {}
        self._made: set[tuple[int, str]] = set()
        self._users: dict[int, list[ops.Op]] = {}
        self._wanted: dict[int, list[str]] = {}
        self._pending_adds: dict[int, ops.Add] = {}
        self._pending_ropes: dict[int, ops.Rope] = {}
        self.rope_tables: dict[RopeSpec, RopeTable] = {}

    def run(self, program_ops: Sequence[ops.Op]) -> Lowered:
        """Lower the operations of the trunk or of the prediction block. BackendError for what no kernel can do."""
        self._result = Lowered()
        self._analyse(program_ops)
        for op in program_ops:
            self._lower(op)
        return self._result

    # what is used where

    def _analyse(self, program_ops: Sequence[ops.Op]) -> None:
        for op in program_ops:
            for value in ops.values_read(op):
                self._users.setdefault(value.index, []).append(op)
            if isinstance(op, ops.Linear | ops.Experts):
                kinds = self._wanted.setdefault(op.x.index, [])
                for weight in op.weights if isinstance(op, ops.Linear) else (op.gate, op.up):
                    kind = activation_kind(self._weights.matrices[weight.name].type)
                    if kind != "f32" and kind not in kinds:
                        kinds.append(kind)

    def _first_user(self, value: Value) -> ops.Op | None:
        users = self._users.get(value.index)
        return users[0] if users else None

    # places

    def base(self, value: Value) -> tuple[Value, int]:
        """The value whose buffer holds `value`, and the byte offset of its first column."""
        offset = 0
        while value.index in self._slices:
            value, columns = self._slices[value.index]
            offset += 4 * columns
        return value, offset

    def _at(self, value: Value) -> tuple[Place | int, int]:
        """Place (or address, where that is known already) and stride in bytes of a value's rows."""
        base, offset = self.base(value)
        fixed = self._fixed.get(base.index)
        return Place(("value", base.index), offset) if fixed is None else fixed + offset, 4 * base.width

    def _name(self, value: Value) -> Any:
        return ("value", self.base(value)[0].index)

    def _new(self, value: Value) -> tuple[Place | int, int]:
        self._result.sizes["value", value.index] = 4 * value.width * self._max_rows(value.axis)
        return self._at(value)

    def _max_rows(self, axis: Axis) -> int:
        return self._options.max_rows if axis is Axis.ROWS else self._options.max_outputs

    @staticmethod
    def _count(value: Value) -> Count:
        return Count.ROWS if value.axis is Axis.ROWS else Count.OUTPUTS

    def _address(self, array: npt.NDArray[Any]) -> int:
        self._kept.append(array)
        return address_of(array)

    def _vector(self, weight: Weight) -> int:
        return self._address(np.ascontiguousarray(self._weights.vector(weight).reshape(-1)))

    def _call(
        self,
        kernel: str,
        args: Sequence[Any],
        items: dict[Count, int],
        reads: Sequence[Any],
        writes: Sequence[Any],
        label: str,
        grain: int = 1,
    ) -> None:
        call = KernelCall(kernel, tuple(args), items, frozenset(reads), frozenset(writes), grain, label)
        self._result.calls.append(call)

    # operations

    def _lower(self, op: ops.Op) -> None:
        match op:
            case ops.Slice():
                self._slices[op.out.index] = (op.x, op.start)
            case ops.Add():
                user = self._first_user(op.out)
                if isinstance(user, ops.RmsNorm):
                    self._pending_adds[op.out.index] = op
                else:
                    self._elementwise(op, constants.ADD, op.a, op.b, factor=op.factor)
            case ops.Multiply():
                self._elementwise(op, constants.MULTIPLY, op.a, op.b)
            case ops.Scale():
                self._elementwise(op, constants.SCALE, op.x, None, factor=op.factor)
            case ops.Sigmoid():
                self._elementwise(op, constants.SIGMOID, op.x, None)
            case ops.DecayGate():
                a, bias = self._vector(op.a), self._vector(op.dt_bias)
                self._elementwise(op, constants.DECAY, op.x, None, second=a, bias=bias)
            case ops.Softplus():
                bias = self._address(np.zeros(op.x.width, np.float32)) if op.bias is None else self._vector(op.bias)
                self._elementwise(op, constants.SOFTPLUS, op.x, None, bias=bias)
            case ops.Concatenate():
                parts = [word for value in (op.a, op.b) for word in (*self._at(value), 4 * value.width)]
                self._rows(op.out, "concatenate", (*parts, *self._new(op.out)), [op.a, op.b], "concatenate")
            case ops.SliceHeads():
                place, stride = self._at(op.x)
                runs = (op.heads, 4 * op.x.width // op.heads, 4 * op.start, 4 * op.out.width // op.heads)
                self._rows(op.out, "slice_heads", (place, stride, *self._new(op.out), *runs), [op.x], "slice heads")
            case ops.RmsNorm():
                self._rms_norm(op)
            case ops.L2Norm():
                x, out = self._at(op.x), self._new(op.out)
                args: Args = (*x, *out, op.group_width, op.x.width // op.group_width, float(op.eps), float(op.scale))
                self._rows(op.out, "l2_norm", args, [op.x], "l2_norm")
            case ops.Gate():
                self._gate(op)
            case ops.Linear():
                self._linear(op)
            case ops.Embedding():
                self._embedding(op)
            case ops.GatherOutputs():
                x, out = self._at(op.x), self._new(op.out)
                args = (*x, address_of(self._step.gathered), *out, 4 * op.out.width)
                self._rows(op.out, "gather_rows", args, [op.x], "gather")
            case ops.HiddenInput():
                given = allocate(self._options.max_rows * op.out.width, np.float32, "hidden states")
                self._fixed[op.out.index] = self._address(given)
                self._result.given = given.reshape(-1, op.out.width)
            case ops.Rope():
                users = self._users.get(op.out.index, [])
                if len(users) == 1 and isinstance(users[0], ops.Attention) and users[0].k == op.out:
                    self._pending_ropes[op.out.index] = op
                else:
                    self._rows(op.out, "rope", self._rope_args(op), [op.x], "rope")
            case ops.Attention():
                self._attention(op)
            case ops.ShortConv():
                self._short_conv(op)
            case ops.DeltaRule():
                self._delta_rule(op)
            case ops.Mamba2Scan():
                self._mamba2_scan(op)
            case ops.Route():
                bias = 0 if op.bias is None else self._vector(op.bias)
                forms = (self._form(op.logits), self._form(op.experts, True), self._form(op.weights, True))
                self._result.calls.append(route_call(op, self._count(op.logits), forms, bias))
            case ops.Experts():
                self._experts(op)
            case _:
                raise BackendError(describe("no CPU kernel for this operation", got=type(op).__name__))

    def _rows(self, out: Value, kernel: str, args: Sequence[Any], reads: Sequence[Value], label: str) -> None:
        """A call whose items are the rows of `out`."""
        self._call(kernel, args, {self._count(out): 1}, [self._name(v) for v in reads], [self._name(out)], label)

    def _elementwise(
        self,
        op: ops.Add | ops.Multiply | ops.Scale | ops.Sigmoid | ops.DecayGate | ops.Softplus,
        operation: int,
        x: Value,
        y: Value | None,
        *,
        second: int = 0,
        bias: int = 0,
        factor: float = 1.0,
    ) -> None:
        y_at = self._at(y) if y is not None else (second, 0)
        args: Args = (operation, op.out.width, *self._at(x), *self._new(op.out), *y_at, bias, float(factor))
        reads = [x] if y is None else [x, y]
        self._rows(op.out, "elementwise", args, reads, type(op).__name__.lower())

    def _quantized(self, value: Value, kind: str) -> Place:
        name = ("quantized", value.index, kind)
        self._result.sizes[name] = quantized_bytes(kind, value.width, self._max_rows(value.axis))
        return Place(name)

    def _quantize_args(self, value: Value, kind: str) -> tuple[Any, ...]:
        return (0, *self._at(value), self._quantized(value, kind), 0, value.width)

    def _fused_kind(self, value: Value, part: int | None = None) -> str | None:
        """The quantized kind that the call which makes `value` should leave as well, or None.

        part: columns that the call makes at a time, where that is not the row.
        """
        for kind in self._wanted.get(value.index, []):
            block = 256 if kind == "q8_256" else 32
            if (part or value.width) % block == 0:
                self._made.add((value.index, kind))
                return kind
        return None

    def _rms_norm(self, op: ops.RmsNorm) -> None:
        weight = self._vector(op.weight)
        groups = op.x.width // op.group_width
        shared = math.prod(op.weight.shape) == op.group_width
        pending = self._pending_adds.pop(op.x.index, None)
        reads, writes = [self._name(op.x)], []
        if pending is None:
            x = self._at(op.x)
            add: Args = (0, 0, 0.0, 0, 0)
        else:
            x = self._at(pending.a)
            add = (*self._at(pending.b), float(pending.factor), *self._new(pending.out))
            reads = [self._name(pending.a), self._name(pending.b)]
            writes = [self._name(pending.out)]
        out = self._new(op.out)
        args: list[Any] = [*x, *add, weight, 0 if shared else 4 * op.group_width, op.group_width, groups]
        args += [float(op.eps), *out]
        kernel = "rms_norm"
        kind = self._fused_kind(op.out)
        writes.append(self._name(op.out))
        if kind is not None:
            kernel = f"rms_norm_{kind}"
            args.append(Block(self._quantize_args(op.out, kind)))
            writes.append(("quantized", op.out.index, kind))
        self._call(kernel, args, {self._count(op.out): 1}, reads, writes, "norm")

    def _gate(self, op: ops.Gate) -> None:
        run = op.x.width // op.gate.width
        width = op.x.width
        part = width
        if run == 1:
            part = next((p for p in (512, 256, 192, 128, 96, 64) if width % p == 0), width)
        kind = self._fused_kind(op.out, part)
        if kind is None and run == 1 and self._wanted.get(op.out.index):
            part = width
            kind = self._fused_kind(op.out)
        activation = constants.SILU_GATE if op.activation == "silu" else constants.SIGMOID_GATE
        out = self._new(op.out)
        args: list[Any] = [*self._at(op.gate), *self._at(op.x), *out, part, width // part, run, activation]
        reads, writes = [self._name(op.gate), self._name(op.x)], [self._name(op.out)]
        kernel = "gate"
        if kind is not None:
            kernel = f"gate_{kind}"
            args.append(Block(self._quantize_args(op.out, kind)))
            writes.append(("quantized", op.out.index, kind))
        self._call(kernel, args, {self._count(op.out): width // part}, reads, writes, "gate", grain=2)

    def _input(self, x: Value, kind: str) -> tuple[Any, int, Any]:
        """(place, stride, name) of a linear layer's input in the form it wants; quantizes where nobody has yet."""
        if kind == "f32":
            return self._form(x)
        name = ("quantized", x.index, kind)
        if (x.index, kind) not in self._made:
            self._made.add((x.index, kind))
            args = self._quantize_args(x, kind)
            self._call(f"quantize_{kind}", args, {self._count(x): 1}, [self._name(x)], [name], "quantize")
        return Place(name), 0, name

    def _linear(self, op: ops.Linear) -> None:
        count = self._count(op.x)
        forms = {}
        for weight in op.weights:
            kind = activation_kind(self._weights.matrices[weight.name].type)
            if kind not in forms:
                forms[kind] = self._input(op.x, kind)
        for out, weight in zip(op.outs, op.weights, strict=True):
            matrix = self._weights.matrices[weight.name]
            place, stride, name = forms[activation_kind(matrix.type)]
            out_at = self._new(out)
            args: Args = (count, place, stride, matrix.address, matrix.n_in, matrix.n_out, *out_at)
            label = "linear " + short_name(weight.name)
            self._call(
                f"linear_{matrix.type.name.lower()}",
                args,
                {Count.FIXED: n_groups(matrix.n_out)},
                [name],
                [self._name(out)],
                label,
                self._linear_grain(matrix),
            )
        for out, bias in zip(op.outs, op.biases, strict=True):
            if bias is not None:
                at = self._at(out)
                args = (constants.ADD, out.width, *at, *at, self._vector(bias), 0, 0, 1.0)
                self._rows(out, "elementwise", args, [out], "bias")

    def _form(self, value: Value, is_new: bool = False) -> tuple[Any, int, Any]:
        """(place, stride, name) of a value's rows."""
        return (*(self._new(value) if is_new else self._at(value)), self._name(value))

    def _experts(self, op: ops.Experts) -> None:
        layers = [self._weights.matrices[weight.name] for weight in (op.gate, op.up, op.down)]
        inputs = {kind: self._input(op.x, kind) for kind in (activation_kind(matrix.type) for matrix in layers[:2])}
        forms = (self._form(op.experts), self._form(op.weights), self._form(op.out, True))
        lowered = ExpertCalls(op, layers, (self._count(op.x), self._max_rows(op.x.axis), self._n_threads))
        self._result.calls += lowered.calls(inputs, forms)
        self._result.sizes |= lowered.sizes

    def _linear_grain(self, matrix: Matrix) -> int:
        """Groups of a chunk: enough weights to be worth drawing, but some for every thread."""
        groups = n_groups(matrix.n_out)
        return max(1, min(_CHUNK_BYTES * groups // max(1, matrix.data.nbytes), groups // self._n_threads))

    def _embedding(self, op: ops.Embedding) -> None:
        matrix = self._weights.matrices[op.weight.name]
        out = self._new(op.out)
        tokens, offsets = address_of(self._step.token_ids), address_of(row_offsets(matrix.type))
        args: Args = (Count.ROWS, tokens, matrix.address, matrix.n_in, *out, offsets)
        self._rows(op.out, f"embedding_{matrix.type.name.lower()}", args, [], "embedding")
        if op.scale != 1.0:
            args = (constants.SCALE, op.out.width, *out, *out, 0, 0, 0, float(op.scale))
            self._rows(op.out, "elementwise", args, [op.out], "embedding")

    def _rope_args(self, op: ops.Rope) -> tuple[Any, ...]:
        factors = None
        if op.factors is not None:
            factors = self._weights.vector(op.factors).reshape(-1).astype(np.float32).tobytes()
        spec = RopeSpec(op.rotary_dim, op.base, op.interleaved, factors)
        table = self.rope_tables.get(spec)
        if table is None:
            # Drafts may lie beyond the last block, by less than a step's rows.
            max_positions = self._options.n_blocks * BLOCK_TOKENS + self._options.max_rows
            table = self.rope_tables[spec] = RopeTable(spec, max_positions)
        heads = op.x.width // op.head_dim
        turned = (heads, op.head_dim, op.rotary_dim, int(op.interleaved), table.address, table.position_bytes)
        return (*self._at(op.x), *self._new(op.out), *turned, address_of(self._step.positions))

    def _attention(self, op: ops.Attention) -> None:
        layer, options, step = op.layer, self._options, self._step
        heads, head_dim = layer.kv_heads, layer.head_dim
        if head_dim % 16 or head_dim > MAX_HEAD_DIM:
            raise BackendError(
                describe("no attention kernel for this head size", got=head_dim, expected="a multiple of 16 up to 256")
            )
        width = heads * head_dim
        keys, values = (allocate(options.max_rows * width, np.float32, "drafts") for _ in range(2))
        aside = (self._address(keys), self._address(values))
        cache = (self._blocks.layer_addresses[layer.index], self._blocks.block_bytes)
        rope = self._pending_ropes.pop(op.k.index, None)
        source = op.k if rope is None else rope.x
        turn: Any = 0 if rope is None else Block(self._rope_args(rope))
        writes: list[Any] = [("cache", layer.index)]
        if rope is not None:
            writes.append(self._name(op.k))
        rows = (address_of(step.positions), address_of(step.row_blocks))
        args: Args = (*self._at(op.k), *self._at(op.v), heads, head_dim, *rows, *cache, *aside, turn)
        reads = [self._name(source), self._name(op.v)]
        self._call(f"store_kv_{options.kv_type}", args, {Count.ROWS: 1}, reads, writes, "store_kv")
        group = op.heads // heads
        args = (*self._at(op.q), *self._new(op.out), heads, group, head_dim, float(op.scale), layer.window or 0)
        args += (address_of(step.tiles), Count.TILES, *cache, *aside, layer.first_position)
        reads = [self._name(op.q), ("cache", layer.index)]
        self._call(f"attention_{options.kv_type}", args, {Count.TILES: heads}, reads, [self._name(op.out)], "attention")
        if self._n_threads > 1:
            args = (*self._at(op.out), op.heads, head_dim, address_of(step.merges))
            name = self._name(op.out)
            self._call("merge_attention", args, {Count.SPLIT_ROWS: op.heads}, [name], [name], "attention")
        # Accepted drafts: their rows as they lie aside, to the blocks that `row_blocks` then names.
        args = (aside[0], 4 * width, aside[1], 4 * width, heads, head_dim, *rows, *cache, *aside, 0)
        commit = KernelCall(
            f"store_kv_{options.kv_type}", args, {Count.ROWS: 1}, frozenset(), frozenset({("cache", layer.index)})
        )
        self._result.commit.append(commit)

    def _aside(self, value: Value, label: str) -> tuple[int, int]:
        """Copy the drafts' rows of a value to a buffer that lasts until they are committed; (address, stride)."""
        buffer = allocate(self._options.max_rows * value.width, np.float32, "drafts")
        address, row_bytes = self._address(buffer), 4 * value.width
        args: Args = (*self._at(value), address_of(self._step.draft_rows), address, row_bytes, row_bytes)
        name = ("aside", value.index, label)
        self._call("gather_rows", args, {Count.DRAFTS: 1}, [self._name(value)], [name], "keep drafts")
        return address, row_bytes

    def _short_conv(self, op: ops.ShortConv) -> None:
        width, taps = op.weight.shape
        if taps > constants.MAX_TAPS:
            raise BackendError(
                describe("no kernel for so long a convolution", got=taps, expected=f"up to {constants.MAX_TAPS}")
            )
        weight = self._address(np.ascontiguousarray(self._weights.vector(op.weight).reshape(width, taps).T))
        bias = 0 if op.bias is None else self._vector(op.bias)
        strips = -(-width // constants.CONV_STRIP)
        state = (self._slots.address + self._slots.offsets[op.state.index], self._slots.slot_bytes)
        tail: Args = (width, strips, taps, weight, bias, int(op.activation == "silu"), *state)
        tail += (address_of(self._step.sequences),)
        aside = self._aside(op.x, "conv")
        args: Args = (*self._at(op.x), *self._new(op.out), *tail)
        names = [self._name(op.out), ("state", op.state.index)]
        items = {Count.SEQUENCES: strips}
        self._call("short_conv", args, items, [self._name(op.x)], names, "short_conv")
        self._commit_state("replay_conv", (*aside, 0, 0, *tail), items, op.state.index)

    def _delta_rule(self, op: ops.DeltaRule) -> None:
        tail, items = self._strips(op.state, op.key_heads)
        inputs = (op.k, op.v, op.decay, op.beta)
        kept = [self._aside(value, "delta") for value in inputs]
        places = [word for value in (op.q, *inputs) for word in self._at(value)]
        args: Args = (*places, *self._new(op.out), *tail)
        reads = [self._name(value) for value in (op.q, *inputs)]
        names = [self._name(op.out), ("state", op.state.index)]
        self._call("delta_rule", args, items, reads, names, "delta_rule")
        flat = [word for pair in (kept[0], *kept) for word in pair]
        self._commit_state("replay_delta", (*flat, 0, 0, *tail), items, op.state.index)

    def _mamba2_scan(self, op: ops.Mamba2Scan) -> None:
        tail, items = self._strips(op.state, op.groups)
        tail = (self._vector(op.a), self._vector(op.d), *tail)
        x, b, dt = (self._aside(value, "mamba2") for value in (op.x, op.b, op.dt))
        inputs = (op.x, op.b, op.c, op.dt)
        places = [word for value in inputs for word in self._at(value)]
        names = [self._name(op.out), ("state", op.state.index)]
        args: Args = (*places, *self._new(op.out), *tail)
        self._call("mamba2_scan", args, items, [self._name(value) for value in inputs], names, "mamba2_scan")
        self._commit_state("replay_mamba2", (*x, *b, *b, *dt, 0, 0, *tail), items, op.state.index)

    def _strips(self, state: RecurrentState, groups: int) -> tuple[Args, dict[Count, int]]:
        """The arguments that every recurrence on [heads, state_dim, head_dim] ends with, and its items."""
        heads, state_dim, head_dim = state.shape
        if state_dim > constants.MAX_STATE_DIM:
            raise BackendError(
                describe(
                    f"no {state.name} kernel for this state size",
                    got=state_dim,
                    expected=f"up to {constants.MAX_STATE_DIM}",
                )
            )
        strips = -(-head_dim // constants.WIDE_STRIP)
        slots = (self._slots.address + self._slots.offsets[state.index], self._slots.slot_bytes)
        tail = (groups, heads, state_dim, head_dim, strips, *slots, address_of(self._step.sequences))
        return tail, {Count.SEQUENCES: heads * strips}

    def _commit_state(self, kernel: str, args: tuple[Any, ...], items: dict[Count, int], state: int) -> None:
        call = KernelCall(kernel, args, items, frozenset(), frozenset({("state", state)}))
        self._result.commit.append(call)
