"""Miniatures of every variant of the two families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces import TinyVariant

_D, _VOCAB, _HEADS, _KV_HEADS, _HEAD_DIM, _FFN = 64, 100, 4, 2, 32, 96
_SIZES: Mapping[str, Any] = {
    "context_length": 1024,
    "embedding_length": _D,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _KV_HEADS,
    "attention.key_length": _HEAD_DIM,
    "attention.value_length": _HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "rope.freq_base": 10000.0,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
}
_DENSE = {"feed_forward_length": _FFN}
_EXPERTS = {
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 48,
}
_THREE_USED = {"expert_used_count": 3}


def dense_variants() -> Sequence[TinyVariant]:
    """Tied and untied, 3 value heads per key head, order by interval, a prediction block without and with its own."""
    return [
        _variant("tied", [True, False]),
        _variant("untied", [True, True, False], tied=False),
        _variant("value-heads", [True, False], {**_DENSE, "attention.value_length": None}, per_key=3),
        _variant("interval", [True, False, True, False], interval=2),
        _variant("prediction", [True, False], predicts=True),
        _variant("prediction-own", [True, False], predicts=True, own_vocabulary=True, tied=False, interval=2),
    ]


def expert_variants() -> Sequence[TinyVariant]:
    """Experts, and experts with a prediction block; the shared expert's gate is a matrix of one row, or a vector."""
    return [
        _variant(
            "experts", [True, False], {**_EXPERTS, "expert_used_count": 3, "attention.value_length": None}, tied=False
        ),
        _variant("experts-prediction", [True, False], _EXPERTS, predicts=True, gate_shape=(_D,)),
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
    gate_shape: tuple[int, ...] = (1, _D),
) -> TinyVariant:
    """changes: metadata keys, None leaves one out. recurrent: which trunk blocks are delta nets; interval: the key that
    says so instead. per_key: value heads per key head. own_vocabulary: embeddings and output layer of the prediction
    block. gate_shape: the shared expert's."""
    blocks = [*recurrent, *[False] * predicts]
    delta = {"ssm.group_count": 2, "ssm.time_step_rank": 2 * per_key, "ssm.inner_size": 2 * per_key * 16}
    metadata: dict[str, Any] = {
        **_SIZES,
        **delta,
        "block_count": len(blocks),
        **(changes or _DENSE),
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    metadata |= {"full_attention_interval": interval} if interval else {"attention.recurrent_layers": blocks}
    if predicts:
        metadata["nextn_predict_layers"] = 1
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (_VOCAB, _D), "output_norm.weight": (_D,)}
    if not tied:
        tensors["output.weight"] = (_VOCAB, _D)
    for number, is_delta in enumerate(blocks):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (_D,), "post_attention_norm.weight": (_D,)}
        block |= _delta_net(metadata) if is_delta else _ATTENTION
        block |= _experts(metadata, gate_shape) if "expert_count" in metadata else _FEED_FORWARD
        if number >= len(recurrent):
            block |= {**_PREDICTION, **(_VOCABULARY if own_vocabulary else {})}
        tensors |= {f"blk.{number}.{tensor}": shape for tensor, shape in block.items()}
    return TinyVariant(name, metadata, tensors, {tensor: _values(tensor, shape) for tensor, shape in tensors.items()})


_ATTENTION: Mapping[str, tuple[int, ...]] = {
    "attn_q.weight": (2 * _HEADS * _HEAD_DIM, _D),
    "attn_k.weight": (_KV_HEADS * _HEAD_DIM, _D),
    "attn_v.weight": (_KV_HEADS * _HEAD_DIM, _D),
    "attn_q_norm.weight": (_HEAD_DIM,),
    "attn_k_norm.weight": (_HEAD_DIM,),
    "attn_output.weight": (_D, _HEADS * _HEAD_DIM),
}
_FEED_FORWARD: Mapping[str, tuple[int, ...]] = {
    "ffn_gate.weight": (_FFN, _D),
    "ffn_up.weight": (_FFN, _D),
    "ffn_down.weight": (_D, _FFN),
}
_PREDICTION: Mapping[str, tuple[int, ...]] = {
    "nextn.eh_proj.weight": (_D, 2 * _D),
    "nextn.enorm.weight": (_D,),
    "nextn.hnorm.weight": (_D,),
    "nextn.shared_head_norm.weight": (_D,),
}
_VOCABULARY: Mapping[str, tuple[int, ...]] = {
    "nextn.embed_tokens.weight": (_VOCAB, _D),
    "nextn.shared_head_head.weight": (_VOCAB, _D),
}


def _delta_net(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, values = metadata["ssm.time_step_rank"], metadata["ssm.inner_size"]
    channels = 2 * metadata["ssm.group_count"] * metadata["ssm.state_size"] + values
    return {
        "attn_qkv.weight": (channels, _D),
        "attn_gate.weight": (values, _D),
        "ssm_alpha.weight": (heads, _D),
        "ssm_beta.weight": (heads, _D),
        "ssm_conv1d.weight": (channels, metadata["ssm.conv_kernel"]),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
        "ssm_norm.weight": (metadata["ssm.state_size"],),
        "ssm_out.weight": (_D, values),
    }


def _experts(metadata: Mapping[str, Any], gate_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    n, width = metadata["expert_count"], metadata["expert_feed_forward_length"]
    shared = metadata["expert_shared_feed_forward_length"]
    return {
        "ffn_gate_inp.weight": (n, _D),
        "ffn_gate_exps.weight": (n, width, _D),
        "ffn_up_exps.weight": (n, width, _D),
        "ffn_down_exps.weight": (n, _D, width),
        "ffn_gate_inp_shexp.weight": gate_shape,
        "ffn_gate_shexp.weight": (shared, _D),
        "ffn_up_shexp.weight": (shared, _D),
        "ffn_down_shexp.weight": (_D, shared),
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
