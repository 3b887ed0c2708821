"""A row's result depends on its path alone: splits, neighbours, drafts, commit, snapshots, forks, to the bit."""

from __future__ import annotations

import functools

import attrs
import numpy as np
import pytest
from kinetic_arch_llama.architecture import Llama
from stepping import load

from kinetic_core.conformance.steps import Part, make_batch, step
from kinetic_core.errors import BackendError
from kinetic_core.plugins import load_registry
from kinetic_core.reference.backend import ReferenceExecutable
from kinetic_core.reference.random_model import random_model, with_tensor_type
from kinetic_core.reference.tiny_hybrid import TinyHybrid

MODELS = {
    **{f"hybrid-{v.name}": (TinyHybrid, random_model("tiny-hybrid", v, seed=3)) for v in TinyHybrid.tiny()},
    "hybrid-q8_0": (TinyHybrid, with_tensor_type(random_model("tiny-hybrid", TinyHybrid.tiny()[0], seed=3), "Q8_0")),
    "llama-untied": (Llama, random_model("llama", Llama.tiny()[1], seed=3)),
    "llama-q4_0": (Llama, with_tensor_type(random_model("llama", Llama.tiny()[2], seed=3), "Q4_0")),
}
BACKENDS = ["reference", "cpu", "cpu-one-thread"]


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    return MODELS[request.param]


@pytest.fixture(params=BACKENDS, scope="module")
def make(request, model):
    """make(**options) -> an executable of the model; closed with the module."""
    architecture, source = model
    backend = load_registry().get("backend", request.param.partition("-")[0])
    threads = {"n_threads": 1 if request.param.endswith("one-thread") else 2}
    opened = []

    def make(**options):
        opened.append(load(architecture, source, backend, **threads, **options))
        return opened[-1]

    make.has_kv = architecture is Llama or set(architecture(source).layer_types) & {"attention", "window"}
    make.has_states = architecture is not Llama and bool(
        set(architecture(source).layer_types) & {"conv", "delta", "mamba"}
    )
    yield make
    for executable in opened:
        executable.close()


def tokens(seed: int, n: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 100, n).tolist())


def state(executable, n_tokens: int, table: tuple[int, ...] = (0,), slot: int = 0) -> tuple[bytes, ...]:
    """The recurrent states, and the reference's keys and values of the sequence's positions.

    (How another backend lays out a block is its own affair: there the next step's logits tell.)
    """
    if not isinstance(executable, ReferenceExecutable):
        return (executable.read_slot(slot),)
    arrays = (*executable._blocks.keys, *executable._blocks.values)
    kept = [array[list(table)].reshape(-1, *array.shape[2:])[:n_tokens].tobytes() for array in arrays]
    return (executable.read_slot(slot), *kept)


@functools.cache
def plain(make, prompt: tuple[int, ...]) -> tuple[np.ndarray, tuple[bytes, ...]]:
    """Logits and state of a prompt run token by token in its own executable."""
    executable = make()
    table = (0, 1)
    logits = [step(executable, Part((token,), i, table))[0][0] for i, token in enumerate(prompt)]
    return np.array(logits), state(executable, len(prompt), table)


def same(a, b):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("sizes", [(41,), (1, 40), (40, 1), (7, 9, 13, 12), (2, 2, 37)])
def test_every_prompt_split_gives_the_same_bits(make, sizes):
    prompt = tokens(1, 41)
    expected, expected_state = plain(make, prompt)
    executable = make()
    logits, done = [], 0
    for size in sizes:
        logits.append(step(executable, Part(prompt[done : done + size], done, (5,), 2))[0])
        done += size
    same(np.concatenate(logits), expected)
    assert state(executable, 41, (5,), 2) == expected_state


def test_blocks_in_any_order(make):
    prompt = tokens(2, 263)
    expected = step(make(), Part(prompt, 0, (0, 1)))[0]
    executable = make()
    first = step(executable, Part(prompt[:250], 0, (4,)))[0]
    second = step(executable, Part(prompt[250:], 250, (4, 2)))[0]
    same(np.concatenate([first, second]), expected)
    singly = make()
    step(singly, Part(prompt[:253], 0, (1, 3)))
    for position in range(253, 263):
        same(
            step(singly, Part(prompt[position : position + 1], position, (1, 3)))[0], expected[position : position + 1]
        )


def test_neighbours_change_nothing(make):
    prompts = [tokens(10 + i, n) for i, n in enumerate((3, 30, 1, 12))]
    expected = [plain(make, prompt) for prompt in prompts]
    executable = make()
    parts = [Part(prompt, 0, (5 - i,), i) for i, prompt in enumerate(prompts)]
    for i, logits in enumerate(step(executable, *parts)):
        same(logits, expected[i][0])
        assert state(executable, len(prompts[i]), (5 - i,), i) == expected[i][1]
    following = [Part((50 + i,), len(prompt), (5 - i,), i) for i, prompt in enumerate(prompts)]
    for i, logits in enumerate(step(executable, *following)):
        same(logits, plain(make, (*prompts[i], 50 + i))[0][-1:])


TREE = ((11, 2), (12, 3), (13, 2), (14, 4), (15, 5), (16, 7))
"""After 3 committed rows: offsets 3 … 8; 3 and 5 follow the last committed row, 4 follows 3, 6 and so on."""


def test_a_draft_sees_exactly_its_path(make):
    prompt, committed = tokens(4, 28), tokens(5, 3)
    executable = make()
    step(executable, Part(prompt))
    logits = step(executable, Part(committed, 28, drafts=TREE), Part(tokens(6, 5), 0, (2,), 1))[0]
    paths = {3: [11], 4: [11, 12], 5: [13], 6: [11, 12, 14], 7: [13, 15], 8: [13, 15, 16]}
    for offset, path in paths.items():
        expected, _ = plain(make, (*prompt, *committed, *path))
        same(logits[offset], expected[-1])


def test_drafts_leave_no_trace(make):
    prompt = tokens(4, 28)
    expected_state = plain(make, prompt)[1]
    executable = make()
    step(executable, Part(prompt[:-3]))
    step(executable, Part(prompt[-3:], 25, drafts=TREE))
    assert state(executable, 28) == expected_state
    same(step(executable, Part((7,), 28))[0], plain(make, (*prompt, 7))[0][-1:])


@pytest.mark.parametrize(("accepted", "path"), [((3,), (11,)), ((5, 7, 8), (13, 15, 16)), ((3, 4, 6), (11, 12, 14))])
def test_commit_leaves_what_plain_decoding_leaves(make, accepted, path):
    prompt = tokens(4, 28)
    executable = make()
    step(executable, Part(tokens(8, 40), 0, (3,), 3))
    step(executable, Part(prompt[:-3]))
    neighbour = Part((9,), 40, (3,), 3, drafts=((1, 0), (2, 1)))
    batch = make_batch(neighbour, Part(prompt[-3:], 25, drafts=TREE))
    executable.run(batch)
    executable.commit(batch.sequences[1], accepted)
    executable.commit(batch.sequences[0], (1, 2))
    whole = (*prompt, *path)
    assert state(executable, len(whole)) == plain(make, whole)[1]
    assert state(executable, 43, (3,), 3) == plain(make, (*tokens(8, 40), 9, 1, 2))[1]
    same(step(executable, Part((7,), len(whole)))[0], plain(make, (*whole, 7))[0][-1:])


def test_commit_into_a_block_that_the_step_did_not_have(make):
    prompt = tokens(4, 255)
    executable, other = make(), make()
    step(executable, Part(prompt))
    batch = make_batch(Part((1,), 255, (0,), drafts=((2, 0), (3, 1))))
    executable.run(batch)
    if make.has_kv:
        with pytest.raises(BackendError, match="block table"):
            executable.commit(batch.sequences[0], (1, 2))
    longer = attrs.evolve(batch.sequences[0], block_table=np.array([0, 4], np.int32))
    executable.commit(longer, (1, 2))
    step(other, Part((*prompt, 1, 2, 3), 0, (0, 4)))
    assert state(executable, 258, (0, 4)) == state(other, 258, (0, 4))
    same(step(executable, Part((4,), 258, (0, 4)))[0], step(other, Part((4,), 258, (0, 4)))[0])


def test_commit_of_nothing_and_what_is_no_path(make):
    executable = make()
    batch = make_batch(Part(tokens(4, 3), drafts=TREE))
    executable.run(batch)
    before = state(executable, 3)
    for wrong in ((4,), (3, 5), (3, 3), (2,), (9,), (4, 3)):
        with pytest.raises(BackendError, match="path"):
            executable.commit(batch.sequences[0], wrong)
    executable.commit(batch.sequences[0], ())
    assert state(executable, 3) == before
    with pytest.raises(BackendError, match="no drafts"):
        executable.commit(batch.sequences[0], (3,))


def test_snapshots_hold_the_state_after_their_row(make):
    prompt = tokens(4, 20)
    executable = make()
    if not make.has_states:
        assert executable.read_slot(0) == b""
        return
    step(executable, Part(prompt[:6]))
    step(executable, Part(prompt[6:], 6, snapshots=((3, 4), (13, 5)), drafts=((1, 13),)))
    assert executable.read_slot(4) == plain(make, prompt[:10])[1][0]
    assert executable.read_slot(5) == executable.read_slot(0) == plain(make, prompt)[1][0]

    saved = executable.read_slot(4)
    executable.write_slot(2, saved)
    resumed = step(executable, Part(prompt[10:], 10, slot=2))[0]
    same(resumed, plain(make, prompt)[0][10:])
    executable.copy_slot(4, 1)
    assert executable.read_slot(1) == saved
    executable.clear_slot(1)
    assert executable.read_slot(1) == bytes(len(saved))


def test_a_fork_copies_its_last_block(make):
    prompt = tokens(4, 20)
    executable = make()
    step(executable, Part(prompt))
    executable.copy_block(0, 3)
    executable.copy_slot(0, 1)
    step(executable, Part((1, 2), 20))
    forked = step(executable, Part((3, 4), 20, (3,), 1))[0]
    same(forked, plain(make, (*prompt, 3, 4))[0][-2:])


def test_saved_blocks_and_slots_restore_elsewhere(make):
    prompt = tokens(4, 20)
    first, second = make(), make()
    step(first, Part(prompt))
    second.write_block(4, first.read_block(0))
    second.write_slot(3, first.read_slot(0))
    same(step(second, Part((5,), 20, (4,), 3))[0], plain(make, (*prompt, 5))[0][-1:])
    for restore, data in ((second.write_block, first.read_block(0)), (second.write_slot, first.read_slot(0))):
        with pytest.raises(BackendError, match="length"):
            restore(0, data + b"x")


def test_f32_cache_differs_from_f16(make):
    prompt = tokens(4, 20)
    a, b = step(make(kv_type="f16"), Part(prompt))[0], step(make(kv_type="f32"), Part(prompt))[0]
    if make.has_kv:
        assert 0 < np.sqrt(np.mean((a - b) ** 2)) < 0.03 * b.std()  # more than rounding once: activations may be too
    else:
        same(a, b)
