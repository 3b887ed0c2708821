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
from kinetic_core.errors import MetadataError, TensorError, UnsupportedModelError, describe
from kinetic_core.gguf import Metadata, check_block_count, require_tensor
from kinetic_core.interfaces import Architecture, ArchitectureCapabilities, TinyVariant

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.program import ProgramBuilder, Value, Weight


class Llama(Architecture):
    """A dense model of the Llama family. `heads`, `kv_heads`, `head_dim` and the like are the file's, checked."""

    capabilities = ArchitectureCapabilities()
    checkpoint = CHECKPOINT

    def __init__(self, source: TensorSource) -> None:
        """Read the keys under ``llama.``.

        Raises UnsupportedModelError for experts and rope scaling, MetadataError for keys that are missing, of another
        type or do not fit each other, TensorError without token embeddings.
        """
        meta = source.metadata.prefixed("llama")
        _refuse_variants(meta)
        self.n_layers = check_block_count(meta, source.tensors)
        self._context_length = meta.get_int("context_length", minimum=1)
        self.d_model = meta.get_int("embedding_length", minimum=1)
        self.d_ffn = meta.get_int("feed_forward_length", minimum=1)
        self.eps = meta.get_float("attention.layer_norm_rms_epsilon", minimum=0.0)
        self.heads = meta.get_int("attention.head_count", minimum=1)
        self.kv_heads = meta.get_int("attention.head_count_kv", self.heads, minimum=1, maximum=self.heads)
        if self.heads % self.kv_heads:
            raise _does_not_fit("attention.head_count_kv", self.kv_heads, f"a divisor of {self.heads}, the heads")
        self.head_dim = _head_dim(meta, self.d_model, self.heads)
        self.rotary_dim = meta.get_int("rope.dimension_count", self.head_dim, minimum=2, maximum=self.head_dim)
        if self.rotary_dim % 2:
            raise _does_not_fit("rope.dimension_count", self.rotary_dim, "an even number: rope turns pairs")
        self.rope_base = meta.get_float("rope.freq_base", 10000.0, minimum=1.0)
        embeddings = require_tensor(source.tensors, "token_embd.weight")
        if len(embeddings.shape) != 2:
            raise TensorError(
                describe("'token_embd.weight' is not a matrix", got=embeddings.shape, expected="[vocabulary, hidden]")
            )
        self._vocab_size = embeddings.shape[0]

    @property
    def context_length(self) -> int:
        """``llama.context_length``."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Rows of the token embeddings."""
        return self._vocab_size

    def build(self, b: ProgramBuilder) -> Value:
        """The blocks and the last norm."""
        x = b.embedding(b.weight("token_embd.weight", (self._vocab_size, self.d_model)))
        for layer in range(self.n_layers):
            block = f"blk.{layer}."
            y = b.rms_norm(x, b.weight(block + "attn_norm.weight", (self.d_model,)), self.eps)
            x = b.add(x, self._attention(b, block, y))
            y = b.rms_norm(x, b.weight(block + "ffn_norm.weight", (self.d_model,)), self.eps)
            x = b.add(x, self._feed_forward(b, block, y))
        return b.rms_norm(x, b.weight("output_norm.weight", (self.d_model,)), self.eps)

    def output(self, b: ProgramBuilder) -> tuple[Weight, float]:
        """``output.weight``, or the token embeddings where the file ties them."""
        shape = (self._vocab_size, self.d_model)
        tied = not b.has("output.weight")
        return b.weight("token_embd.weight" if tied else "output.weight", shape), 1.0

    def _attention(self, b: ProgramBuilder, block: str, x: Value) -> Value:
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = self._linears(b, block, x, {"attn_q": width, "attn_k": kv_width, "attn_v": kv_width})
        mixed = b.attention(
            self._rope(b, q),
            self._rope(b, k),
            v,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )
        return self._linears(b, block, mixed, {"attn_output": self.d_model})[0]

    def _rope(self, b: ProgramBuilder, x: Value) -> Value:
        return b.rope(
            x,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            base=self.rope_base,
            interleaved=True,
            factors=b.optional_weight("rope_freqs.weight", (self.rotary_dim // 2,)),
        )

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
        """Tied; untied with frequency factors; biased; rope over a part of the head; without optional keys."""
        return [
            _tiny("tied"),
            _tiny("untied", tied=False, rope_factors=True),
            _tiny("biased", biased=True),
            _tiny("partial-rope", {"attention.key_length": 32, "rope.dimension_count": 12}),
            _tiny("defaults", dict.fromkeys(_OPTIONAL_KEYS)),
        ]


def _refuse_variants(meta: Metadata) -> None:
    experts = meta.get_int("expert_count", 0, minimum=0)
    if experts:
        raise UnsupportedModelError(
            describe(
                "Llama models with experts are not supported",
                where=f"key '{meta.prefix}expert_count'",
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
                where=f"key '{meta.prefix}rope.scaling.type'",
                got=scaling,
                expected="none, or the file's rope_freqs.weight",
            )
        )


def _head_dim(meta: Metadata, d_model: int, heads: int) -> int:
    """``attention.key_length``, or the hidden size shared out to the heads."""
    head_dim = meta.get_int("attention.key_length", None, minimum=2)
    if head_dim is None:
        if d_model % heads:
            raise _does_not_fit("embedding_length", d_model, f"a multiple of {heads}, the heads, without key_length")
        head_dim = d_model // heads
    if meta.get_int("attention.value_length", head_dim) != head_dim:
        got = meta.get_int("attention.value_length")
        raise _does_not_fit("attention.value_length", got, f"{head_dim}, the size of the key heads")
    return head_dim


def _does_not_fit(key: str, got: int, expected: str) -> MetadataError:
    return MetadataError(
        describe("a metadata key does not fit", where=f"key 'llama.{key}'", got=got, expected=expected)
    )


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
    """Two blocks of hidden size 64 and 4 heads; `changes` replaces metadata keys, None leaves one out."""
    d, d_ffn, vocab, heads, n_layers = 64, 96, 100, 4, 2
    metadata: dict[str, Any] = {
        "block_count": n_layers,
        "context_length": 1024,
        "embedding_length": d,
        "feed_forward_length": d_ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "rope.freq_base": 500000.0,
    }
    metadata = {key: value for key, value in {**metadata, **(changes or {})}.items() if value is not None}
    head_dim = metadata.get("attention.key_length", d // heads)
    q_width, kv_width = heads * head_dim, metadata.get("attention.head_count_kv", heads) * head_dim
    matrices = {
        "attn_q": (q_width, d),
        "attn_k": (kv_width, d),
        "attn_v": (kv_width, d),
        "attn_output": (d, q_width),
        "ffn_gate": (d_ffn, d),
        "ffn_up": (d_ffn, d),
        "ffn_down": (d, d_ffn),
    }
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, d), "output_norm.weight": (d,)}
    values = {"token_embd.weight": (0.0, 1.0), "output.weight": (0.0, 0.3)}
    if not tied:
        tensors["output.weight"] = (vocab, d)
    if rope_factors:
        tensors["rope_freqs.weight"] = (metadata["rope.dimension_count"] // 2,)
        values["rope_freqs.weight"] = (4.0, 0.5)
    for layer in range(n_layers):
        block = f"blk.{layer}."
        tensors |= {f"{block}{norm}.weight": (d,) for norm in ("attn_norm", "ffn_norm")}
        for matrix, shape in matrices.items():
            tensors[f"{block}{matrix}.weight"] = shape
            values[f"{block}{matrix}.weight"] = (0.0, 1.2 * shape[1] ** -0.5)
            if biased:
                tensors[f"{block}{matrix}.bias"] = shape[:1]
                values[f"{block}{matrix}.bias"] = (0.0, 0.3)
    values |= {name: (1.0, 0.2) for name in tensors if name.endswith("norm.weight")}
    return TinyVariant(name, metadata, tensors, {tensor: values[tensor] for tensor in tensors})
