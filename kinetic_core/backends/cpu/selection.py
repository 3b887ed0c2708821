"""The calls after the output layer: the search for NaN and for each output's best tokens."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu.kernels.constants import MAX_TOP_K
from kinetic_core.backends.cpu.layout import Place
from kinetic_core.backends.cpu.pools import address_of, allocate
from kinetic_core.backends.cpu.step import StepArrays
from kinetic_core.backends.cpu.tape import Count, KernelCall
from kinetic_core.program.values import Value


@attrs.define
class Selection:
    """The buffers of the selection kernels; `ids` and `scores` hold each output's best tokens."""

    ids: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    status: npt.NDArray[np.int64]
    calls: list[KernelCall]
    kept: list[npt.NDArray[Any]]


def lower_selection(logits: Value, place: tuple[Place, int], step: StepArrays, max_outputs: int) -> Selection:
    """The calls that search the logits for NaN and for the best tokens."""
    vocab = logits.width
    length = max(2048, -(-vocab // 1024))
    n_slices = -(-vocab // length)
    lists = allocate(max_outputs * n_slices * MAX_TOP_K, np.int64, "candidates")
    scores = allocate(max_outputs * n_slices * MAX_TOP_K, np.float32, "candidates")
    found = np.zeros(max_outputs * n_slices, np.int64)
    best = np.zeros((max_outputs, MAX_TOP_K), np.int32)
    best_scores = np.zeros((max_outputs, MAX_TOP_K), np.float32)
    status = np.zeros(1, np.int64)
    shared = (vocab, length, n_slices, *(address_of(a) for a in (step.top_k, lists, scores, found, status)))
    name = place[0].name
    calls = [
        KernelCall(
            "select_slices",
            (*place, *shared),
            {Count.OUTPUTS: n_slices},
            frozenset({name}),
            frozenset({"slices"}),
            label="select",
        ),
        KernelCall(
            "merge_slices",
            (*place, *shared, address_of(best), address_of(best_scores)),
            {Count.OUTPUTS: 1},
            frozenset({"slices"}),
            frozenset({"best"}),
            label="select",
        ),
    ]
    return Selection(best, best_scores, status, calls, [lists, scores, found])
