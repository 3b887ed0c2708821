"""Checks of saved states: snapshots, files, forks, and cutting a sequence back."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kinetic_core.conformance.models import TinyModel
from kinetic_core.conformance.rows import folded, need_drafts, tree
from kinetic_core.conformance.steps import Part, make_batch, require_bytes, require_rows, run, step
from kinetic_core.conformance.suite import NotApplicable

WHOLE, CUT = 60, 37
"""Tokens of a sequence, and where it is saved."""


def need_snapshots(model: TinyModel) -> None:
    """Raise NotApplicable where recurrent states cannot be copied out."""
    if model.has_states and not model.backend.capabilities.supports_snapshots:
        raise NotApplicable("the backend takes no snapshots of recurrent states")


def restore_in_memory(model: TinyModel) -> None:
    """Copy slot and block, go on, and come back."""
    need_snapshots(model)
    tokens = model.tokens(20, WHOLE)
    expected, states = model.plain(tokens)
    executable = model.executable()
    step(executable, Part(tokens[:CUT], 0, (0,)))
    executable.copy_slot(0, 4)
    executable.copy_block(0, 3)
    saved = executable.read_slot(4), executable.read_block(3)
    step(executable, Part(model.tokens(21, 30), CUT, (0,)))
    require_bytes(executable.read_slot(4), saved[0], "a copied slot after its origin went on")
    require_bytes(executable.read_block(3), saved[1], "a copied block after its origin went on")
    executable.copy_slot(4, 0)
    executable.copy_block(3, 0)
    got = step(executable, Part(tokens[CUT:], CUT, (0,)))[0]
    require_rows(got, expected[CUT:], f"the rows after going back to a copy at position {CUT}", CUT)
    require_bytes(executable.read_slot(0), states, "the recurrent states at the end of a sequence that went back")


def restore_from_a_file(model: TinyModel) -> None:
    """Write slot and block to a file, read it into another executable, other places."""
    need_snapshots(model)
    tokens = model.tokens(20, WHOLE)
    expected, _ = model.plain(tokens)
    executable = model.executable()
    step(executable, Part(tokens[:CUT], 0, (0,)))
    slot, block = executable.read_slot(0), executable.read_block(0)
    with tempfile.TemporaryDirectory(prefix="kinetic-conform-") as folder:
        path = Path(folder) / "state"
        path.write_bytes(slot + block)
        step(executable, Part(model.tokens(21, 30), CUT, (0,)))
        data = path.read_bytes()
    for name, target in (("the same executable", executable), ("another executable", model.executable("other"))):
        target.write_slot(3, data[: len(slot)])
        target.write_block(4, data[len(slot) :])
        require_bytes(target.read_slot(3), slot, f"a slot read back from {name}")
        require_bytes(target.read_block(4), block, f"a block read back from {name}")
        got = step(target, Part(tokens[CUT:], CUT, (4,), 3))[0]
        require_rows(got, expected[CUT:], f"the rows in {name} after restoring a file of position {CUT}", CUT)


def state_after_a_named_row(model: TinyModel) -> None:
    """Snapshots inside a batch, with drafts behind it."""
    if not model.has_states:
        raise NotApplicable("no recurrent states")
    need_snapshots(model)
    tokens = model.tokens(20, WHOLE)
    expected, states = model.plain(tokens)
    drafts = tree(model.vocab, ((1, 53), (2, 54))) if model.backend.capabilities.supports_drafts else ()
    executable = model.executable()
    step(executable, Part(tokens[:6], 0, (0,)))
    step(executable, Part(tokens[6:], 6, (0,), snapshots=((CUT - 7, 4), (53, 5), (0, 2)), drafts=drafts))
    for slot, n_tokens in ((4, CUT), (2, 7)):
        what = f"the states copied after the row at position {n_tokens - 1}"
        require_bytes(executable.read_slot(slot), model.plain(tokens[:n_tokens])[1], what)
    for slot in (5, 0):
        require_bytes(executable.read_slot(slot), states, f"the states after the last committed row, in slot {slot}")
    got = step(executable, Part(tokens[CUT:], CUT, (0,), 4))[0]
    require_rows(got, expected[CUT:], f"the rows resumed from the states copied at position {CUT}", CUT)


def cut_back(model: TinyModel) -> None:
    """Attention alone: to any length, in place. Recurrent: to a snapshot, the blocks as they are."""
    need_snapshots(model)
    tokens, other = model.tokens(20, 263), model.tokens(22, 30)
    executable = model.executable()
    if not model.has_states:
        step(executable, Part(tokens))
        for length in (256, 255, CUT, 1):
            whole = (*tokens[:length], *other[:5])
            got = step(executable, Part(other[:5], length))[0]
            require_rows(got, model.plain(whole)[0][length:], f"the rows after cutting back to {length}", length)
        return
    step(executable, Part(tokens, snapshots=((CUT - 1, 4), (255, 5))))
    for length, slot in ((256, 5), (CUT, 4)):
        executable.copy_slot(slot, 0)
        whole = (*tokens[:length], *other)
        got = step(executable, Part(other, length))[0]
        require_rows(got, model.plain(whole)[0][length:], f"the rows after cutting back to {length}", length)


def fork(model: TinyModel) -> None:
    """A second sequence goes on from a copy of the partly filled last block; both go their own way."""
    need_snapshots(model)
    tokens = model.tokens(20, 260)
    ends = [(*tokens, *model.tokens(seed, 2)) for seed in (23, 24)]
    executable = model.executable()
    step(executable, Part(tokens, 0, (0, 1)))
    executable.copy_block(1, 3)
    executable.copy_slot(0, 1)
    parts = [Part(ends[0][260:261], 260, (0, 1), 0), Part(ends[1][260:261], 260, (0, 3), 1)]
    first = step(executable, *parts)
    parts = [Part(ends[0][261:], 261, (0, 1), 0), Part(ends[1][261:], 261, (0, 3), 1)]
    second = step(executable, *parts)
    for number, whole in enumerate(ends):
        expected = model.plain(whole)[0]
        require_rows(first[number], expected[260:261], f"sequence {number} of two that share a block", 260)
        require_rows(second[number], expected[261:], f"sequence {number} of two that share a block", 261)


def commit_after_restore(model: TinyModel) -> None:
    """A restored sequence drafts and commits like one that never stopped."""
    need_snapshots(model)
    need_drafts(model)
    tokens, after = model.tokens(20, CUT), model.tokens(9, 1)
    executable, other = model.executable(), model.executable("other")
    step(executable, Part(tokens[:-1], 0, (0,)))
    other.write_slot(2, executable.read_slot(0))
    other.write_block(5, executable.read_block(0))
    batch = make_batch(Part(tokens[-1:], CUT - 1, (5,), 2, drafts=tree(model.vocab, ((1, 0), (2, 0), (3, 2)))))
    run(other, batch)
    other.commit(batch.sequences[0], (2, 3))
    whole = (*tokens, *folded((2, 3), model.vocab))
    require_bytes(other.read_slot(2), model.plain(whole)[1], "the states after restoring, drafting and committing")
    got = step(other, Part(after, len(whole), (5,), 2))[0]
    require_rows(got, model.plain((*whole, *after))[0][-1:], "the row after restoring, drafting and committing", CUT)
