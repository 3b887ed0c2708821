"""The best tokens: order, ties, zeros, NaN, and the same list from any backend."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cpu_steps import hybrid_program, load_reference

from kinetic_core.conformance.steps import Part, make_batch
from kinetic_core.errors import BackendError, NumericalError
from kinetic_core.gguf import MemoryTensors
from kinetic_core.interfaces import HeadRequest
from kinetic_core.program import ProgramBuilder

VOCAB = 5000  # several slices, the last one cut short


@pytest.fixture
def scores_model(load):
    """run(scores: f32[n, VOCAB], heads) -> executable whose logits of row r are scores[r], unchanged."""

    def run(scores: np.ndarray, heads: list[HeadRequest]):
        source = MemoryTensors({}, {"e": scores})
        b = ProgramBuilder({"e": scores.shape})
        hidden = b.embedding(b.weight("e", scores.shape))
        executable = load(b.finish(hidden, b.gather_outputs(hidden)), source, max_outputs=8)
        executable.run(make_batch(Part(tuple(range(len(scores)))), heads=heads))
        return executable

    return run


def expected_order(scores: np.ndarray) -> np.ndarray:
    return np.lexsort((np.arange(len(scores)), -scores))


def random_scores(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("k", [1, 2, 40, 128, 129, 1000, VOCAB, VOCAB + 1])
def test_order(scores_model, k: int):
    scores = random_scores(2)
    executable = scores_model(scores, [HeadRequest(0, k), HeadRequest(1, 5)])
    for output, wanted in ((0, k), (1, 5)):
        ids, values = executable.candidates(output)
        order = expected_order(scores[output])[:wanted]
        np.testing.assert_array_equal(ids, order)
        assert ids.dtype == np.int32
        assert values.tobytes() == scores[output][order].tobytes()


@pytest.mark.parametrize("k", [1, 7, 60, 500])
def test_d3_ties_go_to_the_lowest_id(scores_model, k: int):
    """Few distinct scores, equal ones in every slice; -0 and +0 are equal."""
    scores = np.random.default_rng(1).choice(np.array([-1.0, -0.0, 0.0], np.float32), (1, VOCAB))
    ids, _ = scores_model(scores, [HeadRequest(0, k)]).candidates(0)
    np.testing.assert_array_equal(ids, expected_order(scores[0])[:k])
    assert scores[0][ids[0]] == 0


def test_infinities_are_scores(scores_model):
    scores = random_scores(1)
    scores[0, [17, 4900]] = np.inf
    scores[0, 3] = -np.inf
    ids, values = scores_model(scores, [HeadRequest(0, 3)]).candidates(0)
    assert ids[:2].tolist() == [17, 4900]
    assert np.isinf(values[:2]).all()


@pytest.mark.parametrize("top_k", [None, 1, 300])
@pytest.mark.parametrize("place", [0, 2047, 2048, VOCAB - 1])
def test_nan_is_an_error(scores_model, place: int, top_k: int | None):
    scores = random_scores(2)
    scores[1, place] = np.nan
    with pytest.raises(NumericalError, match="row 1"):
        scores_model(scores, [HeadRequest(0, top_k), HeadRequest(1, top_k)])


def test_nan_of_an_unwanted_row_is_none(scores_model):
    scores = random_scores(2)
    scores[0, 5] = np.nan
    executable = scores_model(scores, [HeadRequest(1, None)])
    assert executable.logits(0).tobytes() == scores[1].tobytes()


def test_exact_ids_follow_the_best(load):
    """As the reference: best first, then the asked ids that are not among them."""
    program, source = hybrid_program()
    heads = [HeadRequest(0, 3, (7, 90, 2, 2)), HeadRequest(1, 200, (1,))]
    batch = make_batch(Part((4, 5)), heads=heads)
    cpu, truth = load(program, source), load_reference(program, source)
    for executable in (cpu, truth):
        executable.run(batch)
    for output in range(2):
        ids, scores = cpu.candidates(output)
        expected_ids, expected_scores = truth.candidates(output)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(scores, expected_scores, rtol=1e-4, atol=1e-5)


def test_the_wrong_question_is_refused(hybrid):
    hybrid.run(make_batch(Part((4, 5)), heads=[HeadRequest(0, 3), HeadRequest(1, None)]))
    with pytest.raises(BackendError, match="candidates, not"):
        hybrid.logits(0)
    with pytest.raises(BackendError, match="distribution, not"):
        hybrid.candidates(1)
    for output in (-1, 2):
        with pytest.raises(BackendError, match="no such output"):
            hybrid.logits(output)


def test_many_candidates_cost_no_whole_sort(load):
    """More than the kernels select: chosen first, then sorted, by processor time against a sort of everything."""
    scores = np.random.default_rng(2).standard_normal((1, 60_000)).astype(np.float32)
    b = ProgramBuilder({"e": scores.shape})
    hidden = b.embedding(b.weight("e", scores.shape))
    executable = load(b.finish(hidden, b.gather_outputs(hidden)), MemoryTensors({}, {"e": scores}))
    executable.run(make_batch(Part((0,)), heads=[HeadRequest(0, 200)]))
    np.testing.assert_array_equal(executable.candidates(0)[0], expected_order(scores[0])[:200])

    def seconds(call) -> float:
        times = []
        for _ in range(9):
            began = time.thread_time()
            call()
            times.append(time.thread_time() - began)
        return min(times)

    whole = seconds(lambda: np.argsort(-scores[0], kind="stable"))
    assert seconds(lambda: executable.candidates(0)) < whole / 3  # about a tenth
