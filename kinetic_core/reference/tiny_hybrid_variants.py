"""Descriptions of the miniature hybrid's variants: sizes, tensors and where their values lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces.architecture import TinyVariant

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
    metadata = {**_SIZES, "layer_types": list(layer_types), "vocab_size": vocab, **(changes or {})}
    n_predicted = metadata.get("nextn_predict_layers", 0)
    metadata["block_count"] = len(layer_types) + n_predicted
    d = metadata["embedding_length"]
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, d), "output_norm.weight": (d,)}
    if not tied:
        tensors["output.weight"] = (vocab, d)
    if rope_factors:
        tensors["rope_freqs.weight"] = (metadata["rope.dimension_count"] // 2,)
    mixers = {"attention": _attention, "window": _attention, "conv": _conv, "delta": _delta, "mamba": _mamba}
    for layer, kind in enumerate([*layer_types, *["attention"] * n_predicted]):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,)}
        block |= {**mixers[kind](metadata), **_feed_forward(metadata)}
        if layer >= len(layer_types):
            block |= {f"nextn.{norm}.weight": (d,) for norm in ("enorm", "hnorm", "shared_head_norm")}
            block["nextn.eh_proj.weight"] = (d, 2 * d)
        tensors |= {f"blk.{layer}.{tensor}": shape for tensor, shape in block.items()}
    values = {tensor: _values(tensor, shape) for tensor, shape in tensors.items()}
    values["rope_freqs.weight"] = (3.0, 0.5)
    return TinyVariant(name, metadata, tensors, values, _OPTIONAL, _DEFAULTS)


def _attention(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads, head_dim = (metadata[key] for key in ("embedding_length", "attention.head_count", "attention.key_length"))
    width, kv_width = heads * head_dim, metadata["attention.head_count_kv"] * head_dim
    return {
        "attn_q.weight": (width, d),
        "attn_q.bias": (width,),
        "attn_k.weight": (kv_width, d),
        "attn_v.weight": (kv_width, d),
        "attn_gate.weight": (heads, d),
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "attn_output.weight": (d, width),
    }


def _conv(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d = metadata["embedding_length"]
    return {
        "shortconv.in_proj.weight": (3 * d, d),
        "shortconv.conv.weight": (d, metadata["ssm.conv_kernel"]),
        "shortconv.out_proj.weight": (d, d),
    }


def _delta(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads, value_dim = (metadata[key] for key in ("embedding_length", "ssm.time_step_rank", "ssm.value_size"))
    inner = heads * value_dim
    channels = inner + 2 * metadata["ssm.group_count"] * metadata["ssm.state_size"]
    return {
        "attn_qkv.weight": (channels, d),
        "attn_gate.weight": (inner, d),
        "ssm_alpha.weight": (heads, d),
        "ssm_beta.weight": (heads, d),
        "ssm_conv1d.weight": (channels, metadata["ssm.conv_kernel"]),
        "ssm_conv1d.bias": (channels,),
        "ssm_a": (heads,),
        "ssm_dt.bias": (heads,),
        "ssm_norm.weight": (value_dim,),
        "ssm_out.weight": (d, inner),
    }


def _mamba(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads, groups = metadata["embedding_length"], metadata["ssm.time_step_rank"], metadata.get("ssm.scan_groups", 1)
    inner = heads * metadata["ssm.value_size"]
    channels = inner + 2 * groups * metadata["ssm.state_size"]
    return {
        "ssm_in.weight": (inner + channels + heads, d),
        "ssm_conv1d.weight": (channels, metadata["ssm.conv_kernel"]),
        "ssm_conv1d.bias": (channels,),
        "ssm_a": (heads,),
        "ssm_d": (heads,),
        "ssm_dt.bias": (heads,),
        "ssm_norm.weight": (groups, inner // groups),
        "ssm_out.weight": (d, inner),
    }


def _feed_forward(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, width, n_experts = metadata["embedding_length"], metadata["feed_forward_length"], metadata.get("expert_count", 0)
    shapes = {"ffn_gate": (width, d), "ffn_up": (width, d), "ffn_down": (d, width)}
    if not n_experts:
        return {f"{name}.weight": shape for name, shape in shapes.items()}
    tensors: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (n_experts, d)}
    if metadata.get("expert_gating_func") == 2:
        tensors["exp_probs_b.bias"] = (n_experts,)
    for name, shape in shapes.items():
        tensors |= {f"{name}_exps.weight": (n_experts, *shape), f"{name}_shexp.weight": shape}
    return tensors


def _values(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of a tensor: large enough that every term moves the logits."""
    if "norm" in name:
        return 1.0, 0.2
    if "ffn_gate_inp" in name or name.endswith("ssm_d"):
        return 0.0, 0.5
    if name.endswith("ssm_a"):
        return -0.4, 0.1
    if name.endswith(".bias"):
        return 0.0, 0.3
    if "conv.weight" in name or "conv1d" in name:
        return 0.2, 0.4
    if name in ("token_embd.weight", "output.weight"):
        return 0.0, 1.0
    return 0.0, 1.2 * shape[-1] ** -0.5
