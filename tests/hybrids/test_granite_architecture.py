"""The Granite plugin: its variants run, every term matters, and what it does not know is refused by name."""

from __future__ import annotations

from typing import Any

import equations as eq
import numpy as np
import pytest
from kinetic_arch_granite.architecture import GraniteHybrid

from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError
from kinetic_core.gguf import MemoryTensors
from kinetic_core.plugins import load_registry

KEY = "granitehybrid"
VARIANTS = {variant.name: variant for variant in GraniteHybrid.tiny()}


def model(name: str, keys: dict[str, Any] | None = None) -> MemoryTensors:
    return eq.model(KEY, VARIANTS[name], keys)


def logits(source: MemoryTensors) -> np.ndarray:
    return eq.logits(GraniteHybrid, source)


def direct(name: str) -> np.ndarray:
    """The family's equations, read from the variant's own description."""
    meta = VARIANTS[name].metadata
    t = {tensor: array.astype(float) for tensor, array in eq.tensors(model(name)).items()}
    ssm = {key.removeprefix("ssm."): value for key, value in meta.items() if key.startswith("ssm.")}
    kv_heads = meta["attention.head_count_kv"]
    residual = meta.get("residual_scale", 1.0)
    x = t["token_embd.weight"][eq.TOKENS] * meta.get("embedding_scale", 1.0)
    for layer in range(2):
        block, n = f"blk.{layer}.", kv_heads[layer] if isinstance(kv_heads, list) else kv_heads
        y = eq.rms(x, t[block + "attn_norm.weight"])
        if n:
            q, k, v = (
                eq.linear(t, y, block + f"attn_{part}").reshape(eq.N, heads, 16)
                for part, heads in (("q", 4), ("k", n), ("v", n))
            )
            if meta.get("rope.scaling.finetuned", True):
                base, dims = meta.get("rope.freq_base", 10000.0), meta.get("rope.dimension_count", 16)
                q, k = (eq.rope(part, base, dims, adjacent=True) for part in (q, k))
            mixed = eq.attention(q, k, v, meta.get("attention.scale", 0.25))
            x = x + residual * eq.linear(t, mixed, block + "attn_output")
        else:
            x = x + residual * eq.mamba2(t, block, y, ssm)
        y = eq.rms(x, t[block + "ffn_norm.weight"])
        if meta.get("expert_count", 0):
            mixed = eq.experts(t, block, y, meta["expert_used_count"])
            if "expert_shared_feed_forward_length" in meta:
                mixed = mixed + eq.feed_forward(t, block, y, "_shexp")
        else:
            mixed = eq.feed_forward(t, block, y)
        x = x + residual * mixed
    output = t.get("output.weight", t["token_embd.weight"])
    return eq.rms(x, t["output_norm.weight"]) @ output.T / meta.get("logit_scale", 1.0)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_computes_the_equations(name: str):
    expected = direct(name)
    np.testing.assert_allclose(logits(model(name)), expected, atol=1e-4 * expected.std())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_moves_the_logits(name: str):
    source = model(name)
    base = logits(source)
    for changed in source.tensors:
        other = eq.tensors(source)
        other[changed] = other[changed] * np.float32(0.5)
        moved = logits(MemoryTensors(source.metadata.raw, other))
        assert np.sqrt(np.mean((moved - base) ** 2)) > 0.003 * base.std(), changed


@pytest.mark.parametrize("name", VARIANTS)
def test_capabilities_and_sizes(name: str):
    architecture = GraniteHybrid(model(name))
    assert architecture.context_length == 1024 and architecture.vocab_size == 100
    program = eq.record(GraniteHybrid, model(name))
    n_mamba = sum(not heads for heads in architecture.kv_heads)
    assert len(program.kv_layers) == 2 - n_mamba and len(program.states) == 2 * n_mamba
    assert GraniteHybrid.capabilities.has_recurrent_state and GraniteHybrid.capabilities.has_experts


def test_variants_cover_the_kinds_of_files():
    described = [set(variant.tensors) for variant in VARIANTS.values()]
    for tensor in ("output.weight", "blk.0.ssm_in.bias", "blk.0.ssm_norm.weight", "blk.0.ffn_gate_shexp.weight"):
        assert any(tensor in names for names in described) and any(tensor not in names for names in described)


def test_rope_factors_divide_the_angles():
    plain = model("attention")
    factors = {**eq.tensors(plain), "rope_freqs.weight": np.full(6, 3.0, np.float32)}
    got = logits(MemoryTensors(plain.metadata.raw, factors))
    assert np.abs(got - logits(plain)).max() > 0.01 * got.std()


def test_the_plugin_registers_the_family():
    registry = load_registry()
    assert registry.architecture_for(KEY) is GraniteHybrid
    assert registry.problems == ()


@pytest.mark.parametrize(
    ("name", "error", "message", "keys"),
    [
        ("attention", UnsupportedModelError, "rope.scaling.type.*yarn", {"rope.scaling.type": "yarn"}),
        ("experts", UnsupportedModelError, "expert_gating_func.*2", {"expert_gating_func": 2}),
        ("experts", MetadataError, "expert_used_count.*7", {"expert_used_count": 7}),
        ("experts", MetadataError, "expert_used_count.*missing", {"expert_used_count": None}),
        ("dense", MetadataError, "block_count does not match", {"block_count": 3}),
        ("dense", MetadataError, "context_length.*missing", {"context_length": None}),
        ("dense", MetadataError, r"head_count_kv\[1\].*3.*divisor", {"attention.head_count_kv": [0, 3]}),
        ("dense", MetadataError, "head_count_kv.*1 element", {"attention.head_count_kv": [2]}),
        ("dense", MetadataError, "value_length.*8", {"attention.value_length": 8}),
        ("dense", MetadataError, "ssm.conv_kernel.*missing", {"ssm.conv_kernel": None}),
        ("dense", MetadataError, "ssm.group_count.*3.*divisor", {"ssm.group_count": 3}),
        ("dense", MetadataError, "ssm.inner_size.*100.*multiple", {"ssm.inner_size": 100}),
        ("dense", MetadataError, "logit_scale.*-1", {"logit_scale": -1.0}),
        ("dense", MetadataError, "another type.*rope.scaling.finetuned", {"rope.scaling.finetuned": 1}),
        ("mamba", MetadataError, "embedding_length.*multiple of 5", {"attention.head_count": 5}),
        ("attention", MetadataError, "rope.dimension_count.*even", {"rope.dimension_count": 7}),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(
    name: str, error: type[Exception], message: str, keys: dict[str, Any]
):
    with pytest.raises(error, match=message):
        GraniteHybrid(model(name, keys))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("dense", {"expert_count": None, "expert_used_count": None}),
        ("dense", {"rope.scaling.type": "yarn", "rope.freq_base": 5.0}),
        ("attention", {"rope.scaling.type": "none", "ssm.inner_size": None}),
        ("defaults", {"residual_scale": 0.0, "embedding_scale": 0.0, "logit_scale": 0.0, "attention.scale": 0.0}),
        ("attention", {"attention.head_count_kv": [2, 2], "rope.scaling.finetuned": None}),
    ],
)
def test_keys_that_change_nothing_are_accepted(name: str, keys: dict[str, Any]):
    np.testing.assert_array_equal(logits(model(name, keys)), logits(model(name)))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("dense", "blk.0.ssm_dt.bias"), ("dense", "blk.0.ssm_a"), ("experts", "blk.1.ffn_up_shexp.weight")],
)
def test_a_missing_tensor_is_named(name: str, tensor: str):
    source = model(name)
    kept = {n: array for n, array in eq.tensors(source).items() if n != tensor}
    with pytest.raises(TensorError, match=tensor):
        eq.record(GraniteHybrid, MemoryTensors(source.metadata.raw, kept))


@pytest.mark.parametrize("tensor", ["blk.1.attn_q_norm.weight", "blk.0.ffn_gate_exps.weight", "rope_freqs.weight"])
def test_a_tensor_of_another_variant_is_named(tensor: str):
    source = model("dense")
    more = {**eq.tensors(source), tensor: np.ones((4, 4), np.float32)}
    with pytest.raises(TensorError, match=tensor):
        eq.record(GraniteHybrid, MemoryTensors(source.metadata.raw, more))
