"""Miniatures of every variant of the family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces import TinyVariant

_VOCAB, _HEADS = 100, 4
_SIZES: Mapping[str, Any] = {
    "context_length": 1024,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": _HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.scale": 0.35,
    "embedding_scale": 1.5,
    "residual_scale": 0.5,
    "logit_scale": 4.0,
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
}
_EXPERTS = {"feed_forward_length": 32, "expert_count": 6, "expert_used_count": 2}
_WIDE = {"embedding_length": 256, "feed_forward_length": 256, "ssm.inner_size": 512}
_MULTIPLIERS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")

_BIASED = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "ssm_in", "ssm_conv1d", "ssm_out"),
    *("ffn_gate", "ffn_up", "ffn_down"),
)
_OPTIONAL_TENSORS = ("output.weight", "blk.*.ssm_norm.weight", *(f"blk.*.{name}.bias" for name in _BIASED))


def tiny_variants() -> Sequence[TinyVariant]:
    """Dense; untied, biased, with rope; experts with and without a shared one; Mamba-2 alone; attention alone; bare;
    rows wide enough for K-quants, dense and with experts."""
    return [
        _variant("dense", [0, 2], {"expert_count": 0, "expert_used_count": 0, "expert_shared_feed_forward_length": 96}),
        _variant("untied-biased", [0, 4], {"rope.scaling.finetuned": True}, tied=False, biased=True),
        _variant("experts", [0, 2], {**_EXPERTS, "expert_shared_feed_forward_length": 48}),
        _variant("experts-alone", [2, 0], _EXPERTS),
        _variant("mamba", 0, {"ssm.group_count": None}),
        _variant(
            "attention", 2, {"rope.scaling.finetuned": True, "rope.freq_base": 5000.0, "rope.dimension_count": 12}
        ),
        _variant("defaults", [0, 2], dict.fromkeys((*_MULTIPLIERS, "rope.scaling.finetuned")), bare=True),
        _variant("wide", [0, 2], _WIDE, tied=False),
        _variant("wide-experts", [2], {**_EXPERTS, **_WIDE, "expert_shared_feed_forward_length": 256}),
    ]


def _variant(
    name: str,
    kv_heads: int | list[int],
    changes: Mapping[str, Any] | None = None,
    *,
    tied: bool = True,
    biased: bool = False,
    bare: bool = False,
) -> TinyVariant:
    """kv_heads: the key's value, one for two blocks or per block. changes: keys in place of the usual, None leaves one
    out. biased: biases on all projections. bare: neither a gated norm nor a bias of the convolution."""
    per_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * 2
    metadata = {**_SIZES, "block_count": len(per_layer), "attention.head_count_kv": kv_heads, **(changes or {})}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    d = metadata["embedding_length"]
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (_VOCAB, d), "output_norm.weight": (d,)}
    if not tied:
        tensors["output.weight"] = (_VOCAB, d)
    for layer, heads in enumerate(per_layer):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,)}
        matrices = _attention(d, heads) if heads else _mamba2(metadata)
        matrices |= _feed_forward(metadata)
        block |= {f"{matrix}.weight": shape for matrix, shape in matrices.items()}
        if biased:
            block |= {f"{matrix}.bias": shape[:1] for matrix, shape in matrices.items()}
        if not heads:
            block |= dict.fromkeys(("ssm_a", "ssm_d", "ssm_dt.bias"), (metadata["ssm.time_step_rank"],))
            block |= _convolution(metadata)
            if bare:
                del block["ssm_norm.weight"], block["ssm_conv1d.bias"]
        tensors |= {f"blk.{layer}.{tensor}": shape for tensor, shape in block.items()}
    values = {tensor: _values(tensor, shape) for tensor, shape in tensors.items()}
    return TinyVariant(name, metadata, tensors, values, _OPTIONAL_TENSORS, _defaults(metadata))


def _defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = metadata["embedding_length"] // _HEADS
    return {
        **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), 1.0),
        "attention.head_count_kv": _HEADS,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.scale": head_dim**-0.5,
        "rope.scaling.finetuned": True,
        "rope.scaling.type": "none",
        "rope.dimension_count": head_dim,
        "rope.freq_base": 10000.0,
        "ssm.group_count": 1,
        "expert_count": 0,
        "expert_gating_func": 1,
        "expert_shared_feed_forward_length": 0,
    }


def _attention(d: int, kv_heads: int) -> dict[str, tuple[int, ...]]:
    kv_width = kv_heads * d // _HEADS
    return {"attn_q": (d, d), "attn_k": (kv_width, d), "attn_v": (kv_width, d), "attn_output": (d, d)}


def _groups(metadata: Mapping[str, Any]) -> int:
    return int(metadata.get("ssm.group_count", 1))


def _channels(metadata: Mapping[str, Any]) -> int:
    return int(metadata["ssm.inner_size"] + 2 * _groups(metadata) * metadata["ssm.state_size"])


def _mamba2(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, inner = metadata["embedding_length"], metadata["ssm.inner_size"]
    return {"ssm_in": (inner + _channels(metadata) + metadata["ssm.time_step_rank"], d), "ssm_out": (d, inner)}


def _convolution(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    groups, channels = _groups(metadata), _channels(metadata)
    return {
        "ssm_conv1d.weight": (channels, metadata["ssm.conv_kernel"]),
        "ssm_conv1d.bias": (channels,),
        "ssm_norm.weight": (groups, metadata["ssm.inner_size"] // groups),
    }


def _feed_forward(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, n, width = metadata["embedding_length"], metadata.get("expert_count", 0), metadata["feed_forward_length"]
    if not n:
        return {"ffn_gate": (width, d), "ffn_up": (width, d), "ffn_down": (d, width)}
    shared = metadata.get("expert_shared_feed_forward_length", 0)
    matrices: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp": (n, d),
        "ffn_gate_exps": (n, width, d),
        "ffn_up_exps": (n, width, d),
        "ffn_down_exps": (n, d, width),
    }
    if shared:
        matrices |= {"ffn_gate_shexp": (shared, d), "ffn_up_shexp": (shared, d), "ffn_down_shexp": (d, shared)}
    return matrices


def _values(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of a tensor: large enough that every term moves the logits."""
    if "norm" in name:
        return 1.0, 0.2
    if name.endswith("ssm_a"):
        return -0.4, 0.1
    if name.endswith("ssm_d"):
        return 0.5, 0.5
    if name.endswith(".bias"):
        return 0.0, 0.3
    if "conv1d" in name:
        return 0.2, 0.4
    if name == "token_embd.weight":
        return 0.0, 1.0
    if name == "output.weight":
        return 0.0, 0.3
    return 0.0, 1.2 * shape[-1] ** -0.5
