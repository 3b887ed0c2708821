"""The block quantizers: their twins' bytes, as exact as the golden files' and as a plain search, whatever comes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DATA, write_checkpoint
from naive_quantizers import quantized

from kinetic_core.convert import convert
from kinetic_core.convert.fits_loader import prepare
from kinetic_core.convert.quantize import quantize, stored_types
from kinetic_core.engine.model import load
from kinetic_core.gguf import GGMLType, dequantize, open_model_file, read_tensor

BLOCK_TYPES = (GGMLType.Q8_0, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K)


def rms(error: np.ndarray) -> float:
    return float(np.sqrt((error.astype(float) ** 2).mean()))


def error_of(x: np.ndarray, type_: GGMLType) -> float:
    return rms(dequantize(quantize("x", x, type_).to_bytes(), type_, x.shape) - x)


def odd_blocks() -> np.ndarray:
    ramp = np.linspace(-1, 2, 256, dtype=np.float32)
    rows = [
        np.zeros(256),
        np.full(256, 3.0),
        np.full(256, -3.0),
        ramp,
        -ramp,
        ramp + 5,
        1e-3 * ramp,
        1e-7 * ramp,
        1e-42 * ramp,
        np.eye(256)[77],
        60000 * ramp / 2,
        np.where(np.arange(256) % 32 == 3, 2.0, 0.0),
    ]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("type_", BLOCK_TYPES)
@pytest.mark.parametrize("n_rows", [1, 7, 67])
def test_the_twins_bytes(type_: GGMLType, n_rows: int):
    rng = np.random.default_rng(n_rows)
    x = rng.standard_normal((n_rows, 256)) * rng.lognormal(0, 2, (n_rows, 1)) + rng.standard_normal((n_rows, 1))
    x = np.concatenate([x.astype(np.float32), odd_blocks()])
    assert quantize("x", x, type_).to_bytes().tobytes() == quantized(x.reshape(-1), type_)


@pytest.mark.parametrize("type_", BLOCK_TYPES)
def test_threads_change_nothing(type_: GGMLType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kinetic_core.convert.quantize._ELEMENTS", 512)
    x = np.random.default_rng(9).standard_normal((11, 256)).astype(np.float32)
    with ThreadPoolExecutor(3) as threads:
        raw = quantize("x", x, type_, threads).to_bytes().tobytes()
    assert raw == quantized(x.reshape(-1), type_)


def plain_search(block: np.ndarray, levels: int, any_sign: bool) -> float:
    """Smallest squared error of a block over a fine net of ranges, its scale and minimum not rounded."""
    low, high, best = float(block.min()), float(block.max()), np.inf
    low = low if any_sign else min(low, 0.0)
    for bottom in np.linspace(0.7 * low, low, 16):
        for top in np.linspace(0.7 * high, high, 16):
            step = (top - bottom) / levels
            q = np.clip(np.rint((block - bottom) / step), 0, levels)
            best = min(best, float(((q * step + bottom - block) ** 2).sum()))
    return best


@pytest.mark.parametrize(("type_", "levels"), [(GGMLType.Q4_K, 15), (GGMLType.Q5_K, 31), (GGMLType.Q5_1, 31)])
def test_no_worse_than_a_plain_search(type_: GGMLType, levels: int):
    x = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
    any_sign = type_ == GGMLType.Q5_1
    total = sum(plain_search(block.astype(float), levels, any_sign) for block in x.reshape(-1, 32))
    assert error_of(x, type_) <= 1.03 * np.sqrt(total / x.size)


@pytest.mark.parametrize(("type_", "levels", "size"), [(GGMLType.Q6_K, 32, 16), (GGMLType.Q5_0, 16, 32)])
def test_signed_grids_no_worse_than_a_plain_search(type_: GGMLType, levels: int, size: int):
    x = np.random.default_rng(4).standard_normal((8, 256)).astype(np.float32)
    total = 0.0
    for block in x.reshape(-1, size).astype(float):
        largest = block[np.abs(block).argmax()]
        steps = largest / -np.linspace(levels - 2, levels + 1, 61)
        q = np.clip(np.rint(block / steps[:, None]), -levels, levels - 1)
        total += ((q * steps[:, None] - block) ** 2).sum(1).min()
    assert error_of(x, type_) <= 1.03 * np.sqrt(total / x.size)


@pytest.mark.parametrize("type_", BLOCK_TYPES)
def test_odd_blocks(type_: GGMLType):
    for block in odd_blocks():
        x = block[None]
        assert error_of(x, type_) <= 0.04 * np.abs(x).max() + 1e-7, block[:3]


FAMILIES = ("llama", "lfm2", "lfm2moe", "lfm3", "granitehybrid", "granitehybridmoe", "falconh1", "qwen35", "qwen35moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_q4_k_m_has_the_golden_files_types(family: str):
    with open_model_file(DATA / f"{family}-q4_k_m.gguf") as golden:
        meta = golden.metadata.prefixed(golden.architecture)
        chosen = stored_types(
            {name: info.shape for name, info in golden.tensors.items()},
            GGMLType.Q4_K,
            mixed=True,
            n_blocks=meta.get_int("block_count"),
            n_experts=meta.get_int("expert_count", 0),
        )
        assert chosen == {name: info.type for name, info in golden.tensors.items()}


@pytest.mark.parametrize("file", ["llama-f32", "lfm2moe-bf16", "granitehybridmoe-bf16"])
def test_q4_k_m_is_as_exact_as_the_golden_file(tmp_path: Path, file: str):
    convert(write_checkpoint(tmp_path / "checkpoint", f"{file}.gguf"), tmp_path / "out.gguf", "q4_k_m")
    with (
        open_model_file(DATA / f"{file}.gguf") as exact,
        open_model_file(DATA / f"{file.partition('-')[0]}-q4_k_m.gguf") as golden,
        open_model_file(tmp_path / "out.gguf") as made,
    ):
        for name, info in golden.tensors.items():
            assert made.tensors[name].type == info.type, name
            x = read_tensor(exact, name)
            assert rms(read_tensor(made, name) - x) <= 1.03 * rms(read_tensor(golden, name) - x), name


@pytest.mark.parametrize(("type_", "number"), [("q6_k", 18), ("q5_k_m", 17)])
@pytest.mark.parametrize("file", ["llama-f32", "lfm2moe-bf16"])
def test_more_bits_lie_nearer_and_run(tmp_path: Path, file: str, type_: str, number: int):
    folder = write_checkpoint(tmp_path / "checkpoint", f"{file}.gguf")
    tokens, logits = list(range(3, 35)), {}
    for each in ("f32", "q4_k_m", type_):
        convert(folder, tmp_path / f"{each}.gguf", each)
        with load(str(tmp_path / f"{each}.gguf"), backend="reference", kv="f32", ctx=64) as model:
            logits[each] = model.logits(tokens)
            assert len(model.generate(tokens, max_tokens=1, temperature=0.0, ignore_end=True).token_ids) == 1
    # The median of the tokens': where another expert is chosen, a token's scores are far off in any type.
    moved = {each: float(np.median((logits[each] - logits["f32"]).astype(float).std(1))) for each in ("q4_k_m", type_)}
    assert 0 < moved[type_] < 0.75 * moved["q4_k_m"]
    with open_model_file(tmp_path / f"{type_}.gguf") as made, open_model_file(tmp_path / "q4_k_m.gguf") as smaller:
        assert made.metadata.get_int("general.file_type") == number
        for name, info in smaller.tensors.items():
            kind = info.type.name
            if type_ == "q6_k" and kind != "F32":
                kind = "Q6_K" if info.shape[-1] % 256 == 0 else "Q8_0"
            assert made.tensors[name].type.name == {"Q4_K": "Q5_K", "Q5_0": "Q5_1"}.get(kind, kind), name
        assert {"q6_k": "Q6_K", "q5_k_m": "Q5_K"}[type_] in {info.type.name for info in made.tensors.values()}


def test_choice_of_types():
    def mixed(n_blocks: int = 8, n_experts: int = 0, **shapes: tuple[int, ...]) -> list[str]:
        names = {name.replace("__", "."): shape for name, shape in shapes.items()}
        chosen = stored_types(names, GGMLType.Q4_K, mixed=True, n_blocks=n_blocks, n_experts=n_experts)
        return [type_.name for type_ in chosen.values()]

    wide = (512, 256)
    assert mixed(token_embd__weight=wide, output__weight=wide) == ["Q4_K", "Q6_K"]
    assert mixed(token_embd__weight=wide) == ["Q6_K"]
    downs = mixed(**{f"blk__{i}__ffn_down__weight": wide for i in range(8)})[:8]
    assert downs == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    # Of three blocks with attention in a file of many, the first, second, third; not the block's number.
    values = mixed(**{f"blk__{i}__attn_v__weight": wide for i in (5, 9, 14)})[:3]
    assert values == ["Q4_K", "Q4_K", "Q6_K"]
    assert mixed(n_experts=8, blk__1__attn_output__weight=wide, blk__1__attn_k__weight=(256, 96))[:2] == [
        "Q5_K",
        "Q8_0",
    ]

    def narrow(type_: GGMLType, width: int) -> str:
        return stored_types({"blk.0.ffn_up.weight": (64, width)}, type_, n_blocks=1)["blk.0.ffn_up.weight"].name

    assert [narrow(type_, 96) for type_ in (GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K)] == ["Q5_0", "Q5_1", "Q8_0"]
    assert [narrow(type_, 40) for type_ in (GGMLType.Q4_K, GGMLType.Q8_0)] == ["F16", "F16"]
    kept = {"blk.0.ffn_gate_inp.weight": wide, "blk.0.ssm_a": (8, 1), "blk.0.ssm_norm.weight": (2, 256)}
    assert set(stored_types(kept, GGMLType.Q8_0, n_blocks=1).values()) == {GGMLType.F32}
    alpha = "blk.0.ssm_alpha.weight"
    assert stored_types({alpha: (8, 256)}, GGMLType.BF16, n_blocks=1)[alpha] == GGMLType.BF16


def test_machine_code_is_cached_and_said(tmp_path: Path):
    code = (
        "from kinetic_core.convert.fits_loader import load, prepare\n"
        "said = []\n"
        "prepare(['numbers'], lambda what, share: said.append(what))\n"
        "print(said, sum(load().numbers.stats.cache_hits.values()))\n"
    )
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=dict(os.environ, KINETIC_CACHE_DIR=str(tmp_path)),
            capture_output=True,
            text=True,
            check=True,
        )
        lines.append(done.stdout.strip())
    assert lines == ['["compiling the quantizers\' loop numbers"] 0', '["compiling the quantizers\' loop numbers"] 1']
    assert list((tmp_path / "quantizers").rglob("*.nbc"))


def test_prepared_loops_are_not_compiled_again():
    prepare(["numbers"])
    said: list[str] = []
    prepare(["numbers"], lambda what, share: said.append(what))
    assert said == []
