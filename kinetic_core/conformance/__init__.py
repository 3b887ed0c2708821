"""The conformance suite: proves that a plugin is exact. `kinetic conform` runs it, pytest can; docs/conformance.md.

from kinetic_core.conformance import ArchitectureConformance

class TestToy(ArchitectureConformance):
    target = Toy
    name = "toy"
"""

from kinetic_core.conformance.architecture import ArchitectureConformance
from kinetic_core.conformance.backend import BackendConformance
from kinetic_core.conformance.cache import CacheConformance
from kinetic_core.conformance.drafter import DrafterConformance
from kinetic_core.conformance.head import HeadConformance
from kinetic_core.conformance.suite import Case, Clause, ClauseFailure, Conformance, NotApplicable

__all__ = [
    "ArchitectureConformance",
    "BackendConformance",
    "CacheConformance",
    "Case",
    "Clause",
    "ClauseFailure",
    "Conformance",
    "DrafterConformance",
    "HeadConformance",
    "NotApplicable",
]
