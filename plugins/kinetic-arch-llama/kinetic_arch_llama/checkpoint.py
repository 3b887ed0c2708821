"""Checkpoints of `LlamaForCausalLM` and `MistralForCausalLM`: their configuration, and the order of q and k rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kinetic_core.interfaces import CheckpointConfig

CLASSES = ("LlamaForCausalLM", "MistralForCausalLM")


def metadata(config: CheckpointConfig) -> dict[str, Any]:
    """The keys under ``llama.``; raises MetadataError for variants that the forward pass does not cover."""
    config.expect("hidden_act", "silu")
    config.expect("sliding_window", 0)
    heads, d_model = config.get_int("num_attention_heads", minimum=1), config.get_int("hidden_size", minimum=1)
    head_dim = config.get_int("head_dim", default=d_model // heads, minimum=2)
    if _rope_type(config) not in ("default", "llama3"):
        raise _rope(config).refused("rope_type", "default or llama3")
    return {
        "block_count": config.get_int("num_hidden_layers", minimum=1),
        "context_length": config.get_int("max_position_embeddings", minimum=1),
        "embedding_length": d_model,
        "feed_forward_length": config.get_int("intermediate_size", minimum=1),
        "attention.head_count": heads,
        "attention.head_count_kv": config.get_int("num_key_value_heads", default=heads, minimum=1),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.get_float("rms_norm_eps"),
        "rope.dimension_count": head_dim,
        "rope.freq_base": _base(config),
    }


def tensor(name: str, array: npt.NDArray[np.float32], config: CheckpointConfig) -> npt.NDArray[np.float32]:
    """q and k rows: half-split pairs (i, i + d/2) of each head become adjacent ones (2i, 2i + 1)."""
    kind = name.split(".")[2:3]
    if kind not in (["attn_q"], ["attn_k"]):
        return array
    head_dim = metadata(config)["attention.key_length"]
    halves = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def frequency_factors(config: CheckpointConfig) -> Mapping[str, npt.NDArray[np.float32]]:
    """``rope_freqs.weight`` of Llama 3.1: slow pairs are slowed down further, fast ones left, the rest in between."""
    if _rope_type(config) != "llama3":
        return {}
    rope = _rope(config)
    factor, low, high = (rope.get_float(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = rope.get_int("original_max_position_embeddings", minimum=1)
    if factor <= 0 or not 0 < low < high:
        raise rope.refused("high_freq_factor", "more than low_freq_factor, all factors positive")
    head_dim, base = metadata(config)["attention.key_length"], _base(config)
    factors = []
    for i in range(head_dim // 2):
        turns = trained / (2 * math.pi * base ** (2 * i / head_dim))  # in the context it was trained on
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _rope(config: CheckpointConfig) -> CheckpointConfig:
    """The settings of rope, which newer files keep under another key."""
    return config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")


def _rope_type(config: CheckpointConfig) -> str:
    return str(_rope(config).get_str("rope_type", "type", default="default"))


def _base(config: CheckpointConfig) -> float:
    default = config.get_float("rope_theta", default=10000.0)
    return float(_rope(config).get_float("rope_theta", default=default))
