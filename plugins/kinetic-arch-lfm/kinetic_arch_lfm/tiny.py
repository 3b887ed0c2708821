"""Miniatures of every variant of the families: hidden size 64, 4 heads of 16; wider ones for K-quants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces import TinyVariant
from kinetic_core.layers import attention_matrices, expert_matrices, feed_forward_matrices, layer_tensors, tiny_decoder

D_EXPERT, HEADS = 32, 4
Shapes = dict[str, tuple[int, ...]]
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
    outside: Shapes = {f"{last_norm}.weight": (d,)}
    if rope_factors:
        outside["rope_freqs.weight"] = (head_dim // 2,)
    blocks = []
    for layer, kv in enumerate(kv_heads):
        block = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,), **_feed_forward(layer, metadata, router_bias)}
        block |= _attention(d, kv, head_dim, sandwich) if kv else _convolution(d, metadata["shortconv.l_cache"])
        if sandwich:
            block |= {"post_attention_norm.weight": (d,), "post_ffw_norm.weight": (d,)}
        blocks.append(block)
    optional = ("output.weight", *(["rope_freqs.weight"] if rope_factors else []), "blk.*.exp_probs_b.bias")
    defaults = _defaults(metadata, head_dim, len(kv_heads))
    return tiny_decoder(name, metadata, blocks, tied=tied, outside=outside, optional=optional, defaults=defaults)


def _defaults(metadata: Mapping[str, Any], head_dim: int, n_blocks: int) -> dict[str, Any]:
    return {
        "attention.key_length": metadata["embedding_length"] // HEADS,
        "attention.value_length": head_dim,
        "attention.causal": True,
        "attention.sliding_window_pattern": [False] * n_blocks,
        "rope.dimension_count": head_dim,
        "rope.dimension_count_swa": head_dim,
        "rope.scaling.type": "none",
        "leading_dense_block_count": 0,
        "expert_gating_func": 2,
    }


def _convolution(d: int, taps: int) -> Shapes:
    matrices: Shapes = {"shortconv.in_proj": (3 * d, d), "shortconv.out_proj": (d, d)}
    return {**layer_tensors(matrices), "shortconv.conv.weight": (d, taps)}


def _attention(d: int, kv_heads: int, head_dim: int, gated: bool) -> Shapes:
    matrices = attention_matrices(d, HEADS, kv_heads, head_dim)
    if gated:
        matrices["attn_gate"] = (HEADS, d)
    return {**layer_tensors(matrices), "attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}


def _feed_forward(layer: int, metadata: Mapping[str, Any], router_bias: bool) -> Shapes:
    n, d, d_ffn = (metadata.get(key, 0) for key in ("expert_count", "embedding_length", "feed_forward_length"))
    if not n or layer < metadata.get("leading_dense_block_count", 0):
        return layer_tensors(feed_forward_matrices(d, d_ffn))
    tensors = layer_tensors(expert_matrices(d, n, metadata["expert_feed_forward_length"]))
    return {**tensors, "exp_probs_b.bias": (n,)} if router_bias else tensors
