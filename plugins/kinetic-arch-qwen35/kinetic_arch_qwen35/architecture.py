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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from kinetic_arch_qwen35.checkpoint import DENSE, EXPERTS
from kinetic_arch_qwen35.tiny import dense_variants, expert_variants
from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError, describe
from kinetic_core.gguf import check_block_count, require_tensor
from kinetic_core.interfaces import Architecture, ArchitectureCapabilities, TinyVariant

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value, Weight


class Qwen35(Architecture):
    """A dense model of the family. `recurrent[block]`: is it a delta-net block? The prediction block comes last."""

    capabilities = ArchitectureCapabilities(has_recurrent_state=True, has_prediction_block=True)
    checkpoint = DENSE
    key: ClassVar[str] = "qwen35"

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``<architecture>.``.

        Raises UnsupportedModelError for several prediction blocks and for rope scaling, MetadataError for keys that are
        missing, of another type or do not fit each other, TensorError without token embeddings.
        """
        self.meta = meta = source.metadata.prefixed(self.key)
        n_blocks = check_block_count(meta, source.tensors)
        self.n_predicted = meta.get_int("nextn_predict_layers", 0, minimum=0)
        if self.n_predicted > 1:
            raise self._unsupported("several prediction blocks", "nextn_predict_layers", self.n_predicted, "0 or 1")
        self.n_layers = n_blocks - self.n_predicted
        if not self.n_layers:
            raise self._does_not_fit("block_count", n_blocks, "a block besides the prediction block")
        self._context_length = meta.get_int("context_length", minimum=1)
        self.d_model = meta.get_int("embedding_length", minimum=1)
        self.eps = meta.get_float("attention.layer_norm_rms_epsilon", minimum=0.0)
        self._read_order(n_blocks)
        self._read_attention(n_blocks)
        if any(self.recurrent):
            self._read_delta_net()
        self._read_feed_forward()
        embeddings = require_tensor(source.tensors, "token_embd.weight")
        if len(embeddings.shape) != 2:
            raise TensorError(
                describe("'token_embd.weight' is not a matrix", got=embeddings.shape, expected="[vocabulary, hidden]")
            )
        self._vocab_size = embeddings.shape[0]

    def _read_order(self, n_blocks: int) -> None:
        """Which blocks are delta nets: a flag for each, or all but every n-th; a prediction block never is."""
        if "attention.recurrent_layers" in self.meta:
            self.recurrent = self.meta.get_bools_per_layer("attention.recurrent_layers", n_blocks)
            if any(self.recurrent[self.n_layers :]):
                key = f"attention.recurrent_layers[{self.n_layers}]"
                raise self._does_not_fit(key, True, "false: the prediction block is an attention block")
            return
        interval = self.meta.get_int("full_attention_interval", minimum=1)
        self.recurrent = tuple(block < self.n_layers and (block + 1) % interval != 0 for block in range(n_blocks))

    def _read_attention(self, n_blocks: int) -> None:
        meta = self.meta
        self.heads = meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = meta.get_ints_per_layer("attention.head_count_kv", n_blocks, minimum=0, maximum=self.heads)
        for kv_heads, recurrent in zip(self.kv_heads, self.recurrent, strict=True):
            if not recurrent and (not kv_heads or self.heads % kv_heads):
                raise self._does_not_fit("attention.head_count_kv", kv_heads, f"a divisor of {self.heads}, the heads")
        head_dim = meta.get_int("attention.key_length", None, minimum=2)
        if head_dim is None and self.d_model % self.heads:
            expected = f"a multiple of {self.heads}, the heads, without key_length"
            raise self._does_not_fit("embedding_length", self.d_model, expected)
        self.head_dim = self.d_model // self.heads if head_dim is None else head_dim
        value_dim = meta.get_int("attention.value_length", self.head_dim)
        if value_dim != self.head_dim:
            expected = f"{self.head_dim}, the size of the key heads"
            raise self._does_not_fit("attention.value_length", value_dim, expected)
        # Sections tell apart the positions of one token in an image; those of text are one number.
        self.rotary_dim = meta.get_int("rope.dimension_count", minimum=2, maximum=self.head_dim)
        if self.rotary_dim % 2:
            raise self._does_not_fit("rope.dimension_count", self.rotary_dim, "an even number: rope turns pairs")
        self.rope_base = meta.get_float("rope.freq_base", minimum=1.0)
        scaling = meta.get_str("rope.scaling.type", "none")
        # Converters also write the type where it has no effect, with factor 1.
        if scaling != "none" and (scaling != "linear" or meta.get_float("rope.scaling.factor", 1.0) != 1.0):
            raise self._unsupported("this rope scaling", "rope.scaling.type", scaling, "none")

    def _read_delta_net(self) -> None:
        meta = self.meta
        self.taps = meta.get_int("ssm.conv_kernel", minimum=2)
        self.delta_dim = meta.get_int("ssm.state_size", minimum=1)
        self.key_heads = meta.get_int("ssm.group_count", minimum=1)
        self.value_heads = meta.get_int("ssm.time_step_rank", minimum=1)
        if self.value_heads % self.key_heads:
            raise self._does_not_fit(
                "ssm.group_count", self.key_heads, f"a divisor of {self.value_heads}, the value heads"
            )
        inner, expected = meta.get_int("ssm.inner_size"), self.value_heads * self.delta_dim
        if inner != expected:
            raise self._does_not_fit("ssm.inner_size", inner, f"{expected}, value heads times their size")

    def _read_feed_forward(self) -> None:
        self.d_ffn = self.meta.get_int("feed_forward_length", minimum=1)

    def _does_not_fit(self, key: str, got: object, expected: str) -> MetadataError:
        where = f"key '{self.key}.{key}'"
        return MetadataError(describe("a metadata key does not fit", where=where, got=got, expected=expected))

    def _unsupported(self, what: str, key: str, got: object, expected: str) -> UnsupportedModelError:
        where = f"key '{self.key}.{key}'"
        return UnsupportedModelError(describe(f"not supported: {what}", where=where, got=got, expected=expected))

    @property
    def context_length(self) -> int:
        """``<architecture>.context_length``."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Rows of the token embeddings."""
        return self._vocab_size

    def build(self, b: ProgramBuilder) -> Value:
        """The blocks and the last norm."""
        x = b.embedding(self._vocabulary(b, "token_embd"))
        for layer in range(self.n_layers):
            x = self._block(b, layer, x)
        return self._norm(b, "output_norm", x)

    def output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """``output.weight``, or the token embeddings where the file ties them."""
        return self._vocabulary(b, "output" if b.has("output.weight") else "token_embd"), 1.0

    @property
    def has_prediction(self) -> bool:
        """``nextn_predict_layers`` is 1."""
        return self.n_predicted == 1

    def build_prediction(self, b: ProgramBuilder, hidden: Value) -> Value:
        """The block after the trunk's, with embeddings of its own where the file has them."""
        block = f"blk.{self.n_layers}.nextn."
        own = block + "embed_tokens"
        x = b.embedding(self._vocabulary(b, own if b.has(own + ".weight") else "token_embd"))
        x = b.concatenate(self._norm(b, block + "enorm", x), self._norm(b, block + "hnorm", hidden))
        x = self._block(b, self.n_layers, self._linears(b, block, x, {"eh_proj": self.d_model})[0])
        return self._norm(b, block + "shared_head_norm", x)

    def prediction_output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """The block's own output layer where the file has one, else the trunk's."""
        own = f"blk.{self.n_layers}.nextn.shared_head_head"
        return (self._vocabulary(b, own), 1.0) if b.has(own + ".weight") else self.output(b)

    def _block(self, b: ProgramBuilder, layer: int, x: Value) -> Value:
        block = f"blk.{layer}."
        y = self._norm(b, block + "attn_norm", x)
        mixed = self._delta_net(b, block, y) if self.recurrent[layer] else self._attention(b, layer, y)
        x = b.add(x, mixed)
        return b.add(x, self._feed_forward(b, block, self._norm(b, block + "post_attention_norm", x)))

    def _delta_net(self, b: ProgramBuilder, block: str, y: Value) -> Value:
        heads, d = (self.value_heads,), self.delta_dim
        keys, values = self.key_heads * d, self.value_heads * d
        qkv, gate, alpha, beta = self._linears(
            b,
            block,
            y,
            {
                "attn_qkv": 2 * keys + values,
                "attn_gate": values,
                "ssm_alpha": self.value_heads,
                "ssm_beta": self.value_heads,
            },
        )
        conv = b.weight(block + "ssm_conv1d.weight", (2 * keys + values, self.taps))
        q, k, v = b.split(b.short_conv(qkv, conv, None, "silu"), (keys, keys, values))
        o = b.delta_rule(
            b.l2_norm(q, self.eps, d, scale=d**-0.5),
            b.l2_norm(k, self.eps, d),
            v,
            b.decay_gate(alpha, b.weight(block + "ssm_a", heads), b.weight(block + "ssm_dt.bias", heads)),
            b.sigmoid(beta),
            key_heads=self.key_heads,
            value_heads=self.value_heads,
        )
        o = b.gate(gate, self._norm(b, block + "ssm_norm", o, d), "silu")
        return self._linears(b, block, o, {"ssm_out": self.d_model})[0]

    def _attention(self, b: ProgramBuilder, layer: int, y: Value) -> Value:
        block, heads, kv_heads, d = f"blk.{layer}.", self.heads, self.kv_heads[layer], self.head_dim
        q_gate, k, v = self._linears(
            b, block, y, {"attn_q": 2 * heads * d, "attn_k": kv_heads * d, "attn_v": kv_heads * d}
        )
        q, gate = (b.slice_heads(q_gate, heads, start, d) for start in (0, d))
        q = self._rope(b, self._norm(b, block + "attn_q_norm", q, d))
        k = self._rope(b, self._norm(b, block + "attn_k_norm", k, d))
        o = b.attention(q, k, v, heads=heads, kv_heads=kv_heads, head_dim=d)
        return self._linears(b, block, b.gate(gate, o, "sigmoid"), {"attn_output": self.d_model})[0]

    def _rope(self, b: ProgramBuilder, x: Value) -> Value:
        return b.rope(x, head_dim=self.head_dim, rotary_dim=self.rotary_dim, base=self.rope_base, interleaved=False)

    def _feed_forward(self, b: ProgramBuilder, block: str, y: Value) -> Value:
        return self._swiglu(b, block, y, self.d_ffn)

    def _swiglu(self, b: ProgramBuilder, block: str, y: Value, width: int, kind: str = "") -> Value:
        gate, up = self._linears(b, block, y, {f"ffn_gate{kind}": width, f"ffn_up{kind}": width})
        return self._linears(b, block, b.gate(gate, up, "silu"), {f"ffn_down{kind}": self.d_model})[0]

    def _vocabulary(self, b: ProgramBuilder, name: str) -> Weight:
        return b.weight(name + ".weight", (self._vocab_size, self.d_model))

    def _norm(self, b: ProgramBuilder, name: str, x: Value, group: int | None = None) -> Value:
        return b.rms_norm(x, b.weight(name + ".weight", (group or x.width,)), self.eps, group)

    @staticmethod
    def _linears(b: ProgramBuilder, block: str, x: Value, outputs: Mapping[str, int]) -> tuple[Value, ...]:
        """Linear layers of one input, by name and width."""
        return b.linears(x, [b.weight(f"{block}{name}.weight", (width, x.width)) for name, width in outputs.items()])

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
        self.n_experts = meta.get_int("expert_count", minimum=1)
        self.n_experts_used = meta.get_int("expert_used_count", minimum=1, maximum=self.n_experts)
        self.d_ffn = meta.get_int("expert_feed_forward_length", minimum=1)
        self.d_shared = meta.get_int("expert_shared_feed_forward_length", minimum=1)
        scoring = meta.get_int("expert_gating_func", 1)
        if scoring != 1:
            raise self._unsupported("this kind of routing", "expert_gating_func", scoring, "1 (softmax) or no such key")

    def _feed_forward(self, b: ProgramBuilder, block: str, y: Value) -> Value:
        n, d = self.n_experts, self.d_model
        logits, gate = self._linears(b, block, y, {"ffn_gate_inp": n, "ffn_gate_inp_shexp": 1})
        mixed = b.experts(
            y,
            b.route(logits, self.n_experts_used, "softmax"),
            b.weight(block + "ffn_gate_exps.weight", (n, self.d_ffn, d)),
            b.weight(block + "ffn_up_exps.weight", (n, self.d_ffn, d)),
            b.weight(block + "ffn_down_exps.weight", (n, d, self.d_ffn)),
        )
        return b.add(mixed, b.gate(gate, self._swiglu(b, block, y, self.d_shared, "_shexp"), "sigmoid"))

    @classmethod
    def tiny(cls) -> Sequence[TinyVariant]:
        """Experts, and experts with a prediction block; the shared expert's gate as a vector and as a matrix."""
        return expert_variants()
