"""The suite of drafters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kinetic_core.conformance.answers import GREEDY, N_PROMPT, SAMPLED, Borrowed, answer, make_engine, require_answer
from kinetic_core.conformance.driven import Driver, Look
from kinetic_core.conformance.models import ModelFamily, TinyModel
from kinetic_core.conformance.on_models import installed_families, registered_backend, require_program
from kinetic_core.conformance.rows import folded
from kinetic_core.conformance.steps import Tokens
from kinetic_core.conformance.suite import Case, Conformance, Fault, NotApplicable, Scope, clause
from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from kinetic_core.interfaces import Draft, Drafter, Executable, KernelBackend

SALT = "a tenant"
PHRASE = (5, 6, 7, 8, 9, 10, 11)
"""Repeated, it gives a drafter that looks at the context something to guess."""

_FAMILIES: dict[type, dict[str, ModelFamily]] = {}


class DrafterConformance(Conformance, kind="drafter"):
    """Proves that a drafter changes no answer, proposes what the engine can run, and keeps sequences apart::

        class TestGuesser(DrafterConformance):
            target = Guesser
            name = "guesser"

    models: patterns of ``architecture/variant``, such as ``"qwen35/*"``; by default every variant of every installed
        architecture. A model that the drafter does not suit is left out.
    backend: name or class of what they run on. formats: the tensor formats they are stored in.
    """

    models: ClassVar[Sequence[str]] = ("*",)
    backend: ClassVar[str | type[KernelBackend]] = "cpu"
    formats: ClassVar[Sequence[str]] = ("F32",)

    @classmethod
    def families(cls) -> dict[str, ModelFamily]:
        """``general.architecture`` -> its tiny models, found at the first call."""
        if cls not in _FAMILIES:
            _FAMILIES[cls] = installed_families(registered_backend(cls.backend), cls.formats, cls.models)
        return _FAMILIES[cls]

    @classmethod
    def subjects(cls, scope: Scope) -> Iterable[str]:
        """``architecture/variant-FORMAT``; no clause is on variants."""
        if scope == "variant":
            return ()
        return [f"{name}/{label}" for name, family in cls.families().items() for label in family.labels()]

    @classmethod
    def check(cls, case: Case) -> None:
        """Run the method on one model; one that the drafter does not suit is left out."""
        name, _, label = case.subject.partition("/")
        for other, family in cls.families().items():
            if other != name:
                family.close()
        model = cls.families()[name].model(label)
        require_program(model)
        if not cls.target.suits(model.program):
            raise NotApplicable("the drafter does not suit the model")
        method: Any = getattr(cls(), case.clause.method)
        method(model)

    @classmethod
    def close(cls) -> None:
        """Close the loaded model."""
        for family in _FAMILIES.pop(cls, {}).values():
            family.close()

    def drafter(self, executable: Executable | None = None) -> Drafter:
        """A new object of the class under test, attached where an executable is given."""
        drafter: Drafter = self.target()
        if executable is not None:
            drafter.attach(executable)
        return drafter

    @clause("DRAFT-01", "Greedy answers, of random and of repetitive prompts, are those of plain decoding.")
    def greedy(self, model: TinyModel) -> None:
        """See the statement."""
        self._answer(model, GREEDY, "a random", model.tokens(30, N_PROMPT))
        self._answer(model, GREEDY, "a repetitive", _phrases(model, 5))

    @clause("DRAFT-02", "Sampled answers with the same seed are those of plain decoding.")
    def sampled(self, model: TinyModel) -> None:
        """See the statement."""
        for number, sampling in enumerate(SAMPLED):
            if number % 2:
                self._answer(model, sampling, "a random", model.tokens(30, N_PROMPT))
            else:
                self._answer(model, sampling, "a repetitive", _phrases(model, 5))

    def _answer(self, model: TinyModel, sampling: SamplingOptions, what: str, tokens: Tokens) -> None:
        expected = answer(model, sampling, tokens=tokens)
        got = answer(model, sampling, drafter=self.drafter(), tokens=tokens)
        require_answer(got, expected, f"the answer to {what} prompt with the drafter against the plain one")

    @clause("DRAFT-03", "Concurrent requests get the answers that they get alone.")
    def concurrent(self, model: TinyModel) -> None:
        """See the statement."""
        prompts = [_phrases(model, 4), model.tokens(31, 20), (*_phrases(model, 3), 1)]
        expected = [answer(model, GREEDY, tokens=tokens, n_answer=24) for tokens in prompts]
        engine = make_engine(model, model.executable("engine"), drafter=self.drafter())
        try:
            running = [engine.submit(GenerationRequest(p, GREEDY, 24, ignore_end=True)) for p in prompts]
            for number, generation in enumerate(running):
                require_answer(generation.result()[0], expected[number], f"request {number} of three at once")
            if engine.statistics()["drafter_failed"]:
                raise Fault("the drafter failed and was turned off")
        finally:
            engine.close()

    @clause(
        "DRAFT-04", "A draft has at most the tokens asked for, of the vocabulary, parents first, one estimate each."
    )
    def proposals(self, model: TinyModel) -> None:
        """See the statement."""
        self._drive(model, functools.partial(_look_at, model.vocab))

    @clause("DRAFT-05", "A drafter that denies branches proposes chains only.")
    def declared_branches(self, model: TinyModel) -> None:
        """See the statement."""

        def look(most: int, draft: Draft) -> None:
            chain = tuple(range(-1, len(draft.tree.token_ids) - 1))
            if draft.tree.parents != chain:
                raise Fault(f"the capabilities say branches=False, a draft has the parents {draft.tree.parents}")

        if not self.target.capabilities.branches:
            self._drive(model, look)

    @clause("DRAFT-06", "A drafter that denies reading hidden states never asks for them.")
    def declared_hidden(self, model: TinyModel) -> None:
        """See the statement."""
        lent = _Watched(model.executable("engine"))
        engine = make_engine(model, lent, drafter=self.drafter())
        try:
            engine.submit(GenerationRequest(_phrases(model, 5), GREEDY, 24, ignore_end=True)).result()
        finally:
            engine.close()
        if lent.asked and not self.target.capabilities.reads_hidden:
            raise Fault(f"the capabilities say reads_hidden=False, the drafter called {lent.asked[0]}")

    @clause(
        "DRAFT-07",
        "A drafter that denies learning across requests proposes after and beside others what it does alone.",
    )
    def declared_learning(self, model: TinyModel) -> None:
        """What it does learn, tenants do not show each other."""
        learns = self.target.capabilities.learns_across_requests
        salt = SALT if learns else ""
        tokens = model.tokens(32, 20)
        phrase = _phrases(model, 1)
        expected = _proposed(Driver(model.executable(), self.drafter()), model, tokens)
        for beside in (None, (salt, (*tokens, *phrase))):
            driver = Driver(model.executable(), self.drafter())
            for earlier in ((*tokens, *phrase), (*model.tokens(33, 20), *phrase), (*tokens, *phrase)):
                _proposed(driver, model, earlier, salt)
            if _proposed(driver, model, tokens, beside=beside) == expected:
                continue
            if learns:
                raise Fault("what requests of one salt taught changes a proposal for another")
            other = "an earlier request" if beside is None else "a request beside it"
            raise Fault(f"the capabilities say learns_across_requests=False, {other} changes a proposal")

    def _drive(self, model: TinyModel, look: Look) -> None:
        """Two sequences, in turns and together, with drafts of several sizes."""
        driver = Driver(model.executable(), self.drafter(), look)
        first, second = (
            driver.begin(number, tokens, blocks=(number,), slot=number if model.has_states else -1)
            for number, tokens in enumerate((_phrases(model, 3), model.tokens(34, 12)))
        )
        for sequences in ((first,), (second,), (first, second)) * 2:
            for most in (1, 2, 8):
                driver.step(*sequences, most=most)
        for sequence in (first, second):
            driver.end(sequence)


def _phrases(model: TinyModel, n: int) -> Tokens:
    return folded(PHRASE * n, model.vocab)


def _look_at(vocab: int, most: int, draft: Draft) -> None:
    """Raise Fault for a draft that the engine would turn its drafter off for."""
    tree = draft.tree
    if len(tree.token_ids) > most or len(tree.parents) != len(tree.token_ids):
        got = f"{len(tree.token_ids)} tokens with {len(tree.parents)} parents"
        raise Fault(f"a draft of {got}, expected at most {most} of each")
    for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        if not 0 <= token < vocab or not -1 <= parent < node:
            raise Fault(f"node {node} of a draft is token {token} with the parent {parent}")
    if len(draft.expected) != len(tree.token_ids) or not all(0 <= share <= 1 for share in draft.expected):
        raise Fault(f"the estimates of a draft are {draft.expected}, expected one of 0 to 1 per token")


def _proposed(
    driver: Driver, model: TinyModel, tokens: Tokens, salt: str = "", beside: tuple[str, Tokens] | None = None
) -> list[tuple[int, int, Draft | None]]:
    """What is proposed along an answer. beside: salt and tokens of a sequence that runs in the same steps."""
    slots = (0, 1) if model.has_states else (-1, -1)
    sequences = [driver.begin(0, tokens, blocks=(0,), slot=slots[0], salt=salt)]
    if beside is not None:
        sequences.insert(0, driver.begin(1, beside[1], blocks=(1,), slot=slots[1], salt=beside[0]))
    for _ in range(10):
        driver.step(*sequences, most=4)
    for sequence in sequences:
        driver.end(sequence)
    return sequences[-1].drafts


class _Watched(Borrowed):
    """Keeps the names of the calls that read hidden states."""

    def __init__(self, lender: Executable) -> None:
        super().__init__(lender)
        self.asked: list[str] = []

    def hidden(self, first_row: int, n_rows: int) -> Any:
        """As the lender."""
        self.asked.append("hidden")
        return super().hidden(first_row, n_rows)

    def predict(self, batch: Any, hidden: Any) -> None:
        """As the lender."""
        self.asked.append("predict")
        super().predict(batch, hidden)
