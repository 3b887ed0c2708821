"""Miniatures of every variant of the two families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces import TinyVariant
from kinetic_core.layers import attention_matrices, expert_matrices, feed_forward_matrices, layer_tensors, tiny_decoder

_VOCAB, _HEADS, _KV_HEADS = 100, 4, 2
Shapes = dict[str, tuple[int, ...]]
_SIZES: Mapping[str, Any] = {
    "context_length": 1024,
    "embedding_length": 64,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _KV_HEADS,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "rope.freq_base": 10000.0,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
}
_DENSE = {"feed_forward_length": 96}
_EXPERTS = {
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 48,
}
_WIDE = {"embedding_length": 256, "attention.key_length": 64, "attention.value_length": 64, "ssm.state_size": 64}
_OPTIONAL_TENSORS = ("output.weight", "blk.*.nextn.embed_tokens.weight", "blk.*.nextn.shared_head_head.weight")


def dense_variants() -> Sequence[TinyVariant]:
    """Tied and untied, 3 value heads per key head, order by interval, a prediction block without and with its own;
    rows wide enough for K-quants."""
    return [
        _variant("tied", [True, False]),
        _variant("untied", [True, True, False], tied=False),
        _variant("value-heads", [True, False], {**_DENSE, "attention.value_length": None}, per_key=3),
        _variant("interval", [True, False, True, False], interval=2),
        _variant("prediction", [True, False], predicts=True),
        _variant("prediction-own", [True, False], predicts=True, own_vocabulary=True, tied=False, interval=2),
        _variant("wide", [True], {**_WIDE, "feed_forward_length": 256}, predicts=True, tied=False),
    ]


def expert_variants() -> Sequence[TinyVariant]:
    """Experts, and experts with a prediction block; the shared expert's gate is a matrix of one row, or a vector; rows
    wide enough for K-quants."""
    wide = {**_EXPERTS, **_WIDE, "expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 256}
    return [
        _variant(
            "experts", [True, False], {**_EXPERTS, "expert_used_count": 3, "attention.value_length": None}, tied=False
        ),
        _variant("experts-prediction", [True, False], _EXPERTS, predicts=True, gate_rows=None),
        _variant("wide", [True, False], wide),
    ]


def _variant(
    name: str,
    recurrent: list[bool],
    changes: Mapping[str, Any] | None = None,
    *,
    tied: bool = True,
    per_key: int = 2,
    interval: int = 0,
    predicts: bool = False,
    own_vocabulary: bool = False,
    gate_rows: int | None = 1,
) -> TinyVariant:
    """changes: metadata keys, None leaves one out. recurrent: which trunk blocks are delta nets; interval: the key that
    says so instead. per_key: value heads per key head. own_vocabulary: embeddings and output layer of the prediction
    block. gate_rows: of the shared expert's gate, None for a vector."""
    blocks = [*recurrent, *[False] * predicts]
    metadata: dict[str, Any] = {**_SIZES, **(changes or _DENSE)}
    heads = 2 * per_key
    metadata |= {"ssm.group_count": 2, "ssm.time_step_rank": heads}
    metadata["ssm.inner_size"] = heads * metadata["ssm.state_size"]
    metadata = {key: value for key, value in metadata.items() if value is not None}
    metadata |= {"full_attention_interval": interval} if interval else {"attention.recurrent_layers": blocks}
    if predicts:
        metadata["nextn_predict_layers"] = 1
    d, described = metadata["embedding_length"], []
    for number, is_delta in enumerate(blocks):
        block: Shapes = {"attn_norm.weight": (d,), "post_attention_norm.weight": (d,)}
        block |= _delta_net(metadata) if is_delta else _attention(metadata)
        if "expert_count" in metadata:
            block |= _experts(metadata, gate_rows)
        else:
            block |= layer_tensors(feed_forward_matrices(d, metadata["feed_forward_length"]))
        if number >= len(recurrent):
            block |= {"nextn.eh_proj.weight": (d, 2 * d)}
            block |= {f"nextn.{norm}.weight": (d,) for norm in ("enorm", "hnorm", "shared_head_norm")}
            own = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
            block |= dict.fromkeys(own, (_VOCAB, d)) if own_vocabulary else {}
        described.append(block)
    defaults = _defaults(metadata)
    return tiny_decoder(
        name, metadata, described, vocab=_VOCAB, tied=tied, gain=1.0, optional=_OPTIONAL_TENSORS, defaults=defaults
    )


def _defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.key_length": metadata["embedding_length"] // _HEADS,
        "attention.value_length": metadata["attention.key_length"],
        "rope.scaling.type": "none",
        "nextn_predict_layers": 0,
        "expert_gating_func": 1,
    }


def _attention(metadata: Mapping[str, Any]) -> Shapes:
    """The rows of queries hold a gate as well."""
    d, head_dim = metadata["embedding_length"], metadata["attention.key_length"]
    matrices = attention_matrices(d, _HEADS, _KV_HEADS, head_dim) | {"attn_q": (2 * _HEADS * head_dim, d)}
    return {**layer_tensors(matrices), "attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}


def _delta_net(metadata: Mapping[str, Any]) -> Shapes:
    heads, values = metadata["ssm.time_step_rank"], metadata["ssm.inner_size"]
    d = metadata["embedding_length"]
    channels = 2 * metadata["ssm.group_count"] * metadata["ssm.state_size"] + values
    return {
        "attn_qkv.weight": (channels, d),
        "attn_gate.weight": (values, d),
        "ssm_alpha.weight": (heads, d),
        "ssm_beta.weight": (heads, d),
        "ssm_conv1d.weight": (channels, metadata["ssm.conv_kernel"]),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
        "ssm_norm.weight": (metadata["ssm.state_size"],),
        "ssm_out.weight": (d, values),
    }


def _experts(metadata: Mapping[str, Any], gate_rows: int | None) -> Shapes:
    d = metadata["embedding_length"]
    matrices = expert_matrices(d, metadata["expert_count"], metadata["expert_feed_forward_length"])
    matrices |= feed_forward_matrices(d, metadata["expert_shared_feed_forward_length"], "_shexp")
    gate = (d,) if gate_rows is None else (gate_rows, d)
    return {**layer_tensors(matrices), "ffn_gate_inp_shexp.weight": gate}
