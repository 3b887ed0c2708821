"""Miniatures of every variant of the family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.gguf import Metadata
from kinetic_core.interfaces import TinyVariant
from kinetic_core.layers import (
    Mamba2,
    attention_matrices,
    expert_matrices,
    feed_forward_matrices,
    layer_tensors,
    tiny_decoder,
)

_HEADS = 4
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
    metadata = {**_SIZES, "attention.head_count_kv": kv_heads, **(changes or {})}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    d, mamba2 = metadata["embedding_length"], Mamba2.read(Metadata(metadata))
    others = mamba2.tensors()
    if bare:
        del others["ssm_norm.weight"], others["ssm_conv1d.bias"]
    blocks = []
    for heads in kv_heads if isinstance(kv_heads, list) else [kv_heads] * 2:
        matrices = attention_matrices(d, _HEADS, heads, d // _HEADS) if heads else mamba2.matrices(d)
        block = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,), **({} if heads else others)}
        blocks.append({**block, **layer_tensors(matrices | _feed_forward(metadata), biased=biased)})
    defaults = _defaults(metadata)
    return tiny_decoder(name, metadata, blocks, tied=tied, optional=_OPTIONAL_TENSORS, defaults=defaults)


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


def _feed_forward(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, n, width = metadata["embedding_length"], metadata.get("expert_count", 0), metadata["feed_forward_length"]
    if not n:
        return feed_forward_matrices(d, width)
    shared = metadata.get("expert_shared_feed_forward_length", 0)
    return expert_matrices(d, n, width) | (feed_forward_matrices(d, shared, "_shexp") if shared else {})
