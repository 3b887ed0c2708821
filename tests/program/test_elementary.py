"""The float64 elementary functions against exact arithmetic (Python's decimal with 60 digits)."""

from __future__ import annotations

import decimal
import hashlib
import math

import numpy as np
import pytest

from kinetic_core.program.elementary import MAX_ANGLE, exp64, log64, sincos64

CONTEXT = decimal.Context(prec=60, Emin=-99999, Emax=99999)
PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


def ulps(got: np.ndarray, exact: list[decimal.Decimal]) -> float:
    """The largest error in units of the last place of the exact result."""
    worst = 0.0
    for value, truth in zip(got.tolist(), exact, strict=True):
        error = abs(decimal.Decimal(value) - truth)
        worst = max(worst, float(error / decimal.Decimal(math.ulp(float(truth)))))
    return worst


def exact_sine(x: float) -> decimal.Decimal:
    with decimal.localcontext(CONTEXT):
        angle = decimal.Decimal(x)
        angle -= (angle / (2 * PI)).to_integral_value() * 2 * PI
        term = total = angle
        for k in range(1, 60):
            term *= -angle * angle / ((2 * k) * (2 * k + 1))
            total += term
        return total


def exact_cosine(x: float) -> decimal.Decimal:
    with decimal.localcontext(CONTEXT):
        angle = decimal.Decimal(x)
        angle -= (angle / (2 * PI)).to_integral_value() * 2 * PI
        term = total = decimal.Decimal(1)
        for k in range(1, 60):
            term *= -angle * angle / ((2 * k - 1) * (2 * k))
            total += term
        return total


def test_exp_is_within_one_ulp():
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-700, 700, 1500), rng.uniform(-1, 1, 1500), rng.uniform(-1e-9, 1e-9, 100), [0.0]])
    assert ulps(exp64(x), [CONTEXT.exp(decimal.Decimal(v)) for v in x.tolist()]) < 1.0


def test_exp_at_the_edges():
    np.testing.assert_array_equal(exp64([-np.inf, -746.0, 0.0, 710.0, np.inf]), [0.0, 0.0, 1.0, np.inf, np.inf])
    assert np.isnan(exp64(np.nan))
    assert exp64(-745.0) == 5e-324


def test_log_is_within_one_ulp():
    rng = np.random.default_rng(2)
    x = np.concatenate(
        [2.0 ** rng.uniform(-1000, 1000, 1500), rng.uniform(0.5, 2, 1500), 1 + rng.uniform(-1e-9, 1e-9, 100), [5e-324]]
    )
    assert ulps(log64(x), [CONTEXT.ln(decimal.Decimal(v)) for v in x.tolist()]) < 1.0


def test_log_at_the_edges():
    np.testing.assert_array_equal(log64([0.0, 1.0, np.inf]), [-np.inf, 0.0, np.inf])
    assert np.isnan(log64([-1.0, np.nan])).all()


def test_sine_and_cosine_are_within_one_ulp():
    rng = np.random.default_rng(3)
    near_axes = np.rint(rng.uniform(-6e5, 6e5, 300)) * (math.pi / 2)
    x = np.concatenate([rng.uniform(-1e6, 1e6, 700), rng.uniform(-4, 4, 700), near_axes, [0.0, MAX_ANGLE]])
    sine, cosine = sincos64(x)
    assert ulps(sine, [exact_sine(v) for v in x.tolist()]) < 1.0
    assert ulps(cosine, [exact_cosine(v) for v in x.tolist()]) < 1.0


@pytest.mark.parametrize("angle", [math.nan, math.inf, 2.0 * MAX_ANGLE])
def test_sine_refuses_angles_that_it_cannot_reduce(angle):
    with pytest.raises(ValueError, match="finite angles"):
        sincos64(np.array([0.0, angle]))


def test_the_bits_do_not_depend_on_shape_or_place():
    x = np.random.default_rng(4).uniform(-20, 20, 1001)
    for function in (exp64, lambda v: log64(np.abs(v)), lambda v: sincos64(v)[0], lambda v: sincos64(v)[1]):
        whole = function(x)
        assert whole.tobytes() == np.array([float(function(v)) for v in x]).tobytes()
        assert whole[3:].tobytes() == function(x[3:]).tobytes()


def test_the_bits_are_the_recorded_ones():
    """A change of any bit changes what seeds produce and must be deliberate."""
    x = np.arange(-4000, 4000) / 64.0
    sine, cosine = sincos64(x * 1000)
    digest = hashlib.sha256(b"".join(a.tobytes() for a in (exp64(x), log64(x + 63), sine, cosine))).hexdigest()
    assert digest[:16] == "04fc54980b2657f8"
