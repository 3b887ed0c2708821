"""Layers by the names of their tensors: what they record, what they accept, what they refuse."""

from __future__ import annotations

import pytest

from kinetic_core.errors import MetadataError, TensorError
from kinetic_core.gguf import MemoryTensors, Metadata
from kinetic_core.interfaces import ArchitectureCapabilities, TinyVariant
from kinetic_core.layers import DecoderArchitecture, LayerBuilder, Mamba2
from kinetic_core.program import ProgramBuilder, ops
from kinetic_core.reference.random_model import random_model

SHAPES = {
    "token_embd.weight": (10, 8),
    "output_norm.weight": (8,),
    "blk.1.attn_norm.weight": (8,),
    "blk.1.head_norm.weight": (4,),
    "blk.1.first.weight": (6, 8),
    "blk.1.first.bias": (6,),
    "blk.1.second.weight": (4, 8),
    "blk.1.ffn_gate_shexp.weight": (12, 8),
    "blk.1.ffn_up_shexp.weight": (12, 8),
    "blk.1.ffn_down_shexp.weight": (8, 12),
    "blk.1.ffn_gate_exps.weight": (3, 12, 8),
    "blk.1.ffn_up_exps.weight": (3, 12, 8),
    "blk.1.ffn_down_exps.weight": (3, 8, 12),
    "blk.1.router.weight": (3, 8),
}


@pytest.fixture
def b() -> ProgramBuilder:
    return ProgramBuilder(SHAPES)


def recorded(b: ProgramBuilder) -> list[ops.Op]:
    return b._ops


def embedded(b: ProgramBuilder):
    return b.embedding(b.weight("token_embd.weight", (10, 8)))


def test_names_lie_under_the_block(b):
    block = LayerBuilder(b, 1e-6).block(1)
    assert block.prefix == "blk.1." and block.eps == 1e-6 and not block.optional_biases
    assert block.has("first.bias") and not block.has("first") and LayerBuilder(b, 1e-6).has("output_norm.weight")
    assert block.weight("first.bias", (6,)).name == "blk.1.first.bias"
    assert block.optional_weight("second.bias", (4,)) is None
    assert block.optional_weight("first.bias", (6,)).name == "blk.1.first.bias"
    with pytest.raises(TensorError, match=r"'blk\.1\.third\.weight' is missing"):
        block.linear("third", embedded(b), 4)
    with pytest.raises(TensorError, match=r"'blk\.1\.second\.weight' has another shape.*expected \(5, 8\)"):
        block.linear("second", embedded(b), 5)


def test_norms(b):
    x, layers = embedded(b), LayerBuilder(b, 1e-6)
    layers.rms_norm("output_norm", x)
    layers.block(1).rms_norm("head_norm", x, 4)
    whole, heads = recorded(b)[1:]
    assert (whole.weight.name, whole.eps, whole.group_width) == ("output_norm.weight", 1e-6, 8)
    assert (heads.weight.name, heads.eps, heads.group_width) == ("blk.1.head_norm.weight", 1e-6, 4)


@pytest.mark.parametrize("optional", [False, True])
def test_linear_layers_of_one_input_are_one_operation(b, optional: bool):
    block = LayerBuilder(b, 1e-6, optional_biases=optional).block(1)
    first, second = block.linears(embedded(b), {"first": 6, "second": 4})
    (op,) = recorded(b)[1:]
    assert (first.width, second.width) == (6, 4) and op.outs == (first, second)
    assert [weight.name for weight in op.weights] == ["blk.1.first.weight", "blk.1.second.weight"]
    assert [bias and bias.name for bias in op.biases] == (["blk.1.first.bias", None] if optional else [None, None])


def test_feed_forward_and_experts(b):
    x, block = embedded(b), LayerBuilder(b, 1e-6).block(1)
    out = block.feed_forward(x, 12, "_shexp")
    both, gate, down = recorded(b)[1:]
    assert [weight.name for weight in both.weights] == ["blk.1.ffn_gate_shexp.weight", "blk.1.ffn_up_shexp.weight"]
    assert (gate.gate, gate.x, gate.activation) == (*both.outs, "silu")
    assert down.weights[0].name == "blk.1.ffn_down_shexp.weight" and down.outs == (out,) and out.width == 8
    routed = b.route(b.linear(x, block.weight("router.weight", (3, 8))), 2, "softmax")
    block.experts(x, routed, 3, 12)
    mixed = recorded(b)[-1]
    assert isinstance(mixed, ops.Experts) and (mixed.experts, mixed.weights) == routed
    names = [weight.name for weight in (mixed.gate, mixed.up, mixed.down)]
    assert names == [f"blk.1.ffn_{name}_exps.weight" for name in ("gate", "up", "down")]


SIZES = {"inner_size": 24, "state_size": 5, "time_step_rank": 6, "group_count": 2, "conv_kernel": 4}


def sizes(**changes: int) -> Metadata:
    return Metadata({f"toy.ssm.{key}": value for key, value in {**SIZES, **changes}.items()}).prefixed("toy")


def test_mamba2_sizes():
    mixer = Mamba2.read(sizes())
    assert mixer == Mamba2(d_inner=24, d_state=5, heads=6, groups=2, taps=4) and mixer.channels == 44
    with pytest.raises(MetadataError, match=r"toy\.ssm\.inner_size.*25.*a multiple of 6"):
        Mamba2.read(sizes(inner_size=25))
    with pytest.raises(MetadataError, match=r"toy\.ssm\.group_count.*4.*a divisor of 6"):
        Mamba2.read(sizes(group_count=4))


class Toy(DecoderArchitecture):
    capabilities = ArchitectureCapabilities()
    key = "toy"

    def build(self, b):
        return LayerBuilder(b, self.eps).rms_norm("output_norm", self.embed(b, 2.0))

    @classmethod
    def tiny(cls):
        keys = {"block_count": 1, "context_length": 64, "embedding_length": 8}
        tensors = {name: SHAPES[name] for name in ("token_embd.weight", "output_norm.weight", "blk.1.first.bias")}
        tensors["blk.0.first.bias"] = tensors.pop("blk.1.first.bias")
        return [TinyVariant("tied", {**keys, "attention.layer_norm_rms_epsilon": 1e-6}, tensors)]


def toy(changes: dict[str, object], more: dict[str, tuple[int, ...]] | None = None) -> MemoryTensors:
    (variant,) = Toy.tiny()
    keys = {key: value for key, value in {**variant.metadata, **changes}.items() if value is not None}
    return random_model("toy", TinyVariant("changed", keys, {**variant.tensors, **(more or {})}))


def test_a_decoder_reads_what_all_have():
    decoder = Toy(toy({}))
    assert (decoder.n_layers, decoder.d_model, decoder.eps) == (1, 8, 1e-6)
    assert (decoder.context_length, decoder.vocab_size, decoder.has_prediction) == (64, 10, False)
    b = ProgramBuilder(SHAPES)
    decoder.build(b)
    assert recorded(b)[0].scale == 2.0


def test_a_decoder_has_an_output_layer_of_its_own_or_tied():
    decoder = Toy(toy({}))
    assert decoder.output(ProgramBuilder(SHAPES)) == (ProgramBuilder(SHAPES).weight("token_embd.weight", (10, 8)), 1.0)
    weight, factor = decoder.output(ProgramBuilder({**SHAPES, "output.weight": (10, 8)}))
    assert (weight.name, factor) == ("output.weight", 1.0)


@pytest.mark.parametrize(
    ("error", "message", "changes", "more"),
    [
        (MetadataError, "block_count does not match", {"block_count": 2}, {}),
        (MetadataError, "toy.context_length.*missing", {"context_length": None}, {}),
        (MetadataError, "toy.embedding_length.*0", {"embedding_length": 0}, {}),
        (MetadataError, "rms_epsilon.*-1", {"attention.layer_norm_rms_epsilon": -1.0}, {}),
        (TensorError, "token_embd.weight.*not a matrix", {}, {"token_embd.weight": (80,)}),
    ],
)
def test_a_decoder_refuses_by_name(error: type[Exception], message: str, changes, more):
    with pytest.raises(error, match=message):
        Toy(toy(changes, more))
