"""Each family's forward pass by its equations, read from a model's own metadata: logits of all tokens, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equations as eq
import family
import numpy as np

from kinetic_core.gguf import MemoryTensors

Keys = Mapping[str, Any]


def described(source: MemoryTensors) -> tuple[eq.Tensors, Keys]:
    """Tensors in float64, metadata without the architecture's prefix."""
    meta = source.metadata.prefixed(source.metadata.get_str("general.architecture"))
    t = {name: array.astype(float) for name, array in family.tensors(source).items()}
    return t, {key: source.metadata.raw[meta.prefix + key] for key in meta}


def per_block(meta: Keys, key: str, layer: int, default: Any = None) -> Any:
    value = meta.get(key, default)
    return value[layer] if isinstance(value, list | tuple | np.ndarray) else value


def head_dim(meta: Keys) -> int:
    return int(meta.get("attention.key_length", meta["embedding_length"] // meta["attention.head_count"]))


def output(t: eq.Tensors, x: np.ndarray, norm: str = "output_norm.weight") -> np.ndarray:
    return eq.rms(x, t[norm]) @ t.get("output.weight", t["token_embd.weight"]).T


def rotated_attention(t: eq.Tensors, meta: Keys, block: str, y: np.ndarray, *, adjacent: bool) -> np.ndarray:
    q, k, v = eq.heads(t, y, block, head_dim(meta))
    if meta.get("rope.scaling.finetuned", True):
        base, dims = meta.get("rope.freq_base", 10000.0), meta.get("rope.dimension_count", head_dim(meta))
        factors = t.get("rope_freqs.weight", 1.0)
        q, k = (eq.rope(part, base, dims, adjacent=adjacent, factors=factors) for part in (q, k))
    return eq.linear(t, eq.attention(q, k, v, meta.get("attention.scale")), block + "attn_output")


def ssm(meta: Keys) -> dict[str, Any]:
    return {key.removeprefix("ssm."): value for key, value in meta.items() if key.startswith("ssm.")}


def llama(t: eq.Tensors, meta: Keys) -> np.ndarray:
    x = t["token_embd.weight"][family.TOKENS]
    for layer in range(meta["block_count"]):
        block = f"blk.{layer}."
        x = x + rotated_attention(t, meta, block, eq.rms(x, t[block + "attn_norm.weight"]), adjacent=True)
        x = x + eq.feed_forward(t, block, eq.rms(x, t[block + "ffn_norm.weight"]))
    return output(t, x)


def granite(t: eq.Tensors, meta: Keys) -> np.ndarray:
    residual = meta.get("residual_scale", 1.0)
    x = t["token_embd.weight"][family.TOKENS] * meta.get("embedding_scale", 1.0)
    for layer in range(meta["block_count"]):
        block = f"blk.{layer}."
        y = eq.rms(x, t[block + "attn_norm.weight"])
        if per_block(meta, "attention.head_count_kv", layer):
            x = x + residual * rotated_attention(t, meta, block, y, adjacent=True)
        else:
            x = x + residual * eq.mamba2(t, block, y, ssm(meta))
        y = eq.rms(x, t[block + "ffn_norm.weight"])
        if meta.get("expert_count", 0):
            mixed = eq.experts(t, block, y, meta["expert_used_count"])
            if "expert_shared_feed_forward_length" in meta:
                mixed = mixed + eq.feed_forward(t, block, y, "_shexp")
        else:
            mixed = eq.feed_forward(t, block, y)
        x = x + residual * mixed
    return output(t, x) / meta.get("logit_scale", 1.0)


def falconh1(t: eq.Tensors, meta: Keys) -> np.ndarray:
    x = t["token_embd.weight"][family.TOKENS]
    for layer in range(meta["block_count"]):
        block = f"blk.{layer}."
        y = eq.rms(x, t[block + "attn_norm.weight"])
        x = x + rotated_attention(t, meta, block, y, adjacent=False) + eq.mamba2(t, block, y, ssm(meta))
        norm = t[block + "ffn_norm"] if block + "ffn_norm" in t else t[block + "ffn_norm.weight"]
        x = x + eq.feed_forward(t, block, eq.rms(x, norm))
    return output(t, x)


def lfm(t: eq.Tensors, meta: Keys) -> np.ndarray:
    x = t["token_embd.weight"][family.TOKENS]
    for layer in range(meta["block_count"]):
        block = f"blk.{layer}."
        y = eq.rms(x, t[block + "attn_norm.weight"])
        kv_heads = per_block(meta, "attention.head_count_kv", layer)
        y = lfm_attention(t, meta, layer, y) if kv_heads else lfm_convolution(t, block, y)
        x = x + optional_norm(t, y, block + "post_attention_norm.weight")
        y = eq.rms(x, t[block + "ffn_norm.weight"])
        if block + "ffn_gate_inp.weight" in t:
            y = eq.experts(t, block, y, meta["expert_used_count"], sigmoid=True)
        else:
            y = eq.feed_forward(t, block, y)
        x = x + optional_norm(t, y, block + "post_ffw_norm.weight")
    return output(t, x, "token_embd_norm.weight" if "token_embd_norm.weight" in t else "output_norm.weight")


def optional_norm(t: eq.Tensors, y: np.ndarray, name: str) -> np.ndarray:
    return eq.rms(y, t[name]) if name in t else y


def lfm_convolution(t: eq.Tensors, block: str, y: np.ndarray) -> np.ndarray:
    before, after, inner = np.split(eq.linear(t, y, block + "shortconv.in_proj"), 3, axis=1)
    mixed = after * eq.convolution(before * inner, t[block + "shortconv.conv.weight"])
    return eq.linear(t, mixed, block + "shortconv.out_proj")


def lfm_attention(t: eq.Tensors, meta: Keys, layer: int, y: np.ndarray) -> np.ndarray:
    block, d = f"blk.{layer}.", head_dim(meta)
    slides = per_block(meta, "attention.sliding_window_pattern", layer, False)
    base = meta["rope.freq_base_swa" if slides else "rope.freq_base"]
    factors = 1.0 if slides else t.get("rope_freqs.weight", 1.0)
    q, k, v = eq.heads(t, y, block, d)
    q, k = (
        eq.rope(eq.rms(part, t[f"{block}{norm}.weight"]), base, d, adjacent=False, factors=factors)
        for part, norm in ((q, "attn_q_norm"), (k, "attn_k_norm"))
    )
    mixed = eq.attention(q, k, v, window=meta["attention.sliding_window"] if slides else None)
    if block + "attn_gate.weight" in t:
        gate = 1 / (1 + np.exp(-eq.linear(t, y, block + "attn_gate")))
        mixed = (mixed.reshape(*gate.shape, d) * gate[..., None]).reshape(mixed.shape)
    return eq.linear(t, mixed, block + "attn_output")


def qwen35(t: eq.Tensors, meta: Keys) -> np.ndarray:
    x = t["token_embd.weight"][family.TOKENS]
    for number in range(meta["block_count"] - meta.get("nextn_predict_layers", 0)):
        x = qwen35_block(t, meta, number, x)
    return output(t, x)


def qwen35_prediction(t: eq.Tensors, meta: Keys, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of the prediction block. hidden: of the trunk, before each token but the first."""
    number = meta["block_count"] - 1
    own = f"blk.{number}.nextn."
    embedded = t.get(own + "embed_tokens.weight", t["token_embd.weight"])[family.TOKENS[1:]]
    both = [eq.rms(embedded, t[own + "enorm.weight"]), eq.rms(hidden, t[own + "hnorm.weight"])]
    x = qwen35_block(t, meta, number, eq.linear(t, np.concatenate(both, axis=1), own + "eh_proj"))
    predicted = eq.rms(x, t[own + "shared_head_norm.weight"])
    head = t.get(own + "shared_head_head.weight", t.get("output.weight", t["token_embd.weight"]))
    return predicted @ head.T, predicted


def qwen35_block(t: eq.Tensors, meta: Keys, number: int, x: np.ndarray) -> np.ndarray:
    block = f"blk.{number}."
    y = eq.rms(x, t[block + "attn_norm.weight"])
    x = x + (delta_net if block + "ssm_out.weight" in t else gated_attention)(t, block, y, meta)
    y = eq.rms(x, t[block + "post_attention_norm.weight"])
    if "expert_count" not in meta:
        return x + eq.feed_forward(t, block, y)
    gate = 1 / (1 + np.exp(-y @ t[block + "ffn_gate_inp_shexp.weight"].reshape(-1, 1)))
    return x + eq.experts(t, block, y, meta["expert_used_count"]) + gate * eq.feed_forward(t, block, y, "_shexp")


def delta_net(t: eq.Tensors, block: str, y: np.ndarray, meta: Mapping[str, Any]) -> np.ndarray:
    d, nk, nv = meta["ssm.state_size"], meta["ssm.group_count"], meta["ssm.time_step_rank"]
    u = eq.silu(eq.convolution(eq.linear(t, y, block + "attn_qkv"), t[block + "ssm_conv1d.weight"]))
    q, k, v = (part.reshape(len(y), -1, d) for part in np.split(u, [nk * d, 2 * nk * d], axis=1))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + eq.EPS) for part in (q, k))
    beta = 1 / (1 + np.exp(-eq.linear(t, y, block + "ssm_beta")))
    decay = np.exp(
        t[block + "ssm_a"] * np.log1p(np.exp(eq.linear(t, y, block + "ssm_alpha") + t[block + "ssm_dt.bias"]))
    )
    state, out = np.zeros((nv, d, d)), np.zeros_like(v)
    for row in range(len(y)):
        for head in range(nv):
            key, query = k[row, head % nk], q[row, head % nk] / np.sqrt(d)
            state[head] *= decay[row, head]
            delta = beta[row, head] * (v[row, head] - state[head].T @ key)
            state[head] += np.outer(key, delta)
            out[row, head] = state[head].T @ query
    o = eq.rms(out, t[block + "ssm_norm.weight"]).reshape(len(y), -1)
    return eq.linear(t, o * eq.silu(eq.linear(t, y, block + "attn_gate")), block + "ssm_out")


def gated_attention(t: eq.Tensors, block: str, y: np.ndarray, meta: Mapping[str, Any]) -> np.ndarray:
    heads, d = meta["attention.head_count"], meta["attention.key_length"]
    q, gate = np.split(eq.linear(t, y, block + "attn_q").reshape(len(y), heads, 2 * d), 2, axis=-1)
    k, v = (eq.linear(t, y, block + f"attn_{part}").reshape(len(y), -1, d) for part in "kv")
    q, k = (
        eq.rope(eq.rms(x, t[block + f"attn_{part}_norm.weight"]), 10000.0, meta["rope.dimension_count"], adjacent=False)
        for part, x in (("q", q), ("k", k))
    )
    mixed = eq.attention(q, k, v) / (1 + np.exp(-gate.reshape(len(y), -1)))
    return eq.linear(t, mixed, block + "attn_output")


DIRECT: Mapping[str, Callable[[eq.Tensors, Keys], np.ndarray]] = {
    "llama": llama,
    "granitehybrid": granite,
    "falcon-h1": falconh1,
    **dict.fromkeys(("lfm2", "lfm2moe", "lfm3"), lfm),
    **dict.fromkeys(("qwen35", "qwen35moe"), qwen35),
}


def logits(source: MemoryTensors) -> np.ndarray:
    """f64[N, vocab] of `family.TOKENS`."""
    return DIRECT[source.metadata.get_str("general.architecture")](*described(source))
