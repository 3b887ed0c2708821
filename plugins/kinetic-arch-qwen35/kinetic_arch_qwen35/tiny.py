"""Miniatures of every variant of the two families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces import TinyVariant

_VOCAB, _HEADS, _KV_HEADS = 100, 4, 2
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
    metadata: dict[str, Any] = {**_SIZES, "block_count": len(blocks), **(changes or _DENSE)}
    heads = 2 * per_key
    metadata |= {"ssm.group_count": 2, "ssm.time_step_rank": heads}
    metadata["ssm.inner_size"] = heads * metadata["ssm.state_size"]
    metadata = {key: value for key, value in metadata.items() if value is not None}
    metadata |= {"full_attention_interval": interval} if interval else {"attention.recurrent_layers": blocks}
    if predicts:
        metadata["nextn_predict_layers"] = 1
    d = metadata["embedding_length"]
    vocabulary = (_VOCAB, d)
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": vocabulary, "output_norm.weight": (d,)}
    if not tied:
        tensors["output.weight"] = vocabulary
    for number, is_delta in enumerate(blocks):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (d,), "post_attention_norm.weight": (d,)}
        block |= _delta_net(metadata) if is_delta else _attention(metadata)
        block |= _experts(metadata, gate_rows) if "expert_count" in metadata else _feed_forward(metadata)
        if number >= len(recurrent):
            block |= {"nextn.eh_proj.weight": (d, 2 * d)}
            block |= {f"nextn.{norm}.weight": (d,) for norm in ("enorm", "hnorm", "shared_head_norm")}
            own = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
            block |= dict.fromkeys(own, vocabulary) if own_vocabulary else {}
        tensors |= {f"blk.{number}.{tensor}": shape for tensor, shape in block.items()}
    values = {tensor: _values(tensor, shape) for tensor, shape in tensors.items()}
    return TinyVariant(name, metadata, tensors, values, _OPTIONAL_TENSORS, _defaults(metadata))


def _defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.key_length": metadata["embedding_length"] // _HEADS,
        "attention.value_length": metadata["attention.key_length"],
        "rope.scaling.type": "none",
        "nextn_predict_layers": 0,
        "expert_gating_func": 1,
    }


def _attention(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, head_dim = metadata["embedding_length"], metadata["attention.key_length"]
    return {
        "attn_q.weight": (2 * _HEADS * head_dim, d),
        "attn_k.weight": (_KV_HEADS * head_dim, d),
        "attn_v.weight": (_KV_HEADS * head_dim, d),
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "attn_output.weight": (d, _HEADS * head_dim),
    }


def _feed_forward(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, width = metadata["embedding_length"], metadata["feed_forward_length"]
    return {"ffn_gate.weight": (width, d), "ffn_up.weight": (width, d), "ffn_down.weight": (d, width)}


def _delta_net(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
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


def _experts(metadata: Mapping[str, Any], gate_rows: int | None) -> dict[str, tuple[int, ...]]:
    n, width = metadata["expert_count"], metadata["expert_feed_forward_length"]
    shared, d = metadata["expert_shared_feed_forward_length"], metadata["embedding_length"]
    return {
        "ffn_gate_inp.weight": (n, d),
        "ffn_gate_exps.weight": (n, width, d),
        "ffn_up_exps.weight": (n, width, d),
        "ffn_down_exps.weight": (n, d, width),
        "ffn_gate_inp_shexp.weight": (d,) if gate_rows is None else (gate_rows, d),
        "ffn_gate_shexp.weight": (shared, d),
        "ffn_up_shexp.weight": (shared, d),
        "ffn_down_shexp.weight": (d, shared),
    }


def _values(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of a tensor: large enough that every term moves the logits."""
    if "norm" in name:
        return 1.0, 0.2
    if name.endswith("ssm_a"):
        return -0.4, 0.1
    if name.endswith(".bias"):
        return 0.0, 0.3
    if "conv1d" in name:
        return 0.2, 0.4
    if name in ("token_embd.weight", "blk.2.nextn.embed_tokens.weight"):
        return 0.0, 1.0
    if name in ("output.weight", "blk.2.nextn.shared_head_head.weight"):
        return 0.0, 0.3
    return 0.0, shape[-1] ** -0.5
