"""Checkpoints of `GraniteMoeHybridForCausalLM`, dense and with experts.

Gate and up rows share a tensor there, gate first; dense models have only the shared expert, which is their feed-forward
layer; q and k rows are in half-split order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kinetic_core.checkpoint import (
    ATTENTION,
    CheckpointConfig,
    CheckpointFormat,
    TensorRule,
    adjacent_pairs,
    as_column,
    block_rules,
    chain,
    common_metadata,
    first_half,
    head_dim,
    in_groups,
    layer_count,
    layer_types,
    mamba2_metadata,
    model_rules,
    negative_exp,
    rope_base,
    rope_type,
    second_half,
    without_middle_axis,
)

_MIXERS = {
    "attn_norm": "input_layernorm",
    **ATTENTION,
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ffn_norm": "post_attention_layernorm",
}


def _kinds(config: CheckpointConfig) -> tuple[str, ...]:
    """mamba or attention per block, which newer files call linear_attention and full_attention."""
    default = ("mamba",) * layer_count(config)
    kinds = layer_types(config, "mamba", "attention", "linear_attention", "full_attention", default=default)
    return tuple({"linear_attention": "mamba", "full_attention": "attention"}.get(kind, kind) for kind in kinds)


def _metadata(config: CheckpointConfig) -> dict[str, Any]:
    config.expect("hidden_act", "silu")
    config.expect("normalization_function", "rmsnorm")
    position = config.get_str("position_embedding_type", default="nope")
    if position not in ("nope", "rope"):
        raise config.refused("position_embedding_type", "nope or rope")
    if position == "rope":
        rope_type(config, "default")
    config.expect("mamba_n_groups", 1)  # checkpoints norm the whole width whatever it says, files each group's
    common, kinds = common_metadata(config), _kinds(config)
    kv_heads = common["attention.head_count_kv"]
    n_experts = config.get_int("num_local_experts", default=0)
    shared = config.get_int("shared_intermediate_size", default=0)
    return {
        **common,
        "feed_forward_length": config.get_int("intermediate_size", minimum=1) if n_experts else shared,
        "attention.head_count_kv": np.array([kv_heads if kind == "attention" else 0 for kind in kinds], np.int32),
        "attention.scale": config.get_float("attention_multiplier"),
        "embedding_scale": config.get_float("embedding_multiplier"),
        "residual_scale": config.get_float("residual_multiplier"),
        "logit_scale": config.get_float("logits_scaling"),
        "expert_count": n_experts,
        "expert_used_count": config.get_int("num_experts_per_tok", default=0) if n_experts else 0,
        "expert_shared_feed_forward_length": shared,
        "rope.dimension_count": head_dim(config),
        "rope.freq_base": rope_base(config),
        "rope.scaling.finetuned": position == "rope",
        **(mamba2_metadata(config) if "mamba" in kinds else {}),
    }


def _rules(config: CheckpointConfig) -> list[TensorRule]:
    pairs = adjacent_pairs(head_dim(config))
    groups = in_groups(config.get_int("mamba_n_groups", default=1, minimum=1))
    makes = {"attn_q": pairs, "attn_k": pairs, "ssm_conv1d": without_middle_axis, "ssm_norm": groups}
    layer, block = "model.layers.{layer}.", "blk.{layer}."
    rules = [
        *model_rules("norm"),
        *block_rules(_MIXERS, makes, biased=True),
        TensorRule(block + "ssm_a", layer + "mamba.A_log", chain(negative_exp, as_column)),
        TensorRule(block + "ssm_d", layer + "mamba.D", as_column),
        TensorRule(block + "ssm_dt.bias", layer + "mamba.dt_bias"),
    ]
    halves = {"gate": first_half, "up": second_half}
    n_experts = config.get_int("num_local_experts", default=0)
    kind = "_shexp" if n_experts else ""
    shared = {f"ffn_{half}{kind}": "shared_mlp.input_linear" for half in halves}
    cut = {f"ffn_{half}{kind}": make for half, make in halves.items()}
    rules += block_rules({**shared, f"ffn_down{kind}": "shared_mlp.output_linear"}, cut, biased=True)
    if n_experts:
        experts = {f"ffn_{half}_exps": "block_sparse_moe.input_linear" for half in halves}
        cut = {f"ffn_{half}_exps": make for half, make in halves.items()}
        others = {"ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_exps": "block_sparse_moe.output_linear"}
        rules += block_rules({**others, **experts}, cut)
    return rules


CHECKPOINT = CheckpointFormat(("GraniteMoeHybridForCausalLM",), _metadata, _rules)
