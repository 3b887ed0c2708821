"""A miniature hybrid architecture that uses every operation, and its models, which live in memory.

Blocks are of four kinds, named by ``tiny-hybrid.layer_types``: ``attention`` (norms per head, a gate per head, half
of each head rotated), ``window`` (the same with a sliding window and adjacent-pair rope), ``conv`` (a gated short
convolution), ``delta`` (the gated delta rule behind a short convolution) and ``mamba`` (the Mamba-2 recurrence behind
one). Every block ends with a gated feed-forward layer, or with ``tiny-hybrid.expert_count`` > 0 with experts and a
shared expert beside them. With ``tiny-hybrid.nextn_predict_layers`` = 1 a block that predicts the token after the next
follows. Sizes are odd on purpose: heads x head size is not the hidden size, value heads are not key heads,
and the vocabulary is no multiple of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kinetic_core.gguf import MemoryTensors, RawTensor, read_tensor
from kinetic_core.interfaces.architecture import ArchitectureCapabilities, TinyVariant
from kinetic_core.layers import DecoderArchitecture, LayerBuilder, Mamba2
from kinetic_core.reference.random_model import random_model, with_tensor_type
from kinetic_core.reference.tiny_hybrid_variants import EXPERTS, WIDE, tiny_variant
from kinetic_core.reference.tiny_tokenizer import predicted_next, tokenizer_metadata

if TYPE_CHECKING:
    from kinetic_core.gguf.source import TensorSource
    from kinetic_core.program.builder import ProgramBuilder
    from kinetic_core.program.values import Value, Weight

KEY = "tiny-hybrid"
LAYER_TYPES = ("delta", "attention", "conv", "window")
"""The blocks of the model that is always installed."""
ALL_LAYER_TYPES = (*LAYER_TYPES, "mamba")


class TinyHybrid(DecoderArchitecture):
    """Every kind of block in one tiny model."""

    capabilities = ArchitectureCapabilities(
        has_recurrent_state=True, has_prediction_block=True, has_experts=True, has_sliding_window=True
    )
    key = KEY

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``tiny-hybrid.``."""
        super().__init__(source)
        meta = self.meta
        self.n_predicted = meta.get_int("nextn_predict_layers", 0, minimum=0, maximum=1)
        self.n_layers -= self.n_predicted
        self.layer_types = meta.get_strs("layer_types", length=self.n_layers)
        for layer in self.layer_types:
            if layer not in ALL_LAYER_TYPES:
                raise meta.does_not_fit("layer_types", layer, f"one of {', '.join(ALL_LAYER_TYPES)}")
        self.d_ffn = meta.get_int("feed_forward_length", minimum=1)
        self.heads = meta.get_int("attention.head_count", minimum=1)
        if self.d_model % self.heads:
            raise meta.does_not_fit("attention.head_count", self.heads, f"a divisor of {self.d_model}, the hidden size")
        self.kv_heads = meta.get_int("attention.head_count_kv", minimum=1)
        self.head_dim = meta.get_int("attention.key_length", minimum=1)
        self.window = meta.get_int("attention.sliding_window", minimum=1)
        self.rotary_dim = meta.get_int("rope.dimension_count", minimum=2, maximum=self.head_dim)
        self.rope_base = meta.get_float("rope.freq_base", minimum=1)
        self.taps = meta.get_int("ssm.conv_kernel", minimum=2)
        self.key_heads = meta.get_int("ssm.group_count", minimum=1)
        self.value_heads = meta.get_int("ssm.time_step_rank", minimum=1)
        self.key_dim = meta.get_int("ssm.state_size", minimum=1)
        self.value_dim = meta.get_int("ssm.value_size", minimum=1)
        self.mamba2 = Mamba2(
            d_inner=self.value_heads * self.value_dim,
            d_state=self.key_dim,
            heads=self.value_heads,
            groups=meta.get_int("ssm.scan_groups", 1, minimum=1),
            taps=self.taps,
        )
        self.n_experts = meta.get_int("expert_count", 0, minimum=0)
        self.n_experts_used = meta.get_int("expert_used_count", 1, minimum=1)
        self.sigmoid_routing = meta.get_int("expert_gating_func", 1, minimum=1, maximum=2) == 2
        self.embedding_scale = meta.get_float("embedding_scale")
        self.residual_scale = meta.get_float("residual_scale")
        self.logit_scale = meta.get_float("logit_scale")

    def build(self, b: ProgramBuilder) -> Value:
        """Embedding; per block a mixer and a feed-forward layer, both behind a norm; the last norm."""
        layers = LayerBuilder(b, self.eps)
        x = self.embed(b, self.embedding_scale)
        for layer, kind in enumerate(self.layer_types):
            x = self._block(b, layers.block(layer), kind, x)
        return layers.rms_norm("output_norm", x)

    def _block(self, b: ProgramBuilder, block: LayerBuilder, kind: str, x: Value) -> Value:
        mixers = {
            "attention": self._attention,
            "window": self._window,
            "conv": self._conv,
            "delta": self._delta,
            "mamba": lambda b, block, y: self.mamba2.record(block, y),
        }
        x = b.add(x, mixers[kind](b, block, block.rms_norm("attn_norm", x)), self.residual_scale)
        y = block.rms_norm("ffn_norm", x)
        return b.add(
            x, self._experts(b, block, y) if self.n_experts else self._feed_forward(block, y), self.residual_scale
        )

    @property
    def has_prediction(self) -> bool:
        """Is there a block after the last?"""
        return self.n_predicted > 0

    def build_prediction(self, b: ProgramBuilder, hidden: Value) -> Value:
        """The token's embedding and the hidden state before it, both behind a norm, through one more block."""
        block = LayerBuilder(b, self.eps).block(self.n_layers)
        x = block.rms_norm("nextn.enorm", self.embed(b, self.embedding_scale))
        x = block.linear("nextn.eh_proj", b.concatenate(x, block.rms_norm("nextn.hnorm", hidden)), self.d_model)
        return block.rms_norm("nextn.shared_head_norm", self._block(b, block, "attention", x))

    def output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """``output.weight``, or the embeddings where the file has none."""
        return super().output(b)[0], self.logit_scale

    def _attention(self, b: ProgramBuilder, block: LayerBuilder, y: Value) -> Value:
        factors = b.optional_weight("rope_freqs.weight", (self.rotary_dim // 2,))
        return self._attend(b, block, y, window=None, interleaved=False, factors=factors)

    def _window(self, b: ProgramBuilder, block: LayerBuilder, y: Value) -> Value:
        return self._attend(b, block, y, window=self.window, interleaved=True, factors=None)

    def _attend(
        self,
        b: ProgramBuilder,
        block: LayerBuilder,
        y: Value,
        *,
        window: int | None,
        interleaved: bool,
        factors: Weight | None,
    ) -> Value:
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        names = {"attn_q": width, "attn_k": kv_width, "attn_v": kv_width, "attn_gate": self.heads}
        weights = [block.weight(f"{name}.weight", (outputs, self.d_model)) for name, outputs in names.items()]
        q, k, v, gate = b.linears(y, weights, [block.weight("attn_q.bias", (width,)), None, None, None])
        q, k = (
            b.rope(
                block.rms_norm(name, x, self.head_dim),
                head_dim=self.head_dim,
                rotary_dim=self.rotary_dim,
                base=self.rope_base,
                interleaved=interleaved,
                factors=factors,
            )
            for name, x in (("attn_q_norm", q), ("attn_k_norm", k))
        )
        mixed = b.attention(q, k, v, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, window=window)
        return block.linear("attn_output", b.gate(gate, mixed, "sigmoid"), self.d_model)

    def _conv(self, b: ProgramBuilder, block: LayerBuilder, y: Value) -> Value:
        d, size = self.d_model, self.d_model // self.heads
        parts = block.linear("shortconv.in_proj", y, 3 * d)
        # Per head: what gates the input, what gates the output, the input.
        before, after, value = (b.slice_heads(parts, self.heads, part * size, size) for part in range(3))
        mixed = b.short_conv(b.multiply(before, value), block.weight("shortconv.conv.weight", (d, self.taps)))
        return block.linear("shortconv.out_proj", b.multiply(after, mixed), d)

    def _delta(self, b: ProgramBuilder, block: LayerBuilder, y: Value) -> Value:
        heads, nk, nv = self.value_heads, self.key_heads * self.key_dim, self.value_heads * self.value_dim
        names = {"attn_qkv": 2 * nk + nv, "attn_gate": nv, "ssm_alpha": heads, "ssm_beta": heads}
        qkv, gate, alpha, beta = block.linears(y, names)
        conv = block.weight("ssm_conv1d.weight", (2 * nk + nv, self.taps))
        qkv = b.short_conv(qkv, conv, block.weight("ssm_conv1d.bias", (2 * nk + nv,)), "silu")
        q = b.l2_norm(b.slice(qkv, 0, nk), 1e-6, self.key_dim, scale=self.key_dim**-0.5)
        k = b.l2_norm(b.slice(qkv, nk, nk), 1e-6, self.key_dim)
        a, dt = (block.weight(name, (heads,)) for name in ("ssm_a", "ssm_dt.bias"))
        v, g = b.slice(qkv, 2 * nk, nv), b.decay_gate(alpha, a, dt)
        mixed = b.delta_rule(q, k, v, g, b.sigmoid(beta), key_heads=self.key_heads, value_heads=heads)
        mixed = b.gate(gate, block.rms_norm("ssm_norm", mixed, self.value_dim), "silu")
        return block.linear("ssm_out", mixed, self.d_model)

    def _experts(self, b: ProgramBuilder, block: LayerBuilder, y: Value) -> Value:
        logits = block.linear("ffn_gate_inp", y, self.n_experts)
        if self.sigmoid_routing:
            bias = block.weight("exp_probs_b.bias", (self.n_experts,))
            routed = b.route(logits, self.n_experts_used, "sigmoid", bias=bias, eps=1e-6)
        else:
            routed = b.route(logits, self.n_experts_used, "softmax")
        mixed = block.experts(y, routed, self.n_experts, self.d_ffn)
        return b.add(mixed, self._feed_forward(block, y, "_shexp"))

    def _feed_forward(self, block: LayerBuilder, y: Value, suffix: str = "") -> Value:
        return block.feed_forward(y, self.d_ffn, suffix)

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """All kinds of blocks, untied; tied with rope factors; recurrent only; attention only; experts; prediction;
        rows that are wide enough for K-quants."""
        return [
            tiny_variant("untied", LAYER_TYPES, 100),
            tiny_variant("tied", ("attention", "delta", "window", "conv", "delta"), 100, tied=True, rope_factors=True),
            tiny_variant("recurrent", ("delta", "conv"), 100),
            tiny_variant("attention", ("window", "attention"), 100),
            tiny_variant("mamba", ("mamba", "attention", "mamba"), 100, changes={"ssm.scan_groups": 2}),
            tiny_variant("experts", ("mamba", "attention"), 100, changes=EXPERTS),
            tiny_variant("sigmoid-experts", ("delta",), 100, changes={**EXPERTS, "expert_gating_func": 2}),
            tiny_variant("prediction", ("delta", "attention"), 100, changes={"nextn_predict_layers": 1}),
            tiny_variant("wide", ("delta", "attention", "conv"), 100, changes=WIDE),
            tiny_variant("wide-experts", ("mamba",), 100, changes={**WIDE, **EXPERTS}),
        ]


def tiny_hybrid_source(
    seed: int = 0, vocab: int = 300, *, predictable: bool = True, tensor_type: str = "F32"
) -> MemoryTensors:
    """A tiny hybrid model with a byte-level tokenizer and a chat template, in memory.

    predictable: the greedy continuation of token t is `predicted_next(vocab)[t]`, whatever came before: row
    `predicted_next[t]` of the output layer is token t's embedding, and the blocks, random as they are, move the
    hidden state by less than the distance between embeddings. The logits depend on the whole path all the same.
    tensor_type: what the matrices are stored as, for example ``"Q8_0"``; see `with_tensor_type`.
    """
    variant = tiny_variant("predictable" if predictable else "random", LAYER_TYPES, vocab)
    metadata = {**variant.metadata, **tokenizer_metadata(vocab)}
    if predictable:
        metadata["residual_scale"] = 0.2
    source = random_model(KEY, TinyVariant(variant.name, metadata, variant.tensors, variant.values), seed)
    if predictable:
        tensors: dict[str, npt.NDArray[Any] | RawTensor] = {n: read_tensor(source, n) for n in source.tensors}
        embeddings = read_tensor(source, "token_embd.weight")
        output = np.empty_like(embeddings)
        output[predicted_next(vocab)] = embeddings
        tensors["output.weight"] = output
        source = MemoryTensors(source.metadata.raw, tensors)
    return source if tensor_type == "F32" else with_tensor_type(source, tensor_type)
