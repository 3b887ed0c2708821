"""What LFM2, LFM2-MoE and LFM3 share: keys, the order of the layers, convolution blocks, attention, feed-forward.

    x = embedding[token]
    per block:  x = the family's block(x)
    logits = Woutput rms(x)

    convolution(y):   B, C, X = Win y;  Wout (C * conv(B * X))
    attention(q, k, v) of rope(rms(q)), rope(rms(k)), v, per head
    feed_forward(y):  Wdown (silu(Wgate y) * Wup y)

A block whose number of key/value heads is 0 is a convolution block. Rope turns the whole head in two halves. Source:
Liquid AI 2025, "LFM2 Technical Report", arXiv 2511.23404.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kinetic_core.errors import TensorError, describe
from kinetic_core.gguf import Metadata
from kinetic_core.layers import (
    DecoderArchitecture,
    LayerBuilder,
    read_head_dim,
    read_kv_heads,
    refuse_rope_scaling,
    require_values,
)

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value, Weight

Fixed = bool | int | float | str


class Lfm(DecoderArchitecture):
    """Configuration and the equations that the families share; `block` is what differs."""

    only: ClassVar[Mapping[str, Fixed]]
    """Keys that, where a file has them, must have this value: any other asks for what is not in the equations."""

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``<architecture>.``.

        Raises UnsupportedModelError for other variants, MetadataError for keys that are missing, of another type or
        do not fit each other, TensorError without token embeddings.
        """
        super().__init__(source)
        meta = self.meta
        require_values(meta, {"attention.causal": True, **self.only})
        refuse_rope_scaling(meta)
        self.d_ffn = meta.get_int("feed_forward_length", minimum=1)
        self.heads = meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = read_kv_heads(meta, self.n_layers, minimum=0, required=True)
        self.head_dim = read_head_dim(meta)
        if self.head_dim % 2:
            raise meta.does_not_fit("attention.key_length", self.head_dim, "an even number: rope turns pairs")
        self.rope_base = meta.get_float("rope.freq_base", minimum=1.0)
        whole_head(meta, "rope.dimension_count", self.head_dim)
        self.taps = meta.get_int("shortconv.l_cache", minimum=2)

    def build(self, b: ProgramBuilder) -> Value:
        """The blocks and the last norm, which files call ``token_embd_norm`` (a few ``output_norm``)."""
        layers = LayerBuilder(b, self.eps)
        x = self.embed(b)
        for layer in range(self.n_layers):
            x = self.block(b, layers.block(layer), layer, x)
        for name in ("token_embd_norm", "output_norm"):
            if layers.has(f"{name}.weight"):
                return layers.rms_norm(name, x)
        raise TensorError(
            describe("the last norm is missing", expected="'token_embd_norm.weight' or 'output_norm.weight'")
        )

    @abstractmethod
    def block(self, b: ProgramBuilder, block: LayerBuilder, layer: int, x: Value) -> Value:
        """x after block number `layer`."""

    def is_convolution(self, layer: int) -> bool:
        """Is the mixer of this block a convolution?"""
        return self.kv_heads[layer] == 0

    def convolution(self, b: ProgramBuilder, block: LayerBuilder, layer: int, y: Value) -> Value:
        """The gated short convolution."""
        d = self.d_model
        before, after, inner = b.split(block.linear("shortconv.in_proj", y, 3 * d), (d, d, d))
        conv = block.weight("shortconv.conv.weight", (d, self.taps))
        return block.linear("shortconv.out_proj", b.multiply(after, b.short_conv(b.multiply(before, inner), conv)), d)

    def attention_widths(self, layer: int) -> dict[str, int]:
        """The projections that make queries, keys and values, by name and width."""
        kv_width = self.kv_heads[layer] * self.head_dim
        return {"attn_q": self.heads * self.head_dim, "attn_k": kv_width, "attn_v": kv_width}

    def attend(
        self,
        b: ProgramBuilder,
        block: LayerBuilder,
        layer: int,
        q: Value,
        k: Value,
        v: Value,
        *,
        base: float,
        factors: Weight | None,
        window: int | None = None,
    ) -> Value:
        """Attention after a norm and rope of each head of q and k."""
        d, kv_heads = self.head_dim, self.kv_heads[layer]
        q, k = (
            b.rope(block.rms_norm(name, x, d), head_dim=d, rotary_dim=d, base=base, interleaved=False, factors=factors)
            for name, x in (("attn_q_norm", q), ("attn_k_norm", k))
        )
        return b.attention(q, k, v, heads=self.heads, kv_heads=kv_heads, head_dim=d, window=window)

    def rope_factors(self, b: ProgramBuilder) -> Weight | None:
        """``rope_freqs.weight``, which divides the angle of each pair: a factor of 1e30 stops it."""
        return b.optional_weight("rope_freqs.weight", (self.head_dim // 2,))


def whole_head(meta: Metadata, key: str, head_dim: int) -> None:
    """Raises MetadataError where `key` is there and is not the head size."""
    got = meta.get_int(key, head_dim)
    if got != head_dim:
        raise meta.does_not_fit(key, got, f"{head_dim}, the head size: rope turns all of it")
