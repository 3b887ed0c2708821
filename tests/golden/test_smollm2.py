"""The default model: its scores on a long English text, and its greedy answers. Fetches the model once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import kinetic_core
from kinetic_core.engine.sampler import log_softmax

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
N_TOKENS = 1000


def mean_logprob(logits: npt.NDArray[np.float32], token_ids: list[int]) -> float:
    chosen = [log_softmax(row)[token_id] for row, token_id in zip(logits[:-1], token_ids[1:], strict=True)]
    return float(np.mean(chosen))


def test_mean_logprob_of_an_english_text() -> None:
    """Within half a percent of the NumPy reference, which computes on dequantized weights with exact activations."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    means = {}
    for backend in ("reference", "cpu"):
        with kinetic_core.load("smollm2", backend=backend, threads=2, ctx=2048) as model:
            token_ids = model.tokenize(" ".join(text.split()))[:N_TOKENS]
            assert len(token_ids) == N_TOKENS
            means[backend] = mean_logprob(model.logits(token_ids), token_ids)
    print(means)
    assert -3.0 < means["reference"] < -0.1
    assert abs(means["cpu"] / means["reference"] - 1) < 0.005


def test_greedy_text_is_sensible_and_stable() -> None:
    question = [{"role": "user", "content": "What color is the sky?"}]
    answers = []
    for threads in (1, 2, 2):
        with kinetic_core.load("smollm2", threads=threads, ctx=512) as model:
            answers.append(model.chat(question, temperature=0.0, max_tokens=60))
    assert "blue" in answers[0].text.lower()
    assert len({answer.token_ids for answer in answers}) == 1
