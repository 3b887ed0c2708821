"""LFM2 and LFM2-MoE: gated short convolutions and a few attention blocks; with experts in all but the first blocks.

    per block:  y = rms(x);  x += convolution(y)  or  Wo attention(Wq y, Wk y, Wv y)
                y = rms(x);  x += feed_forward(y)  or  experts(y)

    experts(y): p = sigmoid(Wrouter y);  the n experts with the highest p + bias, each a feed_forward of its own,
                added with the weights p / (sum of the chosen p + 1e-6)

`blocks` has the parts. Source: Liquid AI 2025, "LFM2 Technical Report", arXiv 2511.23404.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from kinetic_arch_lfm.blocks import Fixed, Lfm
from kinetic_arch_lfm.checkpoint import LFM2, LFM2_MOE
from kinetic_arch_lfm.tiny import lfm2_variants, lfm2moe_variants
from kinetic_core.interfaces import ArchitectureCapabilities, TinyVariant

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.layers import LayerBuilder
    from kinetic_core.program import ProgramBuilder, Value


class Lfm2(Lfm):
    """A dense LFM2 model."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True)
    checkpoint = LFM2
    key = "lfm2"
    only: ClassVar[Mapping[str, Fixed]] = {"expert_count": 0, "attention.sliding_window": 0}

    def block(self, b: ProgramBuilder, block: LayerBuilder, layer: int, x: Value) -> Value:
        """Mixer and feed-forward layer, both behind a norm."""
        mixer = self.convolution if self.is_convolution(layer) else self.attention
        x = b.add(x, mixer(b, block, layer, block.rms_norm("attn_norm", x)))
        return b.add(x, self.feed_forward(b, block, layer, block.rms_norm("ffn_norm", x)))

    def attention(self, b: ProgramBuilder, block: LayerBuilder, layer: int, y: Value) -> Value:
        """Grouped-query attention over all positions."""
        q, k, v = block.linears(y, self.attention_widths(layer))
        mixed = self.attend(b, block, layer, q, k, v, base=self.rope_base, factors=self.rope_factors(b))
        return block.linear("attn_output", mixed, self.d_model)

    def feed_forward(self, b: ProgramBuilder, block: LayerBuilder, layer: int, y: Value) -> Value:
        """The gated feed-forward layer."""
        return block.feed_forward(y, self.d_ffn)

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """See `tiny`."""
        return lfm2_variants()


class Lfm2Moe(Lfm2):
    """An LFM2 model with experts."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True, has_experts=True)
    checkpoint = LFM2_MOE
    key = "lfm2moe"
    only: ClassVar[Mapping[str, Fixed]] = {
        "attention.sliding_window": 0,
        "expert_gating_func": 2,
        "expert_shared_count": 0,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
    }

    def __init__(self, source: TensorSource) -> None:
        """Read the keys of the experts besides those of LFM2; raises the same errors."""
        super().__init__(source)
        self.n_experts = self.meta.get_int("expert_count", minimum=1)
        self.n_experts_used = self.meta.get_int("expert_used_count", minimum=1, maximum=self.n_experts)
        self.d_expert = self.meta.get_int("expert_feed_forward_length", minimum=1)
        self.n_dense = self.meta.get_int("leading_dense_block_count", 0, minimum=0, maximum=self.n_layers)

    def feed_forward(self, b: ProgramBuilder, block: LayerBuilder, layer: int, y: Value) -> Value:
        """The experts, after the leading dense blocks."""
        if layer < self.n_dense:
            return super().feed_forward(b, block, layer, y)
        logits = block.linear("ffn_gate_inp", y, self.n_experts)
        bias = block.optional_weight("exp_probs_b.bias", (self.n_experts,))
        routed = b.route(logits, self.n_experts_used, "sigmoid", bias=bias, eps=1e-6)
        return block.experts(y, routed, self.n_experts, self.d_expert)

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """See `tiny`."""
        return lfm2moe_variants()
