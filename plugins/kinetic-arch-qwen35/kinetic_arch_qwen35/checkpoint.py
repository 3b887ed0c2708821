"""Checkpoints of Qwen3.5, dense and with experts, text alone or with a vision part, which is left out.

Norm weights but a delta net's are stored as offsets from 1, ``ssm_a`` as the logarithm of what it is minus. Value heads
are grouped by key head there (value head h reads key head h / (value heads / key heads)) and in tiled order in files
(h mod key heads). The delta net's projections are four tensors, or two (as in Qwen3-Next) that hold the rows of each
key head together: q, k, its v and z; its b and a. Experts are one tensor each or packed, gate rows before up rows.
A prediction block's tensors are called ``mtp.``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kinetic_core.checkpoint import (
    ATTENTION,
    SWIGLU,
    CheckpointConfig,
    CheckpointFormat,
    TensorRule,
    block_rules,
    chain,
    common_metadata,
    expert_metadata,
    first_half,
    head_dim,
    layer_count,
    layer_types,
    model_rules,
    negative_exp,
    plus_one,
    rope_base,
    rope_settings,
    rope_type,
    second_half,
    without_middle_axis,
)

_Array = npt.NDArray[np.float32]
_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
}
_PREDICTION = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}


def _n_predicted(config: CheckpointConfig) -> int:
    """Prediction blocks: one where its tensors are there; config.json also counts those that were not saved."""
    if config.get_int("mtp_num_hidden_layers", default=0) > 1:
        raise config.refused("mtp_num_hidden_layers", "0 or 1")
    return int("mtp.fc.weight" in config.tensors)


def _metadata(config: CheckpointConfig) -> dict[str, Any]:
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("attn_output_gate", True)
    rope_type(config, "default")
    rope, n_predicted = rope_settings(config), _n_predicted(config)
    head = head_dim(config) if "head_dim" in config else 256
    beside = config.get_float("partial_rotary_factor", default=0.25, minimum=0.0, maximum=1.0)
    share = rope.get_float("partial_rotary_factor", default=beside, minimum=0.0, maximum=1.0)
    sections = rope.get_ints("mrope_section", 3, default=None)
    n_layers = layer_count(config)
    interval = config.get_int("full_attention_interval", default=4, minimum=1)
    by_interval = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(n_layers)]
    kinds = layer_types(config, "linear_attention", "full_attention", default=tuple(by_interval))
    d, key_heads, value_heads = _delta_net(config)
    metadata = {
        **common_metadata(config),
        "block_count": n_layers + n_predicted,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds] + [False] * n_predicted,
        "rope.freq_base": rope_base(config),
        "rope.dimension_count": int(head * share),
        "ssm.conv_kernel": config.get_int("linear_conv_kernel_dim", minimum=2),
        "ssm.state_size": d,
        "ssm.group_count": key_heads,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * d,
    }
    if kinds == tuple(by_interval):
        metadata["full_attention_interval"] = interval
    if n_predicted:
        metadata["nextn_predict_layers"] = n_predicted
    if sections is not None:  # time, height, width: text has one position for all
        metadata["rope.dimension_sections"] = np.array([*sections, 0], np.int32)
    return metadata


def _dense_metadata(config: CheckpointConfig) -> dict[str, Any]:
    return {**_metadata(config), "feed_forward_length": config.get_int("intermediate_size", minimum=1)}


def _expert_metadata(config: CheckpointConfig) -> dict[str, Any]:
    config.expect("decoder_sparse_step", 1)
    config.expect("mlp_only_layers", [])
    config.expect("norm_topk_prob", True)
    return {
        **_metadata(config),
        **expert_metadata(config),
        "expert_shared_feed_forward_length": config.get_int("shared_expert_intermediate_size", minimum=1),
    }


def _delta_net(config: CheckpointConfig) -> tuple[int, int, int]:
    """Size of a head, key heads, value heads."""
    d = config.get_int("linear_key_head_dim", minimum=1)
    if config.get_int("linear_value_head_dim") != d:
        raise config.refused("linear_value_head_dim", f"{d}, the size of the key heads")
    key_heads, value_heads = (config.get_int(f"linear_num_{kind}_heads", minimum=1) for kind in ("key", "value"))
    if value_heads % key_heads:
        raise config.refused("linear_num_value_heads", f"a multiple of {key_heads}, the key heads")
    return d, key_heads, value_heads


class _ValueHeads:
    """Moves of a delta net's rows. d: size of a head; r: value heads per key head."""

    def __init__(self, config: CheckpointConfig) -> None:
        self.d, self.key_heads, value_heads = _delta_net(config)
        self.r = value_heads // self.key_heads

    def tiled(self, array: _Array) -> _Array:
        """Rows of one value head together: from grouped to tiled order."""
        rows = array.reshape(self.key_heads, self.r, -1, *array.shape[1:])
        return rows.swapaxes(0, 1).reshape(array.shape)

    def tiled_columns(self, array: _Array) -> _Array:
        """The same for columns."""
        return self.tiled(array.T).T

    def tiled_values(self, array: _Array) -> _Array:
        """Rows or channels of q, k and v, only v's moved."""
        keys = 2 * self.key_heads * self.d
        return np.concatenate([array[:keys], self.tiled(array[keys:])])

    def qkv(self, fused: _Array) -> _Array:
        """q, k and v out of in_proj_qkvz."""
        d = self.d
        q, k, v, _ = np.split(self._by_key_head(fused, (2 + 2 * self.r) * d), (d, 2 * d, (2 + self.r) * d), axis=1)
        return self.tiled_values(np.concatenate([part.reshape(-1, fused.shape[1]) for part in (q, k, v)]))

    def part(self, start: int, stop: int, rows: int) -> Callable[[_Array], _Array]:
        """Rows `start` to `stop` of the `rows` of each key head out of a fused projection: z, b or a."""
        return lambda fused: self.tiled(self._by_key_head(fused, rows)[:, start:stop].reshape(-1, fused.shape[1]))

    def _by_key_head(self, fused: _Array, rows: int) -> _Array:
        if fused.ndim != 2 or len(fused) != self.key_heads * rows:
            raise ValueError(f"a matrix of {self.key_heads * rows} rows, {rows} for each key head")
        return fused.reshape(self.key_heads, rows, fused.shape[1])


def _rules(config: CheckpointConfig, feed_forward: Mapping[str, str]) -> list[TensorRule]:
    model = "model."
    if any(name.startswith("model.language_model.") for name in config.tensors):
        model = "model.language_model."
    rules = model_rules("norm", model=model)
    rules[1] = TensorRule(rules[1].name, rules[1].source, plus_one)
    block, layer = "blk.{layer}.", model + "layers.{layer}."
    rules += _block(block, layer, feed_forward) + _delta_net_rules(config, block, layer + "linear_attn.")
    if _n_predicted(config):
        block = f"blk.{layer_count(config)}."
        norms = dict.fromkeys(("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"), plus_one)
        rules += _block(block, "mtp.layers.0.", feed_forward)
        rules += block_rules(_PREDICTION, norms, block=block, layer="mtp.")
    return rules


def _block(block: str, layer: str, feed_forward: Mapping[str, str]) -> list[TensorRule]:
    modules = {**_NORMS, **ATTENTION, **feed_forward}
    rules = block_rules(modules, dict.fromkeys(_NORMS, plus_one), block=block, layer=layer)
    if "ffn_gate_exps" in feed_forward:
        packed = layer + "mlp.experts."
        rules += [
            TensorRule(block + "ffn_gate_exps.weight", packed + "gate_up_proj", first_half),
            TensorRule(block + "ffn_up_exps.weight", packed + "gate_up_proj", second_half),
            TensorRule(block + "ffn_down_exps.weight", packed + "down_proj"),
        ]
    return rules


def _delta_net_rules(config: CheckpointConfig, block: str, layer: str) -> list[TensorRule]:
    heads = _ValueHeads(config)
    d, r = heads.d, heads.r
    kernel = chain(without_middle_axis, heads.tiled_values)
    return [
        TensorRule(block + "attn_qkv.weight", layer + "in_proj_qkv.weight", heads.tiled_values),
        TensorRule(block + "attn_qkv.weight", layer + "in_proj_qkvz.weight", heads.qkv),
        TensorRule(block + "attn_gate.weight", layer + "in_proj_z.weight", heads.tiled),
        TensorRule(
            block + "attn_gate.weight",
            layer + "in_proj_qkvz.weight",
            heads.part((2 + r) * d, (2 + 2 * r) * d, (2 + 2 * r) * d),
        ),
        TensorRule(block + "ssm_alpha.weight", layer + "in_proj_a.weight", heads.tiled),
        TensorRule(block + "ssm_alpha.weight", layer + "in_proj_ba.weight", heads.part(r, 2 * r, 2 * r)),
        TensorRule(block + "ssm_beta.weight", layer + "in_proj_b.weight", heads.tiled),
        TensorRule(block + "ssm_beta.weight", layer + "in_proj_ba.weight", heads.part(0, r, 2 * r)),
        TensorRule(block + "ssm_conv1d.weight", layer + "conv1d.weight", kernel),
        TensorRule(block + "ssm_a", layer + "A_log", chain(negative_exp, heads.tiled)),
        TensorRule(block + "ssm_dt.bias", layer + "dt_bias", heads.tiled),
        TensorRule(block + "ssm_norm.weight", layer + "norm.weight"),
        TensorRule(block + "ssm_out.weight", layer + "out_proj.weight", heads.tiled_columns),
    ]


_SKIPPED = {"model.visual.": "the vision part"}
DENSE = CheckpointFormat(
    ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    _dense_metadata,
    lambda config: _rules(config, SWIGLU),
    skipped=_SKIPPED,
)
EXPERTS = CheckpointFormat(
    ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    _expert_metadata,
    lambda config: _rules(config, _EXPERTS),
    skipped=_SKIPPED,
)
