"""A llama of about 75 kB that is complete: trunk, head and a byte-level vocabulary with merges."""

from __future__ import annotations

from typing import Any

import numpy as np

from kinetic_core.gguf import BLOCK_FORMATS, GGMLType, RawTensor

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, BLOCKS = 64, 2, 1, 96, 2


def byte_characters() -> list[str]:
    """The printable character that byte-level vocabularies write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in characters:
            characters[byte] = chr(256 + sum(other not in printable for other in range(byte)))
    return [characters[byte] for byte in range(256)]


def blocks(rng: np.random.Generator, type_: GGMLType, rows: int, columns: int) -> RawTensor:
    """A matrix of random blocks with scales near 0.01."""
    layout = BLOCK_FORMATS[type_]
    count = rows * columns // layout.block_size
    data = rng.integers(0, 256, count * layout.block_bytes, np.uint8).view(layout.block_dtype)
    for scale in ("d", "m"):
        if scale in (layout.block_dtype.names or ()):
            data[scale] = rng.uniform(0.001, 0.01, count).astype(np.float16)
    return RawTensor(data.view(np.uint8), type_, (rows, columns))


def tiny_llama() -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors, the same at every call."""
    rng = np.random.default_rng(2024)
    tokens = ["<|bos|>", "<|eos|>", *byte_characters(), "he", "ll", "hell", "hello"]
    merges = ["h e", "l l", "he ll", "hell o"]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": BLOCKS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3, 3] + [1] * (len(tokens) - 2), np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }

    def norm() -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)

    kv = HIDDEN // HEADS * KV_HEADS
    tensors: dict[str, Any] = {
        "token_embd.weight": blocks(rng, GGMLType.Q8_0, len(tokens), HIDDEN),
        "output_norm.weight": norm(),
    }
    for index in range(BLOCKS):
        tensors |= {
            f"blk.{index}.attn_norm.weight": norm(),
            f"blk.{index}.attn_q.weight": blocks(rng, GGMLType.Q4_0, HIDDEN, HIDDEN),
            f"blk.{index}.attn_k.weight": blocks(rng, GGMLType.Q4_1, kv, HIDDEN),
            f"blk.{index}.attn_v.weight": rng.normal(0, 0.1, (kv, HIDDEN)).astype(np.float16),
            f"blk.{index}.attn_output.weight": blocks(rng, GGMLType.Q5_0, HIDDEN, HIDDEN),
            f"blk.{index}.ffn_norm.weight": norm(),
            f"blk.{index}.ffn_gate.weight": blocks(rng, GGMLType.Q5_1, FEED_FORWARD, HIDDEN),
            f"blk.{index}.ffn_up.weight": blocks(rng, GGMLType.IQ4_NL, FEED_FORWARD, HIDDEN),
            f"blk.{index}.ffn_down.weight": blocks(rng, GGMLType.Q8_0, HIDDEN, FEED_FORWARD),
        }
    return metadata, tensors
