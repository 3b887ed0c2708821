"""The weights of a program in memory: matrices packed for the linear kernels, vectors as float32.

Matrices are packed in parallel, and a tensor's pages of the file are given back as soon as it is packed, so that
loading takes little more memory than the file has bytes.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu.packing import GROUP, PACKED_TYPES, pack, packed_size
from kinetic_core.backends.cpu.pools import address_of, allocate
from kinetic_core.gguf import BLOCK_FORMATS, GGMLType, dequantize, read_tensor, require_tensor
from kinetic_core.program import ops
from kinetic_core.program.values import Weight

if TYPE_CHECKING:
    from kinetic_core.gguf.source import TensorSource
    from kinetic_core.interfaces.backend import Progress
    from kinetic_core.program.program import Program

logger = logging.getLogger(__name__)

_AHEAD_BYTES = 64 << 20
"""Bytes of the file that may wait to be packed, their pages not yet given back."""
_PIECE_BYTES = 64 << 20
"""Packed matrices are laid side by side in pieces of this size: the system backs large pieces with large pages."""
_SLICE_BYTES = 4 << 20
"""Bytes of the file that one packing task takes: enough work for a thread, and little memory beside the result."""


FLOAT_TYPES = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})


def activation_kind(type_: GGMLType) -> str:
    """What a linear kernel of weights of this type wants its input as: `f32`, `q8_32` or `q8_256`."""
    if type_ in FLOAT_TYPES:
        return "f32"
    return "q8_256" if BLOCK_FORMATS[type_].block_size == 256 else "q8_32"


@attrs.frozen(eq=False)
class Matrix:
    """A packed matrix [n_out, n_in], or one for each expert, one behind the other.

    type is what it is packed as, `file_type` what the file holds.
    """

    name: str
    type: GGMLType
    file_type: GGMLType
    n_out: int
    n_in: int
    data: npt.NDArray[np.uint8]
    file_bytes: int
    n_experts: int = 1

    @property
    def address(self) -> int:
        """Of the packed bytes."""
        return address_of(self.data)


class Weights:
    """Every weight of a program. matrices and vectors by name; notices say what was converted and what it costs."""

    def __init__(
        self, program: Program, source: TensorSource, n_threads: int, progress: Progress | None = None
    ) -> None:
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, npt.NDArray[np.float32]] = {}
        self.notices: list[str] = []
        matrix_names = _matrix_names(program)
        infos = [require_tensor(source.tensors, weight.name) for weight in program.weights]
        total = sum(info.n_bytes for info in infos)
        done = 0
        lock = threading.Lock()

        def count(n_bytes: int) -> None:
            nonlocal done
            with lock:
                done += n_bytes
                if progress is not None:
                    progress("packing weights", min(1.0, done / max(total, 1)))

        self._room = np.empty(0, np.uint8)
        left = sum(info.n_bytes for info in infos if info.name in matrix_names)
        self._piece_bytes = min(_PIECE_BYTES, left + left // 8 + 4096)
        self._waiting: deque[tuple[str, int, list[Future[None]]]] = deque()
        with ThreadPoolExecutor(n_threads, "pack") as pool:
            for weight, info in zip(program.weights, infos, strict=True):
                if weight.name not in matrix_names:
                    self.vectors[weight.name] = np.ascontiguousarray(read_tensor(source, weight.name), np.float32)
                    source.release(weight.name)
                    count(info.n_bytes)
                else:
                    self._load_matrix(source, weight, info.type, info.n_bytes, pool, count)
            self._finish_packing(source, 0)

    def _allocate(self, n_bytes: int, name: str) -> npt.NDArray[np.uint8]:
        """Room for a packed matrix, on a cache line."""
        needed = -(-n_bytes // 64) * 64
        if needed > self._room.size:
            self._room = allocate(max(needed, self._piece_bytes), np.uint8, f"the tensor {name!r}")
        target, self._room = self._room[:n_bytes], self._room[needed:]
        return target

    def vector(self, weight: Weight) -> npt.NDArray[np.float32]:
        """A weight that is no matrix, as f32 in the shape that the program names."""
        return self.vectors[weight.name].reshape(weight.shape)

    def _load_matrix(
        self,
        source: TensorSource,
        weight: Weight,
        file_type: GGMLType,
        file_bytes: int,
        pool: ThreadPoolExecutor,
        count: Any,
    ) -> None:
        n_out, n_in = weight.shape[-2:]
        n_experts = math.prod(weight.shape[:-2])
        raw = source.tensor_bytes(weight.name)
        type_ = file_type if file_type in PACKED_TYPES else _converted_type(raw, file_type, n_in)
        target = self._allocate(n_experts * packed_size(type_, n_out, n_in), weight.name)
        row_bytes = BLOCK_FORMATS[file_type].n_bytes((n_in,))
        if type_ is not file_type:
            converted = _convert(raw, file_type, type_, n_in)
            self._notice(weight, file_type, type_, file_bytes, converted.nbytes)
            raw = converted
        step = max(GROUP, _SLICE_BYTES // row_bytes // GROUP * GROUP)
        tasks: list[Future[None]] = []
        for own_raw, own_target in zip(np.split(raw, n_experts), np.split(target, n_experts), strict=True):
            for first in range(0, n_out, step):
                rows = min(step, n_out - first)
                args = (type_, own_raw, n_out, n_in, own_target, first, rows, row_bytes, count)
                tasks.append(pool.submit(_pack_slice, *args))
        self._waiting.append((weight.name, file_bytes, tasks))
        self._finish_packing(source, _AHEAD_BYTES)
        self.matrices[weight.name] = Matrix(weight.name, type_, file_type, n_out, n_in, target, file_bytes, n_experts)

    def _finish_packing(self, source: TensorSource, ahead_bytes: int) -> None:
        """Wait for the oldest matrices until at most `ahead_bytes` of the file are left to pack."""
        while self._waiting and sum(n_bytes for _, n_bytes, _ in self._waiting) > ahead_bytes:
            name, _, tasks = self._waiting.popleft()
            for task in tasks:
                task.result()
            source.release(name)

    def _notice(self, weight: Weight, file_type: GGMLType, type_: GGMLType, before: int, after: int) -> None:
        text = (
            f"{weight.name}: no kernel reads {file_type.name}; loaded as {type_.name}, "
            f"{after / 2**20:.1f} MiB instead of {before / 2**20:.1f}, read at every step"
        )
        self.notices.append(text)
        logger.warning("%s", text)


def _pack_slice(
    type_: GGMLType,
    raw: npt.NDArray[np.uint8],
    n_out: int,
    n_in: int,
    target: npt.NDArray[np.uint8],
    first: int,
    rows: int,
    row_bytes: int,
    count: Any,
) -> None:
    pack(type_, raw, n_out, n_in, target, first, rows)
    count(rows * row_bytes)


def short_name(name: str) -> str:
    """A weight's name without layer number and ending, for the profile."""
    parts = [part for part in name.split(".") if part not in ("blk", "weight") and not part.isdigit()]
    return ".".join(parts) or name


def _matrix_names(program: Program) -> set[str]:
    """Weights that linear kernels or the embedding read, those of experts included."""
    names: set[str] = set()
    for op in program.all_ops:
        if isinstance(op, ops.Linear):
            names.update(weight.name for weight in op.weights)
        elif isinstance(op, ops.Embedding):
            names.add(op.weight.name)
        elif isinstance(op, ops.Experts):
            names.update((op.gate.name, op.up.name, op.down.name))
    return names


def _row_slices(raw: npt.NDArray[np.uint8], file_type: GGMLType, n_in: int) -> Iterator[npt.NDArray[np.float32]]:
    """The matrix dequantized, some rows at a time."""
    row_bytes = BLOCK_FORMATS[file_type].n_bytes((n_in,))
    step = max(1, _SLICE_BYTES // (4 * n_in))
    for begin in range(0, len(raw), step * row_bytes):
        part = raw[begin : begin + step * row_bytes]
        yield dequantize(part, file_type, (len(part) // row_bytes, n_in))


def _converted_type(raw: npt.NDArray[np.uint8], file_type: GGMLType, n_in: int) -> GGMLType:
    """F16 where that holds every value exactly, else F32. Nothing is ever requantized."""
    with np.errstate(over="ignore"):
        exact = all(
            np.array_equal(part.astype(np.float16).astype(np.float32), part)
            for part in _row_slices(raw, file_type, n_in)
        )
    return GGMLType.F16 if exact else GGMLType.F32


def _convert(raw: npt.NDArray[np.uint8], file_type: GGMLType, type_: GGMLType, n_in: int) -> npt.NDArray[np.uint8]:
    kind = np.float16 if type_ is GGMLType.F16 else np.float32
    n_rows = len(raw) // BLOCK_FORMATS[file_type].n_bytes((n_in,))
    out = np.empty((n_rows, n_in), kind)
    at = 0
    for part in _row_slices(raw, file_type, n_in):
        out[at : at + len(part)] = part
        at += len(part)
    return out.reshape(-1).view(np.uint8)


def bytes_per_step(program: Program, weights: Weights) -> int:
    """Bytes of the file that a step of one row reads.

    Every weight but the embedding, of which it reads one row, and the experts, of which it reads those that it uses.
    Of a prediction block a step reads nothing.
    """
    read = {weight.name for op in program.ops for weight in ops.weights_of(op)}
    linear = {weight.name for op in program.ops if isinstance(op, ops.Linear) for weight in op.weights}
    total = sum(matrix.file_bytes for name, matrix in weights.matrices.items() if name in linear)
    total += sum(vector.nbytes for name, vector in weights.vectors.items() if name in read)
    for op in program.ops:
        if isinstance(op, ops.Embedding):
            total += BLOCK_FORMATS[weights.matrices[op.weight.name].file_type].n_bytes((op.weight.shape[1],))
        elif isinstance(op, ops.Experts):
            matrices = [weights.matrices[weight.name] for weight in (op.gate, op.up, op.down)]
            total += sum(matrix.file_bytes // matrix.n_experts * op.experts.width for matrix in matrices)
    return total
