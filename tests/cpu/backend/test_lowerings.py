"""Every lowering gives the same bits: whole programs in processes that compile for other CPUs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cpu_steps import hybrid_program, load_cpu, predict, recurrence_program, tokens_of

from kinetic_core.backends.cpu.target import LOWERINGS, cpu_features
from kinetic_core.conformance.steps import Part, make_batch, prompt, step
from kinetic_core.gguf import open_model_file
from kinetic_core.plugins import load_registry
from kinetic_core.program.record import record_program
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import with_tensor_type

HERE = Path(__file__).parent
HIDDEN_HOST = {"KINETIC_SIMD": "generic", "NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": ""}


def digests() -> list[str]:
    """Digests of logits: prompt, drafts, commit and decode of hybrids and recurrences, a prompt of a Q4_K_M llama."""
    found = []
    program, source = hybrid_program()
    models = [(program, source), (program, with_tensor_type(source, "Q8_0")), hybrid_program("mamba")]
    program, source = hybrid_program("sigmoid-experts")
    models += [(program, source), (program, with_tensor_type(source, "Q8_0"))]
    models += [recurrence_program(kind, 4, 2, 84, 37) for kind in ("delta_rule", "mamba2_scan")]
    for program, source in models:
        executable = load_cpu(program, source, kv_type="f16")
        rows = [prompt(executable, tokens_of(270, vocab=8), [261, 8, 1])]
        part = Part((3,), 270, drafts=((5, 0), (6, 1), (7, 1)))
        rows.append(step(executable, part)[0])
        executable.commit(make_batch(part).sequences[0], [1, 3])
        rows.append(step(executable, Part((2,), 273))[0])
        found.append(hashlib.sha256(np.concatenate(rows).tobytes() + executable.read_slot(0)).hexdigest())
        executable.close()
    found.append(prediction_digest())
    with open_model_file(HERE.parents[1] / "data" / "llama-q4_k_m.gguf") as source:
        architecture = load_registry().architecture_for(source.architecture)(source)
        executable = load_cpu(record_program(architecture, FullHead(), source), source, kv_type="f16")
    found.append(hashlib.sha256(prompt(executable, tokens_of(40), [37, 1]).tobytes()).hexdigest())
    executable.close()
    return found


def prediction_digest() -> str:
    """Of what a prediction block leaves: logits of a prompt over a block's edge, and of guesses ahead."""
    program, source = hybrid_program("prediction")
    executable = load_cpu(program, with_tensor_type(source, "Q8_0"), kv_type="f16")
    tokens = tokens_of(270)
    prompt(executable, tokens, [270])
    rows = [predict(executable, Part(tokens[1:], 1), executable.hidden(0, 269))]
    for ahead in range(2):
        rows.append(predict(executable, Part((ahead,), 270 + ahead), executable.hidden(0 if ahead else 268, 1)))
    executable.close()
    return hashlib.sha256(np.concatenate(rows).tobytes()).hexdigest()


@pytest.fixture(scope="module")
def own() -> list[str]:
    return digests()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_another_lowering_has_the_same_bits(lowering: str, own: list[str]):
    if not LOWERINGS[lowering] <= cpu_features():
        pytest.skip(f"this CPU has no {lowering}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    environment |= HIDDEN_HOST if lowering == "generic" else {"KINETIC_SIMD": lowering}
    code = "import test_lowerings as t; print(*t.digests())"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == own
