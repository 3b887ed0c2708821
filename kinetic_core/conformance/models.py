"""What clauses are run on: a plugin's tiny models, loaded once and shared by the clauses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from kinetic_core.conformance.formats import stored_types, with_types
from kinetic_core.conformance.steps import F32, Tokens, prompt
from kinetic_core.conformance.suite import Fault
from kinetic_core.gguf import GGMLType, MemoryTensors
from kinetic_core.interfaces import Architecture, Executable, KernelBackend, LoadOptions, OutputHead, TinyVariant
from kinetic_core.program import Program
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model

N_BLOCKS, N_SLOTS, MAX_ROWS = 6, 6, 320
SEED = 3
ONE_BY_ONE = 32
"""Tokens at the end of a sequence that always run one by one."""
POISON = b"\xff"
"""A byte that, repeated, is no number in any float type: what nobody wrote must reach no answer."""


def tokens_of(seed: int, n: int, vocab: int) -> Tokens:
    """n tokens that depend on seed, n and vocab only."""
    return tuple(np.random.default_rng([seed, 5]).integers(0, vocab, n).tolist())


class TinyModel:
    """One tiny model: a variant's random weights in one tensor format, with the executables that clauses share.

    variant, tensor_type, source: what it is made of. others: all variants of the family.
    """

    def __init__(
        self,
        architecture: type[Architecture],
        name: str,
        variant: TinyVariant,
        tensor_type: str,
        backend: type[KernelBackend],
        head: type[OutputHead] = FullHead,
    ) -> None:
        self.architecture_class = architecture
        self.name = name
        self.variant = variant
        self.tensor_type = tensor_type
        self.backend = backend
        self._head = head
        self._open: dict[Any, Executable] = {}
        self._plain: dict[tuple[Tokens, tuple[int, ...]], tuple[F32, bytes]] = {}

    @functools.cached_property
    def source(self) -> MemoryTensors:
        """The weights."""
        source = random_model(self.name, self.variant, SEED)
        types = stored_types(self.variant, self.tensor_type)
        return with_types(source, types) if types else source

    @functools.cached_property
    def architecture(self) -> Architecture:
        """The architecture's object for these weights."""
        return self.architecture_class(self.source)

    @functools.cached_property
    def program(self) -> Program:
        """The recorded program."""
        return record_program(self.architecture, self._head(), self.source)

    @property
    def vocab(self) -> int:
        """Tokens that have logits."""
        return self.program.logits.width

    @property
    def has_states(self) -> bool:
        """Has the program recurrent states?"""
        return bool(self.program.states)

    def tokens(self, seed: int, n: int) -> Tokens:
        """n random tokens of the vocabulary."""
        return tokens_of(seed, n, self.vocab)

    def executable(self, role: str = "main", *, n_threads: int = 2, kv_type: str | None = None) -> Executable:
        """The executable of this role, loaded at the first call, with empty slots and poisoned blocks."""
        return self._fresh(self.backend, role, n_threads, kv_type)

    def reference(self, kv_type: str, backend: type[ReferenceBackend] = ReferenceBackend) -> Executable:
        """The NumPy reference of this model, or a variation of it."""
        return self._fresh(backend, "reference", 1, kv_type)

    def _fresh(self, backend: type[KernelBackend], role: str, n_threads: int, kv_type: str | None) -> Executable:
        kv_type = kv_type or default_kv_type(backend)
        key = (backend, role, n_threads, kv_type)
        if key not in self._open:
            self._open[key] = self.load(backend, n_threads=n_threads, kv_type=kv_type)
        executable = self._open[key]
        for slot in range(N_SLOTS):
            executable.clear_slot(slot)
        for block in range(N_BLOCKS):
            executable.write_block(block, POISON * len(executable.read_block(block)))
        return executable

    def load(self, backend: type[KernelBackend] | None = None, **options: Any) -> Executable:
        """A new executable that the caller closes."""
        backend = backend or self.backend
        sizes = LoadOptions(
            n_threads=2,
            kv_type=default_kv_type(backend),
            n_blocks=N_BLOCKS,
            n_slots=N_SLOTS,
            max_rows=MAX_ROWS,
            max_outputs=MAX_ROWS,
        )
        return backend().load(self.program, self.source, attrs.evolve(sizes, **options))

    def plain(self, tokens: Tokens, *, singly: bool = False) -> tuple[F32, bytes]:
        """(logits f32[tokens, vocab], recurrent states) of tokens run alone: what everything is held to.

        The last ones run one by one; those before them in one batch, which is much faster and which the first clause
        holds to running one by one, or `singly` as well.
        """
        sizes = (1,) if singly else (max(1, len(tokens) - ONE_BY_ONE), 1)
        if (tokens, sizes) not in self._plain:
            executable = self.executable("plain")
            rows = prompt(executable, tokens, sizes)
            self._plain[tokens, sizes] = rows, executable.read_slot(0)
        return self._plain[tokens, sizes]

    def close(self) -> None:
        """Close every executable."""
        for executable in self._open.values():
            executable.close()
        self._open.clear()


def default_kv_type(backend: type[KernelBackend]) -> str:
    """The type of the cache that clauses use where nothing depends on it: the first that the backend names."""
    return backend.capabilities.kv_types[0]


class ModelFamily:
    """The tiny models of a suite, of which one at a time is loaded.

    architecture, name: the class and its ``general.architecture``. backend: what they run on.
    variants: which of the architecture's variants; all of them by default. head: their output head.
    formats: tensor formats; one that no tensor of a variant can be stored in is left out for that variant.
    """

    def __init__(
        self,
        architecture: type[Architecture],
        name: str,
        backend: type[KernelBackend],
        formats: Sequence[str],
        variants: Callable[[TinyVariant], bool] = lambda variant: True,
        head: type[OutputHead] = FullHead,
    ) -> None:
        self.architecture = architecture
        self.name = name
        self.backend = backend
        self.formats = tuple(formats)
        self._chosen = variants
        self._head = head
        self._current: tuple[str, TinyModel] | None = None
        self._digests: dict[str, dict[str, str]] = {}

    @functools.cached_property
    def variants(self) -> dict[str, TinyVariant]:
        """The family's variants by name."""
        return {variant.name: variant for variant in self.architecture.tiny() if self._chosen(variant)}

    def labels(self) -> Iterable[str]:
        """``variant-FORMAT`` of every model."""
        for variant in self.variants.values():
            stored: list[dict[str, GGMLType]] = []
            for tensor_type in self.formats:
                types = stored_types(variant, tensor_type)
                if types not in stored and (types or tensor_type == "F32"):
                    stored.append(types)
                    yield f"{variant.name}-{tensor_type}"

    def _make(self, variant: TinyVariant, tensor_type: str) -> TinyModel:
        return TinyModel(self.architecture, self.name, variant, tensor_type, self.backend, self._head)

    def model(self, label: str) -> TinyModel:
        """The model of this label; another one that was loaded is closed."""
        if self._current is None or self._current[0] != label:
            self.close()
            variant, _, tensor_type = label.rpartition("-")
            self._current = label, self._make(self.variants[variant], tensor_type)
        return self._current[1]

    def digests(self, lowering: str) -> dict[str, str]:
        """Label -> digest of every model's results in a process with this lowering; run once for all."""
        if lowering not in self._digests:
            from kinetic_core.conformance.lowerings import digests_elsewhere

            self._digests[lowering] = digests_elsewhere(self, lowering)
        return self._digests[lowering]

    def close(self) -> None:
        """Close what is loaded."""
        if self._current is not None:
            self._current[1].close()
            self._current = None


def importable(value: type) -> str:
    """``module:Class`` of a class that another process can import. Raises Fault for any other class."""
    if "<locals>" in value.__qualname__ or value.__module__ == "__main__":
        raise Fault(f"another process cannot import {value.__qualname__}: define it in a module")
    return f"{value.__module__}:{value.__qualname__}"
