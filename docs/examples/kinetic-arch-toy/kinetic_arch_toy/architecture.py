"""The toy family: in some layers a linear memory, in others attention, and a feed-forward layer beside each.

    x = embedding[token]
    per layer:    y = rms(x);  x += memory(y) or attention(y);  x += Wdown (silu(Wgate y) * Wup y)
    logits = Woutput rms(x)

    memory(y):    q = unit(Wq y), k = unit(silu(conv(Wk y))), v = Wv y, t = softplus(Wt y + bias)
                  S = exp(t decay) S + k (t v)^T            one S per head of v; heads may share q and k
                  Wo (sigmoid(Wgate y) * (S^T q + skip v))
    attention(y): Wo attend(rms(Wq y), rms(Wk y), Wv y)     no rope: the memory knows the order

The memory's recurrence is that of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kinetic_arch_toy import tiny
from kinetic_core.interfaces import ArchitectureCapabilities, TinyVariant
from kinetic_core.layers import DecoderArchitecture, LayerBuilder

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value


class Toy(DecoderArchitecture):
    """A model of the family."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True)
    key = "toy"

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``toy.``; MetadataError for those that are missing, of another type or do not fit."""
        super().__init__(source)
        self.attends = self.meta.get_bools_per_layer("attention_layers", self.n_layers)
        self.d_ffn = self.meta.get_int("feed_forward_length", minimum=1)
        self.taps = self.meta.get_int("memory.conv_kernel", minimum=2)
        self.heads = self.meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = self.meta.get_int("attention.head_count_kv", self.heads, minimum=1)
        if self.heads % self.kv_heads:
            raise self.meta.does_not_fit("attention.head_count_kv", self.kv_heads, f"a divisor of {self.heads}")
        self.head_dim = self.meta.get_int("attention.key_length", minimum=1)
        self.wide, self.narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim

    def build(self, b: ProgramBuilder) -> Value:
        """The layers and the last norm."""
        layers = LayerBuilder(b, self.eps)
        x = self.embed(b)
        for layer, attends in enumerate(self.attends):
            block = layers.block(layer)
            y = block.rms_norm("norm", x)
            x = b.add(x, self._attention(block, y) if attends else self._memory(block, y))
            x = b.add(x, block.feed_forward(y, self.d_ffn))
        return layers.rms_norm("output_norm", x)

    def _memory(self, block: LayerBuilder, y: Value) -> Value:
        b, heads = block.b, (self.heads,)
        widths = {"mem_q": self.narrow, "mem_k": self.narrow, "mem_v": self.wide, "mem_gate": self.wide}
        q, k, v, gate, t = block.linears(y, {**widths, "mem_time": self.heads})
        k = b.short_conv(k, block.weight("mem_conv.weight", (self.narrow, self.taps)), activation="silu")
        q, k = (b.l2_norm(x, 1e-6, self.head_dim) for x in (q, k))
        t = b.softplus(t, block.weight("mem_time.bias", heads))
        decay, skip = block.weight("mem_decay", heads), block.weight("mem_skip", heads)
        mixed = b.mamba2_scan(v, k, q, t, decay, skip, heads=self.heads, groups=self.kv_heads)
        return block.linear("mem_output", b.gate(gate, mixed, "sigmoid"), self.d_model)

    def _attention(self, block: LayerBuilder, y: Value) -> Value:
        q, k, v = block.linears(y, {"attn_q": self.wide, "attn_k": self.narrow, "attn_v": self.narrow})
        q, k = block.rms_norm("attn_q_norm", q, self.head_dim), block.rms_norm("attn_k_norm", k, self.head_dim)
        mixed = block.b.attention(q, k, v, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        return block.linear("attn_output", mixed, self.d_model)

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """See `tiny.variants`."""
        return tiny.variants()
