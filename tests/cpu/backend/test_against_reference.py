"""Every operation, through whole programs, against the NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_steps import hybrid_program, load_reference, predict, tokens_of

from kinetic_core.conformance.steps import Part, make_batch, step
from kinetic_core.gguf import MemoryTensors
from kinetic_core.program import ProgramBuilder
from kinetic_core.reference.random_model import with_tensor_type
from kinetic_core.reference.tiny_hybrid import TinyHybrid

VARIANTS = [variant.name for variant in TinyHybrid.tiny()]
ROUNDINGS = 5e-6
"""Of the spread: a few float32 roundings (6e-8 each) of values several times the spread."""
DRAFTS = ((5, 299), (6, 300), (7, 300), (8, 302), (9, 301), (10, 299))


def error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / expected.std())


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_hybrid(load, variant: str, kv_type: str):
    """Prompt over a block's edge, a tree of drafts, snapshots, a commit, and what follows it.

    With a float16 cache a value near the middle of two float16 may be rounded the other way than the reference's, which
    differs in the last bits: half a step of float16 at most, 2^-11.
    """
    program, source = hybrid_program(variant)
    tolerance = 1e-5 if kv_type == "f32" else 2**-11
    truth, cpu = load_reference(program, source, kv_type=kv_type), load(program, source, kv_type=kv_type)
    part = Part(tokens_of(300), drafts=DRAFTS, snapshots=((100, 3), (255, 4)) if program.states else ())
    assert error(step(cpu, part)[0], step(truth, part)[0]) < tolerance
    if program.states:
        for slot in (0, 3, 4):
            expected = np.frombuffer(truth.read_slot(slot), np.float32)
            assert error(np.frombuffer(cpu.read_slot(slot), np.float32), expected) < tolerance
    sequence = make_batch(part).sequences[0]
    for executable in (truth, cpu):
        executable.commit(sequence, [300, 302, 303])
    after = Part((11, 12, 13), 303)
    assert error(step(cpu, after)[0], step(truth, after)[0]) < tolerance


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("tensor_type", ["F32", "Q8_0"])
def test_prediction_block(load, tensor_type: str, kv_type: str):
    """A prompt over a block's edge, then three guesses ahead; with 8-bit matrices, activations are rounded as well."""
    program, source = hybrid_program("prediction")
    source = with_tensor_type(source, tensor_type) if tensor_type != "F32" else source
    hidden = np.random.default_rng(5).standard_normal((299, 64)).astype(np.float32)
    found = []
    for executable in (load(program, source, kv_type=kv_type), load_reference(program, source, kv_type=kv_type)):
        rows = predict(executable, Part(tokens_of(300)[1:], 1), hidden)
        for ahead in range(3):
            guessed = executable.hidden(0 if ahead else 298, 1).copy()
            rows = np.concatenate([rows, predict(executable, Part((ahead,), 300 + ahead), guessed)])
        found.append(rows)
    got, expected = found
    if tensor_type == "F32":
        assert error(got, expected) < (1e-5 if kv_type == "f32" else 2**-11)
    else:
        assert np.sqrt(np.mean((got - expected) ** 2)) / expected.std() < 0.03


@pytest.mark.parametrize("n_rows", [1, 7, 9])
def test_row_counts(load, n_rows: int):
    program, source = hybrid_program("tied")
    part = Part(tokens_of(n_rows))
    assert error(step(load(program, source), part)[0], step(load_reference(program, source), part)[0]) < 1e-5


def test_quantized_matrices(load):
    """Rounded activations: rms error below 3 % of the spread, as llama.cpp's own."""
    program, source = hybrid_program()
    source = with_tensor_type(source, "Q8_0")
    part = Part(tokens_of(64))
    got, expected = step(load(program, source), part)[0], step(load_reference(program, source), part)[0]
    assert np.sqrt(np.mean((got - expected) ** 2)) / expected.std() < 0.03


def run_small(load, tensors: dict[str, np.ndarray], build, tokens: tuple[int, ...] = (0, 1, 2), **options):
    """(cpu, reference) logits of a program whose output is what `build` makes of the tensors."""
    source = MemoryTensors({}, tensors)
    b = ProgramBuilder({name: info.shape for name, info in source.tensors.items()})
    hidden = build(b)
    program = b.finish(hidden, b.gather_outputs(hidden))
    part = Part(tokens)
    expected = step(load_reference(program, source, **options), part)[0]
    return step(load(program, source, **options), part)[0], expected


def table(n: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


@pytest.mark.parametrize("width", [64, 192, 576, 40, 7])
def test_norms_and_elementwise_at_odd_widths(load, width: int):
    def build(b: ProgramBuilder):
        x = b.embedding(b.weight("e", (8, width)), 0.5)
        y = b.rms_norm(x, b.weight("w", (width,)), 1e-5)
        z = b.add(y, b.scale(b.multiply(x, y), 1.5), 0.25)
        return b.add(b.gate(x, z, "silu"), b.gate(y, b.sigmoid(z), "sigmoid"))

    got, expected = run_small(load, {"e": table(8, width), "w": table(1, width, 1)[0]}, build)
    assert error(got, expected) < ROUNDINGS


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 32), (1, 20), (5, 16)])
def test_norms_per_head(load, heads: int, head_dim: int):
    width = heads * head_dim

    def build(b: ProgramBuilder):
        x = b.embedding(b.weight("e", (8, width)))
        y = b.rms_norm(x, b.weight("w", (head_dim,)), 1e-5, head_dim)
        return b.l2_norm(b.rms_norm(b.add(x, y, 2.0), b.weight("v", (width,)), 1e-5, head_dim), 1e-6, head_dim, 3.0)

    tensors = {"e": table(8, width), "w": table(1, head_dim, 1)[0], "v": table(1, width, 2)[0]}
    got, expected = run_small(load, tensors, build)
    assert error(got, expected) < ROUNDINGS


@pytest.mark.parametrize(("heads", "start", "n"), [(3, 0, 16), (3, 16, 16), (1, 5, 7), (5, 31, 1)])
def test_slices_of_heads(load, heads: int, start: int, n: int):
    def build(b: ProgramBuilder):
        x = b.embedding(b.weight("e", (8, heads * 32 + 3)))
        return b.scale(b.slice_heads(b.slice(x, 3, heads * 32), heads, start, n), 2.0)

    tensors = {"e": table(8, heads * 32 + 3)}
    got, expected = run_small(load, tensors, build)
    np.testing.assert_array_equal(got, expected)
    whole = 2 * tensors["e"][:3, 3:].reshape(3, heads, 32)
    np.testing.assert_array_equal(got, whole[:, :, start : start + n].reshape(3, -1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 24), (32, 20), (16, 2)])
def test_rope(load, head_dim: int, rotary_dim: int, interleaved: bool):
    def build(b: ProgramBuilder):
        x = b.embedding(b.weight("e", (8, 3 * head_dim)))
        turned = [
            b.rope(x, head_dim=head_dim, rotary_dim=rotary_dim, base=base, interleaved=interleaved, factors=factors)
            for base, factors in ((1e4, None), (5e5, b.weight("f", (rotary_dim // 2,))))
        ]
        return b.add(*turned)

    factors = np.linspace(1, 40, rotary_dim // 2, dtype=np.float32)
    factors[-1] = 1e30
    got, expected = run_small(load, {"e": table(8, 3 * head_dim), "f": factors}, build, tuple(range(8)) * 40)
    assert error(got, expected) < ROUNDINGS


@pytest.mark.parametrize("width", [16, 130, 300])
@pytest.mark.parametrize("taps", [2, 3, 7])
def test_short_convolution(load, taps: int, width: int):
    def build(b: ProgramBuilder):
        x = b.embedding(b.weight("e", (8, width)))
        return b.short_conv(b.short_conv(x, b.weight("w", (width, taps))), b.weight("v", (width, taps)), None, "silu")

    tensors = {"e": table(8, width), "w": table(width, taps, 1), "v": table(width, taps, 2)}
    got, expected = run_small(load, tensors, build, tokens_of(20, vocab=8))
    assert error(got, expected) < ROUNDINGS


@pytest.mark.parametrize("width", [1, 16, 83])
def test_softplus_and_concatenate(load, width: int):
    def build(b: ProgramBuilder):
        x = b.embedding(b.weight("e", (8, width)))
        y = b.softplus(b.scale(x, 30.0), b.weight("bias", (width,)))
        return b.concatenate(b.concatenate(b.softplus(x), y), b.slice(x, width // 2, 1))

    got, expected = run_small(load, {"e": table(8, width), "bias": table(1, width, 1)[0]}, build, tokens_of(9, vocab=8))
    assert got.shape == (9, 2 * width + 1)
    assert error(got, expected) < ROUNDINGS


def test_a_bias_is_added(load):
    def build(b: ProgramBuilder):
        x = b.embedding(b.weight("e", (8, 32)))
        return b.linears(x, [b.weight("w", (20, 32))], [b.weight("b", (20,))])[0]

    got, expected = run_small(load, {"e": table(8, 32), "w": table(20, 32, 1), "b": table(1, 20, 2)[0]}, build)
    assert error(got, expected) < ROUNDINGS
