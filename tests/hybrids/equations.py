"""The equations that hybrid families share, on all tokens at once, in float64, without the project's operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kinetic_core.gguf import MemoryTensors, read_tensor
from kinetic_core.interfaces import Architecture, HeadRequest, LoadOptions, RowBatch, SequenceRows, TinyVariant
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model

TOKENS = np.random.default_rng(5).integers(0, 100, 16).astype(np.int32)
N = len(TOKENS)
EPS = 1e-5
Tensors = Mapping[str, np.ndarray]


def model(key: str, variant: TinyVariant, keys: Mapping[str, Any] | None = None) -> MemoryTensors:
    """A random model of a tiny variant with some keys changed; None leaves one out."""
    source = random_model(key, variant)
    metadata = {**source.metadata.raw, **{f"{key}.{name}": value for name, value in (keys or {}).items()}}
    return MemoryTensors({name: value for name, value in metadata.items() if value is not None}, tensors(source))


def tensors(source: MemoryTensors) -> dict[str, np.ndarray]:
    return {name: read_tensor(source, name) for name in source.tensors}


def record(architecture: type[Architecture], source: MemoryTensors):
    return record_program(architecture(source), FullHead(), source)


def logits(architecture: type[Architecture], source: MemoryTensors) -> np.ndarray:
    options = LoadOptions(kv_type="f32", max_outputs=N)
    executable = ReferenceBackend().load(record(architecture, source), source, options)
    sequence = SequenceRows(0, 0, N, np.zeros(1, np.int32), 0)
    heads = [HeadRequest(row, None) for row in range(N)]
    executable.run(RowBatch(TOKENS, np.arange(N, dtype=np.int32), (sequence,), heads))
    return np.array([executable.logits(row) for row in range(N)])


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def linear(t: Tensors, x: np.ndarray, name: str) -> np.ndarray:
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)


def rope(x: np.ndarray, base: float, rotary_dim: int, *, adjacent: bool) -> np.ndarray:
    """x: [tokens, heads, head size]."""
    x, pairs = x.copy(), np.arange(rotary_dim // 2)
    first, second = (2 * pairs, 2 * pairs + 1) if adjacent else (pairs, pairs + rotary_dim // 2)
    angles = np.arange(len(x))[:, None, None] * base ** (-2 * pairs / rotary_dim)
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """q: [tokens, heads, head size]; k, v: [tokens, key heads, head size] -> [tokens, heads * head size]."""
    share, mixed = q.shape[1] // k.shape[1], np.zeros_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // share].T * scale
        scores[np.triu_indices(len(q), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head // share]
    return mixed.reshape(len(q), -1)


def mamba2(t: Tensors, block: str, y: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """sizes: the keys under ``ssm.``."""
    d, n, heads = sizes["inner_size"], sizes["state_size"], sizes["time_step_rank"]
    groups = sizes.get("group_count", 1)
    z, u, dt = np.split(linear(t, y, block + "ssm_in"), [d, 2 * d + 2 * groups * n], axis=1)
    kernel = t[block + "ssm_conv1d.weight"]
    padded = np.concatenate([np.zeros((kernel.shape[1] - 1, u.shape[1])), u])
    u = sum(padded[tap : tap + len(u)] * kernel[:, tap] for tap in range(kernel.shape[1]))
    u = silu(u + t.get(block + "ssm_conv1d.bias", 0.0))
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


def experts(t: Tensors, block: str, x: np.ndarray, n_used: int) -> np.ndarray:
    scores = np.exp(x @ t[block + "ffn_gate_inp.weight"].T)
    out = np.zeros_like(x)
    for row in range(len(x)):
        best = np.argsort(-scores[row])[:n_used]
        for expert in best:
            gate, up, down = (t[f"{block}ffn_{name}_exps.weight"][expert] for name in ("gate", "up", "down"))
            weight = scores[row, expert] / scores[row, best].sum()
            out[row] += weight * (down @ (silu(gate @ x[row]) * (up @ x[row])))
    return out
