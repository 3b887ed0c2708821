"""Granite 4.0 hybrid: Mamba-2 or attention in each block, then a feed-forward layer or experts, all behind norms.

    x = embedding[token] * embedding_scale
    per block:  x += residual_scale * mixer(rms(x));  x += residual_scale * ffn(rms(x))
    logits = Woutput rms(x) / logit_scale

    attention:  Wo attention(Wq y, Wk y, Wv y), scores times attention.scale, usually without rope
    Mamba-2:    z, u, dt = Win y;  x, B, C = silu(conv(u));  dt = softplus(dt + bias)
                S = e^(dt a) S + (dt x) B^T;  o = S C + d x;  Wout rms_per_group(o * silu(z))
    dense ffn:  Wdown (silu(Wgate y) * Wup y)
    experts:    the best of softmax(Wrouter y), weights adding up to 1, each a dense ffn; plus a shared one

Source: Mamba-2: Dao and Gu 2024, arXiv 2405.21060; experts: Shazeer et al. 2017, arXiv 1701.06538.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kinetic_arch_granite.checkpoint import CHECKPOINT
from kinetic_arch_granite.tiny import tiny_variants
from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError, describe
from kinetic_core.gguf import Metadata, check_block_count, require_tensor
from kinetic_core.interfaces import Architecture, ArchitectureCapabilities, TinyVariant

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value, Weight

KEY = "granitehybrid"


class GraniteHybrid(Architecture):
    """A model of the family. `kv_heads[layer]` = 0 marks a Mamba-2 block; `n_experts` = 0 a dense model."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True, has_experts=True)
    checkpoint = CHECKPOINT

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``granitehybrid.``.

        Raises UnsupportedModelError for rope scaling and another kind of routing, MetadataError for keys that are
        missing, of another type or do not fit each other, TensorError without token embeddings.
        """
        meta = source.metadata.prefixed(KEY)
        self.n_layers = check_block_count(meta, source.tensors)
        self._context_length = meta.get_int("context_length", minimum=1)
        self.d_model = meta.get_int("embedding_length", minimum=1)
        self.eps = meta.get_float("attention.layer_norm_rms_epsilon", minimum=0.0)
        # A multiplier of 0 is how converters write that there is none.
        self.embedding_scale = meta.get_float("embedding_scale", 1.0, minimum=0.0) or 1.0
        self.residual_scale = meta.get_float("residual_scale", 1.0, minimum=0.0) or 1.0
        self.logit_scale = meta.get_float("logit_scale", 1.0, minimum=0.0) or 1.0
        self._read_attention(meta)
        if 0 in self.kv_heads:
            self._read_mamba(meta)
        self._read_feed_forward(meta)
        embeddings = require_tensor(source.tensors, "token_embd.weight")
        if len(embeddings.shape) != 2:
            raise TensorError(
                describe("'token_embd.weight' is not a matrix", got=embeddings.shape, expected="[vocabulary, hidden]")
            )
        self._vocab_size = embeddings.shape[0]

    def _read_attention(self, meta: Metadata) -> None:
        self.heads = meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = meta.get_ints_per_layer(
            "attention.head_count_kv", self.n_layers, self.heads, minimum=0, maximum=self.heads
        )
        for layer, kv_heads in enumerate(self.kv_heads):
            if kv_heads and self.heads % kv_heads:
                key = f"attention.head_count_kv[{layer}]"
                raise _does_not_fit(key, kv_heads, f"0 (Mamba-2) or a divisor of {self.heads}, the heads")
        head_dim = meta.get_int("attention.key_length", None, minimum=2)
        if head_dim is None and self.d_model % self.heads:
            raise _does_not_fit(
                "embedding_length", self.d_model, f"a multiple of {self.heads}, the heads, without key_length"
            )
        self.head_dim = self.d_model // self.heads if head_dim is None else head_dim
        value_dim = meta.get_int("attention.value_length", self.head_dim)
        if value_dim != self.head_dim:
            raise _does_not_fit("attention.value_length", value_dim, f"{self.head_dim}, the size of the key heads")
        self.attention_scale = meta.get_float("attention.scale", 0.0, minimum=0.0) or self.head_dim**-0.5
        # The family's switch: false in hybrids, whose attention has no positions; true in models without Mamba-2.
        self.rotates = meta.get_bool("rope.scaling.finetuned", True)
        if self.rotates:
            _refuse_rope_scaling(meta)
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

    def _read_feed_forward(self, meta: Metadata) -> None:
        self.d_ffn = meta.get_int("feed_forward_length", minimum=1)
        self.n_experts = meta.get_int("expert_count", 0, minimum=0)
        if not self.n_experts:
            return
        self.n_experts_used = meta.get_int("expert_used_count", minimum=1, maximum=self.n_experts)
        self.d_shared = meta.get_int("expert_shared_feed_forward_length", 0, minimum=0)
        scoring = meta.get_int("expert_gating_func", 1)
        if scoring != 1:
            raise UnsupportedModelError(
                describe(
                    "this kind of routing is not supported",
                    where=f"key '{KEY}.expert_gating_func'",
                    got=scoring,
                    expected="1 (softmax) or no such key",
                )
            )

    @property
    def context_length(self) -> int:
        """``granitehybrid.context_length``."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Rows of the token embeddings."""
        return self._vocab_size

    def build(self, b: ProgramBuilder) -> Value:
        """The blocks and the last norm."""
        x = b.embedding(b.weight("token_embd.weight", (self._vocab_size, self.d_model)), self.embedding_scale)
        for layer, kv_heads in enumerate(self.kv_heads):
            block = f"blk.{layer}."
            y = b.rms_norm(x, b.weight(block + "attn_norm.weight", (self.d_model,)), self.eps)
            mixed = self._attention(b, block, y, kv_heads) if kv_heads else self._mamba2(b, block, y)
            x = b.add(x, mixed, self.residual_scale)
            y = b.rms_norm(x, b.weight(block + "ffn_norm.weight", (self.d_model,)), self.eps)
            mixed = self._experts(b, block, y) if self.n_experts else self._feed_forward(b, block, y, self.d_ffn)
            x = b.add(x, mixed, self.residual_scale)
        return b.rms_norm(x, b.weight("output_norm.weight", (self.d_model,)), self.eps)

    def output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """``output.weight``, or the token embeddings where the file ties them; logits are divided by logit_scale."""
        shape = (self._vocab_size, self.d_model)
        tied = not b.has("output.weight")
        return b.weight("token_embd.weight" if tied else "output.weight", shape), 1.0 / self.logit_scale

    def _attention(self, b: ProgramBuilder, block: str, x: Value, kv_heads: int) -> Value:
        width, kv_width = self.heads * self.head_dim, kv_heads * self.head_dim
        q, k, v = self._linears(b, block, x, {"attn_q": width, "attn_k": kv_width, "attn_v": kv_width})
        if self.rotates:
            q, k = self._rope(b, q), self._rope(b, k)
        mixed = b.attention(
            q, k, v, heads=self.heads, kv_heads=kv_heads, head_dim=self.head_dim, scale=self.attention_scale
        )
        return self._linears(b, block, mixed, {"attn_output": self.d_model})[0]

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

    def _feed_forward(self, b: ProgramBuilder, block: str, x: Value, width: int, kind: str = "") -> Value:
        gate, up = self._linears(b, block, x, {f"ffn_gate{kind}": width, f"ffn_up{kind}": width})
        return self._linears(b, block, b.gate(gate, up, "silu"), {f"ffn_down{kind}": self.d_model})[0]

    def _experts(self, b: ProgramBuilder, block: str, x: Value) -> Value:
        n, d, width = self.n_experts, self.d_model, self.d_ffn
        logits = b.linear(x, b.weight(block + "ffn_gate_inp.weight", (n, d)))
        mixed = b.experts(
            x,
            b.route(logits, self.n_experts_used, "softmax"),
            b.weight(block + "ffn_gate_exps.weight", (n, width, d)),
            b.weight(block + "ffn_up_exps.weight", (n, width, d)),
            b.weight(block + "ffn_down_exps.weight", (n, d, width)),
        )
        return b.add(mixed, self._feed_forward(b, block, x, self.d_shared, "_shexp")) if self.d_shared else mixed

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


def _refuse_rope_scaling(meta: Metadata) -> None:
    scaling = meta.get_str("rope.scaling.type", "none")
    # Converters also write the type where it has no effect, with factor 1.
    if scaling != "none" and (scaling != "linear" or meta.get_float("rope.scaling.factor", 1.0) != 1.0):
        raise UnsupportedModelError(
            describe(
                "this rope scaling is not supported",
                where=f"key '{KEY}.rope.scaling.type'",
                got=scaling,
                expected="none, or the file's rope_freqs.weight",
            )
        )


def _does_not_fit(key: str, got: int, expected: str) -> MetadataError:
    return MetadataError(
        describe("a metadata key does not fit", where=f"key '{KEY}.{key}'", got=got, expected=expected)
    )
