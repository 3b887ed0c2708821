"""The memory's read bandwidth: a compiled plain read over a large array, on as many threads as the model uses."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import numpy.typing as npt

ARRAY_BYTES = 512 * 2**20
"""Far larger than any cache."""


@numba.njit("uint64(uint64[::1])", nogil=True)
def _read(array: npt.NDArray[np.uint64]) -> np.uint64:
    total = np.uint64(0)
    for i in range(array.size):  # integers may be summed in any order: the compiler uses the widest loads there are
        total += array[i]
    return total


class BandwidthMeter:
    """Reads the same array again at every call, so that it can be asked beside what it is compared with.

    ::

        with BandwidthMeter(n_threads=2) as meter:
            print(meter.gb_s())
    """

    def __init__(self, n_threads: int, n_bytes: int = ARRAY_BYTES) -> None:
        array = np.full(n_bytes // 8, 1, np.uint64)
        self._slices = np.array_split(array, n_threads)
        self._n_bytes = array.nbytes
        self._expected = array.size
        self._pool = ThreadPoolExecutor(n_threads)

    def gb_s(self, passes: int = 3) -> float:
        """The best of some passes, in 10^9 bytes a second."""
        best = float("inf")
        for _ in range(passes):
            began = time.perf_counter()
            total = sum(int(part) for part in self._pool.map(_read, self._slices))
            best = min(best, time.perf_counter() - began)
            assert total == self._expected  # the compiler may not have skipped the reading
        return self._n_bytes / best / 1e9

    def __enter__(self) -> BandwidthMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
