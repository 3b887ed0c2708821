"""The threads that run tapes.

The thread that calls `run` works too. The others are persistent: between steps they spin for a moment in compiled
code, so that the next token's step starts at once, and then block on a semaphore, so that an idle process uses no CPU.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu.kernels.constants import ASLEEP, CLOSED, LINE, STATE, STOP, TICKETS
from kinetic_core.backends.cpu.tape import Tape

KERNELS = ("open_step", "run_step", "work")
"""What has to be compiled besides a tape's own kernels."""

_SPINS = 400
"""Pauses before a thread that waits yields the CPU: some ten microseconds."""
_LINGER = 1500
"""Yields before an idle worker blocks: about a millisecond."""
_KERNEL_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def default_threads() -> int:
    """Physical (performance) cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
    else:
        allowed = set(range(os.cpu_count() or 1))
    count = _physical_cores(allowed) if sys.platform == "linux" else _logical_to_physical(len(allowed))
    limit = os.process_cpu_count() if hasattr(os, "process_cpu_count") else None
    return max(1, min(count, limit or count))


def _logical_to_physical(n_logical: int) -> int:
    """macOS names its performance cores; elsewhere every logical CPU counts as one core."""
    if sys.platform == "darwin":
        libc = ctypes.CDLL(None)
        value, size = ctypes.c_int32(0), ctypes.c_size_t(4)
        for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
            if libc.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value > 0:
                return min(n_logical, value.value)
    return n_logical


def _physical_cores(allowed: set[int]) -> int:
    """One per set of sibling threads; where cores differ in top speed (hybrid CPUs), only the fast ones."""
    cores: dict[str, int] = {}
    for cpu in allowed:
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}")
        try:
            siblings = (folder / "topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        try:
            speed = int((folder / "cpufreq/cpuinfo_max_freq").read_text())
        except (OSError, ValueError):
            speed = 0
        cores[siblings] = max(cores.get(siblings, 0), speed)
    fastest = max(cores.values(), default=0)
    return sum(1 for speed in cores.values() if speed >= 0.8 * fastest)


def yield_function_address() -> int:
    """The address of the system's function that lets another thread run."""
    if sys.platform == "win32":
        function = ctypes.WinDLL("kernel32").SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


class WorkerPool:
    """`n_threads` threads, the caller's included, that run one tape at a time.

    Used by one thread at a time. The kernels `KERNELS` must be compiled.
    """

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        n_words = ASLEEP + LINE * n_threads
        raw = np.zeros(n_words + LINE, np.int64)
        shift = (-raw.ctypes.data % 64) // 8
        self._raw = raw
        self._sync: npt.NDArray[np.int64] = raw[shift : shift + n_words]
        self._flags = self._sync[ASLEEP::LINE][:n_threads]
        self._args = np.zeros(8, np.int64)
        self._args[0] = self._sync.ctypes.data
        self._args[4] = yield_function_address()
        self._args[5] = _SPINS
        self._args[6] = _LINGER
        self._address = self._args.ctypes.data
        self._open, self._run, self._work = (_KERNEL_TYPE(kernel_compile.get(name).address) for name in KERNELS)
        self._semaphores = [threading.Semaphore(0) for _ in range(n_threads)]
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"kinetic-worker-{number}", daemon=True)
            for number in range(1, n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, number: int) -> None:
        while self._sync[STOP] == 0:
            self._work(self._address, number, 0)
            if self._sync[STOP] == 0:
                self._semaphores[number].acquire()

    def run(self, tape: Tape, profile: npt.NDArray[np.int64] | None = None) -> None:
        """Run every call of a prepared tape. profile: int64[n_threads, calls], clock ticks are added to it."""
        if tape.n_chunks == 0:
            return
        args = self._args
        args[1] = tape.table.ctypes.data
        args[2] = len(tape.calls)
        args[3] = tape.n_chunks
        args[7] = 0 if profile is None else profile.ctypes.data
        try:
            self._open(self._address, 0, self.n_threads)
            if self.n_threads > 1:
                for number in np.flatnonzero(self._flags[1:] == 2) + 1:
                    self._flags[number] = 0
                    self._semaphores[number].release()
            self._run(self._address, 0, 0)
        except BaseException:
            # Ctrl-C between two calls. Workers may be amid this step: it ends before the next one changes its table.
            if self._sync[STATE] % TICKETS != CLOSED:
                self._run(self._address, 0, 0)
            # Whoever was to be woken and was not; for the others a count too many costs one idle turn.
            for semaphore in self._semaphores[1:]:
                semaphore.release()
            raise

    def close(self) -> None:
        """Stop the threads. Idempotent; may be called by one of them, which then ends after the call."""
        if self._sync[STOP]:
            return
        self._sync[STOP] = 1
        for semaphore in self._semaphores[1:]:
            semaphore.release()
        own = threading.current_thread()  # the garbage collector runs anywhere
        for thread in self._threads:
            if thread is not own:
                thread.join()
