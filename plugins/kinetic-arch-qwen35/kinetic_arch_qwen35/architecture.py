"""Qwen3.5: a gated delta net or gated attention in each block, then a feed-forward layer or experts, behind norms.

    x = embedding[token]
    per block:  x += mixer(rms(x));  x += ffn(rms(x))
    logits = Woutput rms(x)

    delta net:  q, k, v = silu(conv(Wqkv y));  q = q / |q| / sqrt(d);  k = k / |k|       per head of size d
                beta = sigmoid(Wbeta y);  g = a softplus(Walpha y + bias)                per value head
                S = e^g S;  S = S + k (beta (v - S^T k))^T;  o = S^T q
                Wout (rms(o) * silu(Wgate y))
    attention:  q, gate = Wq y, head by head;  Wo (attention(rope(rms(q)), rope(rms(k)), v) * sigmoid(gate))
    dense ffn:  Wdown (silu(Wgate y) * Wup y)
    experts:    the best of softmax(Wrouter y), weights adding up to 1, each a dense ffn;
                plus sigmoid(w y) times a shared one
    prediction: x = Wproj [rms(embedding[t + 1]), rms(h of t)], through one attention block, rms: the next h

Source: Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464; Qiu et al. 2025, Gated Attention, arXiv 2505.06708;
prediction of the token after the next: DeepSeek-AI 2024, arXiv 2412.19437. The file's value heads are in tiled order:
value head h reads key head h modulo the key heads. Norm weights and `ssm_a` (-exp of what was trained) are final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kinetic_arch_qwen35.checkpoint import DENSE, EXPERTS
from kinetic_arch_qwen35.tiny import dense_variants, expert_variants
from kinetic_core.errors import MetadataError, describe
from kinetic_core.interfaces import ArchitectureCapabilities, TinyVariant
from kinetic_core.layers import (
    DecoderArchitecture,
    LayerBuilder,
    read_head_dim,
    read_kv_heads,
    read_rotary_dim,
    refuse_rope_scaling,
    require_values,
)

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value, Weight


class Qwen35(DecoderArchitecture):
    """A dense model of the family. `recurrent[block]`: is it a delta-net block? The prediction block comes last."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True, has_prediction_block=True)
    checkpoint = DENSE
    key = "qwen35"

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``<architecture>.``.

        Raises UnsupportedModelError for several prediction blocks and for rope scaling, MetadataError for keys that are
        missing, of another type or do not fit each other, TensorError without token embeddings.
        """
        super().__init__(source)
        meta, n_blocks = self.meta, self.n_layers
        self.n_predicted = meta.get_int("nextn_predict_layers", 0, minimum=0)
        if self.n_predicted > 1:
            raise meta.unsupported("nextn_predict_layers", self.n_predicted, "0 or 1")
        self.n_layers = n_blocks - self.n_predicted
        if not self.n_layers:
            raise meta.does_not_fit("block_count", n_blocks, "a block besides the prediction block")
        self._read_order(n_blocks)
        self._read_attention(n_blocks)
        if any(self.recurrent):
            self._read_delta_net()
        self._read_feed_forward()

    def _read_order(self, n_blocks: int) -> None:
        """Which blocks are delta nets: a flag for each, or all but every n-th; a prediction block never is."""
        if "attention.recurrent_layers" in self.meta:
            self.recurrent = self.meta.get_bools_per_layer("attention.recurrent_layers", n_blocks)
            if any(self.recurrent[self.n_layers :]):
                key = f"attention.recurrent_layers[{self.n_layers}]"
                raise self.meta.does_not_fit(key, True, "false: the prediction block is an attention block")
            return
        if "full_attention_interval" not in self.meta:
            raise MetadataError(
                describe(
                    "the metadata does not say which blocks are delta nets",
                    expected=f"the key '{self.key}.attention.recurrent_layers' or '{self.key}.full_attention_interval'",
                )
            )
        interval = self.meta.get_int("full_attention_interval", minimum=1)
        self.recurrent = tuple(block < self.n_layers and (block + 1) % interval != 0 for block in range(n_blocks))

    def _read_attention(self, n_blocks: int) -> None:
        meta = self.meta
        self.heads = meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = read_kv_heads(meta, n_blocks, minimum=0, required=True)
        for block, recurrent in enumerate(self.recurrent):
            if not recurrent and not self.kv_heads[block]:
                expected = f"a divisor of {self.heads}, the heads, in an attention block"
                raise meta.does_not_fit(f"attention.head_count_kv[{block}]", 0, expected)
        self.head_dim = read_head_dim(meta)
        # Sections tell apart the positions of one token in an image; those of text are one number.
        self.rotary_dim = read_rotary_dim(meta, self.head_dim, required=True)
        self.rope_base = meta.get_float("rope.freq_base", minimum=1.0)
        refuse_rope_scaling(meta)

    def _read_delta_net(self) -> None:
        meta = self.meta
        self.taps = meta.get_int("ssm.conv_kernel", minimum=2)
        self.delta_dim = meta.get_int("ssm.state_size", minimum=1)
        self.key_heads = meta.get_int("ssm.group_count", minimum=1)
        self.value_heads = meta.get_int("ssm.time_step_rank", minimum=1)
        if self.value_heads % self.key_heads:
            expected_heads = f"a divisor of {self.value_heads}, the value heads"
            raise meta.does_not_fit("ssm.group_count", self.key_heads, expected_heads)
        inner, expected = meta.get_int("ssm.inner_size"), self.value_heads * self.delta_dim
        if inner != expected:
            raise meta.does_not_fit("ssm.inner_size", inner, f"{expected}, value heads times their size")

    def _read_feed_forward(self) -> None:
        self.d_ffn = self.meta.get_int("feed_forward_length", minimum=1)

    def build(self, b: ProgramBuilder) -> Value:
        """The blocks and the last norm."""
        layers = LayerBuilder(b, self.eps)
        x = self.embed(b)
        for layer in range(self.n_layers):
            x = self._block(b, layers.block(layer), layer, x)
        return layers.rms_norm("output_norm", x)

    @property
    def has_prediction(self) -> bool:
        """``nextn_predict_layers`` is 1."""
        return self.n_predicted == 1

    def build_prediction(self, b: ProgramBuilder, hidden: Value) -> Value:
        """The block after the trunk's, with embeddings of its own where the file has them."""
        block = LayerBuilder(b, self.eps).block(self.n_layers)
        own = block.optional_weight("nextn.embed_tokens.weight", (self.vocab_size, self.d_model))
        x = self.embed(b) if own is None else b.embedding(own)
        x = b.concatenate(block.rms_norm("nextn.enorm", x), block.rms_norm("nextn.hnorm", hidden))
        x = self._block(b, block, self.n_layers, block.linear("nextn.eh_proj", x, self.d_model))
        return block.rms_norm("nextn.shared_head_norm", x)

    def prediction_output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """The block's own output layer where the file has one, else the trunk's."""
        name = f"blk.{self.n_layers}.nextn.shared_head_head.weight"
        own = b.optional_weight(name, (self.vocab_size, self.d_model))
        return self.output(b) if own is None else (own, 1.0)

    def _block(self, b: ProgramBuilder, block: LayerBuilder, layer: int, x: Value) -> Value:
        y = block.rms_norm("attn_norm", x)
        recurrent, kv_heads = self.recurrent[layer], self.kv_heads[layer]
        x = b.add(x, self._delta_net(b, block, y) if recurrent else self._attention(b, block, y, kv_heads))
        return b.add(x, self._feed_forward(b, block, block.rms_norm("post_attention_norm", x)))

    def _delta_net(self, b: ProgramBuilder, block: LayerBuilder, y: Value) -> Value:
        key_heads, value_heads, d = self.key_heads, self.value_heads, self.delta_dim
        keys, values = key_heads * d, value_heads * d
        widths = {"attn_qkv": 2 * keys + values, "attn_gate": values, "ssm_alpha": value_heads, "ssm_beta": value_heads}
        qkv, gate, alpha, beta = block.linears(y, widths)
        conv = block.weight("ssm_conv1d.weight", (2 * keys + values, self.taps))
        q, k, v = b.split(b.short_conv(qkv, conv, None, "silu"), (keys, keys, values))
        q, k = b.l2_norm(q, self.eps, d, scale=d**-0.5), b.l2_norm(k, self.eps, d)
        a, bias = block.weight("ssm_a", (value_heads,)), block.weight("ssm_dt.bias", (value_heads,))
        g = b.decay_gate(alpha, a, bias)
        o = b.delta_rule(q, k, v, g, b.sigmoid(beta), key_heads=key_heads, value_heads=value_heads)
        return block.linear("ssm_out", b.gate(gate, block.rms_norm("ssm_norm", o, d), "silu"), self.d_model)

    def _attention(self, b: ProgramBuilder, block: LayerBuilder, y: Value, kv_heads: int) -> Value:
        heads, d = self.heads, self.head_dim
        q_gate, k, v = block.linears(y, {"attn_q": 2 * heads * d, "attn_k": kv_heads * d, "attn_v": kv_heads * d})
        q, gate = (b.slice_heads(q_gate, heads, start, d) for start in (0, d))
        q = self._rope(b, block.rms_norm("attn_q_norm", q, d))
        k = self._rope(b, block.rms_norm("attn_k_norm", k, d))
        o = b.attention(q, k, v, heads=heads, kv_heads=kv_heads, head_dim=d)
        return block.linear("attn_output", b.gate(gate, o, "sigmoid"), self.d_model)

    def _rope(self, b: ProgramBuilder, x: Value) -> Value:
        return b.rope(x, head_dim=self.head_dim, rotary_dim=self.rotary_dim, base=self.rope_base, interleaved=False)

    def _feed_forward(self, b: ProgramBuilder, block: LayerBuilder, y: Value) -> Value:
        return block.feed_forward(y, self.d_ffn)

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """Tied and untied, 3 value heads per key head, with a prediction block and with one of its own vocabulary."""
        return dense_variants()


class Qwen35Moe(Qwen35):
    """A model of the family with experts in every block's feed-forward layer, a shared one among them."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True, has_prediction_block=True, has_experts=True)
    checkpoint = EXPERTS
    key = "qwen35moe"

    def _read_feed_forward(self) -> None:
        meta = self.meta
        require_values(meta, {"expert_gating_func": 1})  # softmax
        self.n_experts = meta.get_int("expert_count", minimum=1)
        self.n_experts_used = meta.get_int("expert_used_count", minimum=1, maximum=self.n_experts)
        self.d_ffn = meta.get_int("expert_feed_forward_length", minimum=1)
        self.d_shared = meta.get_int("expert_shared_feed_forward_length", minimum=1)

    def _feed_forward(self, b: ProgramBuilder, block: LayerBuilder, y: Value) -> Value:
        logits, gate = block.linears(y, {"ffn_gate_inp": self.n_experts, "ffn_gate_inp_shexp": 1})
        mixed = block.experts(y, b.route(logits, self.n_experts_used, "softmax"), self.n_experts, self.d_ffn)
        return b.add(mixed, b.gate(gate, block.feed_forward(y, self.d_shared, "_shexp"), "sigmoid"))

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """Experts, and experts with a prediction block; the shared expert's gate as a vector and as a matrix."""
        return expert_variants()
