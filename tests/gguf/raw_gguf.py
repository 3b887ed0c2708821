"""Builds GGUF bytes piece by piece, valid or not: what a writer would refuse to write."""

from __future__ import annotations

import struct


def fixed_header(n_tensors: int, n_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, type_id: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_id) + payload


def string_key(name: str | bytes, text: str | bytes) -> bytes:
    return key(name, 8, string(text))


def array_key(name: str, type_id: int, count: int, payload: bytes = b"") -> bytes:
    return key(name, 9, struct.pack("<IQ", type_id, count) + payload)


def tensor(name: str | bytes, dims: list[int], type_id: int, offset: int, n_dims: int | None = None) -> bytes:
    n_dims = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", n_dims, *dims, type_id, offset)


def padded(raw: bytes, alignment: int = 32) -> bytes:
    return raw + bytes(-len(raw) % alignment)


def good_file() -> bytes:
    """Two keys and two F32 tensors of 32 elements; the last byte of the file is the last tensor's last byte."""
    head = fixed_header(2, 2) + string_key("general.architecture", "llama")
    head += key("llama.block_count", 4, struct.pack("<I", 1))
    head += tensor("blk.0.a", [8, 4], 0, 0) + tensor("b", [32], 0, 128)
    return padded(head) + bytes(range(256))
