from __future__ import annotations

import pytest
from text_data import FAMILIES, tokenizer_of

from kinetic_core.text import Tokenizer


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(family: str) -> Tokenizer:
    return tokenizer_of(family)
