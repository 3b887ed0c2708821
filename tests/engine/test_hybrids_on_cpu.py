"""Sixteen prompts at once on every kind of recurrent state, with compiled kernels: each answers as it does alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kinetic_core
from kinetic_core.engine.model import Model
from kinetic_core.engine.request import Completion, GenerationRequest, SamplingOptions

DATA = Path(__file__).parent.parent / "data"
HYBRIDS = (
    "falconh1-q4_k_m",
    "granitehybrid-q4_k_m",
    "granitehybridmoe-q4_k_m",
    "lfm2-q4_k_m",
    "lfm2moe-q4_k_m",
    "lfm3-q4_k_m",
    "qwen35-q4_k_m",
    "qwen35moe-q4_k_m",
)
LENGTHS = (1, 2, 3, 5, 8, 13, 31, 32, 33, 63, 64, 65, 127, 200, 255, 257)


def load(name: str, parallel: int) -> Model:
    return kinetic_core.load(DATA / f"{name}.gguf", backend="cpu", threads=2, ctx=512, parallel=parallel)


def requests_for(model: Model) -> list[GenerationRequest]:
    rng = np.random.default_rng(7)
    return [
        GenerationRequest(
            tuple(rng.integers(0, model.vocab_size, length).tolist()),
            SamplingOptions(temperature=0.8 * (number % 2), seed=number, logprobs=2),
            6 + number % 5,
            ignore_end=True,
        )
        for number, length in enumerate(LENGTHS)
    ]


def what(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.logprobs


@pytest.mark.parametrize("name", HYBRIDS)
def test_w7_sixteen_prompts_at_once_each_equal_their_solo_run(name: str) -> None:
    """Two loads of the model, so that neither run begins from what the other left."""
    with load(name, parallel=1) as model:
        assert model.info()["state_bytes_per_sequence"] > 0
        alone = [what(model.engine.submit(request).result()[0]) for request in requests_for(model)]
        steps_alone = model.engine.statistics()["steps"]
    assert len({token_ids for token_ids, *_ in alone}) > 8
    with load(name, parallel=16) as model:
        generations = [model.engine.submit(request) for request in requests_for(model)]
        together = [what(generation.result()[0]) for generation in generations]
        steps = model.engine.statistics()["steps"]
    assert together == alone
    assert steps < steps_alone / 3, "they shared steps"
