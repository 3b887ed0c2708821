"""The Falcon-H1 plugin: its variants run, every term matters, and what it does not know is refused by name."""

from __future__ import annotations

from typing import Any

import equations as eq
import numpy as np
import pytest
from kinetic_arch_falconh1.architecture import FalconH1

from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError
from kinetic_core.gguf import MemoryTensors
from kinetic_core.interfaces import ArchitectureCapabilities
from kinetic_core.plugins import load_registry

KEY = "falcon-h1"
VARIANTS = {variant.name: variant for variant in FalconH1.tiny()}


def model(name: str, keys: dict[str, Any] | None = None) -> MemoryTensors:
    return eq.model(KEY, VARIANTS[name], keys)


def logits(source: MemoryTensors) -> np.ndarray:
    return eq.logits(FalconH1, source)


def direct(name: str) -> np.ndarray:
    """The family's equations, read from the variant's own description."""
    meta = VARIANTS[name].metadata
    t = {tensor: array.astype(float) for tensor, array in eq.tensors(model(name)).items()}
    ssm = {key.removeprefix("ssm."): value for key, value in meta.items() if key.startswith("ssm.")}
    kv_heads, head_dim = meta["attention.head_count_kv"], meta.get("attention.key_length", 16)
    x = t["token_embd.weight"][eq.TOKENS]
    for layer in range(2):
        block, n = f"blk.{layer}.", kv_heads[layer] if isinstance(kv_heads, list) else kv_heads
        y = eq.rms(x, t[block + "attn_norm.weight"])
        q, k, v = (
            eq.linear(t, y, block + f"attn_{part}").reshape(eq.N, heads, head_dim)
            for part, heads in (("q", 4), ("k", n), ("v", n))
        )
        q, k = (eq.rope(part, meta.get("rope.freq_base", 10000.0), head_dim, adjacent=False) for part in (q, k))
        mixed = eq.linear(t, eq.attention(q, k, v, head_dim**-0.5), block + "attn_output")
        x = x + mixed + eq.mamba2(t, block, y, ssm)
        norm = t[block + "ffn_norm"] if block + "ffn_norm" in t else t[block + "ffn_norm.weight"]
        x = x + eq.feed_forward(t, block, eq.rms(x, norm))
    return eq.rms(x, t["output_norm.weight"]) @ t.get("output.weight", t["token_embd.weight"]).T


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
    architecture = FalconH1(model(name))
    assert architecture.context_length == 1024 and architecture.vocab_size == 100
    program = eq.record(FalconH1, model(name))
    assert len(program.kv_layers) == 2 and len(program.states) == 4
    assert FalconH1.capabilities == ArchitectureCapabilities(has_recurrent_state=True)


def test_variants_cover_the_kinds_of_files():
    described = [set(variant.tensors) for variant in VARIANTS.values()]
    for tensor in ("output.weight", "blk.0.attn_q.bias", "blk.0.ssm_norm.weight", "blk.0.ffn_norm"):
        assert any(tensor in names for names in described) and any(tensor not in names for names in described)


def test_the_plugin_registers_the_family():
    registry = load_registry()
    assert registry.architecture_for(KEY) is FalconH1
    assert registry.problems == ()


@pytest.mark.parametrize(
    ("error", "message", "keys"),
    [
        (UnsupportedModelError, "falcon-h1.rope.scaling.type.*yarn", {"rope.scaling.type": "yarn"}),
        (UnsupportedModelError, "falcon-h1.expert_count.*4", {"expert_count": 4}),
        (MetadataError, "block_count does not match", {"block_count": 3}),
        (MetadataError, "feed_forward_length.*missing", {"feed_forward_length": None}),
        (MetadataError, r"head_count_kv\[1\].*0", {"attention.head_count_kv": [2, 0]}),
        (MetadataError, r"head_count_kv\[0\].*3.*divisor", {"attention.head_count_kv": 3}),
        (MetadataError, "value_length.*8", {"attention.value_length": 8}),
        (MetadataError, "rope.dimension_count.*even", {"rope.dimension_count": 7}),
        (MetadataError, "ssm.time_step_rank.*missing", {"ssm.time_step_rank": None}),
        (MetadataError, "ssm.group_count.*4.*divisor", {"ssm.group_count": 4}),
        (MetadataError, "ssm.inner_size.*100.*multiple", {"ssm.inner_size": 100}),
        (
            MetadataError,
            "embedding_length.*multiple of 5",
            {
                "attention.head_count": 5,
                "attention.head_count_kv": 5,
                "attention.key_length": None,
                "attention.value_length": None,
            },
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(error: type[Exception], message: str, keys: dict[str, Any]):
    with pytest.raises(error, match=message):
        FalconH1(model("norm", keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"expert_count": 0},
        {"rope.scaling.type": "none"},
        {"attention.head_count_kv": [2, 2]},
        {"rope.dimension_count": 32},
    ],
)
def test_keys_that_change_nothing_are_accepted(keys: dict[str, Any]):
    np.testing.assert_array_equal(logits(model("norm", keys)), logits(model("norm")))


@pytest.mark.parametrize("tensor", ["blk.1.ffn_norm", "blk.0.ssm_d", "blk.0.attn_k.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(tensor: str):
    source = model("norm")
    kept = {n: array for n, array in eq.tensors(source).items() if n != tensor}
    with pytest.raises(TensorError, match=tensor):
        eq.record(FalconH1, MemoryTensors(source.metadata.raw, kept))


@pytest.mark.parametrize("tensor", ["blk.1.attn_q_norm.weight", "blk.0.ffn_norm.weight", "rope_freqs.weight"])
def test_a_tensor_of_another_variant_is_named(tensor: str):
    source = model("norm")
    more = {**eq.tensors(source), tensor: np.ones((4, 4), np.float32)}
    with pytest.raises(TensorError, match=tensor):
        eq.record(FalconH1, MemoryTensors(source.metadata.raw, more))
