"""The engine on compiled kernels: rows of neighbours share steps, and nobody's bits move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import kinetic_core
from kinetic_core.engine.engine import Engine, EngineOptions
from kinetic_core.engine.model import Model
from kinetic_core.engine.request import Completion, GenerationRequest, SamplingOptions

DATA = Path(__file__).parent.parent / "data"
MODELS = {"hybrid": "tiny-hybrid", "llama": DATA / "llama-q8_0.gguf"}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with kinetic_core.load(MODELS[request.param], backend="cpu", threads=2, parallel=8) as loaded:
        yield loaded


def requests_for(model: Model) -> list[GenerationRequest]:
    kinds = (
        SamplingOptions(temperature=0.0, logprobs=2),
        SamplingOptions(seed=1, logprobs=2),
        SamplingOptions(seed=2, top_k=0, repeat_penalty=1.2, logprobs=0),
        SamplingOptions(seed=3, repeat_penalty=1.1),
    )
    lengths = (1, 7, 63, 64, 65, 255, 257, 300)
    rng = np.random.default_rng(0)
    top = min(model.vocab_size, 256)
    return [
        GenerationRequest(
            tuple(rng.integers(0, top, length).tolist()), kinds[number % 4], 10 + 4 * number, ignore_end=True
        )
        for number, length in enumerate(lengths)
    ]


def what(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.logprobs


def test_eight_concurrent_streams_each_equal_their_solo_run(model: Model) -> None:
    requests = requests_for(model)
    alone = [what(model.engine.submit(request).result()[0]) for request in requests]
    steps = model.engine.statistics()["steps"]
    generations = [model.engine.submit(request) for request in requests]
    together = [what(generation.result()[0]) for generation in generations]
    assert together == alone
    assert model.engine.statistics()["steps"] - steps < 0.6 * steps, "they shared steps"


def test_candidates_and_whole_distributions_choose_alike(model: Model) -> None:
    prompt = requests_for(model)[4].prompt_ids
    for options in ({"temperature": 0.0}, {"seed": 4}, {"seed": 5, "repeat_penalty": 1.3}):
        answers = [
            model.generate(prompt, max_tokens=30, ignore_end=True, logprobs=logprobs, **options).token_ids
            for logprobs in (None, 0)
        ]
        assert answers[0] == answers[1]


def test_every_split_gives_the_same_scores(model: Model) -> None:
    ids = requests_for(model)[7].prompt_ids
    whole = model.logits(ids)  # in steps of max_outputs rows
    for n_tokens in (1, 2, 63, 64, 65, 256, 299):
        assert np.array_equal(model.logits(ids[:n_tokens]), whole[:n_tokens])


def test_sequences_that_give_way_and_split_prompts_on_kernels(model: Model) -> None:
    """A second engine on the same executable, with two blocks of memory and other rows per step."""
    requests = [attrs.evolve(r, prompt_ids=(r.prompt_ids * 256)[:240], max_tokens=40) for r in requests_for(model)[:4]]
    alone = [what(model.engine.submit(request).result()[0]) for request in requests]
    sizes = model.engine.options
    small = EngineOptions(
        context_length=512,
        n_blocks=2,
        n_slots=sizes.n_slots,
        max_rows=37,
        max_outputs=sizes.max_outputs,
        has_states=sizes.has_states,
        max_sequences=4,
    )

    class Shared:
        """The first engine is idle and holds nothing; closing the second must not close the model."""

        def close(self) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(model._executable, name)

    engine = Engine(Shared(), model.tokenizer, model.vocab_size, small)  # type: ignore[arg-type]
    try:
        generations = [engine.submit(request) for request in requests]
        assert [what(generation.result()[0]) for generation in generations] == alone
        assert engine.statistics()["gave_way"] > 0
    finally:
        engine.close()
    assert engine.statistics()["blocks_used"] == 0
