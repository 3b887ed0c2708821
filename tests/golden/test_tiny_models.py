"""Random miniatures of every variant, whose logits the compiled backend must share with the reference."""

from __future__ import annotations

import numpy as np
import pytest
from golden_models import REGISTRY

from kinetic_core.gguf import MemoryTensors
from kinetic_core.interfaces import Executable, HeadRequest, LoadOptions, RowBatch, SequenceRows
from kinetic_core.program.record import record_program
from kinetic_core.reference.random_model import random_model, with_tensor_type

MODELS = {
    f"{key}-{variant.name}": (key, variant)
    for key in ("llama", "granitehybrid", "falcon-h1", "lfm2", "lfm2moe", "lfm3", "tiny-hybrid")
    for variant in REGISTRY.architecture_for(key).tiny()
}
TREE = ((7, 20), (8, 21), (9, 20), (10, 23))
"""Drafts after 21 committed rows: (token, offset of the parent)."""


def load(backend: str, key: str, source: MemoryTensors, kv_type: str) -> Executable:
    architecture = REGISTRY.architecture_for(key)(source)
    program = record_program(architecture, REGISTRY.get("head", "full")(), source)
    options = LoadOptions(n_threads=2, kv_type=kv_type, n_blocks=2, n_slots=2, max_rows=32, max_outputs=32)
    return REGISTRY.get("backend", backend)().load(program, source, options)


def logits(executable: Executable) -> np.ndarray:
    """Two prompt steps of 21 rows, the second with four drafts in two branches: f32[46, vocab]."""
    tokens = np.random.default_rng(6).integers(0, 100, 42).astype(np.int32)
    table = np.array([1], np.int32)
    got = []
    for start, drafts in ((0, ()), (21, TREE)):
        positions = list(range(start, start + 21))
        for _, parent in drafts:
            positions.append(positions[parent] + 1)
        ids = [*tokens[start : start + 21], *(token for token, _ in drafts)]
        executable.run(
            RowBatch(
                np.array(ids, np.int32),
                np.array(positions, np.int32),
                (SequenceRows(0, start, 21, table, 0, tuple(parent for _, parent in drafts)),),
                [HeadRequest(row, None) for row in range(len(ids))],
            )
        )
        got += [executable.logits(row).copy() for row in range(len(ids))]
    executable.close()
    return np.array(got)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_f32_models(name: str, kv_type: str):
    key, variant = MODELS[name]
    source = random_model(key, variant, seed=11)
    expected = logits(load("reference", key, source, kv_type))
    got = logits(load("cpu", key, source, kv_type))
    # A key or value that lies between two float16 may be rounded to either side.
    limit = 1e-4 if kv_type == "f32" else 2e-3
    assert np.abs(got - expected).max() < limit * expected.std()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tensor_type", ["Q8_0", "F16"])
def test_stored_types(name: str, tensor_type: str):
    key, variant = MODELS[name]
    source = with_tensor_type(random_model(key, variant, seed=11), tensor_type)
    expected = logits(load("reference", key, source, "f32"))
    difference = logits(load("cpu", key, source, "f32")) - expected
    if tensor_type == "F16":
        assert np.abs(difference).max() < 1e-4 * expected.std()
        return
    squares = np.mean(difference**2, axis=1)
    # A rounded activation can turn the choice of experts around, which moves a few positions' logits as a whole.
    typical = np.median(squares) if variant.metadata.get("expert_count") else np.mean(squares)
    assert np.sqrt(typical) < 0.03 * expected.std()
