"""A row's logits are the same bits however it is run: split, batch, neighbours, threads, drafts, restored states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cpu_steps import hybrid_program, same_bits, tokens_of

from kinetic_core.conformance.steps import Part, make_batch, prompt, step
from kinetic_core.gguf import open_model_file
from kinetic_core.interfaces import HeadRequest
from kinetic_core.plugins import load_registry
from kinetic_core.program.record import record_program
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import with_tensor_type

DATA = Path(__file__).parents[2] / "data"
TOKENS = tokens_of(330)


@pytest.fixture(params=["hybrid", "hybrid-q8_0", "hybrid-mamba", "llama-q4_k_m", "qwen35moe-q4_k_m"])
def model(request, load):
    """load(**options) of a model, with TOKENS in its vocabulary."""
    if request.param.endswith("q4_k_m"):
        with open_model_file(DATA / f"{request.param}.gguf") as source:
            architecture = load_registry().architecture_for(source.architecture)(source)
            program = record_program(architecture, FullHead(), source)
            opened = [load(program, source, n_threads=threads, kv_type="f16") for threads in (1, 2)]
        return lambda n_threads=2: opened[n_threads - 1]
    program, source = hybrid_program("mamba" if request.param == "hybrid-mamba" else "untied")
    if request.param == "hybrid-q8_0":
        source = with_tensor_type(source, "Q8_0")
    return lambda n_threads=2: load(program, source, n_threads=n_threads, kv_type="f16")


def fresh(executable) -> None:
    for slot in range(executable.options.n_slots):
        executable.clear_slot(slot)


@pytest.mark.parametrize("sizes", [[1], [2], [63], [64], [65], [256], [7, 9, 1, 250]], ids=str)
def test_w9_any_split_of_a_prompt(model, sizes: list[int]):
    executable = model()
    tokens = TOKENS if sizes != [1] else TOKENS[:280]
    whole = prompt(executable, tokens, [len(tokens)])
    fresh(executable)
    assert same_bits(prompt(executable, tokens, sizes), whole)


def test_one_and_two_threads(model):
    one, two = model(n_threads=1), model(n_threads=2)
    assert same_bits(prompt(one, TOKENS, [330]), prompt(two, TOKENS, [330]))


def test_neighbours(model):
    """Three sequences in one step, in the middle of decode and prompt, against each alone."""
    executable = model()
    texts = [tokens_of(n, seed) for seed, n in enumerate((40, 3, 90))]
    alone = []
    for number, text in enumerate(texts):
        fresh(executable)
        alone.append(prompt(executable, text, [len(text)], table=(number,), slot=number))
    fresh(executable)
    cuts = [(0, 10, 39, 40), (0, 1, 2, 3), (0, 80, 81, 90)]
    for at in range(3):
        parts = [
            Part(text[cut[at] : cut[at + 1]], cut[at], (number,), number)
            for number, (text, cut) in enumerate(zip(texts, cuts, strict=True))
        ]
        for number, (rows, cut) in enumerate(zip(step(executable, *parts), cuts, strict=True)):
            assert same_bits(rows, alone[number][cut[at] : cut[at + 1]])


def test_poisoned_buffers(model):
    """What earlier steps left in activations, unused cache and drafts reaches no row."""
    executable = model()
    clean = prompt(executable, TOKENS[:290], [290])
    fresh(executable)
    executable._arena.view(np.float32)[:] = np.nan
    executable._blocks._data.view(np.float16)[:] = np.nan
    for kept in executable._lowering._kept:
        if kept.dtype == np.float32 and kept.size >= executable.options.max_rows * 16 and kept.ndim == 1:
            kept[:] = np.nan
    assert same_bits(prompt(executable, TOKENS[:290], [33, 1, 256]), clean)


def test_a_later_row_reaches_no_earlier_one(model):
    """Rows of the same batch that come later, whatever they hold, change no bit: causality."""
    executable = model()
    first = prompt(executable, TOKENS[:20], [20])
    fresh(executable)
    assert same_bits(prompt(executable, (*TOKENS[:20], *tokens_of(30, 9)), [50])[:20], first)


def test_drafts_are_rows_like_any_other_and_leave_no_trace(model):
    executable = model()
    start = 250  # the drafts cross a block's edge
    plain: dict[tuple[int, ...], np.ndarray] = {}
    paths = [(5,), (5, 6), (5, 6, 7), (5, 9), (8,), (5, 6, 7, 1, 2, 3, 4, 5, 6), (5, 9, 9)]
    for path in paths:
        fresh(executable)
        plain[path] = prompt(executable, (*TOKENS[:start], *path), [start, 1])
    fresh(executable)
    prompt(executable, TOKENS[: start - 1], [start - 1])
    slot, blocks = executable.read_slot(0), [executable.read_block(block) for block in (0, 1)]
    # rows: 0 committed, then 5; 6 and 9 after 5; 8; 7 after 6; a chain after 7; 9 after 9
    drafts = ((5, 0), (6, 1), (9, 1), (8, 0), (7, 2), (1, 5), (2, 6), (3, 7), (4, 8), (5, 9), (6, 10), (9, 3))
    part = Part(TOKENS[start - 1 : start], start - 1, drafts=drafts)
    rows = step(executable, part)[0]
    ends = {1: (5,), 2: (5, 6), 3: (5, 9), 4: (8,), 5: (5, 6, 7), 11: paths[5], 12: (5, 9, 9)}
    for row, path in ends.items():
        assert same_bits(rows[row], plain[path][start + len(path) - 1])
    assert same_bits(rows[0], plain[(5,)][start - 1])
    # The step committed its first row, and nothing else.
    committed = executable.read_slot(0), [executable.read_block(block) for block in (0, 1)]
    executable.write_slot(0, slot)
    for block in (0, 1):
        executable.write_block(block, blocks[block])
    step(executable, Part(TOKENS[start - 1 : start], start - 1))
    assert (executable.read_slot(0), [executable.read_block(block) for block in (0, 1)]) == committed


@pytest.mark.parametrize("accepted", [[1], [1, 2], [1, 3, 5], [4]], ids=str)
def test_a_commit_leaves_what_plain_decoding_leaves(model, accepted: list[int]):
    executable = model()
    start = 254
    drafts = ((5, 0), (6, 1), (9, 1), (8, 0), (7, 3))
    tokens = [drafts[offset - 1][0] for offset in accepted]
    prompt(executable, (*TOKENS[:start], *tokens), [start, 1])
    after = step(executable, Part((1, 2), start + len(tokens)))[0]
    plain = executable.read_slot(0), executable.read_block(0), executable.read_block(1)
    fresh(executable)
    executable.write_block(1, bytes(len(plain[1])))
    prompt(executable, TOKENS[: start - 1], [start - 1])
    part = Part(TOKENS[start - 1 : start], start - 1, drafts=drafts)
    step(executable, part)
    executable.commit(make_batch(part).sequences[0], accepted)
    assert same_bits(step(executable, Part((1, 2), start + len(tokens)))[0], after)
    assert executable.read_slot(0) == plain[0]
    assert executable.read_block(0) == plain[1]


def test_commit_among_neighbours(model):
    """Two sequences draft in one step; both commit; a third only decodes."""
    executable = model()
    texts = [tokens_of(20, seed) for seed in range(3)]
    accepted = [(5, 6), (7,), ()]
    plain = []
    for number, (text, more) in enumerate(zip(texts, accepted, strict=True)):
        fresh(executable)
        plain.append(prompt(executable, (*text, *more, 3), [20, 1], table=(number,), slot=number)[-1])
    fresh(executable)
    for number, text in enumerate(texts):
        prompt(executable, text[:19], [19], table=(number,), slot=number)
    drafts: list[tuple[tuple[int, int], ...]] = [((5, 0), (9, 1), (6, 1)), ((7, 0), (1, 1)), ()]
    parts = [Part(text[19:], 19, (number,), number, drafts[number]) for number, text in enumerate(texts)]
    step(executable, *parts)
    sequences = make_batch(*parts).sequences
    executable.commit(sequences[1], [1])
    executable.commit(sequences[0], [1, 3])
    ends = [Part((3,), 20 + len(more), (number,), number) for number, more in enumerate(accepted)]
    for rows, expected in zip(step(executable, *ends), plain, strict=True):
        assert same_bits(rows[0], expected)


def test_snapshots_restore_to_the_bit(load):
    executable = load(*hybrid_program("tied"))
    whole = prompt(executable, TOKENS[:120], [120])
    fresh(executable)
    step(executable, Part(TOKENS[:100], snapshots=((49, 2), (98, 4))))
    saved = executable.read_slot(2)
    executable.copy_slot(2, 5)
    executable.write_slot(1, saved)
    for slot in (2, 5, 1):
        rows = step(executable, Part(TOKENS[50:120], 50, slot=slot))[0]
        assert same_bits(rows, whole[50:])
    rows = step(executable, Part(TOKENS[99:120], 99, slot=4))[0]
    assert same_bits(rows, whole[99:])


def test_blocks_can_be_copied_and_restored(hybrid):
    whole = prompt(hybrid, TOKENS[:60], [60])
    hybrid.clear_slot(0)
    step(hybrid, Part(TOKENS[:50], snapshots=((49, 1),)))
    data = hybrid.read_block(0)
    hybrid.copy_block(0, 3)
    hybrid.write_block(4, data)
    for block in (3, 4):
        hybrid.copy_slot(1, 2)
        rows = step(hybrid, Part(TOKENS[50:60], 50, (block,), 2))[0]
        assert same_bits(rows, whole[50:])
    assert hybrid.read_block(0) == data


def test_only_wanted_rows_have_outputs(hybrid):
    every = prompt(hybrid, TOKENS[:40], [40])
    fresh(hybrid)
    heads = [HeadRequest(row, None) for row in (3, 17, 39)]
    hybrid.run(make_batch(Part(TOKENS[:40]), heads=heads))
    for output, head in enumerate(heads):
        assert same_bits(hybrid.logits(output), every[head.row])


def test_a_step_may_want_no_output(hybrid):
    whole = prompt(hybrid, TOKENS[:30], [30])
    fresh(hybrid)
    hybrid.run(make_batch(Part(TOKENS[:20]), heads=[]))
    assert same_bits(step(hybrid, Part(TOKENS[20:30], 20))[0], whole[20:])


@pytest.mark.parametrize("n_threads", [2, 4])
def test_threads_that_share_a_long_row(load, n_threads: int):
    """A row of many chunks is cut among threads: committed and draft rows, a window, against one thread."""
    program, source = hybrid_program("attention")
    tokens = tokens_of(1300, 3)
    sizes = [400, 400, 400, 95, 1]
    one, many = (load(program, source, n_threads=n, kv_type="f16") for n in (1, n_threads))
    where = {"table": (5, 0, 3, 1, 2, 4)}
    assert same_bits(prompt(one, tokens, sizes, **where), prompt(many, tokens, sizes, **where))
    assert many._step.n_split == 1
    part = Part((9,), 1300, where["table"], drafts=((5, 0), (6, 1)))
    expected = step(one, part)[0]
    batch = make_batch(part)
    many.run(batch)
    assert many._step.n_split == (1 if n_threads == 2 else 3)  # where that leaves work for all, drafts share a tile
    assert same_bits(np.array([many.logits(row) for row in range(3)]), expected)
