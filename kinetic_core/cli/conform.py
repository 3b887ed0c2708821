"""``kinetic conform``: the conformance suite on installed plugins."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kinetic_core.cli.console import note, one_line, progress_bar
from kinetic_core.cli.options import StrictOption, usable_registry
from kinetic_core.errors import RequestError, describe

if TYPE_CHECKING:
    from kinetic_core.conformance.runner import SuiteReport
    from kinetic_core.conformance.suite import Case

FAILED_STATUS = 1


def conform(
    plugin: Annotated[
        str | None,
        typer.Argument(metavar="[PLUGIN]", help="A distribution or entry point. Default: all.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report to FILE.", show_default=False)
    ] = None,
    markdown_file: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Also write a page with a table to FILE.", show_default=False),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="What the models run on, see `kinetic plugins`.")] = "cpu",
    strict: StrictOption = False,
) -> None:
    """Prove that plugins are exact: every numbered clause on every tiny model (docs/conformance.md)."""
    from kinetic_core.conformance import runner
    from kinetic_core.conformance.report import as_markdown

    registry = usable_registry(strict)
    head = runner.header(backend)
    chosen = runner.choose_plugins(registry, plugin)
    for option, file in (("json", json_file), ("markdown", markdown_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise RequestError(describe("no such folder", where=f"--{option}", got=file.parent), field=option)
    print(", ".join(f"{what} {value}" for what, value in head.items()))
    reports: list[SuiteReport] = []
    for each in chosen:
        for suite in runner.suites_of(each, registry, backend):
            with progress_bar() as progress:

                def show(case: Case, number: int, n_cases: int, progress: Any = progress) -> None:
                    progress(case.suite.name, number / n_cases)

                reports.append(runner.run_suite(suite, each, show))
            _print(reports[-1])
    document = runner.as_document(head, reports)
    if json_file is not None:
        _write(json_file, "json", json.dumps(document, ensure_ascii=False, indent=2) + "\n")
    if markdown_file is not None:
        _write(markdown_file, "markdown", as_markdown(document))
    if not reports:
        names = ", ".join(each.name for each in chosen) or "no plugin"
        kinds = ", ".join(runner.SUITES)
        note(describe("error: nothing was checked", got=names, expected=f"a plugin that registers one of: {kinds}"))
    if not runner.conforms(reports):
        raise typer.Exit(FAILED_STATUS)


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        where = f"--{option}"
        raise RequestError(describe("cannot write the report", where=where, got=error), field=option) from error


def _print(report: SuiteReport) -> None:
    """A table of clauses, then every failure with its message; cases that failed in the same way share a line."""
    from rich.console import Console
    from rich.table import Table

    print()
    print(f"{report.kind} {report.name} of {report.distribution} {report.version}")
    print("  " + ", ".join(f"{question}: {_said(answer)}" for question, answer in report.capabilities.items()))
    table = Table("clause", "statement", box=None, pad_edge=False)
    columns = ("passed", "failed", "not applicable", "expected failure")
    for column in ("pass", "fail", "n/a", "xfail"):
        table.add_column(column, justify="right", no_wrap=True)
    clauses: dict[str, tuple[str, Counter[str]]] = {}
    for result in report.results:
        _, counts = clauses.setdefault(result.case.clause.id, (result.case.clause.statement, Counter()))
        counts[result.outcome] += 1
    for clause_id, (statement, counts) in sorted(clauses.items()):
        table.add_row(clause_id, statement, *(str(counts[column] or "") for column in columns))
    Console(file=sys.stdout).print(table)
    for line in report.findings():
        print(one_line(f"FAILED {line}"))
    counted = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in columns)  # type: ignore[arg-type]
    seconds = sum(result.seconds for result in report.results)
    print(f"{'conforms' if report.conforms else 'does not conform'}: {counted}, in {seconds:.1f} s")
    if not report.conforms and not report.count("failed"):
        note("nothing was checked: no clause applies")


def _said(answer: Any) -> str:
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    return " ".join(answer) if isinstance(answer, tuple) else str(answer)
