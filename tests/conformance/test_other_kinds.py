"""The suites of backends, drafters, caches and heads: what is right passes, what is broken fails at its clause."""

from __future__ import annotations

import re
from typing import Any

import broken_backends as backends
import broken_drafters as drafters
import caches
import pytest

from kinetic_core.conformance import (
    BackendConformance,
    CacheConformance,
    Case,
    ClauseFailure,
    DrafterConformance,
    HeadConformance,
)
from kinetic_core.conformance.rounding import RoundingBackend, ShortRoundingBackend
from kinetic_core.conformance.runner import run_suite
from kinetic_core.conformance.suite import Conformance
from kinetic_core.plugins import Plugin, load_registry
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.cache import NullCache
from kinetic_core.reference.drafter import NullDrafter
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.tiny_hybrid import TinyHybrid

RECURRENT, ATTENTION, PREDICTION = "recurrent-F32", "attention-F32", "prediction-F32"

BACKENDS: dict[str, tuple[str, str, str]] = {
    # clause: (executable, model, words of the message)
    "BACK-01": ("DependsOnBatchSize", RECURRENT, "in one batch against one token at a time"),
    "BACK-02": ("DependsOnStepStart", RECURRENT, "run in steps of"),
    "BACK-03": ("DependsOnNeighbours", RECURRENT, "of four in one step"),
    "BACK-04": ("DependsOnBlocks", ATTENTION, "in blocks 4 and 2"),
    "BACK-05": ("DraftsSeeSiblings", RECURRENT, "against its path alone"),
    "BACK-06": ("DraftsAreStored", RECURRENT, "after a step with drafts"),
    "BACK-07": ("CommitOffByOne", RECURRENT, "a neighbour that committed as well"),
    "BACK-08": ("CommitsAnything", RECURRENT, "commit accepts (4,)"),
    "BACK-09": ("CopyIsShallow", RECURRENT, "going back to a copy"),
    "BACK-10": ("BytesAreRounded", RECURRENT, "read back from the same executable"),
    "BACK-11": ("SnapshotOneRowLate", RECURRENT, "copied after the row at position 36"),
    "BACK-12": ("ReadsPastTheEnd", RECURRENT, "after cutting back to"),
    "BACK-13": ("BlockCopyIsPartial", ATTENTION, "of two that share a block"),
    "BACK-14": ("ForgetsRestored", RECURRENT, "after restoring, drafting and committing"),
    "BACK-15": ("DependsOnThreads", RECURRENT, "3 threads against 2"),
    "BACK-16": ("DependsOnLowering", RECURRENT, "KINETIC_SIMD=generic"),
    "BACK-17": ("Inaccurate", RECURRENT, "F32 with an f32 cache: the largest difference"),
    "BACK-18": ("PredictionKeepsGuesses", PREDICTION, "after wrong guesses"),
    "BACK-19": ("PredictionInaccurate", PREDICTION, "the prediction block, F32"),
    "BACK-20": ("CandidatesById", RECURRENT, "the candidates of top_k"),
    "BACK-21": ("WrapsTokens", RECURRENT, "a negative token is accepted"),
    "BACK-22": ("CutsBytes", RECURRENT, "a slot of"),
    "BACK-23": ("OneDigest", RECURRENT, "the same for caches of different types"),
    "BACK-24": ("DeniesF32", RECURRENT, "an f32 cache is accepted"),
    "BACK-25": ("TiesGoHigh", "", "ties of equal rows do not go to the lowest token id in a committed row"),
    "BACK-26": ("PassesNaN", "", "a wanted logit that is NaN"),
    "BACK-27": ("OneScaleOff", "", "a matrix of Q8_0 times integers"),
}
DRAFTERS: dict[str, tuple[Any, str]] = {
    "DRAFT-01": (drafters.MeddlesWithState, "the answer to a random prompt"),
    "DRAFT-02": (drafters.MeddlesWithState, "the answer to a repetitive prompt"),
    "DRAFT-03": (drafters.FailsBesideOthers, "the drafter failed and was turned off"),
    "DRAFT-04": (drafters.TooLong, "a draft of"),
    "DRAFT-05": (drafters.Branches, "say branches=False"),
    "DRAFT-06": (drafters.LooksAtHidden, "the drafter called hidden"),
    "DRAFT-07": (drafters.Remembers, "an earlier request changes a proposal"),
}
HEADS: dict[str, tuple[Any, str]] = {
    "HEAD-01": (drafters.ScaledHead, "the head's logits against"),
    "HEAD-02": (drafters.ReversedHead, "got the tokens"),
    "HEAD-03": (drafters.ScaledHead, "the scores are not the full output layer's"),
    "HEAD-04": (drafters.ScaledHead, "a wanted row among few"),
}
CACHES: dict[str, tuple[Any, str]] = {
    "CACHE-01": (caches.StaleStates, "tokens from the cache"),
    "CACHE-02": (caches.SharesAmongTenants, "is found with the salt ''"),
    "CACHE-03": (caches.KeepsAll, "blocks stay with the cache"),
    "CACHE-04": (caches.Leaks, "blocks and 0 slots are still in use after clear"),
    "CACHE-05": (caches.WantsThePast, "snapshots are wanted at [128]"),
    "CACHE-06": (caches.RemembersAll, "say survives_restart=False, a new cache finds 260 tokens"),
}


def make(kind: type[Conformance], target: Any, **more: Any) -> type[Conformance]:
    if kind is DrafterConformance:
        more = {"models": ("tiny-hybrid/untied", "tiny-hybrid/prediction"), **more}
    return type("TestIt", (kind,), {"target": target, "name": "it", "formats": ("F32",), **more})


def case_of(suite: type[Conformance], clause_id: str, subject: str | None = None) -> Case:
    cases = [case for case in suite.cases() if case.clause.id == clause_id]
    return cases[0] if subject is None else next(case for case in cases if case.subject == subject)


def check(good: type[Conformance], bad: type[Conformance], clause_id: str, words: str, subject: str | None) -> None:
    case_of(good, clause_id, subject).run()
    good.close()
    with pytest.raises(ClauseFailure, match=re.escape(words)) as failure:
        case_of(bad, clause_id, subject).run()
    bad.close()
    assert failure.value.clause_id == clause_id
    assert "an error ended the check" not in failure.value.message


@pytest.mark.parametrize("clause_id", BACKENDS)
def test_a_broken_backend_fails_at_its_clause(clause_id: str) -> None:
    name, subject, words = BACKENDS[clause_id]
    target = backends.BACKENDS.get(name) or getattr(backends, name)
    good, bad = make(BackendConformance, ReferenceBackend), make(BackendConformance, target)
    check(good, bad, clause_id, words, subject)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("AlmostTheWeights", "Q8_0 with an f32 cache: 0 of 12 short prompts are within 0.001"),
        ("NotTheWeights", "Q8_0 with an f32 cache: the root mean square of the difference from the reference is"),
    ],
)
def test_a_quantized_model_is_held_to_the_reference_closer_than_rounding(name: str, words: str) -> None:
    suite = make(BackendConformance, backends.BACKENDS[name], formats=("Q8_0",))
    with pytest.raises(ClauseFailure, match=re.escape(words)):
        case_of(suite, "BACK-17", "recurrent-Q8_0").run()
    suite.close()


@pytest.mark.parametrize("backend", [RoundingBackend, ShortRoundingBackend])
def test_rounding_activations_is_no_fault(backend: Any) -> None:
    suite = make(BackendConformance, backend, formats=("Q4_K",))
    case_of(suite, "BACK-17", "wide-Q4_K").run()
    suite.close()


def test_ties_are_broken_alike_in_draft_rows() -> None:
    suite = make(BackendConformance, backends.BACKENDS["TiesGoHighInDrafts"])
    with pytest.raises(ClauseFailure, match="ties of equal rows do not go to the lowest token id in a draft row"):
        case_of(suite, "BACK-25").run()
    suite.close()


@pytest.mark.parametrize("clause_id", DRAFTERS)
def test_a_broken_drafter_fails_at_its_clause(clause_id: str) -> None:
    target, words = DRAFTERS[clause_id]
    good = make(DrafterConformance, drafters.LastTokens, backend="reference")
    check(good, make(DrafterConformance, target, backend="reference"), clause_id, words, None)


def test_tenants_of_a_drafter_that_learns_are_apart() -> None:
    suite = make(DrafterConformance, drafters.MixesTenants, backend="reference")
    with pytest.raises(ClauseFailure, match="for another"):
        case_of(suite, "DRAFT-07").run()
    suite.close()


def test_a_drafter_runs_on_the_models_that_patterns_fit() -> None:
    suite = make(DrafterConformance, NullDrafter, models=("llama/t*", "tiny-hybrid/recurrent"))
    assert list(suite.subjects("model")) == ["tiny-hybrid/recurrent-F32", "llama/tied-F32"]
    everything = make(DrafterConformance, NullDrafter, models=("*",))
    listed = [label.partition("/")[0] for label in everything.subjects("model")]
    assert len(set(listed)) == len(load_registry().registered("architecture"))
    assert listed.count("tiny-hybrid") == len(TinyHybrid.tiny())
    with pytest.raises(ValueError, match="no variant of an installed architecture fits: got 'lama/tied', expected tin"):
        make(DrafterConformance, NullDrafter, models=("llama/tied", "lama/tied")).cases()


@pytest.mark.parametrize("clause_id", HEADS)
def test_a_broken_head_fails_at_its_clause(clause_id: str) -> None:
    target, words = HEADS[clause_id]
    good = make(HeadConformance, FullHead, backend="reference")
    check(good, make(HeadConformance, target, backend="reference"), clause_id, words, None)


@pytest.mark.parametrize("clause_id", CACHES)
def test_a_broken_cache_fails_at_its_clause(clause_id: str) -> None:
    target, words = CACHES[clause_id]
    good = make(CacheConformance, caches.Keeper, backend="reference")
    check(good, make(CacheConformance, target, backend="reference"), clause_id, words, None)


def test_a_cache_that_finds_other_tokens_fails() -> None:
    suite = make(CacheConformance, caches.FindsTooMuch, backend="reference")
    with pytest.raises(ClauseFailure, match="270 tokens are found, expected at most the 269"):
        case_of(suite, "CACHE-02").run()
    suite.close()


def test_every_clause_has_something_broken() -> None:
    assert list(BACKENDS) == [clause.id for clause in BackendConformance.clauses()]
    assert list(DRAFTERS) == [clause.id for clause in DrafterConformance.clauses()]
    assert list(CACHES) == [clause.id for clause in CacheConformance.clauses()]
    assert list(HEADS) == [clause.id for clause in HeadConformance.clauses()]


@pytest.mark.parametrize(
    ("kind", "target"),
    [(DrafterConformance, NullDrafter), (CacheConformance, NullCache), (HeadConformance, FullHead)],
)
def test_the_references_conform(kind: type[Conformance], target: Any) -> None:
    report = run_suite(make(kind, target), Plugin("builtins", "kinetic_core.builtins", "kinetic-core", "0"))
    assert report.conforms, [result for result in report.results if result.outcome == "failed"]
    assert report.count("not applicable") == 0
