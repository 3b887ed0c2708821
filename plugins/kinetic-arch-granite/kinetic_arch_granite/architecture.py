"""Granite 4.0 hybrid: Mamba-2 or attention in each block, then a feed-forward layer or experts, all behind norms.

    x = embedding[token] * embedding_scale
    per block:  x += residual_scale * mixer(rms(x));  x += residual_scale * ffn(rms(x))
    logits = Woutput rms(x) / logit_scale

    attention:  Wo attention(Wq y, Wk y, Wv y), scores times attention.scale, usually without rope
    Mamba-2:    z, u, dt = Win y;  x, B, C = silu(conv(u));  dt = softplus(dt + bias)
                S = e^(dt a) S + (dt x) B^T;  o = S C + d x;  Wout rms_per_group(o * silu(z)), or without the norm
    dense ffn:  Wdown (silu(Wgate y) * Wup y)
    experts:    the best of softmax(Wrouter y), weights adding up to 1, each a dense ffn; plus a shared one

Source: Mamba-2: Dao and Gu 2024, arXiv 2405.21060; experts: Shazeer et al. 2017, arXiv 1701.06538.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kinetic_arch_granite.checkpoint import CHECKPOINT
from kinetic_arch_granite.tiny import tiny_variants
from kinetic_core.interfaces import ArchitectureCapabilities, TinyVariant
from kinetic_core.layers import (
    DecoderArchitecture,
    LayerBuilder,
    Mamba2,
    read_head_dim,
    read_kv_heads,
    read_rotary_dim,
    refuse_rope_scaling,
    require_values,
)

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value, Weight


class GraniteHybrid(DecoderArchitecture):
    """A model of the family. `kv_heads[layer]` = 0 marks a Mamba-2 block; `n_experts` = 0 a dense model."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True, has_experts=True)
    checkpoint = CHECKPOINT
    key = "granitehybrid"

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``granitehybrid.``.

        Raises UnsupportedModelError for rope scaling and another kind of routing, MetadataError for keys that are
        missing, of another type or do not fit each other, TensorError without token embeddings.
        """
        super().__init__(source)
        meta = self.meta
        # A multiplier of 0 is how converters write that there is none.
        self.embedding_scale = meta.get_float("embedding_scale", 1.0, minimum=0.0) or 1.0
        self.residual_scale = meta.get_float("residual_scale", 1.0, minimum=0.0) or 1.0
        self.logit_scale = meta.get_float("logit_scale", 1.0, minimum=0.0) or 1.0
        self.heads = meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = read_kv_heads(meta, self.n_layers, minimum=0)
        self.head_dim = read_head_dim(meta)
        self.attention_scale = meta.get_float("attention.scale", 0.0, minimum=0.0) or self.head_dim**-0.5
        # The family's switch: false in hybrids, whose attention has no positions; true in models without Mamba-2.
        self.rotates = meta.get_bool("rope.scaling.finetuned", True)
        if self.rotates:
            refuse_rope_scaling(meta, instead="none, or the file's rope_freqs.weight")
            self.rotary_dim = read_rotary_dim(meta, self.head_dim)
            self.rope_base = meta.get_float("rope.freq_base", 10000.0, minimum=1.0)
        if 0 in self.kv_heads:
            self.mamba2 = Mamba2.read(meta)
        self.d_ffn = meta.get_int("feed_forward_length", minimum=1)
        self.n_experts = meta.get_int("expert_count", 0, minimum=0)
        if self.n_experts:
            require_values(meta, {"expert_gating_func": 1})  # softmax
            self.n_experts_used = meta.get_int("expert_used_count", minimum=1, maximum=self.n_experts)
            self.d_shared = meta.get_int("expert_shared_feed_forward_length", 0, minimum=0)

    def build(self, b: ProgramBuilder) -> Value:
        """The blocks and the last norm."""
        layers = LayerBuilder(b, self.eps, optional_biases=True)
        x = self.embed(b, self.embedding_scale)
        for layer, kv_heads in enumerate(self.kv_heads):
            block = layers.block(layer)
            y = block.rms_norm("attn_norm", x)
            mixed = self._attention(b, block, y, kv_heads) if kv_heads else self.mamba2.record(block, y)
            x = b.add(x, mixed, self.residual_scale)
            y = block.rms_norm("ffn_norm", x)
            mixed = self._experts(b, block, y) if self.n_experts else block.feed_forward(y, self.d_ffn)
            x = b.add(x, mixed, self.residual_scale)
        return layers.rms_norm("output_norm", x)

    def output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """``output.weight``, or the token embeddings where the file ties them; logits are divided by logit_scale."""
        return super().output(b)[0], 1.0 / self.logit_scale

    def _attention(self, b: ProgramBuilder, block: LayerBuilder, y: Value, kv_heads: int) -> Value:
        heads, d = self.heads, self.head_dim
        q, k, v = block.linears(y, {"attn_q": heads * d, "attn_k": kv_heads * d, "attn_v": kv_heads * d})
        if self.rotates:
            q, k = self._rope(b, q), self._rope(b, k)
        mixed = b.attention(q, k, v, heads=heads, kv_heads=kv_heads, head_dim=d, scale=self.attention_scale)
        return block.linear("attn_output", mixed, self.d_model)

    def _rope(self, b: ProgramBuilder, x: Value) -> Value:
        """Adjacent pairs: the rows of Wq and Wk are stored in that order."""
        return b.rope(
            x,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            base=self.rope_base,
            interleaved=True,
            factors=b.optional_weight("rope_freqs.weight", (self.rotary_dim // 2,)),
        )

    def _experts(self, b: ProgramBuilder, block: LayerBuilder, y: Value) -> Value:
        router = block.weight("ffn_gate_inp.weight", (self.n_experts, self.d_model))
        routed = b.route(b.linear(y, router), self.n_experts_used, "softmax")
        mixed = block.experts(y, routed, self.n_experts, self.d_ffn)
        return b.add(mixed, block.feed_forward(y, self.d_shared, "_shexp")) if self.d_shared else mixed

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """Every variant of `tiny_variants`."""
        return tiny_variants()
