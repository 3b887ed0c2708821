"""The families' variants as models in memory, and what the reference computes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kinetic_core.gguf import MemoryTensors, read_tensor
from kinetic_core.interfaces import Architecture, Executable, HeadRequest, LoadOptions, RowBatch, SequenceRows
from kinetic_core.plugins import load_registry
from kinetic_core.program import Program
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model

KEYS = ("llama", "granitehybrid", "falcon-h1", "lfm2", "lfm2moe", "lfm3", "qwen35", "qwen35moe")
REGISTRY = load_registry()
FAMILIES = {key: REGISTRY.architecture_for(key) for key in KEYS}
VARIANTS = {(key, variant.name): variant for key in KEYS for variant in FAMILIES[key].tiny()}
FIRST = {key: FAMILIES[key].tiny()[0].name for key in KEYS}
PREDICTING = [names for names, variant in VARIANTS.items() if "nextn_predict_layers" in variant.metadata]
TOKENS = np.random.default_rng(5).integers(0, 100, 16).astype(np.int32)
N = len(TOKENS)


def model(key: str, name: str | None = None, keys: Mapping[str, Any] | None = None) -> MemoryTensors:
    """A random model of a variant, the first if unnamed, with some keys changed; None leaves one out."""
    source = random_model(key, VARIANTS[key, name or FIRST[key]])
    metadata = {**source.metadata.raw, **{f"{key}.{changed}": value for changed, value in (keys or {}).items()}}
    return MemoryTensors({full: value for full, value in metadata.items() if value is not None}, tensors(source))


def tensors(source: MemoryTensors) -> dict[str, np.ndarray]:
    return {name: read_tensor(source, name) for name in source.tensors}


def changed(source: MemoryTensors, more: Mapping[str, np.ndarray], without: str | None = None) -> MemoryTensors:
    """The model with tensors added or replaced, and one left out."""
    kept = {name: array for name, array in tensors(source).items() if name != without}
    return MemoryTensors(source.metadata.raw, {**kept, **more})


def architecture(source: MemoryTensors) -> Architecture:
    return FAMILIES[source.metadata.get_str("general.architecture")](source)


def record(source: MemoryTensors) -> Program:
    return record_program(architecture(source), FullHead(), source)


def load(source: MemoryTensors) -> Executable:
    return ReferenceBackend().load(record(source), source, LoadOptions(kv_type="f32", max_outputs=N))


def rows(first: int) -> RowBatch:
    """TOKENS from the given on, each at its position, all of their logits wanted."""
    n = N - first
    sequence = SequenceRows(0, first, n, np.zeros(1, np.int32), 0)
    heads = [HeadRequest(row, None) for row in range(n)]
    return RowBatch(TOKENS[first:], np.arange(first, N, dtype=np.int32), (sequence,), heads)


def logits(source: MemoryTensors) -> np.ndarray:
    """f32[N, vocab]"""
    executable = load(source)
    executable.run(rows(0))
    return np.array([executable.logits(row) for row in range(N)])


def predicted(source: MemoryTensors, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of the prediction block for TOKENS[1:]. hidden: the trunk's before each."""
    executable = load(source)
    executable.predict(rows(1), hidden)
    return np.array([executable.logits(row) for row in range(N - 1)]), executable.hidden(0, N - 1)
