"""Programs and executables, for the steps of `kinetic_core.conformance.steps`."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from kinetic_core.backends.cpu.backend import CpuBackend, CpuExecutable
from kinetic_core.conformance.steps import Part, make_batch
from kinetic_core.gguf import MemoryTensors
from kinetic_core.interfaces import LoadOptions
from kinetic_core.program import Program, ProgramBuilder
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model
from kinetic_core.reference.tiny_hybrid import KEY, TinyHybrid

OPTIONS = LoadOptions(n_threads=2, kv_type="f32", n_blocks=6, n_slots=6, max_rows=400, max_outputs=400)


def predict(executable: Any, part: Part, hidden: np.ndarray) -> np.ndarray:
    """Run one prediction step; the logits of its rows, f32[rows, vocab]."""
    batch = make_batch(part)
    executable.predict(batch, hidden)
    return np.array([executable.logits(row) for row in range(batch.n_rows)])


def tokens_of(n: int, seed: int = 0, vocab: int = 100) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, vocab, n))


def hybrid_program(variant: str = "untied", seed: int = 1) -> tuple[Program, MemoryTensors]:
    source = random_model(KEY, next(v for v in TinyHybrid.tiny() if v.name == variant), seed)
    return record_program(TinyHybrid(source), FullHead(), source), source


def recurrence_program(
    kind: str, heads: int, groups: int, head_dim: int, state_dim: int
) -> tuple[Program, MemoryTensors]:
    """A "delta_rule" or "mamba2_scan" over a vocabulary of 8 embeddings; its logits are what it puts out."""
    rng = np.random.default_rng(0)
    inner, keys = heads * head_dim, groups * state_dim
    tensors = {
        "e": rng.standard_normal((8, inner + 2 * keys + 2 * heads)).astype(np.float32),
        "a": -rng.uniform(0.05, 1.5, heads).astype(np.float32),
        "d": rng.standard_normal(heads).astype(np.float32),
        "bias": rng.standard_normal(heads).astype(np.float32),
    }
    source = MemoryTensors({}, tensors)
    b = ProgramBuilder({name: info.shape for name, info in source.tensors.items()})
    a, d, bias = (b.weight(name, (heads,)) for name in ("a", "d", "bias"))
    parts = b.split(b.embedding(b.weight("e", tensors["e"].shape)), (inner, keys, keys, heads, heads))
    x, key, query, dt, beta = parts
    if kind == "mamba2_scan":
        out = b.mamba2_scan(x, key, query, b.softplus(dt, bias), a, d, heads=heads, groups=groups)
    else:
        q, k = b.l2_norm(query, 1e-6, state_dim), b.l2_norm(key, 1e-6, state_dim)
        decay, beta = b.decay_gate(dt, a, bias), b.sigmoid(beta)
        out = b.delta_rule(q, k, x, decay, beta, key_heads=groups, value_heads=heads)
    return b.finish(out, b.gather_outputs(out)), source


def load_cpu(program: Program, source: MemoryTensors, **options: Any) -> CpuExecutable:
    return CpuBackend().load(program, source, attrs.evolve(OPTIONS, **options))


def load_reference(program: Program, source: MemoryTensors, **options: Any) -> Any:
    return ReferenceBackend().load(program, source, attrs.evolve(OPTIONS, **options))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
