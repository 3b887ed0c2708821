"""The Llama plugin: its variants run, every term matters, and what it does not know is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from kinetic_arch_llama.architecture import Llama

from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError
from kinetic_core.gguf import MemoryTensors, read_tensor
from kinetic_core.interfaces import ArchitectureCapabilities, HeadRequest, LoadOptions, RowBatch, SequenceRows
from kinetic_core.plugins import load_registry
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model

VARIANTS = {variant.name: variant for variant in Llama.tiny()}
TOKENS = np.random.default_rng(5).integers(0, 100, 24).astype(np.int32)


def model(name: str, **keys: Any) -> MemoryTensors:
    """A random model of a tiny variant with some keys changed (dots as double underscores); None leaves one out."""
    source = random_model("llama", VARIANTS[name])
    metadata = dict(source.metadata.raw)
    for key, value in keys.items():
        full = "llama." + key.replace("__", ".")
        metadata[full] = value
        if value is None:
            del metadata[full]
    return MemoryTensors(metadata, tensors(source))


def tensors(source: MemoryTensors) -> dict[str, np.ndarray]:
    return {name: read_tensor(source, name) for name in source.tensors}


def logits(source: MemoryTensors) -> np.ndarray:
    n = len(TOKENS)
    program = record_program(Llama(source), FullHead(), source)
    executable = ReferenceBackend().load(program, source, LoadOptions(kv_type="f32", max_outputs=n))
    sequence = SequenceRows(0, 0, n, np.zeros(1, np.int32), -1)
    heads = [HeadRequest(row, None) for row in range(n)]
    executable.run(RowBatch(TOKENS, np.arange(n, dtype=np.int32), (sequence,), heads))
    return np.array([executable.logits(row) for row in range(n)])


def direct(source: MemoryTensors, head_dim: int, rotary_dim: int, kv_heads: int, base: float) -> np.ndarray:
    """The equations of the family on all tokens at once, in float64, without the project's operations."""
    t = {name: array.astype(float) for name, array in tensors(source).items()}
    heads, n = 4, len(TOKENS)

    def rms(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)

    def rope(x, count):
        x = x.reshape(n, count, head_dim).copy()
        for position in range(n):
            for pair in range(rotary_dim // 2):
                angle = position * base ** (-2 * pair / rotary_dim)
                if "rope_freqs.weight" in t:
                    angle /= t["rope_freqs.weight"][pair]
                turned = (x[position, :, 2 * pair] + 1j * x[position, :, 2 * pair + 1]) * np.exp(1j * angle)
                x[position, :, 2 * pair], x[position, :, 2 * pair + 1] = turned.real, turned.imag
        return x

    x = t["token_embd.weight"][TOKENS]
    for layer in range(2):
        block = f"blk.{layer}."
        y = rms(x, t[block + "attn_norm.weight"])
        q, k = rope(linear(y, block + "attn_q"), heads), rope(linear(y, block + "attn_k"), kv_heads)
        v = linear(y, block + "attn_v").reshape(n, kv_heads, head_dim)
        mixed = np.zeros((n, heads, head_dim))
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / math.sqrt(head_dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, shared]
        x = x + linear(mixed.reshape(n, -1), block + "attn_output")
        y = rms(x, t[block + "ffn_norm.weight"])
        gate = linear(y, block + "ffn_gate")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, block + "ffn_up"), block + "ffn_down")
    return rms(x, t["output_norm.weight"]) @ t.get("output.weight", t["token_embd.weight"]).T


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tied", (16, 16, 2, 500000.0)),
        ("untied", (16, 16, 2, 500000.0)),
        ("biased", (16, 16, 2, 500000.0)),
        ("partial-rope", (32, 12, 2, 500000.0)),
        ("defaults", (16, 16, 4, 10000.0)),
    ],
)
def test_every_variant_computes_the_equations(name, sizes):
    source = model(name)
    expected = direct(source, *sizes)
    np.testing.assert_allclose(logits(source), expected, atol=1e-4 * expected.std())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_moves_the_logits(name):
    source = model(name)
    base = logits(source)
    for changed in source.tensors:
        other = tensors(source)
        other[changed] = other[changed] * np.float32(0.5)
        moved = logits(MemoryTensors(source.metadata.raw, other))
        assert np.sqrt(np.mean((moved - base) ** 2)) > 0.003 * base.std(), changed


@pytest.mark.parametrize("name", VARIANTS)
def test_capabilities_and_sizes(name):
    architecture = Llama(model(name))
    assert architecture.context_length == 1024 and architecture.vocab_size == 100
    program = record_program(architecture, FullHead(), model(name))
    assert not program.states and len(program.kv_layers) == 2
    assert Llama.capabilities == ArchitectureCapabilities()


def test_the_plugin_registers_the_family():
    registry = load_registry()
    assert registry.architecture_for("llama") is Llama
    assert registry.problems == ()


@pytest.mark.parametrize(
    ("error", "message", "keys"),
    [
        (UnsupportedModelError, "llama.expert_count.*8", {"expert_count": 8}),
        (UnsupportedModelError, "llama.rope.scaling.type.*yarn", {"rope__scaling__type": "yarn"}),
        (
            UnsupportedModelError,
            "llama.rope.scaling.type.*linear",
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        ),
        (MetadataError, "block_count does not match.*llama.block_count", {"block_count": 100000}),
        (MetadataError, "llama.block_count", {"block_count": 1}),
        (MetadataError, "llama.block_count.*missing", {"block_count": None}),
        (MetadataError, "llama.context_length.*missing", {"context_length": None}),
        (
            MetadataError,
            "llama.embedding_length.*another type|another type.*llama.embedding_length",
            {"embedding_length": "64"},
        ),
        (MetadataError, "llama.feed_forward_length", {"feed_forward_length": 0}),
        (MetadataError, "llama.attention.head_count'", {"attention__head_count": 0}),
        (MetadataError, "llama.attention.head_count_kv.*3.*divisor", {"attention__head_count_kv": 3}),
        (MetadataError, "llama.attention.head_count_kv.*8", {"attention__head_count_kv": 8}),
        (MetadataError, "llama.attention.layer_norm_rms_epsilon", {"attention__layer_norm_rms_epsilon": -1.0}),
        (MetadataError, "llama.attention.value_length.*8", {"attention__value_length": 8}),
        (MetadataError, "llama.rope.dimension_count.*18", {"rope__dimension_count": 18}),
        (MetadataError, "llama.rope.dimension_count.*even", {"rope__dimension_count": 7}),
        (MetadataError, "llama.rope.freq_base", {"rope__freq_base": 0.0}),
        (
            MetadataError,
            "llama.embedding_length.*multiple of 3",
            {"attention__key_length": None, "attention__head_count": 3, "attention__head_count_kv": 3},
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(error, message, keys):
    with pytest.raises(error, match=message):
        Llama(model("tied", **keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"rope__scaling__type": "none"},
        {"expert_count": 0},
        {"attention__value_length": 16},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0},
    ],
)
def test_keys_that_change_nothing_are_accepted(keys):
    np.testing.assert_array_equal(logits(model("tied", **keys)), logits(model("tied")))


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "output_norm.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(name):
    source = model("tied")
    kept = {n: array for n, array in tensors(source).items() if n != name}
    with pytest.raises(TensorError, match=name):
        record_program(
            Llama(MemoryTensors(source.metadata.raw, kept)), FullHead(), MemoryTensors(source.metadata.raw, kept)
        )


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.1.ffn_gate_exps.weight", "cls.weight"])
def test_a_tensor_of_another_variant_is_named(name):
    source = model("tied")
    more = {**tensors(source), name: np.ones((4, 4), np.float32)}
    with pytest.raises(TensorError, match=name):
        record_program(
            Llama(MemoryTensors(source.metadata.raw, more)), FullHead(), MemoryTensors(source.metadata.raw, more)
        )


def test_embeddings_that_are_no_matrix_are_refused():
    source = model("tied")
    other = {**tensors(source), "token_embd.weight": np.ones(64, np.float32)}
    with pytest.raises(TensorError, match=r"token_embd\.weight"):
        Llama(MemoryTensors(source.metadata.raw, other))
