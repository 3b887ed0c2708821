"""The report of a run as a page of Markdown, for a project's documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

Document = Mapping[str, Any]
"""What `runner.as_document` gives."""


def as_markdown(document: Document) -> str:
    """A page: what was run on what, one line per suite, then every case that failed, and the clauses in words."""
    header, suites = document["header"], document["suites"]
    versions = ", ".join(f"{what} {value}" for what, value in header.items())
    seconds = sum(_seconds(suite) for suite in suites)
    n_cases = sum(len(suite["results"]) for suite in suites)
    lines = [
        "# Conformance report",
        "",
        "Written by `kinetic conform --markdown FILE`. The clauses are listed at the end.",
        "",
        *textwrap.wrap(f"{versions}.", 120),
        "",
        f"{'Everything conforms' if document['conforms'] else 'Not everything conforms'}: {n_cases} cases in "
        f"{seconds:.0f} s.",
        "",
        "| plugin | kind | name | clauses that hold | do not apply | failed | models | formats | cases | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(suite) for suite in suites),
    ]
    failures = [_failure(suite, result) for suite in suites for result in suite["results"] if _is_open(result)]
    if failures:
        lines += ["", "## What does not hold", "", *failures]
    statements = {result["clause"]: result["statement"] for suite in suites for result in suite["results"]}
    clauses = [f"| {clause} | {statement} |" for clause, statement in sorted(statements.items())]
    lines += ["", "## The clauses", "", "| clause | statement |", "|---|---|", *clauses]
    return "\n".join(lines) + "\n"


def _row(suite: Document) -> str:
    results = suite["results"]
    clauses = {result["clause"] for result in results}
    failed = {result["clause"] for result in results if _is_open(result)}
    held = {result["clause"] for result in results if result["outcome"] == "passed"} - failed
    models = {result["subject"] for result in results if result["format"]}
    formats = _in_order(result["format"] for result in results)
    cells = [
        f"{suite['distribution']} {suite['version']}",
        suite["kind"],
        suite["name"],
        *(len(each) for each in (held, clauses - held - failed, failed, models)),
        " ".join(formats) or "–",
        len(results),
        f"{_seconds(suite):.1f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _failure(suite: Document, result: Document) -> str:
    message = " ".join(result["message"].split())
    return f"- {suite['kind']} {suite['name']}, {result['case']}, {result['outcome']}: {message}"


def _is_open(result: Document) -> bool:
    return result["outcome"] in ("failed", "expected failure")


def _in_order(names: Iterable[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name]


def _seconds(suite: Document) -> float:
    return float(sum(result["seconds"] for result in suite["results"]))
