"""Every golden of the tests' model files: logits of a prompt, of a long prompt, and the greedy continuation."""

from __future__ import annotations

import numpy as np
import pytest
from golden_models import EXACT, QUANTIZED, Backend, Family, golden, run_prompt

exact_files = pytest.mark.parametrize("family", EXACT, ids=[family.name for family in EXACT])
quantized_files = pytest.mark.parametrize(
    ("family", "quantized"), QUANTIZED, ids=[f"{family.name}-{quantized}" for family, quantized in QUANTIZED]
)


def largest(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / expected.std())


@exact_files
def test_logits_of_f32_files(load, backend: Backend, family: Family):
    data = golden(family.name)
    assert largest(run_prompt(load(f"{family.name}-{family.exact}"), data["ids"]), data["logits_f32"]) < backend.largest


@quantized_files
def test_logits_of_quantized_files(load, backend: Backend, family: Family, quantized: str):
    data = golden(family.name)
    expected = data[f"logits_{quantized}"]
    got = run_prompt(load(f"{family.name}-{quantized}"), data["ids"])
    if not backend.rounds_activations:
        assert largest(got, expected) < backend.largest
        return
    squares = np.mean((got - expected) ** 2, axis=1)
    rms = np.median(np.sqrt(squares)) if family.experts else np.sqrt(np.mean(squares))
    assert rms < family.rms[quantized] * expected.std()


@exact_files
def test_logits_of_a_long_prompt(load, backend: Backend, family: Family):
    data = golden(family.name)
    got = run_prompt(load(f"{family.name}-{family.exact}"), data["long_ids"])[data["long_pos"]]
    assert largest(got, data["long_logits_f32"]) < backend.largest


@exact_files
def test_greedy_continuation_of_f32_files(load, family: Family):
    data = golden(family.name)
    executable = load(f"{family.name}-{family.exact}")
    logits = run_prompt(executable, data["ids"])[-1]
    chosen: list[int] = []
    for expected_gap in data["greedy_gap_f32"]:
        second, first = np.sort(logits)[-2:]
        assert first - second == pytest.approx(expected_gap, abs=1e-3)
        chosen.append(int(np.argmax(logits)))
        logits = run_prompt(executable, [chosen[-1]], len(data["ids"]) + len(chosen) - 1)[0]
    assert chosen == data["greedy_f32"].tolist()
