"""The order of tokens against a plain sort: any scores, ties at the boundary, zeros of both signs, infinities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kinetic_core.errors import NumericalError
from kinetic_core.program.ranking import best

FEW = st.sampled_from([-np.inf, -2.0, -1e-45, -0.0, 0.0, 1e-45, 0.5, 3.0, np.inf])
"""Scores of which many are equal, so that most selections cut through a tie."""


def sorted_ids(scores: np.ndarray) -> list[int]:
    return np.lexsort((np.arange(len(scores)), -scores)).tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_best_equals_a_plain_sort(dtype: type[np.floating], data: st.DataObject) -> None:
    width = np.dtype(dtype).itemsize * 8
    anything = st.floats(width=width, allow_nan=False)
    elements = data.draw(st.sampled_from([FEW, anything]))
    scores = data.draw(hnp.arrays(dtype, st.integers(1, 400), elements=elements, fill=st.nothing()))
    k = data.draw(st.integers(1, len(scores) + 2))
    assert best(scores, k).tolist() == sorted_ids(scores)[:k]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("k", [1, 2, 129, 299, 300, 301])
def test_every_cut_through_a_tie(dtype: type[np.floating], k: int) -> None:
    rng = np.random.default_rng(k)
    for _ in range(30):
        scores = rng.choice(np.array([-1.0, -0.0, 0.0, 2.0], dtype), 300)
        assert best(scores, k).tolist() == sorted_ids(scores)[:k]


@pytest.mark.parametrize("k", [1, 2, 50, 100, 101])
@pytest.mark.parametrize("place", [0, 57, 99])
def test_nan_is_an_error(k: int, place: int) -> None:
    scores = np.linspace(-1, 1, 100, dtype=np.float32)
    scores[place] = np.nan
    for kind in (np.float32, np.float64):
        with pytest.raises(NumericalError, match="not a finite number"):
            best(scores.astype(kind), k)
