"""Executables of the reference, for the steps of `kinetic_core.conformance.steps`."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from kinetic_core.gguf import MemoryTensors
from kinetic_core.interfaces import Executable, KernelBackend, LoadOptions
from kinetic_core.program import Program, ProgramBuilder
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend, ReferenceExecutable
from kinetic_core.reference.head import FullHead

OPTIONS = LoadOptions(kv_type="f16", n_blocks=6, n_slots=6, max_rows=400, max_outputs=400)


def load(architecture, source, backend: type[KernelBackend] = ReferenceBackend, **options) -> Executable:
    program = record_program(architecture(source), FullHead(), source)
    return backend().load(program, source, attrs.evolve(OPTIONS, **options))


def load_program(
    tensors: dict[str, np.ndarray], build: Callable[[ProgramBuilder], object], **options
) -> ReferenceExecutable:
    """An executable of a hand-written program whose logits are what `build` returns, for every wanted row."""
    source = MemoryTensors({}, tensors)
    b = ProgramBuilder({name: info.shape for name, info in source.tensors.items()})
    hidden = build(b)
    program: Program = b.finish(hidden, b.gather_outputs(hidden))
    return ReferenceBackend().load(program, source, attrs.evolve(OPTIONS, **options))
