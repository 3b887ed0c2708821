"""Miniatures of every variant of the families: hidden size 64, 4 heads of 16; wider ones for K-quants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces import TinyVariant

D_EXPERT, VOCAB, HEADS = 32, 100, 4
WIDE: Mapping[str, Any] = {"embedding_length": 256, "feed_forward_length": 512}


def lfm2_variants() -> Sequence[TinyVariant]:
    """Tied; untied with frequency factors; one number of key/value heads for all blocks; wide heads; the last norm's
    other name; wide rows."""
    return [
        _variant("tied", (0, 2, 0)),
        _variant("untied", (0, 2), tied=False, rope_factors=True),
        _variant("attention", (2, 2), {"attention.head_count_kv": 2}),
        _variant("wide-heads", (0, 1), {"attention.key_length": 32, "attention.value_length": 32}),
        _variant("output-norm", (0, 2), last_norm="output_norm"),
        _variant("wide", (0, 2), WIDE, tied=False),
    ]


def lfm2moe_variants() -> Sequence[TinyVariant]:
    """A dense block first; experts in all blocks, untied; a router without bias; wide rows, experts' included."""
    experts = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": D_EXPERT}
    dense = {**experts, "leading_dense_block_count": 1, "expert_gating_func": 2}
    return [
        _variant("dense-first", (0, 2, 0), dense),
        _variant("untied", (0, 2), experts, tied=False),
        _variant("no-router-bias", (0, 1), dense, router_bias=False),
        _variant("wide", (0, 2), {**dense, **WIDE, "expert_feed_forward_length": 256}),
    ]


def lfm3_variants() -> Sequence[TinyVariant]:
    """All kinds of blocks; without factors, untied; without sliding blocks; wide heads; wide rows."""
    slides = {"attention.sliding_window": 6, "rope.freq_base_swa": 1000.0}

    def pattern(*blocks: bool) -> dict[str, Any]:
        return {**slides, "attention.sliding_window_pattern": list(blocks)}

    wide = {"attention.key_length": 32, "rope.dimension_count": 32, "rope.dimension_count_swa": 32}
    return [
        _variant("partial-rope", (0, 2, 2), pattern(False, True, False), rope_factors=True, sandwich=True),
        _variant("untied", (2, 0, 1), pattern(True, False, False), tied=False, sandwich=True),
        _variant("full", (0, 2), sandwich=True),
        _variant("wide-heads", (0, 2, 2), {**pattern(False, False, True), **wide}, sandwich=True),
        _variant("wide", (0, 2), {**pattern(False, True), **WIDE}, sandwich=True),
    ]


def _variant(
    name: str,
    kv_heads: Sequence[int],
    changes: Mapping[str, Any] | None = None,
    *,
    tied: bool = True,
    rope_factors: bool = False,
    router_bias: bool = True,
    sandwich: bool = False,
    last_norm: str = "token_embd_norm",
) -> TinyVariant:
    """kv_heads: per block, 0 = convolution. changes: metadata keys besides or in place of the usual ones.

    sandwich: norms after each layer and gates per head, as in LFM3.
    """
    metadata: dict[str, Any] = {
        "block_count": len(kv_heads),
        "context_length": 1024,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": list(kv_heads),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "shortconv.l_cache": 7 if sandwich else 3,
        **(changes or {}),
    }
    d = metadata["embedding_length"]
    head_dim = metadata.get("attention.key_length", d // HEADS)
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, d), f"{last_norm}.weight": (d,)}
    if not tied:
        tensors["output.weight"] = (VOCAB, d)
    if rope_factors:
        tensors["rope_freqs.weight"] = (head_dim // 2,)
    for layer, kv in enumerate(kv_heads):
        block = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,), **_mixer(kv, head_dim, metadata, sandwich)}
        if sandwich:
            block |= {"post_attention_norm.weight": (d,), "post_ffw_norm.weight": (d,)}
        block |= _feed_forward(layer, metadata, router_bias)
        tensors |= {f"blk.{layer}.{tensor}": shape for tensor, shape in block.items()}
    values = {tensor: _values(tensor, shape) for tensor, shape in tensors.items()}
    optional = ("output.weight", *(["rope_freqs.weight"] if rope_factors else []), "blk.*.exp_probs_b.bias")
    return TinyVariant(name, metadata, tensors, values, optional, _defaults(metadata, head_dim))


def _defaults(metadata: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    return {
        "attention.key_length": metadata["embedding_length"] // HEADS,
        "attention.value_length": head_dim,
        "attention.causal": True,
        "attention.sliding_window_pattern": [False] * metadata["block_count"],
        "rope.dimension_count": head_dim,
        "rope.dimension_count_swa": head_dim,
        "rope.scaling.type": "none",
        "leading_dense_block_count": 0,
        "expert_gating_func": 2,
    }


def _mixer(kv_heads: int, head_dim: int, metadata: Mapping[str, Any], gated: bool) -> dict[str, tuple[int, ...]]:
    d = metadata["embedding_length"]
    if not kv_heads:
        return {
            "shortconv.in_proj.weight": (3 * d, d),
            "shortconv.conv.weight": (d, metadata["shortconv.l_cache"]),
            "shortconv.out_proj.weight": (d, d),
        }
    tensors: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (HEADS * head_dim, d),
        "attn_k.weight": (kv_heads * head_dim, d),
        "attn_v.weight": (kv_heads * head_dim, d),
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "attn_output.weight": (d, HEADS * head_dim),
    }
    return {**tensors, "attn_gate.weight": (HEADS, d)} if gated else tensors


def _feed_forward(layer: int, metadata: Mapping[str, Any], router_bias: bool) -> dict[str, tuple[int, ...]]:
    n, d, d_ffn = (metadata.get(key, 0) for key in ("expert_count", "embedding_length", "feed_forward_length"))
    if not n or layer < metadata.get("leading_dense_block_count", 0):
        return {"ffn_gate.weight": (d_ffn, d), "ffn_up.weight": (d_ffn, d), "ffn_down.weight": (d, d_ffn)}
    d_expert = metadata["expert_feed_forward_length"]
    tensors: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp.weight": (n, d),
        "ffn_gate_exps.weight": (n, d_expert, d),
        "ffn_up_exps.weight": (n, d_expert, d),
        "ffn_down_exps.weight": (n, d, d_expert),
    }
    return {**tensors, "exp_probs_b.bias": (n,)} if router_bias else tensors


def _values(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of a tensor: large enough that every term moves the logits."""
    if name.endswith("norm.weight"):
        return 1.0, 0.2
    if name == "rope_freqs.weight":
        return 4.0, 0.5
    if name.endswith("exp_probs_b.bias"):
        return 0.0, 0.3
    if name.endswith("shortconv.conv.weight"):
        return 0.2, 0.4
    if name == "token_embd.weight":
        return 0.0, 1.0
    return 0.0, 0.3 if name == "output.weight" else 1.2 * shape[-1] ** -0.5
