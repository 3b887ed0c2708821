"""Checkpoints of the families: their configuration, and the few tensors that files store otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kinetic_core.interfaces import CheckpointConfig

FIXED_PAIR = 1e30
"""The frequency factor of a pair that does not turn."""


def common_metadata(config: CheckpointConfig, *, adjusted: bool = False) -> dict[str, Any]:
    """The keys that all families have; raises MetadataError for variants that the forward pass does not cover.

    adjusted: whether the feed-forward width is adjusted where the configuration does not say so.
    """
    config.expect("conv_bias", False)
    d_model, heads = config.get_int("hidden_size", minimum=1), config.get_int("num_attention_heads", minimum=1)
    kv_heads = config.get_int("num_key_value_heads", default=heads, minimum=1)
    kinds = layer_types(config)
    return {
        "block_count": len(kinds),
        "context_length": config.get_int("max_position_embeddings", minimum=1),
        "embedding_length": d_model,
        "feed_forward_length": _feed_forward_length(config, adjusted),
        "attention.head_count": heads,
        "attention.head_count_kv": np.array([0 if kind == "conv" else kv_heads for kind in kinds], np.int32),
        "attention.layer_norm_rms_epsilon": config.get_float("norm_eps", "rms_norm_eps", "block_norm_eps"),
        "shortconv.l_cache": config.get_int("conv_L_cache", minimum=1),
    }


def lfm2_metadata(config: CheckpointConfig, *, adjusted: bool = True) -> dict[str, Any]:
    """LFM2: one base for all attention blocks."""
    rope = config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    rope.expect("rope_type", "default")
    if "sliding_attention" in layer_types(config):
        raise config.refused("layer_types", "conv and full_attention")
    base = rope.get_float("rope_theta", default=None) or config.get_float("rope_theta", "theta", default=1000000.0)
    return {**common_metadata(config, adjusted=adjusted), "rope.freq_base": base}


def lfm2moe_metadata(config: CheckpointConfig) -> dict[str, Any]:
    """LFM2 with experts."""
    return {
        **lfm2_metadata(config, adjusted=False),
        "expert_count": config.get_int("num_experts", minimum=1),
        "expert_used_count": config.get_int("num_experts_per_tok", minimum=1),
        "expert_feed_forward_length": config.get_int("moe_intermediate_size", minimum=1),
        "leading_dense_block_count": config.get_int("num_dense_layers", default=0),
        "expert_gating_func": 2,
        "expert_weights_norm": config.get_bool("norm_topk_prob", default=True),
        "expert_weights_scale": config.get_float("routed_scaling_factor", default=1.0),
    }


def lfm3_metadata(config: CheckpointConfig) -> dict[str, Any]:
    """LFM3: rope settings for each kind of attention block, and the window of the sliding ones."""
    rope, kinds = config.section("rope_parameters"), layer_types(config)
    full, sliding = rope.section("full_attention"), rope.section("sliding_attention")
    if full.get_str("rope_type", default="default") not in ("default", "proportional"):
        raise full.refused("rope_type", "default or proportional")
    sliding.expect("rope_type", "default")
    metadata = {
        **common_metadata(config),
        "attention.key_length": head_dim(config),
        "attention.value_length": head_dim(config),
        "rope.freq_base": full.get_float("rope_theta"),
        "rope.dimension_count": head_dim(config),
    }
    if "sliding_attention" not in kinds:
        return metadata
    return metadata | {
        "attention.sliding_window": config.get_int("sliding_window", minimum=1),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "rope.freq_base_swa": sliding.get_float("rope_theta"),
        "rope.dimension_count_swa": head_dim(config),
    }


def lfm3_factors(config: CheckpointConfig) -> Mapping[str, npt.NDArray[np.float32]]:
    """``rope_freqs.weight`` where only the first share of a full block's pairs turns."""
    full = config.section("rope_parameters").section("full_attention")
    share, pairs = full.get_float("partial_rotary_factor", default=1.0), head_dim(config) // 2
    if not 0 <= share <= 1:
        raise full.refused("partial_rotary_factor", "0 to 1")
    if share == 1:
        return {}
    factors = np.full(pairs, FIXED_PAIR, np.float32)
    factors[: int(share * pairs)] = 1
    return {"rope_freqs.weight": factors}


def tensor(name: str, array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A convolution's kernel loses the axis of length 1 in the middle."""
    return array.squeeze(1) if name.endswith("shortconv.conv.weight") and array.ndim == 3 else array


def layer_types(config: CheckpointConfig) -> tuple[str, ...]:
    """conv, full_attention or sliding_attention per block; older files number the attention blocks."""
    n_layers = config.get_int("num_hidden_layers", minimum=1)
    if "layer_types" not in config:
        numbers = config.values.get("full_attn_idxs")
        if not isinstance(numbers, list):
            raise config.refused("full_attn_idxs", "the numbers of the attention blocks, or layer_types")
        return tuple("full_attention" if layer in numbers else "conv" for layer in range(n_layers))
    kinds: tuple[str, ...] = config.get_strings("layer_types")
    if len(kinds) != n_layers or not set(kinds) <= {"conv", "full_attention", "sliding_attention"}:
        raise config.refused("layer_types", f"{n_layers} of conv, full_attention and sliding_attention")
    return kinds


def head_dim(config: CheckpointConfig) -> int:
    """``head_dim``, or the hidden size shared out to the heads."""
    heads = config.get_int("num_attention_heads", minimum=1)
    return int(config.get_int("head_dim", default=config.get_int("hidden_size") // heads, minimum=2))


def _feed_forward_length(config: CheckpointConfig, adjusted: bool) -> int:
    """The width of dense layers: adjusted as the configuration says, two thirds rounded up to a multiple."""
    width: int = config.get_int("block_ff_dim", "intermediate_size", minimum=1)
    if not config.get_bool("block_auto_adjust_ff_dim", default=adjusted):
        return width
    width = int(config.get_float("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    multiple = config.get_int("block_multiple_of", default=256, minimum=1)
    return int(-(-width // multiple) * multiple)
