"""The reference's pools: blocks of keys and values, and slots of recurrent states, as plain arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kinetic_core.errors import BackendError, describe
from kinetic_core.interfaces.batch import BLOCK_TOKENS
from kinetic_core.program.values import KVLayer, RecurrentState

KV_DTYPES = {"f16": np.float16, "f32": np.float32}

Floats = npt.NDArray[np.floating]
F32 = npt.NDArray[np.float32]


class KVBlocks:
    """Keys and values of every attention layer: per layer two arrays [n_blocks, 256, kv_heads, head_dim]."""

    def __init__(self, layers: tuple[KVLayer, ...], n_blocks: int, kv_type: str) -> None:
        self.n_blocks = n_blocks
        self.dtype = np.dtype(KV_DTYPES[kv_type])
        shapes = [(n_blocks, BLOCK_TOKENS, layer.kv_heads, layer.head_dim) for layer in layers]
        # NaN, not zero: reading a position that was never written must not pass for an answer.
        self.keys: list[Floats] = [np.full(shape, np.nan, self.dtype) for shape in shapes]
        self.values: list[Floats] = [np.full(shape, np.nan, self.dtype) for shape in shapes]

    def rounded(self, rows: F32, layer: KVLayer) -> Floats:
        """Rows [n, kv_heads * head_dim] in the type of the cache: [n, kv_heads, head_dim]."""
        with np.errstate(over="ignore"):  # beyond the largest f16: infinity, as in every backend
            return rows.reshape(-1, layer.kv_heads, layer.head_dim).astype(self.dtype)

    def write(self, layer: KVLayer, table: npt.NDArray[np.int32], position: int, key: Floats, value: Floats) -> None:
        """Store one position's key and value, each [kv_heads, head_dim]."""
        block, place = int(table[position // BLOCK_TOKENS]), position % BLOCK_TOKENS
        self.keys[layer.index][block, place] = key
        self.values[layer.index][block, place] = value

    def read(self, layer: KVLayer, table: npt.NDArray[np.int32], n_tokens: int) -> tuple[Floats, Floats]:
        """Keys and values of positions 0 to n_tokens - 1, each [n_tokens, kv_heads, head_dim]."""
        blocks = table[: -(-n_tokens // BLOCK_TOKENS)]
        shape = (-1, layer.kv_heads, layer.head_dim)
        keys = self.keys[layer.index][blocks].reshape(shape)
        values = self.values[layer.index][blocks].reshape(shape)
        return keys[:n_tokens], values[:n_tokens]

    def copy(self, source: int, target: int) -> None:
        """Copy one block of every layer."""
        self._check(source)
        self._check(target)
        for array in (*self.keys, *self.values):
            array[target] = array[source]

    def to_bytes(self, block: int) -> bytes:
        """One block of every layer: per layer keys, then values."""
        self._check(block)
        pairs = zip(self.keys, self.values, strict=True)
        return b"".join(array[block].tobytes() for pair in pairs for array in pair)

    def from_bytes(self, block: int, data: bytes) -> None:
        """Restore what `to_bytes` gave."""
        self._check(block)
        arrays = [array for pair in zip(self.keys, self.values, strict=True) for array in pair]
        _restore([array[block] for array in arrays], data, "a KV block")

    def _check(self, block: int) -> None:
        _check_index("a block that does not exist", block, self.n_blocks)


class StateSlots:
    """Recurrent states: per state an array f32[n_slots, *shape]."""

    def __init__(self, states: tuple[RecurrentState, ...], n_slots: int) -> None:
        self.n_slots = n_slots
        self.arrays: list[F32] = [np.zeros((n_slots, *state.shape), np.float32) for state in states]

    def clear(self, slot: int) -> None:
        """The states of an empty sequence: zero."""
        self._check(slot)
        for array in self.arrays:
            array[slot] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy all states of one slot."""
        self._check(source)
        self._check(target)
        for array in self.arrays:
            array[target] = array[source]

    def to_bytes(self, slot: int) -> bytes:
        """All states of one slot, in the program's order."""
        self._check(slot)
        return b"".join(array[slot].tobytes() for array in self.arrays)

    def from_bytes(self, slot: int, data: bytes) -> None:
        """Restore what `to_bytes` gave."""
        self._check(slot)
        _restore([array[slot] for array in self.arrays], data, "a slot")

    def _check(self, slot: int) -> None:
        _check_index("a slot that does not exist", slot, self.n_slots)


def _check_index(what: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise BackendError(describe(what, got=index, expected=f"0 to {count - 1}"))


def _restore(arrays: list[Floats] | list[F32], data: bytes, what: str) -> None:
    expected = sum(array.nbytes for array in arrays)
    if len(data) != expected:
        raise BackendError(describe(f"the bytes of {what} have another length", got=len(data), expected=expected))
    offset = 0
    for array in arrays:
        array[...] = np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape)
        offset += array.nbytes
