"""Executables that several tests share, and what they leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cpu_steps import hybrid_program, load_cpu

from kinetic_core.backends.cpu.backend import CpuExecutable


@pytest.fixture
def load() -> Iterator[Any]:
    """load(program, source, **options) -> a fresh CPU executable, closed after the test."""
    opened: list[CpuExecutable] = []

    def open_model(*args: Any, **options: Any) -> CpuExecutable:
        opened.append(load_cpu(*args, **options))
        return opened[-1]

    yield open_model
    for executable in opened:
        executable.close()


@pytest.fixture
def hybrid(load: Any) -> CpuExecutable:
    return load(*hybrid_program())
