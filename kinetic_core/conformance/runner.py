"""Running suites without pytest: every case of what a plugin registers, with outcomes and a report."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import attrs
import numpy as np

from kinetic_core import __version__
from kinetic_core.conformance.architecture import ArchitectureConformance
from kinetic_core.conformance.backend import BackendConformance
from kinetic_core.conformance.cache import CacheConformance
from kinetic_core.conformance.drafter import DrafterConformance
from kinetic_core.conformance.head import HeadConformance
from kinetic_core.conformance.on_models import registered_backend
from kinetic_core.conformance.suite import Case, ClauseFailure, Conformance, NotApplicable, told
from kinetic_core.errors import PluginError, describe
from kinetic_core.plugins import Plugin, Registered, Registry
from kinetic_core.reference.backend import ReferenceBackend

Outcome = Literal["passed", "failed", "not applicable", "expected failure"]

SUITES: dict[str, type[Conformance]] = {
    "architecture": ArchitectureConformance,
    "backend": BackendConformance,
    "drafter": DrafterConformance,
    "cache": CacheConformance,
    "head": HeadConformance,
}
"""Kind -> its suite."""
REFERENCE_FORMATS = ("F32", "Q8_0")
"""The NumPy reference computes on the numbers that a format stands for, so one quantized format shows all."""


@attrs.frozen
class Result:
    """One case and what became of it. message: why it failed or does not apply; empty when it passed."""

    case: Case
    outcome: Outcome
    message: str
    seconds: float


@attrs.frozen
class SuiteReport:
    """The results of one suite: the kind and name of what was checked, and its capabilities."""

    kind: str
    name: str
    distribution: str
    version: str
    capabilities: dict[str, Any]
    results: tuple[Result, ...]

    def count(self, outcome: Outcome) -> int:
        """Cases that ended so."""
        return sum(result.outcome == outcome for result in self.results)

    def findings(self) -> list[str]:
        """One line per message of failed cases, with the first case and how many more ended with the same message."""
        cases: dict[str, list[str]] = {}
        for result in self.results:
            if result.outcome == "failed":
                cases.setdefault(result.message, []).append(result.case.id)
        return [
            f"{first}{f' and {len(others)} more' if others else ''}: {message}"
            for message, (first, *others) in cases.items()
        ]

    @property
    def conforms(self) -> bool:
        """No case failed, and some case was checked."""
        return self.count("failed") == 0 and self.count("passed") > 0


def choose_plugins(registry: Registry, wanted: str | None) -> list[Plugin]:
    """The plugins of a distribution or entry point of this name, or all that loaded.

    Raises PluginError for a name that no plugin has, and for a plugin that could not be loaded.
    """
    plugins = [plugin for plugin in registry.plugins if not plugin.excluded]
    if wanted is not None:
        same = wanted.lower().replace("_", "-")
        chosen = [p for p in plugins if same in (p.name.lower().replace("_", "-"), p.distribution)]
        if not chosen:
            names = sorted({name for plugin in plugins for name in (plugin.name, plugin.distribution)})
            raise PluginError(describe("no plugin has this name", got=repr(wanted), expected=", ".join(names)))
        plugins = chosen
    for plugin in plugins:
        if plugin.error:
            raise PluginError(describe(f"the plugin {plugin.name} cannot be loaded", got=plugin.error))
    return plugins


def suites_of(plugin: Plugin, registry: Registry, backend: str = "cpu") -> list[type[Conformance]]:
    """A suite for everything that a plugin registers and that one exists for.

    Raises PluginError when a registered class cannot be used.
    """
    suites = []
    for entry in plugin.registered:
        base = SUITES.get(entry.kind)
        if base is not None:
            suites += [_suite(base, entry, key, registry, backend) for key in _keys(entry)]
    return suites


def _keys(entry: Registered) -> tuple[str, ...]:
    """An architecture is checked as what files call it, everything else by its name."""
    return (entry.registration.keys or (entry.registration.name,))[:1]


def _suite(base: type[Conformance], entry: Registered, key: str, registry: Registry, backend: str) -> type[Conformance]:
    resolve: Any = registry.get  # the kind is one of many, so no overload fits
    values: dict[str, Any] = {"target": resolve(entry.kind, entry.registration.name), "name": key}
    if hasattr(base, "backend"):
        values["backend"] = registry.get("backend", backend)
    if values["target"] is ReferenceBackend:
        values["formats"] = REFERENCE_FORMATS
    return type(f"Test{entry.registration.name}", (base,), values)


def run_suite(
    suite: type[Conformance], plugin: Plugin, done: Callable[[Case, int, int], None] = lambda case, at, n: None
) -> SuiteReport:
    """Run every case of a suite. done: called before each case with its number and how many there are.

    A suite whose cases cannot even be listed fails at its first clause.
    """
    results: list[Result] = []
    try:
        try:
            cases = suite.cases()
        except Exception as error:
            case = Case(suite, suite.clauses()[0], "")
            message = f"the models cannot be made: {told(error, suite.target)}"
            results.append(Result(case, "failed", message, 0.0))
            cases = []
        for number, case in enumerate(cases):
            done(case, number, len(cases))
            results.append(run_case(case))
    finally:
        suite.close()
    capabilities = dataclasses.asdict(suite.target.capabilities)
    return SuiteReport(suite.kind, suite.name, plugin.distribution, plugin.version, capabilities, tuple(results))


def run_case(case: Case) -> Result:
    """Run one case; an expected failure that passes has failed."""
    begun = time.perf_counter()
    outcome: Outcome = "passed"
    message = ""
    expected = case.expected_failure
    try:
        case.run()
        if expected is not None:
            outcome, message = "failed", f"passes, although it is expected to fail: {expected}"
    except NotApplicable as reason:
        outcome, message = "not applicable", str(reason)
    except ClauseFailure as failure:
        outcome, message = ("failed", failure.message) if expected is None else ("expected failure", expected)
    return Result(case, outcome, message, time.perf_counter() - begun)


def header(backend: str) -> dict[str, str]:
    """What the results depend on: versions, backend, lowering, machine."""
    chosen = registered_backend(backend)
    versions = {"kinetic-core": __version__, "python": platform.python_version(), "numpy": np.__version__}
    lowering = "numpy"
    if backend == "cpu":
        from importlib.metadata import version

        from kinetic_core.backends.cpu.target import choose_lowering

        versions["numba"] = version("numba")
        lowering = choose_lowering()
    return {
        **versions,
        "backend": f"{backend} ({chosen.__module__}:{chosen.__qualname__})",
        "lowering": lowering,
        "machine": f"{platform.system()} {platform.machine()}",
    }


def as_document(head: dict[str, str], reports: Sequence[SuiteReport]) -> dict[str, Any]:
    """The report as one JSON document."""
    return {
        "header": head,
        "conforms": conforms(reports),
        "suites": [
            {
                "kind": report.kind,
                "name": report.name,
                "distribution": report.distribution,
                "version": report.version,
                "capabilities": report.capabilities,
                "conforms": report.conforms,
                "results": [
                    {
                        "case": result.case.id,
                        "clause": result.case.clause.id,
                        "subject": result.case.subject,
                        "format": result.case.tensor_format,
                        "statement": result.case.clause.statement,
                        "outcome": result.outcome,
                        "message": result.message,
                        "seconds": round(result.seconds, 4),
                    }
                    for result in report.results
                ],
            }
            for report in reports
        ],
    }


def conforms(reports: Iterable[SuiteReport]) -> bool:
    """Everything conforms, and there was something to check."""
    listed = list(reports)
    return bool(listed) and all(report.conforms for report in listed)
