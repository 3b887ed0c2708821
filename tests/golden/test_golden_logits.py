"""Every golden of the tests' model files: logits of a prompt, of a long prompt, and the greedy continuation."""

from __future__ import annotations

import numpy as np
import pytest
from golden_models import Backend, golden, run_prompt

FAMILIES = ["llama", "llama3rope"]
QUANTIZED = [("llama", "q8_0"), ("llama", "q4_k_m")]


def largest(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / expected.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_f32_files(load, backend: Backend, family: str):
    data = golden(family)
    assert largest(run_prompt(load(f"{family}-f32"), data["ids"]), data["logits_f32"]) < backend.largest


@pytest.mark.parametrize(("family", "quantized"), QUANTIZED)
def test_logits_of_quantized_files(load, backend: Backend, family: str, quantized: str):
    data = golden(family)
    expected = data[f"logits_{quantized}"]
    got = run_prompt(load(f"{family}-{quantized}"), data["ids"])
    if backend.rms is None:
        assert largest(got, expected) < backend.largest
    else:
        assert np.sqrt(np.mean((got - expected) ** 2)) / expected.std() < backend.rms[quantized]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_long_prompt(load, backend: Backend, family: str):
    data = golden(family)
    got = run_prompt(load(f"{family}-f32"), data["long_ids"])[data["long_pos"]]
    assert largest(got, data["long_logits_f32"]) < backend.largest


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuation_of_f32_files(load, family: str):
    data = golden(family)
    executable = load(f"{family}-f32")
    logits = run_prompt(executable, data["ids"])[-1]
    chosen: list[int] = []
    for expected_gap in data["greedy_gap_f32"]:
        second, first = np.sort(logits)[-2:]
        assert first - second == pytest.approx(expected_gap, abs=1e-3)
        chosen.append(int(np.argmax(logits)))
        logits = run_prompt(executable, [chosen[-1]], len(data["ids"]) + len(chosen) - 1)[0]
    assert chosen == data["greedy_f32"].tolist()
