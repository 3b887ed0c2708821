"""The equations of LFM2, LFM2-MoE and LFM3 on all tokens at once, in float64, without the project's operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


class Direct:
    """keys: the metadata without the architecture's prefix."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[np.float32]], keys: Mapping[str, Any]) -> None:
        self.t = {name: array.astype(float) for name, array in tensors.items()}
        self.keys = keys
        self.heads = keys["attention.head_count"]
        self.head_dim = keys.get("attention.key_length", keys["embedding_length"] // self.heads)

    def per_block(self, key: str, layer: int, default: Any) -> Any:
        value = self.keys.get(key, default)
        return value[layer] if isinstance(value, list | np.ndarray) else value

    def rms(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * self.t[f"{name}.weight"]

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.t[f"{name}.weight"].T

    def logits(self, tokens: npt.NDArray[np.int32]) -> Array:
        x = self.t["token_embd.weight"][tokens]
        for layer in range(self.keys["block_count"]):
            block = f"blk.{layer}."
            kv_heads = self.per_block("attention.head_count_kv", layer, None)
            y = self.rms(x, block + "attn_norm")
            y = self.attention(y, block, layer, kv_heads) if kv_heads else self.convolution(y, block)
            x = x + (
                self.rms(y, block + "post_attention_norm") if block + "post_attention_norm.weight" in self.t else y
            )
            y = self.rms(x, block + "ffn_norm")
            y = self.experts(y, block) if block + "ffn_gate_inp.weight" in self.t else self.feed_forward(y, block)
            x = x + (self.rms(y, block + "post_ffw_norm") if block + "post_ffw_norm.weight" in self.t else y)
        x = self.rms(x, "token_embd_norm" if "token_embd_norm.weight" in self.t else "output_norm")
        return x @ self.t.get("output.weight", self.t["token_embd.weight"]).T

    def convolution(self, y: Array, block: str) -> Array:
        before, after, inner = np.split(self.linear(y, block + "shortconv.in_proj"), 3, axis=1)
        kernel = self.t[block + "shortconv.conv.weight"]
        padded = np.concatenate([np.zeros((kernel.shape[1] - 1, kernel.shape[0])), before * inner])
        mixed = sum(kernel[:, tap] * padded[tap : tap + len(y)] for tap in range(kernel.shape[1]))
        return self.linear(after * mixed, block + "shortconv.out_proj")

    def rope(self, x: Array, base: float, factors: Array) -> Array:
        half = self.head_dim // 2
        angle = np.outer(np.arange(len(x)), base ** (-np.arange(half) / half) / factors)[:, None]
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def attention(self, y: Array, block: str, layer: int, kv_heads: int) -> Array:
        n, slides = len(y), self.per_block("attention.sliding_window_pattern", layer, False)
        base = self.keys["rope.freq_base_swa" if slides else "rope.freq_base"]
        factors = np.ones(self.head_dim // 2) if slides else self.t.get("rope_freqs.weight", 1.0)
        q, k, v = (
            self.linear(y, block + name).reshape(n, -1, self.head_dim) for name in ("attn_q", "attn_k", "attn_v")
        )
        q = self.rope(self.rms(q, block + "attn_q_norm"), base, factors)
        k = self.rope(self.rms(k, block + "attn_k_norm"), base, factors)
        distance = np.arange(n)[:, None] - np.arange(n)
        window = self.keys["attention.sliding_window"] if slides else n
        mixed = np.zeros((n, self.heads, self.head_dim))
        for head in range(self.heads):
            shared = head // (self.heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / math.sqrt(self.head_dim)
            weights = np.where((distance >= 0) & (distance < window), np.exp(scores), 0.0)
            mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, shared]
        if block + "attn_gate.weight" in self.t:
            mixed = mixed / (1 + np.exp(-self.linear(y, block + "attn_gate")))[..., None]
        return self.linear(mixed.reshape(n, -1), block + "attn_output")

    def feed_forward(self, y: Array, block: str) -> Array:
        return self.linear(
            silu(self.linear(y, block + "ffn_gate")) * self.linear(y, block + "ffn_up"), block + "ffn_down"
        )

    def experts(self, y: Array, block: str) -> Array:
        gate, up, down = (self.t[f"{block}ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        scores = 1 / (1 + np.exp(-self.linear(y, block + "ffn_gate_inp")))
        ranked = scores + self.t.get(block + "exp_probs_b.bias", 0.0)
        out = np.zeros_like(y)
        for row, x in enumerate(y):
            chosen = np.argsort(-ranked[row])[: self.keys["expert_used_count"]]
            total = scores[row, chosen].sum() + 1e-6
            for expert in chosen:
                inner = silu(gate[expert] @ x) * (up[expert] @ x)
                out[row] += scores[row, expert] / total * (down[expert] @ inner)
        return out
