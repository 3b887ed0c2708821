"""Where the buffers of a step lie: names become addresses in one arena, and buffers whose time is over make room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu.tape import Block, KernelCall


@attrs.frozen
class Place:
    """Where a buffer will lie, `offset` bytes in; becomes an address when buffers are laid out."""

    name: Any
    offset: int = 0


@attrs.define
class Lowered:
    """The calls of a program, in order, with places in place of addresses.

    sizes:  bytes of each buffer. commit: the calls that make accepted drafts part of their sequence.
    given:  f32[max_rows, d_model], what a prediction block's hidden input reads.
    """

    calls: list[KernelCall] = attrs.field(factory=list)
    commit: list[KernelCall] = attrs.field(factory=list)
    sizes: dict[Any, int] = attrs.field(factory=dict)
    given: npt.NDArray[np.float32] | None = None


def resolve(args: tuple[Any, ...], where: Callable[[Place], int]) -> tuple[Any, ...]:
    """An argument block with addresses in place of places."""
    out: list[Any] = []
    for word in args:
        if isinstance(word, Place):
            out.append(where(word))
        elif isinstance(word, Block):
            out.append(Block(resolve(word.args, where)))
        else:
            out.append(word)
    return tuple(out)


def lay_out(
    calls: Sequence[KernelCall], phases: Sequence[int], sizes: dict[Any, int], lasting: Sequence[Any]
) -> tuple[dict[Any, int], int]:
    """Byte offsets of the buffers in one arena, and its size; a buffer's room is free again after its last phase.

    lasting: names of buffers that are read after the step.
    """
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for call, phase in zip(calls, phases, strict=True):
        for name in (*call.reads, *call.writes):
            if name in sizes:
                first.setdefault(name, phase)
                last[name] = phase
    for name in lasting:
        last[name] = len(calls)
    offsets: dict[Any, int] = {}
    free: list[tuple[int, int]] = []
    end = 0
    live: list[tuple[int, Any]] = []
    for name in sorted(first, key=lambda name: (first[name], str(name))):
        size = -(-sizes[name] // 64) * 64
        for _, dead in [entry for entry in live if entry[0] < first[name]]:
            free = _merge_free([*free, (offsets[dead], -(-sizes[dead] // 64) * 64)])
        live = [entry for entry in live if entry[0] >= first[name]]
        fitting = [hole for hole in free if hole[1] >= size]
        if fitting:
            hole = min(fitting, key=lambda hole: (hole[1], hole[0]))
            free.remove(hole)
            offsets[name] = hole[0]
            if hole[1] > size:
                free.append((hole[0] + size, hole[1] - size))
        else:
            offsets[name] = end
            end += size
        live.append((last[name], name))
    return offsets, end


def _merge_free(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Adjacent holes as one."""
    merged: list[tuple[int, int]] = []
    for start, size in sorted(holes):
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    return merged
