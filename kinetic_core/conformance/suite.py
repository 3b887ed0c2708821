"""What every suite shares: numbered clauses, the cases they make, and how one case is run.

A suite is a class per kind of plugin. Its clauses are methods marked with `clause`; each takes a subject, returns when
the clause holds, raises `Fault` when it does not, and `NotApplicable` when it says nothing about this subject. A case
is one clause on one subject. pytest runs a case as a test, `kinetic conform` runs the same cases itself.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import attrs

Scope = Literal["model", "variant", "plugin"]
"""What a clause is run on: every model (variant and tensor format), every variant once, or the plugin once."""

SETTINGS = frozenset({"target", "name", "backend", "formats", "models", "xfails"})
"""What a subclass may set."""


class Fault(Exception):  # noqa: N818 - a finding, not an error of the suite
    """What a clause found; the suite turns it into a `ClauseFailure`."""


class NotApplicable(Exception):  # noqa: N818 - a finding, not an error of the suite
    """The clause says nothing about this subject; the message says why."""


class ClauseFailure(AssertionError):  # noqa: N818 - reads as the verdict it is
    """A clause does not hold. `clause_id` names it, `message` says what was found."""

    def __init__(self, clause_id: str, message: str) -> None:
        super().__init__(f"{clause_id}: {message}")
        self.clause_id = clause_id
        self.message = message


@attrs.frozen
class Clause:
    """One numbered sentence. method: the name of the suite's method that checks it."""

    id: str
    statement: str
    scope: Scope
    method: str


Check = TypeVar("Check", bound=Callable[..., None])


def clause(clause_id: str, statement: str, scope: Scope = "model") -> Callable[[Check], Check]:
    """Mark a method as the check of a clause."""

    def mark(method: Check) -> Check:
        method.conformance_clause = Clause(clause_id, statement, scope, method.__name__)  # type: ignore[attr-defined]
        return method

    return mark


@attrs.frozen(eq=False)
class Case:
    """One clause on one subject.

    subject: ``variant-FORMAT`` of a model, the name of a variant, or nothing for the plugin as a whole.
    """

    suite: type[Conformance]
    clause: Clause
    subject: str

    @property
    def id(self) -> str:
        """``ARCH-04-untied-Q8_0``: what reports show, and what `xfails` may name."""
        return f"{self.clause.id}-{self.subject}" if self.subject else self.clause.id

    @property
    def tensor_format(self) -> str:
        """The format of the model's tensors; nothing for a variant and for the plugin as a whole."""
        return self.subject.rpartition("-")[2] if self.clause.scope == "model" else ""

    @property
    def expected_failure(self) -> str | None:
        """Why this case is expected to fail, if it is."""
        return self.suite.xfails.get(self.id, self.suite.xfails.get(self.clause.id))

    def run(self) -> None:
        """Return when the clause holds. Raises ClauseFailure, or NotApplicable with the reason."""
        try:
            self.suite.check(self)
        except NotApplicable:
            raise
        except Fault as fault:
            raise ClauseFailure(self.clause.id, str(fault)) from None
        except Exception as error:  # a plugin may raise anything; that is a failure of the clause, not of the suite
            raise ClauseFailure(
                self.clause.id, f"an error ended the check: {told(error, self.suite.target)}"
            ) from error


def told(error: Exception, target: Any) -> str:
    """An error in one line, and where in the package of `target` it came about, if it did there."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    package = getattr(target, "__module__", "").partition(".")[0]
    if package != __name__.partition(".")[0]:
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            if frame.f_globals.get("__name__", "").partition(".")[0] == package:
                return f"{text} ({Path(frame.f_code.co_filename).name}:{line}, in {frame.f_code.co_name})"
    return text


class Conformance:
    """Base of the suites. A plugin's own tests subclass the suite of its kind and set what it is about::

        class TestToy(ArchitectureConformance):
            target = Toy
            name = "toy"

    target: the class under test.
    name:   what it is registered as (for an architecture: the value of ``general.architecture``).
    xfails: clause or case id -> why it is expected to fail; one that passes is a failure.

    Everything else belongs to the suite: a subclass that overrides it is refused.
    """

    kind: ClassVar[str] = ""
    target: ClassVar[Any] = None
    name: ClassVar[str] = ""
    xfails: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, *, kind: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if kind is not None:
            if cls.kind:
                raise TypeError(f"{cls.__name__} cannot be a new kind of suite: it is one of {cls.kind}s")
            cls.kind = kind
            return
        if not cls.kind:
            raise TypeError(f"{cls.__name__} must subclass the suite of a kind, such as ArchitectureConformance")
        base = next(c for c in cls.__mro__ if "kind" in vars(c))
        for name in dir(base):
            if name.startswith("__") or name in SETTINGS:
                continue
            if inspect.getattr_static(cls, name) is not inspect.getattr_static(base, name):
                raise TypeError(
                    f"{cls.__name__} overrides {name} of {base.__name__}, which is refused; an expected failure goes "
                    "into xfails, with its reason"
                )
        _check_xfails(cls)

    # what there is to check

    @classmethod
    def clauses(cls) -> tuple[Clause, ...]:
        """Every clause of this kind, by number."""
        found = (getattr(inspect.getattr_static(cls, name), "conformance_clause", None) for name in dir(cls))
        return tuple(sorted((c for c in found if c is not None), key=lambda c: c.id))

    @classmethod
    def subjects(cls, scope: Scope) -> Iterable[str]:
        """Labels of what clauses of this scope are run on."""
        raise NotImplementedError

    @classmethod
    def cases(cls) -> list[Case]:
        """Every clause on every subject; those of one model lie together, so that it is loaded once."""
        cases = [Case(cls, c, "") for c in cls.clauses() if c.scope == "plugin"]
        variants, models = list(cls.subjects("variant")), list(cls.subjects("model"))
        for label in variants:
            cases += [Case(cls, c, label) for c in cls.clauses() if c.scope == "variant"]
        for label in models:
            cases += [Case(cls, c, label) for c in cls.clauses() if c.scope == "model"]
        return cases

    @classmethod
    def check(cls, case: Case) -> None:
        """Run the method of a case's clause on its subject."""
        raise NotImplementedError

    @classmethod
    def close(cls) -> None:
        """Free what the cases loaded."""

    # pytest

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test per case; strict expected failures."""
        import pytest

        if "case" not in metafunc.fixturenames:
            return
        cases = self.cases()
        if not cases:
            raise ValueError(f"{type(self).__name__} has nothing to check")
        parameters = []
        for case in cases:
            reason = case.expected_failure
            marks = [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason, raises=ClauseFailure)]
            parameters.append(pytest.param(case, id=case.id, marks=marks))
        metafunc.parametrize("case", parameters)

    def test_clause(self, case: Case) -> None:
        """Run one case."""
        import pytest

        try:
            case.run()
        except NotApplicable as reason:
            pytest.skip(str(reason))

    @classmethod
    def teardown_class(cls) -> None:
        """After the last test: free what was loaded."""
        cls.close()


def _check_xfails(cls: type[Conformance]) -> None:
    known = {c.id for c in cls.clauses()}
    for label, reason in cls.xfails.items():
        if not any(label == known_id or label.startswith(f"{known_id}-") for known_id in known):
            raise TypeError(f"{cls.__name__}.xfails names no clause: {label!r}")
        if not isinstance(reason, str) or not reason.strip():
            raise TypeError(f"{cls.__name__}.xfails gives no reason for {label}")
