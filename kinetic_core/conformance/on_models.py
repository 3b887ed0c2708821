"""What suites that run on tiny models share: their models, one loaded at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kinetic_core.conformance.models import ModelFamily
from kinetic_core.conformance.suite import Case, Scope
from kinetic_core.interfaces import KernelBackend

_FAMILIES: dict[type, ModelFamily] = {}


def registered_backend(backend: str | type[KernelBackend]) -> type[KernelBackend]:
    """The class of a backend that is named or given."""
    if not isinstance(backend, str):
        return backend
    from kinetic_core.plugins import load_registry

    return load_registry().get("backend", backend)


class OnModels:
    """Mixed into a suite: labels, models and clean-up of a `ModelFamily`."""

    formats: ClassVar[Sequence[str]] = ()

    @classmethod
    def make_family(cls) -> ModelFamily:
        """The models of this suite."""
        raise NotImplementedError

    @classmethod
    def family(cls) -> ModelFamily:
        """The tiny models, made at the first call."""
        if cls not in _FAMILIES:
            _FAMILIES[cls] = cls.make_family()
        return _FAMILIES[cls]

    @classmethod
    def subjects(cls, scope: Scope) -> Iterable[str]:
        """``variant`` or ``variant-FORMAT``."""
        return list(cls.family().variants) if scope == "variant" else list(cls.family().labels())

    @classmethod
    def check(cls, case: Case) -> None:
        """Run the method on the family or on one model."""
        family = cls.family()
        method: Any = getattr(cls(), case.clause.method)
        if case.clause.scope == "plugin":
            method(family)
        elif case.clause.scope == "variant":
            method(family.model(f"{case.subject}-F32"))
        else:
            method(family.model(case.subject))

    @classmethod
    def close(cls) -> None:
        """Close the loaded model."""
        family = _FAMILIES.pop(cls, None)
        if family is not None:
            family.close()
