"""The conformance suite on the sources that need no prediction block."""

from __future__ import annotations

from kinetic_drafters.context import ContextDrafter
from kinetic_drafters.requests import RequestsDrafter

from kinetic_core.conformance import DrafterConformance


class TestContext(DrafterConformance):
    target = ContextDrafter
    name = "context"


class TestRequests(DrafterConformance):
    target = RequestsDrafter
    name = "requests"
