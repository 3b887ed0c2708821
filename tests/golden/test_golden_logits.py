"""Every golden of the tests' model files: logits of a prompt, of a long prompt, and the greedy continuation."""

from __future__ import annotations

import numpy as np
import pytest
from golden_models import EXACT, FAMILIES, QUANTIZED, Backend, Family, golden, run_prompt

exact_files = pytest.mark.parametrize("family", EXACT, ids=[family.name for family in EXACT])
quantized_files = pytest.mark.parametrize(
    ("family", "quantized"), QUANTIZED, ids=[f"{family.name}-{quantized}" for family, quantized in QUANTIZED]
)


def largest(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / expected.std())


def rms(family: Family, got: np.ndarray, expected: np.ndarray) -> float:
    """Root-mean-square difference in standard deviations, of all positions or of the one in the middle."""
    squares = np.mean((got - expected) ** 2, axis=1)
    return float((np.median(np.sqrt(squares)) if family.experts else np.sqrt(np.mean(squares))) / expected.std())


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
    assert rms(family, got, expected) < family.rms[quantized]


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


PREDICTED_RMS = {"q8_0": 0.03, "q4_k_m": 0.04}
"""As `Family.rms`, for prediction blocks: their input carries the trunk's roundings besides their own."""
PREDICTED = [(family, *file) for family in FAMILIES if family.predicts for file in family.files]


@pytest.mark.parametrize(
    ("family", "file", "type_"), PREDICTED, ids=[f"{family.name}-{type_}" for family, _, type_ in PREDICTED]
)
def test_prediction_block(load, backend: Backend, family: Family, file: str, type_: str):
    """Predicted logits of a prompt, then what is drafted after it: from the trunk's hidden state, then its own."""
    data, executable = golden(family.name), load(f"{family.name}-{file}")
    ids, expected = data["ids"], data[f"mtp_logits_{type_}"]
    drafts = [int(np.argmax(run_prompt(executable, ids)[-1]))]
    hidden = executable.hidden(0, len(ids)).copy()
    if "mtp_h_f32" in data and type_ == "f32":
        assert largest(hidden, data["mtp_h_f32"]) < backend.largest
    got = run_prompt(executable, ids[1:], 1, hidden[:-1])
    if type_ != "f32" and backend.rounds_activations:
        assert rms(family, got, expected) < PREDICTED_RMS[type_]
        return
    assert largest(got, expected) < backend.largest
    ahead = hidden[-1:]
    for position in range(len(ids), len(ids) + 4):
        logits = run_prompt(executable, drafts[-1:], position, ahead)
        ahead = executable.hidden(0, 1).copy()
        drafts.append(int(np.argmax(logits)))
    assert drafts == data[f"mtp_draft_{type_}"].tolist()
