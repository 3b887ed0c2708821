"""Whatever is guessed, the answer is the plain one, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from conftest import MakeEngine
from executables import Gate

from kinetic_core.engine.request import Completion, GenerationRequest, SamplingOptions
from kinetic_core.interfaces import Draft, Drafter, DrafterCapabilities, DraftTree

Guess = Callable[[list[int], int], DraftTree | None]
PROMPT = tuple(b"class Point:\n    def __init__(self")


class Guesser(Drafter):
    """Calls a function with the sequence's tokens; checks that the engine tells it everything once."""

    capabilities = DrafterCapabilities(branches=True)

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self.tokens: dict[int, list[int]] = {}
        self.longest = 0

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        assert sequence_id not in self.tokens
        self.tokens[sequence_id] = list(token_ids)

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        self.tokens[sequence_id].extend(token_ids)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        assert max_tokens >= 1
        tree = self._guess(self.tokens[sequence_id], max_tokens)
        return None if tree is None else Draft(tree, (0.5,) * len(tree.token_ids))

    def end(self, sequence_id: int) -> None:
        self.longest = max(self.longest, len(self.tokens.pop(sequence_id)))


def oracle_of(answers: dict[tuple[int, ...], tuple[int, ...]], length: int) -> Guess:
    """Always right: knows the answer to each prompt."""

    def guess(tokens: list[int], most: int) -> DraftTree | None:
        for prompt, answer in answers.items():
            whole = prompt + answer
            if tuple(tokens) == whole[: len(tokens)] and len(tokens) < len(whole):
                return DraftTree.chain(whole[len(tokens) : len(tokens) + min(length, most)])
        return None

    return guess


def wrong_of(answers: dict[tuple[int, ...], tuple[int, ...]]) -> Guess:
    """Chains whose first token is never the one that follows."""
    right = oracle_of(answers, 4)

    def guess(tokens: list[int], most: int) -> DraftTree | None:
        chain = right(tokens, most)
        return None if chain is None else DraftTree.chain([(token + 1) % 256 for token in chain.token_ids])

    return guess


def tree_of(answers: dict[tuple[int, ...], tuple[int, ...]]) -> Guess:
    """A tree whose right branch is not the first, with wrong leaves on it."""
    right = oracle_of(answers, 3)

    def guess(tokens: list[int], most: int) -> DraftTree | None:
        chain = right(tokens, most)
        if chain is None or len(chain.token_ids) < 3 or most < 7:
            return chain
        a, b, c = chain.token_ids
        return DraftTree((a ^ 1, a, b ^ 1, b, 5, c, c ^ 1), (-1, -1, 1, 1, 0, 3, 3))

    return guess


KINDS = {
    "greedy": SamplingOptions(temperature=0.0, logprobs=2),
    "sampled": SamplingOptions(temperature=0.9, seed=5, logprobs=2),
    "penalties": SamplingOptions(
        temperature=0.7, seed=6, repeat_penalty=1.4, presence_penalty=1.0, frequency_penalty=0.5, logprobs=2
    ),
    "candidates": SamplingOptions(temperature=0.7, seed=6, top_k=20, repeat_penalty=1.4, frequency_penalty=0.5),
    "biased": SamplingOptions(temperature=0.8, seed=7, logit_bias={70: 4.0, 71: -3.0}, logprobs=1),
}


def request_of(sampling: SamplingOptions, **changes: Any) -> GenerationRequest:
    return attrs.evolve(GenerationRequest(PROMPT, sampling, 40, ignore_end=True), **changes)


def what(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.logprobs


@pytest.fixture(scope="module")
def plain(random_model: Any) -> dict[str, Completion]:
    engine = random_model.engine()
    answers = {name: engine.submit(request_of(sampling)).result()[0] for name, sampling in KINDS.items()}
    engine.close()
    return answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("guesser", ["right 1", "right 3", "right 8", "wrong", "tree"])
def test_d1_d2_d5_drafts_change_nothing(
    make_engine: MakeEngine, plain: dict[str, Completion], kind: str, guesser: str
) -> None:
    answers = {PROMPT: plain[kind].token_ids}
    guess = {
        "right 1": oracle_of(answers, 1),
        "right 3": oracle_of(answers, 3),
        "right 8": oracle_of(answers, 8),
        "wrong": wrong_of(answers),
        "tree": tree_of(answers),
    }[guesser]
    drafter = Guesser(guess)
    engine = make_engine(random=True, drafter=drafter)
    got = engine.submit(request_of(KINDS[kind])).result()[0]
    assert what(got) == what(plain[kind])
    assert drafter.tokens == {}
    assert drafter.longest == len(PROMPT) + 40
    steps = engine.statistics()["answer_rows"]
    if guesser.startswith("right"):
        assert got.timings.drafted == got.timings.accepted > 0
        assert engine.statistics()["steps"] <= 2 + 40 // (1 + int(guesser.split()[1]))
    elif guesser == "tree":
        assert 0 < got.timings.accepted < got.timings.drafted
    else:
        assert got.timings.accepted == 0 < got.timings.drafted
    assert steps >= 39


def test_d6_concurrent_drafts_are_accepted_as_alone(make_engine: MakeEngine, plain: dict[str, Completion]) -> None:
    answers = {PROMPT: plain["greedy"].token_ids}
    engine = make_engine(random=True, drafter=Guesser(oracle_of(answers, 4)))
    generations = [engine.submit(request_of(KINDS["greedy"])) for _ in range(4)]
    completions = [generation.result()[0] for generation in generations]
    assert {what(completion) for completion in completions} == {what(plain["greedy"])}
    assert len({completion.timings.accepted for completion in completions}) == 1


def test_drafts_end_where_the_answer_ends(make_engine: MakeEngine) -> None:
    alphabet = tuple(b"abcdefghijklmnopqrstuvwxyz.")
    drafter = Guesser(oracle_of({(10,): (*alphabet, 259, 10, *alphabet)}, 8))
    engine = make_engine(drafter=drafter, context_length=300)
    greedy = SamplingOptions(temperature=0.0, logprobs=1)

    def run(**changes: Any) -> Completion:
        return engine.submit(attrs.evolve(GenerationRequest((10,), greedy), **changes)).result()[0]

    assert (run().text, run().finish_reason) == (bytes(alphabet).decode(), "stop")
    for max_tokens in (1, 2, 9, 10, 11):
        assert run(max_tokens=max_tokens).token_ids == alphabet[:max_tokens]
    stopped = run(stop=("efg",))
    assert (stopped.text, stopped.token_ids, len(stopped.logprobs)) == ("abcd", alphabet[:4], 4)


def test_drafts_stay_inside_the_context(make_engine: MakeEngine) -> None:
    alphabet = tuple(b"abcdefghijklmnopqrstuvwxyz.")
    gate = Gate()
    gate.open()
    drafter = Guesser(oracle_of({(10,): alphabet}, 8))
    engine = make_engine(drafter=drafter, wrap=gate.wrap, context_length=13, n_blocks=1)
    completion = engine.submit(GenerationRequest((10,), SamplingOptions(temperature=0.0))).result()[0]
    assert (completion.token_ids, completion.finish_reason) == (alphabet[:12], "length")
    assert max(int(batch.positions.max()) for batch in gate.batches) == 11  # the last token is never run


def test_drafts_cross_blocks(make_engine: MakeEngine) -> None:
    prompt = tuple(np.random.default_rng(0).integers(0, 256, 250).tolist())
    sampling = SamplingOptions(temperature=0.0, logprobs=1)
    request = GenerationRequest(prompt, sampling, 20, ignore_end=True)
    expected = make_engine(random=True).submit(request).result()[0]
    drafter = Guesser(oracle_of({prompt: expected.token_ids}, 8))
    engine = make_engine(random=True, drafter=drafter, n_blocks=3, context_length=768)
    assert what(engine.submit(request).result()[0]) == what(expected)


def test_d4_draws_equal_the_undrafted_ones(make_engine: MakeEngine) -> None:
    sampling = SamplingOptions(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, seed=77)
    request = GenerationRequest((65, 66), sampling, 150, ignore_end=True)
    expected = make_engine(random=True).submit(request).result()[0]

    def last_best(tokens: list[int], most: int) -> DraftTree | None:
        answers = {(65, 66): expected.token_ids}
        return (oracle_of(answers, 2) if len(tokens) % 3 else wrong_of(answers))(tokens, most)

    engine = make_engine(random=True, drafter=Guesser(last_best))
    got = engine.submit(request).result()[0]
    assert got.token_ids == expected.token_ids
    assert 0 < got.timings.accepted < got.timings.drafted


def test_penalties_of_a_draft_row_name_its_own_path(make_engine: MakeEngine) -> None:
    gate = Gate()
    gate.open()
    tree = DraftTree((50, 51, 52, 50), (-1, 0, 0, 1))
    drafter = Guesser(lambda tokens, most: tree)
    engine = make_engine(hashed=True, wrap=gate.wrap, drafter=drafter)
    sampling = SamplingOptions(temperature=0.7, seed=1, top_k=5, frequency_penalty=0.5)
    engine.submit(GenerationRequest((1, 2, 3), sampling, 8, ignore_end=True)).result()
    batch = gate.batches[1]
    assert batch.token_ids[1:].tolist() == [50, 51, 52, 50]
    answer = {int(batch.token_ids[0])}
    paths: list[set[int]] = [set(), {50}, {50, 51}, {50, 52}, {50, 51}]
    assert [head.top_k for head in batch.heads] == [5 + len(answer | path) for path in paths]
    assert batch.positions.tolist() == [3, 4, 5, 5, 6]
    assert batch.sequences[0].draft_parents == (0, 1, 1, 2)
