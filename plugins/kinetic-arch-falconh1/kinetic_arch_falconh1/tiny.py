"""Miniatures of every variant of the family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.gguf import Metadata
from kinetic_core.interfaces import TinyVariant
from kinetic_core.layers import Mamba2, attention_matrices, feed_forward_matrices, layer_tensors, tiny_decoder

_HEADS = 4
_SIZES: Mapping[str, Any] = {
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
    head_dim, mamba2 = metadata.get("attention.key_length", d // _HEADS), Mamba2.read(Metadata(metadata))
    others = {"attn_norm.weight": (d,), ffn_norm: (d,), **mamba2.tensors()}
    if bare:
        del others["ssm_conv1d.bias"]
    if not gated_norm:
        del others["ssm_norm.weight"]
    blocks = []
    for heads in kv_heads if isinstance(kv_heads, list) else [kv_heads] * 2:
        matrices = attention_matrices(d, _HEADS, heads, head_dim) | feed_forward_matrices(d, d_ffn)
        blocks.append({**others, **layer_tensors(matrices | mamba2.matrices(d), biased=biased)})
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
    return tiny_decoder(name, metadata, blocks, tied=tied, optional=_OPTIONAL_TENSORS, defaults=defaults)
