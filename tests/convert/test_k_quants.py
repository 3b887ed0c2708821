"""The K-quants: as exact as the golden files' and as a plain search, whatever the numbers are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import DATA, write_checkpoint

from kinetic_core.convert import convert
from kinetic_core.convert.quantize import q4_k_m_type, quantize, stored_type
from kinetic_core.gguf import GGMLType, dequantize, open_model_file, read_tensor

K_QUANTS = (GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K)


def rms(error: np.ndarray) -> float:
    return float(np.sqrt((error.astype(float) ** 2).mean()))


def error_of(x: np.ndarray, type_: GGMLType) -> float:
    return rms(dequantize(quantize("x", x, type_).to_bytes(), type_, x.shape) - x)


def plain_search(block: np.ndarray, levels: int) -> float:
    """Smallest squared error of a sub-block over a fine net of ranges, its scale and minimum not rounded."""
    low, high, best = min(float(block.min()), 0.0), float(block.max()), np.inf
    for bottom in np.linspace(0.7 * low, low, 16):
        for top in np.linspace(0.7 * high, high, 16):
            step = (top - bottom) / levels
            q = np.clip(np.rint((block - bottom) / step), 0, levels)
            best = min(best, float(((q * step + bottom - block) ** 2).sum()))
    return best


@pytest.mark.parametrize(("type_", "levels"), [(GGMLType.Q4_K, 15), (GGMLType.Q5_K, 31)])
def test_no_worse_than_a_plain_search(type_: GGMLType, levels: int):
    x = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
    reference = np.sqrt(sum(plain_search(block.astype(float), levels) for block in x.reshape(-1, 32)) / x.size)
    assert error_of(x, type_) <= 1.03 * reference


def test_q6_k_no_worse_than_a_plain_search():
    x = np.random.default_rng(4).standard_normal((8, 256)).astype(np.float32)
    total = 0.0
    for block in x.reshape(-1, 16).astype(float):
        largest = block[np.abs(block).argmax()]
        steps = largest / -np.linspace(30, 33, 61)
        q = np.clip(np.rint(block / steps[:, None]), -32, 31)
        total += ((q * steps[:, None] - block) ** 2).sum(1).min()
    assert error_of(x, GGMLType.Q6_K) <= 1.03 * np.sqrt(total / x.size)


@pytest.mark.parametrize("type_", K_QUANTS)
def test_odd_blocks(type_: GGMLType):
    ramp = np.linspace(-1, 2, 256, dtype=np.float32)
    blocks = [
        np.zeros(256),
        np.full(256, 3.0),
        np.full(256, -3.0),
        ramp,
        1e-3 * ramp,
        np.eye(256)[77],
        60000 * ramp / 2,
    ]
    for block in np.array(blocks, np.float32):
        x = block[None]
        assert error_of(x, type_) <= 0.03 * max(np.abs(x).max(), 1e-9), block[:3]


def test_q4_k_m_is_as_exact_as_the_golden_file(tmp_path: Path):
    done = convert(write_checkpoint(tmp_path / "checkpoint", "llama-f32.gguf"), tmp_path / "out.gguf", "q4_k_m")
    assert done.n_tensors == {"Q6_K": 3, "F32": 5, "Q4_K": 12}
    with (
        open_model_file(DATA / "llama-f32.gguf") as exact,
        open_model_file(DATA / "llama-q4_k_m.gguf") as golden,
        open_model_file(tmp_path / "out.gguf") as made,
    ):
        for name, info in golden.tensors.items():
            assert made.tensors[name].type == info.type, name
            x = read_tensor(exact, name)
            assert rms(read_tensor(made, name) - x) <= 1.03 * rms(read_tensor(golden, name) - x), name


def test_choice_of_types():
    assert q4_k_m_type("token_embd.weight", 8, tied=False) == GGMLType.Q4_K
    assert q4_k_m_type("output.weight", 8, tied=False) == GGMLType.Q6_K
    more = [q4_k_m_type(f"blk.{i}.ffn_down.weight", 8, tied=True) == GGMLType.Q6_K for i in range(8)]
    assert more == [True, False, False, True, False, False, True, True]
    assert q4_k_m_type("blk.0.ffn_up.weight", 8, tied=True) == GGMLType.Q4_K
    assert q4_k_m_type("blk.0.attn_qkv.weight", 8, tied=True) == GGMLType.Q5_K
    assert stored_type("blk.0.ffn_down.weight", (64, 96), GGMLType.Q6_K) == GGMLType.Q8_0
    assert stored_type("blk.0.ffn_down.weight", (64, 40), GGMLType.Q4_K) == GGMLType.F16
