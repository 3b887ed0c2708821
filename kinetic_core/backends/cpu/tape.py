"""The tape: a program as kernel calls on fixed addresses, with the counts of one step filled in by a few array ops.

`KernelCall` describes one call; `Tape` lays calls out in the form that `kernels.run_tape` reads. Calls are grouped in
phases: those of one phase may run at the same time, a phase starts when every chunk of the earlier ones is done.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import attrs
import numpy as np

from kinetic_core.backends.cpu.kernels.constants import CALL_WORDS


class Count(IntEnum):
    """What a step has some number of."""

    FIXED = 0
    """Always 1."""
    ROWS = 1
    """Rows of the step."""
    OUTPUTS = 2
    """Rows whose logits are wanted."""
    TILES = 3
    """Groups of adjacent rows of one sequence, see `step.py`."""
    SEQUENCES = 4
    """Sequences."""
    DRAFTS = 5
    """Draft rows."""
    SPLIT_ROWS = 6
    """Long rows whose chunks are shared by several threads."""


N_COUNTS = len(Count)


@attrs.frozen
class Block:
    """An argument block inside another: the word becomes its address."""

    args: tuple[Any, ...]


@attrs.frozen
class KernelAddress:
    """A kernel that another one calls: the word becomes the address of its machine code."""

    kernel: str


@attrs.frozen
class KernelCall:
    """One kernel call of a tape.

    kernel:    the kernel's registered name.
    args:      the words of its argument block: integers, floats (stored as the bits of a float64), a `Count`, which is
               filled in before each step, a `Block` or a `KernelAddress`.
    items:     how many work items each `Count` contributes.
    reads, writes: names of what it reads and writes, for the order of calls.
    grain:     least items of a chunk.
    label:     what it does, for the profile.
    """

    kernel: str
    args: tuple[Any, ...]
    items: dict[Count, int]
    reads: frozenset[Any]
    writes: frozenset[Any]
    grain: int = 1
    label: str = ""


def float_bits(value: float) -> int:
    """The bits of a float64 as a signed 64-bit integer: how a float travels in an argument block."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def assign_phases(calls: Sequence[KernelCall]) -> list[int]:
    """The phase of each call: it starts a new one when it touches what a call of the current phase touches."""
    phases: list[int] = []
    phase = 0
    reads: set[Any] = set()
    writes: set[Any] = set()
    for call in calls:
        if call.reads & writes or call.writes & (writes | reads):
            phase += 1
            reads, writes = set(), set()
        reads |= call.reads
        writes |= call.writes
        phases.append(phase)
    return phases


def kernel_names(calls: Sequence[KernelCall]) -> set[str]:
    """The kernels that calls need, those that their kernels call included."""

    def named(args: tuple[Any, ...]) -> Iterator[str]:
        for word in args:
            if isinstance(word, KernelAddress):
                yield word.kernel
            elif isinstance(word, Block):
                yield from named(word.args)

    return {name for call in calls for name in (call.kernel, *named(call.args))}


def _n_words(args: tuple[Any, ...]) -> int:
    return len(args) + sum(_n_words(word.args) for word in args if isinstance(word, Block))


class Tape:
    """Calls laid out for the threads.

    address:  maps a kernel name to its machine code.
    n_threads: how many threads share the work; a call is cut into a few chunks for each.
    """

    CHUNKS_PER_THREAD = 4

    def __init__(
        self,
        calls: Sequence[KernelCall],
        phases: Sequence[int],
        address: Callable[[str], int],
        n_threads: int,
    ) -> None:
        self.calls = tuple(calls)
        self.phases = np.asarray(phases, np.int64)
        self.n_phases = int(self.phases[-1]) + 1 if len(calls) else 0
        self._n_threads = n_threads
        self._address = address
        self._words = np.zeros(sum(_n_words(call.args) for call in calls), np.int64)
        self.table = np.zeros((len(calls), CALL_WORDS), np.int64)
        self._used = 0
        self._count_words: list[list[int]] = [[] for _ in Count]
        for number, call in enumerate(calls):
            self.table[number, 0] = address(call.kernel)
            self.table[number, 1] = self._place(call.args)
        self._fields = [(count, np.asarray(at, np.int64)) for count, at in enumerate(self._count_words) if at]
        self._coefficients = np.array(
            [[call.items.get(count, 0) for count in Count] for call in calls], np.int64
        ).reshape(len(calls), N_COUNTS)
        self._least_grain = np.array([call.grain for call in calls], np.int64)
        self._counts: tuple[int, ...] | None = None
        self.n_chunks = 0

    def _place(self, args: tuple[Any, ...]) -> int:
        """Lay an argument block down; its address."""
        begin = self._used
        self._used += len(args)
        for at, word in enumerate(args, begin):
            if isinstance(word, Block):
                self._words[at] = self._place(word.args)
            elif isinstance(word, KernelAddress):
                self._words[at] = self._address(word.kernel)
            elif isinstance(word, Count):
                self._count_words[word].append(at)
            else:
                self._words[at] = float_bits(word) if isinstance(word, float) else word
        return int(self._words.ctypes.data) + 8 * begin

    def prepare(self, counts: Sequence[int]) -> None:
        """Fill in a step's counts, in the order of `Count`."""
        counts = tuple(counts)
        if counts == self._counts or not self.calls:
            return
        for count, at in self._fields:
            self._words[at] = counts[count]
        items = self._coefficients @ np.array(counts, np.int64)
        wanted = self._n_threads * self.CHUNKS_PER_THREAD if self._n_threads > 1 else 1
        grain = np.maximum(self._least_grain, -(-items // wanted))
        chunks = -(-items // grain)
        end = np.cumsum(chunks)
        table = self.table
        table[:, 2] = items
        table[:, 3] = grain
        table[:, 4] = end - chunks
        table[:, 5] = end
        per_phase = np.bincount(self.phases, weights=chunks, minlength=self.n_phases).astype(np.int64)
        before = np.cumsum(per_phase) - per_phase
        table[:, 6] = before[self.phases]
        self.n_chunks = int(end[-1])
        self._counts = counts
