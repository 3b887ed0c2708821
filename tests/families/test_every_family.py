"""Every variant of every family computes its equations, every tensor matters, and what it declares is what it shows."""

from __future__ import annotations

import direct
import family
import numpy as np
import pytest

from kinetic_core.gguf import MemoryTensors
from kinetic_core.interfaces import ArchitectureCapabilities

every_variant = pytest.mark.parametrize(
    ("key", "name"), family.VARIANTS, ids=["-".join(names) for names in family.VARIANTS]
)
narrow = [names for names, variant in family.VARIANTS.items() if variant.metadata["embedding_length"] < 256]
"""Wide rows are there for formats with large blocks; their equations are those of the others."""
every_narrow_variant = pytest.mark.parametrize(("key", "name"), narrow, ids=["-".join(names) for names in narrow])
predicting = pytest.mark.parametrize(
    ("key", "name"), family.PREDICTING, ids=["-".join(names) for names in family.PREDICTING]
)


def rolled(source: MemoryTensors, name: str) -> MemoryTensors:
    """With a tensor's elements moved on by one: a factor would vanish in the norm that follows most of them."""
    return family.changed(source, {name: np.roll(family.tensors(source)[name], 1)})


def hidden(source: MemoryTensors) -> np.ndarray:
    """Something in the place of the trunk's hidden states before each token but the first."""
    width = source.tensors["token_embd.weight"].shape[1]
    return np.random.default_rng(3).standard_normal((family.N - 1, width)).astype(np.float32)


def moves(moved: np.ndarray, base: np.ndarray) -> bool:
    return bool(np.sqrt(np.mean((moved - base) ** 2)) > 0.002 * base.std())


@every_variant
def test_every_variant_computes_the_equations(key: str, name: str):
    source = family.model(key, name)
    expected = direct.logits(source)
    np.testing.assert_allclose(family.logits(source), expected, atol=1e-4 * expected.std())


@predicting
def test_every_prediction_block_computes_the_equations(key: str, name: str):
    source = family.model(key, name)
    got = family.predicted(source, hidden(source))
    for values, expected in zip(got, direct.qwen35_prediction(*direct.described(source), hidden(source)), strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-4 * expected.std())


@every_narrow_variant
def test_every_tensor_of_the_trunk_moves_the_logits(key: str, name: str):
    source = family.model(key, name)
    trunk, base = family.architecture(source).n_layers, family.logits(source)
    for tensor in source.tensors:
        if not tensor.startswith(f"blk.{trunk}."):
            assert moves(family.logits(rolled(source, tensor)), base), tensor


@predicting
def test_every_tensor_of_the_prediction_block_moves_its_logits_and_no_others(key: str, name: str):
    source = family.model(key, name)
    trunk, base = family.architecture(source).n_layers, family.logits(source)
    base_predicted, _ = family.predicted(source, hidden(source))
    own = [tensor for tensor in source.tensors if tensor.startswith(f"blk.{trunk}.")]
    assert own
    for tensor in own:
        other = rolled(source, tensor)
        assert family.logits(other).tobytes() == base.tobytes(), tensor
        assert moves(family.predicted(other, hidden(source))[0], base_predicted), tensor


@every_variant
def test_sizes(key: str, name: str):
    """Which blocks have attention and which have states is told by the tensors."""
    source = family.model(key, name)
    architecture, program = family.architecture(source), family.record(source)
    assert architecture.context_length == 1024 and architecture.vocab_size == 100
    assert len(program.kv_layers) == sum(tensor.endswith("attn_q.weight") for tensor in source.tensors)
    convolutions = sum(tensor.endswith(("shortconv.conv.weight", "ssm_conv1d.weight")) for tensor in source.tensors)
    recurrences = sum(tensor.endswith("ssm_a") for tensor in source.tensors)
    assert len(program.states) == convolutions + recurrences
    predicts = (key, name) in family.PREDICTING
    assert (program.prediction is not None) == predicts == architecture.has_prediction
    assert [layer.first_position for layer in program.kv_layers if layer.first_position] == [1] * predicts


CAPABILITIES = {
    "llama": ArchitectureCapabilities(),
    "granitehybrid": ArchitectureCapabilities(has_recurrent_state=True, has_experts=True),
    "falcon-h1": ArchitectureCapabilities(has_recurrent_state=True),
    "lfm2": ArchitectureCapabilities(has_recurrent_state=True),
    "lfm2moe": ArchitectureCapabilities(has_recurrent_state=True, has_experts=True),
    "lfm3": ArchitectureCapabilities(has_recurrent_state=True, has_sliding_window=True),
    "qwen35": ArchitectureCapabilities(has_recurrent_state=True, has_prediction_block=True),
    "qwen35moe": ArchitectureCapabilities(has_recurrent_state=True, has_prediction_block=True, has_experts=True),
}


@pytest.mark.parametrize("key", family.KEYS)
def test_plugins_register_the_families(key: str):
    kind = family.FAMILIES[key]
    assert kind.key == key and kind.capabilities == CAPABILITIES[key]
    assert family.REGISTRY.problems == ()


@pytest.mark.parametrize(
    ("keys", "tensor"),
    [
        (("llama",), "output.weight"),
        (("llama",), "rope_freqs.weight"),
        (("llama",), "blk.0.attn_q.bias"),
        (("granitehybrid",), "output.weight"),
        (("granitehybrid",), "blk.0.ssm_in.bias"),
        (("granitehybrid",), "blk.0.ssm_norm.weight"),
        (("granitehybrid",), "blk.0.ffn_gate_shexp.weight"),
        (("falcon-h1",), "output.weight"),
        (("falcon-h1",), "blk.0.attn_q.bias"),
        (("falcon-h1",), "blk.0.ssm_norm.weight"),
        (("falcon-h1",), "blk.0.ffn_norm"),
        (("lfm2", "lfm3"), "output.weight"),
        (("lfm2", "lfm3"), "rope_freqs.weight"),
        (("lfm2",), "output_norm.weight"),
        (("lfm2moe",), "blk.1.exp_probs_b.bias"),
        (("qwen35", "qwen35moe"), "output.weight"),
        (("qwen35",), "blk.2.nextn.embed_tokens.weight"),
    ],
)
def test_variants_cover_files_with_and_without(keys: tuple[str, ...], tensor: str):
    for key in keys:
        shown = [tensor in variant.tensors for variant in family.FAMILIES[key].tiny()]
        assert any(shown) and not all(shown), key
