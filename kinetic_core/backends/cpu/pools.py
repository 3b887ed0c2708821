"""The pools of the CPU backend: KV blocks, recurrent-state slots, and tables of the rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.errors import BackendError, CapacityError, describe
from kinetic_core.interfaces.batch import BLOCK_TOKENS
from kinetic_core.program.elementary import MAX_ANGLE, exp64, log64, sincos64
from kinetic_core.program.program import KV_BYTES
from kinetic_core.program.values import KVLayer, RecurrentState


def allocate(n_elements: int, dtype: Any, what: str, *, zeroed: bool = False) -> npt.NDArray[Any]:
    """An array that begins on a cache line. Pages are taken as they are first written, zeroed or not.

    Raises:
        CapacityError: the system has no room for it.
    """
    kind = np.dtype(dtype)
    try:
        room = (np.zeros if zeroed else np.empty)(n_elements * kind.itemsize + 64, np.uint8)
    except MemoryError as error:
        raise CapacityError(
            describe(f"no memory for {what}", got=f"{n_elements * kind.itemsize / 2**20:.0f} MiB asked for")
        ) from error
    start = -room.ctypes.data % 64
    return room[start : start + n_elements * kind.itemsize].view(kind)


def address_of(array: npt.NDArray[Any]) -> int:
    """The address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


class KVPool:
    """Blocks of 256 positions, each with the keys and values of all layers; kernels/rope.py says how they lie."""

    def __init__(self, layers: Sequence[KVLayer], n_blocks: int, kv_type: str) -> None:
        size = KV_BYTES[kv_type]
        self.n_blocks = n_blocks
        offsets = [0]
        for layer in layers:
            offsets.append(offsets[-1] + 2 * layer.kv_heads * layer.head_dim * BLOCK_TOKENS * size)
        self.block_bytes = offsets.pop()
        self._data = allocate(n_blocks * self.block_bytes, np.uint8, "keys and values")
        self.layer_addresses = [address_of(self._data) + offset for offset in offsets]

    def view(self, block: int) -> npt.NDArray[np.uint8]:
        """u8[block_bytes] of one block. Raises BackendError for a block that does not exist."""
        _check_index("a block that does not exist", block, self.n_blocks)
        return self._data[block * self.block_bytes : (block + 1) * self.block_bytes]


class SlotPool:
    """Slots of recurrent states: the program's states one after the other, float32."""

    def __init__(self, states: Sequence[RecurrentState], n_slots: int) -> None:
        self.n_slots = n_slots
        self.offsets = [0]
        for state in states:
            self.offsets.append(self.offsets[-1] + state.n_bytes)
        self.slot_bytes = self.offsets.pop()
        self._data = allocate(n_slots * self.slot_bytes, np.uint8, "recurrent states", zeroed=True)
        self.address = address_of(self._data)

    def view(self, slot: int) -> npt.NDArray[np.uint8]:
        """u8[slot_bytes] of one slot. Raises BackendError for a slot that does not exist."""
        _check_index("a slot that does not exist", slot, self.n_slots)
        return self._data[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]


def _check_index(what: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise BackendError(describe(what, got=index, expected=f"0 to {count - 1}"))


def restore(view: npt.NDArray[np.uint8], data: bytes, what: str) -> None:
    """Copy bytes into a block or slot. Raises BackendError when the length differs."""
    if len(data) != view.size:
        raise BackendError(describe(f"the bytes of {what} have another length", got=len(data), expected=view.size))
    view[:] = np.frombuffer(data, np.uint8)


@attrs.frozen
class RopeSpec:
    """What a table depends on; factors are the bytes of f32[rotary_dim / 2], or None."""

    rotary_dim: int
    base: float
    interleaved: bool
    factors: bytes | None


class RopeTable:
    """Cosines and sines per position, as kernels/rope.py reads them; filled in as far as positions are used."""

    _STEP = 256

    def __init__(self, spec: RopeSpec, max_positions: int) -> None:
        self._spec = spec
        self._columns = spec.rotary_dim if spec.interleaved else spec.rotary_dim // 2
        self.position_bytes = 2 * 4 * self._columns
        self._data = allocate(max_positions * 2 * self._columns, np.float32, "a rope table").reshape(max_positions, -1)
        self.address = address_of(self._data)
        self._n_filled = 0
        pair = np.arange(spec.rotary_dim // 2, dtype=np.float64)
        self._frequencies = exp64(-2.0 * pair / spec.rotary_dim * float(log64(spec.base)))
        if spec.factors is not None:
            self._frequencies = self._frequencies / np.frombuffer(spec.factors, np.float32).astype(np.float64)

    def ensure(self, n_positions: int) -> None:
        """Fill in positions 0 … n_positions - 1 at least.

        Raises BackendError for more positions than the table holds, or angles beyond exact reduction.
        """
        if n_positions <= self._n_filled:
            return
        if n_positions > len(self._data):
            raise BackendError(describe("a position beyond the cache", got=n_positions - 1, expected=len(self._data)))
        end = min(len(self._data), -(-n_positions // self._STEP) * self._STEP)
        angles = np.arange(self._n_filled, end, dtype=np.float64)[:, None] * self._frequencies
        if np.abs(angles).max() > MAX_ANGLE:
            raise BackendError(
                describe("a rope angle is too large to reduce exactly", got=np.abs(angles).max(), expected=MAX_ANGLE)
            )
        sines, cosines = sincos64(angles)
        rows = self._data[self._n_filled : end]
        if self._spec.interleaved:
            rows[:, : self._columns : 2] = rows[:, 1 : self._columns : 2] = cosines
            rows[:, self._columns :: 2] = -sines
            rows[:, self._columns + 1 :: 2] = sines
        else:
            rows[:, : self._columns] = cosines
            rows[:, self._columns :] = sines
        self._n_filled = end
