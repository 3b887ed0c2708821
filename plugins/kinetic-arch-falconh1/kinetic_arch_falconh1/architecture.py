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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kinetic_arch_falconh1.checkpoint import CHECKPOINT
from kinetic_arch_falconh1.tiny import tiny_variants
from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError, describe
from kinetic_core.gguf import Metadata, check_block_count, require_tensor
from kinetic_core.interfaces import Architecture, ArchitectureCapabilities, TinyVariant

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value, Weight

KEY = "falcon-h1"


class FalconH1(Architecture):
    """A model of the family. `heads` and `head_dim` are the attention's, `ssm_heads` those of Mamba-2."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True)
    checkpoint = CHECKPOINT

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``falcon-h1.``.

        Raises UnsupportedModelError for experts and rope scaling, MetadataError for keys that are missing, of another
        type or do not fit each other, TensorError without token embeddings.
        """
        meta = source.metadata.prefixed(KEY)
        _refuse_variants(meta)
        self.n_layers = check_block_count(meta, source.tensors)
        self._context_length = meta.get_int("context_length", minimum=1)
        self.d_model = meta.get_int("embedding_length", minimum=1)
        self.d_ffn = meta.get_int("feed_forward_length", minimum=1)
        self.eps = meta.get_float("attention.layer_norm_rms_epsilon", minimum=0.0)
        self._read_attention(meta)
        self._read_mamba(meta)
        embeddings = require_tensor(source.tensors, "token_embd.weight")
        if len(embeddings.shape) != 2:
            raise TensorError(
                describe("'token_embd.weight' is not a matrix", got=embeddings.shape, expected="[vocabulary, hidden]")
            )
        self._vocab_size = embeddings.shape[0]

    def _read_attention(self, meta: Metadata) -> None:
        self.heads = meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = meta.get_ints_per_layer(
            "attention.head_count_kv", self.n_layers, self.heads, minimum=1, maximum=self.heads
        )
        for layer, kv_heads in enumerate(self.kv_heads):
            if self.heads % kv_heads:
                key = f"attention.head_count_kv[{layer}]"
                raise _does_not_fit(key, kv_heads, f"a divisor of {self.heads}, the heads")
        head_dim = meta.get_int("attention.key_length", None, minimum=2)
        if head_dim is None and self.d_model % self.heads:
            raise _does_not_fit(
                "embedding_length", self.d_model, f"a multiple of {self.heads}, the heads, without key_length"
            )
        self.head_dim = self.d_model // self.heads if head_dim is None else head_dim
        value_dim = meta.get_int("attention.value_length", self.head_dim)
        if value_dim != self.head_dim:
            raise _does_not_fit("attention.value_length", value_dim, f"{self.head_dim}, the size of the key heads")
        self.rotary_dim = meta.get_int("rope.dimension_count", self.head_dim, minimum=2, maximum=self.head_dim)
        if self.rotary_dim % 2:
            raise _does_not_fit("rope.dimension_count", self.rotary_dim, "an even number: rope turns pairs")
        self.rope_base = meta.get_float("rope.freq_base", 10000.0, minimum=1.0)

    def _read_mamba(self, meta: Metadata) -> None:
        self.taps = meta.get_int("ssm.conv_kernel", minimum=2)
        self.d_inner = meta.get_int("ssm.inner_size", minimum=1)
        self.d_state = meta.get_int("ssm.state_size", minimum=1)
        self.ssm_heads = meta.get_int("ssm.time_step_rank", minimum=1)
        self.groups = meta.get_int("ssm.group_count", 1, minimum=1)
        if self.d_inner % self.ssm_heads:
            raise _does_not_fit("ssm.inner_size", self.d_inner, f"a multiple of {self.ssm_heads}, the heads")
        if self.ssm_heads % self.groups:
            raise _does_not_fit("ssm.group_count", self.groups, f"a divisor of {self.ssm_heads}, the heads")

    @property
    def context_length(self) -> int:
        """``falcon-h1.context_length``."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Rows of the token embeddings."""
        return self._vocab_size

    def build(self, b: ProgramBuilder) -> Value:
        """The blocks and the last norm."""
        x = b.embedding(b.weight("token_embd.weight", (self._vocab_size, self.d_model)))
        for layer, kv_heads in enumerate(self.kv_heads):
            block = f"blk.{layer}."
            y = b.rms_norm(x, b.weight(block + "attn_norm.weight", (self.d_model,)), self.eps)
            x = b.add(x, b.add(self._attention(b, block, y, kv_heads), self._mamba2(b, block, y)))
            # This family's files call the tensor "ffn_norm" without ".weight".
            norm = block + ("ffn_norm" if b.has(block + "ffn_norm") else "ffn_norm.weight")
            y = b.rms_norm(x, b.weight(norm, (self.d_model,)), self.eps)
            x = b.add(x, self._feed_forward(b, block, y))
        return b.rms_norm(x, b.weight("output_norm.weight", (self.d_model,)), self.eps)

    def output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """``output.weight``, or the token embeddings where the file ties them."""
        shape = (self._vocab_size, self.d_model)
        tied = not b.has("output.weight")
        return b.weight("token_embd.weight" if tied else "output.weight", shape), 1.0

    def _attention(self, b: ProgramBuilder, block: str, x: Value, kv_heads: int) -> Value:
        width, kv_width = self.heads * self.head_dim, kv_heads * self.head_dim
        q, k, v = self._linears(b, block, x, {"attn_q": width, "attn_k": kv_width, "attn_v": kv_width})
        mixed = b.attention(
            self._rope(b, q), self._rope(b, k), v, heads=self.heads, kv_heads=kv_heads, head_dim=self.head_dim
        )
        return self._linears(b, block, mixed, {"attn_output": self.d_model})[0]

    def _rope(self, b: ProgramBuilder, x: Value) -> Value:
        return b.rope(x, head_dim=self.head_dim, rotary_dim=self.rotary_dim, base=self.rope_base, interleaved=False)

    def _mamba2(self, b: ProgramBuilder, block: str, y: Value) -> Value:
        d, heads, bc = self.d_inner, (self.ssm_heads,), self.groups * self.d_state
        channels = d + 2 * bc
        (projected,) = self._linears(b, block, y, {"ssm_in": d + channels + self.ssm_heads})
        z, u, dt = b.split(projected, (d, channels, self.ssm_heads))
        u = b.short_conv(
            u,
            b.weight(block + "ssm_conv1d.weight", (channels, self.taps)),
            b.optional_weight(block + "ssm_conv1d.bias", (channels,)),
            "silu",
        )
        x, b_, c = b.split(u, (d, bc, bc))
        o = b.mamba2_scan(
            x,
            b_,
            c,
            b.softplus(dt, b.weight(block + "ssm_dt.bias", heads)),
            b.weight(block + "ssm_a", heads),
            b.weight(block + "ssm_d", heads),
            heads=self.ssm_heads,
            groups=self.groups,
        )
        o = b.gate(z, o, "silu")
        norm = b.optional_weight(block + "ssm_norm.weight", (self.groups, d // self.groups))
        if norm is not None:
            o = b.rms_norm(o, norm, self.eps, d // self.groups)
        return self._linears(b, block, o, {"ssm_out": self.d_model})[0]

    def _feed_forward(self, b: ProgramBuilder, block: str, x: Value) -> Value:
        gate, up = self._linears(b, block, x, {"ffn_gate": self.d_ffn, "ffn_up": self.d_ffn})
        return self._linears(b, block, b.gate(gate, up, "silu"), {"ffn_down": self.d_model})[0]

    @staticmethod
    def _linears(b: ProgramBuilder, block: str, x: Value, outputs: Mapping[str, int]) -> tuple[Value, ...]:
        """Linear layers of one input, by name and width, each with a bias if the file has one."""
        weights = [b.weight(f"{block}{name}.weight", (width, x.width)) for name, width in outputs.items()]
        biases = [b.optional_weight(f"{block}{name}.bias", (width,)) for name, width in outputs.items()]
        return b.linears(x, weights, biases)

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """Every variant of `tiny_variants`."""
        return tiny_variants()


def _refuse_variants(meta: Metadata) -> None:
    experts = meta.get_int("expert_count", 0, minimum=0)
    if experts:
        raise UnsupportedModelError(
            describe(
                "Falcon-H1 models with experts are not supported",
                where=f"key '{KEY}.expert_count'",
                got=experts,
                expected="0 or no such key",
            )
        )
    scaling = meta.get_str("rope.scaling.type", "none")
    # Converters also write the type where it has no effect, with factor 1.
    if scaling != "none" and (scaling != "linear" or meta.get_float("rope.scaling.factor", 1.0) != 1.0):
        raise UnsupportedModelError(
            describe(
                "this rope scaling is not supported",
                where=f"key '{KEY}.rope.scaling.type'",
                got=scaling,
                expected="none",
            )
        )


def _does_not_fit(key: str, got: int, expected: str) -> MetadataError:
    return MetadataError(
        describe("a metadata key does not fit", where=f"key '{KEY}.{key}'", got=got, expected=expected)
    )
