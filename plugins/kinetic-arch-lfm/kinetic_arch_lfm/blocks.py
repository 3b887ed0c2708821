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
from typing import TYPE_CHECKING, Any, ClassVar

from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError, describe
from kinetic_core.gguf import Metadata, check_block_count, require_tensor
from kinetic_core.interfaces import Architecture

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value, Weight

Fixed = bool | int | float | str


class Lfm(Architecture):
    """Configuration and the equations that the families share; `block` is what differs."""

    key: ClassVar[str]
    """What ``general.architecture`` says."""
    only: ClassVar[Mapping[str, Fixed]]
    """Keys that, where a file has them, must have this value: any other asks for what is not in the equations."""

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``<architecture>.``.

        Raises UnsupportedModelError for other variants, MetadataError for keys that are missing, of another type or
        do not fit each other, TensorError without token embeddings.
        """
        self.meta = meta = source.metadata.prefixed(self.key)
        _refuse_others(meta, {"attention.causal": True, "rope.scaling.type": "none", **self.only})
        self.n_layers = check_block_count(meta, source.tensors)
        self._context_length = meta.get_int("context_length", minimum=1)
        self.d_model = meta.get_int("embedding_length", minimum=1)
        self.d_ffn = meta.get_int("feed_forward_length", minimum=1)
        self.eps = meta.get_float("attention.layer_norm_rms_epsilon", minimum=0.0)
        self.heads = meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = meta.get_ints_per_layer("attention.head_count_kv", self.n_layers, minimum=0, maximum=self.heads)
        for n in self.kv_heads:
            if n and self.heads % n:
                raise does_not_fit(meta, "attention.head_count_kv", n, f"0 or a divisor of {self.heads}, the heads")
        self.head_dim = _head_dim(meta, self.d_model, self.heads)
        self.rope_base = meta.get_float("rope.freq_base", minimum=1.0)
        whole_head(meta, "rope.dimension_count", self.head_dim)
        self.taps = meta.get_int("shortconv.l_cache", minimum=2)
        embeddings = require_tensor(source.tensors, "token_embd.weight")
        if len(embeddings.shape) != 2:
            raise TensorError(
                describe("'token_embd.weight' is not a matrix", got=embeddings.shape, expected="[vocabulary, hidden]")
            )
        self._vocab_size = embeddings.shape[0]

    @property
    def context_length(self) -> int:
        """``<architecture>.context_length``."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Rows of the token embeddings."""
        return self._vocab_size

    def build(self, b: ProgramBuilder) -> Value:
        """The blocks and the last norm, which files call ``token_embd_norm`` (a few ``output_norm``)."""
        x = b.embedding(b.weight("token_embd.weight", (self._vocab_size, self.d_model)))
        for layer in range(self.n_layers):
            x = self.block(b, layer, x)
        return self.norm(b, "output_norm" if b.has("output_norm.weight") else "token_embd_norm", x)

    @abstractmethod
    def block(self, b: ProgramBuilder, layer: int, x: Value) -> Value:
        """x after block number `layer`."""

    def output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """``output.weight``, or the token embeddings where the file ties them."""
        tied = not b.has("output.weight")
        return b.weight("token_embd.weight" if tied else "output.weight", (self._vocab_size, self.d_model)), 1.0

    def is_convolution(self, layer: int) -> bool:
        """Is the mixer of this block a convolution?"""
        return self.kv_heads[layer] == 0

    def convolution(self, b: ProgramBuilder, layer: int, x: Value) -> Value:
        """The gated short convolution."""
        d, name = self.d_model, f"blk.{layer}.shortconv."
        before, after, inner = b.split(b.linear(x, b.weight(name + "in_proj.weight", (3 * d, d))), (d, d, d))
        mixed = b.short_conv(b.multiply(before, inner), b.weight(name + "conv.weight", (d, self.taps)))
        return b.linear(b.multiply(after, mixed), b.weight(name + "out_proj.weight", (d, d)))

    def attention_widths(self, layer: int) -> dict[str, int]:
        """The projections that make queries, keys and values, by name and width."""
        kv_width = self.kv_heads[layer] * self.head_dim
        return {"attn_q": self.heads * self.head_dim, "attn_k": kv_width, "attn_v": kv_width}

    def attend(
        self,
        b: ProgramBuilder,
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
        q, k = (
            b.rope(
                self.norm(b, f"blk.{layer}.{name}", x, self.head_dim),
                head_dim=self.head_dim,
                rotary_dim=self.head_dim,
                base=base,
                interleaved=False,
                factors=factors,
            )
            for name, x in (("attn_q_norm", q), ("attn_k_norm", k))
        )
        kv_heads = self.kv_heads[layer]
        return b.attention(q, k, v, heads=self.heads, kv_heads=kv_heads, head_dim=self.head_dim, window=window)

    def rope_factors(self, b: ProgramBuilder) -> Weight | None:
        """``rope_freqs.weight``, which divides the angle of each pair: a factor of 1e30 stops it."""
        return b.optional_weight("rope_freqs.weight", (self.head_dim // 2,))

    def feed_forward(self, b: ProgramBuilder, layer: int, x: Value) -> Value:
        """The gated feed-forward layer."""
        gate, up = self.linears(b, layer, x, {"ffn_gate": self.d_ffn, "ffn_up": self.d_ffn})
        return self.linears(b, layer, b.gate(gate, up, "silu"), {"ffn_down": self.d_model})[0]

    def norm(self, b: ProgramBuilder, name: str, x: Value, width: int | None = None) -> Value:
        """Root-mean-square norm over the whole of x, or over each `width` columns."""
        return b.rms_norm(x, b.weight(f"{name}.weight", (width or x.width,)), self.eps, width)

    @staticmethod
    def linears(b: ProgramBuilder, layer: int, x: Value, outputs: Mapping[str, int]) -> tuple[Value, ...]:
        """Linear layers of one input, by name and width."""
        return b.linears(x, [b.weight(f"blk.{layer}.{name}.weight", (n, x.width)) for name, n in outputs.items()])


def whole_head(meta: Metadata, key: str, head_dim: int) -> None:
    """Raises MetadataError where `key` is there and is not the head size."""
    got = meta.get_int(key, head_dim)
    if got != head_dim:
        raise does_not_fit(meta, key, got, f"{head_dim}, the head size: rope turns all of it")


def does_not_fit(meta: Metadata, key: str, got: object, expected: str) -> MetadataError:
    """The error of a key whose value contradicts another's."""
    where = f"key '{meta.prefix}{key}'"
    return MetadataError(describe("a metadata key does not fit", where=where, got=got, expected=expected))


def _head_dim(meta: Metadata, d_model: int, heads: int) -> int:
    """``attention.key_length``, or the hidden size shared out to the heads."""
    head_dim = meta.get_int("attention.key_length", None, minimum=2)
    if head_dim is None:
        if d_model % heads:
            expected = f"a multiple of {heads}, the heads, without key_length"
            raise does_not_fit(meta, "embedding_length", d_model, expected)
        head_dim = d_model // heads
    if head_dim % 2:
        raise does_not_fit(meta, "attention.key_length", head_dim, "an even number: rope turns pairs")
    value_dim = meta.get_int("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise does_not_fit(meta, "attention.value_length", value_dim, f"{head_dim}, the size of the key heads")
    return head_dim


def _refuse_others(meta: Metadata, only: Mapping[str, Fixed]) -> None:
    reads: Mapping[type, Any] = {bool: meta.get_bool, int: meta.get_int, float: meta.get_float, str: meta.get_str}
    for key, value in only.items():
        got = reads[type(value)](key, value)
        if got != value:
            raise UnsupportedModelError(
                describe(
                    "models of this variant are not supported",
                    where=f"key '{meta.prefix}{key}'",
                    got=got,
                    expected=f"{value} or no such key",
                )
            )
