"""What a family does not know is refused by the name of the key or tensor; what changes nothing is accepted."""

from __future__ import annotations

from typing import Any

import family
import numpy as np
import pytest

from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError

HEADS, KV_HEADS, SIZE, VALUE_SIZE = (
    f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")
)
ROTARY, SCALING, FACTOR = "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"

EVERY_FAMILY: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (MetadataError, "block_count does not match.*block_count", {"block_count": 100000}),
    (MetadataError, "block_count does not match.*block_count", {"block_count": 1}),
    (MetadataError, "block_count'? is missing", {"block_count": None}),
    (MetadataError, "context_length'? is missing", {"context_length": None}),
    (MetadataError, r"another type.*\.embedding_length", {"embedding_length": "64"}),
    (MetadataError, r"attention\.head_count'.*0", {HEADS: 0}),
    (MetadataError, "head_count_kv.*3.*divisor", {KV_HEADS: 3}),
    (MetadataError, "head_count_kv.*8", {KV_HEADS: 8}),
    (MetadataError, "rms_epsilon.*-1", {"attention.layer_norm_rms_epsilon": -1.0}),
    (MetadataError, "value_length.*8", {VALUE_SIZE: 8}),
    (MetadataError, "embedding_length.*multiple of 5", {HEADS: 5, KV_HEADS: 5, SIZE: None, VALUE_SIZE: None}),
]
"""Whatever the family: error, message, keys."""

OWN: list[tuple[str, str | None, type[Exception], str, dict[str, Any]]] = [
    ("llama", None, UnsupportedModelError, "llama.expert_count.*8", {"expert_count": 8}),
    ("llama", None, UnsupportedModelError, "llama.rope.scaling.type.*yarn.*rope_freqs", {SCALING: "yarn"}),
    ("llama", None, UnsupportedModelError, "llama.rope.scaling.type.*linear", {SCALING: "linear", FACTOR: 4.0}),
    ("llama", None, MetadataError, "llama.feed_forward_length", {"feed_forward_length": 0}),
    ("llama", None, MetadataError, "llama.rope.dimension_count.*18", {ROTARY: 18}),
    ("llama", None, MetadataError, "llama.rope.dimension_count.*even", {ROTARY: 7}),
    ("llama", None, MetadataError, "llama.rope.freq_base", {"rope.freq_base": 0.0}),
    ("llama", None, MetadataError, r"llama.*head_count_kv\[0\].*0", {KV_HEADS: [0, 2]}),
    ("granitehybrid", "attention", UnsupportedModelError, "rope.scaling.type.*yarn.*rope_freqs", {SCALING: "yarn"}),
    ("granitehybrid", "attention", MetadataError, "rope.dimension_count.*even", {ROTARY: 7}),
    ("granitehybrid", "experts", UnsupportedModelError, "expert_gating_func.*2", {"expert_gating_func": 2}),
    ("granitehybrid", "experts", MetadataError, "expert_used_count.*7", {"expert_used_count": 7}),
    ("granitehybrid", "experts", MetadataError, "expert_used_count.*missing", {"expert_used_count": None}),
    ("granitehybrid", None, MetadataError, r"head_count_kv\[1\].*3.*0 or a divisor", {KV_HEADS: [0, 3]}),
    ("granitehybrid", None, MetadataError, "head_count_kv.*1 element", {KV_HEADS: [2]}),
    ("granitehybrid", None, MetadataError, "ssm.conv_kernel.*missing", {"ssm.conv_kernel": None}),
    ("granitehybrid", None, MetadataError, "ssm.group_count.*3.*divisor", {"ssm.group_count": 3}),
    ("granitehybrid", None, MetadataError, "ssm.inner_size.*100.*multiple", {"ssm.inner_size": 100}),
    ("granitehybrid", None, MetadataError, "logit_scale.*-1", {"logit_scale": -1.0}),
    ("granitehybrid", None, MetadataError, "another type.*rope.scaling.finetuned", {"rope.scaling.finetuned": 1}),
    ("falcon-h1", None, UnsupportedModelError, "falcon-h1.rope.scaling.type.*yarn", {SCALING: "yarn"}),
    ("falcon-h1", None, UnsupportedModelError, "falcon-h1.expert_count.*4", {"expert_count": 4}),
    ("falcon-h1", None, MetadataError, "feed_forward_length.*missing", {"feed_forward_length": None}),
    ("falcon-h1", None, MetadataError, r"head_count_kv\[1\].*0", {KV_HEADS: [2, 0]}),
    ("falcon-h1", None, MetadataError, r"head_count_kv\[0\].*got 3, expected a divisor", {KV_HEADS: 3}),
    ("falcon-h1", None, MetadataError, "rope.dimension_count.*even", {ROTARY: 7}),
    ("falcon-h1", None, MetadataError, "ssm.time_step_rank.*missing", {"ssm.time_step_rank": None}),
    ("falcon-h1", None, MetadataError, "ssm.group_count.*4.*divisor", {"ssm.group_count": 4}),
    ("falcon-h1", None, MetadataError, "ssm.inner_size.*100.*multiple", {"ssm.inner_size": 100}),
    ("lfm2", None, UnsupportedModelError, "lfm2.expert_count.*8", {"expert_count": 8}),
    ("lfm3", None, UnsupportedModelError, "lfm3.expert_count.*8", {"expert_count": 8}),
    ("lfm2", None, UnsupportedModelError, "lfm2.attention.sliding_window.*16", {"attention.sliding_window": 16}),
    ("lfm2moe", None, UnsupportedModelError, "lfm2moe.attention.sliding_window.*16", {"attention.sliding_window": 16}),
    ("lfm2", None, UnsupportedModelError, "lfm2.attention.causal.*False", {"attention.causal": False}),
    ("lfm3", None, UnsupportedModelError, "lfm3.rope.scaling.type.*yarn", {SCALING: "yarn"}),
    ("lfm2moe", None, UnsupportedModelError, "lfm2moe.expert_gating_func.*1", {"expert_gating_func": 1}),
    ("lfm2moe", None, UnsupportedModelError, "lfm2moe.expert_shared_count.*1", {"expert_shared_count": 1}),
    ("lfm2moe", None, UnsupportedModelError, "lfm2moe.expert_weights_norm.*False", {"expert_weights_norm": False}),
    ("lfm2moe", None, UnsupportedModelError, "lfm2moe.expert_weights_scale.*2.5", {"expert_weights_scale": 2.5}),
    ("lfm2moe", None, MetadataError, "lfm2moe.expert_count.*missing", {"expert_count": None}),
    ("lfm2moe", None, MetadataError, "lfm2moe.expert_used_count.*7.*1 to 6", {"expert_used_count": 7}),
    ("lfm2moe", None, MetadataError, "expert_feed_forward_length.*missing", {"expert_feed_forward_length": None}),
    ("lfm2moe", None, MetadataError, "leading_dense_block_count.*4", {"leading_dense_block_count": 4}),
    ("lfm2", None, MetadataError, "lfm2.feed_forward_length", {"feed_forward_length": 0}),
    ("lfm2", None, MetadataError, "lfm2.attention.head_count_kv.*missing", {KV_HEADS: None}),
    ("lfm2", None, MetadataError, r"lfm2.*head_count_kv\[1\].*3.*0 or a divisor", {KV_HEADS: [0, 3, 0]}),
    ("lfm2", None, MetadataError, "lfm2.attention.head_count_kv.*2 elements", {KV_HEADS: [0, 2]}),
    ("lfm2", None, MetadataError, "lfm2.attention.key_length.*even", {SIZE: 15}),
    ("lfm2", None, MetadataError, "lfm2.rope.dimension_count.*8.*head size", {ROTARY: 8}),
    ("lfm2", None, MetadataError, "lfm2.rope.freq_base.*missing", {"rope.freq_base": None}),
    ("lfm2", None, MetadataError, "lfm2.shortconv.l_cache.*missing", {"shortconv.l_cache": None}),
    ("lfm3", None, MetadataError, "lfm3.attention.sliding_window'.*missing", {"attention.sliding_window": None}),
    ("lfm3", None, MetadataError, "lfm3.*window_pattern.*1 element", {"attention.sliding_window_pattern": [True]}),
    ("lfm3", None, MetadataError, "another type.*window_pattern", {"attention.sliding_window_pattern": 6}),
    ("lfm3", None, MetadataError, "lfm3.rope.freq_base_swa.*missing", {"rope.freq_base_swa": None}),
    ("lfm3", None, MetadataError, "lfm3.rope.dimension_count_swa.*8", {"rope.dimension_count_swa": 8}),
    ("qwen35", "prediction", UnsupportedModelError, "nextn_predict_layers.*2", {"nextn_predict_layers": 2}),
    ("qwen35", None, UnsupportedModelError, "rope.scaling.type.*yarn", {SCALING: "yarn"}),
    ("qwen35moe", None, UnsupportedModelError, "expert_gating_func.*2", {"expert_gating_func": 2}),
    ("qwen35moe", None, MetadataError, "expert_used_count.*7", {"expert_used_count": 7}),
    ("qwen35moe", None, MetadataError, "shared.*missing", {"expert_shared_feed_forward_length": None}),
    ("qwen35", None, MetadataError, "feed_forward_length.*missing", {"feed_forward_length": None}),
    ("qwen35", None, MetadataError, "recurrent_layers.*2", {"attention.recurrent_layers": [True]}),
    (
        "qwen35",
        "interval",
        MetadataError,
        "recurrent_layers. or .*full_attention_interval",
        {"full_attention_interval": None},
    ),
    (
        "qwen35",
        "prediction",
        MetadataError,
        r"recurrent_layers\[2\].*attention block",
        {"attention.recurrent_layers": [True, False, True]},
    ),
    ("qwen35", None, MetadataError, r"head_count_kv\[1\].*0.*divisor", {KV_HEADS: [2, 0]}),
    ("qwen35", None, MetadataError, "head_count_kv.*missing", {KV_HEADS: None}),
    ("qwen35", None, MetadataError, "rope.dimension_count.*even", {ROTARY: 7}),
    ("qwen35", None, MetadataError, "rope.dimension_count.*missing", {ROTARY: None}),
    ("qwen35", None, MetadataError, "rope.freq_base.*missing", {"rope.freq_base": None}),
    ("qwen35", None, MetadataError, "ssm.group_count.*3.*divisor", {"ssm.group_count": 3}),
    ("qwen35", None, MetadataError, "ssm.inner_size.*60.*64", {"ssm.inner_size": 60}),
    ("qwen35", None, MetadataError, "ssm.conv_kernel.*missing", {"ssm.conv_kernel": None}),
]
"""Family, variant (None: the first), error, message, keys."""


@pytest.mark.parametrize("key", family.KEYS)
@pytest.mark.parametrize(("error", "message", "keys"), EVERY_FAMILY)
def test_keys_of_every_family(key: str, error: type[Exception], message: str, keys: dict[str, Any]):
    source = family.model(key, keys=keys)
    with pytest.raises(error, match=message) as raised:
        family.architecture(source)
    assert f"'{key}." in str(raised.value)


@pytest.mark.parametrize(("key", "name", "error", "message", "keys"), OWN)
def test_keys_that_do_not_fit(key: str, name: str | None, error: type[Exception], message: str, keys: dict[str, Any]):
    source = family.model(key, name, keys)
    with pytest.raises(error, match=message):
        family.architecture(source)


@pytest.mark.parametrize(
    ("key", "name", "keys"),
    [
        ("llama", "tied", {SCALING: "none", "expert_count": 0}),
        ("llama", "tied", {VALUE_SIZE: 16, KV_HEADS: [2, 2]}),
        ("llama", "tied", {SCALING: "linear", FACTOR: 1.0}),
        ("granitehybrid", "dense", {"expert_count": None, "expert_used_count": None}),
        ("granitehybrid", "dense", {SCALING: "yarn", "rope.freq_base": 5.0}),
        ("granitehybrid", "attention", {SCALING: "none", "ssm.inner_size": None}),
        (
            "granitehybrid",
            "defaults",
            {"residual_scale": 0.0, "embedding_scale": 0.0, "logit_scale": 0.0, "attention.scale": 0.0},
        ),
        ("granitehybrid", "attention", {KV_HEADS: [2, 2], "rope.scaling.finetuned": None}),
        ("falcon-h1", "norm", {SCALING: "none", "expert_count": 0}),
        ("falcon-h1", "norm", {KV_HEADS: [2, 2], ROTARY: 32}),
        ("lfm2", "tied", {SCALING: "none", "expert_count": 0, "attention.sliding_window": 0}),
        ("lfm2", "tied", {SIZE: 16, VALUE_SIZE: 16, ROTARY: 16}),
        ("lfm2", "attention", {KV_HEADS: [2, 2]}),
        ("lfm2moe", "dense-first", {"expert_gating_func": None, "expert_weights_norm": True}),
        ("lfm2moe", "dense-first", {"expert_weights_scale": 1.0}),
        ("lfm3", "partial-rope", {ROTARY: None, "rope.dimension_count_swa": None, "attention.causal": True}),
        ("qwen35", "tied", {"nextn_predict_layers": 0, "full_attention_interval": 1}),
        ("qwen35", "tied", {"attention.recurrent_layers": None, "full_attention_interval": 2}),
        ("qwen35", "tied", {"rope.dimension_sections": None, SCALING: "none"}),
        ("qwen35", "tied", {"rope.dimension_sections": [1, 1, 2, 0], KV_HEADS: [0, 2]}),
        ("qwen35moe", "experts", {"expert_gating_func": 1, "feed_forward_length": 7}),
    ],
)
def test_keys_that_change_nothing(key: str, name: str, keys: dict[str, Any]):
    np.testing.assert_array_equal(family.logits(family.model(key, name, keys)), family.logits(family.model(key, name)))


MISSING = {
    ("llama", "tied"): ("blk.1.attn_q.weight", "output_norm.weight", "token_embd.weight"),
    ("granitehybrid", "dense"): ("blk.0.ssm_dt.bias", "blk.0.ssm_a"),
    ("granitehybrid", "experts"): ("blk.1.ffn_up_shexp.weight",),
    ("falcon-h1", "norm"): ("blk.1.ffn_norm", "blk.0.ssm_d", "blk.0.attn_k.weight", "output_norm.weight"),
    ("lfm2", "tied"): ("blk.1.attn_q_norm.weight", "blk.0.shortconv.conv.weight", "token_embd_norm.weight"),
    ("lfm2moe", "dense-first"): ("blk.1.ffn_gate_inp.weight", "blk.2.ffn_down_exps.weight"),
    ("lfm3", "partial-rope"): ("blk.1.attn_gate.weight", "blk.0.post_ffw_norm.weight", "token_embd.weight"),
    ("qwen35", "tied"): ("blk.0.ssm_dt.bias", "blk.1.attn_q_norm.weight"),
    ("qwen35", "prediction"): ("blk.2.nextn.hnorm.weight",),
    ("qwen35moe", "experts"): ("blk.1.ffn_gate_inp_shexp.weight",),
}
OF_ANOTHER_VARIANT = {
    ("llama", "tied"): ("blk.0.attn_q_norm.weight", "blk.1.ffn_gate_exps.weight", "cls.weight"),
    ("granitehybrid", "dense"): ("blk.1.attn_q_norm.weight", "blk.0.ffn_gate_exps.weight", "rope_freqs.weight"),
    ("falcon-h1", "norm"): ("blk.1.attn_q_norm.weight", "blk.0.ffn_norm.weight", "rope_freqs.weight"),
    ("lfm2", "tied"): ("blk.0.attn_q.weight", "blk.0.shortconv.in_proj.bias", "blk.1.attn_gate.weight"),
    ("lfm2", "wide-heads"): ("blk.1.post_attention_norm.weight", "blk.1.attn_output.bias"),
    ("lfm2moe", "dense-first"): ("blk.0.ffn_gate_exps.weight", "blk.1.ffn_up_shexp.weight"),
    ("lfm3", "partial-rope"): ("blk.1.attn_q.bias",),
    ("qwen35", "tied"): ("blk.1.attn_q.bias", "blk.0.ffn_gate_exps.weight", "blk.1.nextn.enorm.weight"),
}


@pytest.mark.parametrize(("key", "name", "tensor"), [(*names, t) for names, ts in MISSING.items() for t in ts])
def test_a_missing_tensor_is_named(key: str, name: str, tensor: str):
    with pytest.raises(TensorError, match=tensor):
        family.record(family.changed(family.model(key, name), {}, without=tensor))


@pytest.mark.parametrize(
    ("key", "name", "tensor"), [(*names, t) for names, ts in OF_ANOTHER_VARIANT.items() for t in ts]
)
def test_a_tensor_of_another_variant_is_named(key: str, name: str, tensor: str):
    with pytest.raises(TensorError, match=tensor):
        family.record(family.changed(family.model(key, name), {tensor: np.ones((4, 4), np.float32)}))


def test_a_second_last_norm_is_refused():
    source = family.changed(family.model("lfm2", "tied"), {"output_norm.weight": np.ones(64, np.float32)})
    with pytest.raises(TensorError, match="output_norm"):
        family.record(source)


@pytest.mark.parametrize("key", family.KEYS)
def test_embeddings_that_are_no_matrix_are_refused(key: str):
    source = family.changed(family.model(key), {"token_embd.weight": np.ones(64, np.float32)})
    with pytest.raises(TensorError, match=r"token_embd\.weight"):
        family.architecture(source)
