"""Checks of rows: a row's logits depend on its path alone, drafts leave no trace, commit equals plain decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from kinetic_core.conformance.models import TinyModel
from kinetic_core.conformance.steps import Part, make_batch, prompt, require_bytes, require_rows, run, step
from kinetic_core.conformance.suite import Fault, NotApplicable
from kinetic_core.errors import BackendError
from kinetic_core.interfaces import Executable, SequenceRows

LONG, SHORT = 263, 41
"""Tokens of a prompt that crosses the edge of a KV block, and of one that does not."""

TREE = ((11, 2), (12, 3), (13, 2), (14, 4), (15, 5), (16, 7))
"""After 3 committed rows (offsets 0 to 2): offsets 3 to 8; 3 and 5 follow the last committed row, 4 follows 3, ..."""
TREE_LEAVES = {(11, 12, 14): (3, 4, 6), (13, 15, 16): (5, 7, 8)}
"""The tree's longest paths, and the offsets of their rows."""
TREE_PATHS = {3: (11,), 4: (11, 12), 5: (13,), 6: (11, 12, 14), 7: (13, 15), 8: (13, 15, 16)}


def need_drafts(model: TinyModel) -> None:
    """Raise NotApplicable for a backend that takes no drafts."""
    if not model.backend.capabilities.supports_drafts:
        raise NotApplicable("the backend takes no drafts")


def folded(tokens: Sequence[int], vocab: int) -> tuple[int, ...]:
    """Tokens brought into a small vocabulary."""
    return tuple(token % vocab for token in tokens)


def tree(vocab: int, pairs: Sequence[tuple[int, int]] = TREE) -> tuple[tuple[int, int], ...]:
    """(token, parent) pairs with tokens of the vocabulary."""
    return tuple((token % vocab, parent) for token, parent in pairs)


def batch_equals_one_by_one(model: TinyModel) -> None:
    """One batch against single rows, over the edge of a block."""
    tokens = model.tokens(1, LONG)
    expected, expected_states = model.plain(tokens, singly=True)
    executable = model.executable()
    got = step(executable, Part(tokens))[0]
    require_rows(got, expected, f"a prompt of {LONG} tokens in one batch against one token at a time")
    require_bytes(executable.read_slot(0), expected_states, "the recurrent states after that batch")


def any_split(model: TinyModel) -> None:
    """A prompt in two and more steps of many sizes."""
    tokens = model.tokens(1, LONG)
    expected, expected_states = model.plain(tokens, singly=True)
    for sizes in ((1, 262), (262, 1), (7, 9, 13, 234), (2,), (63, 64, 65, 71), (256, 7)):
        executable = model.executable()
        what = f"a prompt run in steps of {', '.join(map(str, sizes))} tokens"
        require_rows(prompt(executable, tokens, sizes), expected, what)
        require_bytes(executable.read_slot(0), expected_states, f"the recurrent states after {what}")


def neighbours(model: TinyModel) -> None:
    """Prompts of four lengths, then decode steps, together."""
    prompts = [model.tokens(10 + number, n) for number, n in enumerate((3, SHORT, 1, 12))]
    executable = model.executable()
    parts = [Part(tokens, 0, (5 - number,), number) for number, tokens in enumerate(prompts)]
    for number, rows in enumerate(step(executable, *parts)):
        what = f"sequence {number} of four in one step against the same alone"
        expected, states = model.plain(prompts[number])
        require_rows(rows, expected, what)
        require_bytes(executable.read_slot(number), states, f"the recurrent states of {what}")
    following = folded(range(50, 54), model.vocab)
    parts = [Part((following[n],), len(tokens), (5 - n,), n) for n, tokens in enumerate(prompts)]
    for number, rows in enumerate(step(executable, *parts)):
        whole = (*prompts[number], following[number])
        what = f"the next token of sequence {number} beside three others"
        require_rows(rows, model.plain(whole)[0][-1:], what, len(whole) - 1)


def anywhere(model: TinyModel) -> None:
    """Other blocks, other slots, and what another sequence left in them."""
    tokens = model.tokens(2, LONG)
    expected = model.plain(tokens)[0]
    executable = model.executable()
    step(executable, Part(model.tokens(3, 300), 0, (4, 2), 5))
    executable.clear_slot(5)
    got = prompt(executable, tokens, [250, 13], (4, 2), 5)
    require_rows(got, expected, "a prompt in blocks 4 and 2 and slot 5, which another sequence used before")


def threads(model: TinyModel) -> None:
    """One, two and three worker threads."""
    tokens = model.tokens(1, LONG)
    expected, states = model.plain(tokens, singly=True)
    for n_threads in (1, 3):
        executable = model.executable("threads", n_threads=n_threads)
        what = f"{n_threads} thread{'s' if n_threads > 1 else ''} against 2"
        require_rows(prompt(executable, tokens, [250, 1, 12]), expected, what)
        require_bytes(executable.read_slot(0), states, f"the recurrent states, {what}")


# drafts


def draft_row_equals_its_path(model: TinyModel) -> None:
    """Every row of a tree against its path run plainly, inside a block and over its edge."""
    need_drafts(model)
    for start in (28, 254):
        before, committed = model.tokens(4, start), model.tokens(5, 3)
        executable = model.executable()
        step(executable, Part(before))
        neighbour = Part(model.tokens(6, 5), 0, (2,), 1)
        table = (0, 1)
        rows = step(executable, Part(committed, start, table, drafts=tree(model.vocab)), neighbour)[0]
        for path, offsets in TREE_LEAVES.items():
            expected, _ = model.plain((*before, *committed, *folded(path, model.vocab)))
            for depth, offset in enumerate(offsets, start + 3):
                what = f"the draft at offset {offset} of a tree at position {start + 3} against its path alone"
                require_rows(rows[offset : offset + 1], expected[depth : depth + 1], what, offset)


def drafts_leave_no_trace(model: TinyModel) -> None:
    """The states, every block's bytes and the next row after a step with drafts against one without."""
    need_drafts(model)
    tokens, after = model.tokens(4, 28), model.tokens(7, 1)
    executable = model.executable()
    step(executable, Part(tokens[:-3]))
    step(executable, Part(tokens[-3:], 25))
    expected = executable.read_slot(0), executable.read_block(0), executable.read_block(1)
    executable = model.executable()
    step(executable, Part(tokens[:-3]))
    step(executable, Part(tokens[-3:], 25, drafts=tree(model.vocab)))
    require_bytes(executable.read_slot(0), expected[0], "the recurrent states after a step with drafts, none committed")
    for block in (0, 1):
        require_bytes(executable.read_block(block), expected[block + 1], f"block {block} after a step with drafts")
    got = step(executable, Part(after, 28))[0]
    require_rows(got, model.plain((*tokens, *after))[0][-1:], "the row after a step whose drafts were dropped", 28)


def commit_equals_plain(model: TinyModel) -> None:
    """Several accepted paths, a neighbour that commits too, and a commit into a block the step did not have."""
    need_drafts(model)
    tokens, other = model.tokens(4, 28), model.tokens(8, 40)
    following = model.tokens(9, 2)
    for accepted in ((3,), (5, 7, 8), (3, 4, 6)):
        executable = model.executable()
        step(executable, Part(other, 0, (3,), 3))
        step(executable, Part(tokens[:-3]))
        neighbour = Part(following[:1], 40, (3,), 3, drafts=tree(model.vocab, ((1, 0), (2, 1))))
        batch = make_batch(neighbour, Part(tokens[-3:], 25, drafts=tree(model.vocab)))
        run(executable, batch)
        executable.commit(batch.sequences[1], accepted)
        executable.commit(batch.sequences[0], (1, 2))
        whole = (*tokens, *folded(TREE_PATHS[accepted[-1]], model.vocab))
        beside = (*other, following[0], *folded((1, 2), model.vocab))
        what = f"the recurrent states after committing the drafts at offsets {accepted}"
        require_bytes(executable.read_slot(0), model.plain(whole)[1], what)
        require_bytes(executable.read_slot(3), model.plain(beside)[1], "those of a neighbour that committed as well")
        rows = step(executable, Part(following, len(whole)), Part(following, 43, (3,), 3))
        for got, path in zip(rows, (whole, beside), strict=True):
            expected = model.plain((*path, *following))[0][-2:]
            require_rows(got, expected, f"the rows after committing {accepted}", len(path))
    _commit_over_an_edge(model)


def _commit_over_an_edge(model: TinyModel) -> None:
    tokens, drafted, after = model.tokens(4, 255), folded((1, 2, 3), model.vocab), model.tokens(9, 1)
    executable = model.executable()
    step(executable, Part(tokens, 0, (0,)))
    batch = make_batch(Part(drafted[:1], 255, (0,), drafts=((drafted[1], 0), (drafted[2], 1))))
    run(executable, batch)
    longer = attrs.evolve(batch.sequences[0], block_table=np.array([0, 4], np.int32))
    executable.commit(longer, (1, 2))
    got = step(executable, Part(after, 258, (0, 4)))[0]
    expected, _ = model.plain((*tokens, *drafted, *after))
    require_rows(got, expected[-1:], "the row after a commit into a block that the step did not have", 258)


def commits_only_paths(model: TinyModel) -> None:
    """What is no path of drafts is refused and changes nothing; so is a second commit."""
    need_drafts(model)
    executable = model.executable()
    batch = make_batch(Part(model.tokens(4, 3), drafts=tree(model.vocab)))
    run(executable, batch)
    before = executable.read_slot(0), executable.read_block(0)
    wrong: Iterable[tuple[int, ...]] = ((4,), (3, 5), (3, 3), (2,), (9,), (4, 3))
    for accepted in wrong:
        _expect(BackendError, executable, batch.sequences[0], accepted)
    executable.commit(batch.sequences[0], ())
    require_bytes(executable.read_slot(0), before[0], "the recurrent states after refused and empty commits")
    require_bytes(executable.read_block(0), before[1], "block 0 after refused and empty commits")
    _expect(BackendError, executable, batch.sequences[0], (3,))


def _expect(kind: type[Exception], executable: Executable, sequence: SequenceRows, accepted: Sequence[int]) -> None:
    try:
        executable.commit(sequence, accepted)
    except kind:
        return
    raise Fault(f"commit accepts {tuple(accepted)}, which is no path of drafts that may still be committed")
