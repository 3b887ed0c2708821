"""The suite of prefix caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from kinetic_core.conformance.answers import GREEDY, make_engine, require_answer
from kinetic_core.conformance.models import N_BLOCKS, N_SLOTS, ModelFamily, TinyModel
from kinetic_core.conformance.on_models import OnModels, registered_backend
from kinetic_core.conformance.steps import Part, Tokens, step
from kinetic_core.conformance.suite import Conformance, Fault, clause
from kinetic_core.engine.request import GenerationRequest
from kinetic_core.interfaces import Executable, KernelBackend, PrefixCache
from kinetic_core.reference.tiny_hybrid import KEY, TinyHybrid
from kinetic_core.state import BlockPool, SlotPool
from kinetic_core.state.sequence import SequenceState

SALT = "a tenant"


@attrs.frozen
class Attached:
    """A cache with the pools and the executable that it was attached to."""

    cache: PrefixCache
    executable: Executable
    blocks: BlockPool
    slots: SlotPool

    def store(self, tokens: Tokens, salt: str = "") -> None:
        """Run a prompt, offer its state to the cache, and end its sequence."""
        state = SequenceState(self.executable, self.blocks, self.slots)
        state.reserve(len(tokens))
        slot = max(state.slot, 0)
        step(self.executable, Part(tokens, 0, tuple(state.block_ids), slot))
        state.advance(len(tokens))
        self.cache.store(tokens, state.block_ids, state.slot, salt)
        state.release()


class CacheConformance(OnModels, Conformance, kind="cache"):
    """Proves that a cache changes no answer, keeps tenants apart and gives back what running requests need::

        class TestMemory(CacheConformance):
            target = MemoryCache
            name = "memory"

    backend: name or class of what the models run on. formats: the tensor formats they are stored in.
    """

    backend: ClassVar[str | type[KernelBackend]] = "cpu"
    formats: ClassVar[Sequence[str]] = ("F32",)

    @classmethod
    def make_family(cls) -> ModelFamily:
        """The miniature hybrid with everything, with attention alone, and with recurrent states alone."""
        names = ("untied", "attention", "recurrent")
        return ModelFamily(TinyHybrid, KEY, registered_backend(cls.backend), cls.formats, lambda v: v.name in names)

    def attached(self, model: TinyModel) -> Attached:
        """A new cache on new pools."""
        cache: PrefixCache = self.target()
        executable = model.executable()
        attached = Attached(cache, executable, BlockPool(N_BLOCKS), SlotPool(N_SLOTS, has_states=model.has_states))
        cache.attach(executable, attached.blocks, attached.slots)
        return attached

    @clause("CACHE-01", "Answers are those without a cache: resent, continued, cut back, with another end.")
    def warm_equals_cold(self, model: TinyModel) -> None:
        """See the statement."""
        first = model.tokens(80, 300)
        prompts = [first, first, (*first[:-1], 1), (*first, *model.tokens(81, 9)), first[:270], first[:256], first[:40]]
        cold = make_engine(model, model.executable("engine"))
        try:
            expected = [cold.submit(GenerationRequest(p, GREEDY, 12, ignore_end=True)).result()[0] for p in prompts]
        finally:
            cold.close()
        cache: PrefixCache = self.target()
        warm = make_engine(model, model.executable("engine"), cache=cache)
        try:
            for number, (tokens, answer) in enumerate(zip(prompts, expected, strict=True)):
                got = warm.submit(GenerationRequest(tokens, GREEDY, 12, ignore_end=True)).result()[0]
                reused = got.usage.cached_tokens
                require_answer(got, answer, f"request {number}, with {reused} of {len(tokens)} tokens from the cache")
            if warm.statistics()["cache_failed"]:
                raise Fault("the cache failed and was turned off")
        finally:
            warm.close()
        cache.clear()

    @clause("CACHE-02", "What is found is a prefix of the tokens, of the same salt, with the blocks and slot it needs.")
    def found(self, model: TinyModel) -> None:
        """See the statement."""
        at = self.attached(model)
        tokens = model.tokens(82, 270)
        at.store(tokens, SALT)
        for salt in ("", "another tenant"):
            if at.cache.find(tokens, salt) is not None:
                raise Fault(f"a prefix stored with the salt {SALT!r} is found with the salt {salt!r}")
        other = (*tokens[:30], (tokens[30] + 1) % model.vocab, *tokens[31:])
        for asked, shared in ((tokens, 270), (tokens[:269], 269), (other, 30), (tokens[:10], 10)):
            prefix = at.cache.find(asked, SALT)
            if prefix is None:
                continue
            if not 0 < prefix.n_tokens <= shared:
                raise Fault(f"{prefix.n_tokens} tokens are found, expected at most the {shared} that are the same")
            if len(prefix.blocks) != -(-prefix.n_tokens // 256):
                raise Fault(f"{len(prefix.blocks)} blocks are found for {prefix.n_tokens} tokens")
            if (prefix.slot >= 0) != model.has_states:
                raise Fault(
                    f"the slot {prefix.slot} is found, of a program with{'' if model.has_states else 'out'} states"
                )
            at.blocks.release(prefix.blocks)
        at.cache.clear()

    @clause("CACHE-03", "Running requests come first: the cache gives every block and slot back that they need.")
    def gives_back(self, model: TinyModel) -> None:
        """See the statement."""
        at = self.attached(model)
        for seed in range(83, 86):
            at.store(model.tokens(seed, 260))
        if not at.blocks.make_room(N_BLOCKS):
            raise Fault(f"{at.blocks.n_used} of {N_BLOCKS} blocks stay with the cache when all are needed")
        taken: list[int] = []
        for _ in range(N_SLOTS if model.has_states else 0):
            if not at.slots.make_room():
                raise Fault(
                    f"{at.slots.n_used - len(taken)} of {N_SLOTS} slots stay with the cache when all are needed"
                )
            taken.append(at.slots.allocate())

    @clause("CACHE-04", "After clear nothing is found, and every block and slot is free.")
    def cleared(self, model: TinyModel) -> None:
        """See the statement."""
        at = self.attached(model)
        tokens = model.tokens(87, 260)
        for _ in range(2):
            at.store(tokens)
        prefix = at.cache.find(tokens)
        if prefix is not None:
            at.blocks.release(prefix.blocks)
        at.cache.clear()
        if at.cache.find(tokens) is not None:
            raise Fault("a prefix is found after clear")
        if at.blocks.n_used or at.slots.n_used:
            raise Fault(f"{at.blocks.n_used} blocks and {at.slots.n_used} slots are still in use after clear")

    @clause("CACHE-05", "Snapshots are wanted at ascending positions inside the prompt, after its start.")
    def snapshots(self, model: TinyModel) -> None:
        """See the statement."""
        at = self.attached(model)
        tokens = model.tokens(88, 700)
        for start in (0, 1, 255, 256, 500):
            wanted = list(at.cache.wanted_snapshots(tokens, start))
            if wanted != sorted(set(wanted)) or any(not start < position <= len(tokens) for position in wanted):
                raise Fault(f"snapshots are wanted at {wanted} of a prompt of {len(tokens)} tokens from {start} on")

    @clause("CACHE-06", "A cache that denies surviving a restart starts empty.")
    def declared_restart(self, model: TinyModel) -> None:
        """See the statement."""
        tokens = model.tokens(89, 260)
        first = self.attached(model)
        first.store(tokens)
        found = self.attached(model).cache.find(tokens)
        if found is not None and not self.target.capabilities.survives_restart:
            raise Fault(f"the capabilities say survives_restart=False, a new cache finds {found.n_tokens} tokens")
        first.cache.clear()
