"""A good small GGUF, mutated 2,000 times: it is refused with one of our own errors, or it opens and works.

Four in five mutations strike the header, the metadata or the tensor table, the rest the tensors' bytes. Of the former,
half damage the bytes, and half write a well-formed file that says something else: most of these open. The mutations are
the same at every run. `run_one_step` is what a file that still opens must survive.
"""

from __future__ import annotations

import math
import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llama import tiny_llama

import kinetic_core
from kinetic_core.errors import KineticError
from kinetic_core.gguf import (
    BLOCK_FORMATS,
    GGMLType,
    RawTensor,
    dequantize,
    gguf_bytes,
    open_model_file,
    parse_header,
)

MUTATIONS = 2000
BATCH = 250
BOUNDARY_NUMBERS = [0, 1, 2, 7, 8, 9, 31, 32, 33, 255, 256, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1]
HUGE_NUMBERS = [*BOUNDARY_NUMBERS, 2**32, 2**61, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 32, 2**64 - 1]


def run_one_step(path: Path, backend: str = "cpu") -> None:
    """What a person's first use does: load the file, tokenize a text, run the model on it, choose one token."""
    with kinetic_core.load(str(path), backend=backend, threads=1, ctx=512) as model:
        prompt = model.tokenize("a b")[:4] or [0]
        completion = model.generate(prompt, max_tokens=1, temperature=0.0, ignore_end=True)
        assert len(completion.token_ids) == 1
        model.detokenize(completion.token_ids)


def mutate(good: bytes, header_bytes: int, random_: random.Random) -> bytes:
    """A file with one to three mutations of one kind."""
    region = random_.random()
    if region < 0.4:
        return mutate_meaning(random_)
    return (
        mutate_bytes(good, 0, header_bytes, random_)
        if region < 0.8
        else mutate_bytes(good, header_bytes, len(good), random_)
    )


def mutate_bytes(good: bytes, begin: int, end: int, random_: random.Random) -> bytes:
    """Damage bytes `begin` to `end`."""
    data = bytearray(good)
    for _ in range(random_.randint(1, 3)):
        end = min(end, len(data))
        if begin >= end:
            break
        at = random_.randrange(begin, end)
        match random_.randrange(9):
            case 0:
                data[at] = random_.randrange(256)
            case 1:
                data[at] ^= 1 << random_.randrange(8)
            case 2:
                data[at : at + 4] = struct.pack("<I", random_.choice(BOUNDARY_NUMBERS))
            case 3:
                data[at : at + 8] = struct.pack("<Q", random_.choice(HUGE_NUMBERS))
            case 4:
                data[at:at] = random_.randbytes(random_.randint(1, 40))
            case 5:
                del data[at : at + random_.randint(1, 40)]
            case 6:
                length = random_.randint(1, 64)
                other = random_.randrange(begin, end)
                data[at : at + length] = data[other : other + length]
            case 7:
                length = random_.randint(1, 16)
                data[at : at + length] = random_.choice([b"\0", b"\xff", b"\x80"]) * length
            case 8:
                del data[at:]
    return bytes(data)


def odd_value(value: Any, random_: random.Random) -> Any:
    """Another value for a metadata key: of its type or of none it expects."""
    if isinstance(value, list | np.ndarray) and random_.random() < 0.5:
        changed = list(value)
        at = random_.randrange(len(changed))
        match random_.randrange(4):
            case 0:
                del changed[at]
            case 1:
                changed.insert(at, changed[random_.randrange(len(changed))])
            case 2:
                changed[at] = changed[random_.randrange(len(changed))]
            case 3:
                odd_texts = ["", " ", "<0x-1>", "a b c", "\0", "\u0120" * 300, "\U0001f600"]
                changed[at] = (
                    random_.choice(odd_texts) if isinstance(value, list) else np.int32(random_.choice([0, 6, 99, -1]))
                )
        return changed if isinstance(value, list) else np.array(changed, np.int32)
    numbers: list[Any] = [*HUGE_NUMBERS, -1, -(2**31), 0.0, -1.0, 1e-45, 3e38, 0.5]
    numbers += [np.float32(math.nan), np.float32(math.inf)]  # as Python floats they are not written
    others: list[Any] = [True, False, "", "llama", "{{ 1/0 }}", "{% for", [], [1], ["a"], [1.5] * 3, [True] * 2]
    if isinstance(value, int | float) and not isinstance(value, bool) and random_.random() < 0.7:
        return random_.choice([*numbers, value + 1, value - 1, value * 2])
    return random_.choice([*numbers, *others])


def mutate_meaning(random_: random.Random) -> bytes:
    """A well-formed file whose metadata or tensor table says something else than the good one's."""
    metadata, tensors = tiny_llama()
    for _ in range(random_.randint(1, 3)):
        key, name = random_.choice(list(metadata)), random_.choice(list(tensors))
        tensor = tensors[name] if isinstance(tensors[name], RawTensor) else RawTensor.from_array(tensors[name])
        match random_.randrange(8):
            case 0 | 1 | 2:
                metadata[key] = odd_value(metadata[key], random_)
            case 3:
                del metadata[key]
            case 4:
                del tensors[name]
            case 5:
                tensors[random_.choice(["blk.2.attn_q.weight", "blk.0.attn_q.bias", "output.weight", "x"])] = tensor
            case 6:
                tensors[name] = RawTensor(tensor.data, tensor.type, tuple(reversed(tensor.shape)))
                if tensor.shape[0] % BLOCK_FORMATS[tensor.type].block_size:
                    tensors[name] = RawTensor(tensor.data, tensor.type, (1, *tensor.shape))
            case 7:
                layout = BLOCK_FORMATS[random_.choice(list(GGMLType))]
                shape = (random_.choice([1, tensor.shape[0]]), layout.block_size * random_.choice([1, 2]))
                tensors[name] = RawTensor(random_.randbytes(layout.n_bytes(shape)), layout.type, shape)
    return gguf_bytes(metadata, tensors)


@pytest.fixture(scope="module")
def good() -> bytes:
    return gguf_bytes(*tiny_llama())


@pytest.fixture(scope="module")
def outcomes() -> Counter[str]:
    return Counter()


def test_the_good_file_survives_its_step(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(good)
    run_one_step(path)
    with open_model_file(path) as model:
        assert len(model.metadata.get_strs("tokenizer.ggml.tokens")) == model.tensors["token_embd.weight"].shape[0]
        values = dequantize(
            model.tensor_bytes("blk.0.attn_q.weight"), model.tensors["blk.0.attn_q.weight"].type, (64, 64)
        )
        assert np.isfinite(values).all() and values.std() > 0


@pytest.mark.parametrize("first", range(0, MUTATIONS, BATCH))
def test_mutated_files_are_refused_or_work(good: bytes, tmp_path: Path, outcomes: Counter[str], first: int) -> None:
    header_bytes = parse_header(good, "good").data_offset
    path = tmp_path / "mutated.gguf"
    for number in range(first, first + BATCH):
        path.write_bytes(mutate(good, header_bytes, random.Random(number)))
        try:
            open_model_file(path).close()
            outcomes["opened"] += 1
            run_one_step(path)
            outcomes["worked"] += 1
        except KineticError as error:
            outcomes[type(error).__name__] += 1
            assert str(error).isprintable(), f"mutation {number}: {error!r}"
        except Exception as error:
            raise AssertionError(f"mutation {number} raised an error that is not ours: {error!r}") from error


def test_the_mutations_reached_every_way_out(outcomes: Counter[str]) -> None:
    """Runs last: a fuzzer whose files were all refused, or all fine, would have tested nothing."""
    if sum(outcomes.values()) - outcomes["opened"] != MUTATIONS:
        pytest.skip("only a part of the mutations ran")
    assert outcomes["worked"] > MUTATIONS // 8
    assert outcomes["TensorError"] > MUTATIONS // 10
    assert outcomes["NumericalError"] > MUTATIONS // 100
    assert outcomes["GGUFError"] > MUTATIONS // 4
    assert outcomes["MetadataError"] > MUTATIONS // 50
