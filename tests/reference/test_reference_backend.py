"""The reference backend on hand-written programs: rounding, windows, candidates, and what it refuses."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from stepping import OPTIONS, load, load_program

from kinetic_core.conformance.steps import Part, make_batch, step
from kinetic_core.errors import BackendError, NumericalError, TensorError
from kinetic_core.gguf import MemoryTensors, read_tensor
from kinetic_core.interfaces import HeadRequest
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.random_model import random_model
from kinetic_core.reference.tiny_hybrid import TinyHybrid


def table(rows: int = 50, width: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def attention_program(weight: np.ndarray, window: int | None = None, **options):
    def build(b):
        x = b.embedding(b.weight("w", weight.shape))
        return b.attention(x, x, x, heads=2, kv_heads=2, head_dim=2, window=window)

    return load_program({"w": weight}, build, **options)


def test_a_row_reads_its_own_value_rounded_to_the_cache_type():
    weight = table()
    weight[7, 0] = 70000.0  # beyond the largest float16
    got = step(attention_program(weight), Part((3,)))[0][0]
    np.testing.assert_array_equal(got, weight[3].astype(np.float16).astype(np.float32))
    assert not np.array_equal(got, weight[3])
    np.testing.assert_array_equal(step(attention_program(weight, kv_type="f32"), Part((3,)))[0][0], weight[3])


def test_a_draft_reads_its_own_value_rounded():
    weight = table()
    weight[5] *= 30  # so that the draft's own score outweighs the committed row's by far
    got = step(attention_program(weight), Part((3,), drafts=((5, 0),)))[0][1]
    np.testing.assert_array_equal(got, weight[5].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_counts_the_row_itself(window):
    weight = table()
    prompt = list(range(12))
    base = step(attention_program(weight, window), Part(tuple(prompt)))[0]
    drafted = step(attention_program(weight, window), Part(tuple(prompt[:9]), drafts=((9, 8), (10, 9), (11, 10))))[0]
    np.testing.assert_array_equal(drafted, base)
    for changed in range(12):
        other = prompt.copy()
        other[changed] = 40
        logits = step(attention_program(weight, window), Part(tuple(other)))[0]
        differs = [not np.array_equal(logits[row], base[row]) for row in range(12)]
        assert differs == [changed <= row < changed + window for row in range(12)]


def scores_program(weight: np.ndarray):
    """The logits of a row are its token's embedding."""
    return load_program({"w": weight}, lambda b: b.embedding(b.weight("w", weight.shape)))


def candidates(weight: np.ndarray, token: int, top_k: int, exact_ids: tuple[int, ...] = ()):
    executable = scores_program(weight)
    executable.run(make_batch(Part((1, token)), heads=[HeadRequest(1, top_k, exact_ids)]))
    ids, scores = executable.candidates(0)
    assert ids.dtype == np.int32 and scores.dtype == np.float32
    np.testing.assert_array_equal(scores, weight[token][ids])
    return ids.tolist()


def test_candidates_are_best_first_and_ties_go_to_the_lower_id():
    weight = np.zeros((2, 6), np.float32)
    weight[1] = [1.0, -0.0, 3.0, 0.0, 3.0, -1.0]
    assert candidates(weight, 1, 1) == [2]
    assert candidates(weight, 1, 4) == [2, 4, 0, 1]
    assert candidates(weight, 1, 99) == [2, 4, 0, 1, 3, 5]
    assert candidates(weight, 0, 3) == [0, 1, 2]
    assert candidates(weight, 1, 2, (5, 4, 1)) == [2, 4, 1, 5]


def test_logits_and_candidates_answer_only_what_was_asked():
    executable = scores_program(table())
    with pytest.raises(BackendError, match="no such output"):
        executable.logits(0)
    executable.run(make_batch(Part((1, 2)), heads=[HeadRequest(0, None), HeadRequest(1, 3)]))
    np.testing.assert_array_equal(executable.logits(0), table()[1])
    with pytest.raises(BackendError, match="candidates"):
        executable.logits(1)
    with pytest.raises(BackendError, match="distribution"):
        executable.candidates(0)
    with pytest.raises(BackendError, match="no such output"):
        executable.candidates(2)
    executable.run(make_batch(Part((1, 2)), heads=[]))
    with pytest.raises(BackendError, match="no such output"):
        executable.logits(0)


def test_a_nan_logit_is_an_error_only_where_it_is_wanted():
    weight = table()
    weight[4, 2] = np.nan
    executable = scores_program(weight)
    executable.run(make_batch(Part((4, 1)), heads=[HeadRequest(1, 1)]))
    with pytest.raises(NumericalError, match="row 1"):
        executable.run(make_batch(Part((1, 4)), heads=[HeadRequest(1, 1)]))
    with pytest.raises(BackendError, match="no such output"):
        executable.logits(0)


@pytest.fixture(scope="module")
def hybrid():
    return load(TinyHybrid, random_model("tiny-hybrid", TinyHybrid.tiny()[0]), max_rows=8, max_outputs=4)


GOOD = make_batch(Part((1, 2), 0, (0,), 0, drafts=((3, 1),)), Part((4,), 256, (1, 2), 1), heads=[HeadRequest(0, 1)])


def changed(number: int, **fields):
    sequences = list(GOOD.sequences)
    sequences[number] = attrs.evolve(sequences[number], **fields)
    return attrs.evolve(GOOD, sequences=tuple(sequences))


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


BAD = {
    "bad number of rows": make_batch(Part(tuple(range(9))), heads=[]),
    "bad token_ids": attrs.evolve(GOOD, token_ids=GOOD.token_ids.astype(np.int64)),
    "bad positions": attrs.evolve(GOOD, positions=GOOD.positions[:3]),
    "a token outside": attrs.evolve(GOOD, token_ids=numbers(1, 2, 3, 100)),
    "outside the vocabulary.*-1": attrs.evolve(GOOD, token_ids=numbers(1, -1, 3, 4)),
    "rows out of order": changed(1, first_row=2),
    "do not make up the batch": attrs.evolve(GOOD, sequences=GOOD.sequences[:1]),
    "wrong positions": attrs.evolve(GOOD, positions=numbers(0, 1, 1, 256)),
    "bad parent of the row at 2 in sequence 0": changed(0, draft_parents=(2,)),
    "bad parent of the row at 2": attrs.evolve(changed(0, draft_parents=(0,)), positions=numbers(0, 1, 1, 256)),
    "no committed row": attrs.evolve(changed(0, n_committed=0, draft_parents=(-1,) * 3), positions=numbers(0, 0, 0, 1)),
    "bad block table": changed(1, block_table=numbers(1)),
    "bad block table.*int64": changed(1, block_table=np.array([1, 2])),
    "a block that does not exist": changed(1, block_table=numbers(1, 6)),
    "a block is written for two": changed(1, block_table=numbers(1, 0)),
    "a block is written that another": changed(1, block_table=numbers(0, 2)),
    "a slot that does not exist": changed(1, slot=-1),
    "a slot is used twice": changed(1, slot=0),
    "a slot is used twice.*": changed(0, snapshots=((1, 1),)),
    "a snapshot after a row": changed(0, snapshots=((2, 3),)),
    "bad row": attrs.evolve(GOOD, heads=[HeadRequest(4, 1)]),
    "bad row.*ascending": attrs.evolve(GOOD, heads=[HeadRequest(1, 1), HeadRequest(0, 1)]),
    "bad top_k": attrs.evolve(GOOD, heads=[HeadRequest(0, 0)]),
    "a token outside.*100": attrs.evolve(GOOD, heads=[HeadRequest(0, 1, (100,))]),
    "too many outputs": attrs.evolve(GOOD, heads=[HeadRequest(0, 1)] * 5),
}


def test_the_good_batch_runs(hybrid):
    hybrid.run(GOOD)


@pytest.mark.parametrize("message", BAD)
def test_a_batch_that_breaks_the_contract_is_refused(hybrid, message):
    before = [hybrid.read_slot(slot) for slot in range(6)]
    with pytest.raises(BackendError, match=message):
        hybrid.run(BAD[message])
    assert [hybrid.read_slot(slot) for slot in range(6)] == before


def test_blocks_and_slots_that_do_not_exist(hybrid):
    for call in (
        lambda: hybrid.read_block(6),
        lambda: hybrid.copy_block(0, -1),
        lambda: hybrid.write_block(6, b""),
        lambda: hybrid.read_slot(-1),
        lambda: hybrid.clear_slot(6),
        lambda: hybrid.copy_slot(6, 0),
        lambda: hybrid.write_slot(6, b""),
    ):
        with pytest.raises(BackendError, match="does not exist"):
            call()


def test_load_reads_every_weight_and_refuses_what_does_not_fit():
    source = random_model("tiny-hybrid", TinyHybrid.tiny()[0])
    seen = []
    executable = load(TinyHybrid, source, progress=lambda what, share: seen.append((what, share)))
    assert seen[0] == ("reading weights", 0.0) and seen[-1] == ("reading weights", 1.0)
    tensors = {name: read_tensor(source, name) for name in source.tensors}
    tensors["output_norm.weight"] = tensors["output_norm.weight"][:32]
    with pytest.raises(TensorError, match=r"output_norm\.weight"):
        ReferenceBackend().load(executable.program, MemoryTensors({}, tensors), OPTIONS)
    with pytest.raises(BackendError, match="q8_0"):
        ReferenceBackend().load(executable.program, source, attrs.evolve(OPTIONS, kv_type="q8_0"))


def test_a_fresh_slot_is_that_of_an_empty_sequence():
    fresh = load(TinyHybrid, random_model("tiny-hybrid", TinyHybrid.tiny()[0]))
    assert fresh.read_slot(5) == bytes(fresh.program.state_bytes)


def test_a_position_that_was_never_written_is_no_answer():
    executable = attention_program(table())
    with pytest.raises(NumericalError):
        executable.run(make_batch(Part((1,), 3)))


def test_the_digest_names_the_cache_type_and_stays():
    weight = table()
    digests = [attention_program(weight, kv_type=kv).kernel_digest for kv in ("f16", "f16", "f32")]
    assert digests[0] == digests[1] != digests[2]


def test_a_closed_model_says_so():
    executable = scores_program(table())
    executable.close()
    executable.close()
    for call in (lambda: executable.run(make_batch(Part((1,)))), lambda: executable.read_block(0)):
        with pytest.raises(BackendError, match="closed"):
            call()
