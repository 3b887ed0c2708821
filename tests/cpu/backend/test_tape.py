"""The tape and its threads: order of phases, idleness, the floating-point mode, wake-ups."""

from __future__ import annotations

import platform
import threading
import time

import numpy as np
import pytest

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu.kernels import elementwise
from kinetic_core.backends.cpu.tape import (
    Block,
    Count,
    KernelAddress,
    KernelCall,
    Tape,
    assign_phases,
    float_bits,
    kernel_names,
)
from kinetic_core.backends.cpu.workers import WorkerPool, default_threads

FLUSHING = 0x9FC0
"""MXCSR as libraries set it for speed: flush to zero, denormals are zero."""


@pytest.fixture
def pool(request):
    kernel_compile.prepare(["gather_rows", "elementwise"])
    opened = WorkerPool(request.param)
    yield opened
    opened.close()


def copy_call(source: np.ndarray, target: np.ndarray, order: np.ndarray, name: int) -> KernelCall:
    """target[i] = source[order[i]], one item per row."""
    row = source.strides[0]
    args = (source.ctypes.data, row, order.ctypes.data, target.ctypes.data, row, row)
    return KernelCall("gather_rows", args, {Count.ROWS: 1}, frozenset({name}), frozenset({name + 1}))


def make_tape(calls, n_threads: int, phases=None) -> Tape:
    phases = assign_phases(calls) if phases is None else phases
    return Tape(calls, phases, lambda name: kernel_compile.get(name).address, n_threads)


def counts(n_rows: int) -> list[int]:
    return [1, n_rows, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("pool", [1, 2, 5], indirect=True)
def test_a_phase_sees_all_of_the_earlier_ones(pool):
    """A long chain of permutations: one chunk that ran too early would leave a wrong number at its end."""
    n, length = 64, 60
    rng = np.random.default_rng(0)
    buffers = [np.zeros((n, 2), np.int64) for _ in range(length + 1)]
    orders = [rng.permutation(n).astype(np.int64) for _ in range(length)]
    calls = [copy_call(buffers[k], buffers[k + 1], orders[k], k) for k in range(length)]
    assert assign_phases(calls) == list(range(length))
    tape = make_tape(calls, pool.n_threads)
    expected = np.arange(n)
    for order in orders:
        expected = expected[order]
    for run in range(1, 151):
        rows = 64 if run % 2 else 63
        buffers[0][:, 0] = np.arange(n) * run
        tape.prepare(counts(n))
        pool.run(tape)
        assert np.array_equal(buffers[-1][:, 0], expected * run)
        tape.prepare(counts(rows))


def wait_until_asleep(pool: WorkerPool) -> None:
    deadline = time.monotonic() + 30
    while not all(flag == 1 for flag in pool._flags[1:]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.02)  # from the mark to the semaphore


def test_phases():
    def call(reads: str, writes: str) -> KernelCall:
        return KernelCall("gather_rows", (), {}, frozenset(reads), frozenset(writes))

    calls = [call("x", "q"), call("x", "k"), call("q", "a"), call("k", "b"), call("z", "a"), call("b", "z")]
    # q and k together; what reads them next; a second writer of a; a writer of what was read before
    assert assign_phases(calls) == [0, 0, 1, 1, 2, 3]


def test_argument_blocks():
    inner = Block((7, Count.OUTPUTS))
    tape = make_tape([KernelCall("gather_rows", (1, 0.5, Count.ROWS, inner), {}, frozenset(), frozenset())], 1)
    tape.prepare([1, 30, 40, 0, 0, 0, 0])
    words = tape._words
    assert words[:3].tolist() == [1, float_bits(0.5), 30]
    assert words[3] == words.ctypes.data + 8 * 4
    assert words[4:6].tolist() == [7, 40]


def test_a_kernel_that_calls_others_names_them():
    block = Block((1, KernelAddress("elementwise")))
    call = KernelCall("gather_rows", (KernelAddress("elementwise"), block), {}, frozenset(), frozenset())
    tape = make_tape([call], 1)
    address = kernel_compile.get("elementwise").address
    assert tape._words[0] == address and tape._words[3] == address
    assert kernel_names([call]) == {"gather_rows", "elementwise"}


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_workers_that_sleep_use_no_cpu_and_wake_again(pool):
    buffers = [np.zeros((64, 2), np.int64) for _ in range(2)]
    tape = make_tape([copy_call(*buffers, np.arange(64), 0)], 3)
    tape.prepare(counts(64))
    pool.run(tape)
    wait_until_asleep(pool)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02
    for run in range(20):
        buffers[0][:] = run
        pool.run(tape)
        assert (buffers[1] == run).all()
        time.sleep(0.004)


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("pool", [1, 3], indirect=True)
def test_an_interrupt_within_a_step_ends_it_first(pool, asleep: bool, monkeypatch):
    """Ctrl-C after the step was opened: its work is done when the exception comes, and every thread goes on."""
    buffers = [np.zeros((64, 2), np.int64) for _ in range(40)]
    order = np.arange(64)[::-1].copy()
    calls = [copy_call(buffers[k], buffers[k + 1], order, k) for k in range(39)]
    tape = make_tape(calls, pool.n_threads)
    tape.prepare(counts(64))
    pool.run(tape)
    opened = pool._open

    def open_then_interrupt(*args: int) -> None:
        opened(*args)
        raise KeyboardInterrupt

    for run in range(1, 20):
        if asleep:
            wait_until_asleep(pool)
        buffers[0][:, 0] = np.arange(64) * run
        monkeypatch.setattr(pool, "_open", open_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(tape)
        assert (buffers[-1][:, 0] == order * run).all()
        monkeypatch.setattr(pool, "_open", opened)
        buffers[0][:, 0] = np.arange(64) * -run
        pool.run(tape)
        assert (buffers[-1][:, 0] == order * -run).all()
    wait_until_asleep(pool)  # nobody was forgotten: a worker that was not woken would never be woken again


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_a_worker_may_close_its_own_pool(pool, monkeypatch):
    """The garbage collector may free a model that nobody closed on any thread, one of its own workers included."""
    wait_until_asleep(pool)
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setattr(pool, "_work", lambda *args: pool.close())
    pool._semaphores[1].release()
    for thread in pool._threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not errors


@pytest.mark.parametrize("pool", [4], indirect=True)
def test_closing_ends_the_threads(pool):
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kinetic-worker")]
    assert len(threads) == 3
    pool.close()
    pool.close()
    assert not any(thread.is_alive() for thread in threads)


def set_mode(mode: int) -> int:
    """Set the thread's floating-point mode; what it was."""
    from numba import njit

    from kinetic_core.backends.cpu.simd.machine import float_mode, set_float_mode

    @njit
    def swap(new):
        old = float_mode()
        set_float_mode(new)
        return old

    return swap(mode)


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="sets an x86 register")
@pytest.mark.parametrize("threads", [1, 2])
def test_flush_to_zero_of_the_caller_changes_nothing_and_is_restored(threads: int):
    """Denormal products, on threads that inherit flush-to-zero, are those of IEEE arithmetic."""
    kernel_compile.prepare(["elementwise", "gather_rows"])
    x = np.full((256, 16), 2.0**-100, np.float32)
    out = np.zeros_like(x)
    args = (elementwise.MULTIPLY, 16, x.ctypes.data, 64, out.ctypes.data, 64, x.ctypes.data, 0, 0, 1.0)
    y = np.full(16, 2.0**-40, np.float32)
    args = (*args[:6], y.ctypes.data, 0, 0, 1.0)
    call = KernelCall("elementwise", args, {Count.ROWS: 1}, frozenset(), frozenset())
    before = set_mode(FLUSHING)
    try:
        pool = WorkerPool(threads)  # its threads inherit the mode
        tape = make_tape([call], threads)
        tape.prepare(counts(256))
        for _ in range(20):
            out[:] = 0
            pool.run(tape)
            bits = out.view(np.int32)
            assert (bits == 1 << 9).all()  # 2^-140 = 2^9 times the least denormal
        pool.close()
    finally:
        after = set_mode(before)
    assert after & 0xFFC0 == FLUSHING


def test_default_threads_fit_the_process():
    assert 1 <= default_threads() <= 4096
