"""Guesses of the prediction block are those of the block run from scratch, to the bit, whatever happened before."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from kinetic_drafters.mtp import MtpDrafter, estimates
from mtp_support import Scratch, load_trained, require_proposals, tiny_model, tiny_models, trained_prompts

from kinetic_core.conformance.driven import Driven, Driver
from kinetic_core.conformance.models import TinyModel
from kinetic_core.interfaces import DraftTree, Executable, SequenceStep


@pytest.fixture(scope="module")
def model() -> Iterator[TinyModel]:
    family = tiny_models("cpu")
    yield tiny_model(family)
    family.close()


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[Executable, Scratch]]:
    executable, other = load_trained(), load_trained()
    yield executable, Scratch(other)
    executable.close()
    other.close()


class Counted:
    """An executable that counts its prediction steps and keeps their rows per sequence."""

    def __init__(self, inner: Executable) -> None:
        self._inner = inner
        self.steps: list[list[int]] = []

    def predict(self, batch: Any, hidden: Any) -> None:
        self.steps.append([sequence.n_rows for sequence in batch.sequences])
        self._inner.predict(batch, hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def drive(driver: Driver, sequence: Driven, n_tokens: int, most: int) -> None:
    """Steps until the sequence has so many tokens or a few more."""
    while len(sequence.tokens) < n_tokens:
        driver.step(sequence, most=most)


@pytest.mark.parametrize("n_prompt", [1, 2, 37, 250, 256, 257])
def test_proposals_over_a_prompt_and_an_answer(model: TinyModel, n_prompt: int) -> None:
    driver = Driver(model.executable(), MtpDrafter(), prompt_rows=100)
    sequence = driver.begin(0, model.tokens(60, n_prompt))
    drive(driver, sequence, n_prompt + 12, most=4)
    require_proposals(sequence, Scratch(model.executable("scratch")), least=11 - sequence.n_accepted)


def test_proposals_on_the_reference_backend() -> None:
    family = tiny_models("reference")
    model = tiny_model(family)
    driver = Driver(model.executable(), MtpDrafter(), prompt_rows=8)
    sequence = driver.begin(0, model.tokens(60, 9))
    drive(driver, sequence, 14, most=3)
    require_proposals(sequence, Scratch(model.executable("scratch")), least=3)
    family.close()


@pytest.mark.parametrize("prompt", [0, 7])
def test_proposals_where_guesses_come_true(trained: tuple[Executable, Scratch], prompt: int) -> None:
    executable, scratch = trained
    driver = Driver(executable, MtpDrafter())
    sequence = driver.begin(0, trained_prompts()[prompt])
    drive(driver, sequence, 64 + 40, most=4)
    assert sequence.n_accepted >= 15
    assert any(draft is not None and draft.tree.parents.count(-1) == 2 for _, _, draft in sequence.drafts)
    require_proposals(sequence, scratch, least=8)


def test_an_answer_across_a_block(trained: tuple[Executable, Scratch]) -> None:
    executable, scratch = trained
    driver = Driver(executable, MtpDrafter())
    sequence = driver.begin(0, [token for prompt in trained_prompts()[:4] for token in prompt][:240])
    drive(driver, sequence, 275, most=3)
    assert sequence.n_accepted >= 5
    require_proposals(sequence, scratch, least=8)


@pytest.mark.parametrize(("n_paused", "n_prompt"), [(30, 20), (30, 240), (300, 5)])
def test_proposals_after_a_pause(model: TinyModel, n_paused: int, n_prompt: int) -> None:
    executable = Counted(model.executable())
    driver = Driver(executable, MtpDrafter())  # type: ignore[arg-type]
    sequence = driver.begin(0, model.tokens(61, n_prompt))
    drive(driver, sequence, n_prompt + 4, most=2)
    n_steps = len(executable.steps)
    drive(driver, sequence, n_prompt + n_paused, most=0)
    # Nothing is run but what fills a block.
    n_full = (n_prompt + n_paused) // 256
    assert len(executable.steps) - n_steps == n_full
    drive(driver, sequence, n_prompt + n_paused + 3, most=3)
    require_proposals(sequence, Scratch(model.executable("scratch")), least=4)


def test_pending_rows_go_in_steps_that_the_executable_takes(model: TinyModel) -> None:
    executable = Counted(model.load(max_rows=24, max_outputs=24))
    drafter = MtpDrafter()
    driver = Driver(executable, drafter, prompt_rows=20)  # type: ignore[arg-type]
    sequences = [
        driver.begin(number, model.tokens(62 + number, n), blocks=(2 * number, 2 * number + 1), slot=number)
        for number, n in enumerate((290, 30))
    ]
    for sequence in sequences:
        while sequence.n_run < len(sequence.tokens) - 1 or sequence.n_run == 0:
            driver.step(sequence)
    driver.step(*sequences, most=2)
    driver.step(*sequences, most=2)
    assert max(sum(rows) for rows in executable.steps) == 24
    for sequence in sequences:
        require_proposals(sequence, Scratch(model.executable("scratch")), least=2)
    assert drafter.statistics()["predicted_rows"] == sum(sum(rows) for rows in executable.steps)
    executable.close()


def test_sequences_share_prediction_steps(model: TinyModel) -> None:
    executable = Counted(model.executable())
    driver = Driver(executable, MtpDrafter())  # type: ignore[arg-type]
    sequences = [
        driver.begin(number, model.tokens(64 + number, 20 + number), blocks=(number,), slot=number)
        for number in range(3)
    ]
    driver.step(*sequences)
    for round_ in range(6):
        executable.steps.clear()
        driver.step(*sequences, most=2)
        if round_ > 0:
            assert [len(rows) for rows in executable.steps] == [3, 3]  # one per depth
    # As deep as it was last asked for, not deeper.
    for most in (1, 1, 3):
        executable.steps.clear()
        driver.step(*sequences, most=most)
    assert [len(rows) for rows in executable.steps[:3]] == [3, 1, 1]
    # Whoever is not asked any more is not worked for, from the step after the next on.
    for round_ in range(3):
        executable.steps.clear()
        driver.step(sequences[0], most=2)
        driver.step(*sequences[1:], most=0)
        driver.step(*sequences, most=0)
        assert round_ == 0 or {len(rows) for rows in executable.steps} == {1}
    driver.step(*sequences, most=4)
    for sequence in sequences:
        require_proposals(sequence, Scratch(model.executable("scratch")), least=7)


def test_sequences_share_prediction_steps_after_pauses(model: TinyModel) -> None:
    """All were asked when last anybody was: they are expected to be asked again, however long ago that was."""
    executable = Counted(model.executable())
    driver = Driver(executable, MtpDrafter())  # type: ignore[arg-type]
    sequences = [
        driver.begin(number, model.tokens(64 + number, 20 + number), blocks=(number,), slot=number)
        for number in range(3)
    ]
    driver.step(*sequences)
    driver.step(*sequences, most=1)
    for n_paused in (1, 3, 7):
        for _ in range(n_paused):
            driver.step(*sequences, most=0)
        executable.steps.clear()
        driver.step(*sequences, most=1)
        assert [len(rows) for rows in executable.steps] == [3]
    for sequence in sequences:
        require_proposals(sequence, Scratch(model.executable("scratch")), least=3)


def test_a_sequence_that_gave_its_blocks_away(model: TinyModel) -> None:
    driver = Driver(model.executable(), MtpDrafter())
    stays, gives = (
        driver.begin(number, model.tokens(67 + number, 20), blocks=(number,), slot=number) for number in (0, 1)
    )
    for _ in range(4):
        driver.step(stays, gives, most=2)
    takes = driver.begin(2, model.tokens(69, 30), blocks=(1,), slot=1)
    driver.step(stays, takes, most=0)
    driver.step(takes, most=2)
    for _ in range(4):
        driver.step(stays, takes, most=2)
    again = Driven(1, gives.tokens, (3,), 2)
    driver._executable.clear_slot(2)
    for _ in range(4):
        driver.step(again, takes, stays, most=2)
    for sequence, least in ((stays, 10), (gives, 2), (takes, 6), (again, 3)):
        require_proposals(sequence, Scratch(model.executable("scratch")), least)


@pytest.mark.parametrize("after_proposal", [False, True])
@pytest.mark.parametrize("n_prompt", [40, 255, 256, 300])
def test_a_fork(model: TinyModel, n_prompt: int, after_proposal: bool) -> None:
    executable, drafter = model.executable(), MtpDrafter()
    driver = Driver(executable, drafter)
    prompt = model.tokens(70, n_prompt)
    parent = driver.begin(0, prompt)
    while parent.n_run < n_prompt:
        driver.step(parent)
    if after_proposal:
        drafter.propose(0, 3)
    full = n_prompt // 256
    executable.copy_block(parent.blocks[full], 5)
    executable.copy_slot(0, 1)
    drafter.begin(1, prompt)
    drafter.forked(1, 0)
    other = (parent.tokens[-1] + 1) % model.vocab
    drafter.committed(1, (other,))
    assert drafter.propose(1, 3) is None, "its blocks are not known yet"
    child = Driven(1, [*prompt, other], (*parent.blocks[:full], 5, 4), 1, n_run=n_prompt)
    for most in (0, 3, 3, 3, 3):
        driver.step(parent, child, most=most)
    for sequence in (parent, child):
        require_proposals(sequence, Scratch(model.executable("scratch")), least=4)


def test_a_fork_of_a_sequence_that_gets_no_drafts(model: TinyModel) -> None:
    executable, drafter = model.executable(), MtpDrafter()
    tokens = model.tokens(77, 30)
    plain = Driver(executable, MtpDrafter())
    plain.step(plain.begin(0, tokens[:20]))
    drafter.attach(executable)
    drafter.begin(0, tokens)
    drafter.stepped([SequenceStep(0, 5, tuple(range(15)), np.zeros(1, np.int32))])
    drafter.begin(1, tokens)
    drafter.forked(1, 0)
    drafter.stepped([SequenceStep(1, 20, tuple(range(9)), np.zeros(1, np.int32))])
    assert drafter.propose(1, 2) is None


@pytest.mark.parametrize(("n_prompt", "n_steps"), [(30, 3), (250, 8)])
def test_a_sequence_that_starts_in_the_middle_gets_drafts_once_it_starts_over(
    model: TinyModel, n_prompt: int, n_steps: int
) -> None:
    executable, drafter = model.executable(), MtpDrafter()
    first = Driver(executable, MtpDrafter())
    tokens = model.tokens(71, n_prompt)
    warm = first.begin(0, tokens)
    first.step(warm)
    driver = Driver(executable, drafter)
    drafter.begin(0, tokens)
    drafter.committed(0, warm.tokens[n_prompt:])
    resumed = Driven(0, warm.tokens, (0, 1), 0, n_run=n_prompt)
    for _ in range(n_steps):
        driver.step(resumed, most=2)
    assert [draft for _, _, draft in resumed.drafts] == [None] * n_steps
    assert drafter.statistics()["pending_bytes"] == 0
    executable.clear_slot(0)
    restarted = Driven(0, resumed.tokens, (0, 1), 0)
    for _ in range(4):
        driver.step(restarted, most=2)
    require_proposals(restarted, Scratch(model.executable("scratch")), least=2)


def test_guesses_end_where_the_blocks_do(model: TinyModel) -> None:
    driver = Driver(model.executable(), MtpDrafter())
    sequence = driver.begin(0, model.tokens(72, 247), blocks=(0,))
    drive(driver, sequence, 256, most=6)
    assert [most for _, most, draft in sequence.drafts if draft is not None and len(draft.tree.token_ids) < most]
    require_proposals(sequence, Scratch(model.executable("scratch")), least=6, room=256)
    driver.step(sequence, most=0)
    assert len(sequence.tokens) == sequence.n_run + 1 == 257
    assert driver._drafter.propose(0, 2) is None, "there is no place for the last token's row"


def test_guesses_for_others_end_where_their_blocks_do(model: TinyModel) -> None:
    driver = Driver(model.executable(), MtpDrafter())
    sequences = [
        driver.begin(number, model.tokens(80 + number, n_prompt), blocks=(number,), slot=number)
        for number, n_prompt in enumerate((30, 245))
    ]
    while len(sequences[1].tokens) < 256:
        driver.step(*sequences, most=4)
    for sequence in sequences:
        require_proposals(sequence, Scratch(model.executable("scratch")), least=6, room=256)


def test_nothing_is_proposed_while_a_prompt_runs(model: TinyModel) -> None:
    drafter = MtpDrafter()
    driver = Driver(model.executable(), drafter, prompt_rows=10)
    sequence = driver.begin(0, model.tokens(73, 25))
    for _ in range(2):
        assert drafter.propose(0, 4) is None
        driver.step(sequence)
    assert drafter.propose(0, 4) is None
    driver.step(sequence)
    assert drafter.propose(0, 0) is None
    assert drafter.propose(0, 1) is not None


def test_a_proposal_asked_for_twice_and_deeper(model: TinyModel) -> None:
    executable = Counted(model.executable())
    drafter = MtpDrafter()
    driver = Driver(executable, drafter)  # type: ignore[arg-type]
    sequence = driver.begin(0, model.tokens(74, 25))
    driver.step(sequence)
    first = drafter.propose(0, 1)
    assert drafter.propose(0, 1) == first
    assert executable.steps == [[25]]
    driver.step(sequence, most=5)
    driver.step(sequence, most=2)
    require_proposals(sequence, Scratch(model.executable("scratch")), least=2)


def test_answers_and_states_are_the_plain_ones(model: TinyModel) -> None:
    prompt = model.tokens(75, 33)
    executable = model.executable()
    plain = Driver(executable, MtpDrafter())
    sequence = plain.begin(0, prompt)
    drive(plain, sequence, 33 + 20, most=0)
    expected, states = sequence.tokens, executable.read_slot(0)
    executable = model.executable()
    drafted = Driver(executable, MtpDrafter())
    sequence = drafted.begin(0, prompt)
    while len(sequence.tokens) < 33 + 20:
        drafted.step(sequence, most=min(3, 33 + 20 - len(sequence.tokens) - 1))
    assert (sequence.tokens, executable.read_slot(0)) == (expected, states)


class Told:
    """An executable whose prediction block guesses 10 (or 11), 20 (or 21), …, by the leads that it is told."""

    max_rows = 64

    def __init__(self, leads: Sequence[float]) -> None:
        self._leads = list(leads)
        self._n_predicted = -1

    def hidden(self, first_row: int, n_rows: int) -> np.ndarray:
        return np.zeros((n_rows, 4), np.float32)

    def predict(self, batch: Any, hidden: Any) -> None:
        self._n_predicted += 1

    def candidates(self, output: int) -> tuple[np.ndarray, np.ndarray]:
        best = 10 * (self._n_predicted + 1)
        return np.array([best, best + 1], np.int32), np.array([0.0, -self._leads[self._n_predicted]], np.float32)


@pytest.mark.parametrize(
    ("leads", "most", "tokens", "parents"),
    [
        ([3, 3, 3], 3, (10, 20, 30), (-1, 0, 1)),
        ([0.1], 1, (10,), (-1,)),
        ([0.1], 2, (10, 11), (-1, -1)),
        ([0.1, 3], 3, (10, 11, 20), (-1, -1, 0)),
        ([0.5, 0.5, 3], 4, (10, 20, 11, 30), (-1, 0, -1, 1)),
        ([1, 0.5, 0.1], 4, (10, 20, 30, 11), (-1, 0, 1, -1)),
    ],
)
def test_the_branch_comes_before_less_likely_guesses(
    leads: list[float], most: int, tokens: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    drafter = MtpDrafter()
    drafter.attach(Told(leads))  # type: ignore[arg-type]
    drafter.begin(0, (1, 2, 3))
    drafter.committed(0, (4,))
    drafter.stepped([SequenceStep(0, 0, (0, 1, 2), np.zeros(1, np.int32))])
    draft = drafter.propose(0, most)
    assert draft is not None
    assert draft.tree == DraftTree(tokens, parents)
    for token, estimate in zip(tokens, draft.expected, strict=True):
        best, second = estimates(float(np.float32(leads[token // 10 - 1])))
        assert estimate == (second if token % 10 else best)


def test_estimates_grow_with_the_lead() -> None:
    pairs = [estimates(lead) for lead in (0.0, 0.1, 1.0, 3.0, 20.0, 1e6)]
    firsts, seconds = zip(*pairs, strict=True)
    assert list(firsts) == sorted(firsts) and list(seconds) == sorted(seconds, reverse=True)
    assert all(second <= first and first + second <= 1 for first, second in pairs)
    assert pairs[0] == pytest.approx((1 / 3, 1 / 3)) and pairs[-1] == (1.0, 0.0)


def test_figures(model: TinyModel) -> None:
    drafter = MtpDrafter()
    driver = Driver(model.executable(), drafter)
    sequence = driver.begin(0, model.tokens(76, 25))
    row_bytes = 4 * model.program.hidden.width
    driver.step(sequence)
    assert drafter.statistics() == {"predicted_rows": 0, "predict_seconds": 0.0, "pending_bytes": 25 * row_bytes}
    driver.step(sequence, most=1)
    got = drafter.statistics()
    assert got["predicted_rows"] == 25 and got["predict_seconds"] > 0
    assert got["pending_bytes"] == (1 + sequence.n_accepted) * row_bytes
    driver.end(sequence)
    assert drafter.statistics()["pending_bytes"] == 0


def test_figures_are_read_beside_the_engine_thread() -> None:
    drafter = MtpDrafter()
    done = threading.Event()

    def begin_and_end() -> None:
        for number in range(20_000):
            drafter.begin(number, (1,))
            if number >= 100:
                drafter.end(number - 100)
        done.set()

    thread = threading.Thread(target=begin_and_end)
    thread.start()
    while not done.is_set():
        assert drafter.statistics()["pending_bytes"] == 0
    thread.join()


def test_it_suits_models_with_a_prediction_block(model: TinyModel) -> None:
    assert MtpDrafter.suits(model.program)
    assert not MtpDrafter.suits(attrs.evolve(model.program, prediction=None))
