"""The faults of speculative decoding by name, in attention and in every kind of recurrence: each fails at its clause.

State written by verify (ARCH-06), commit off by one (ARCH-07), another choice after drafts (ARCH-14; among equal scores
BACK-25, see test_other_kinds.py), the history of the wrong branch (ARCH-15), and what lies past an answer's end
(ARCH-29).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import broken_backends as backends
import broken_engines as engines
import pytest
from test_suite import case_of, suite_of

from kinetic_core.conformance import ClauseFailure
from kinetic_core.conformance.on_models import installed_families, registered_backend
from kinetic_core.interfaces import TinyVariant
from kinetic_core.program import Program, ops
from kinetic_core.program.record import record_program
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model
from kinetic_core.reference.tiny_hybrid import ALL_LAYER_TYPES, KEY, TinyHybrid
from kinetic_core.reference.tiny_hybrid_variants import tiny_variant

TREE_CLAUSES = ("ARCH-05", "ARCH-06", "ARCH-07", "ARCH-13", "ARCH-14", "ARCH-15", "ARCH-29")
"""Rows of a tree, what they leave, commits, and whole answers."""
RECURRENT = {"conv": ops.ShortConv, "delta": ops.DeltaRule, "mamba": ops.Mamba2Scan}
"""Kind of block -> the recurrence that no other kind has, or has too."""


Break = Callable[[pytest.MonkeyPatch], None]


def only(kind: str) -> type[TinyHybrid]:
    """The miniature with one block of one kind."""

    class OneKind(TinyHybrid):
        @classmethod
        def tiny(cls) -> list[TinyVariant]:
            return [tiny_variant(kind, (kind,), 100)]

    return OneKind


def program_of(kind: str) -> Program:
    (variant,) = only(kind).tiny()
    source = random_model(KEY, variant)
    return record_program(TinyHybrid(source), FullHead(), source)


def fails(suite: Any, clause_id: str, words: str) -> None:
    with pytest.raises(ClauseFailure, match=re.escape(words)) as failure:
        case_of(suite, clause_id).run()
    suite.close()
    assert failure.value.clause_id == clause_id
    assert "an error ended the check" not in failure.value.message


def test_every_recurrence_has_a_kind_of_block() -> None:
    """So that a new one cannot come without its trees."""
    recurrences = {op for op in vars(ops).values() if attrs.has(op) and "state" in attrs.fields_dict(op)}
    assert recurrences == set(RECURRENT.values())
    for kind in ALL_LAYER_TYPES:
        recorded = {type(op) for op in program_of(kind).ops} & recurrences
        assert recorded - {ops.ShortConv} == ({RECURRENT[kind]} - {ops.ShortConv} if kind in RECURRENT else set())
        assert bool(recorded) == (kind in RECURRENT)


@pytest.mark.parametrize("kind", ALL_LAYER_TYPES)
def test_what_is_right_passes_the_clauses_of_trees(kind: str) -> None:
    suite = suite_of(only(kind), "cpu")
    for clause_id in TREE_CLAUSES:
        case_of(suite, clause_id).run()
    suite.close()


@pytest.mark.parametrize("kind", ALL_LAYER_TYPES)
@pytest.mark.parametrize(
    ("executable", "clause_id", "of_states", "of_keys"),
    [
        ("DraftsAreStored", "ARCH-06", "the recurrent states after a step with drafts", "block 0 after a step with"),
        ("CommitOffByOne", "ARCH-07", "those of a neighbour that committed as well", "the rows after committing"),
        ("TiesGoElsewhere", "ARCH-14", *["an answer with always right drafts of 1"] * 2),
    ],
)
def test_a_broken_executable_fails(kind: str, executable: str, clause_id: str, of_states: str, of_keys: str) -> None:
    words = of_states if kind in RECURRENT else of_keys
    fails(suite_of(only(kind), backends.BACKENDS[executable]), clause_id, words)


HISTORIES: dict[str, tuple[Break, str]] = {
    "no path": (partial(engines.wrong_history, seen=engines.no_path), "an answer with always right drafts of 7"),
    "all rows before": (
        partial(engines.wrong_history, seen=engines.all_rows_before),
        "an answer with branching drafts",
    ),
    "first branch": (partial(engines.wrong_history, seen=engines.first_branch), "an answer with branching drafts"),
    "too few candidates": (engines.too_few_candidates, "an answer with always right drafts of 7"),
}


@pytest.mark.parametrize("kind", ALL_LAYER_TYPES)
@pytest.mark.parametrize("history", HISTORIES)
def test_the_history_of_the_wrong_branch_fails(monkeypatch: pytest.MonkeyPatch, kind: str, history: str) -> None:
    wrong, words = HISTORIES[history]
    wrong(monkeypatch)
    fails(suite_of(only(kind), "cpu"), "ARCH-15", words)


FAMILIES = installed_families(registered_backend("cpu"), ("F32",), ("*",))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != KEY])
def test_what_is_right_ends_where_plain_decoding_ends_in_every_family(name: str) -> None:
    """On all of its models."""
    suite = suite_of(FAMILIES[name].architecture, "cpu", name=name)
    for case in suite.cases():
        if case.clause.id == "ARCH-29":
            case.run()
    suite.close()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != KEY])
@pytest.mark.parametrize("history", ["first branch", "too few candidates"])
def test_it_fails_in_every_family(monkeypatch: pytest.MonkeyPatch, name: str, history: str) -> None:
    """On the first of its models."""
    wrong, words = HISTORIES[history]
    wrong(monkeypatch)
    fails(suite_of(FAMILIES[name].architecture, "cpu", name=name), "ARCH-15", words)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (engines.overlooks_stop_strings, "ends by a stop string, with right guesses past the end, against the plain"),
        (engines.overlooks_end_tokens, "ends by an end token, with right guesses past the end, against the plain"),
        (engines.keeps_one_too_many, "ends by max_tokens, with right guesses past the end: the recurrent states"),
        (engines.counts_guesses, "the same tokens with another text, end or count"),
    ],
)
def test_what_lies_past_the_end_fails(monkeypatch: pytest.MonkeyPatch, wrong: Break, words: str) -> None:
    wrong(monkeypatch)
    fails(suite_of(only("delta"), "cpu"), "ARCH-29", words)
