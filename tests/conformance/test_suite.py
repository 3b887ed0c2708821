"""The suite on itself: what is right passes, and for each clause something broken fails at that clause."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import broken_architectures as architectures
import broken_backends as backends
import pytest

from kinetic_core.conformance import ArchitectureConformance, Case, ClauseFailure, Conformance, NotApplicable
from kinetic_core.conformance.formats import FORMATS
from kinetic_core.conformance.recorded import every_format_is_stored
from kinetic_core.conformance.runner import SUITES, run_case, run_suite
from kinetic_core.conformance.suite import Fault
from kinetic_core.interfaces import TinyVariant
from kinetic_core.plugins import Plugin
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.tiny_hybrid import TinyHybrid

ROOT = Path(__file__).parents[2]


class _Small(TinyHybrid):
    """The miniature with one variant."""

    chosen = "tied"

    @classmethod
    def tiny(cls) -> list[TinyVariant]:
        return [variant for variant in TinyHybrid.tiny() if variant.name == cls.chosen]


class Recurrent(_Small):
    chosen = "recurrent"


class AttentionOnly(_Small):
    chosen = "attention"


class Prediction(_Small):
    chosen = "prediction"


def suite_of(target: Any, backend: Any, formats: tuple[str, ...] = ("F32",), **more: Any) -> type[Conformance]:
    values = {"target": target, "name": "tiny-hybrid", "backend": backend, "formats": formats, **more}
    return type("TestIt", (ArchitectureConformance,), values)


def case_of(suite: type[Conformance], clause_id: str) -> Case:
    return next(case for case in suite.cases() if case.clause.id == clause_id)


BROKEN: dict[str, tuple[Any, Any, str]] = {
    # clause: (architecture, backend, words of the message)
    "ARCH-01": (Recurrent, "DependsOnBatchSize", "in one batch against one token at a time"),
    "ARCH-02": (Recurrent, "DependsOnStepStart", "run in steps of"),
    "ARCH-03": (Recurrent, "DependsOnNeighbours", "of four in one step"),
    "ARCH-04": (AttentionOnly, "DependsOnBlocks", "in blocks 4 and 2"),
    "ARCH-05": (Recurrent, "DraftsSeeSiblings", "against its path alone"),
    "ARCH-06": (Recurrent, "DraftsAreStored", "after a step with drafts"),
    "ARCH-07": (Recurrent, "CommitOffByOne", "a neighbour that committed as well"),
    "ARCH-08": (Recurrent, "CopyIsShallow", "going back to a copy"),
    "ARCH-09": (Recurrent, "BytesAreRounded", "read back from the same executable"),
    "ARCH-10": (Recurrent, "SnapshotOneRowLate", "copied after the row at position 36"),
    "ARCH-11": (Recurrent, "ReadsPastTheEnd", "after cutting back to"),
    "ARCH-12": (AttentionOnly, "BlockCopyIsPartial", "of two that share a block"),
    "ARCH-13": (Recurrent, "ForgetsRestored", "after restoring, drafting and committing"),
    "ARCH-14": (Recurrent, "TiesGoElsewhere", "an answer with always right drafts"),
    "ARCH-15": (Recurrent, "TiesGoElsewhere", "an answer with always right drafts of 7"),
    "ARCH-16": (Recurrent, "DependsOnThreads", "3 threads against 2"),
    "ARCH-17": (Recurrent, "DependsOnLowering", "KINETIC_SIMD=generic"),
    "ARCH-18": (Recurrent, "Inaccurate", "F32 with an f32 cache: the largest difference"),
    "ARCH-19": (Prediction, "PredictionKeepsGuesses", "after wrong guesses"),
    "ARCH-20": (Prediction, "PredictionInaccurate", "the prediction block, F32"),
    "ARCH-21": (architectures.IgnoresUnknown, None, "has the unknown tensor 'unheard_of.weight' is accepted"),
    "ARCH-22": (architectures.ToleratesMissing, None, "lacks the tensor 'blk.0.ffn_up.weight' is accepted"),
    "ARCH-23": (architectures.NamelessShapeError, None, "without naming it: something does not fit"),
    "ARCH-24": (architectures.GuessesMissingKeys, None, "'tiny-hybrid.rope.freq_base' is accepted"),
    "ARCH-25": (architectures.DeniesWindow, None, "say has_sliding_window=False, the variant 'untied'"),
    "ARCH-26": (architectures.ClaimsExperts, None, "say has_experts=True, no variant"),
    "ARCH-27": (architectures.TwoOfAName, None, "uses a name twice"),
    "ARCH-28": (
        architectures.Narrow,
        None,
        "can be stored as Q4_K: declare one whose rows are a multiple of 256 wide",
    ),
    "ARCH-29": (Recurrent, "DraftsAreStored", "an answer that ends by max_tokens, with right guesses past the end"),
}


@pytest.mark.parametrize("clause_id", BROKEN)
def test_something_broken_fails_at_its_clause(clause_id: str) -> None:
    target, backend, words = BROKEN[clause_id]
    right = TinyHybrid if backend is None else target
    formats = FORMATS if clause_id == "ARCH-28" else ("F32",)
    good = suite_of(right, ReferenceBackend, formats)
    case_of(good, clause_id).run()
    good.close()
    bad = suite_of(target, backends.BACKENDS[backend] if backend else ReferenceBackend, formats)
    with pytest.raises(ClauseFailure, match=re.escape(words)) as failure:
        case_of(bad, clause_id).run()
    bad.close()
    assert failure.value.clause_id == clause_id
    assert "an error ended the check" not in failure.value.message


ALSO_BROKEN: tuple[tuple[str, Any, str, str], ...] = (
    # clause, architecture, variant, words of the message
    (
        "ARCH-22",
        architectures.RouterBiasIsOptional,
        "sigmoid-experts",
        "the tensor 'blk.0.exp_probs_b.bias' is accepted",
    ),
    (
        "ARCH-22",
        architectures.DeclaresTooMuch,
        "recurrent",
        "'blk.0.ssm_norm.weight', which is declared optional, is refused",
    ),
    (
        "ARCH-22",
        architectures.NeverWithoutOutput,
        "untied",
        "'output.weight' is declared optional and every variant has it",
    ),
    (
        "ARCH-24",
        architectures.NamesAnotherKey,
        "untied",
        "'tiny-hybrid.rope.freq_base' is refused without naming it",
    ),
    (
        "ARCH-24",
        architectures.AnotherDefault,
        "experts",
        "'tiny-hybrid.expert_used_count' is not as one with its declared",
    ),
    (
        "ARCH-24",
        architectures.ReadsPastTheReads,
        "untied",
        "'tiny-hybrid.extra' is read past the metadata's typed reads",
    ),
)


@pytest.mark.parametrize(("clause_id", "target", "variant", "words"), ALSO_BROKEN)
def test_other_ways_to_be_broken_fail_too(clause_id: str, target: Any, variant: str, words: str) -> None:
    suite = suite_of(target, ReferenceBackend)
    case = next(case for case in suite.cases() if (case.clause.id, case.subject) == (clause_id, variant))
    with pytest.raises(ClauseFailure, match=re.escape(words)):
        case.run()
    suite.close()


def test_every_clause_has_something_broken() -> None:
    assert list(BROKEN) == [clause.id for clause in ArchitectureConformance.clauses()]


def test_the_document_lists_every_clause_with_its_statement() -> None:
    text = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([A-Z]+-\d\d) \| (.*) \|$", text, re.MULTILINE)
    assert listed == [(c.id, c.statement) for suite in SUITES.values() for c in suite.clauses()]


def test_every_clause_runs_on_every_variant_and_every_format_that_fits() -> None:
    suite = suite_of(TinyHybrid, ReferenceBackend, FORMATS)
    variants = [variant.name for variant in TinyHybrid.tiny()]
    fits = {name: FORMATS if "wide" in name else ("F32", "Q8_0", "Q4_0") for name in variants}
    expected = set()
    for clause in suite.clauses():
        subjects = {
            "plugin": [""],
            "variant": [f"-{name}" for name in variants],
            "model": [f"-{name}-{stored}" for name in variants for stored in fits[name]],
        }[clause.scope]
        expected |= {clause.id + subject for subject in subjects}
    assert {case.id for case in suite.cases()} == expected
    suite.close()


def test_a_format_that_changes_nothing_is_left_out() -> None:
    suite = suite_of(Recurrent, ReferenceBackend, ("F32", "Q8_0", "TQ1_0"))  # blocks of 256: no tensor is so wide
    assert list(suite.subjects("model")) == ["recurrent-F32", "recurrent-Q8_0"]


def test_formats_that_fit_nothing_leave_no_model() -> None:
    """A model that is stored as F32 is not called by another format's name."""
    suite = suite_of(Recurrent, ReferenceBackend, ("Q4_K", "TQ1_0"))
    assert list(suite.subjects("model")) == []
    with pytest.raises(ClauseFailure, match="has a matrix that can be stored as Q4_K"):
        case_of(suite, "ARCH-28").run()
    suite.close()


def test_clauses_say_where_they_do_not_apply() -> None:
    suite = suite_of(Recurrent, backends.NoDrafts)
    for clause_id in ("ARCH-05", "ARCH-08", "ARCH-10", "ARCH-14"):
        with pytest.raises(NotApplicable, match="the backend takes no"):
            case_of(suite, clause_id).run()
    with pytest.raises(NotApplicable, match="no prediction block"):
        case_of(suite, "ARCH-19").run()
    suite.close()


# subclasses


def test_overriding_a_clause_is_refused() -> None:
    for name in ("batch", "test_clause", "cases", "check"):
        with pytest.raises(TypeError, match=f"TestIt overrides {name}"):
            suite_of(Recurrent, ReferenceBackend, **{name: lambda self, model: None})

    class Mixin:
        def commit(self, model: Any) -> None:
            pass

    with pytest.raises(TypeError, match="overrides commit"):
        type("TestIt", (Mixin, ArchitectureConformance), {"target": Recurrent, "name": "tiny-hybrid"})


@pytest.mark.parametrize(
    ("xfails", "words"),
    [({"ARCH-99": "because"}, "names no clause"), ({"ARCH-01": " "}, "no reason"), ({"ARCH-01": None}, "no reason")],
)
def test_expected_failures_need_a_clause_and_a_reason(xfails: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        suite_of(Recurrent, ReferenceBackend, xfails=xfails)


def test_expected_failures_are_strict() -> None:
    xfails = {"ARCH-16": "counts its threads", "ARCH-03-recurrent-F32": "a wrong guess"}
    suite = suite_of(Recurrent, backends.BACKENDS["DependsOnThreads"], xfails=xfails)
    results = {clause_id: run_case(case_of(suite, clause_id)) for clause_id in ("ARCH-16", "ARCH-03")}
    suite.close()
    assert (results["ARCH-16"].outcome, results["ARCH-16"].message) == ("expected failure", "counts its threads")
    assert results["ARCH-03"].outcome == "failed"
    assert results["ARCH-03"].message == "passes, although it is expected to fail: a wrong guess"


def test_models_that_cannot_be_made_fail() -> None:
    class Silent(TinyHybrid):
        @classmethod
        def tiny(cls) -> Any:
            raise OSError("no such file")

    plugin = Plugin("toy", "toy.plugin", "kinetic-arch-toy", "1.0")
    report = run_suite(suite_of(Silent, ReferenceBackend), plugin)
    assert not report.conforms
    assert "OSError: no such file" in report.results[0].message


def test_nothing_checked_does_not_conform() -> None:
    plugin = Plugin("toy", "toy.plugin", "kinetic-arch-toy", "1.0")
    report = run_suite(suite_of(Recurrent, backends.NoDrafts), plugin)
    assert report.count("passed") > 0
    skipped = tuple(r for r in report.results if r.outcome == "not applicable")
    assert not attrs.evolve(report, results=skipped).conforms
    assert not attrs.evolve(report, results=()).conforms


def test_formats_that_come_to_the_same_types_are_both_stored() -> None:
    """A tied model with names of its own has the same types in Q4_K and in the mixture: nothing is wrong with that."""

    class OwnNames:
        """Only what the check asks for."""

        formats = ("F32", "Q4_K", "Q4_K_M")
        variants = {"tied": TinyVariant("tied", {}, {"token_embd.weight": (300, 256), "blk.0.w1.weight": (256, 256)})}  # noqa: RUF012

    every_format_is_stored(OwnNames())  # type: ignore[arg-type]
    narrow = OwnNames()
    narrow.variants = {"narrow": TinyVariant("narrow", {}, {"blk.0.w1.weight": (48, 48)})}
    for format_name, width in (("Q4_K", 256), ("Q4_K_M", 256), ("Q8_0", 32)):
        narrow.formats = (format_name,)
        with pytest.raises(
            Fault, match=f"stored as {format_name}: declare one whose rows are a multiple of {width} wide"
        ):
            every_format_is_stored(narrow)  # type: ignore[arg-type]
