"""The report of a run as a page: one line per suite, and what does not hold."""

from __future__ import annotations

import json
from typing import Any

import broken_backends as backends
import pytest
from test_suite import Recurrent, suite_of

from kinetic_core.conformance.report import as_markdown
from kinetic_core.conformance.runner import SuiteReport, as_document, run_case
from kinetic_core.plugins import Plugin
from kinetic_core.reference.backend import ReferenceBackend

PLUGIN = Plugin("toy", "toy.plugin", "kinetic-arch-toy", "1.0")
HEADER = {"kinetic-core": "0.1.0", "machine": "Linux x86_64"}


def report_of(backend: Any, clauses: tuple[str, ...], **more: Any) -> dict[str, Any]:
    suite = suite_of(Recurrent, backend, ("F32", "Q8_0"), **more)
    results = tuple(run_case(case) for case in suite.cases() if case.clause.id in clauses)
    suite.close()
    report = SuiteReport("architecture", "tiny-hybrid", PLUGIN.distribution, PLUGIN.version, {}, results)
    return json.loads(json.dumps(as_document(HEADER, [report])))


def row(page: str) -> list[str]:
    (line,) = (line for line in page.splitlines() if line.startswith("| kinetic-arch-toy"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_page_of_what_holds() -> None:
    page = as_markdown(report_of(ReferenceBackend, ("ARCH-16", "ARCH-19", "ARCH-21", "ARCH-25")))
    assert row(page)[:9] == [
        *("kinetic-arch-toy 1.0", "architecture", "tiny-hybrid"),
        *("3", "1", "0"),  # hold, do not apply, failed
        *("2", "F32 Q8_0", "6"),  # models, formats, cases
    ]
    assert "Everything conforms: 6 cases in " in page and "does not hold" not in page
    assert "kinetic-core 0.1.0, machine Linux x86_64." in page
    assert max(map(len, page.splitlines())) <= 120


def test_a_page_stands_by_itself_and_tells_formats_from_names() -> None:
    document = report_of(ReferenceBackend, ("ARCH-21", "ARCH-25"))
    (of_plugin, of_variant) = document["suites"][0]["results"]
    of_variant |= {"case": "ARCH-21-WITH-BIAS", "subject": "WITH-BIAS"}  # a variant's name in capitals is no format
    page = as_markdown(document)
    assert row(page)[6:9] == ["0", "–", "2"]
    assert "](" not in page  # wherever it lies, no link leads nowhere
    for result in (of_plugin, of_variant):
        assert f"| {result['clause']} | {result['statement']} |" in page


@pytest.mark.parametrize("xfails", [{}, {"ARCH-16": "counts its threads"}])
def test_a_page_of_what_does_not(xfails: dict[str, str]) -> None:
    document = report_of(backends.BACKENDS["DependsOnThreads"], ("ARCH-16", "ARCH-21"), xfails=xfails)
    page = as_markdown(document)
    assert row(page)[3:6] == ["1", "0", "1"]
    said = "expected failure: counts its threads" if xfails else "failed: 3 threads against 2"
    for model in ("recurrent-F32", "recurrent-Q8_0"):
        assert f"- architecture tiny-hybrid, ARCH-16-{model}, {said}" in page
    assert ("Not everything conforms" in page) == (not xfails)
    assert "## What does not hold" in page
