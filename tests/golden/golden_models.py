"""Golden models: published-shape miniatures with logits from an independent reference implementation."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import attrs
import numpy as np

from kinetic_core.gguf import open_model_file
from kinetic_core.interfaces import Executable, HeadRequest, LoadOptions, RowBatch, SequenceRows
from kinetic_core.plugins import load_registry
from kinetic_core.program.record import record_program

DATA = Path(__file__).parent.parent / "data"
REGISTRY = load_registry()
MAX_ROWS = 64


@attrs.frozen
class Backend:
    """A backend and how far its logits may be from the goldens, in standard deviations of the golden logits.

    largest: largest difference on a float32 file with a float32 cache. rms: root-mean-square difference per
    quantized type, for a backend that also rounds activations; None: quantized files are held to `largest` too.
    """

    name: str
    largest: float = 1e-4
    rms: dict[str, float] | None = None

    def load(self, model: str) -> Executable:
        with open_model_file(DATA / f"{model}.gguf") as source:
            architecture = REGISTRY.architecture_for(source.architecture)(source)
            program = record_program(architecture, REGISTRY.get("head", "full")(), source)
            options = LoadOptions(n_threads=2, kv_type="f32", n_blocks=2, max_rows=MAX_ROWS, max_outputs=MAX_ROWS)
            return REGISTRY.get("backend", self.name)().load(program, source, options)


@cache
def golden(family: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{family}-golden.npz") as file:
        return {name: file[name] for name in file.files}


def run_prompt(executable: Executable, ids: np.ndarray, start: int = 0) -> np.ndarray:
    """The logits of every token of a prompt, run in steps of at most 64 rows: f32[tokens, vocab]."""
    table = np.array([1], np.int32)
    logits = []
    for first in range(0, len(ids), MAX_ROWS):
        part = np.asarray(ids[first : first + MAX_ROWS], np.int32)
        n, position = len(part), start + first
        executable.run(
            RowBatch(
                part,
                np.arange(position, position + n, dtype=np.int32),
                (SequenceRows(0, position, n, table, -1),),
                [HeadRequest(row, None) for row in range(n)],
            )
        )
        logits += [executable.logits(row).copy() for row in range(n)]
    return np.array(logits)
