"""Loading and running: what is refused, what is converted, what is reported, what is given back."""

from __future__ import annotations

import gc
import weakref

import attrs
import numpy as np
import pytest
from cpu_steps import OPTIONS, hybrid_program, load_reference, tokens_of

from kinetic_core.backends.cpu.backend import CpuBackend
from kinetic_core.conformance.steps import Part, make_batch, step
from kinetic_core.errors import BackendError
from kinetic_core.gguf import GGMLType, MemoryTensors, RawTensor
from kinetic_core.interfaces import HeadRequest
from kinetic_core.program import ProgramBuilder

GOOD = make_batch(Part((1, 2, 3)), Part((4,), 7, (2,), 1, drafts=((5, 0), (6, 1))))


def changed(sequence: int, **fields):
    """GOOD with one sequence changed."""
    sequences = list(GOOD.sequences)
    sequences[sequence] = attrs.evolve(sequences[sequence], **fields)
    return attrs.evolve(GOOD, sequences=tuple(sequences))


def table(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


BAD = {
    "number of rows": attrs.evolve(GOOD, token_ids=table(), positions=table()),
    "token_ids": attrs.evolve(GOOD, token_ids=GOOD.token_ids.astype(np.int64)),
    "positions": attrs.evolve(GOOD, positions=GOOD.positions[:-1]),
    "outside the vocabulary": attrs.evolve(GOOD, token_ids=table(1, 2, 3, 4, 5, 100)),
    "wrong positions": attrs.evolve(GOOD, positions=table(0, 1, 2, 7, 8, 8)),
    "rows out of order": changed(1, first_row=2),
    "do not make up the batch": changed(1, draft_parents=(0,)),
    "no committed row": changed(0, n_committed=0),
    "bad parent": changed(1, draft_parents=(0, 2)),
    "bad block table": changed(0, block_table=table()),
    "block that does not exist": changed(0, block_table=table(6)),
    "written for two places": changed(1, block_table=table(0)),
    "another sequence reads": changed(1, block_table=table(2, 0)),
    "slot that does not exist": changed(0, slot=-1),
    "slot is used twice": changed(0, snapshots=((2, 1),)),
    "not committed": changed(1, snapshots=((1, 3),)),
    "bad row": attrs.evolve(GOOD, heads=[HeadRequest(6, 1)]),
    "ascending": attrs.evolve(GOOD, heads=[HeadRequest(3, 1), HeadRequest(2, 1)]),
    "bad top_k": attrs.evolve(GOOD, heads=[HeadRequest(3, 0)]),
    "token outside": attrs.evolve(GOOD, heads=[HeadRequest(3, 1, (100,))]),
}


@pytest.fixture(scope="module")
def shared():
    program, source = hybrid_program()
    executable = CpuBackend().load(program, source, attrs.evolve(OPTIONS, max_rows=16, max_outputs=16))
    # GOOD's second sequence goes on from tokens that were never run: whatever lay in memory could be a NaN.
    executable.write_block(2, bytes(len(executable.read_block(2))))
    yield executable
    executable.close()


@pytest.mark.parametrize("what", BAD)
def test_a_batch_that_breaks_the_contract_is_refused(shared, what: str):
    shared.run(GOOD)
    with pytest.raises(BackendError, match=what):
        shared.run(BAD[what])
    with pytest.raises(BackendError, match="no such output"):
        shared.logits(0)
    shared.run(GOOD)


def test_too_many_outputs_are_refused(load):
    executable = load(*hybrid_program(), max_outputs=1)
    with pytest.raises(BackendError, match="too many outputs"):
        executable.run(make_batch(Part((1, 2))))


def test_commit_refuses_what_is_no_path(shared):
    shared.run(GOOD)
    sequence = GOOD.sequences[1]
    for accepted in ([0], [2], [1, 1], [3], [2, 1]):
        with pytest.raises(BackendError, match="not a path"):
            shared.commit(sequence, accepted)
    with pytest.raises(BackendError, match="bad block table"):
        shared.commit(attrs.evolve(sequence, block_table=table()), [1])
    shared.commit(sequence, [1, 2])
    with pytest.raises(BackendError, match="no drafts"):
        shared.commit(sequence, [1])
    with pytest.raises(BackendError, match="no drafts"):
        shared.commit(attrs.evolve(sequence, first_row=9), [])


@pytest.mark.parametrize("index", [-1, 6])
def test_blocks_and_slots_that_do_not_exist(shared, index: int):
    for call in (shared.read_block, shared.read_slot, shared.clear_slot):
        with pytest.raises(BackendError, match="does not exist"):
            call(index)
    for copy in (shared.copy_block, shared.copy_slot):
        with pytest.raises(BackendError, match="does not exist"):
            copy(0, index)
    for write in (shared.write_block, shared.write_slot):
        with pytest.raises(BackendError, match="another length"):
            write(0, b"short")


def test_an_unknown_cache_type_is_refused():
    program, source = hybrid_program()
    with pytest.raises(BackendError, match="f16 or f32"):
        CpuBackend().load(program, source, attrs.evolve(OPTIONS, kv_type="q8"))


def test_head_sizes_without_a_kernel_are_refused(load):
    def build(b: ProgramBuilder):
        x = b.embedding(b.weight("e", (8, 24)))
        return b.attention(x, x, x, heads=1, kv_heads=1, head_dim=24)

    source = MemoryTensors({}, {"e": np.zeros((8, 24), np.float32)})
    b = ProgramBuilder({"e": (8, 24)})
    hidden = build(b)
    with pytest.raises(BackendError, match="multiple of 16"):
        load(b.finish(hidden, b.gather_outputs(hidden)), source)


def test_a_closed_model_says_so():
    program, source = hybrid_program()
    executable = CpuBackend().load(program, source, OPTIONS)
    executable.close()
    executable.close()
    results = (lambda: executable.candidates(0), executable.statistics)
    for call in (lambda: executable.run(GOOD), lambda: executable.read_slot(0), *results):
        with pytest.raises(BackendError, match="closed"):
            call()


def test_a_model_that_nobody_closes_ends_its_threads():
    program, source = hybrid_program("attention")
    executable = CpuBackend().load(program, source, OPTIONS)
    threads = executable._workers._threads
    assert [thread.is_alive() for thread in threads] == [True]
    del executable
    gc.collect()
    assert not threads[0].is_alive()


@pytest.mark.parametrize("type_name", ["TQ2_0", "TQ1_0", "F64"])
def test_other_types_are_converted_and_say_so(load, caplog, type_name: str):
    """Values that float16 holds (ternary ones do: a float16 scale times -1, 0 or 1) are loaded as F16."""
    rng = np.random.default_rng(0)
    type_ = GGMLType[type_name]
    if type_name == "F64":
        data = rng.integers(-64, 64, (24, 256)).astype(np.float64)
        tensor = RawTensor(data.reshape(-1).view(np.uint8), type_, (24, 256))
    else:
        from gguf import GGMLQuantizationType, quants

        stored = quants.quantize(rng.standard_normal((24, 256)).astype(np.float32), GGMLQuantizationType[type_name])
        tensor = RawTensor(np.ascontiguousarray(stored).reshape(-1).view(np.uint8), type_, (24, 256))
    source = MemoryTensors({}, {"e": rng.standard_normal((8, 256)).astype(np.float32), "w": tensor})
    b = ProgramBuilder({"e": (8, 256), "w": (24, 256)})
    hidden = b.linear(b.embedding(b.weight("e", (8, 256))), b.weight("w", (24, 256)))
    program = b.finish(hidden, b.gather_outputs(hidden))
    executable = load(program, source)
    (notice,) = executable.statistics()["notices"]
    assert f"no kernel reads {type_name}; loaded as F16" in notice
    assert notice in caplog.text
    part = Part((0, 1, 7))
    expected = step(load_reference(program, source), part)[0]
    assert np.abs(step(executable, part)[0] - expected).max() / expected.std() < 1e-5


def test_values_that_float16_does_not_hold_are_loaded_as_float32(load):
    weights = np.random.default_rng(0).standard_normal((24, 64))
    raw = RawTensor(weights.reshape(-1).view(np.uint8), GGMLType.F64, (24, 64))
    source = MemoryTensors({}, {"e": np.eye(8, 64, dtype=np.float32), "w": raw})
    b = ProgramBuilder({"e": (8, 64), "w": (24, 64)})
    hidden = b.linear(b.embedding(b.weight("e", (8, 64))), b.weight("w", (24, 64)))
    executable = load(b.finish(hidden, b.gather_outputs(hidden)), source)
    assert "loaded as F32" in executable.statistics()["notices"][0]
    np.testing.assert_array_equal(step(executable, Part((0, 5)))[0], weights.astype(np.float32).T[[0, 5]])


def test_progress_and_statistics(monkeypatch):
    monkeypatch.setenv("KINETIC_PROFILE", "1")
    program, source = hybrid_program()
    heard: list[tuple[str, float]] = []
    options = attrs.evolve(OPTIONS, progress=lambda text, share: heard.append((text, share)))
    executable = CpuBackend().load(program, source, options)
    shares = [share for text, share in heard if text == "packing weights"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    step(executable, Part(tokens_of(50)))
    figures = executable.statistics()
    assert figures["n_threads"] == 2
    assert figures["bytes_per_token"] > 100_000
    assert figures["notices"] == []
    assert figures["profiled_steps"] == 1
    profile = figures["profile"]
    assert sum(profile.values()) == pytest.approx(1.0)
    assert {"attention", "norm", "gate", "delta_rule", "short_conv", "linear attn_q"} <= set(profile)
    executable.close()


def test_bytes_per_token_are_the_files(load):
    """Every matrix that a step multiplies by, and one row of the embedding where it is not one of them."""
    program, source = hybrid_program("untied")
    sizes = {name: info.n_bytes for name, info in source.tensors.items()}
    expected = sum(sizes.values()) - sizes["token_embd.weight"] + 4 * 64
    assert load(program, source).statistics()["bytes_per_token"] == expected


def test_a_prediction_block_is_no_part_of_a_step(load):
    """Its weights are in the file, but a step of the trunk does not read them."""
    program, source = hybrid_program("prediction")
    own = [name for name in source.tensors if name.startswith("blk.2.")]
    expected = sum(info.n_bytes for name, info in source.tensors.items() if name not in own)
    expected += 4 * 64 - source.tensors["token_embd.weight"].n_bytes
    assert load(program, source).statistics()["bytes_per_token"] == expected


def test_digests_differ_by_cache_type(load):
    program, source = hybrid_program()
    one, other = (load(program, source, kv_type=kv) for kv in ("f16", "f32"))
    assert one.kernel_digest != other.kernel_digest
    assert one.kernel_digest == load(program, source, kv_type="f16").kernel_digest


def test_closing_frees_weights_and_pools(load):
    executable = load(*hybrid_program())
    lowering = executable._lowering
    arrays = [lowering._blocks._data, lowering._slots._data, executable._arena, *lowering._kept]
    arrays += [matrix.data for matrix in lowering._weights.matrices.values()]
    left = [weakref.ref(array) for array in arrays]
    del lowering, arrays
    assert all(array() is not None for array in left)
    executable.close()
    gc.collect()
    assert not [array for array in left if array() is not None]
