"""Whatever the prediction block guesses, the engine's answers are the plain ones, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest
from kinetic_drafters.mtp import MtpDrafter
from mtp_support import TRAINED, load_trained, trained_prompts

from kinetic_core.conformance.answers import Borrowed
from kinetic_core.engine.engine import Engine, EngineOptions
from kinetic_core.engine.request import Completion, GenerationRequest, SamplingOptions
from kinetic_core.gguf import open_model_file
from kinetic_core.interfaces import Executable
from kinetic_core.text import Tokenizer

SIZES = {"n_blocks": 16, "n_slots": 8, "max_rows": 264, "max_outputs": 64}
GREEDY = SamplingOptions(temperature=0.0, logprobs=2)
SAMPLED = SamplingOptions(temperature=0.8, seed=11, logprobs=2)
PENALTIES = SamplingOptions(temperature=0.7, seed=12, repeat_penalty=1.2, frequency_penalty=0.3)
N_ANSWER = 48


@pytest.fixture(scope="module")
def executable() -> Iterator[Executable]:
    loaded = load_trained(**SIZES)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(open_model_file(TRAINED).metadata.raw)


class Held(Borrowed):
    """Waits with the first step until all requests are there."""

    def __init__(self, lender: Executable) -> None:
        super().__init__(lender)
        self.all_there = threading.Event()

    def run(self, batch: Any) -> None:
        assert self.all_there.wait(60)
        super().run(batch)


class Engines:
    """Engines on one executable: plain, or with the prediction block's guesses."""

    def __init__(self, executable: Executable, tokenizer: Tokenizer) -> None:
        self._executable = executable
        self._tokenizer = tokenizer
        self._plain: dict[str, list[Completion]] = {}

    def plain(self, request: GenerationRequest) -> list[Completion]:
        """What a request gets alone and without drafts."""
        key = repr(request)
        if key not in self._plain:
            self._plain[key] = self.answers([request], drafted=False)[0][0]
        return self._plain[key]

    def answers(
        self, requests: Sequence[GenerationRequest], *, drafted: bool, **options: Any
    ) -> tuple[list[list[Completion]], dict[str, Any]]:
        """Completions per request, all submitted at once, and the engine's figures."""
        values = {"context_length": 1024, "has_states": True, "draft_policy": "always", **SIZES, **options}
        drafters = {"mtp": MtpDrafter()} if drafted else {}
        lent = Held(self._executable)
        engine = Engine(lent, self._tokenizer, 2048, EngineOptions(**values), drafters=drafters)
        try:
            running = [engine.submit(request) for request in requests]
            lent.all_there.set()
            completions = [generation.result() for generation in running]
            figures = engine.statistics()
        finally:
            lent.all_there.set()
            engine.close()
        assert not figures["drafter_failed"]
        assert (figures["blocks_used"], figures["slots_used"]) == (0, 0)
        return completions, figures

    def check(self, requests: Sequence[GenerationRequest], **options: Any) -> dict[str, Any]:
        """Drafted answers equal those that each request gets alone without drafts; the drafted engine's figures."""
        expected = [self.plain(request) for request in requests]
        got, figures = self.answers(requests, drafted=True, **options)
        assert [[shown(one) for one in completions] for completions in got] == [
            [shown(one) for one in completions] for completions in expected
        ]
        return figures


def shown(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.logprobs


def request(prompt: int, sampling: SamplingOptions = GREEDY, **changes: Any) -> GenerationRequest:
    ids = tuple(trained_prompts()[prompt])
    return attrs.evolve(GenerationRequest(ids, sampling, N_ANSWER, ignore_end=True), **changes)


@pytest.fixture(scope="module")
def engines(executable: Executable, tokenizer: Tokenizer) -> Engines:
    return Engines(executable, tokenizer)


@pytest.mark.parametrize("policy", ["always", "measured"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALTIES], ids=["greedy", "sampled", "penalties"])
def test_answers(engines: Engines, sampling: SamplingOptions, policy: str) -> None:
    for prompt in (1, 7, 30):
        figures = engines.check([request(prompt, sampling)], draft_policy=policy)
        assert policy == "measured" or figures["accepted"] >= 10


def test_choices_draft_on_from_the_prompt_they_share(engines: Engines) -> None:
    sampling = attrs.evolve(SAMPLED, temperature=0.6)
    one = engines.check([request(7, sampling)])
    figures = engines.check([request(7, sampling, n=3)])
    assert figures["accepted"] > 1.5 * one["accepted"]
    assert figures["drafters"]["mtp"]["pending_bytes"] == 0


def test_concurrent_requests(engines: Engines) -> None:
    kinds = (GREEDY, SAMPLED, PENALTIES, GREEDY)
    prompts = (1, 7, 30, 12)
    requests = [request(prompt, kind, max_tokens=32 + prompt) for prompt, kind in zip(prompts, kinds, strict=True)]
    assert engines.check(requests)["accepted"] >= 40


def test_an_answer_across_blocks(engines: Engines) -> None:
    ids = tuple(token for prompt in trained_prompts()[:8] for token in prompt)
    requests = [attrs.evolve(request(0), prompt_ids=ids[:n]) for n in (230, 256, 490)]
    assert engines.check(requests)["accepted"] >= 40


def test_sequences_that_give_way(engines: Engines) -> None:
    """A block for each of four, which need two: the youngest give theirs to the others and start over."""
    ids = tuple(token for prompt in trained_prompts()[8:16] for token in prompt)
    requests = [attrs.evolve(request(0), prompt_ids=ids[n : n + 220]) for n in (0, 60, 120, 180)]
    figures = engines.check(requests, n_blocks=4)
    assert figures["gave_way"] >= 1
    assert figures["accepted"] >= 25
