"""Shapes are checked when an operation is recorded, and the finished program names everything that it reads."""

from __future__ import annotations

import pytest

from kinetic_core.errors import PluginError, TensorError
from kinetic_core.program import KVLayer, ProgramBuilder, Value
from kinetic_core.program import ops as recorded
from kinetic_core.program.record import record_program
from kinetic_core.program.values import Axis
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model
from kinetic_core.reference.tiny_hybrid import TinyHybrid

SHAPES = {
    "embed": (10, 8),
    "square": (8, 8),
    "narrow": (4, 8),
    "norm8": (8,),
    "norm4": (4,),
    "norm3": (3,),
    "column8": (8, 1),
    "conv": (8, 4),
    "cube": (2, 2, 2),
}


@pytest.fixture
def b() -> ProgramBuilder:
    return ProgramBuilder(SHAPES)


@pytest.fixture
def x(b) -> Value:
    return b.embedding(b.weight("embed", (10, 8)))


def w(b, name):
    return b.weight(name, SHAPES[name])


def test_weights_are_checked_by_name_and_shape(b):
    assert b.weight("embed", (10, 8)).shape == (10, 8)
    assert b.weight("column8", (8,)).shape == (8,)
    assert b.weight("norm8", (1, 8, 1)).shape == (1, 8, 1)
    assert b.has("embed") and not b.has("absent")
    assert b.optional_weight("absent", (1,)) is None
    assert b.optional_weight("norm8", (8,)).name == "norm8"
    with pytest.raises(TensorError, match=r"'absent' is missing.*\(3, 4\)"):
        b.weight("absent", (3, 4))
    with pytest.raises(TensorError, match=r"'embed'.*got \(10, 8\), expected \(8, 10\)"):
        b.weight("embed", (8, 10))
    with pytest.raises(TensorError, match="'norm8'"):
        b.optional_weight("norm8", (4,))


def test_values_know_their_width_and_axis(b, x):
    assert (x.width, x.axis) == (8, Axis.ROWS)
    first, second = b.linears(x, [w(b, "square"), w(b, "narrow")], [w(b, "norm8"), None])
    assert (first.width, second.width) == (8, 4)
    assert len({x.index, first.index, second.index}) == 3
    gathered = b.gather_outputs(first)
    assert gathered.axis is Axis.OUTPUTS
    assert b.linear(gathered, w(b, "narrow")).axis is Axis.OUTPUTS
    assert b.rms_norm(gathered, w(b, "norm8"), 1e-5).axis is Axis.OUTPUTS
    assert b.slice(x, 3, 5).width == 5
    assert b.slice_heads(x, 2, 1, 3).width == 6
    assert b.gate(b.slice(x, 0, 2), x, "sigmoid").width == 8


WRONG = {
    "embedding of a vector": lambda b, x: b.embedding(w(b, "norm8")),
    "gather of outputs": lambda b, x: b.gather_outputs(b.gather_outputs(x)),
    "norm group": lambda b, x: b.rms_norm(x, w(b, "norm3"), 1e-5, 3),
    "norm weight": lambda b, x: b.rms_norm(x, w(b, "norm3"), 1e-5, 4),
    "l2 norm group": lambda b, x: b.l2_norm(x, 1e-6, 3),
    "linear of a cube": lambda b, x: b.linear(x, w(b, "cube")),
    "linear inputs": lambda b, x: b.linear(b.slice(x, 0, 4), w(b, "square")),
    "linear bias": lambda b, x: b.linear(x, w(b, "square"), w(b, "norm4")),
    "biases of another number": lambda b, x: b.linears(x, [w(b, "square")], []),
    "add widths": lambda b, x: b.add(x, b.slice(x, 0, 4)),
    "add axes": lambda b, x: b.add(x, b.gather_outputs(x)),
    "multiply widths": lambda b, x: b.multiply(x, b.slice(x, 0, 4)),
    "slice end": lambda b, x: b.slice(x, 4, 5),
    "slice start": lambda b, x: b.slice(x, -1, 4),
    "slice past the head": lambda b, x: b.slice_heads(x, 2, 2, 3),
    "heads of a slice": lambda b, x: b.slice_heads(x, 3, 0, 1),
    "slice of nothing": lambda b, x: b.slice(x, 0, 0),
    "gate width": lambda b, x: b.gate(b.slice(x, 0, 3), x, "silu"),
    "decay weights": lambda b, x: b.decay_gate(x, w(b, "norm4"), w(b, "norm8")),
    "rope head": lambda b, x: b.rope(x, head_dim=3, rotary_dim=2, base=1e4, interleaved=True),
    "rope odd": lambda b, x: b.rope(x, head_dim=4, rotary_dim=3, base=1e4, interleaved=True),
    "rope too wide": lambda b, x: b.rope(x, head_dim=4, rotary_dim=6, base=1e4, interleaved=True),
    "rope factors": lambda b, x: b.rope(x, head_dim=4, rotary_dim=4, base=1e4, interleaved=True, factors=w(b, "norm3")),
    "kv heads": lambda b, x: b.attention(x, x, x, heads=4, kv_heads=3, head_dim=2),
    "q width": lambda b, x: b.attention(b.slice(x, 0, 4), x, x, heads=4, kv_heads=4, head_dim=2),
    "k width": lambda b, x: b.attention(x, b.slice(x, 0, 2), x, heads=4, kv_heads=4, head_dim=2),
    "v width": lambda b, x: b.attention(x, x, b.slice(x, 0, 2), heads=4, kv_heads=4, head_dim=2),
    "conv channels": lambda b, x: b.short_conv(b.slice(x, 0, 4), w(b, "conv")),
    "conv bias": lambda b, x: b.short_conv(x, w(b, "conv"), w(b, "norm4")),
    "delta k": lambda b, x: delta(b, x, k=b.slice(x, 0, 4)),
    "delta key heads": lambda b, x: delta(b, x, key_heads=3),
    "delta value heads": lambda b, x: delta(b, x, value_heads=3),
    "delta heads of heads": lambda b, x: delta(b, x, key_heads=4, value_heads=2),
    "delta decay": lambda b, x: delta(b, x, decay=b.slice(x, 0, 2)),
    "delta beta": lambda b, x: delta(b, x, beta=b.slice(x, 0, 2)),
}


def delta(b, x, *, key_heads=2, value_heads=4, **inputs):
    four = b.slice(x, 0, value_heads)
    values = {"q": x, "k": x, "v": x, "decay": four, "beta": four, **inputs}
    return b.delta_rule(**values, key_heads=key_heads, value_heads=value_heads)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_shape_is_refused_when_it_is_recorded(b, x, what):
    with pytest.raises((ValueError, TensorError)):
        WRONG[what](b, x)


def test_states_and_cache_layers_are_numbered(b, x):
    b.attention(x, x, x, heads=4, kv_heads=4, head_dim=2)
    b.attention(x, b.slice(x, 0, 4), b.slice(x, 4, 4), heads=4, kv_heads=2, head_dim=2, window=7, scale=0.5)
    b.short_conv(x, w(b, "conv"), activation="silu")
    delta(b, x)
    program = b.finish(
        x, b.linear(b.gather_outputs(x), w(b, "square")), ["narrow"] + [n for n in SHAPES if n[0] in "nc"]
    )
    assert program.kv_layers == (KVLayer(0, 4, 2), KVLayer(1, 2, 2, 7))
    assert [state.shape for state in program.states] == [(3, 8), (4, 4, 2)]
    assert [state.index for state in program.states] == [0, 1]
    assert program.kv_bytes_per_position() == 2 * (2 * 8 + 2 * 4)
    assert program.kv_bytes_per_position("f32") == 4 * (2 * 8 + 2 * 4)
    assert program.state_bytes == 4 * (3 * 8 + 4 * 4 * 2)
    first, second = (op for op in program.ops if isinstance(op, recorded.Attention))
    assert (first.scale, second.scale) == (2**-0.5, 0.5)
    assert program.n_values == 1 + max(program.logits.index, x.index)
    assert [weight.name for weight in program.weights] == ["embed", "conv", "square"]
    assert len(str(program).splitlines()) == len(program.ops)


def test_tensors_that_nothing_reads_are_refused_by_name(b, x):
    with pytest.raises(TensorError, match="column8, conv, cube, narrow, norm3 and 3 more"):
        b.finish(x, b.gather_outputs(x))


def test_record_program_asks_architecture_and_head():
    source = random_model("tiny-hybrid", TinyHybrid.tiny()[1])
    program = record_program(TinyHybrid(source), FullHead(), source)
    assert {weight.name for weight in program.weights} == set(source.tensors)
    assert isinstance(program.ops[-1], recorded.Scale) and program.ops[-1].factor == 0.125
    assert program.ops[-1].out == program.logits
    assert program.hidden.axis is Axis.ROWS and program.logits.axis is Axis.OUTPUTS

    class Ignoring(TinyHybrid):
        def ignored_tensors(self):
            return ["extra"]

    extra = type(
        "Source",
        (),
        {"metadata": source.metadata, "tensors": {**source.tensors, "extra": source.tensors["output_norm.weight"]}},
    )()
    with pytest.raises(TensorError, match="extra"):
        record_program(TinyHybrid(source), FullHead(), extra)
    assert len(record_program(Ignoring(source), FullHead(), extra).ops) == len(program.ops)


@pytest.mark.parametrize("method", ["build", "output", "build_prediction", "prediction_output"])
@pytest.mark.parametrize("wrong", [None, "x", ("x", 1.0)])
def test_a_method_that_returns_something_else_is_named(method, wrong):
    (variant,) = (variant for variant in TinyHybrid.tiny() if variant.name == "prediction")
    source = random_model("tiny-hybrid", variant)
    architecture = type("Toy", (TinyHybrid,), {method: lambda self, b, hidden=None: wrong})
    with pytest.raises(PluginError, match=f"Toy.{method} returns something else.*got {type(wrong).__name__}"):
        record_program(architecture(source), FullHead(), source)


def test_the_tiny_hybrid_uses_every_operation_in_every_way():
    every = []
    for variant in TinyHybrid.tiny():
        source = random_model("tiny-hybrid", variant)
        every += record_program(TinyHybrid(source), FullHead(), source).all_ops
    assert {type(op) for op in every} == set(recorded.Op.__args__)
    ropes = {(op.interleaved, op.factors is None) for op in every if isinstance(op, recorded.Rope)}
    assert ropes == {(True, True), (False, True), (False, False)}
    assert {op.layer.window for op in every if isinstance(op, recorded.Attention)} == {None, 24}
    gates = {(op.activation, op.gate.width == op.x.width) for op in every if isinstance(op, recorded.Gate)}
    assert gates == {("silu", True), ("sigmoid", False)}
    convolutions = {(op.activation, op.bias is None) for op in every if isinstance(op, recorded.ShortConv)}
    assert convolutions == {("silu", False), ("none", True)}
    routes = {(op.scoring, op.bias is None) for op in every if isinstance(op, recorded.Route)}
    assert routes == {("softmax", True), ("sigmoid", False)}
    assert {op.groups for op in every if isinstance(op, recorded.Mamba2Scan)} == {1, 2}
