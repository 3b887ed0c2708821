"""Descriptions of the miniature hybrid's variants: sizes, tensors and where their values lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces.architecture import TinyVariant
from kinetic_core.layers import (
    Mamba2,
    attention_matrices,
    expert_matrices,
    feed_forward_matrices,
    layer_tensors,
    tiny_decoder,
)

Shapes = dict[str, tuple[int, ...]]

_SIZES: Mapping[str, Any] = {
    "context_length": 2048,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.sliding_window": 24,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 16,
    "rope.freq_base": 10000.0,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.state_size": 16,
    "ssm.value_size": 32,
    "embedding_scale": 1.5,
    "residual_scale": 0.5,
    "logit_scale": 0.125,
}
EXPERTS: Mapping[str, Any] = {"expert_count": 6, "expert_used_count": 2}
WIDE: Mapping[str, Any] = {
    "embedding_length": 256,
    "feed_forward_length": 256,
    "attention.key_length": 64,
    "ssm.value_size": 64,
}
_DEFAULTS: Mapping[str, Any] = {
    "nextn_predict_layers": 0,
    "ssm.scan_groups": 1,
    "expert_count": 0,
    "expert_used_count": 1,
    "expert_gating_func": 1,
}
_OPTIONAL = ("output.weight", "rope_freqs.weight")


def tiny_variant(
    name: str,
    layer_types: Sequence[str],
    vocab: int,
    *,
    tied: bool = False,
    rope_factors: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> TinyVariant:
    """changes: metadata keys in place of the usual ones."""
    metadata = {**_SIZES, "layer_types": list(layer_types), **(changes or {})}
    d, n_predicted = metadata["embedding_length"], metadata.get("nextn_predict_layers", 0)
    mixers = {"attention": _attention, "window": _attention, "conv": _conv, "delta": _delta, "mamba": _mamba}
    blocks = []
    for layer, kind in enumerate([*layer_types, *["attention"] * n_predicted]):
        block: Shapes = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,)}
        block |= {**mixers[kind](metadata), **_feed_forward(metadata)}
        if layer >= len(layer_types):
            block |= {f"nextn.{norm}.weight": (d,) for norm in ("enorm", "hnorm", "shared_head_norm")}
            block["nextn.eh_proj.weight"] = (d, 2 * d)
        blocks.append(block)
    outside: Shapes = {"output_norm.weight": (d,)}
    if rope_factors:
        outside["rope_freqs.weight"] = (metadata["rope.dimension_count"] // 2,)
    values = {"output.weight": (0.0, 1.0), "rope_freqs.weight": (3.0, 0.5)}
    values |= {f"blk.{n}.{name}": (0.0, 0.5) for n in range(len(blocks)) for name in ("ssm_d", "ffn_gate_inp.weight")}
    mamba = [n for n, kind in enumerate(layer_types) if kind == "mamba"]
    may_lack = [f"blk.{n}.{name}" for n in mamba for name in ("ssm_conv1d.bias", "ssm_norm.weight")]
    return tiny_decoder(
        name,
        metadata,
        blocks,
        vocab=vocab,
        tied=tied,
        outside=outside,
        values=values,
        optional=(*_OPTIONAL, *may_lack),
        defaults=_DEFAULTS,
    )


def _attention(metadata: Mapping[str, Any]) -> Shapes:
    d, heads, head_dim = (metadata[key] for key in ("embedding_length", "attention.head_count", "attention.key_length"))
    matrices = attention_matrices(d, heads, metadata["attention.head_count_kv"], head_dim) | {"attn_gate": (heads, d)}
    others: Shapes = {"attn_q.bias": (heads * head_dim,), "attn_q_norm.weight": (head_dim,)}
    return {**layer_tensors(matrices), **others, "attn_k_norm.weight": (head_dim,)}


def _conv(metadata: Mapping[str, Any]) -> Shapes:
    d = metadata["embedding_length"]
    matrices: Shapes = {"shortconv.in_proj": (3 * d, d), "shortconv.out_proj": (d, d)}
    return {**layer_tensors(matrices), "shortconv.conv.weight": (d, metadata["ssm.conv_kernel"])}


def _delta(metadata: Mapping[str, Any]) -> Shapes:
    d, heads, value_dim = (metadata[key] for key in ("embedding_length", "ssm.time_step_rank", "ssm.value_size"))
    inner = heads * value_dim
    channels = inner + 2 * metadata["ssm.group_count"] * metadata["ssm.state_size"]
    matrices = {
        "attn_qkv": (channels, d),
        "attn_gate": (inner, d),
        "ssm_alpha": (heads, d),
        "ssm_beta": (heads, d),
        "ssm_out": (d, inner),
    }
    return {
        **layer_tensors(matrices),
        "ssm_conv1d.weight": (channels, metadata["ssm.conv_kernel"]),
        "ssm_conv1d.bias": (channels,),
        "ssm_a": (heads,),
        "ssm_dt.bias": (heads,),
        "ssm_norm.weight": (value_dim,),
    }


def _mamba(metadata: Mapping[str, Any]) -> Shapes:
    heads = metadata["ssm.time_step_rank"]
    mixer = Mamba2(
        d_inner=heads * metadata["ssm.value_size"],
        d_state=metadata["ssm.state_size"],
        heads=heads,
        groups=metadata.get("ssm.scan_groups", 1),
        taps=metadata["ssm.conv_kernel"],
    )
    return {**layer_tensors(mixer.matrices(metadata["embedding_length"])), **mixer.tensors()}


def _feed_forward(metadata: Mapping[str, Any]) -> Shapes:
    d, width, n_experts = metadata["embedding_length"], metadata["feed_forward_length"], metadata.get("expert_count", 0)
    if not n_experts:
        return layer_tensors(feed_forward_matrices(d, width))
    tensors = layer_tensors(expert_matrices(d, n_experts, width) | feed_forward_matrices(d, width, "_shexp"))
    return {**tensors, "exp_probs_b.bias": (n_experts,)} if metadata.get("expert_gating_func") == 2 else tensors
