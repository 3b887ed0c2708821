"""What most families' config.json say alike: sizes, heads, rope, kinds of blocks."""

from __future__ import annotations

import math
from typing import Any

from kinetic_core.checkpoint.config import CheckpointConfig

MAX_LAYERS = 4096
"""More blocks than any family has: what is said once per block stays small."""
MAX_HEAD_DIM = 65536
"""More columns than a head of any family has: what is made for each rope pair stays small."""


def layer_count(config: CheckpointConfig) -> int:
    """``num_hidden_layers``, at most `MAX_LAYERS`."""
    return int(config.get_int("num_hidden_layers", minimum=1, maximum=MAX_LAYERS))


def common_metadata(config: CheckpointConfig) -> dict[str, Any]:
    """The keys that every family has; `attention.head_count_kv` as one number."""
    heads = config.get_int("num_attention_heads", minimum=1)
    return {
        "block_count": layer_count(config),
        "context_length": config.get_int("max_position_embeddings", minimum=1),
        "embedding_length": config.get_int("hidden_size", minimum=1),
        "attention.head_count": heads,
        "attention.head_count_kv": config.get_int("num_key_value_heads", default=heads, minimum=1),
        "attention.layer_norm_rms_epsilon": config.get_float("rms_norm_eps", "norm_eps", "block_norm_eps"),
    }


def head_dim(config: CheckpointConfig) -> int:
    """``head_dim``, or the hidden size shared out to the heads: 2 to `MAX_HEAD_DIM`."""
    if "head_dim" in config:
        return int(config.get_int("head_dim", minimum=2, maximum=MAX_HEAD_DIM))
    heads = config.get_int("num_attention_heads", minimum=1)
    shared = int(config.get_int("hidden_size", minimum=1) // heads)
    if not 2 <= shared <= MAX_HEAD_DIM:
        raise config.refused("hidden_size", f"2 to {MAX_HEAD_DIM} times the {heads} attention heads, or a head_dim")
    return shared


def rope_settings(config: CheckpointConfig) -> CheckpointConfig:
    """The settings of rope, which newer files keep under another key."""
    return config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")


def rope_type(config: CheckpointConfig, *supported: str) -> str:
    """The kind of rope, ``default`` where nothing is said; MetadataError for one that is not supported."""
    settings = rope_settings(config)
    kind: str = settings.get_str("rope_type", "type", default="default")
    if kind not in supported:
        raise settings.refused("rope_type" if "rope_type" in settings else "type", " or ".join(supported))
    return kind


def rope_base(config: CheckpointConfig, default: float = 10000.0) -> float:
    """``rope_theta``, among the settings of rope or beside them."""
    beside = config.get_float("rope_theta", "theta", default=default)
    return float(rope_settings(config).get_float("rope_theta", default=beside))


def layer_types(config: CheckpointConfig, *known: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """The kind of each block, one of `known`; `default` where config.json does not say."""
    n_layers = layer_count(config)
    fallback = {} if default is None else {"default": default}
    kinds: tuple[str, ...] = config.get_strings("layer_types", "layers_block_type", **fallback)
    if len(kinds) != n_layers or not set(kinds) <= set(known):
        key = "layer_types" if "layer_types" in config else "layers_block_type"
        raise config.refused(key, f"{n_layers} of {', '.join(known)}")
    return kinds


def expert_metadata(config: CheckpointConfig) -> dict[str, Any]:
    """The keys of routed experts."""
    return {
        "expert_count": config.get_int("num_experts", minimum=1),
        "expert_used_count": config.get_int("num_experts_per_tok", minimum=1),
        "expert_feed_forward_length": config.get_int("moe_intermediate_size", minimum=1),
    }


_NO_LIMITS = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Of the time step: both spellings that JSON files have."""


def mamba2_metadata(config: CheckpointConfig) -> dict[str, Any]:
    """The keys of Mamba-2 layers: the inner width is ``mamba_d_ssm``, or a multiple of the hidden size."""
    if config.values.get("time_step_limit") not in _NO_LIMITS:
        raise config.refused("time_step_limit", "no limits: [0.0, Infinity]")
    width = config.get_int("hidden_size", minimum=1)
    inner = config.get_int("mamba_d_ssm", default=None, minimum=1)
    return {
        "ssm.conv_kernel": config.get_int("mamba_d_conv", minimum=1),
        "ssm.state_size": config.get_int("mamba_d_state", minimum=1),
        "ssm.group_count": config.get_int("mamba_n_groups", minimum=1),
        "ssm.inner_size": inner or config.get_int("mamba_expand", minimum=1) * width,
        "ssm.time_step_rank": config.get_int("mamba_n_heads", minimum=1),
    }
