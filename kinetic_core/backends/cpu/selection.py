"""The calls after the output layer: the search for NaN and for each output's best tokens."""

from __future__ import annotations

import numpy as np

from kinetic_core.backends.cpu.kernels.constants import MAX_TOP_K
from kinetic_core.backends.cpu.layout import Place
from kinetic_core.backends.cpu.pools import address_of, allocate
from kinetic_core.backends.cpu.step import StepArrays
from kinetic_core.backends.cpu.tape import Count, KernelCall
from kinetic_core.program.values import Value


class Selection:
    """The buffers of the selection kernels; `ids` and `scores` hold each output's best tokens of the last step."""

    def __init__(self, vocab: int, step: StepArrays, max_outputs: int) -> None:
        self._vocab = vocab
        self._length = max(2048, -(-vocab // 1024))
        self._n_slices = -(-vocab // self._length)
        self.ids = np.zeros((max_outputs, MAX_TOP_K), np.int32)
        self.scores = np.zeros((max_outputs, MAX_TOP_K), np.float32)
        self.status = np.zeros(1, np.int64)
        n = max_outputs * self._n_slices
        lists = allocate(n * MAX_TOP_K, np.int64, "candidates")
        scores = allocate(n * MAX_TOP_K, np.float32, "candidates")
        self._buffers = (step.top_k, lists, scores, np.zeros(n, np.int64), self.status)

    def calls(self, logits: Value) -> list[KernelCall]:
        """The calls that search these logits for NaN and for the best tokens."""
        name = ("value", logits.index)
        buffers = (address_of(array) for array in self._buffers)
        args = (Place(name), 4 * logits.width, self._vocab, self._length, self._n_slices, *buffers)
        slices, best = frozenset({"slices"}), frozenset({"best"})
        items = {Count.OUTPUTS: self._n_slices}
        select = KernelCall("select_slices", args, items, frozenset({name}), slices, label="select")
        args += (address_of(self.ids), address_of(self.scores))
        return [select, KernelCall("merge_slices", args, {Count.OUTPUTS: 1}, slices, best, label="select")]
