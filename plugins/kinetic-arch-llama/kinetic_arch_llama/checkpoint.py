"""Checkpoints of `LlamaForCausalLM` and `MistralForCausalLM`: their configuration, and the order of q and k rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kinetic_core.checkpoint import (
    ATTENTION,
    SWIGLU,
    CheckpointConfig,
    CheckpointFormat,
    TensorRule,
    adjacent_pairs,
    block_rules,
    common_metadata,
    head_dim,
    model_rules,
    rope_base,
    rope_settings,
    rope_type,
)

_MODULES = {
    "attn_norm": "input_layernorm",
    **ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    **SWIGLU,
}


def _metadata(config: CheckpointConfig) -> dict[str, Any]:
    config.expect("hidden_act", "silu")
    config.expect("sliding_window", 0)
    rope_type(config, "default", "llama3")
    return {
        **common_metadata(config),
        "feed_forward_length": config.get_int("intermediate_size", minimum=1),
        "attention.key_length": head_dim(config),
        "attention.value_length": head_dim(config),
        "rope.dimension_count": head_dim(config),
        "rope.freq_base": rope_base(config),
    }


def _rules(config: CheckpointConfig) -> list[TensorRule]:
    pairs = adjacent_pairs(head_dim(config))
    return model_rules("norm") + block_rules(_MODULES, {"attn_q": pairs, "attn_k": pairs}, biased=True)


def _frequency_factors(config: CheckpointConfig) -> Mapping[str, npt.NDArray[np.float32]]:
    """``rope_freqs.weight`` of Llama 3.1: slow pairs are slowed down further, fast ones left, the rest in between."""
    if rope_type(config, "default", "llama3") == "default":
        return {}
    rope = rope_settings(config)
    factor, low, high = (rope.get_float(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = rope.get_int("original_max_position_embeddings", minimum=1)
    if factor <= 0 or not 0 < low < high:
        raise rope.refused("high_freq_factor", "more than low_freq_factor, all factors positive")
    pairs, base, factors = head_dim(config) // 2, rope_base(config), []
    for i in range(pairs):
        turns = trained / (2 * math.pi * base ** (i / pairs))  # in the context it was trained on
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


CHECKPOINT = CheckpointFormat(("LlamaForCausalLM", "MistralForCausalLM"), _metadata, _rules, extras=_frequency_factors)
