"""The kernels' elementary functions: error bounds, edges, NaN."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from kinetic_core.backends.cpu.kernels import mathfun
from kinetic_core.backends.cpu.simd import load_vf, store_vf
from kinetic_core.program.elementary import exp64, log64

FUNCTIONS = {name: getattr(mathfun, name) for name in ("exp", "sigmoid", "silu", "softplus")}


def apply(name: str, x: np.ndarray) -> np.ndarray:
    """The function over an array, padded to whole vectors."""
    function = FUNCTIONS[name]

    @njit(error_model="numpy")
    def run(source, target, n):
        for k in range(n):
            store_vf(target + 64 * k, function(load_vf(source + 64 * k)))

    padded = np.zeros(-(-len(x) // 16) * 16, np.float32)
    padded[: len(x)] = x
    out = np.full_like(padded, np.nan)
    run(padded.ctypes.data, out.ctypes.data, len(padded) // 16)
    return out[: len(x)]


def exact(name: str, x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    if name == "exp":
        return exp64(wide)
    if name == "softplus":
        small = exp64(-np.abs(wide))
        # ln(1 + u) for tiny u: the series, where 1 + u would lose u
        return np.maximum(wide, 0) + np.where(small < 1e-9, small, log64(1 + small))
    sigmoid = np.where(wide >= 0, 1 / (1 + exp64(-np.abs(wide))), exp64(wide) / (1 + exp64(wide)))
    return sigmoid if name == "sigmoid" else wide * sigmoid


def ulps(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.abs(got.astype(np.float64) - expected) / np.spacing(np.abs(expected).astype(np.float32)).astype(float)


def samples(largest: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    parts = [rng.uniform(-largest, largest, 200_000), rng.uniform(-1, 1, 100_000), rng.uniform(-1e-4, 1e-4, 10_000)]
    return np.concatenate([*parts, np.linspace(-3, 3, 50_001)]).astype(np.float32)


@pytest.mark.parametrize(("name", "bound"), [("exp", 1.0), ("sigmoid", 2.5), ("silu", 3.0), ("softplus", 3.0)])
def test_the_error_is_within_its_bound(name: str, bound: float):
    x = samples(86.0)
    assert ulps(apply(name, x), exact(name, x)).max() <= bound


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_stays_nan(name: str):
    assert np.isnan(apply(name, np.array([np.nan], np.float32))).all()


def test_edges():
    x = np.array([-np.inf, -104.0, -103.0, -90.0, 0.0, 88.7, 88.73, np.inf], np.float32)
    got = apply("exp", x)
    np.testing.assert_array_equal(got[[0, 1, 4, 6, 7]], [0.0, 0.0, 1.0, np.inf, np.inf])
    assert ulps(got[[2, 3, 5]], exp64(x[[2, 3, 5]])).max() <= 1.0
    assert 0 < got[2] < got[3] < np.finfo(np.float32).tiny  # denormals are kept
    np.testing.assert_array_equal(apply("sigmoid", np.array([-np.inf, 0.0, np.inf], np.float32)), [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(apply("softplus", np.array([-np.inf, 200.0], np.float32)), [0.0, 200.0])


def test_the_scalar_has_the_bits_of_a_lane():
    @njit(error_model="numpy")
    def run(x, out):
        for k in range(len(x)):
            out[k] = mathfun.exp_scalar(x[k])

    x = samples(100.0)[:5000]
    out = np.empty_like(x)
    run(x, out)
    assert out.tobytes() == apply("exp", x).tobytes()
