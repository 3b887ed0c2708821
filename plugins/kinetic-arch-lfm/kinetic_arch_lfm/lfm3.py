"""LFM3: LFM2 with a second norm after each layer, a gate per head, and attention blocks that see a window only.

    per block:  y = rms(x);  x += rms(convolution(y))  or  rms(Wo (sigmoid(Wgate y) * attention(Wq y, Wk y, Wv y)))
                y = rms(x);  x += rms(feed_forward(y))

A sliding block's query i sees key j if 0 <= i - j < window, and rope turns its whole heads with a base of its own. In
full blocks `rope_freqs.weight` stops most pairs: its factors are 1 for pairs that turn and 1e30 for the others.
`blocks` has the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from kinetic_arch_lfm.blocks import Fixed, Lfm, whole_head
from kinetic_arch_lfm.checkpoint import LFM3
from kinetic_arch_lfm.tiny import lfm3_variants
from kinetic_core.interfaces import ArchitectureCapabilities, TinyVariant

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.layers import LayerBuilder
    from kinetic_core.program import ProgramBuilder, Value


class Lfm3(Lfm):
    """An LFM3 model."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True, has_sliding_window=True)
    checkpoint = LFM3
    key = "lfm3"
    only: ClassVar[Mapping[str, Fixed]] = {"expert_count": 0}

    def __init__(self, source: TensorSource) -> None:
        """Read the keys of sliding blocks besides those of `Lfm`; raises the same errors.

        No ``sliding_window_pattern`` means that no block slides; then nothing else about windows is needed.
        """
        super().__init__(source)
        pattern = self.meta.get_bools_per_layer("attention.sliding_window_pattern", self.n_layers, False)
        self.slides = tuple(slides and not self.is_convolution(layer) for layer, slides in enumerate(pattern))
        if any(self.slides):
            self.window = self.meta.get_int("attention.sliding_window", minimum=1)
            self.sliding_rope_base = self.meta.get_float("rope.freq_base_swa", minimum=1.0)
            whole_head(self.meta, "rope.dimension_count_swa", self.head_dim)

    def block(self, b: ProgramBuilder, block: LayerBuilder, layer: int, x: Value) -> Value:
        """Mixer and feed-forward layer, each between two norms."""
        mixer = self.convolution if self.is_convolution(layer) else self.attention
        y = mixer(b, block, layer, block.rms_norm("attn_norm", x))
        x = b.add(x, block.rms_norm("post_attention_norm", y))
        y = block.feed_forward(block.rms_norm("ffn_norm", x), self.d_ffn)
        return b.add(x, block.rms_norm("post_ffw_norm", y))

    def attention(self, b: ProgramBuilder, block: LayerBuilder, layer: int, y: Value) -> Value:
        """Grouped-query attention over all positions or a window, each head gated by the block's input."""
        q, k, v, gate = block.linears(y, {**self.attention_widths(layer), "attn_gate": self.heads})
        if self.slides[layer]:
            base, window = self.sliding_rope_base, self.window
            mixed = self.attend(b, block, layer, q, k, v, base=base, factors=None, window=window)
        else:
            mixed = self.attend(b, block, layer, q, k, v, base=self.rope_base, factors=self.rope_factors(b))
        return block.linear("attn_output", b.gate(gate, mixed, "sigmoid"), self.d_model)

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """See `tiny`."""
        return lfm3_variants()
