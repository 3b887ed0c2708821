"""Checkpoints of `Lfm2ForCausalLM`, `Lfm2MoeForCausalLM` and `Lfm3ForCausalLM`: their configuration and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kinetic_core.checkpoint import (
    ATTENTION,
    CheckpointConfig,
    CheckpointFormat,
    TensorRule,
    block_rules,
    common_metadata,
    expert_metadata,
    head_dim,
    layer_count,
    layer_types,
    model_rules,
    rope_base,
    rope_type,
    without_middle_axis,
)

FIXED_PAIR = 1e30
"""The frequency factor of a pair that does not turn."""
_SHARED = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    **ATTENTION,
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2 = {
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "gate",
    "ffn_gate_exps": "experts.{expert}.w1",
    "ffn_up_exps": "experts.{expert}.w3",
    "ffn_down_exps": "experts.{expert}.w2",
}
_LFM3 = {
    "post_attention_norm": "post_operator_norm",
    "post_ffw_norm": "post_ffn_norm",
    "attn_gate": "self_attn.gate_proj",  # the module itself is called g_proj
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def _rules(modules: Mapping[str, str], *others: TensorRule) -> list[TensorRule]:
    kernel = {"shortconv.conv": without_middle_axis}
    rules = model_rules("embedding_norm", norm_name="token_embd_norm")
    return [*rules, *block_rules({**_SHARED, **modules}, kernel), *others]


def _lfm2moe_rules(config: CheckpointConfig) -> list[TensorRule]:
    layer = "model.layers.{layer}.feed_forward."
    bias = TensorRule("blk.{layer}.exp_probs_b.bias", layer + "expert_bias")
    return _rules(_LFM2, *block_rules(_EXPERTS, layer=layer), bias)


def _common(config: CheckpointConfig, *, adjusted: bool = False) -> dict[str, Any]:
    """adjusted: whether the feed-forward width is adjusted where the configuration does not say so."""
    config.expect("conv_bias", False)
    common = common_metadata(config)
    kv_heads = common["attention.head_count_kv"]
    return {
        **common,
        "feed_forward_length": _feed_forward_length(config, adjusted),
        "attention.head_count_kv": np.array([0 if kind == "conv" else kv_heads for kind in _kinds(config)], np.int32),
        "shortconv.l_cache": config.get_int("conv_L_cache", minimum=1),
    }


def _lfm2_metadata(config: CheckpointConfig, *, adjusted: bool = True) -> dict[str, Any]:
    rope_type(config, "default")
    if "sliding_attention" in _kinds(config):
        raise config.refused("layer_types", "conv and full_attention")
    return {**_common(config, adjusted=adjusted), "rope.freq_base": rope_base(config, 1000000.0)}


def _lfm2moe_metadata(config: CheckpointConfig) -> dict[str, Any]:
    return {
        **_lfm2_metadata(config, adjusted=False),
        **expert_metadata(config),
        "leading_dense_block_count": config.get_int("num_dense_layers", default=0),
        "expert_gating_func": 2,
        "expert_weights_norm": config.get_bool("norm_topk_prob", default=True),
        "expert_weights_scale": config.get_float("routed_scaling_factor", default=1.0),
    }


def _lfm3_metadata(config: CheckpointConfig) -> dict[str, Any]:
    """Rope settings for each kind of attention block, and the window of the sliding ones."""
    config.expect("use_sandwich_norm", True)
    config.expect("use_attention_gate", True)
    config.expect("attention_bias", False)
    rope, kinds, head = config.section("rope_parameters"), _kinds(config), head_dim(config)
    full, sliding = rope.section("full_attention"), rope.section("sliding_attention")
    if full.get_str("rope_type", default="default") not in ("default", "proportional"):
        raise full.refused("rope_type", "default or proportional")
    sliding.expect("rope_type", "default")
    sliding.expect("partial_rotary_factor", 1.0)
    metadata = {
        **_common(config),
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.freq_base": full.get_float("rope_theta"),
        "rope.dimension_count": head,
    }
    if "sliding_attention" not in kinds:
        return metadata
    return metadata | {
        "attention.sliding_window": config.get_int("sliding_window", minimum=1),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "rope.freq_base_swa": sliding.get_float("rope_theta"),
        "rope.dimension_count_swa": head,
    }


def _lfm3_factors(config: CheckpointConfig) -> Mapping[str, npt.NDArray[np.float32]]:
    """``rope_freqs.weight`` where only the first share of a full block's pairs turns."""
    full = config.section("rope_parameters").section("full_attention")
    share = full.get_float("partial_rotary_factor", default=1.0, minimum=0.0, maximum=1.0)
    pairs = head_dim(config) // 2
    if share == 1:
        return {}
    factors = np.full(pairs, FIXED_PAIR, np.float32)
    factors[: int(share * pairs)] = 1
    return {"rope_freqs.weight": factors}


def _kinds(config: CheckpointConfig) -> tuple[str, ...]:
    """The kind of each block; older files number the attention blocks."""
    default = None
    if "layer_types" not in config:
        numbers = config.values.get("full_attn_idxs")
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise config.refused("full_attn_idxs", "the numbers of the attention blocks, or layer_types")
        attention = frozenset(numbers)
        default = tuple("full_attention" if layer in attention else "conv" for layer in range(layer_count(config)))
    return layer_types(config, "conv", "full_attention", "sliding_attention", default=default)


def _feed_forward_length(config: CheckpointConfig, adjusted: bool) -> int:
    """The width of dense layers: adjusted as the configuration says, two thirds rounded up to a multiple."""
    width: int = config.get_int("block_ff_dim", "intermediate_size", minimum=1)
    if not config.get_bool("block_auto_adjust_ff_dim", default=adjusted):
        return width
    factor = config.get_float("block_ffn_dim_multiplier", default=1.0)
    multiple = config.get_int("block_multiple_of", default=256, minimum=1)
    adjusted_width = int(-(-int(factor * int(2 * width / 3)) // multiple) * multiple)
    if not 1 <= adjusted_width < 2**32:
        key = "block_ffn_dim_multiplier" if "block_ffn_dim_multiplier" in config else "block_multiple_of"
        raise config.refused(key, f"a feed-forward width from 1 to {2**32 - 1}, not {adjusted_width:.6g}")
    return adjusted_width


LFM2 = CheckpointFormat(("Lfm2ForCausalLM",), _lfm2_metadata, lambda config: _rules(_LFM2))
LFM2_MOE = CheckpointFormat(("Lfm2MoeForCausalLM",), _lfm2moe_metadata, _lfm2moe_rules)
LFM3 = CheckpointFormat(("Lfm3ForCausalLM",), _lfm3_metadata, lambda config: _rules(_LFM3), extras=_lfm3_factors)
