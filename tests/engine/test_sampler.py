from __future__ import annotations

import itertools
import timeit

import attrs
import numpy as np
import pytest
from sampling_oracle import ORDER, oracle

from kinetic_core.engine.counter_rng import uniform
from kinetic_core.engine.history import History
from kinetic_core.engine.request import SamplingOptions
from kinetic_core.engine.sampler import Sampler, log_softmax
from kinetic_core.errors import NumericalError
from kinetic_core.program.ranking import best

VOCAB = 120


class Scores:
    """Outputs of a step with one row of scores, selected as a head selects them."""

    def __init__(self, logits: np.ndarray, top_k: int | None) -> None:
        self._logits = logits.astype(np.float32)
        self._top_k = top_k

    def logits(self, output: int) -> np.ndarray:
        assert self._top_k is None, "the whole distribution was not asked for"
        return self._logits

    def candidates(self, output: int) -> tuple[np.ndarray, np.ndarray]:
        order = sorted(range(len(self._logits)), key=lambda token: (-self._logits[token], token))[: self._top_k]
        return np.array(order, np.int32), self._logits[order]


def history_of(prompt: list[int], answer: list[int]) -> History:
    history = History(prompt)
    for token in answer:
        history.push(token)
    return history


def choose(
    logits: np.ndarray, options: SamplingOptions, prompt: list[int], answer: list[int], seed: int = 0, choice: int = 0
) -> int:
    sampler = Sampler(options, len(logits), seed, choice)
    history = history_of(prompt, answer)
    top_k = sampler.head_top_k(history)
    return sampler.choose(Scores(logits, top_k), 0, top_k, history).token_id


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, SamplingOptions, list[int], list[int]]:
    logits = (rng.standard_normal(VOCAB) * rng.choice([0.5, 2.0, 5.0])).astype(np.float32)
    logits[rng.integers(0, VOCAB, 30)] = np.round(logits[:30], 1)  # some equal scores
    options = SamplingOptions(
        temperature=float(rng.choice([0.0, 0.3, 0.8, 1.0, 1.7])),
        top_k=int(rng.choice([0, 1, 5, 20, 40, 1000])),
        top_p=float(rng.choice([0.3, 0.7, 0.95, 1.0])),
        min_p=float(rng.choice([0.0, 0.05, 0.3])),
        repeat_penalty=float(rng.choice([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=float(rng.choice([0.0, 0.0, 0.6, -0.6])),
        frequency_penalty=float(rng.choice([0.0, 0.0, 0.4, -0.4])),
        logit_bias={int(t): float(rng.normal() * 3) for t in rng.integers(0, VOCAB, rng.integers(0, 4))},
    )
    prompt, answer = rng.integers(0, VOCAB, 50).tolist(), rng.integers(0, VOCAB, rng.integers(0, 40)).tolist()
    return logits, options, prompt, answer


def test_sampler_equals_the_plain_loops() -> None:
    rng = np.random.default_rng(1)
    for number in range(600):
        logits, options, prompt, answer = random_case(rng)
        assert choose(logits, options, prompt, answer, number) == oracle(logits, options, prompt, answer, number), (
            number,
            options,
        )


@pytest.mark.parametrize(
    "swapped",
    [
        ("bias", "penalties"),
        ("penalties", "top_k"),
        ("bias", "top_k"),
        ("temperature", "top_p"),
        ("temperature", "min_p"),
        ("top_k", "top_p"),
        ("top_p", "min_p"),
    ],
)
def test_another_order_would_be_seen(swapped: tuple[str, str]) -> None:
    """The comparison above has power: with two stages exchanged the loops choose other tokens."""
    order = [swapped[1] if stage == swapped[0] else swapped[0] if stage == swapped[1] else stage for stage in ORDER]
    rng = np.random.default_rng(1)
    assert any(
        oracle(*case, number) != oracle(*case, number, order=order)
        for number, case in enumerate(random_case(rng) for _ in range(600))
    )


def test_distribution_chi_square() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.full(50, -50.0, np.float32)
    logits[[7, 3, 20, 11]] = np.log(probabilities)
    sampler = Sampler(SamplingOptions(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0), 50, seed=12345)
    history = History([0])
    scores = Scores(logits, 4)
    counts = dict.fromkeys((7, 3, 20, 11), 0)
    n_draws = 10_000
    for _ in range(n_draws):
        token = sampler.choose(scores, 0, 4, history).token_id
        counts[token] += 1
        history.push(token)
    expected = probabilities * n_draws
    statistic = float((((np.array(list(counts.values())) - expected) ** 2) / expected).sum())
    assert statistic < 16.27  # 3 degrees of freedom, 0.1 %


def test_temperature_chi_square_against_powers() -> None:
    base = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.log(base).astype(np.float32)
    powers = base ** (1 / 0.5)
    expected = powers / powers.sum() * 10_000
    options = SamplingOptions(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0)
    sampler, history, scores = Sampler(options, 4, seed=99), History([0]), Scores(logits, None)
    counts = np.zeros(4)
    for _ in range(10_000):
        token = sampler.choose(scores, 0, None, history).token_id
        counts[token] += 1
        history.push(token)
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.27


def test_seed_choice_and_index_each_change_the_draw() -> None:
    logits = np.zeros(VOCAB, np.float32)
    options = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

    def draws(seed: int, choice: int) -> list[int]:
        return [choose(logits, options, [0], [0] * index, seed, choice) for index in range(20)]

    assert draws(5, 0) == draws(5, 0)
    variants = [draws(5, 0), draws(6, 0), draws(5, 1), draws(5 + 2**32, 0)]
    assert all(a != b for a, b in itertools.combinations(variants, 2))
    assert len(set(draws(5, 0))) > 10


@pytest.mark.parametrize("options", [SamplingOptions(temperature=0.0), SamplingOptions(top_k=1)])
@pytest.mark.parametrize("full", [False, True])
def test_d3_ties_go_to_the_lowest_id(options: SamplingOptions, full: bool) -> None:
    logits = np.full(VOCAB, -3.0, np.float32)
    logits[[90, 40, 77]] = 2.5
    options = attrs.evolve(options, logprobs=0 if full else None)
    assert choose(logits, options, [0], []) == 40


def test_minus_zero_equals_plus_zero() -> None:
    logits = np.array([-1.0, -0.0, 0.0, -0.0], np.float32)
    for options in (SamplingOptions(temperature=0.0), SamplingOptions(temperature=0.0, logprobs=3)):
        assert choose(logits, options, [0], []) == 1
    assert best(logits, 3).tolist() == [1, 2, 3]
    assert best(logits, 4).tolist() == [1, 2, 3, 0]
    assert best(logits.astype(np.float64), 4).tolist() == [1, 2, 3, 0]


def test_penalties_count_what_they_say() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[:4] = [1.0, 0.95, 0.9, -1.0]
    greedy = SamplingOptions(temperature=0.0)
    # presence and frequency: the answer only
    assert choose(logits, attrs.evolve(greedy, presence_penalty=0.2), [0, 0], []) == 0
    assert choose(logits, attrs.evolve(greedy, presence_penalty=0.07), [5], [0]) == 1
    assert choose(logits, attrs.evolve(greedy, frequency_penalty=0.03), [5], [0]) == 0
    assert choose(logits, attrs.evolve(greedy, frequency_penalty=0.03), [5], [0, 0]) == 1
    # repeat: the last 64 tokens of the path, the prompt's included
    repeat = attrs.evolve(greedy, repeat_penalty=1.06)
    assert choose(logits, repeat, [0], []) == 1
    assert choose(logits, repeat, [0] + [50] * 63, []) == 1
    assert choose(logits, repeat, [0] + [50] * 64, []) == 0
    assert choose(logits, repeat, [0], [50] * 64) == 0
    # a negative score is multiplied: it sinks as well
    below = np.full(VOCAB, -9.0, np.float32)
    below[[3, 4]] = [-1.0, -1.2]
    assert choose(below, attrs.evolve(greedy, repeat_penalty=1.5), [3], []) == 4


def test_logit_bias() -> None:
    logits = np.linspace(1, 0, VOCAB).astype(np.float32)
    assert choose(logits, SamplingOptions(temperature=0.0, logit_bias={70: 100.0}), [0], []) == 70
    assert choose(logits, SamplingOptions(temperature=0.0, logit_bias={0: -100.0}), [0], []) == 1


def test_lowering_penalties_read_candidates_only_and_choose_the_same() -> None:
    rng = np.random.default_rng(3)
    for number in range(200):
        logits, options, prompt, answer = random_case(rng)
        options = attrs.evolve(
            options,
            top_k=5,
            logit_bias={int(np.argmax(logits)): -2.0},
            repeat_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.1,
        )
        sampler = Sampler(options, VOCAB, number)
        top_k = sampler.head_top_k(history_of(prompt, answer))
        assert top_k is not None
        assert choose(logits, options, prompt, answer, number) == oracle(logits, options, prompt, answer, number)


def test_raising_penalties_read_everything() -> None:
    for options in (
        SamplingOptions(repeat_penalty=0.9),
        SamplingOptions(presence_penalty=-0.1),
        SamplingOptions(frequency_penalty=-0.1),
        SamplingOptions(logit_bias={3: 1.0}),
        SamplingOptions(top_k=0),
        SamplingOptions(logprobs=0),
    ):
        assert Sampler(options, VOCAB, 0).head_top_k(History([1])) is None
    assert Sampler(SamplingOptions(), VOCAB, 0).head_top_k(History([1])) == 40
    assert Sampler(SamplingOptions(temperature=0.0), VOCAB, 0).head_top_k(History([1])) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_scores_that_are_no_numbers_are_errors(value: float, temperature: float) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[60] = value
    options = SamplingOptions(temperature=temperature)
    reads_all = [attrs.evolve(options, logprobs=1), attrs.evolve(options, logit_bias={1: 1.0})]
    # for candidates, refusing NaN is the backend's part
    for case in reads_all if np.isnan(value) else [*reads_all, options]:
        with pytest.raises(NumericalError):
            choose(logits, case, [0], [])


def test_scores_of_minus_infinity_are_never_chosen() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[3, 9]] = 1.0
    options = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert {choose(logits, options, [0], [], seed) for seed in range(50)} == {3, 9}
    with pytest.raises(NumericalError):
        choose(np.full(VOCAB, -np.inf, np.float32), options, [0], [])


def test_extreme_temperatures_stay_finite() -> None:
    logits = np.linspace(-30, 30, VOCAB).astype(np.float32)
    assert choose(logits, SamplingOptions(temperature=1e-300), [0], []) == VOCAB - 1
    assert 0 <= choose(logits, SamplingOptions(temperature=100.0, top_k=0), [0], []) < VOCAB


def test_best_equals_sorting() -> None:
    rng = np.random.default_rng(5)
    for dtype in (np.float32, np.float64):
        for _ in range(50):
            scores = rng.integers(-20, 20, 300).astype(dtype) / 4
            order = sorted(range(300), key=lambda token: (-scores[token], token))
            for k in (1, 2, 40, 299, 300):
                assert best(scores, k).tolist() == order[:k]


def test_log_softmax() -> None:
    rng = np.random.default_rng(6)
    logits = (rng.standard_normal(10_000) * 4).astype(np.float32)
    got = log_softmax(logits)
    exact = logits.astype(np.longdouble)
    expected = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    assert np.abs(got - expected.astype(np.float64)).max() < 1e-12
    # the order of the sum is fixed: ascending ids, one after the other
    total = 0.0
    from kinetic_core.program.elementary import exp64, log64

    for value in exp64(logits.astype(np.float64) - float(logits.max())):
        total += float(value)
    assert got[17] == float(logits[17]) - float(logits.max()) - float(log64(total))


def test_a_step_of_the_usual_kind_is_fast() -> None:
    logits = np.random.default_rng(7).standard_normal(50_000).astype(np.float32) * 4
    ids = best(logits, 40).astype(np.int32)

    class Ready:
        def logits(self, output: int) -> np.ndarray:
            raise AssertionError

        def candidates(self, output: int) -> tuple[np.ndarray, np.ndarray]:
            return ids, logits[ids]

    sampler, history, ready = Sampler(SamplingOptions(), 50_000, 1), History([1, 2, 3]), Ready()
    seconds = min(timeit.repeat(lambda: sampler.choose(ready, 0, 40, history), number=20, repeat=20)) / 20
    assert seconds < 500e-6  # about 55 µs on an idle machine


def test_uniform_is_in_the_half_open_interval() -> None:
    values = [uniform(3, 0, index) for index in range(2000)]
    assert 0 <= min(values) < 0.01 and 0.99 < max(values) < 1


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.25, 1), (0.4999, 1), (0.5, 2), (1 - 2.0**-53, 3), (1.0, 3)])
def test_a_number_on_an_edge_of_the_cumulative_picks_the_next_token(
    monkeypatch: pytest.MonkeyPatch, u: float, token: int
) -> None:
    monkeypatch.setattr("kinetic_core.engine.sampler.uniform", lambda seed, choice, index: u)
    options = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert choose(np.array([2.0, 2.0, 2.0, 2.0, -np.inf], np.float32), options, [0], []) == token
