"""How large the pools are: context, KV blocks and recurrent-state slots, by what memory allows."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

import attrs

from kinetic_core.engine.engine import EngineOptions
from kinetic_core.errors import CapacityError, RequestError, describe
from kinetic_core.interfaces.batch import BLOCK_TOKENS
from kinetic_core.state.sequence import blocks_for

if TYPE_CHECKING:
    from kinetic_core.program import Program

DEFAULT_CONTEXT = 32768
DEFAULT_PARALLEL = 16
MAX_PARALLEL = 256
SHARE_OF_MEMORY = 0.5
"""The part of the memory left beside the weights that keys, values and states may fill by default."""


@attrs.frozen
class Sizes:
    """What the pools hold, and what that takes when full (it is touched only as it is used)."""

    context_length: int
    parallel: int
    n_blocks: int
    kv_bytes: int
    state_bytes: int

    def engine_options(self, *, has_states: bool, kv_type: str) -> EngineOptions:
        """The engine's sizes."""
        return EngineOptions(
            context_length=self.context_length,
            n_blocks=self.n_blocks,
            n_slots=self.parallel,
            max_rows=BLOCK_TOKENS + -(-self.parallel // 8) * 8,
            max_outputs=max(32, self.parallel),
            has_states=has_states,
            kv_type=kv_type,
            max_sequences=self.parallel,
        )


def choose_sizes(
    program: Program,
    model_context: int,
    *,
    weight_bytes: int,
    kv_type: str,
    ctx: int | None = None,
    parallel: int | None = None,
    memory_bytes: int | None = None,
) -> Sizes:
    """Context and pools.

    ctx: None: the least of the model's own, 32,768 and what memory allows.
    parallel: sequences at the same time; None: 16, or fewer where their recurrent states would fill memory.
    memory_bytes: memory that is free now; None: asks the system.
    Raises RequestError for a ctx or parallel out of range, CapacityError when one context of that size does not fit.
    """
    if ctx is not None and not 1 <= ctx <= model_context:
        raise RequestError(
            describe("ctx cannot be used", got=ctx, expected=f"1 to {model_context}, the model's own context"),
            field="ctx",
        )
    if parallel is not None and not 1 <= parallel <= MAX_PARALLEL:
        raise RequestError(
            describe("parallel cannot be used", got=parallel, expected=f"1 to {MAX_PARALLEL}"), field="parallel"
        )
    free = max(0, (available_memory_bytes() if memory_bytes is None else memory_bytes) - weight_bytes)
    budget = int(free * SHARE_OF_MEMORY)
    state_bytes = program.state_bytes
    if parallel is None:
        fitting = budget // 2 // state_bytes if state_bytes else DEFAULT_PARALLEL
        parallel = max(1, min(DEFAULT_PARALLEL, fitting))
    block_bytes = program.kv_bytes_per_position(kv_type) * BLOCK_TOKENS
    budget -= parallel * state_bytes
    fitting_blocks = max(0, budget) // block_bytes if block_bytes else parallel * blocks_for(model_context)
    if ctx is None:
        ctx = min(model_context, DEFAULT_CONTEXT)
        if fitting_blocks < blocks_for(ctx):
            ctx = min(ctx, max(1, fitting_blocks) * BLOCK_TOKENS)
    one_context = blocks_for(ctx)
    needed = one_context * block_bytes + state_bytes
    if needed > free:
        raise CapacityError(
            describe(
                f"memory does not hold one sequence of {ctx} tokens",
                got=f"{free // 2**20} MiB beside the weights",
                expected=f"{needed // 2**20} MiB",
                hint="lower --ctx, or take a smaller model",
            )
        )
    n_blocks = max(one_context, min(parallel * one_context, fitting_blocks))
    return Sizes(ctx, parallel, n_blocks, n_blocks * block_bytes, parallel * state_bytes)


def available_memory_bytes() -> int:
    """Memory that can be had without swapping, as the system says; 4 GiB where it does not say."""
    if sys.platform.startswith("linux"):
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                for line in lines:
                    if line.startswith("MemAvailable:"):
                        return min(int(line.split()[1]) * 1024, _control_group_bytes())
        except (OSError, ValueError):
            pass
    if sys.platform == "win32":
        return _windows_bytes()
    names = getattr(os, "sysconf_names", {})
    if "SC_PAGE_SIZE" in names and "SC_PHYS_PAGES" in names:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4)
    return 4 * 2**30


def _control_group_bytes(folder: str = "/sys/fs/cgroup") -> int:
    """What a container's limit leaves; a very large number without one.

    Cached pages of files (a model that was just downloaded or read) count as free: the system gives them up on demand.
    """
    try:
        with open(f"{folder}/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        if limit == "max":
            return 2**62
        with open(f"{folder}/memory.current", encoding="ascii") as file:
            used = int(file.read())
        with open(f"{folder}/memory.stat", encoding="ascii") as file:
            figures = dict(line.split() for line in file)
        cached = int(figures["inactive_file"]) + int(figures["active_file"])
        return max(0, int(limit) - max(0, used - cached))
    except (OSError, ValueError, KeyError):
        return 2**62


def _windows_bytes() -> int:
    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            *((name, ctypes.c_uint64) for name in ("total", "available", "c", "d", "e", "f", "g")),
        )

    status = Status()
    status.length = ctypes.sizeof(Status)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.available)
