"""The backends that the goldens are run on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from golden_models import Backend

from kinetic_core.interfaces import Executable

BACKENDS = [Backend("reference"), Backend("cpu", rounds_activations=True)]


@pytest.fixture(scope="session", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture
def load(backend: Backend) -> Iterator[Any]:
    """load(model) -> a fresh executable; closed after the test."""
    opened: list[Executable] = []

    def open_model(model: str) -> Executable:
        opened.append(backend.load(model))
        return opened[-1]

    yield open_model
    for executable in opened:
        executable.close()
