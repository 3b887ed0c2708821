"""Miniatures of every variant of the families: hidden size 64, 4 heads of 16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces import TinyVariant

D, D_FFN, D_EXPERT, VOCAB, HEADS = 64, 96, 32, 100, 4


def lfm2_variants() -> Sequence[TinyVariant]:
    """Tied; untied with frequency factors; one number of key/value heads for all blocks; wide heads; last norm."""
    return [
        _variant("tied", (0, 2, 0)),
        _variant("untied", (0, 2), tied=False, rope_factors=True),
        _variant("attention", (2, 2), {"attention.head_count_kv": 2}),
        _variant("wide-heads", (0, 1), {"attention.key_length": 32, "attention.value_length": 32}),
        _variant("output-norm", (0, 2), last_norm="output_norm"),
    ]


def lfm2moe_variants() -> Sequence[TinyVariant]:
    """A dense block first; experts in all blocks, untied; a router without bias."""
    experts = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": D_EXPERT}
    dense = {**experts, "leading_dense_block_count": 1, "expert_gating_func": 2}
    return [
        _variant("dense-first", (0, 2, 0), dense),
        _variant("untied", (0, 2), experts, tied=False),
        _variant("no-router-bias", (0, 1), dense, router_bias=False),
    ]


def lfm3_variants() -> Sequence[TinyVariant]:
    """All kinds of blocks; without factors, untied; without sliding blocks; wide heads."""
    slides = {"attention.sliding_window": 6, "rope.freq_base_swa": 1000.0}

    def pattern(*blocks: bool) -> dict[str, Any]:
        return {**slides, "attention.sliding_window_pattern": list(blocks)}

    wide = {"attention.key_length": 32, "rope.dimension_count": 32, "rope.dimension_count_swa": 32}
    return [
        _variant("partial-rope", (0, 2, 2), pattern(False, True, False), rope_factors=True, sandwich=True),
        _variant("untied", (2, 0, 1), pattern(True, False, False), tied=False, sandwich=True),
        _variant("full", (0, 2), sandwich=True),
        _variant("wide-heads", (0, 2, 2), {**pattern(False, False, True), **wide}, sandwich=True),
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
        "embedding_length": D,
        "feed_forward_length": D_FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": list(kv_heads),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "shortconv.l_cache": 7 if sandwich else 3,
        **(changes or {}),
    }
    head_dim = metadata.get("attention.key_length", D // HEADS)
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, D), f"{last_norm}.weight": (D,)}
    if not tied:
        tensors["output.weight"] = (VOCAB, D)
    if rope_factors:
        tensors["rope_freqs.weight"] = (head_dim // 2,)
    for layer, kv in enumerate(kv_heads):
        block = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,), **_mixer(kv, head_dim, metadata, sandwich)}
        if sandwich:
            block |= {"post_attention_norm.weight": (D,), "post_ffw_norm.weight": (D,)}
        block |= _feed_forward(layer, metadata, router_bias)
        tensors |= {f"blk.{layer}.{tensor}": shape for tensor, shape in block.items()}
    return TinyVariant(name, metadata, tensors, {tensor: _values(tensor, shape) for tensor, shape in tensors.items()})


def _mixer(kv_heads: int, head_dim: int, metadata: Mapping[str, Any], gated: bool) -> dict[str, tuple[int, ...]]:
    if not kv_heads:
        return {
            "shortconv.in_proj.weight": (3 * D, D),
            "shortconv.conv.weight": (D, metadata["shortconv.l_cache"]),
            "shortconv.out_proj.weight": (D, D),
        }
    tensors: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (HEADS * head_dim, D),
        "attn_k.weight": (kv_heads * head_dim, D),
        "attn_v.weight": (kv_heads * head_dim, D),
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "attn_output.weight": (D, HEADS * head_dim),
    }
    return {**tensors, "attn_gate.weight": (HEADS, D)} if gated else tensors


def _feed_forward(layer: int, metadata: Mapping[str, Any], router_bias: bool) -> dict[str, tuple[int, ...]]:
    n = metadata.get("expert_count", 0)
    if not n or layer < metadata.get("leading_dense_block_count", 0):
        return {"ffn_gate.weight": (D_FFN, D), "ffn_up.weight": (D_FFN, D), "ffn_down.weight": (D, D_FFN)}
    tensors: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp.weight": (n, D),
        "ffn_gate_exps.weight": (n, D_EXPERT, D),
        "ffn_up_exps.weight": (n, D_EXPERT, D),
        "ffn_down_exps.weight": (n, D, D_EXPERT),
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
