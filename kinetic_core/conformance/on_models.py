"""What suites that run on tiny models share: their models, one loaded at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from kinetic_core.conformance.models import ModelFamily, TinyModel
from kinetic_core.conformance.suite import Case, Fault, Scope, told
from kinetic_core.errors import describe
from kinetic_core.interfaces import KernelBackend, TinyVariant

_FAMILIES: dict[type, ModelFamily] = {}


def registered_backend(backend: str | type[KernelBackend]) -> type[KernelBackend]:
    """The class of a backend that is named or given."""
    if not isinstance(backend, str):
        return backend
    from kinetic_core.plugins import load_registry

    return load_registry().get("backend", backend)


def installed_families(
    backend: type[KernelBackend], formats: Sequence[str], patterns: Sequence[str]
) -> dict[str, ModelFamily]:
    """``general.architecture`` -> its variants, of every installed architecture, that a pattern fits.

    patterns: of ``architecture/variant``. Raises ValueError for one that fits nothing.
    """
    from kinetic_core.plugins import load_registry

    registry = load_registry()
    families: dict[str, ModelFamily] = {}
    known: list[str] = []
    for entry in registry.registered("architecture"):
        name = (entry.registration.keys or (entry.registration.name,))[0]
        architecture = registry.get("architecture", entry.registration.name)
        labels = {f"{name}/{variant.name}": variant.name for variant in architecture.tiny()}
        known += labels
        wanted = {labels[label] for label in labels if any(fnmatchcase(label, pattern) for pattern in patterns)}
        if wanted:
            families[name] = ModelFamily(architecture, name, backend, formats, functools.partial(_is_among, wanted))
    for pattern in patterns:
        if not any(fnmatchcase(label, pattern) for label in known):
            raise ValueError(
                describe("no variant of an installed architecture fits", got=repr(pattern), expected=", ".join(known))
            )
    return families


def _is_among(names: set[str], variant: TinyVariant) -> bool:
    return variant.name in names


def require_program(model: TinyModel) -> None:
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
            require_program(model)
            method(model)

    @classmethod
    def close(cls) -> None:
        """Close the loaded model."""
        family = _FAMILIES.pop(cls, None)
        if family is not None:
            family.close()
