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

from kinetic_core.errors import MetadataError, describe
from kinetic_core.gguf import MemoryTensors, RawTensor, check_block_count, read_tensor
from kinetic_core.interfaces.architecture import Architecture, ArchitectureCapabilities, TinyVariant
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


class TinyHybrid(Architecture):
    """Every kind of block in one tiny model."""

    capabilities = ArchitectureCapabilities(
        has_recurrent_state=True, has_prediction_block=True, has_experts=True, has_sliding_window=True
    )

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``tiny-hybrid.``."""
        meta = source.metadata.prefixed(KEY)
        self.n_predicted = meta.get_int("nextn_predict_layers", 0, minimum=0, maximum=1)
        self.n_layers = check_block_count(meta, source.tensors) - self.n_predicted
        self.layer_types = meta.get_strs("layer_types", length=self.n_layers)
        for layer in self.layer_types:
            if layer not in ALL_LAYER_TYPES:
                raise MetadataError(
                    describe(
                        "unknown layer type", where=f"key '{KEY}.layer_types'", got=layer, expected=ALL_LAYER_TYPES
                    )
                )
        self._context_length = meta.get_int("context_length", minimum=1)
        self.d_model = meta.get_int("embedding_length", minimum=1)
        self.d_ffn = meta.get_int("feed_forward_length", minimum=1)
        self._vocab = meta.get_int("vocab_size", minimum=1)
        self.heads = meta.get_int("attention.head_count", minimum=1)
        if self.d_model % self.heads:
            raise MetadataError(
                describe(
                    "a metadata key does not fit",
                    where=f"key '{KEY}.attention.head_count'",
                    got=self.heads,
                    expected=f"a divisor of {self.d_model}, the hidden size",
                )
            )
        self.kv_heads = meta.get_int("attention.head_count_kv", minimum=1)
        self.head_dim = meta.get_int("attention.key_length", minimum=1)
        self.window = meta.get_int("attention.sliding_window", minimum=1)
        self.eps = meta.get_float("attention.layer_norm_rms_epsilon", minimum=0)
        self.rotary_dim = meta.get_int("rope.dimension_count", minimum=2, maximum=self.head_dim)
        self.rope_base = meta.get_float("rope.freq_base", minimum=1)
        self.taps = meta.get_int("ssm.conv_kernel", minimum=2)
        self.key_heads = meta.get_int("ssm.group_count", minimum=1)
        self.value_heads = meta.get_int("ssm.time_step_rank", minimum=1)
        self.key_dim = meta.get_int("ssm.state_size", minimum=1)
        self.value_dim = meta.get_int("ssm.value_size", minimum=1)
        self.groups = meta.get_int("ssm.scan_groups", 1, minimum=1)
        self.n_experts = meta.get_int("expert_count", 0, minimum=0)
        self.n_experts_used = meta.get_int("expert_used_count", 1, minimum=1)
        self.sigmoid_routing = meta.get_int("expert_gating_func", 1, minimum=1, maximum=2) == 2
        self.embedding_scale = meta.get_float("embedding_scale")
        self.residual_scale = meta.get_float("residual_scale")
        self.logit_scale = meta.get_float("logit_scale")

    @property
    def context_length(self) -> int:
        """Positions."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        return self._vocab

    def build(self, b: ProgramBuilder) -> Value:
        """Embedding; per block a mixer and a feed-forward layer, both behind a norm; the last norm."""
        x = b.embedding(b.weight("token_embd.weight", (self._vocab, self.d_model)), self.embedding_scale)
        for layer, kind in enumerate(self.layer_types):
            x = self._block(b, f"blk.{layer}.", kind, x)
        return b.rms_norm(x, b.weight("output_norm.weight", (self.d_model,)), self.eps)

    def _block(self, b: ProgramBuilder, prefix: str, kind: str, x: Value) -> Value:
        mixers = {
            "attention": self._attention,
            "window": self._window,
            "conv": self._conv,
            "delta": self._delta,
            "mamba": self._mamba,
        }
        y = b.rms_norm(x, b.weight(prefix + "attn_norm.weight", (self.d_model,)), self.eps)
        x = b.add(x, mixers[kind](b, prefix, y), self.residual_scale)
        y = b.rms_norm(x, b.weight(prefix + "ffn_norm.weight", (self.d_model,)), self.eps)
        mixed = self._experts(b, prefix, y) if self.n_experts else self._feed_forward(b, prefix, y)
        return b.add(x, mixed, self.residual_scale)

    @property
    def has_prediction(self) -> bool:
        """Is there a block after the last?"""
        return self.n_predicted > 0

    def build_prediction(self, b: ProgramBuilder, hidden: Value) -> Value:
        """The token's embedding and the hidden state before it, both behind a norm, through one more block."""
        prefix, d = f"blk.{self.n_layers}.", self.d_model
        x = b.embedding(b.weight("token_embd.weight", (self._vocab, d)), self.embedding_scale)
        x = b.rms_norm(x, b.weight(prefix + "nextn.enorm.weight", (d,)), self.eps)
        y = b.rms_norm(hidden, b.weight(prefix + "nextn.hnorm.weight", (d,)), self.eps)
        x = b.linear(b.concatenate(x, y), b.weight(prefix + "nextn.eh_proj.weight", (d, 2 * d)))
        x = self._block(b, prefix, "attention", x)
        return b.rms_norm(x, b.weight(prefix + "nextn.shared_head_norm.weight", (d,)), self.eps)

    def output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """``output.weight``, or the embeddings where the file has none."""
        shape = (self._vocab, self.d_model)
        weight = b.optional_weight("output.weight", shape) or b.weight("token_embd.weight", shape)
        return weight, self.logit_scale

    def _attention(self, b: ProgramBuilder, prefix: str, x: Value) -> Value:
        factors = b.optional_weight("rope_freqs.weight", (self.rotary_dim // 2,))
        return self._attend(b, prefix, x, window=None, interleaved=False, factors=factors)

    def _window(self, b: ProgramBuilder, prefix: str, x: Value) -> Value:
        return self._attend(b, prefix, x, window=self.window, interleaved=True, factors=None)

    def _attend(
        self, b: ProgramBuilder, prefix: str, x: Value, *, window: int | None, interleaved: bool, factors: Weight | None
    ) -> Value:
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        names = {"attn_q": width, "attn_k": kv_width, "attn_v": kv_width, "attn_gate": self.heads}
        weights = [b.weight(f"{prefix}{name}.weight", (outputs, self.d_model)) for name, outputs in names.items()]
        q, k, v, gate = b.linears(x, weights, [b.weight(prefix + "attn_q.bias", (width,)), None, None, None])
        q, k = (
            b.rope(
                b.rms_norm(value, b.weight(f"{prefix}{name}_norm.weight", (self.head_dim,)), self.eps, self.head_dim),
                head_dim=self.head_dim,
                rotary_dim=self.rotary_dim,
                base=self.rope_base,
                interleaved=interleaved,
                factors=factors,
            )
            for name, value in (("attn_q", q), ("attn_k", k))
        )
        mixed = b.attention(q, k, v, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, window=window)
        mixed = b.gate(gate, mixed, "sigmoid")
        return b.linear(mixed, b.weight(prefix + "attn_output.weight", (self.d_model, width)))

    def _conv(self, b: ProgramBuilder, prefix: str, x: Value) -> Value:
        d = self.d_model
        parts = b.linear(x, b.weight(prefix + "shortconv.in_proj.weight", (3 * d, d)))
        # Per head: what gates the input, what gates the output, the input.
        size = d // self.heads
        before, after, value = (b.slice_heads(parts, self.heads, part * size, size) for part in range(3))
        mixed = b.short_conv(b.multiply(before, value), b.weight(prefix + "shortconv.conv.weight", (d, self.taps)))
        return b.linear(b.multiply(after, mixed), b.weight(prefix + "shortconv.out_proj.weight", (d, d)))

    def _delta(self, b: ProgramBuilder, prefix: str, x: Value) -> Value:
        d, nk, nv = self.d_model, self.key_heads * self.key_dim, self.value_heads * self.value_dim
        names = {"attn_qkv": 2 * nk + nv, "attn_gate": nv, "ssm_alpha": self.value_heads, "ssm_beta": self.value_heads}
        qkv, gate, alpha, beta = b.linears(x, [b.weight(f"{prefix}{n}.weight", (o, d)) for n, o in names.items()])
        qkv = b.short_conv(
            qkv,
            b.weight(prefix + "ssm_conv1d.weight", (2 * nk + nv, self.taps)),
            b.weight(prefix + "ssm_conv1d.bias", (2 * nk + nv,)),
            "silu",
        )
        q = b.l2_norm(b.slice(qkv, 0, nk), 1e-6, self.key_dim, scale=self.key_dim**-0.5)
        k = b.l2_norm(b.slice(qkv, nk, nk), 1e-6, self.key_dim)
        a, dt = (b.weight(prefix + name, (self.value_heads,)) for name in ("ssm_a", "ssm_dt.bias"))
        mixed = b.delta_rule(
            q,
            k,
            b.slice(qkv, 2 * nk, nv),
            b.decay_gate(alpha, a, dt),
            b.sigmoid(beta),
            key_heads=self.key_heads,
            value_heads=self.value_heads,
        )
        mixed = b.rms_norm(mixed, b.weight(prefix + "ssm_norm.weight", (self.value_dim,)), self.eps, self.value_dim)
        return b.linear(b.gate(gate, mixed, "silu"), b.weight(prefix + "ssm_out.weight", (d, nv)))

    def _mamba(self, b: ProgramBuilder, prefix: str, x: Value) -> Value:
        d, inner, bc = self.d_model, self.value_heads * self.value_dim, self.groups * self.key_dim
        projected = b.linear(x, b.weight(prefix + "ssm_in.weight", (2 * inner + 2 * bc + self.value_heads, d)))
        gate, mixed, dt = b.split(projected, (inner, inner + 2 * bc, self.value_heads))
        channels = inner + 2 * bc
        conv = b.weight(prefix + "ssm_conv1d.weight", (channels, self.taps))
        mixed = b.short_conv(mixed, conv, b.weight(prefix + "ssm_conv1d.bias", (channels,)), "silu")
        value, key, query = b.split(mixed, (inner, bc, bc))
        heads = (self.value_heads,)
        mixed = b.mamba2_scan(
            value,
            key,
            query,
            b.softplus(dt, b.weight(prefix + "ssm_dt.bias", heads)),
            b.weight(prefix + "ssm_a", heads),
            b.weight(prefix + "ssm_d", heads),
            heads=self.value_heads,
            groups=self.groups,
        )
        mixed = b.gate(gate, mixed, "silu")
        group = inner // self.groups
        mixed = b.rms_norm(mixed, b.weight(prefix + "ssm_norm.weight", (self.groups, group)), self.eps, group)
        return b.linear(mixed, b.weight(prefix + "ssm_out.weight", (d, inner)))

    def _experts(self, b: ProgramBuilder, prefix: str, x: Value) -> Value:
        d, n, width = self.d_model, self.n_experts, self.d_ffn
        logits = b.linear(x, b.weight(prefix + "ffn_gate_inp.weight", (n, d)))
        if self.sigmoid_routing:
            bias = b.weight(prefix + "exp_probs_b.bias", (n,))
            routed = b.route(logits, self.n_experts_used, "sigmoid", bias=bias, eps=1e-6)
        else:
            routed = b.route(logits, self.n_experts_used, "softmax")
        gate, up = (b.weight(f"{prefix}{name}.weight", (n, width, d)) for name in ("ffn_gate_exps", "ffn_up_exps"))
        mixed = b.experts(x, routed, gate, up, b.weight(prefix + "ffn_down_exps.weight", (n, d, width)))
        return b.add(mixed, self._feed_forward(b, prefix, x, "_shexp"))

    def _feed_forward(self, b: ProgramBuilder, prefix: str, x: Value, kind: str = "") -> Value:
        shape = (self.d_ffn, self.d_model)
        weights = [b.weight(f"{prefix}{name}{kind}.weight", shape) for name in ("ffn_gate", "ffn_up")]
        gate, up = b.linears(x, weights)
        return b.linear(b.gate(gate, up, "silu"), b.weight(f"{prefix}ffn_down{kind}.weight", shape[::-1]))

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
