"""Miniatures of decoders, for `Architecture.tiny`: names and shapes of the usual tensors, values that matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic_core.interfaces import TinyVariant

Shapes = dict[str, tuple[int, ...]]
"""Name -> shape, outputs first."""


def attention_matrices(d_model: int, heads: int, kv_heads: int, head_dim: int) -> Shapes:
    """Queries, keys, values and output, by the names of the layers."""
    width, kv_width = heads * head_dim, kv_heads * head_dim
    shapes = {"attn_q": (width, d_model), "attn_k": (kv_width, d_model), "attn_v": (kv_width, d_model)}
    return {**shapes, "attn_output": (d_model, width)}


def feed_forward_matrices(d_model: int, d_ffn: int, suffix: str = "") -> Shapes:
    """What `LayerBuilder.feed_forward` reads, by the names of the layers."""
    wide = (d_ffn, d_model)
    return {f"ffn_gate{suffix}": wide, f"ffn_up{suffix}": wide, f"ffn_down{suffix}": (d_model, d_ffn)}


def expert_matrices(d_model: int, n_experts: int, d_ffn: int) -> Shapes:
    """The router, ``ffn_gate_inp``, and what `LayerBuilder.experts` reads, by the names of the layers."""
    experts = feed_forward_matrices(d_model, d_ffn, "_exps")
    return {"ffn_gate_inp": (n_experts, d_model), **{name: (n_experts, *shape) for name, shape in experts.items()}}


def layer_tensors(matrices: Mapping[str, tuple[int, ...]], *, biased: bool = False) -> Shapes:
    """The tensors of linear layers: ``<name>.weight`` and, if `biased`, ``<name>.bias``."""
    tensors = {f"{name}.weight": shape for name, shape in matrices.items()}
    return tensors | {f"{name}.bias": shape[:1] for name, shape in matrices.items() if biased}


def tiny_decoder(
    name: str,
    metadata: Mapping[str, Any],
    blocks: Sequence[Mapping[str, tuple[int, ...]]],
    *,
    vocab: int = 100,
    tied: bool = True,
    outside: Mapping[str, tuple[int, ...]] | None = None,
    values: Mapping[str, tuple[float, float]] | None = None,
    gain: float = 1.2,
    optional: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> TinyVariant:
    """A variant with the values of `usual_values`.

    metadata: keys without prefix; None leaves one out, ``block_count`` is added.
    blocks:   per block its tensors, without ``blk.N.``.
    tied:     no ``output.weight``?
    outside:  the tensors outside of blocks besides ``token_embd.weight``; by default ``output_norm.weight``.
    values:   (mean, deviation) of tensors that need others. gain: of the matrices.
    optional: tensors that a file may lack. defaults: what the absence of a key stands for; both as in `TinyVariant`.
    """
    keys = {key: value for key, value in {**metadata, "block_count": len(blocks)}.items() if value is not None}
    d_model = keys["embedding_length"]
    tensors: Shapes = {"token_embd.weight": (vocab, d_model)}
    if not tied:
        tensors["output.weight"] = (vocab, d_model)
    tensors |= {"output_norm.weight": (d_model,)} if outside is None else outside
    for number, block in enumerate(blocks):
        tensors |= {f"blk.{number}.{tensor}": shape for tensor, shape in block.items()}
    all_values = {**usual_values(tensors, gain), **(values or {})}
    return TinyVariant(name, keys, tensors, all_values, optional, defaults or {})


def usual_values(tensors: Mapping[str, tuple[int, ...]], gain: float = 1.2) -> dict[str, tuple[float, float]]:
    """Tensor -> (mean, deviation), large enough that every term moves the logits.

    Norms are about 1, decays negative, convolutions positive; a matrix keeps the size of its input, times `gain`.
    """
    return {name: _usual(name, gain * shape[-1] ** -0.5) for name, shape in tensors.items()}


def _usual(name: str, matrix: float) -> tuple[float, float]:
    if "norm" in name:
        return 1.0, 0.2
    if name.endswith(".ssm_a"):
        return -0.4, 0.1
    if name.endswith(".ssm_d"):
        return 0.5, 0.5
    if name.endswith(".bias"):
        return 0.0, 0.3
    if name.endswith(("conv1d.weight", ".conv.weight")):
        return 0.2, 0.4
    if name == "rope_freqs.weight":
        return 4.0, 0.5
    if name.endswith(("token_embd.weight", ".embed_tokens.weight")):
        return 0.0, 1.0
    if name == "output.weight" or name.endswith(".shared_head_head.weight"):
        return 0.0, 0.3
    return 0.0, matrix
