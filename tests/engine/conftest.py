"""A tiny hybrid model on the reference backend, and engines of any size around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from executables import HashModel

from kinetic_core.engine.engine import Engine, EngineOptions
from kinetic_core.engine.step_costs import StepCosts, prior
from kinetic_core.interfaces import Executable, LoadOptions
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.tiny_hybrid import TinyHybrid, tiny_hybrid_source
from kinetic_core.text import Tokenizer

MakeEngine = Callable[..., Engine]


class TinyModel:
    """What engines are made of: the source is random, so that answers differ, or predictable."""

    def __init__(self, *, predictable: bool, seed: int = 0) -> None:
        self.source = tiny_hybrid_source(seed, predictable=predictable)
        self.architecture = TinyHybrid(self.source)
        self.program = record_program(self.architecture, FullHead(), self.source)
        self.tokenizer = Tokenizer.from_metadata(self.source.metadata.raw)

    def load(self, **options: Any) -> Executable:
        return ReferenceBackend().load(self.program, self.source, LoadOptions(**options))

    def load_hash(self, **options: Any) -> Any:
        return HashModel(options["n_blocks"], options["n_slots"], self.architecture.vocab_size)

    def engine(self, wrap: Callable[[Executable], Executable] = lambda executable: executable, **sizes: Any) -> Engine:
        cache, drafter = sizes.pop("cache", None), sizes.pop("drafter", None)
        load = self.load_hash if sizes.pop("hashed", False) else self.load
        drafters = {} if drafter is None else drafter if isinstance(drafter, dict) else {"guesser": drafter}
        values = {"n_blocks": 24, "n_slots": 8, "max_rows": 288, "max_outputs": 32, **sizes}
        values = {
            "context_length": min(2048, values["n_blocks"] * 256),
            "has_states": True,
            "draft_policy": "always",
            **values,
        }
        options = EngineOptions(**values)
        loaded = {name: values[name] for name in ("n_blocks", "n_slots", "max_rows", "max_outputs")}
        executable = wrap(load(**loaded))
        return Engine(executable, self.tokenizer, self.architecture.vocab_size, options, cache=cache, drafters=drafters)


@pytest.fixture(scope="session")
def predictable() -> TinyModel:
    return TinyModel(predictable=True)


@pytest.fixture(scope="session")
def random_model() -> TinyModel:
    return TinyModel(predictable=False)


@pytest.fixture
def make_engine(predictable: TinyModel, random_model: TinyModel) -> Iterator[MakeEngine]:
    """Makes engines and closes them; afterwards none may hold a block or a slot.

    random: a random model, not the predictable one. hashed: no model but a `HashModel`.
    """
    engines: list[Engine] = []

    def make(*, random: bool = False, **sizes: Any) -> Engine:
        engines.append((random_model if random else predictable).engine(**sizes))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        statistics = engine.statistics()
        assert (statistics["blocks_used"], statistics["slots_used"], statistics["open_requests"]) == (0, 0, 0)


@pytest.fixture
def by_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps cost what the prior says, whatever this machine does meanwhile."""
    monkeypatch.setattr(StepCosts, "seconds", lambda _self, n_rows: 0.01 * prior(n_rows))
