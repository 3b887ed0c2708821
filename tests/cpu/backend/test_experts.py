"""Mixture of experts: routing and experts against the reference, and to the bit against dense layers and themselves."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_steps import load_reference, same_bits, tokens_of

from kinetic_core.bench import bytes_per_token
from kinetic_core.conformance.steps import Part, make_batch, step
from kinetic_core.errors import BackendError, NumericalError
from kinetic_core.gguf import BLOCK_FORMATS, GGMLType, MemoryTensors, RawTensor, read_tensor
from kinetic_core.interfaces import HeadRequest
from kinetic_core.program import Program, ProgramBuilder
from kinetic_core.program.values import Value

ROUNDINGS = 5e-6
"""Of the spread: a few float32 roundings (6e-8 each) of values several times the spread."""
N_TOKENS = 64
F32, Q8_0, Q4_K, Q6_K = GGMLType.F32, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K


def error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / expected.std())


def table(n: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


def program_of(tensors: dict, build) -> tuple[Program, MemoryTensors]:
    source = MemoryTensors({}, tensors)
    b = ProgramBuilder({name: info.shape for name, info in source.tensors.items()})
    hidden = build(b)
    return b.finish(hidden, b.gather_outputs(hidden)), source


# routing


def routing(logits: np.ndarray, n_used: int, part: int, bias: np.ndarray | None = None, **how):
    """A program that gives each token its experts (part 0) or their weights (part 1)."""
    tensors = {"logits": logits} | ({} if bias is None else {"bias": bias})

    def build(b: ProgramBuilder) -> Value:
        weight = None if bias is None else b.weight("bias", bias.shape)
        return b.route(b.embedding(b.weight("logits", logits.shape)), n_used, bias=weight, **how)[part]

    return program_of(tensors, build)


@pytest.mark.parametrize("n_rows", [1, 7, 9, 64])
@pytest.mark.parametrize(("n_experts", "n_used"), [(1, 1), (7, 2), (40, 40), (128, 8), (512, 32)])
@pytest.mark.parametrize(
    "how",
    [
        {"scoring": "softmax"},
        {"scoring": "softmax", "normalized": False},
        {"scoring": "sigmoid", "eps": 1e-6, "bias": True},
    ],
    ids=["softmax", "softmax-plain", "sigmoid-bias"],
)
def test_routes_like_the_reference(load, n_experts: int, n_used: int, how: dict, n_rows: int):
    how = dict(how)
    bias = table(1, n_experts, 1)[0] if how.pop("bias", False) else None
    part = Part(tokens_of(n_rows, vocab=N_TOKENS))
    for wanted in (0, 1):
        program, source = routing(3 * table(N_TOKENS, n_experts), n_used, wanted, bias, **how)
        got = step(load(program, source), part)[0]
        expected = step(load_reference(program, source), part)[0]
        if wanted == 0:
            assert np.array_equal(got, expected)
        else:
            assert np.abs(got / expected - 1).max() < ROUNDINGS


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_ties_go_to_the_lower_id(load, scoring: str):
    logits = np.zeros((4, 37), np.float32)
    logits[0, ::2] = -0.0
    logits[1, [36, 3, 20]] = 1.0
    logits[2, 30:] = -np.inf
    logits[2, :5] = -np.inf
    logits[3] = -300.0
    program, source = routing(logits, 4, 0, scoring=scoring)
    got = step(load(program, source), Part((0, 1, 2, 3)))[0]
    assert np.array_equal(got, [[0, 1, 2, 3], [0, 3, 20, 36], [5, 6, 7, 8], [0, 1, 2, 3]])


def test_a_bias_chooses_but_does_not_weigh(load):
    logits, bias = np.zeros((1, 20), np.float32), np.zeros(20, np.float32)
    logits[0, 2], bias[[4, 17]] = 0.5, 1.0
    experts, weights = (
        step(load(*routing(logits, 3, part, bias, scoring="sigmoid", normalized=False)), Part((0,)))[0]
        for part in (0, 1)
    )
    assert np.array_equal(experts, [[2, 4, 17]])
    assert np.allclose(weights, [[1 / (1 + np.exp(-0.5)), 0.5, 0.5]], rtol=1e-6)


def test_what_the_kernel_has_no_room_for_is_refused_by_name(load):
    with pytest.raises(BackendError, match=r"so many experts.*1025.*1024"):
        load(*routing(table(2, 1025), 2, 0, scoring="softmax"))
    with pytest.raises(BackendError, match=r"so many experts per row.*65.*64"):
        load(*routing(table(2, 100), 65, 0, scoring="softmax"))


# experts


def weights_of(type_: GGMLType, shape: tuple[int, int, int], seed: int) -> RawTensor:
    """Numbers with a standard deviation of about 1, less for wide rows; or blocks of random bits with small scales."""
    if type_ is F32:
        return RawTensor.from_array(
            table(shape[0] * shape[1], shape[2], seed).reshape(shape) / np.float32(shape[2] ** 0.5)
        )
    rng, layout = np.random.default_rng(seed), BLOCK_FORMATS[type_]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] * shape[2] // layout.block_size, layout.block_bytes), np.uint8)
    at = 0
    for field in layout.fields:
        if field.dtype == "<f2":
            scales = rng.uniform(-0.02, 0.02, (len(blocks), field.count)).astype(np.float16)
            blocks[:, at : at + field.n_bytes] = scales.view(np.uint8)
        at += field.n_bytes
    return RawTensor(blocks.reshape(-1), type_, shape)


def mixture(
    types: tuple[GGMLType, GGMLType, GGMLType],
    d_model: int,
    d_expert: int,
    n_experts: int = 9,
    n_used: int = 3,
    logits: np.ndarray | None = None,
) -> tuple[Program, MemoryTensors]:
    """A program whose output is a mixture of experts of token t's embedding, routed by row t of `logits`."""
    inner, outer = (n_experts, d_expert, d_model), (n_experts, d_model, d_expert)
    shapes = {"gate": inner, "up": inner, "down": outer}
    tensors = {"x": table(N_TOKENS, d_model), "logits": table(N_TOKENS, n_experts, 1) if logits is None else logits}
    for seed, ((name, shape), type_) in enumerate(zip(shapes.items(), types, strict=True)):
        tensors[name] = weights_of(type_, shape, seed)

    def build(b: ProgramBuilder) -> Value:
        routed = b.route(b.embedding(b.weight("logits", (N_TOKENS, n_experts))), n_used, "softmax")
        x = b.embedding(b.weight("x", (N_TOKENS, d_model)))
        return b.experts(x, routed, *(b.weight(name, shape) for name, shape in shapes.items()))

    return program_of(tensors, build)


MIXTURES = {
    "f32-odd": ((F32, F32, F32), 40, 23),
    "f32": ((F32, F32, F32), 64, 48),
    "q8_0": ((Q8_0, Q8_0, Q8_0), 96, 160),
    "q4_k": ((Q4_K, Q4_K, Q4_K), 256, 512),
    "q6_k": ((Q6_K, Q6_K, Q6_K), 512, 256),
    "mixed": ((Q4_K, Q8_0, Q6_K), 256, 256),
    "mixed-f32": ((F32, Q4_K, Q8_0), 256, 32),
}


@pytest.mark.parametrize("n_rows", [1, 7, 9, 64])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_like_the_reference(load, name: str, n_rows: int):
    program, source = mixture(*MIXTURES[name])
    part = Part(tokens_of(n_rows, vocab=N_TOKENS))
    got = step(load(program, source), part)[0]
    expected = step(load_reference(program, source), part)[0]
    if name.startswith("f32"):
        assert error(got, expected) < ROUNDINGS
    else:  # activations are rounded to 8 bits
        assert np.sqrt(np.mean((got - expected) ** 2)) / expected.std() < 0.03


@pytest.mark.parametrize("name", MIXTURES)
def test_an_expert_has_the_bits_of_a_dense_layer(load, name: str):
    """One expert per row, weight 1: each row against a dense feed-forward layer with that expert's weights."""
    types, d_model, d_expert = MIXTURES[name]
    chosen = np.random.default_rng(5).choice([0, 1, 1, 1, 4, 8], N_TOKENS)
    logits = np.full((N_TOKENS, 9), -1000, np.float32)
    logits[np.arange(N_TOKENS), chosen] = 1000
    program, source = mixture(types, d_model, d_expert, n_used=1, logits=logits)
    got = step(load(program, source), Part(tuple(range(N_TOKENS))))[0]
    for expert in set(chosen.tolist()):
        tensors: dict = {"x": read_tensor(source, "x")}
        for weight, shape in (
            ("gate", (d_expert, d_model)),
            ("up", (d_expert, d_model)),
            ("down", (d_model, d_expert)),
        ):
            info = source.tensors[weight]
            tensors[weight] = RawTensor(np.split(source.tensor_bytes(weight), 9)[expert], info.type, shape)

        def build(b: ProgramBuilder) -> Value:
            x = b.embedding(b.weight("x", (N_TOKENS, d_model)))
            gate, up = (b.linears(x, [b.weight(name, (d_expert, d_model))])[0] for name in ("gate", "up"))
            return b.linears(b.gate(gate, up, "silu"), [b.weight("down", (d_model, d_expert))])[0]

        dense = step(load(*program_of(tensors, build)), Part(tuple(range(N_TOKENS))))[0]
        rows = np.flatnonzero(chosen == expert)
        assert same_bits(got[rows] + np.float32(0), dense[rows] + np.float32(0))  # fma(1, y, +0): -0 is +0 there


def test_experts_are_summed_in_ascending_id_by_fma(load):
    """To the bit (the fma is a float64 sum, rounded twice: never to another float32 here); downward gives others."""
    logits = np.zeros((N_TOKENS, 9), np.float32)
    logits[:, [1, 4, 5, 8]] = (2.0, 3.0, 2.5, 1.5)
    part = Part(tuple(range(N_TOKENS)))
    chosen = (1, 4, 5, 8)
    weights = step(load(*routing(logits, 4, 1, scoring="softmax")), part)[0]
    alone = {}
    for expert in chosen:
        only = np.where(np.arange(9) == expert, np.float32(0), np.float32(-1000)) + np.zeros_like(logits)
        alone[expert] = step(load(*mixture((F32, F32, F32), 64, 48, n_used=1, logits=only)), part)[0]

    def summed(order: list[int]) -> np.ndarray:
        total = np.zeros((N_TOKENS, 64), np.float32)
        for slot in order:
            weight = weights[:, slot, None].astype(np.float64)
            total = (weight * alone[chosen[slot]] + total).astype(np.float32)
        return total

    got = step(load(*mixture((F32, F32, F32), 64, 48, n_used=4, logits=logits)), part)[0]
    assert same_bits(got, summed([0, 1, 2, 3]))
    assert not same_bits(got, summed([3, 2, 1, 0]))


@pytest.mark.parametrize("name", ["f32-odd", "q8_0", "mixed"])
def test_a_row_has_the_same_bits_in_any_batch(load, name: str):
    program, source = mixture(*MIXTURES[name])
    executable = load(program, source)
    tokens = tuple(range(N_TOKENS))
    alone = np.concatenate([step(executable, Part((token,)))[0] for token in tokens])
    for size in (64, 33, 17, 16, 9, 5, 3, 2):
        executable._arena.view(np.float32)[:] = np.nan
        parts = [step(executable, Part(tokens[at : at + size]))[0] for at in range(0, N_TOKENS, size)]
        assert same_bits(np.concatenate(parts), alone)
    assert same_bits(step(load(program, source, n_threads=1), Part(tokens))[0], alone)
    assert same_bits(step(load(program, source, n_threads=7), Part(tokens))[0], alone)


@pytest.mark.parametrize("n_rows", [2, 16, 17, 400])
def test_every_row_to_the_same_experts(load, n_rows: int):
    logits = np.zeros((N_TOKENS, 9), np.float32)
    logits[:, [2, 3, 8]] = (1.0, 2.0, 3.0)
    program, source = mixture((Q8_0, Q8_0, Q8_0), 64, 64, logits=logits)
    executable = load(program, source)
    executable._arena.view(np.float32)[:] = np.nan
    tokens = tokens_of(n_rows, vocab=N_TOKENS)
    together = step(executable, Part(tokens))[0]
    alone = {token: step(executable, Part((token,)))[0][0] for token in set(tokens)}
    assert same_bits(together, np.array([alone[token] for token in tokens]))


@pytest.mark.parametrize("n_used", [1, 9])
def test_one_expert_and_all(load, n_used: int):
    program, source = mixture((F32, F32, F32), 64, 48, n_used=n_used)
    part = Part(tokens_of(20, vocab=N_TOKENS))
    assert error(step(load(program, source), part)[0], step(load_reference(program, source), part)[0]) < ROUNDINGS


def test_experts_of_the_wanted_rows_only(load):
    """After the wanted rows are gathered: none, one and some of them."""
    program, source = mixture((Q8_0, Q8_0, Q8_0), 64, 96)
    shapes = {name: source.tensors[name].shape for name in ("gate", "up", "down")}

    def build(b: ProgramBuilder) -> Value:
        x, logits = (b.gather_outputs(b.embedding(b.weight(n, source.tensors[n].shape))) for n in ("x", "logits"))
        return b.experts(x, b.route(logits, 3, "softmax"), *(b.weight(name, shape) for name, shape in shapes.items()))

    b = ProgramBuilder({name: info.shape for name, info in source.tensors.items()})
    hidden = b.embedding(b.weight("x", source.tensors["x"].shape))
    gathered, every = load(b.finish(hidden, build(b)), source), load(program, source)
    tokens = tokens_of(30, vocab=N_TOKENS)
    expected = step(every, Part(tokens))[0]
    for wanted in ([], [29], [3, 4, 17, 20, 28]):
        gathered.run(make_batch(Part(tokens), heads=[HeadRequest(row, None) for row in wanted]))
        for output, row in enumerate(wanted):
            assert same_bits(gathered.logits(output), expected[row])


def test_a_nan_logit_of_the_router_becomes_a_nan_logit(load):
    """… and an error, of its row only: the rows beside it, and the steps after it, are what they were."""
    logits = table(N_TOKENS, 9, 1)
    logits[3, 4], logits[5, :] = np.nan, np.nan
    program, source = mixture((Q8_0, Q8_0, Q8_0), 64, 64, logits=logits)
    executable = load(program, source)
    clean = step(executable, Part((1, 2, 4)))[0]
    for token in (3, 5):
        with pytest.raises(NumericalError, match="row 1"):
            step(executable, Part((1, token, 2, 4)))
        assert same_bits(executable._trunk.logits[[0, 2, 3]], clean)
    assert same_bits(step(executable, Part((1, 2, 4)))[0], clean)


def test_a_type_without_a_kernel_is_converted(load):
    """TQ1_0 holds three levels and a float16 scale: exact in F16."""
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 243, (9 * 32, 54), np.uint8)
    raw[:, 52:] = np.frombuffer(np.float16(0.05).tobytes(), np.uint8)
    program, source = mixture((F32, F32, F32), 256, 32)
    tensors = {name: RawTensor(source.tensor_bytes(name), i.type, i.shape) for name, i in source.tensors.items()}
    tensors["gate"] = RawTensor(raw.reshape(-1), GGMLType.TQ1_0, (9, 32, 256))
    source = MemoryTensors({}, tensors)
    executable = load(program, source)
    part = Part(tokens_of(9, vocab=N_TOKENS))
    assert error(step(executable, part)[0], step(load_reference(program, source), part)[0]) < ROUNDINGS
    assert any("TQ1_0" in notice for notice in executable.statistics()["notices"])


def test_a_step_is_said_to_read_the_experts_that_it_uses(load):
    program, source = mixture((Q8_0, Q8_0, Q8_0), 64, 96, n_experts=12, n_used=3)
    used = 3 * 3 * 64 * 96 * 34 // 32 + 4 * 64 + 4 * 12
    assert load(program, source).statistics()["bytes_per_token"] == used
    assert bytes_per_token(program, source, "f16", 5) == used
