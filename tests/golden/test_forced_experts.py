"""Mixtures of experts where every row goes to the experts that the exact reference chose for it.

A rounded activation can turn one row's choice around, which moves that row's logits as a whole; the choices forced,
what is left is rounding, and the root-mean-square difference of all positions together is as small as elsewhere.
"""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from golden_models import FAMILIES, MAX_ROWS, REGISTRY, Family, golden, open_golden, run_prompt

from kinetic_core.backends.cpu.backend import CpuExecutable
from kinetic_core.gguf import MemoryTensors, RawTensor, TensorSource
from kinetic_core.interfaces import LoadOptions
from kinetic_core.program import ops
from kinetic_core.program.program import Program
from kinetic_core.program.record import record_program
from kinetic_core.program.values import Weight
from kinetic_core.reference.backend import ReferenceExecutable

MIXTURES = [(family, quantized) for family in FAMILIES if family.experts for quantized in family.rms]
ABOVE_EVERY_SCORE = 1000.0
"""Scores are at most 1 and files' biases near 0: an expert with this bias is chosen before any without."""
OPTIONS = LoadOptions(n_threads=2, kv_type="f32", n_blocks=2, n_slots=1, max_rows=MAX_ROWS, max_outputs=MAX_ROWS)


def routes(program: Program) -> list[ops.Route]:
    return [op for op in program.ops if isinstance(op, ops.Route)]


def with_biases(program: Program, source: TensorSource) -> tuple[Program, MemoryTensors]:
    """The program with a bias of each router's own, "forced.<number>", and its model. Weights of experts ignore it."""
    biases = [Weight(f"forced.{number}", (op.logits.width,)) for number, op in enumerate(routes(program))]
    left = iter(biases)
    changed = [attrs.evolve(op, bias=next(left)) if isinstance(op, ops.Route) else op for op in program.ops]
    tensors = {name: RawTensor(source.tensor_bytes(name), i.type, i.shape) for name, i in source.tensors.items()}
    zeros = {bias.name: np.zeros(bias.shape, np.float32) for bias in biases}
    return (
        attrs.evolve(program, ops=tuple(changed), weights=(*program.weights, *biases)),
        MemoryTensors(source.metadata.raw, {**tensors, **zeros}),
    )


def reference_choices(executable: ReferenceExecutable, ids: np.ndarray) -> np.ndarray:
    """The experts of every router and token: i64[routers, tokens, n_used]."""
    parts = []
    for first in range(0, len(ids), MAX_ROWS):
        run_prompt(executable, ids[first : first + MAX_ROWS], first)
        assert executable._step is not None
        parts.append([executable._step[op.experts].astype(np.int64) for op in routes(executable.program)])
    return np.concatenate(parts, axis=1)


def run_forced(executable: CpuExecutable, ids: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """Logits of every token, each run alone with its `choices` [routers, tokens, n_used]: f32[tokens, vocab]."""
    logits = []
    for position in range(len(ids)):
        for number, chosen in enumerate(choices):
            bias = executable._weights.vectors[f"forced.{number}"]
            bias[:] = 0
            bias[chosen[position]] = ABOVE_EVERY_SCORE
        logits.append(run_prompt(executable, ids[position : position + 1], position)[0])
    return np.array(logits)


def rms(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - expected) ** 2)) / expected.std())


@pytest.mark.parametrize(
    ("family", "quantized"), MIXTURES, ids=[f"{family.name}-{quantized}" for family, quantized in MIXTURES]
)
def test_logits_with_the_references_choice_of_experts(family: Family, quantized: str) -> None:
    data = golden(family.name)
    ids, expected = data["ids"], data[f"logits_{quantized}"]
    with open_golden(f"{family.name}-{quantized}") as source:
        architecture = REGISTRY.architecture_for(source.metadata.get_str("general.architecture"))(source)
        program = record_program(architecture, REGISTRY.get("head", "full")(), source)
        reference = ReferenceExecutable(program, source, OPTIONS)
        choices = reference_choices(reference, ids)
        reference.close()
        executable = CpuExecutable(*with_biases(program, source), OPTIONS)
    try:
        got = run_forced(executable, ids, choices)
        assert rms(got, expected) < family.rms[quantized]
        # The other way round: experts that the reference did not choose for the last token give it other logits.
        n_experts = routes(program)[0].logits.width
        wrong = choices.copy()
        for chosen in wrong:
            chosen[-1] = np.setdiff1d(np.arange(n_experts), chosen[-1])[: chosen.shape[-1]]
        executable.clear_slot(0)
        turned = run_forced(executable, ids, wrong)
        assert np.array_equal(turned[:-1], got[:-1])
        assert rms(turned[-1], expected[-1]) > 3 * rms(got[-1], expected[-1])
        assert rms(turned[-1], expected[-1]) > family.rms[quantized]
    finally:
        executable.close()
