"""Checkpoints of `GraniteMoeHybridForCausalLM`: their configuration, and the tensors that files store otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kinetic_core.interfaces import CheckpointConfig

CLASS = "GraniteMoeHybridForCausalLM"


def metadata(config: CheckpointConfig) -> dict[str, Any]:
    """The keys under ``granitehybrid.``; raises MetadataError for variants that the forward pass does not cover."""
    config.expect("hidden_act", "silu")
    config.expect("normalization_function", "rmsnorm")
    position = config.get_str("position_embedding_type", default="nope")
    if position not in ("nope", "rope"):
        raise config.refused("position_embedding_type", "nope or rope")
    if position == "rope" and _section(config).get_str("rope_type", "type", default="default") != "default":
        raise _section(config).refused("rope_type", "default")
    kinds = _layer_types(config)
    heads, d_model = config.get_int("num_attention_heads", minimum=1), config.get_int("hidden_size", minimum=1)
    kv_heads = config.get_int("num_key_value_heads", default=heads, minimum=1)
    n_experts = config.get_int("num_local_experts", default=0)
    shared = config.get_int("shared_intermediate_size", default=0)
    keys: dict[str, Any] = {
        "block_count": len(kinds),
        "context_length": config.get_int("max_position_embeddings", minimum=1),
        "embedding_length": d_model,
        "feed_forward_length": config.get_int("intermediate_size", minimum=1) if n_experts else shared,
        "attention.head_count": heads,
        "attention.head_count_kv": np.array([kv_heads if kind == "attention" else 0 for kind in kinds], np.int32),
        "attention.layer_norm_rms_epsilon": config.get_float("rms_norm_eps"),
        "attention.scale": config.get_float("attention_multiplier"),
        "embedding_scale": config.get_float("embedding_multiplier"),
        "residual_scale": config.get_float("residual_multiplier"),
        "logit_scale": config.get_float("logits_scaling"),
        "expert_count": n_experts,
        "expert_used_count": config.get_int("num_experts_per_tok", default=0) if n_experts else 0,
        "expert_shared_feed_forward_length": shared,
        "rope.dimension_count": d_model // heads,
        "rope.freq_base": _section(config).get_float("rope_theta", default=None)
        or config.get_float("rope_theta", default=10000.0),
        "rope.scaling.finetuned": position == "rope",
    }
    if "mamba" in kinds:
        keys |= {
            "ssm.conv_kernel": config.get_int("mamba_d_conv", minimum=1),
            "ssm.state_size": config.get_int("mamba_d_state", minimum=1),
            "ssm.group_count": config.get_int("mamba_n_groups", minimum=1),
            "ssm.inner_size": config.get_int("mamba_expand", minimum=1) * d_model,
            "ssm.time_step_rank": config.get_int("mamba_n_heads", minimum=1),
        }
    return keys


def tensor(name: str, array: npt.NDArray[np.float32], config: CheckpointConfig) -> npt.NDArray[np.float32] | None:
    """What the file stores; None where only the other kind of model has the tensor.

    Gate and up rows share a tensor, gate first. q and k rows of each head: half-split pairs (i, i + d/2) become
    adjacent ones (2i, 2i + 1). Kernels lose the axis of length 1; norms are cut into groups.
    """
    kind = name.split(".")[2] if name.startswith("blk.") else name
    n_experts = config.get_int("num_local_experts", default=0)
    if kind in ("ffn_gate", "ffn_up", "ffn_down") and n_experts:
        return None
    if kind.endswith(("_shexp", "_exps", "ffn_gate_inp")) and not n_experts:
        return None
    if kind.startswith(("ffn_gate", "ffn_up")) and kind != "ffn_gate_inp":
        axis = 0 if name.endswith(".bias") else array.ndim - 2
        gate, up = np.split(array, 2, axis)
        return gate if kind.startswith("ffn_gate") else up
    if kind in ("attn_q", "attn_k"):
        head_dim = config.get_int("hidden_size") // config.get_int("num_attention_heads")
        return array.reshape(-1, 2, head_dim // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if kind == "ssm_a":
        # exp is NumPy's in float64 and then rounded once: the same bits on every machine but for ties.
        return -np.exp(array.astype(np.float64)).astype(np.float32).reshape(-1, 1)
    if kind == "ssm_d":
        return array.reshape(-1, 1)
    if kind == "ssm_conv1d" and array.ndim == 3:
        return array.squeeze(1)
    if kind == "ssm_norm":
        return array.reshape(config.get_int("mamba_n_groups", minimum=1), -1)
    return array


def _layer_types(config: CheckpointConfig) -> tuple[str, ...]:
    n_layers = config.get_int("num_hidden_layers", minimum=1)
    kinds: tuple[str, ...] = config.get_strings("layer_types", "layers_block_type", default=("mamba",) * n_layers)
    if len(kinds) != n_layers or not set(kinds) <= {"mamba", "attention"}:
        raise config.refused("layer_types", f"{n_layers} of mamba and attention")
    return kinds


def _section(config: CheckpointConfig) -> CheckpointConfig:
    """The settings of rope, which newer files keep under another key."""
    return config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")
