"""Miniatures of every variant of the family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces import TinyVariant

_VOCAB, _HEADS = 100, 4
_SIZES: Mapping[str, Any] = {
    "block_count": 2,
    "context_length": 1024,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e11,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 96,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 6,
    "ssm.group_count": 2,
}
_WIDE: Mapping[str, Any] = {
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "ssm.inner_size": 256,
    "ssm.time_step_rank": 8,
}
_OPTIONAL = ("attention.key_length", "attention.value_length", "rope.freq_base", "ssm.group_count")
_BIASED = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "ssm_in", "ssm_conv1d", "ssm_out"),
    *("ffn_gate", "ffn_up", "ffn_down"),
)
_OPTIONAL_TENSORS = ("output.weight", "blk.*.ssm_norm.weight", *(f"blk.*.{name}.bias" for name in _BIASED))


def tiny_variants() -> Sequence[TinyVariant]:
    """As published, with and without the gated norm; tied and biased, named as elsewhere; bare, without options;
    rows wide enough for K-quants."""
    return [
        _variant("norm"),
        _variant("no-norm", {"ssm.group_count": 1}, gated_norm=False),
        _variant(
            "tied-biased", {"attention.head_count_kv": [1, 4]}, tied=True, biased=True, ffn_norm="ffn_norm.weight"
        ),
        _variant("defaults", dict.fromkeys(_OPTIONAL), bare=True),
        _variant("wide", _WIDE),
    ]


def _variant(
    name: str,
    changes: Mapping[str, Any] | None = None,
    *,
    tied: bool = False,
    biased: bool = False,
    bare: bool = False,
    gated_norm: bool = True,
    ffn_norm: str = "ffn_norm",
) -> TinyVariant:
    """Two blocks. changes: keys in place of the usual, None leaves one out. biased: biases on all projections.
    bare: no bias of the convolution either."""
    metadata = {key: value for key, value in {**_SIZES, **(changes or {})}.items() if value is not None}
    d, d_ffn, kv_heads = (
        metadata[key] for key in ("embedding_length", "feed_forward_length", "attention.head_count_kv")
    )
    inner, ssm_heads = metadata["ssm.inner_size"], metadata["ssm.time_step_rank"]
    groups = metadata.get("ssm.group_count", 1)
    channels = inner + 2 * groups * metadata["ssm.state_size"]
    head_dim = metadata.get("attention.key_length", d // _HEADS)
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (_VOCAB, d), "output_norm.weight": (d,)}
    if not tied:
        tensors["output.weight"] = (_VOCAB, d)
    for layer in range(2):
        kv_width = (kv_heads[layer] if isinstance(kv_heads, list) else kv_heads) * head_dim
        matrices: dict[str, tuple[int, ...]] = {
            "attn_q": (_HEADS * head_dim, d),
            "attn_k": (kv_width, d),
            "attn_v": (kv_width, d),
            "attn_output": (d, _HEADS * head_dim),
            "ssm_in": (inner + channels + ssm_heads, d),
            "ssm_out": (d, inner),
            "ffn_gate": (d_ffn, d),
            "ffn_up": (d_ffn, d),
            "ffn_down": (d, d_ffn),
        }
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (d,), ffn_norm: (d,)}
        block |= {f"{matrix}.weight": shape for matrix, shape in matrices.items()}
        if biased:
            block |= {f"{matrix}.bias": shape[:1] for matrix, shape in matrices.items()}
        block |= dict.fromkeys(("ssm_a", "ssm_d", "ssm_dt.bias"), (ssm_heads,))
        block["ssm_conv1d.weight"] = (channels, metadata["ssm.conv_kernel"])
        if not bare:
            block["ssm_conv1d.bias"] = (channels,)
        if gated_norm:
            block["ssm_norm.weight"] = (groups, inner // groups)
        tensors |= {f"blk.{layer}.{tensor}": shape for tensor, shape in block.items()}
    defaults = {
        "attention.head_count_kv": _HEADS,
        "attention.key_length": d // _HEADS,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "none",
        "ssm.group_count": 1,
        "expert_count": 0,
    }
    values = {tensor: _values(tensor, shape) for tensor, shape in tensors.items()}
    return TinyVariant(name, metadata, tensors, values, _OPTIONAL_TENSORS, defaults)


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
