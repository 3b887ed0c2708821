"""The equations that families share, on all tokens at once, in float64, without the project's operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

EPS = 1e-5
Tensors = Mapping[str, np.ndarray]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def linear(t: Tensors, x: np.ndarray, name: str) -> np.ndarray:
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)


def rope(x: np.ndarray, base: float, rotary_dim: int, *, adjacent: bool, factors: Any = 1.0) -> np.ndarray:
    """x: [tokens, heads, head size]; factors: what each pair's angle is divided by."""
    x, pairs = x.copy(), np.arange(rotary_dim // 2)
    first, second = (2 * pairs, 2 * pairs + 1) if adjacent else (pairs, pairs + rotary_dim // 2)
    angles = np.arange(len(x))[:, None, None] * base ** (-2 * pairs / rotary_dim) / factors
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


def heads(t: Tensors, y: np.ndarray, block: str, head_dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v: [tokens, heads, head size]."""
    q, k, v = (linear(t, y, f"{block}attn_{part}").reshape(len(y), -1, head_dim) for part in "qkv")
    return q, k, v


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None, window: int | None = None
) -> np.ndarray:
    """q: [tokens, heads, head size]; k, v: [tokens, key heads, head size] -> [tokens, heads * head size]."""
    share, mixed = q.shape[1] // k.shape[1], np.zeros_like(q)
    distance = np.arange(len(q))[:, None] - np.arange(len(q))
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // share].T * (q.shape[2] ** -0.5 if scale is None else scale)
        scores[(distance < 0) | (distance >= (window or len(q)))] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head // share]
    return mixed.reshape(len(q), -1)


def convolution(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Causal, each channel by itself. kernel: [channels, taps]."""
    padded = np.concatenate([np.zeros((kernel.shape[1] - 1, x.shape[1])), x])
    return sum(padded[tap : tap + len(x)] * kernel[:, tap] for tap in range(kernel.shape[1]))


def mamba2(t: Tensors, block: str, y: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """sizes: the keys under ``ssm.``."""
    d, n, heads = sizes["inner_size"], sizes["state_size"], sizes["time_step_rank"]
    groups = sizes.get("group_count", 1)
    z, u, dt = np.split(linear(t, y, block + "ssm_in"), [d, 2 * d + 2 * groups * n], axis=1)
    u = silu(convolution(u, t[block + "ssm_conv1d.weight"]) + t.get(block + "ssm_conv1d.bias", 0.0))
    x, b, c = np.split(u, [d, d + groups * n], axis=1)
    x = x.reshape(len(y), heads, -1)
    b, c = (np.repeat(part.reshape(len(y), groups, n), heads // groups, axis=1) for part in (b, c))
    dt = np.log1p(np.exp(dt + t[block + "ssm_dt.bias"]))
    state, out = np.zeros((heads, x.shape[2], n)), np.zeros_like(x)
    for row in range(len(y)):
        decay = np.exp(dt[row] * t[block + "ssm_a"].reshape(-1))[:, None, None]
        state = decay * state + (dt[row, :, None] * x[row])[:, :, None] * b[row][:, None, :]
        out[row] = (state * c[row][:, None, :]).sum(-1) + t[block + "ssm_d"].reshape(-1, 1) * x[row]
    o = out.reshape(len(y), d) * silu(z)
    if block + "ssm_norm.weight" in t:
        o = rms(o.reshape(len(y), groups, -1), t[block + "ssm_norm.weight"].reshape(groups, -1)).reshape(len(y), d)
    return linear(t, o, block + "ssm_out")


def feed_forward(t: Tensors, block: str, x: np.ndarray, kind: str = "") -> np.ndarray:
    gate = silu(linear(t, x, f"{block}ffn_gate{kind}"))
    return linear(t, gate * linear(t, x, f"{block}ffn_up{kind}"), f"{block}ffn_down{kind}")


def experts(t: Tensors, block: str, x: np.ndarray, n_used: int, *, sigmoid: bool = False) -> np.ndarray:
    """Scores by softmax, or by a sigmoid with a bias that only helps to choose."""
    logits = x @ t[block + "ffn_gate_inp.weight"].T
    scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits)
    ranked = scores + t.get(block + "exp_probs_b.bias", 0.0)
    out = np.zeros_like(x)
    for row in range(len(x)):
        best = np.argsort(-ranked[row])[:n_used]
        for expert in best:
            gate, up, down = (t[f"{block}ffn_{name}_exps.weight"][expert] for name in ("gate", "up", "down"))
            weight = scores[row, expert] / (scores[row, best].sum() + (1e-6 if sigmoid else 0.0))
            out[row] += weight * (down @ (silu(gate @ x[row]) * (up @ x[row])))
    return out
