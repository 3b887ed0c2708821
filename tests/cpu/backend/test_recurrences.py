"""The delta rule and the Mamba-2 recurrence at odd sizes: against the reference, and every path to the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_steps import load_reference, recurrence_program, same_bits, tokens_of

from kinetic_core.conformance.steps import Part, make_batch, prompt, step
from kinetic_core.errors import BackendError

SIZES = [(6, 3, 20, 7), (4, 2, 64, 16), (2, 1, 84, 128), (3, 1, 130, 256), (2, 2, 7, 3)]
"""Heads, groups, columns of a head (less than a strip, a wide strip, both, two and a rest), lines of a state."""
TOKENS = tokens_of(20, vocab=8)
DRAFTS = ((5, 19), (6, 20), (7, 20), (1, 22), (2, 21), (3, 19), (4, 24))
PATH = [20, 22, 23]
"""Offsets of accepted drafts: 5, 7, 1."""


@pytest.fixture(params=["delta_rule", "mamba2_scan"])
def kind(request) -> str:
    return request.param


@pytest.fixture(params=SIZES, ids=str)
def model(request, kind: str, load):
    """load(**options), and the reference."""
    program, source = recurrence_program(kind, *request.param)
    return lambda **options: load(program, source, **options), lambda: load_reference(program, source)


def poisoned(executable):
    """NaN in every buffer of a step, and in the slots that are written before they are read."""
    executable._arena.view(np.float32)[:] = np.nan
    for kept in executable._lowering._kept:
        if kept.size >= executable.options.max_rows:
            kept[:] = np.nan
    for slot in range(1, executable.options.n_slots):
        executable.write_slot(slot, np.full(executable.program.state_bytes // 4, np.nan, np.float32).tobytes())
    return executable


def state(executable, slot: int = 0) -> np.ndarray:
    return np.frombuffer(executable.read_slot(slot), np.float32)


def test_against_the_reference(model):
    """Rows, a tree of drafts, snapshots, a commit, and what follows it."""
    cpu, truth = poisoned(model[0]()), model[1]()
    part = Part(TOKENS, drafts=DRAFTS, snapshots=((0, 3), (18, 4), (19, 5)))
    for follow in (part, Part((1,), 23), Part((2, 3, 4), 24)):
        got, expected = step(cpu, follow)[0], step(truth, follow)[0]
        assert np.abs(got - expected).max() < 1e-5 * expected.std()
        for slot in (0, 3, 4, 5):
            if follow is part or slot == 0:
                right = state(truth, slot)
                assert np.abs(state(cpu, slot) - right).max() < 1e-5 * right.std()
        if follow is part:
            for executable in (cpu, truth):
                executable.commit(make_batch(part).sequences[0], PATH)


@pytest.mark.parametrize("sizes", [[1], [2], [3, 1, 5]], ids=str)
def test_any_split_has_the_same_bits(model, sizes: list[int]):
    """One row streams the state in place; several go strip by strip."""
    executable = poisoned(model[0]())
    whole = prompt(executable, TOKENS, [20])
    after = executable.read_slot(0)
    executable.clear_slot(0)
    assert same_bits(prompt(executable, TOKENS, sizes), whole)
    assert executable.read_slot(0) == after


@pytest.mark.parametrize("n_committed", [1, 20])
def test_drafts_snapshots_and_commits_have_the_bits_of_plain_rows(model, n_committed: int):
    executable = poisoned(model[0]())
    tokens = {19 + number: token for number, (token, _) in enumerate(DRAFTS, 1)}
    parents = {19 + number: parent for number, (_, parent) in enumerate(DRAFTS, 1)}
    start = 20 - n_committed
    drafts = tuple((token, parent - start) for token, parent in DRAFTS)
    if start:
        prompt(executable, TOKENS[:start], [start])
    part = Part(TOKENS[start:], start, drafts=drafts, snapshots=((n_committed - 1, 2),))
    rows = step(executable, part)[0][n_committed:]
    committed = executable.read_slot(0)
    assert executable.read_slot(2) == committed
    executable.commit(make_batch(part).sequences[0], [offset - start for offset in PATH])
    accepted = executable.read_slot(0)
    executable.clear_slot(0)
    prompt(executable, TOKENS, [20])
    assert executable.read_slot(0) == committed
    for draft, row in zip(tokens, rows, strict=True):
        path = [draft]
        while parents[path[0]] >= 20:
            path.insert(0, parents[path[0]])
        executable.write_slot(0, committed)
        plain = prompt(executable, tuple(tokens[offset] for offset in path), [1])
        assert same_bits(plain[-1], row)
        if path == PATH:
            assert executable.read_slot(0) == accepted


def test_neighbours_and_threads(model):
    one, two = (poisoned(model[0](n_threads=n)) for n in (1, 2))
    for executable in (one, two):
        for slot in range(6):
            executable.clear_slot(slot)
    alone = [prompt(one, tokens_of(9, seed, 8), [9], slot=seed) for seed in range(3)]
    parts = [Part(tokens_of(9, seed, 8), slot=slot) for seed, slot in ((0, 4), (1, 0), (2, 3))]
    for rows, expected in zip(step(two, *parts), alone, strict=True):
        assert same_bits(rows, expected)


def test_a_commit_of_one_draft(model):
    """A single accepted row streams the state as a plain row does."""
    executable = poisoned(model[0]())
    part = Part(TOKENS[:1], drafts=((3, 0), (4, 0)))
    step(executable, part)
    executable.commit(make_batch(part).sequences[0], [2])
    got = executable.read_slot(0)
    executable.clear_slot(0)
    prompt(executable, (TOKENS[0], 4), [2])
    assert executable.read_slot(0) == got


def test_a_state_that_is_too_large_is_refused(kind: str, load):
    with pytest.raises(BackendError, match=f"no {kind} kernel for this state size"):
        load(*recurrence_program(kind, 1, 1, 16, 520))
