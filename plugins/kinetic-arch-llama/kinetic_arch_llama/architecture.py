"""Llama: attention and a gated feed-forward layer per block, each behind a root-mean-square norm.

    x = embedding[token]
    per block:  y = rms(x);  x += Wo attention(rope(Wq y), rope(Wk y), Wv y)
                y = rms(x);  x += Wdown (silu(Wgate y) * Wup y)
    logits = Woutput rms(x)

Source: Touvron et al. 2023, arXiv 2302.13971; grouped-query attention: Ainslie et al. 2023, arXiv 2305.13245. The rows
of Wq and Wk are stored so that rope turns adjacent pairs of columns. Frequency factors: the file's `rope_freqs.weight`
divides each pair's angle, which is how converters store the rope scaling of Llama 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinetic_arch_llama.checkpoint import CHECKPOINT
from kinetic_core.interfaces import ArchitectureCapabilities, TinyVariant
from kinetic_core.layers import (
    DecoderArchitecture,
    LayerBuilder,
    attention_matrices,
    feed_forward_matrices,
    layer_tensors,
    read_head_dim,
    read_kv_heads,
    read_rotary_dim,
    refuse_rope_scaling,
    require_values,
    tiny_decoder,
)

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value


class Llama(DecoderArchitecture):
    """A dense model of the Llama family. `heads`, `kv_heads`, `head_dim` and the like are the file's, checked."""

    capabilities = ArchitectureCapabilities()
    checkpoint = CHECKPOINT
    key = "llama"

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``llama.``.

        Raises UnsupportedModelError for experts and rope scaling, MetadataError for keys that are missing, of another
        type or do not fit each other, TensorError without token embeddings.
        """
        super().__init__(source)
        meta = self.meta
        require_values(meta, {"expert_count": 0})
        refuse_rope_scaling(meta, instead="none, or the file's rope_freqs.weight")
        self.d_ffn = meta.get_int("feed_forward_length", minimum=1)
        self.heads = meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = read_kv_heads(meta, self.n_layers)
        self.head_dim = read_head_dim(meta)
        self.rotary_dim = read_rotary_dim(meta, self.head_dim)
        self.rope_base = meta.get_float("rope.freq_base", 10000.0, minimum=1.0)

    def build(self, b: ProgramBuilder) -> Value:
        """The blocks and the last norm."""
        layers = LayerBuilder(b, self.eps, optional_biases=True)
        x = self.embed(b)
        for layer, kv_heads in enumerate(self.kv_heads):
            block = layers.block(layer)
            x = b.add(x, self._attention(b, block, block.rms_norm("attn_norm", x), kv_heads))
            x = b.add(x, block.feed_forward(block.rms_norm("ffn_norm", x), self.d_ffn))
        return layers.rms_norm("output_norm", x)

    def _attention(self, b: ProgramBuilder, block: LayerBuilder, y: Value, kv_heads: int) -> Value:
        heads, d = self.heads, self.head_dim
        q, k, v = block.linears(y, {"attn_q": heads * d, "attn_k": kv_heads * d, "attn_v": kv_heads * d})
        q, k = self._rope(b, q), self._rope(b, k)
        mixed = b.attention(q, k, v, heads=heads, kv_heads=kv_heads, head_dim=d)
        return block.linear("attn_output", mixed, self.d_model)

    def _rope(self, b: ProgramBuilder, x: Value) -> Value:
        factors = b.optional_weight("rope_freqs.weight", (self.rotary_dim // 2,))
        return b.rope(
            x,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            base=self.rope_base,
            interleaved=True,
            factors=factors,
        )

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """Tied; untied with frequency factors; biased; rope over a part of the head; without optional keys; wide."""
        wide = {"embedding_length": 256, "feed_forward_length": 512, "attention.key_length": 64}
        return [
            _tiny("tied"),
            _tiny("untied", tied=False, rope_factors=True),
            _tiny("biased", biased=True),
            _tiny("partial-rope", {"attention.key_length": 32, "rope.dimension_count": 12}),
            _tiny("defaults", dict.fromkeys(_OPTIONAL_KEYS)),
            _tiny("wide", {**wide, "rope.dimension_count": 64}, tied=False),
        ]


_OPTIONAL_KEYS = (
    "attention.head_count_kv",
    "attention.key_length",
    "rope.dimension_count",
    "rope.freq_base",
)


def _tiny(
    name: str,
    changes: Mapping[str, Any] | None = None,
    *,
    tied: bool = True,
    rope_factors: bool = False,
    biased: bool = False,
) -> TinyVariant:
    """Two blocks of 4 heads; `changes` replaces metadata keys, None leaves one out."""
    heads = 4
    metadata: dict[str, Any] = {
        "context_length": 1024,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": heads,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "rope.freq_base": 500000.0,
        **(changes or {}),
    }
    d, d_ffn = metadata["embedding_length"], metadata["feed_forward_length"]
    head_dim, kv_heads = metadata["attention.key_length"] or d // heads, metadata["attention.head_count_kv"] or heads
    matrices = attention_matrices(d, heads, kv_heads, head_dim) | feed_forward_matrices(d, d_ffn)
    block = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,), **layer_tensors(matrices, biased=biased)}
    outside: dict[str, tuple[int, ...]] = {"output_norm.weight": (d,)}
    if rope_factors:
        outside["rope_freqs.weight"] = (metadata["rope.dimension_count"] // 2,)
    optional = ["output.weight", "rope_freqs.weight", *(f"blk.*.{matrix}.bias" for matrix in matrices)]
    defaults = {
        "attention.head_count_kv": heads,
        "attention.key_length": d // heads,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "none",
        "expert_count": 0,
    }
    return tiny_decoder(name, metadata, [block] * 2, tied=tied, outside=outside, optional=optional, defaults=defaults)
