"""The loop that runs a tape: every thread takes chunks of work by ticket until none is left.

The chunks of all calls of a step are numbered through, call after call. A thread waits until every chunk of the phases
before the next number's is done, draws the number, runs its chunk and counts it as done. Nobody waits for a thread that
runs no chunk: one that the system has put aside while it waited, or that wakes late, delays no one.

The synchronisation block (int64 words, each counter in its own cache line of 8 words):

    STATE    the step's number times 2^32, plus the next ticket, or CLOSED between steps
    DONE     chunks that are done
    STOP     1: workers leave for good
    ASLEEP   one line per worker: 1 while it sleeps (or is about to) and has to be woken

A worker that is late may still look at a step that has ended, even while the next one is prepared. It cannot draw a
ticket of it: a ticket is claimed by replacing the whole STATE that was read before the tape was.

The arguments of `open_step`, `run_step` and `work`: SYNC address, CALLS address, N_CALLS, N_CHUNKS,
YIELD (address of the system's yield function), SPINS (pauses before yielding), LINGER (yields before a worker sleeps),
PROFILE (address of int64[threads, calls] of clock ticks, or 0).

A call is CALL_WORDS words: kernel address, arguments address, items, grain, first ticket, end ticket, and the number
of chunks of all earlier phases.
"""

from __future__ import annotations

from numba import njit

from kinetic_core.backends.cpu.kernels import kernel
from kinetic_core.backends.cpu.kernels.constants import ASLEEP, CALL_WORDS, CLOSED, DONE, LINE, STATE, STOP, TICKETS
from kinetic_core.backends.cpu.simd.machine import (
    atomic_add,
    atomic_claim,
    atomic_exchange,
    atomic_load,
    atomic_store,
    call_kernel,
    call_yield,
    clock_ticks,
    float_mode,
    pause,
    set_exact_float_mode,
    set_float_mode,
)
from kinetic_core.backends.cpu.simd.memory import load_i64, store_i64


@njit
def _draw_and_run(args, thread, step):
    """Run chunks of a step until none is left."""
    sync = load_i64(args)
    call = load_i64(args + 8)
    n_calls = load_i64(args + 16)
    n_chunks = load_i64(args + 24)
    yield_function = load_i64(args + 32)
    spins = load_i64(args + 40)
    profile = load_i64(args + 56)
    number = 0
    spun = 0
    while True:
        state = atomic_load(sync + 8 * STATE)
        ticket = state % TICKETS
        if state // TICKETS != step or ticket >= n_chunks:
            return
        while ticket >= load_i64(call + 40) and number < n_calls - 1:
            call += 8 * CALL_WORDS
            number += 1
        if atomic_load(sync + 8 * DONE) < load_i64(call + 48):
            spun += 1
            if spun < spins:
                pause()
            else:
                call_yield(yield_function)
            continue
        if not atomic_claim(sync + 8 * STATE, state):
            continue
        spun = 0
        grain = load_i64(call + 24)
        begin = (ticket - load_i64(call + 32)) * grain
        end = min(begin + grain, load_i64(call + 16))
        if profile == 0:
            call_kernel(load_i64(call), load_i64(call + 8), begin, end)
        else:
            started = clock_ticks()
            call_kernel(load_i64(call), load_i64(call + 8), begin, end)
            spent = profile + 8 * (thread * n_calls + number)
            store_i64(spent, load_i64(spent) + clock_ticks() - started)
        atomic_add(sync + 8 * DONE, 1)


@kernel("open_step")
def open_step(args, begin, end):
    """Let workers in: those that linger start at once. Workers 1 … end - 1 that sleep are marked 2: wake them."""
    sync = load_i64(args)
    step = atomic_load(sync + 8 * STATE) // TICKETS + 1
    atomic_store(sync + 8 * DONE, 0)
    atomic_store(sync + 8 * STATE, step * TICKETS)
    for worker in range(1, end):
        flag = sync + 8 * (ASLEEP + LINE * worker)
        if atomic_exchange(flag, 0) == 1:
            atomic_store(flag, 2)


@kernel("run_step")
def run_step(args, begin, end):
    """The caller's share of an open step; returns when every chunk is done."""
    sync = load_i64(args)
    mode = float_mode()
    set_exact_float_mode()
    step = atomic_load(sync + 8 * STATE) // TICKETS
    _draw_and_run(args, 0, step)
    set_float_mode(mode)
    spun = 0
    n_chunks = load_i64(args + 24)
    while atomic_load(sync + 8 * DONE) < n_chunks:
        spun += 1
        if spun < load_i64(args + 40):
            pause()
        else:
            call_yield(load_i64(args + 32))
    atomic_store(sync + 8 * STATE, step * TICKETS + CLOSED)


@kernel("work")
def work(args, worker, end):
    """A worker's turn: runs its share of every step that opens, until none has for a while; then marks itself asleep.

    Worker numbers start at 1. Returns when the worker has to block until it is woken.
    """
    sync = load_i64(args)
    flag = sync + 8 * (ASLEEP + LINE * worker)
    seen = 0
    idle = 0
    mode = float_mode()
    set_exact_float_mode()
    atomic_store(flag, 0)
    while atomic_load(sync + 8 * STOP) == 0:
        state = atomic_load(sync + 8 * STATE)
        step = state // TICKETS
        if step != seen and state % TICKETS != CLOSED:
            _draw_and_run(args, worker, step)
            seen = step
            idle = 0
        elif idle < load_i64(args + 48):
            idle += 1
            for _ in range(16):
                pause()
            call_yield(load_i64(args + 32))
        else:
            atomic_store(flag, 1)
            state = atomic_load(sync + 8 * STATE)
            if state // TICKETS == seen or state % TICKETS == CLOSED:
                break
            # A step opened meanwhile and may have missed the mark: take it back. If the mark was seen all the same,
            # the semaphore's extra count costs one idle turn later.
            atomic_exchange(flag, 0)
            idle = 0
    set_float_mode(mode)
