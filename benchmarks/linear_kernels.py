"""Speed of the linear kernels, format by format, next to what plain reading of memory reaches.

For every format and number of threads: GB/s of file bytes with one row, the cost of n rows relative to one, and
billions of multiply-adds per second with 256 rows. Times are the least of several repeats, so that neighbours on the
machine disturb little; read the ratios, not the last digit.

    python benchmarks/linear_kernels.py [--formats Q4_K,Q6_K] [--threads 1,2] [--megabytes 200] [--inputs 2048]

`KINETIC_SIMD` chooses the lowering. With `--cpu-time` (one thread only) the CPU time of the thread is measured, which
leaves out the time that other processes had the core.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numba import njit

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu.kernels.constants import n_groups, quantized_bytes
from kinetic_core.backends.cpu.packing import aligned_bytes, pack, packed_size
from kinetic_core.backends.cpu.simd import LOWERING, hsum, load_vi, xor, zero_i32
from kinetic_core.gguf.blocks import BLOCK_FORMATS, GGMLType

ROWS = (1, 2, 3, 4, 8, 16)
PROMPT_ROWS = 256
DEFAULT_FORMATS = "Q4_1,Q8_0,Q4_K,Q6_K,Q5_K,Q4_0,Q5_0,Q5_1,Q2_K,Q3_K,IQ4_NL,IQ4_XS,MXFP4,F16,BF16,F32"
Kernel = Callable[[int, int, int], None]


@njit(nogil=True)
def read_bytes(start: Any, n_bytes: Any) -> Any:
    """Read a region and return something that depends on all of it."""
    a, b, c, d = zero_i32(), zero_i32(), zero_i32(), zero_i32()
    for at in range(start, start + n_bytes - 255, 256):
        a, b = xor(a, load_vi(at)), xor(b, load_vi(at + 64))
        c, d = xor(c, load_vi(at + 128)), xor(d, load_vi(at + 192))
    return hsum(xor(xor(a, b), xor(c, d)))


def kernel(name: str) -> Kernel:
    """The compiled kernel as a function that releases the GIL."""
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    return prototype(kernel_compile.get(name).address)


def least_time(work: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of several runs."""
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        work()
        best = min(best, clock() - start)
    return best


class Bench:
    """One packed matrix with random bits, `PROMPT_ROWS` quantized rows, and room for the outputs."""

    def __init__(self, type_: GGMLType, n_in: int, n_bytes: int) -> None:
        layout = BLOCK_FORMATS[type_]
        self.n_in = n_in
        self.n_out = max(16, n_bytes // layout.n_bytes((n_in,)) // 16 * 16)
        rng = np.random.default_rng(0)
        weights = rng.integers(0, 120, layout.n_bytes((self.n_out, n_in)), np.uint8)
        self.file_bytes = weights.nbytes
        self.matrix = aligned_bytes(packed_size(type_, self.n_out, n_in))
        pack(type_, weights, self.n_out, n_in, self.matrix)
        kind = {1: "f32", 32: "q8_32", 256: "q8_256"}[layout.block_size]
        self.x = rng.standard_normal((PROMPT_ROWS, n_in)).astype(np.float32)
        self.rows = self.x.view(np.uint8).reshape(-1)
        if kind != "f32":
            self.rows = aligned_bytes(quantized_bytes(kind, n_in, PROMPT_ROWS))
            block = [PROMPT_ROWS, self.x.ctypes.data, 4 * n_in, self.rows.ctypes.data, 0, n_in]
            kernel(f"quantize_{kind}")(np.array(block, np.int64).ctypes.data, 0, PROMPT_ROWS)
        # A row stride that is no multiple of a page, as an engine's buffers should have.
        self.out = np.zeros((PROMPT_ROWS, self.n_out + 16), np.float32)
        self.kernel = kernel(f"linear_{type_.name.lower()}")

    def run(self, n_rows: int, pool: ThreadPoolExecutor, n_threads: int, groups: int) -> None:
        """Multiply `n_rows` rows by the first `groups` groups of outputs."""
        addresses = (self.rows.ctypes.data, 4 * self.n_in, self.matrix.ctypes.data)
        out = (self.out.ctypes.data, self.out.strides[0])
        block = np.array([n_rows, *addresses, self.n_in, self.n_out, *out], np.int64)
        if n_threads == 1:
            self.kernel(block.ctypes.data, 0, groups)
            return
        bounds = [groups * k // n_threads for k in range(n_threads + 1)]
        list(pool.map(lambda k: self.kernel(block.ctypes.data, bounds[k], bounds[k + 1]), range(n_threads)))


def read_bandwidth(n_bytes: int, n_threads: int, pool: ThreadPoolExecutor, clock: Callable[[], float]) -> float:
    """GB/s of reading a region of memory, the threads side by side."""
    region = np.ones(n_bytes, np.uint8)
    size = n_bytes // n_threads
    start = region.ctypes.data
    read_bytes(start, 4096)

    def work() -> None:
        if n_threads == 1:
            read_bytes(start, size)
        else:
            list(pool.map(lambda k: read_bytes(start + k * size, size), range(n_threads)))

    return n_bytes / least_time(work, 15, clock) / 1e9


def main() -> None:
    """Print one line per format and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=DEFAULT_FORMATS)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--megabytes", type=int, default=200, help="size of a matrix")
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    clock = time.thread_time if options.cpu_time else time.perf_counter
    threads = [1] if options.cpu_time else [int(n) for n in options.threads.split(",")]
    n_bytes = options.megabytes * 1_000_000
    names = options.formats.split(",")
    kernel_compile.prepare(["quantize_q8_32", "quantize_q8_256", *(f"linear_{name.lower()}" for name in names)])
    print(f"lowering {LOWERING}, matrices of {options.megabytes} MB, {options.inputs} inputs")
    with ThreadPoolExecutor(max(threads)) as pool:
        read = {n: read_bandwidth(n_bytes, n, pool, clock) for n in threads}
        print("read GB/s: " + ", ".join(f"{gb_s:.1f} ({n} threads)" for n, gb_s in read.items()))
        print(f"{'format':7} thr  GB/s share   cost of rows {ROWS[1:]}      GMAC/s at {PROMPT_ROWS}")
        for name in names:
            bench = Bench(GGMLType[name], options.inputs, n_bytes)
            groups = n_groups(bench.n_out)
            few = min(groups, max(1, (1 << 24) // (16 * bench.n_in)))
            for n in threads:
                times = [least_time(partial(bench.run, rows, pool, n, groups), options.repeats, clock) for rows in ROWS]
                gb_s = bench.file_bytes / times[0] / 1e9
                share = gb_s / read_bandwidth(n_bytes, n, pool, clock)
                prompt = least_time(partial(bench.run, PROMPT_ROWS, pool, n, few), options.repeats, clock)
                gmac_s = PROMPT_ROWS * 16 * few * bench.n_in / prompt / 1e9
                cost = " ".join(f"{t / times[0]:5.2f}" for t in times[1:])
                print(f"{name:7} {n:3} {gb_s:5.1f} {share:5.0%}   {cost}   {gmac_s:6.0f}", flush=True)


if __name__ == "__main__":
    main()
