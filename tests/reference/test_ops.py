"""The reference operations against the equations written out number by number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kinetic_core.reference import ops


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def f32(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def close(got, expected):
    """Equal but for one rounding to float32."""
    assert got.dtype == np.float32
    expected = np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1.2e-7, atol=1e-30)


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


def test_embedding_is_one_scaled_row(rng):
    weight = rng.standard_normal((5, 3))
    close(ops.embedding(weight, 4, 2.5), [2.5 * weight[4, c] for c in range(3)])


@pytest.mark.parametrize(("width", "group"), [(6, 6), (6, 3), (10, 2), (7, 7)])
@pytest.mark.parametrize("shared", [True, False])
def test_rms_norm(rng, width, group, shared):
    x, eps = f32(rng, width), 0.3
    weight = rng.standard_normal(group if shared else width)
    expected = []
    for column in range(width):
        run = x[column // group * group :][:group].astype(float)
        root = math.sqrt(sum(v * v for v in run) / group + eps)
        expected.append(float(x[column]) / root * weight[column % group if shared else column])
    close(ops.rms_norm(x, weight, eps, group), expected)


@pytest.mark.parametrize(("width", "group"), [(6, 6), (6, 3)])
def test_l2_norm(rng, width, group):
    x, eps = f32(rng, width), 0.3
    expected = []
    for column in range(width):
        run = x[column // group * group :][:group].astype(float)
        expected.append(float(x[column]) / math.sqrt(sum(v * v for v in run) + eps) * 1.7)
    close(ops.l2_norm(x, eps, group, 1.7), expected)


@pytest.mark.parametrize("biased", [True, False])
def test_linear(rng, biased):
    x, weight, bias = f32(rng, 9), rng.standard_normal((5, 9)), rng.standard_normal((5, 1))
    expected = [
        math.fsum(weight[o, i] * float(x[i]) for i in range(9)) + (bias[o, 0] if biased else 0) for o in range(5)
    ]
    close(ops.linear(x, weight, bias if biased else None), expected)


def test_add_multiply_scale(rng):
    a, b = f32(rng, 7), f32(rng, 7)
    close(ops.add(a, b, 0.3), [float(a[c]) + float(b[c]) * 0.3 for c in range(7)])
    close(ops.multiply(a, b), [float(a[c]) * float(b[c]) for c in range(7)])
    close(ops.scale(a, -0.7), [float(a[c]) * -0.7 for c in range(7)])


@pytest.mark.parametrize("gates", [6, 2])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gate(rng, gates, activation):
    g, x = 3 * f32(rng, gates), f32(rng, 6)
    expected = []
    for column in range(6):
        value = float(g[column // (6 // gates)])
        expected.append(sigmoid(value) * (value if activation == "silu" else 1.0) * float(x[column]))
    close(ops.gate(g, x, activation), expected)


def test_sigmoid_reaches_its_ends_without_overflow():
    x = np.array([-1e4, -3, -0.0, 0, 3, 1e4], np.float32)
    with np.errstate(all="raise", under="ignore"):
        got = ops.sigmoid(x)
    close(got, [0.0, sigmoid(-3), 0.5, 0.5, sigmoid(3), 1.0])


def test_decay_gate(rng):
    x = np.array([-30, -1, 0.5, 25, 80], np.float32)
    a, dt_bias = -np.abs(rng.standard_normal((5, 1))), rng.standard_normal(5)
    expected = [a[h, 0] * math.log1p(math.exp(float(x[h]) + dt_bias[h])) for h in range(5)]
    close(ops.decay_gate(x, a, dt_bias), expected)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [6, 4])
@pytest.mark.parametrize("scaled", [True, False])
def test_rope(rng, interleaved, rotary_dim, scaled):
    heads, head_dim, position, base = 3, 6, 1234, 77.0
    x = f32(rng, heads * head_dim)
    factors = rng.uniform(1, 5, rotary_dim // 2) if scaled else None
    expected = x.astype(float)
    for head in range(heads):
        for pair in range(rotary_dim // 2):
            angle = position / base ** (2 * pair / rotary_dim) / (factors[pair] if scaled else 1.0)
            first = head * head_dim + (2 * pair if interleaved else pair)
            second = first + (1 if interleaved else rotary_dim // 2)
            x1, x2 = float(x[first]), float(x[second])
            expected[first] = x1 * math.cos(angle) - x2 * math.sin(angle)
            expected[second] = x1 * math.sin(angle) + x2 * math.cos(angle)
    got = ops.rope(x, position, head_dim, rotary_dim, base, interleaved, factors)
    np.testing.assert_allclose(got, expected, atol=1e-6)  # angles of a thousand radians lose a few digits


@pytest.mark.parametrize("positions", [1, 2, 7])
def test_attention(rng, positions):
    heads, kv_heads, head_dim = 6, 2, 5
    q = f32(rng, heads * head_dim)
    keys, values = f32(rng, positions, kv_heads, head_dim), f32(rng, positions, kv_heads, head_dim)
    expected = []
    for head in range(heads):
        kv_head = head // 3
        scores = [
            0.4 * sum(float(q[head * head_dim + c]) * float(keys[t, kv_head, c]) for c in range(head_dim))
            for t in range(positions)
        ]
        total = sum(math.exp(s) for s in scores)
        for c in range(head_dim):
            expected.append(sum(math.exp(scores[t]) / total * float(values[t, kv_head, c]) for t in range(positions)))
    np.testing.assert_allclose(ops.attention(q, keys, values, heads, 0.4), expected, rtol=1e-6)


def test_attention_survives_scores_beyond_exp(rng):
    keys = np.array([[[1000.0]], [[999.0]]], np.float32)
    values = np.array([[[1.0]], [[0.0]]], np.float32)
    got = ops.attention(np.array([3.0], np.float32), keys, values, 1, 1.0)
    close(got, [1 / (1 + math.exp(-3))])


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("biased", [True, False])
def test_short_conv_over_a_sequence(rng, activation, biased):
    n, width, taps = 6, 5, 3
    x, weight, bias = f32(rng, n, width), rng.standard_normal((width, taps)), rng.standard_normal((1, width))
    state = np.zeros((taps - 1, width), np.float32)
    for t in range(n):
        got, state = ops.short_conv(x[t], state, weight, bias if biased else None, activation)
        expected = []
        for c in range(width):
            total = bias[0, c] if biased else 0.0
            for j in range(taps):
                source = t - (taps - 1) + j
                total += weight[c, j] * (float(x[source, c]) if source >= 0 else 0.0)
            expected.append(total * sigmoid(total) if activation == "silu" else total)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert got.dtype == state.dtype == np.float32
    np.testing.assert_array_equal(state, x[-2:])


def test_delta_rule_over_a_sequence(rng):
    n, key_heads, value_heads, key_dim, value_dim = 5, 2, 4, 3, 2
    q, k = f32(rng, n, key_heads * key_dim), f32(rng, n, key_heads * key_dim)
    v = f32(rng, n, value_heads * value_dim)
    decay, beta = -np.abs(f32(rng, n, value_heads)), np.abs(f32(rng, n, value_heads))
    state = np.zeros((value_heads, key_dim, value_dim), np.float32)
    exact = np.zeros((value_heads, key_dim, value_dim))
    for t in range(n):
        got, state = ops.delta_rule(q[t], k[t], v[t], decay[t], beta[t], state, key_heads, value_heads)
        expected = np.zeros((value_heads, value_dim))
        for head in range(value_heads):
            shared = (head % key_heads) * key_dim
            for column in range(value_dim):
                old = [math.exp(decay[t, head]) * exact[head, i, column] for i in range(key_dim)]
                read = sum(float(k[t, shared + i]) * old[i] for i in range(key_dim))
                delta = float(beta[t, head]) * (float(v[t, head * value_dim + column]) - read)
                for i in range(key_dim):
                    exact[head, i, column] = old[i] + float(k[t, shared + i]) * delta
                    expected[head, column] += float(q[t, shared + i]) * exact[head, i, column]
        np.testing.assert_allclose(got, expected.reshape(-1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state, exact, rtol=1e-5, atol=1e-6)


def test_inputs_are_left_alone(rng):
    x, state, weight = f32(rng, 4), f32(rng, 2, 4), rng.standard_normal((4, 3))
    before = x.copy(), state.copy()
    ops.short_conv(x, state, weight, None, "silu")
    ops.rope(x, 3, 4, 4, 10.0, True, None)
    recurrent = f32(rng, 2, 2, 2)
    kept = recurrent.copy()
    ops.delta_rule(x, x, x, x[:2], x[:2], recurrent, 2, 2)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(state, before[1])
    np.testing.assert_array_equal(recurrent, kept)
