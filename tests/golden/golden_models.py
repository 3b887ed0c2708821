"""Golden models: published-shape miniatures with logits from an independent reference implementation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import attrs
import numpy as np

from kinetic_core.gguf import MemoryTensors, TensorSource, open_model_file, read_tensor
from kinetic_core.interfaces import Executable, HeadRequest, LoadOptions, RowBatch, SequenceRows
from kinetic_core.plugins import load_registry
from kinetic_core.program.record import record_program
from kinetic_core.reference.random_model import with_tensor_type

DATA = Path(__file__).parent.parent / "data"
REGISTRY = load_registry()
MAX_ROWS = 64


@attrs.frozen
class Family:
    """A golden model and the files that it comes as.

    exact:   the file that the float32 goldens belong to: "f32", or "bf16" where the matrices are exact in it; None
             where the repository has quantized files only.
    rms:     quantized type -> how far logits may be from that file's goldens on a backend that also rounds
             activations: root-mean-square difference in standard deviations, llama.cpp's own and 15 %.
    experts: is `rms` the median over positions of each position's? A rounded activation can turn one position's
             choice of experts around, which moves that position's logits as a whole.
    """

    name: str
    exact: str | None = "f32"
    rms: Mapping[str, float] = {}
    experts: bool = False


FAMILIES = (
    Family("llama", rms={"q8_0": 1.15 * 0.012, "q4_k_m": 1.15 * 0.017}),
    Family("llama3rope"),
    Family("granitehybrid", "bf16", {"q8_0": 1.15 * 0.018, "q4_k_m": 1.15 * 0.028}),
    Family("granitehybridmoe", "bf16", {"q8_0": 1.15 * 0.022, "q4_k_m": 1.15 * 0.029}, experts=True),
    Family("falconh1", None, {"q8_0": 1.15 * 0.015, "q4_k_m": 1.15 * 0.023}),
    Family("falconh1nonorm"),
    Family("lfm2", "bf16", {"q8_0": 1.15 * 0.017, "q4_k_m": 1.15 * 0.024}),
    Family("lfm2moe", "bf16", {"q8_0": 1.15 * 0.019, "q4_k_m": 1.15 * 0.026}, experts=True),
    Family("lfm3", "bf16", {"q8_0": 0.023, "q4_k_m": 0.036}),
    Family("lfm3deep"),
)
EXACT = [family for family in FAMILIES if family.exact]
QUANTIZED = [(family, quantized) for family in FAMILIES for quantized in family.rms]


@attrs.frozen
class Backend:
    """A backend and how far its logits may be from the goldens, in standard deviations of the golden logits.

    largest: largest difference on a float32 file with a float32 cache. rounds_activations: are quantized files held
    to the family's `rms` instead?
    """

    name: str
    largest: float = 1e-4
    rounds_activations: bool = False

    def load(self, model: str) -> Executable:
        """model: "<family>-<type>"."""
        with open_golden(model) as source:
            architecture = REGISTRY.architecture_for(source.metadata.get_str("general.architecture"))(source)
            program = record_program(architecture, REGISTRY.get("head", "full")(), source)
            options = LoadOptions(
                n_threads=2, kv_type="f32", n_blocks=2, n_slots=1, max_rows=MAX_ROWS, max_outputs=MAX_ROWS
            )
            return REGISTRY.get("backend", self.name)().load(program, source, options)


@contextmanager
def open_golden(model: str) -> Iterator[TensorSource]:
    """The model's file; a Q8_0 one that is not there is made from the BF16 file, to the same bits."""
    path = DATA / f"{model}.gguf"
    if path.exists() or not model.endswith("-q8_0"):
        with open_model_file(path) as file:
            yield file
        return
    with open_model_file(DATA / f"{model.removesuffix('-q8_0')}-bf16.gguf") as file:
        exact = MemoryTensors(file.metadata.raw, {name: read_tensor(file, name) for name in file.tensors})
    yield with_tensor_type(exact, "Q8_0")


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
                (SequenceRows(0, position, n, table, 0),),
                [HeadRequest(row, None) for row in range(n)],
            )
        )
        logits += [executable.logits(row).copy() for row in range(n)]
    return np.array(logits)
