"""The prediction block: a program of its own on the sequence's blocks, exact in the same way as the trunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kinetic_arch_qwen35.architecture import Qwen35, Qwen35Moe
from stepping import load

from kinetic_core.conformance.steps import Part, make_batch, step
from kinetic_core.errors import BackendError, NumericalError
from kinetic_core.gguf import MemoryTensors, read_tensor
from kinetic_core.interfaces import Architecture, HeadRequest
from kinetic_core.plugins import load_registry
from kinetic_core.program import ProgramBuilder, Weight
from kinetic_core.reference.random_model import random_model, with_tensor_type
from kinetic_core.reference.tiny_hybrid import TinyHybrid

VARIANTS = {variant.name: variant for variant in TinyHybrid.tiny()}
SOURCE = random_model("tiny-hybrid", VARIANTS["prediction"], seed=3)
MODELS: dict[str, tuple[type[Architecture], MemoryTensors]] = {
    "f32": (TinyHybrid, SOURCE),
    "q8_0": (TinyHybrid, with_tensor_type(SOURCE, "Q8_0")),
    **{
        f"{kind.key}-{variant.name}": (kind, with_tensor_type(random_model(kind.key, variant, seed=3), "Q8_0"))
        for kind in (Qwen35, Qwen35Moe)
        for variant in kind.tiny()
        if "nextn_predict_layers" in variant.metadata and variant.metadata["embedding_length"] == 64
    },
}
TOKENS = tuple(np.random.default_rng(7).integers(0, 100, 270).tolist())
BLOCK_BEGINS = 256


@pytest.fixture(params=MODELS, scope="module")
def model(request: pytest.FixtureRequest) -> tuple[type[Architecture], MemoryTensors]:
    return MODELS[request.param]


@pytest.fixture(params=["reference", "cpu", "cpu-one-thread"], scope="module")
def make(request: pytest.FixtureRequest, model: tuple[type[Architecture], MemoryTensors]) -> Iterator[Any]:
    """make(**options) -> an executable of the model; closed with the module."""
    name, _, alone = request.param.partition("-")
    opened: list[Any] = []

    def make(**options: Any) -> Any:
        backend = load_registry().get("backend", name)
        assert backend.capabilities.supports_prediction
        opened.append(load(*model, backend, n_threads=1 if alone else 2, **options))
        return opened[-1]

    yield make
    for executable in opened:
        executable.close()


def trunk(executable: Any, part: Part) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of a step of the trunk, copied."""
    logits = step(executable, part)[0]
    return logits, executable.hidden(0, len(logits)).copy()


def predict(executable: Any, part: Part, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of a prediction step, copied."""
    batch = make_batch(part)
    executable.predict(batch, hidden)
    logits = np.array([executable.logits(row) for row in range(batch.n_rows)])
    return logits, executable.hidden(0, batch.n_rows).copy()


def predict_all(executable: Any, hidden: np.ndarray, sizes: list[int], n: int, **where: Any) -> np.ndarray:
    """Predicted logits of positions 1 to n - 1, in steps of these sizes (the last one repeated)."""
    rows: list[np.ndarray] = []
    at = 1
    while at < n:
        end = min(n, at + sizes[min(len(rows), len(sizes) - 1)])
        rows.append(predict(executable, Part(TOKENS[at:end], at, **where), hidden[at - 1 : end - 1])[0])
        at = end
    return np.concatenate(rows)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("sizes", [[1], [2], [7, 9, 1, 250], [255, 1]], ids=str)
def test_any_split_of_a_prompt(make: Any, sizes: list[int]) -> None:
    executable, n = make(), 262
    _, hidden = trunk(executable, Part(TOKENS[:n], table=(0, 1)))
    whole = predict_all(executable, hidden, [n], n, table=(0, 1))
    assert same(predict_all(make(), hidden, sizes, n, table=(3, 2)), whole)


def test_neighbours(make: Any) -> None:
    """Rows of two sequences in one step, against each alone; the second sits at other positions."""
    executable = make()
    _, hidden = trunk(executable, Part(TOKENS[:60]))
    alone = predict_all(executable, hidden, [59], 60, table=(1,))
    other = make()
    predict_all(other, hidden, [30], 31, table=(2,))
    both = make_batch(Part(TOKENS[1:20], 1, (1,), 0), Part(TOKENS[31:60], 31, (2,), 1))
    other.predict(both, np.concatenate([hidden[:19], hidden[30:59]]))
    logits = np.array([other.logits(row) for row in range(both.n_rows)])
    assert same(logits[:19], alone[:19]) and same(logits[19:], alone[30:])


def test_a_guess_is_run_again_once_its_token_is_known(make: Any) -> None:
    executable, n = make(), 260
    _, hidden = trunk(executable, Part(TOKENS[:n], table=(0, 1)))
    plain = predict_all(executable, hidden, [n], n, table=(0, 1))
    other = make()
    at = BLOCK_BEGINS - 2
    predict_all(other, hidden, [at], at, table=(0, 1))
    guessed = hidden[at - 1 : at]
    for ahead in range(4):
        _, guessed = predict(other, Part((9 + ahead,), at + ahead, (0, 1)), guessed)
    rows, _ = predict(other, Part(TOKENS[at:n], at, (0, 1)), hidden[at - 1 : n - 1])
    assert same(rows, plain[at - 1 :])


def test_the_trunk_does_not_notice(make: Any) -> None:
    """Recurrent states and later steps are the same bits with predictions in between and without."""
    plain, other = make(), make()
    expected = [trunk(plain, Part(TOKENS[:40]))[0], trunk(plain, Part(TOKENS[40:43], 40))[0]]
    logits, hidden = trunk(other, Part(TOKENS[:40]))
    predict_all(other, hidden, [13], 40)
    before = other.read_slot(0)
    _, guess = predict(other, Part(TOKENS[40:41], 40), hidden[39:40])
    predict(other, Part((5,), 41), guess)
    assert other.read_slot(0) == before
    assert same(logits, expected[0]) and same(trunk(other, Part(TOKENS[40:43], 40))[0], expected[1])
    assert other.read_slot(0) == plain.read_slot(0)


def test_results_are_those_of_the_last_call(make: Any) -> None:
    executable = make()
    logits, hidden = trunk(executable, Part(TOKENS[:12]))
    predicted, ahead = predict(executable, Part(TOKENS[1:12], 1), hidden[:11])
    assert not same(predicted, logits[1:]) and not same(ahead, hidden[1:])
    assert same(executable.hidden(3, 2), ahead[3:5])
    heads = [HeadRequest(2, 3), HeadRequest(10, 1, exact_ids=(7,))]
    executable.predict(make_batch(Part(TOKENS[1:12], 1), heads=heads), hidden[:11])
    for output, head in enumerate(heads):
        ids, scores = executable.candidates(output)
        order = np.argsort(-predicted[head.row], kind="stable")[: head.top_k].tolist()
        assert ids.tolist() == order + [token for token in head.exact_ids if token not in order]
        assert same(scores, predicted[head.row][ids])
    again, _ = trunk(executable, Part(TOKENS[12:13], 12))
    plain = make()
    step(plain, Part(TOKENS[:12]))
    assert same(again, step(plain, Part(TOKENS[12:13], 12))[0])


def test_its_input_may_be_what_the_last_call_left(make: Any) -> None:
    """`hidden` of the executable itself, not copied: the trunk's, then the block's own."""
    executable, other = make(), make()
    _, hidden = trunk(executable, Part(TOKENS[:12]))
    first, ahead = predict(executable, Part(TOKENS[1:12], 1), hidden[:11])
    second, _ = predict(executable, Part((3,), 12), ahead[10:])
    step(other, Part(TOKENS[:12]))
    rows, _ = predict(other, Part(TOKENS[1:12], 1), other.hidden(0, 11))
    assert same(rows, first)
    rows, _ = predict(other, Part((3,), 12), other.hidden(10, 1))
    assert same(rows, second)


def test_hidden_states_of_drafts(make: Any) -> None:
    """A draft row's hidden state is that of the token run plainly, and predicts the same once it is committed."""
    plain, executable = make(), make()
    path = (*TOKENS[:20], 5, 6)
    _, hidden = trunk(plain, Part(path))
    expected, _ = predict(plain, Part(path[1:], 1), hidden[:-1])
    _, before = trunk(executable, Part(TOKENS[:19]))
    part = Part(TOKENS[19:20], 19, drafts=((8, 0), (5, 0), (6, 2)))
    _, drafted = trunk(executable, part)
    assert same(drafted[[0, 2, 3]], hidden[19:])
    executable.commit(make_batch(part).sequences[0], [2, 3])
    rows, _ = predict(executable, Part(path[1:], 1), np.concatenate([before, drafted[[0, 2]]]))
    assert same(rows, expected)
    assert same(trunk(executable, Part((1,), 22))[0], trunk(plain, Part((1,), 22))[0])


def test_drafts_that_were_not_committed_are_dropped(make: Any) -> None:
    executable = make()
    part = Part(TOKENS[:20], drafts=((5, 19),))
    _, hidden = trunk(executable, part)
    predict(executable, Part(TOKENS[1:20], 1), hidden[:19])
    with pytest.raises(BackendError, match="no drafts of the last step"):
        executable.commit(make_batch(part).sequences[0], [20])


def test_its_keys_and_values_lie_in_the_blocks(make: Any) -> None:
    executable = make()
    _, hidden = trunk(executable, Part(TOKENS[:60]))
    whole = predict_all(executable, hidden, [59], 60)
    predict_all(executable, hidden, [40], 41)
    executable.copy_block(0, 2)
    executable.write_block(3, executable.read_block(0))
    for block in (2, 3):
        rows, _ = predict(executable, Part(TOKENS[41:60], 41, (block,)), hidden[40:59])
        assert same(rows, whole[40:])


def test_nothing_is_read_at_position_0(make: Any) -> None:
    """The block never runs there, so whatever bytes the cache holds for it must not reach a row."""
    rows = []
    for filler in (b"\x00", b"\x41", b"\xff"):
        executable = make()
        size = len(executable.read_block(0))
        executable.write_block(0, filler * size)
        hidden = np.random.default_rng(1).standard_normal((30, 64)).astype(np.float32)
        rows.append(predict(executable, Part(TOKENS[1:31], 1), hidden)[0])
    assert np.isfinite(rows[0]).all()
    assert same(rows[0], rows[1]) and same(rows[0], rows[2])


def test_a_nan_is_an_error(make: Any) -> None:
    executable = make()
    hidden = np.ones((3, 64), np.float32)
    hidden[1] = np.nan
    with pytest.raises(NumericalError, match="row 1 of the step"):
        executable.predict(make_batch(Part(TOKENS[1:4], 1)), hidden)
    with pytest.raises(BackendError, match="no such output"):
        executable.logits(0)


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        (Part((1, 2), 0), (2, 64), "hidden state before each row.*got 0"),
        (Part((1,), 3, drafts=((2, 0),)), (2, 64), "no drafts"),
        (Part((1, 2), 3, snapshots=((0, 1),)), (2, 64), "no snapshots"),
        (Part((1, 2), 3), (1, 64), r"bad hidden.*\[?2, 64"),
        (Part((1, 2), 3), (2, 32), r"bad hidden.*\[?2, 64"),
        (Part((1, 200), 3), (2, 64), "outside the vocabulary"),
        (Part((1, 2), 3, table=(9,)), (2, 64), "block that does not exist"),
    ],
)
def test_bad_batches_are_refused(make: Any, part: Part, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        make().predict(make_batch(part), np.zeros(shape, np.float32))


def test_bad_hidden_states_are_refused(make: Any) -> None:
    executable = make()
    with pytest.raises(BackendError, match="float64"):
        executable.predict(make_batch(Part((1, 2), 3)), np.zeros((2, 64)))
    with pytest.raises(BackendError, match="no such rows"):
        executable.hidden(0, 1)
    step(executable, Part(TOKENS[:4]))
    with pytest.raises(BackendError, match="no such rows"):
        executable.hidden(2, 3)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_model_without_a_block_is_refused(name: str) -> None:
    source = random_model("tiny-hybrid", VARIANTS["recurrent"])
    executable = load(TinyHybrid, source, load_registry().get("backend", name))
    with pytest.raises(BackendError, match="no prediction block"):
        executable.predict(make_batch(Part((1,), 1)), np.zeros((1, 64), np.float32))
    executable.close()


def test_every_tensor_of_the_block_moves_the_predicted_logits() -> None:
    hidden = np.random.default_rng(2).standard_normal((30, 64)).astype(np.float32)
    part = Part(TOKENS[1:31], 1)

    def predicted(source: MemoryTensors) -> np.ndarray:
        return predict(load(TinyHybrid, source, kv_type="f32"), part, hidden)[0]

    arrays = {name: read_tensor(SOURCE, name) for name in SOURCE.tensors}
    base = predicted(SOURCE)
    own = [name for name in arrays if name.startswith("blk.2.")]
    assert len(own) == len([name for name in VARIANTS["prediction"].tensors if name.startswith("blk.2.")]) > 15
    for name in [*own, "token_embd.weight", "output.weight"]:
        rolled = np.roll(arrays[name], 1, axis=0)
        moved = predicted(MemoryTensors(SOURCE.metadata.raw, {**arrays, name: rolled}))
        assert np.sqrt(np.mean((moved - base) ** 2)) > 0.01 * base.std(), name
    for name in ("blk.0.ssm_out.weight", "output_norm.weight"):
        assert same(predicted(MemoryTensors(SOURCE.metadata.raw, {**arrays, name: arrays[name] * 2})), base), name


def test_a_block_with_another_vocabulary_is_a_mistake_of_the_architecture() -> None:
    class Mistaken(TinyHybrid):
        def prediction_output(self, b: ProgramBuilder) -> tuple[Weight, float]:
            return b.weight("blk.0.ffn_gate.weight", (96, 64)), 1.0

    with pytest.raises(ValueError, match=r"prediction block's vocabulary.*got 96.*expected 100"):
        load(Mistaken, SOURCE)
