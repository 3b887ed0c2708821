"""The LFM plugin: its variants run, every term matters, and what it does not know is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from direct_equations import Direct
from kinetic_arch_lfm.lfm2 import Lfm2, Lfm2Moe
from kinetic_arch_lfm.lfm3 import Lfm3

from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError
from kinetic_core.gguf import MemoryTensors, read_tensor
from kinetic_core.interfaces import ArchitectureCapabilities, HeadRequest, LoadOptions, RowBatch, SequenceRows
from kinetic_core.plugins import load_registry
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model

FAMILIES = {family.key: family for family in (Lfm2, Lfm2Moe, Lfm3)}
VARIANTS = {(key, variant.name): variant for key, family in FAMILIES.items() for variant in family.tiny()}
TOKENS = np.random.default_rng(5).integers(0, 100, 24).astype(np.int32)
every_variant = pytest.mark.parametrize(("key", "name"), VARIANTS, ids=["-".join(names) for names in VARIANTS])


def model(key: str, name: str, **keys: Any) -> MemoryTensors:
    """A random model of a tiny variant with some keys changed (dots as double underscores); None leaves one out."""
    source = random_model(key, VARIANTS[key, name])
    metadata = dict(source.metadata.raw)
    for changed, value in keys.items():
        full = f"{key}." + changed.replace("__", ".")
        metadata[full] = value
        if value is None:
            del metadata[full]
    return MemoryTensors(metadata, tensors(source))


def tensors(source: MemoryTensors) -> dict[str, np.ndarray]:
    return {name: read_tensor(source, name) for name in source.tensors}


def record(source: MemoryTensors) -> Any:
    key = source.metadata.get_str("general.architecture")
    return record_program(FAMILIES[key](source), FullHead(), source)


def logits(source: MemoryTensors) -> np.ndarray:
    n = len(TOKENS)
    options = LoadOptions(kv_type="f32", n_slots=1, max_outputs=n)
    executable = ReferenceBackend().load(record(source), source, options)
    sequence = SequenceRows(0, 0, n, np.zeros(1, np.int32), 0)
    heads = [HeadRequest(row, None) for row in range(n)]
    executable.run(RowBatch(TOKENS, np.arange(n, dtype=np.int32), (sequence,), heads))
    return np.array([executable.logits(row) for row in range(n)])


def expected_logits(source: MemoryTensors) -> np.ndarray:
    meta = source.metadata.prefixed(source.metadata.get_str("general.architecture"))
    return Direct(tensors(source), {key: source.metadata.raw[meta.prefix + key] for key in meta}).logits(TOKENS)


@every_variant
def test_every_variant_computes_the_equations(key: str, name: str):
    source = model(key, name)
    expected = expected_logits(source)
    np.testing.assert_allclose(logits(source), expected, atol=1e-4 * expected.std())


@every_variant
def test_every_tensor_moves_the_logits(key: str, name: str):
    """Shuffled: a factor would vanish in the norm that follows most of them."""
    source = model(key, name)
    base = logits(source)
    rng = np.random.default_rng(2)
    for changed in source.tensors:
        other = tensors(source)
        other[changed] = rng.permutation(other[changed].reshape(-1)).reshape(other[changed].shape)
        moved = logits(MemoryTensors(source.metadata.raw, other))
        assert np.sqrt(np.mean((moved - base) ** 2)) > 0.002 * base.std(), changed


@every_variant
def test_sizes_and_states(key: str, name: str):
    source = model(key, name)
    architecture, program = FAMILIES[key](source), record(source)
    assert architecture.context_length == 1024 and architecture.vocab_size == 100
    convolutions = sum(name.endswith("shortconv.conv.weight") for name in source.tensors)
    assert len(program.states) == convolutions and len(program.kv_layers) == architecture.n_layers - convolutions
    assert all(state.shape == (6 if key == "lfm3" else 2, 64) for state in program.states)


def test_capabilities():
    assert Lfm2.capabilities == ArchitectureCapabilities(has_recurrent_state=True)
    assert Lfm2Moe.capabilities == ArchitectureCapabilities(has_recurrent_state=True, has_experts=True)
    assert Lfm3.capabilities == ArchitectureCapabilities(has_recurrent_state=True, has_sliding_window=True)


def test_only_sliding_blocks_have_a_window():
    windows = [layer.window for layer in record(model("lfm3", "partial-rope")).kv_layers]
    assert windows == [6, None]
    assert [layer.window for layer in record(model("lfm3", "full")).kv_layers] == [None]


def test_without_a_pattern_no_block_slides():
    source = model("lfm3", "partial-rope", attention__sliding_window_pattern=None)
    assert [layer.window for layer in record(source).kv_layers] == [None, None]
    expected = expected_logits(source)
    np.testing.assert_allclose(logits(source), expected, atol=1e-4 * expected.std())


def test_factors_of_1e30_stop_their_pairs():
    """The angle vanishes, which is not rope over a part of the head: the exponents count the whole head."""
    source = model("lfm3", "partial-rope")
    stored = tensors(source)
    stored["rope_freqs.weight"] = np.array([1, 1, *[1e30] * 6], np.float32)
    source = MemoryTensors(source.metadata.raw, stored)
    expected = expected_logits(source)
    np.testing.assert_allclose(logits(source), expected, atol=1e-4 * expected.std())


def test_one_value_means_the_same_as_one_per_block():
    single, listed = model("lfm2", "attention"), model("lfm2", "attention", attention__head_count_kv=[2, 2])
    assert isinstance(single.metadata.raw["lfm2.attention.head_count_kv"], int)
    np.testing.assert_array_equal(logits(single), logits(listed))


def test_the_plugin_registers_the_families():
    registry = load_registry()
    assert {key: registry.architecture_for(key) for key in FAMILIES} == FAMILIES
    assert registry.problems == ()


REFUSED = [
    (UnsupportedModelError, "lfm2.expert_count.*8", "lfm2", {"expert_count": 8}),
    (UnsupportedModelError, "lfm3.expert_count.*8", "lfm3", {"expert_count": 8}),
    (UnsupportedModelError, "lfm2.attention.sliding_window.*16", "lfm2", {"attention__sliding_window": 16}),
    (UnsupportedModelError, "lfm2moe.attention.sliding_window.*16", "lfm2moe", {"attention__sliding_window": 16}),
    (UnsupportedModelError, "lfm2.attention.causal.*False", "lfm2", {"attention__causal": False}),
    (UnsupportedModelError, "lfm3.rope.scaling.type.*yarn", "lfm3", {"rope__scaling__type": "yarn"}),
    (UnsupportedModelError, "lfm2moe.expert_gating_func.*1", "lfm2moe", {"expert_gating_func": 1}),
    (UnsupportedModelError, "lfm2moe.expert_shared_count.*1", "lfm2moe", {"expert_shared_count": 1}),
    (UnsupportedModelError, "lfm2moe.expert_weights_norm.*False", "lfm2moe", {"expert_weights_norm": False}),
    (UnsupportedModelError, "lfm2moe.expert_weights_scale.*2.5", "lfm2moe", {"expert_weights_scale": 2.5}),
    (MetadataError, "lfm2moe.expert_count.*missing", "lfm2moe", {"expert_count": None}),
    (MetadataError, "lfm2moe.expert_used_count.*7.*1 to 6", "lfm2moe", {"expert_used_count": 7}),
    (MetadataError, "lfm2moe.expert_feed_forward_length.*missing", "lfm2moe", {"expert_feed_forward_length": None}),
    (MetadataError, "lfm2moe.leading_dense_block_count.*4", "lfm2moe", {"leading_dense_block_count": 4}),
    (MetadataError, "block_count does not match.*lfm2.block_count", "lfm2", {"block_count": 100000}),
    (MetadataError, "lfm2.context_length.*missing", "lfm2", {"context_length": None}),
    (MetadataError, "lfm2.feed_forward_length", "lfm2", {"feed_forward_length": 0}),
    (MetadataError, "lfm2.attention.head_count'", "lfm2", {"attention__head_count": 0}),
    (MetadataError, "lfm2.attention.head_count_kv.*missing", "lfm2", {"attention__head_count_kv": None}),
    (MetadataError, "lfm2.attention.head_count_kv.*3.*divisor", "lfm2", {"attention__head_count_kv": [0, 3, 0]}),
    (MetadataError, "lfm2.attention.head_count_kv.*2 elements", "lfm2", {"attention__head_count_kv": [0, 2]}),
    (MetadataError, "lfm2.attention.layer_norm_rms_epsilon", "lfm2", {"attention__layer_norm_rms_epsilon": -1.0}),
    (MetadataError, "lfm2.attention.value_length.*8", "lfm2", {"attention__value_length": 8}),
    (MetadataError, "lfm2.attention.key_length.*even", "lfm2", {"attention__key_length": 15}),
    (MetadataError, "lfm2.embedding_length.*multiple of 6", "lfm2", {"attention__head_count": 6}),
    (MetadataError, "lfm2.rope.dimension_count.*8.*head size", "lfm2", {"rope__dimension_count": 8}),
    (MetadataError, "lfm2.rope.freq_base.*missing", "lfm2", {"rope__freq_base": None}),
    (MetadataError, "lfm2.shortconv.l_cache.*missing", "lfm2", {"shortconv__l_cache": None}),
    (MetadataError, "lfm3.attention.sliding_window'.*missing", "lfm3", {"attention__sliding_window": None}),
    (MetadataError, "lfm3.attention.sliding_window_pattern", "lfm3", {"attention__sliding_window_pattern": [True]}),
    (MetadataError, "lfm3.attention.sliding_window_pattern", "lfm3", {"attention__sliding_window_pattern": 6}),
    (MetadataError, "lfm3.rope.freq_base_swa.*missing", "lfm3", {"rope__freq_base_swa": None}),
    (MetadataError, "lfm3.rope.dimension_count_swa.*8", "lfm3", {"rope__dimension_count_swa": 8}),
]
FIRST = {key: family.tiny()[0].name for key, family in FAMILIES.items()}


@pytest.mark.parametrize(("error", "message", "key", "keys"), REFUSED)
def test_keys_that_do_not_fit_are_refused_by_name(error, message: str, key: str, keys: dict[str, Any]):
    with pytest.raises(error, match=message):
        FAMILIES[key](model(key, FIRST[key], **keys))


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("lfm2", {"rope__scaling__type": "none", "expert_count": 0, "attention__sliding_window": 0}),
        ("lfm2", {"attention__key_length": 16, "attention__value_length": 16, "rope__dimension_count": 16}),
        ("lfm2moe", {"expert_gating_func": None, "expert_weights_norm": True, "expert_weights_scale": 1.0}),
        ("lfm3", {"rope__dimension_count": None, "rope__dimension_count_swa": None, "attention__causal": True}),
    ],
)
def test_keys_that_change_nothing_are_accepted(key: str, keys: dict[str, Any]):
    np.testing.assert_array_equal(logits(model(key, FIRST[key], **keys)), logits(model(key, FIRST[key])))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("lfm2", "blk.1.attn_q_norm.weight"),
        ("lfm2", "blk.0.shortconv.conv.weight"),
        ("lfm2", "token_embd_norm.weight"),
        ("lfm2", "token_embd.weight"),
        ("lfm2moe", "blk.1.ffn_gate_inp.weight"),
        ("lfm2moe", "blk.2.ffn_down_exps.weight"),
        ("lfm3", "blk.1.attn_gate.weight"),
        ("lfm3", "blk.0.post_ffw_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(key: str, name: str):
    source = model(key, FIRST[key])
    kept = {n: array for n, array in tensors(source).items() if n != name}
    with pytest.raises(TensorError, match=name):
        record(MemoryTensors(source.metadata.raw, kept))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("lfm2", "blk.0.attn_q.weight"),
        ("lfm2", "blk.0.shortconv.in_proj.bias"),
        ("lfm2", "blk.1.attn_gate.weight"),
        ("lfm2", "blk.1.post_attention_norm.weight"),
        ("lfm2", "output_norm.weight"),
        ("lfm2moe", "blk.0.ffn_gate_exps.weight"),
        ("lfm2moe", "blk.1.ffn_up_shexp.weight"),
        ("lfm3", "blk.1.attn_q.bias"),
    ],
)
def test_a_tensor_of_another_variant_is_named(key: str, name: str):
    source = model(key, FIRST[key])
    more = {**tensors(source), name: np.ones(64, np.float32)}
    with pytest.raises(TensorError, match="token_embd_norm" if name == "output_norm.weight" else name):
        record(MemoryTensors(source.metadata.raw, more))


def test_embeddings_that_are_no_matrix_are_refused():
    source = model("lfm2", "tied")
    other = {**tensors(source), "token_embd.weight": np.ones(64, np.float32)}
    with pytest.raises(TensorError, match=r"token_embd\.weight"):
        Lfm2(MemoryTensors(source.metadata.raw, other))
