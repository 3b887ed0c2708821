"""Checkpoints of `FalconH1ForCausalLM`, whose multipliers become part of the matrices.

    x = e embedding[token]
    y = rms(x);  x += o attention(a y) + s mamba2(i y);  x += d Wdown (silu(g Wgate rms(x)) * Wup rms(x))
    logits = l Woutput rms(x)

with keys times k, and the five slices of Win's output (gate, x, B, C, dt) times one number each. A factor in front of a
layer scales its weight, one behind it the bias as well. Source: Zuo et al. 2025, arXiv 2507.22448.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kinetic_core.checkpoint import (
    CheckpointConfig,
    CheckpointFormat,
    TensorRule,
    as_column,
    chain,
    common_metadata,
    head_dim,
    in_groups,
    mamba2_metadata,
    negative_exp,
    rope_base,
    rope_type,
    scaled,
    without_middle_axis,
)

if TYPE_CHECKING:
    from kinetic_core.checkpoint.transforms import Make


def _metadata(config: CheckpointConfig) -> dict[str, Any]:
    config.expect("hidden_act", "silu")
    config.expect("attn_layer_indices", None)
    config.expect("mamba_use_mlp", True)
    rope_type(config, "default")
    if _has_norm(config) and config.get_bool("mamba_norm_before_gate", default=True):
        raise config.refused("mamba_norm_before_gate", "false where mamba_rms_norm is true")
    return {
        **common_metadata(config),
        "feed_forward_length": config.get_int("intermediate_size", minimum=1),
        "attention.key_length": head_dim(config),
        "attention.value_length": head_dim(config),
        "rope.freq_base": rope_base(config),
        **mamba2_metadata(config),
    }


def _has_norm(config: CheckpointConfig) -> bool:
    return bool(config.get_bool("mamba_rms_norm", default=False))


def _rules(config: CheckpointConfig) -> list[TensorRule]:
    def factor(key: str) -> float:
        return float(config.get_float(f"{key}_multiplier", default=1.0))

    block, layer = "blk.{layer}.", "model.layers.{layer}."
    gate, down = config.get_floats("mlp_multipliers", 2, default=1.0)
    before_and_after: dict[str, tuple[str, float, float]] = {
        "attn_q": ("self_attn.q_proj", factor("attention_in"), 1.0),
        "attn_k": ("self_attn.k_proj", factor("attention_in"), factor("key")),
        "attn_v": ("self_attn.v_proj", factor("attention_in"), 1.0),
        "attn_output": ("self_attn.o_proj", 1.0, factor("attention_out")),
        "ssm_out": ("mamba.out_proj", 1.0, factor("ssm_out")),
        "ffn_gate": ("feed_forward.gate_proj", 1.0, gate),
        "ffn_up": ("feed_forward.up_proj", 1.0, 1.0),
        "ffn_down": ("feed_forward.down_proj", 1.0, down),
    }
    # Tied layers have factors of their own, so the file's are two.
    tied = config.get_bool("tie_word_embeddings", default=False) and factor("embedding") != factor("lm_head")
    output = "model.embed_tokens.weight" if tied else "lm_head.weight"
    rules = [
        TensorRule("token_embd.weight", "model.embed_tokens.weight", scaled(factor("embedding"))),
        TensorRule("output_norm.weight", "model.final_layernorm.weight"),
        TensorRule("output.weight", output, scaled(factor("lm_head"))),
        TensorRule(block + "attn_norm.weight", layer + "input_layernorm.weight"),
        TensorRule(block + "ffn_norm", layer + "pre_ff_layernorm.weight"),
        TensorRule(block + "ssm_a", layer + "mamba.A_log", chain(negative_exp, as_column)),
        TensorRule(block + "ssm_d", layer + "mamba.D", as_column),
        TensorRule(block + "ssm_dt.bias", layer + "mamba.dt_bias"),
        TensorRule(block + "ssm_conv1d.weight", layer + "mamba.conv1d.weight", without_middle_axis),
        TensorRule(block + "ssm_conv1d.bias", layer + "mamba.conv1d.bias"),
    ]
    if _has_norm(config):
        groups = in_groups(config.get_int("mamba_n_groups", minimum=1))
        rules.append(TensorRule(block + "ssm_norm.weight", layer + "mamba.norm.weight", groups))
    for ours, (theirs, before, after) in before_and_after.items():
        rules.append(TensorRule(f"{block}{ours}.weight", f"{layer}{theirs}.weight", scaled(before * after)))
        rules.append(TensorRule(f"{block}{ours}.bias", f"{layer}{theirs}.bias", scaled(after)))
    rules.append(TensorRule(block + "ssm_in.weight", layer + "mamba.in_proj.weight", _slices(config, factor("ssm_in"))))
    rules.append(TensorRule(block + "ssm_in.bias", layer + "mamba.in_proj.bias", _slices(config, 1.0)))
    return rules


def _slices(config: CheckpointConfig, before: float) -> Make:
    """``in_proj`` with the factors of its slices, gate, x, B, C and dt, and the factor before it."""
    keys = mamba2_metadata(config)
    inner, heads = keys["ssm.inner_size"], keys["ssm.time_step_rank"]
    states = keys["ssm.group_count"] * keys["ssm.state_size"]
    sizes, factors = (inner, inner, states, states, heads), config.get_floats("ssm_multipliers", 5, default=1.0)

    def made(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if len(array) != sum(sizes):  # before a vector is made of sizes that are somebody's word
            raise ValueError(f"{sum(sizes)} rows: gate, x, B, C and dt are {sizes}")
        return scaled(np.repeat(before * np.array(factors), sizes))(array)

    return made


CHECKPOINT = CheckpointFormat(("FalconH1ForCausalLM",), _metadata, _rules)
