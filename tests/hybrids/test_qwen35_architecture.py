"""The Qwen3.5 plugin: its variants run, every term matters, and what it does not know is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equations as eq
import numpy as np
import pytest
from kinetic_arch_qwen35.architecture import Qwen35, Qwen35Moe

from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError
from kinetic_core.gguf import MemoryTensors
from kinetic_core.interfaces import HeadRequest, LoadOptions, RowBatch, SequenceRows
from kinetic_core.plugins import load_registry
from kinetic_core.reference.backend import ReferenceBackend

CLASSES = {variant.name: kind for kind in (Qwen35, Qwen35Moe) for variant in kind.tiny()}
VARIANTS = {variant.name: variant for kind in (Qwen35, Qwen35Moe) for variant in kind.tiny()}
PREDICTING = [name for name in VARIANTS if "prediction" in name]
HIDDEN = np.random.default_rng(3).standard_normal((eq.N - 1, 64)).astype(np.float32)


def model(name: str, keys: Mapping[str, Any] | None = None) -> MemoryTensors:
    return eq.model(CLASSES[name].key, VARIANTS[name], keys)


def logits(name: str, source: MemoryTensors) -> np.ndarray:
    return eq.logits(CLASSES[name], source)


def predicted(name: str, source: MemoryTensors) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of the prediction block: tokens 1 to n - 1, with HIDDEN before each."""
    n = eq.N - 1
    options = LoadOptions(kv_type="f32", max_outputs=n)
    executable = ReferenceBackend().load(eq.record(CLASSES[name], source), source, options)
    sequence = SequenceRows(0, 1, n, np.zeros(1, np.int32), 0)
    heads = [HeadRequest(row, None) for row in range(n)]
    executable.predict(RowBatch(eq.TOKENS[1:], np.arange(1, n + 1, dtype=np.int32), (sequence,), heads), HIDDEN)
    return np.array([executable.logits(row) for row in range(n)]), executable.hidden(0, n)


# the equations


def delta_net(t: eq.Tensors, block: str, y: np.ndarray, meta: Mapping[str, Any]) -> np.ndarray:
    d, nk, nv = meta["ssm.state_size"], meta["ssm.group_count"], meta["ssm.time_step_rank"]
    kernel, x = t[block + "ssm_conv1d.weight"], eq.linear(t, y, block + "attn_qkv")
    padded = np.concatenate([np.zeros((kernel.shape[1] - 1, x.shape[1])), x])
    u = eq.silu(sum(padded[tap : tap + len(x)] * kernel[:, tap] for tap in range(kernel.shape[1])))
    q, k, v = (part.reshape(len(y), -1, d) for part in np.split(u, [nk * d, 2 * nk * d], axis=1))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + eq.EPS) for part in (q, k))
    beta = 1 / (1 + np.exp(-eq.linear(t, y, block + "ssm_beta")))
    decay = np.exp(
        t[block + "ssm_a"] * np.log1p(np.exp(eq.linear(t, y, block + "ssm_alpha") + t[block + "ssm_dt.bias"]))
    )
    state, out = np.zeros((nv, d, d)), np.zeros_like(v)
    for row in range(len(y)):
        for head in range(nv):
            key, query = k[row, head % nk], q[row, head % nk] / np.sqrt(d)
            state[head] *= decay[row, head]
            delta = beta[row, head] * (v[row, head] - state[head].T @ key)
            state[head] += np.outer(key, delta)
            out[row, head] = state[head].T @ query
    o = eq.rms(out, t[block + "ssm_norm.weight"]).reshape(len(y), -1)
    return eq.linear(t, o * eq.silu(eq.linear(t, y, block + "attn_gate")), block + "ssm_out")


def gated_attention(t: eq.Tensors, block: str, y: np.ndarray, meta: Mapping[str, Any]) -> np.ndarray:
    heads, d = meta["attention.head_count"], meta["attention.key_length"]
    q, gate = np.split(eq.linear(t, y, block + "attn_q").reshape(len(y), heads, 2 * d), 2, axis=-1)
    k, v = (eq.linear(t, y, block + f"attn_{part}").reshape(len(y), -1, d) for part in "kv")
    q, k = (
        eq.rope(eq.rms(x, t[block + f"attn_{part}_norm.weight"]), 10000.0, meta["rope.dimension_count"], adjacent=False)
        for part, x in (("q", q), ("k", k))
    )
    mixed = eq.attention(q, k, v, d**-0.5) / (1 + np.exp(-gate.reshape(len(y), -1)))
    return eq.linear(t, mixed, block + "attn_output")


def run_block(t: eq.Tensors, number: int, x: np.ndarray, meta: Mapping[str, Any]) -> np.ndarray:
    block = f"blk.{number}."
    y = eq.rms(x, t[block + "attn_norm.weight"])
    x = x + (delta_net if block + "ssm_out.weight" in t else gated_attention)(t, block, y, meta)
    y = eq.rms(x, t[block + "post_attention_norm.weight"])
    if "expert_count" not in meta:
        return x + eq.feed_forward(t, block, y)
    gate = 1 / (1 + np.exp(-y @ t[block + "ffn_gate_inp_shexp.weight"].reshape(-1, 1)))
    return x + eq.experts(t, block, y, meta["expert_used_count"]) + gate * eq.feed_forward(t, block, y, "_shexp")


def described(name: str) -> tuple[eq.Tensors, Mapping[str, Any], int]:
    """Tensors, metadata, number of trunk blocks."""
    meta = VARIANTS[name].metadata
    t = {tensor: array.astype(float) for tensor, array in eq.tensors(model(name)).items()}
    return t, meta, meta["block_count"] - meta.get("nextn_predict_layers", 0)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_computes_the_equations(name: str):
    t, meta, n_layers = described(name)
    x = t["token_embd.weight"][eq.TOKENS]
    for number in range(n_layers):
        x = run_block(t, number, x, meta)
    expected = eq.rms(x, t["output_norm.weight"]) @ t.get("output.weight", t["token_embd.weight"]).T
    np.testing.assert_allclose(logits(name, model(name)), expected, atol=1e-4 * expected.std())


@pytest.mark.parametrize("name", PREDICTING)
def test_every_prediction_block_computes_the_equations(name: str):
    t, meta, n_layers = described(name)
    own = f"blk.{n_layers}.nextn."
    embedded = t.get(own + "embed_tokens.weight", t["token_embd.weight"])[eq.TOKENS[1:]]
    both = [eq.rms(embedded, t[own + "enorm.weight"]), eq.rms(HIDDEN, t[own + "hnorm.weight"])]
    x = run_block(t, n_layers, eq.linear(t, np.concatenate(both, axis=1), own + "eh_proj"), meta)
    hidden = eq.rms(x, t[own + "shared_head_norm.weight"])
    output = t.get(own + "shared_head_head.weight", t.get("output.weight", t["token_embd.weight"]))
    got_logits, got_hidden = predicted(name, model(name))
    np.testing.assert_allclose(got_hidden, hidden, atol=1e-4 * hidden.std())
    np.testing.assert_allclose(got_logits, hidden @ output.T, atol=1e-4 * (hidden @ output.T).std())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_moves_the_logits(name: str):
    """Of the trunk its logits, of the prediction block the predicted ones; neither moves the other's."""
    source = model(name)
    _, _, n_layers = described(name)
    base = logits(name, source)
    base_predicted = predicted(name, source)[0] if name in PREDICTING else base
    for changed in source.tensors:
        other = eq.tensors(source)
        axis = 1 if other[changed].ndim > 1 and len(other[changed]) == 1 else 0
        other[changed] = np.roll(other[changed], 1, axis)
        rolled = MemoryTensors(source.metadata.raw, other)
        before, moved = base, logits(name, rolled)
        if changed.startswith(f"blk.{n_layers}."):
            assert moved.tobytes() == base.tobytes(), changed
            before, moved = base_predicted, predicted(name, rolled)[0]
        assert np.sqrt(np.mean((moved - before) ** 2)) > 0.003 * before.std(), changed


@pytest.mark.parametrize("name", VARIANTS)
def test_capabilities_and_sizes(name: str):
    kind, source = CLASSES[name], model(name)
    architecture = kind(source)
    assert architecture.context_length == 1024 and architecture.vocab_size == 100
    program = eq.record(kind, source)
    predicts = name in PREDICTING
    n_delta = sum(architecture.recurrent)
    assert len(program.states) == 2 * n_delta and len(program.kv_layers) == len(architecture.recurrent) - n_delta
    assert (program.prediction is not None) == predicts == architecture.has_prediction
    assert [layer.first_position for layer in program.kv_layers][-1] == int(predicts)
    assert kind.capabilities.has_recurrent_state and kind.capabilities.has_prediction_block
    assert kind.capabilities.has_experts == (kind is Qwen35Moe) and not kind.capabilities.has_sliding_window


def test_the_order_of_the_blocks():
    flags = [True, False, True, False]
    assert list(Qwen35(model("interval")).recurrent) == flags
    assert list(Qwen35(model("prediction-own")).recurrent) == [True, False, False]
    keys = {"full_attention_interval": 3, "attention.recurrent_layers": flags}
    assert list(Qwen35(model("interval", keys)).recurrent) == flags
    assert list(Qwen35(model("interval", {"full_attention_interval": 3})).recurrent) == [True, True, False, True]
    # A prediction block is an attention block wherever the interval would put it.
    assert list(Qwen35(model("prediction-own", {"full_attention_interval": 4})).recurrent) == [True, True, False]


def test_the_plugin_registers_the_families():
    registry = load_registry()
    assert registry.architecture_for("qwen35") is Qwen35 and registry.architecture_for("qwen35moe") is Qwen35Moe
    assert registry.problems == ()


@pytest.mark.parametrize(
    ("name", "error", "message", "keys"),
    [
        ("prediction", UnsupportedModelError, "nextn_predict_layers.*2", {"nextn_predict_layers": 2}),
        ("tied", UnsupportedModelError, "rope.scaling.type.*yarn", {"rope.scaling.type": "yarn"}),
        ("experts", UnsupportedModelError, "expert_gating_func.*2", {"expert_gating_func": 2}),
        ("experts", MetadataError, "expert_used_count.*7", {"expert_used_count": 7}),
        ("experts", MetadataError, "shared_feed_forward.*missing", {"expert_shared_feed_forward_length": None}),
        ("tied", MetadataError, "feed_forward_length.*missing", {"feed_forward_length": None}),
        ("tied", MetadataError, "block_count does not match", {"block_count": 3}),
        ("tied", MetadataError, "recurrent_layers.*2", {"attention.recurrent_layers": [True]}),
        ("interval", MetadataError, "full_attention_interval.*missing", {"full_attention_interval": None}),
        (
            "prediction",
            MetadataError,
            r"recurrent_layers\[2\].*attention block",
            {"attention.recurrent_layers": [True, False, True]},
        ),
        ("tied", MetadataError, "head_count_kv.*3.*divisor", {"attention.head_count_kv": 3}),
        ("tied", MetadataError, "head_count_kv.*0.*divisor", {"attention.head_count_kv": [2, 0]}),
        ("tied", MetadataError, "value_length.*16", {"attention.value_length": 16}),
        (
            "tied",
            MetadataError,
            "embedding_length.*multiple of 5",
            {"attention.head_count": 5, "attention.head_count_kv": 1, "attention.key_length": None},
        ),
        ("tied", MetadataError, "rope.dimension_count.*even", {"rope.dimension_count": 7}),
        ("tied", MetadataError, "rope.dimension_count.*missing", {"rope.dimension_count": None}),
        ("tied", MetadataError, "rope.freq_base.*missing", {"rope.freq_base": None}),
        ("tied", MetadataError, "ssm.group_count.*3.*divisor", {"ssm.group_count": 3}),
        ("tied", MetadataError, "ssm.inner_size.*60.*64", {"ssm.inner_size": 60}),
        ("tied", MetadataError, "ssm.conv_kernel.*missing", {"ssm.conv_kernel": None}),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(
    name: str, error: type[Exception], message: str, keys: dict[str, Any]
):
    with pytest.raises(error, match=message):
        CLASSES[name](model(name, keys))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tied", {"nextn_predict_layers": 0, "full_attention_interval": 1}),
        ("tied", {"attention.recurrent_layers": None, "full_attention_interval": 2}),
        ("tied", {"rope.dimension_sections": None, "rope.scaling.type": "none"}),
        ("tied", {"rope.dimension_sections": [1, 1, 2, 0], "attention.head_count_kv": [0, 2]}),
        ("experts", {"expert_gating_func": 1, "feed_forward_length": 7}),
    ],
)
def test_keys_that_change_nothing_are_accepted(name: str, keys: dict[str, Any]):
    np.testing.assert_array_equal(logits(name, model(name, keys)), logits(name, model(name)))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("tied", "blk.0.ssm_dt.bias"),
        ("tied", "blk.1.attn_q_norm.weight"),
        ("prediction", "blk.2.nextn.hnorm.weight"),
        ("experts", "blk.1.ffn_gate_inp_shexp.weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str):
    source = model(name)
    kept = {n: array for n, array in eq.tensors(source).items() if n != tensor}
    with pytest.raises(TensorError, match=tensor):
        eq.record(CLASSES[name], MemoryTensors(source.metadata.raw, kept))


@pytest.mark.parametrize("tensor", ["blk.1.attn_q.bias", "blk.0.ffn_gate_exps.weight", "blk.1.nextn.enorm.weight"])
def test_a_tensor_of_another_variant_is_named(tensor: str):
    source = model("tied")
    more = {**eq.tensors(source), tensor: np.ones((4, 4), np.float32)}
    with pytest.raises(TensorError, match=tensor):
        eq.record(Qwen35, MemoryTensors(source.metadata.raw, more))
