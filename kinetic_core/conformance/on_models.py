"""What suites that run on tiny models share: their models, one loaded at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kinetic_core.conformance.models import ModelFamily, TinyModel
from kinetic_core.conformance.suite import Case, Fault, Scope, told
from kinetic_core.interfaces import KernelBackend

_FAMILIES: dict[type, ModelFamily] = {}


def registered_backend(backend: str | type[KernelBackend]) -> type[KernelBackend]:
    """The class of a backend that is named or given."""
    if not isinstance(backend, str):
        return backend
    from kinetic_core.plugins import load_registry

    return load_registry().get("backend", backend)


def _require_program(model: TinyModel) -> None:
    """Raise Fault, the same for every clause, where the variant as `tiny()` describes it cannot even be recorded."""
    try:
        _ = model.program
    except Exception as error:
        text = told(error, model.architecture_class)
        raise Fault(f"the variant {model.variant.name!r} of tiny() cannot be recorded: {text}") from error


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
        else:
            model = family.model(f"{case.subject}-F32" if case.clause.scope == "variant" else case.subject)
            _require_program(model)
            method(model)

    @classmethod
    def close(cls) -> None:
        """Close the loaded model."""
        family = _FAMILIES.pop(cls, None)
        if family is not None:
            family.close()
