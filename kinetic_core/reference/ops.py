"""What every operation of a program computes, for one row, in plain NumPy.

Legend: a row is f32[width] and a recurrent state f32[shape]; weights are f64 (exact widenings of what the file says),
in the shapes of `kinetic_core.program.ops`. Each function widens its inputs to float64, computes there and rounds
once to float32, so its error is that of one rounding.

Exactness: a function sees one row and the states of that row's path, and nothing else of the step. Its arrays have
the same shapes whenever the path is the same, so NumPy takes the same code path and the bits cannot depend on the
rows beside it. Every sum of products is a dot product of two vectors (`_dot`). A matrix product would break this:
BLAS picks kernel and threads by the row count, and its threads, spinning on busy cores, cost more than they gave.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def _wide(x: npt.NDArray[np.floating]) -> F64:
    return np.ascontiguousarray(x, np.float64)


def _narrow(x: F64) -> F32:
    return x.astype(np.float32)


def _dot(rows: npt.NDArray[np.floating], vector: npt.NDArray[np.floating]) -> F64:
    """rows: [n, width], vector: [width] -> f64[n], each row's dot product by itself."""
    return np.vecdot(_wide(rows), _wide(vector))


def _sigmoid(x: F64) -> F64:
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1.0 / (1.0 + small), small / (1.0 + small))


def _silu(x: F64) -> F64:
    return x * _sigmoid(x)


def embedding(weight: F64, token_id: int, scale: float) -> F32:
    """weight: [vocab, d_model] -> f32[d_model]."""
    return _narrow(weight[token_id] * scale)


def rms_norm(x: F32, weight: F64, eps: float, group_width: int) -> F32:
    """x: [width], weight: [group_width] or [width]. Source: Zhang and Sennrich 2019, arXiv 1910.07467."""
    groups = _wide(x).reshape(-1, group_width)
    mean_square = np.mean(groups * groups, axis=1, keepdims=True)
    factors = weight.reshape(-1, group_width)  # one row of factors for all groups, or one each
    return _narrow((groups / np.sqrt(mean_square + eps) * factors).reshape(-1))


def l2_norm(x: F32, eps: float, group_width: int, scale: float) -> F32:
    """x: [width], each run of `group_width` columns by itself."""
    groups = _wide(x).reshape(-1, group_width)
    square = np.sum(groups * groups, axis=1, keepdims=True)
    return _narrow((groups / np.sqrt(square + eps) * scale).reshape(-1))


def linear(x: F32, weight: F64, bias: F64 | None) -> F32:
    """x: [inputs], weight: [outputs, inputs], bias: [outputs] -> f32[outputs]."""
    out = _dot(weight, x)
    return _narrow(out if bias is None else out + bias.reshape(-1))


def add(a: F32, b: F32, factor: float) -> F32:
    """a + b * factor."""
    return _narrow(_wide(a) + _wide(b) * factor)


def multiply(a: F32, b: F32) -> F32:
    """a * b."""
    return _narrow(_wide(a) * _wide(b))


def scale(x: F32, factor: float) -> F32:
    """x * factor."""
    return _narrow(_wide(x) * factor)


def gate(gates: F32, x: F32, activation: Literal["silu", "sigmoid"]) -> F32:
    """activation(gates) * x; gates: [width] or one per run of width / gates columns."""
    opened = _silu(_wide(gates)) if activation == "silu" else _sigmoid(_wide(gates))
    runs = _wide(x).reshape(len(gates), -1)
    return _narrow((opened[:, None] * runs).reshape(-1))


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x)."""
    return _narrow(_sigmoid(_wide(x)))


def softplus(x: F32, bias: F64 | None) -> F32:
    """ln(1 + e^(x + bias)); x, bias: [width]."""
    return _narrow(np.logaddexp(0.0, _wide(x) if bias is None else _wide(x) + bias.reshape(-1)))


def decay_gate(x: F32, a: F64, dt_bias: F64) -> F32:
    """a * ln(1 + e^(x + dt_bias)); all [heads]."""
    return _narrow(a.reshape(-1) * np.logaddexp(0.0, _wide(x) + dt_bias.reshape(-1)))


def rope(
    x: F32, position: int, head_dim: int, rotary_dim: int, base: float, interleaved: bool, factors: F64 | None
) -> F32:
    """x: [heads * head_dim], factors: [rotary_dim / 2]. Source: Su et al. 2021, arXiv 2104.09864."""
    pair = np.arange(rotary_dim // 2, dtype=np.float64)
    angle = position * base ** (-2.0 * pair / rotary_dim)
    if factors is not None:
        angle = angle / factors.reshape(-1)
    out = _wide(x).reshape(-1, head_dim).copy()
    if interleaved:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    else:
        first, second = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    x1, x2 = out[:, first].copy(), out[:, second].copy()
    out[:, first] = x1 * np.cos(angle) - x2 * np.sin(angle)
    out[:, second] = x1 * np.sin(angle) + x2 * np.cos(angle)
    return _narrow(out.reshape(-1))


def attention(q: F32, keys: F32, values: F32, heads: int, factor: float) -> F32:
    """Softmax attention of one row over the positions that it sees.

    q: [heads * head_dim]; keys, values: [positions, kv_heads, head_dim], the row's own included -> [heads * head_dim].
    """
    _, kv_heads, head_dim = keys.shape
    queries = _wide(q).reshape(heads, head_dim)
    out = np.empty((heads, head_dim))
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = _dot(keys[:, kv_head], queries[head]) * factor
        weights = np.exp(scores - scores.max())
        out[head] = _dot(values[:, kv_head].T, weights) / weights.sum()
    return _narrow(out.reshape(-1))


def short_conv(
    x: F32, state: F32, weight: F64, bias: F64 | None, activation: Literal["none", "silu"]
) -> tuple[F32, F32]:
    """One row of a causal depthwise convolution, and the state after it.

    x: [width], state: [K - 1, width], oldest first, weight: [width, K].
    """
    taps = np.concatenate([state, x[None]])
    total = np.zeros(len(x)) if bias is None else bias.reshape(-1).copy()
    for tap in range(len(taps)):
        total = total + weight[:, tap] * _wide(taps[tap])
    return _narrow(_silu(total) if activation == "silu" else total), taps[1:].copy()


def delta_rule(
    q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32, key_heads: int, value_heads: int
) -> tuple[F32, F32]:
    """One row of the gated delta rule, and the state after it.

    q, k: [key_heads * key_dim], v: [value_heads * value_dim], decay, beta: [value_heads],
    state: [value_heads, key_dim, value_dim]. Source: Yang et al. 2024, arXiv 2412.06464.
    """
    queries, keys = _wide(q).reshape(key_heads, -1), _wide(k).reshape(key_heads, -1)
    values = _wide(v).reshape(value_heads, -1)
    out = np.empty_like(values)
    after = np.empty_like(state)
    for head in range(value_heads):
        key, query = keys[head % key_heads], queries[head % key_heads]
        s = np.exp(float(decay[head])) * _wide(state[head])
        delta = float(beta[head]) * (values[head] - _dot(s.T, key))
        s = s + np.outer(key, delta)
        out[head] = _dot(s.T, query)
        after[head] = s
    return _narrow(out.reshape(-1)), after


def mamba2_scan(
    x: F32, b: F32, c: F32, dt: F32, a: F64, d: F64, state: F32, heads: int, groups: int
) -> tuple[F32, F32]:
    """One row of the Mamba-2 recurrence, and the state after it.

    x: [heads * head_dim], b, c: [groups * state_dim], dt, a, d: [heads], state: [heads, state_dim, head_dim].
    Source: Dao and Gu 2024, arXiv 2405.21060.
    """
    inputs = _wide(x).reshape(heads, -1)
    keys, queries = _wide(b).reshape(groups, -1), _wide(c).reshape(groups, -1)
    a, d = a.reshape(-1), d.reshape(-1)
    out = np.empty_like(inputs)
    after = np.empty_like(state)
    for head in range(heads):
        group = head // (heads // groups)
        step = float(dt[head])
        s = np.exp(step * a[head]) * _wide(state[head]) + np.outer(keys[group], step * inputs[head])
        out[head] = _dot(s.T, queries[group]) + d[head] * inputs[head]
        after[head] = s
    return _narrow(out.reshape(-1)), after


def route(
    logits: F32, n_used: int, scoring: Literal["softmax", "sigmoid"], bias: F64 | None, normalized: bool, eps: float
) -> tuple[F32, F32]:
    """(ids of the chosen experts, ascending; their weights), each [n_used]. logits, bias: [n_experts]."""
    wide = _wide(logits)
    if scoring == "softmax":
        scores = np.exp(wide - wide.max())
        scores = scores / scores.sum()
    else:
        scores = _sigmoid(wide)
    ranked = scores if bias is None else scores + bias.reshape(-1)
    # Rounded once before they are compared: equal scores go to the lower id.
    order = np.lexsort((np.arange(len(wide)), -_narrow(ranked)))
    chosen = np.sort(order[:n_used])
    weights = scores[chosen]
    if normalized:
        weights = weights / (weights.sum() + eps)
    return chosen.astype(np.float32), _narrow(weights)


def experts(x: F32, chosen: F32, weights: F32, gate: F64, up: F64, down: F64) -> F32:
    """x: [d_model], chosen, weights: [n_used], gate, up: [n_experts, d_expert, d_model], down: the other way round."""
    total = np.zeros(len(x))
    for expert, weight in zip(chosen.astype(np.int64), _wide(weights), strict=True):
        inner = _narrow(_silu(_dot(gate[expert], x)) * _dot(up[expert], x))
        total = total + weight * _dot(down[expert], inner)
    return _narrow(total)
