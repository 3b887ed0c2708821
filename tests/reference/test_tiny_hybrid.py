"""The tiny hybrid: predictable, sensitive to its whole path, quantizable, with one token per byte."""

from __future__ import annotations

import numpy as np
import pytest
from stepping import load

from kinetic_core.conformance.steps import Part, step
from kinetic_core.errors import MetadataError, UnsupportedModelError
from kinetic_core.gguf import GGMLType, MemoryTensors, gguf_bytes, read_tensor
from kinetic_core.reference.random_model import random_model, with_tensor_type
from kinetic_core.reference.tiny_hybrid import TinyHybrid, tiny_hybrid_source
from kinetic_core.reference.tiny_tokenizer import TURN_END, byte_alphabet, predicted_next


@pytest.mark.parametrize("tensor_type", ["F32", "F16", "Q8_0", "Q4_0"])
def test_greedy_decoding_follows_the_permutation(tensor_type):
    following = predicted_next(300)
    executable = load(TinyHybrid, tiny_hybrid_source(tensor_type=tensor_type))
    order = np.random.default_rng(2).permutation(300)
    for start in range(0, 300, 60):
        part = tuple(order[start : start + 60].tolist())
        logits = step(executable, Part(part, start, (0, 1)))[0]
        assert logits.argmax(1).tolist() == following[list(part)].tolist()
        best = np.sort(logits, 1)
        assert (best[:, -1] - best[:, -2]).min() > 0.5


def test_an_answer_is_the_alphabet_and_ends_the_turn():
    following = predicted_next(300)
    token, answer = ord("\n"), []
    while token != TURN_END:
        token = int(following[token])
        answer.append(token)
    assert bytes(answer[:-1]) == b"abcdefghijklmnopqrstuvwxyz."


@pytest.mark.parametrize("vocab", [260, 300, 513])
def test_the_permutation_is_one_without_fixed_points(vocab):
    following = predicted_next(vocab)
    assert sorted(following.tolist()) == list(range(vocab))
    assert not (following == np.arange(vocab)).any()
    assert {chr(following[byte]).isprintable() for byte in range(32, 127) if byte != ord(".")} == {True}


@pytest.mark.parametrize("predictable", [True, False])
def test_logits_depend_on_the_whole_path(predictable):
    source = tiny_hybrid_source(predictable=predictable)
    tokens = np.random.default_rng(3).integers(0, 300, 30).tolist()
    base = step(load(TinyHybrid, source), Part(tuple(tokens)))[0]
    for changed in (0, 10, 28):
        other = tokens.copy()
        other[changed] = (other[changed] + 1) % 300
        logits = step(load(TinyHybrid, source), Part(tuple(other)))[0]
        differs = (logits != base).any(1).tolist()
        assert differs == [row >= changed for row in range(30)]


@pytest.mark.parametrize("variant", TinyHybrid.tiny(), ids=lambda variant: variant.name)
def test_every_tensor_moves_the_logits(variant):
    source = random_model("tiny-hybrid", variant)
    tokens = tuple(np.random.default_rng(4).integers(0, 100, 27).tolist())
    base = step(load(TinyHybrid, source), Part(tokens))[0]
    n_trunk = len(variant.metadata["layer_types"])
    for name in source.tensors:
        if name.startswith(f"blk.{n_trunk}."):
            continue  # the prediction block's have a test of their own
        tensors = {other: read_tensor(source, other) for other in source.tensors}
        tensors[name] = np.roll(tensors[name], 1, axis=0 if len(tensors[name]) > 1 else 1)
        moved = step(load(TinyHybrid, MemoryTensors(source.metadata.raw, tensors)), Part(tokens))[0]
        assert np.sqrt(np.mean((moved - base) ** 2)) > 0.01 * base.std(), name


def test_sources_are_reproducible_and_seeds_differ():
    first, second, third = tiny_hybrid_source(), tiny_hybrid_source(), tiny_hybrid_source(seed=1)
    name = "blk.0.attn_qkv.weight"
    assert first.tensor_bytes(name).tobytes() == second.tensor_bytes(name).tobytes()
    assert first.tensor_bytes(name).tobytes() != third.tensor_bytes(name).tobytes()
    gguf_bytes(first.metadata.raw, {n: read_tensor(first, n) for n in first.tensors})


def test_the_vocabulary_is_bytes_one_merge_and_controls():
    metadata = tiny_hybrid_source(vocab=300).metadata
    tokens = metadata.get_strs("tokenizer.ggml.tokens", length=300)
    assert list(tokens[:256]) == byte_alphabet() and len(set(tokens)) == 300
    assert tokens[ord("a")] == "a" and tokens[ord(" ")] == "Ġ" and tokens[ord("\n")] == "Ċ"
    assert tokens[256] == "".join(metadata.get_strs("tokenizer.ggml.merges")[0].split(" "))
    assert tokens[TURN_END] == "<|im_end|>" and metadata.get_int("tokenizer.ggml.eos_token_id") == TURN_END
    assert metadata.get_ints("tokenizer.ggml.token_type").tolist() == [1] * 257 + [3] * 43
    with pytest.raises(ValueError, match="260"):
        tiny_hybrid_source(vocab=259)


def test_tensor_types_change_matrices_only():
    source = tiny_hybrid_source(tensor_type="Q8_0")
    types = {name: info.type for name, info in source.tensors.items()}
    assert types["blk.0.attn_qkv.weight"] == types["token_embd.weight"] == GGMLType.Q8_0
    for name in ("blk.0.ssm_conv1d.weight", "blk.2.shortconv.conv.weight", "blk.0.attn_norm.weight", "blk.0.ssm_a"):
        assert types[name] == GGMLType.F32
    plain = tiny_hybrid_source()
    assert with_tensor_type(plain, "Q6_K").tensors["output.weight"].type == GGMLType.F32  # 64 is no multiple of 256
    error = np.abs(read_tensor(source, "output.weight") - read_tensor(plain, "output.weight")).max()
    assert 0 < error < 0.03


def test_what_gguf_cannot_write_is_refused():
    wide = MemoryTensors({}, {"w": np.ones((2, 256), np.float32)})
    with pytest.raises(UnsupportedModelError, match="Q6_K"):
        with_tensor_type(wide, "Q6_K")


def test_an_unknown_layer_type_is_named():
    source = tiny_hybrid_source()
    metadata = {**source.metadata.raw, "tiny-hybrid.layer_types": ("delta", "attention", "conv", "lstm")}
    with pytest.raises(MetadataError, match=r"layer_types.*lstm"):
        TinyHybrid(MemoryTensors(metadata, {n: read_tensor(source, n) for n in source.tensors}))
