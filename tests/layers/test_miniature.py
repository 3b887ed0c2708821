"""Miniatures: names, shapes, values, and that what describes layers is what records them."""

from __future__ import annotations

import pytest

from kinetic_core.gguf import Metadata
from kinetic_core.layers import (
    LayerBuilder,
    Mamba2,
    attention_matrices,
    expert_matrices,
    feed_forward_matrices,
    layer_tensors,
    tiny_decoder,
)
from kinetic_core.program import ProgramBuilder

KEYS = {"embedding_length": 8, "context_length": 64, "absent": None}


def test_matrices_have_outputs_first():
    assert attention_matrices(8, 4, 2, 3) == {
        "attn_q": (12, 8),
        "attn_k": (6, 8),
        "attn_v": (6, 8),
        "attn_output": (8, 12),
    }
    assert feed_forward_matrices(8, 6, "_x") == {"ffn_gate_x": (6, 8), "ffn_up_x": (6, 8), "ffn_down_x": (8, 6)}
    assert expert_matrices(8, 3, 6) == {
        "ffn_gate_inp": (3, 8),
        "ffn_gate_exps": (3, 6, 8),
        "ffn_up_exps": (3, 6, 8),
        "ffn_down_exps": (3, 8, 6),
    }


def test_layers_have_a_weight_and_perhaps_a_bias():
    assert layer_tensors({"a": (4, 2)}) == {"a.weight": (4, 2)}
    assert layer_tensors({"a": (4, 2)}, biased=True) == {"a.weight": (4, 2), "a.bias": (4,)}


def test_a_decoder():
    variant = tiny_decoder("small", KEYS, [{"a.weight": (4, 8)}, {"b.bias": (4,)}], vocab=20)
    assert variant.name == "small"
    assert variant.metadata == {"embedding_length": 8, "context_length": 64, "block_count": 2}
    assert variant.tensors == {
        "token_embd.weight": (20, 8),
        "output_norm.weight": (8,),
        "blk.0.a.weight": (4, 8),
        "blk.1.b.bias": (4,),
    }
    assert variant.optional == () and variant.defaults == {}
    declared = tiny_decoder("declared", KEYS, [], optional=("output.weight",), defaults={"absent": 3})
    assert declared.optional == ("output.weight",) and declared.defaults == {"absent": 3}
    untied = tiny_decoder("untied", KEYS, [], tied=False, outside={"last_norm.weight": (8,)})
    assert untied.tensors == {
        "token_embd.weight": (100, 8),
        "output.weight": (100, 8),
        "last_norm.weight": (8,),
    }


@pytest.mark.parametrize(
    ("tensor", "shape", "expected"),
    [
        ("blk.0.attn_q_norm.weight", (8,), (1.0, 0.2)),
        ("blk.0.ffn_norm", (8,), (1.0, 0.2)),
        ("blk.0.ssm_a", (8,), (-0.4, 0.1)),
        ("blk.0.ssm_d", (8,), (0.5, 0.5)),
        ("blk.0.ssm_conv1d.bias", (8,), (0.0, 0.3)),
        ("blk.0.ssm_conv1d.weight", (8, 4), (0.2, 0.4)),
        ("blk.0.shortconv.conv.weight", (8, 4), (0.2, 0.4)),
        ("blk.0.shortconv.in_proj.weight", (8, 4), (0.0, 1.0)),
        ("rope_freqs.weight", (4,), (4.0, 0.5)),
        ("blk.0.nextn.embed_tokens.weight", (8, 4), (0.0, 1.0)),
        ("blk.0.nextn.shared_head_head.weight", (8, 4), (0.0, 0.3)),
        ("blk.0.attn_output.weight", (8, 16), (0.0, 0.5)),
        ("blk.0.ffn_down_exps.weight", (3, 8, 16), (0.0, 0.5)),
    ],
)
def test_values(tensor: str, shape: tuple[int, ...], expected: tuple[float, float]):
    variant = tiny_decoder("", KEYS, [], tied=False, outside={tensor: shape}, gain=2.0)
    assert variant.values[tensor] == expected
    assert variant.values["token_embd.weight"] == (0.0, 1.0) and variant.values["output.weight"] == (0.0, 0.3)
    other = tiny_decoder("", KEYS, [], outside={tensor: shape}, values={tensor: (5.0, 6.0)})
    assert other.values[tensor] == (5.0, 6.0)


def test_what_is_described_is_what_is_recorded():
    mixer = Mamba2(d_inner=24, d_state=5, heads=6, groups=2, taps=4)
    tensors = (
        layer_tensors(mixer.matrices(8) | feed_forward_matrices(8, 6) | expert_matrices(8, 3, 6)) | mixer.tensors()
    )
    shapes = tiny_decoder("", KEYS, [tensors]).tensors
    b = ProgramBuilder(shapes)
    block = LayerBuilder(b, 1e-6).block(0)
    y = b.embedding(b.weight("token_embd.weight", (100, 8)))
    x = mixer.record(block, y)
    x = block.feed_forward(x, 6)
    x = block.experts(x, b.route(block.linear("ffn_gate_inp", x, 3), 2, "softmax"), 3, 6)
    x = LayerBuilder(b, 1e-6).rms_norm("output_norm", x)
    program = b.finish(x, b.linear(b.gather_outputs(x), b.weight("token_embd.weight", (100, 8))))
    assert {weight.name: weight.shape for weight in program.weights} == shapes


def test_mamba2_without_a_bias_and_a_norm():
    mixer = Mamba2.read(
        Metadata({"ssm.inner_size": 24, "ssm.state_size": 5, "ssm.time_step_rank": 6, "ssm.conv_kernel": 4})
    )
    assert mixer.groups == 1
    tensors = layer_tensors(mixer.matrices(8)) | mixer.tensors()
    del tensors["ssm_conv1d.bias"], tensors["ssm_norm.weight"]
    b = ProgramBuilder({**tensors, "token_embd.weight": (100, 8)})
    mixer.record(LayerBuilder(b, 1e-6), b.embedding(b.weight("token_embd.weight", (100, 8))))
    kinds = [type(op).__name__ for op in b._ops]
    assert kinds.count("ShortConv") == 1 and "RmsNorm" not in kinds
