"""The calls of a mixture of experts: what `kernels/experts.py` wants to know, and the buffers between its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kinetic_core.backends.cpu.kernels import constants
from kinetic_core.backends.cpu.kernels.constants import (
    BLOCK_32_BYTES,
    BLOCK_256_BYTES,
    EXPERT_WORDS,
    MAX_EXPERTS,
    MAX_EXPERTS_USED,
    TILE_32_BYTES,
    TILE_256_BYTES,
    TILE_ROWS,
    quantized_bytes,
)
from kinetic_core.backends.cpu.layout import Place
from kinetic_core.backends.cpu.tape import Block, Count, KernelAddress, KernelCall, Tape
from kinetic_core.backends.cpu.weights import Matrix, activation_kind
from kinetic_core.errors import BackendError, describe
from kinetic_core.program import ops

Form = tuple[Any, int, Any]
"""Place (or address), stride in bytes and name of some rows."""

_BLOCKS = {"q8_256": (256, BLOCK_256_BYTES, TILE_256_BYTES), "q8_32": (32, BLOCK_32_BYTES, TILE_32_BYTES)}
"""Per kind of quantized rows: inputs of a block, bytes of a row's block, bytes of a tile's."""
_SEGMENT = 512
"""Columns that an item of the combination sums."""


def route_call(op: ops.Route, count: Count, forms: tuple[Form, Form, Form], bias: int) -> KernelCall:
    """The choice of each row's experts. forms: of logits, ids and weights; bias: address or 0.

    Raises BackendError for more experts than the kernel has room for.
    """
    for what, got, most in (
        ("experts", op.logits.width, MAX_EXPERTS),
        ("experts per row", op.experts.width, MAX_EXPERTS_USED),
    ):
        if got > most:
            raise BackendError(describe(f"no routing kernel for so many {what}", got=got, expected=f"up to {most}"))
    scoring = constants.SOFTMAX if op.scoring == "softmax" else constants.SIGMOID_SCORES
    words = [word for place, stride, _ in forms for word in (place, stride)]
    args = (*words, op.logits.width, op.experts.width, scoring, bias, int(op.normalized), float(op.eps))
    reads, writes = frozenset({forms[0][2]}), frozenset(name for *_, name in forms[1:])
    return KernelCall("route", args, {count: 1}, reads, writes, label="route")


class ExpertCalls:
    """The calls of one `ops.Experts`.

    layers: its gate, up and down, packed.
    rows: what a step has how many rows of, the most there are, and the number of threads.
    sizes: bytes of the buffers between the calls, by name.
    """

    def __init__(self, op: ops.Experts, layers: Sequence[Matrix], rows: tuple[Count, int, int]) -> None:
        self._op, self._layers = op, layers
        self._count, max_rows, n_threads = rows
        self._n_used, self._n_experts = op.experts.width, layers[0].n_experts
        entries = max_rows * self._n_used
        # A tile of a power of two of rows is more than half full, or has 16 rows and some expert to itself.
        padded = min(2 * entries, entries + (TILE_ROWS - 1) * self._n_experts)
        self._max_positions = -(-padded // TILE_ROWS) * TILE_ROWS
        self._shares = n_threads * Tape.CHUNKS_PER_THREAD
        self._table = ("expert table", op.out.index)
        table_words = 2 + EXPERT_WORDS * self._n_experts
        self._positions = Place(self._table, 8 * table_words)
        self.sizes: dict[Any, int] = {self._table: 8 * (table_words + entries)}

    def calls(self, inputs: dict[str, Form], forms: tuple[Form, Form, Form]) -> list[KernelCall]:
        """inputs: those of gate and up, by kind; forms: of ids, weights and the result."""
        (experts, experts_stride, experts_name), (weights, weights_stride, weights_name), (out, stride, name) = forms
        args: tuple[Any, ...] = (experts, experts_stride, self._count, self._n_used, self._n_experts)
        args += (Place(self._table),)
        calls = [self._call("group_experts", args, {Count.FIXED: 1}, [experts_name], [self._table])]
        gathered = {kind: self._gather(kind, source, calls) for kind, source in inputs.items()}
        gate, up = (
            self._layer(part, matrix, gathered[activation_kind(matrix.type)], calls)
            for part, matrix in zip(("gate", "up"), self._layers, strict=False)
        )
        product = self._product(gate, up, calls)
        down = self._layer("down", self._layers[2], product, calls)
        width = self._op.out.width
        segments = -(-width // _SEGMENT)
        args = (self._positions, self._n_used, weights, weights_stride, Place(down), 4 * width, out, stride)
        args += (_SEGMENT, segments, width)
        reads = [self._table, weights_name, down]
        calls.append(self._call("combine_experts", args, {self._count: segments}, reads, [name]))
        return calls

    @staticmethod
    def _call(
        kernel: str, args: tuple[Any, ...], items: dict[Count, int], reads: list[Any], writes: list[Any], grain: int = 1
    ) -> KernelCall:
        label = f"experts {kernel.removesuffix('_experts')}" if kernel != "run_experts" else "experts linear"
        return KernelCall(kernel, args, items, frozenset(reads), frozenset(writes), grain, label)

    def _buffer(self, what: str, kind: str, width: int) -> Any:
        """The name of a new buffer of `width` columns for every position."""
        name = (f"expert {what}", self._op.out.index, kind)
        self.sizes[name] = quantized_bytes(kind, width, self._max_positions)
        return name

    @staticmethod
    def _tiles(kind: str, width: int, stride: int) -> tuple[int, int, int]:
        """(rows of a tile, its bytes, bytes from row to row in it) of rows of a kind."""
        if kind == "f32":
            return 1, stride, 0
        inputs, block_bytes, tile_bytes = _BLOCKS[kind]
        return TILE_ROWS, width // inputs * tile_bytes, block_bytes

    def _gather(self, kind: str, source: Form, calls: list[KernelCall]) -> Any:
        """The input of every entry at its position; the buffer's name."""
        place, stride, name = source
        width = self._op.x.width
        gathered = self._buffer("input", kind, width)
        if kind == "f32":
            pieces = (1, 0, 4 * width)
        else:
            inputs, block_bytes, tile_bytes = _BLOCKS[kind]
            pieces = (width // inputs, tile_bytes, block_bytes)
        tile, *from_bytes = self._tiles(kind, width, stride)
        _, *to_bytes = self._tiles(kind, width, 4 * width)
        args = (self._positions, self._n_used, place, Place(gathered), tile, *from_bytes, *to_bytes, *pieces)
        items = {self._count: self._n_used}
        calls.append(self._call("gather_entries", args, items, [self._table, name], [gathered], grain=8))
        return gathered

    def _layer(self, part: str, matrix: Matrix, x: Any, calls: list[KernelCall]) -> Any:
        """A linear layer of every entry's expert; the name of its result."""
        out = self._buffer(part, "f32", matrix.n_out)
        linear = KernelAddress(f"linear_{matrix.type.name.lower()}")
        stride = 4 * matrix.n_in
        args: tuple[Any, ...] = (Place(self._table), linear, Place(x))
        args += (*self._tiles(activation_kind(matrix.type), matrix.n_in, stride), stride)
        args += (matrix.address, matrix.data.nbytes // matrix.n_experts, matrix.n_in, matrix.n_out)
        args += (Place(out), 4 * matrix.n_out, self._shares)
        calls.append(self._call("run_experts", args, {Count.FIXED: self._shares}, [self._table, x], [out]))
        return out

    def _product(self, gate: Any, up: Any, calls: list[KernelCall]) -> Any:
        """silu(gate) * up, over gate, in the form that the last layer wants; the buffer's name."""
        width, kind = self._layers[2].n_in, activation_kind(self._layers[2].type)
        kernel, product = "gate", gate
        quantize: tuple[Block, ...] = ()
        if kind != "f32":
            kernel, product = f"gate_{kind}", self._buffer("product", kind, width)
            quantize = (Block((0, Place(gate), 4 * width, Place(product), 0, width)),)
        places = (Place(gate), 4 * width, Place(up), 4 * width, Place(gate), 4 * width)
        block = Block((*places, width, 1, 1, constants.SILU_GATE, *quantize))
        args = (self._positions, KernelAddress(kernel), block)
        items, grain = {self._count: self._n_used}, max(1, 2048 // width)
        calls.append(self._call("at_positions", args, items, [self._table, up], [gate, product], grain))
        return product
