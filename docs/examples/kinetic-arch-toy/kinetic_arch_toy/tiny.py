"""Miniatures of every kind of file that this family has."""

from __future__ import annotations

from collections.abc import Sequence

from kinetic_core.interfaces import TinyVariant
from kinetic_core.layers import attention_matrices, feed_forward_matrices, layer_tensors, tiny_decoder

HEADS, TAPS = 4, 3


def variants() -> Sequence[TinyVariant]:
    """Both kinds of layer, two heads share keys; an output layer, nothing shared; memory alone, all heads share."""
    return [
        variant("tied", [False, True, False], kv_heads=2),
        variant("untied", [True, False], tied=False, d_model=256),
        variant("memory", [False], kv_heads=1),
    ]


def variant(
    name: str,
    attends: Sequence[bool],
    *,
    kv_heads: int | None = None,
    tied: bool = True,
    d_model: int = 64,
    vocab: int = 100,
) -> TinyVariant:
    """One miniature. attends: per layer, attention or memory; kv_heads: None leaves the key out."""
    d_ffn, head_dim = 2 * d_model, d_model // 2
    wide, narrow = HEADS * head_dim, (kv_heads or HEADS) * head_dim
    metadata = {
        "attention_layers": list(attends),
        "context_length": 1024,
        "embedding_length": d_model,
        "feed_forward_length": d_ffn,
        "memory.conv_kernel": TAPS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    every = {"norm.weight": (d_model,), **layer_tensors(feed_forward_matrices(d_model, d_ffn))}
    attention = layer_tensors(attention_matrices(d_model, HEADS, kv_heads or HEADS, head_dim))
    attention |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    matrices = {
        "mem_q": (narrow, d_model),
        "mem_k": (narrow, d_model),
        "mem_conv": (narrow, TAPS),
        "mem_v": (wide, d_model),
        "mem_gate": (wide, d_model),
        "mem_time": (HEADS, d_model),
        "mem_output": (d_model, wide),
    }
    memory = layer_tensors(matrices) | dict.fromkeys(("mem_time.bias", "mem_decay", "mem_skip"), (HEADS,))
    blocks = [every | (attention if attending else memory) for attending in attends]
    decays = {f"blk.{layer}.mem_decay": (-0.5, 0.1) for layer in range(len(blocks))}  # below 0: the memory forgets
    defaults = {"attention.head_count_kv": HEADS}
    return tiny_decoder(
        name,
        metadata,
        blocks,
        vocab=vocab,
        tied=tied,
        values=decays,
        optional=["output.weight"],
        defaults=defaults,
    )
