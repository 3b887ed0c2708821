"""Layers by the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinetic_core.program import ProgramBuilder, Value, Weight


class LayerBuilder:
    """Records layers on the tensors that GGUF files call ``<prefix><name>.weight`` and ``<prefix><name>.bias``.

    b:               what records the operations.
    eps:             of the norms.
    prefix:          what is put before every name: ``"blk.3."`` for the layers of block 3, nothing outside of blocks.
    optional_biases: does a linear layer add a bias where the file has one? Otherwise such a file is refused, by the
                     name of the tensor that nothing reads.

        layers = LayerBuilder(b, self.eps)
        block = layers.block(3)
        q, k = block.linears(block.rms_norm("attn_norm", x), {"attn_q": 64, "attn_k": 32})

    Every method raises TensorError, with the whole name, for a tensor that is missing or has another shape.
    """

    def __init__(self, b: ProgramBuilder, eps: float, prefix: str = "", *, optional_biases: bool = False) -> None:
        self.b = b
        self.eps = eps
        self.prefix = prefix
        self.optional_biases = optional_biases

    def block(self, number: int) -> LayerBuilder:
        """The layers of one block: a view under ``blk.<number>.``, with the same settings."""
        return LayerBuilder(self.b, self.eps, f"blk.{number}.", optional_biases=self.optional_biases)

    def has(self, name: str) -> bool:
        """Does the file have a tensor of this name, which includes its ending?"""
        return self.b.has(self.prefix + name)

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        """A tensor that is no layer of its own, by its name with ending."""
        return self.b.weight(self.prefix + name, shape)

    def optional_weight(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        """`weight`, or None where the file has no such tensor."""
        return self.b.optional_weight(self.prefix + name, shape)

    def rms_norm(self, name: str, x: Value, group_width: int | None = None) -> Value:
        """x / sqrt(mean(x^2) + eps) * w over the whole of x, or over each `group_width` columns (heads, say)."""
        return self.b.rms_norm(x, self.weight(f"{name}.weight", (group_width or x.width,)), self.eps, group_width)

    def linear(self, name: str, x: Value, width: int) -> Value:
        """W x (+ bias): f32[rows, width]."""
        return self.linears(x, {name: width})[0]

    def linears(self, x: Value, widths: Mapping[str, int]) -> tuple[Value, ...]:
        """Linear layers of one input, recorded together. widths: name -> outputs, in the order of the result."""
        weights = [self.weight(f"{name}.weight", (width, x.width)) for name, width in widths.items()]
        if not self.optional_biases:
            return self.b.linears(x, weights)
        return self.b.linears(x, weights, [self.optional_weight(f"{name}.bias", (n,)) for name, n in widths.items()])

    def feed_forward(self, x: Value, d_ffn: int, suffix: str = "") -> Value:
        """Wdown (silu(Wgate x) * Wup x): ``ffn_gate``, ``ffn_up`` and ``ffn_down``, each followed by `suffix`.

        Source: Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202 (SwiGLU).
        """
        gate, up = self.linears(x, {f"ffn_gate{suffix}": d_ffn, f"ffn_up{suffix}": d_ffn})
        return self.linear(f"ffn_down{suffix}", self.b.gate(gate, up, "silu"), x.width)

    def experts(self, x: Value, routed: tuple[Value, Value], n_experts: int, d_ffn: int) -> Value:
        """Each row's experts, weighted and summed, each of them a `feed_forward` without biases.

        routed: what `ProgramBuilder.route` gave. The tensors ``ffn_gate_exps``, ``ffn_up_exps`` and ``ffn_down_exps``
        hold all experts' matrices.
        """
        gate, up = (
            self.weight(f"{name}.weight", (n_experts, d_ffn, x.width)) for name in ("ffn_gate_exps", "ffn_up_exps")
        )
        return self.b.experts(x, routed, gate, up, self.weight("ffn_down_exps.weight", (n_experts, x.width, d_ffn)))
