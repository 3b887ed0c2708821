"""The conformance suite on the sources that need no prediction block, on one model of every architecture.

`kinetic conform` runs it on all of them.
"""

from __future__ import annotations

from kinetic_drafters.context import ContextDrafter
from kinetic_drafters.requests import RequestsDrafter

from kinetic_core.conformance import DrafterConformance
from kinetic_core.conformance.on_models import installed_families, registered_backend

MODELS = (
    "tiny-hybrid/untied",
    "tiny-hybrid/mamba",
    "llama/untied",
    "qwen35/untied",
    "qwen35moe/experts",
    "lfm2/tied",
    "lfm2moe/dense-first",
    "lfm3/untied",
    "granitehybrid/experts",
    "falcon-h1/norm",
)


class TestContext(DrafterConformance):
    target = ContextDrafter
    name = "context"
    models = MODELS


class TestRequests(DrafterConformance):
    target = RequestsDrafter
    name = "requests"
    models = MODELS


def test_every_architecture_is_among_the_models() -> None:
    installed = installed_families(registered_backend("reference"), ("F32",), ("*",))
    assert {model.partition("/")[0] for model in MODELS} == set(installed)
