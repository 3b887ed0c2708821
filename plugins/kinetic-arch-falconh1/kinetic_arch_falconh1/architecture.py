"""Falcon-H1: attention and Mamba-2 side by side in every block, then a gated feed-forward layer.

    x = embedding[token]
    per block:  y = rms(x);  x += attention(y) + mamba2(y)
                y = rms(x);  x += Wdown (silu(Wgate y) * Wup y)
    logits = Woutput rms(x)

    attention:  Wo attention(rope(Wq y), rope(Wk y), Wv y), half-split pairs
    mamba2:     z, u, dt = Win y;  x, B, C = silu(conv(u));  dt = softplus(dt + bias)
                S = e^(dt a) S + (dt x) B^T;  o = S C + d x;  Wout rms_per_group(o * silu(z)), or without the norm

Source: Falcon-H1, Zuo et al. 2025, arXiv 2507.22448; Mamba-2: Dao and Gu 2024, arXiv 2405.21060. The family's
multipliers are part of the matrices: converters fold them in, so none is applied here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kinetic_arch_falconh1.checkpoint import CHECKPOINT
from kinetic_arch_falconh1.tiny import tiny_variants
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
    from kinetic_core.program import ProgramBuilder, Value


class FalconH1(DecoderArchitecture):
    """A model of the family. `heads` and `head_dim` are the attention's, `mamba2` has those of Mamba-2."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True)
    checkpoint = CHECKPOINT
    key = "falcon-h1"

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``falcon-h1.``.

        Raises UnsupportedModelError for experts and rope scaling, MetadataError for keys that are missing, of another
        type or do not fit each other, TensorError without token embeddings.
        """
        super().__init__(source)
        meta = self.meta
        require_values(meta, {"expert_count": 0})
        refuse_rope_scaling(meta)
        self.heads = meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = read_kv_heads(meta, self.n_layers)
        self.head_dim = read_head_dim(meta)
        self.rotary_dim = read_rotary_dim(meta, self.head_dim)
        self.rope_base = meta.get_float("rope.freq_base", 10000.0, minimum=1.0)
        self.mamba2 = Mamba2.read(meta)
        self.d_ffn = meta.get_int("feed_forward_length", minimum=1)

    def build(self, b: ProgramBuilder) -> Value:
        """The blocks and the last norm."""
        layers = LayerBuilder(b, self.eps, optional_biases=True)
        x = self.embed(b)
        for layer, kv_heads in enumerate(self.kv_heads):
            block = layers.block(layer)
            y = block.rms_norm("attn_norm", x)
            x = b.add(x, b.add(self._attention(b, block, y, kv_heads), self.mamba2.record(block, y)))
            # This family's files call the tensor "ffn_norm" without ".weight".
            norm = block.weight("ffn_norm" if block.has("ffn_norm") else "ffn_norm.weight", (self.d_model,))
            x = b.add(x, block.feed_forward(b.rms_norm(x, norm, self.eps), self.d_ffn))
        return layers.rms_norm("output_norm", x)

    def _attention(self, b: ProgramBuilder, block: LayerBuilder, y: Value, kv_heads: int) -> Value:
        heads, d = self.heads, self.head_dim
        q, k, v = block.linears(y, {"attn_q": heads * d, "attn_k": kv_heads * d, "attn_v": kv_heads * d})
        q, k = self._rope(b, q), self._rope(b, k)
        mixed = b.attention(q, k, v, heads=heads, kv_heads=kv_heads, head_dim=d)
        return block.linear("attn_output", mixed, self.d_model)

    def _rope(self, b: ProgramBuilder, x: Value) -> Value:
        return b.rope(x, head_dim=self.head_dim, rotary_dim=self.rotary_dim, base=self.rope_base, interleaved=False)

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """Every variant of `tiny_variants`."""
        return tiny_variants()
