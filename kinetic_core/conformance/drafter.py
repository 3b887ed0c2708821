"""The suite of drafters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kinetic_core.conformance.answers import GREEDY, N_PROMPT, SAMPLED, Borrowed, answer, make_engine, require_answer
from kinetic_core.conformance.models import ModelFamily, TinyModel
from kinetic_core.conformance.on_models import OnModels, registered_backend
from kinetic_core.conformance.suite import Conformance, Fault, clause
from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from kinetic_core.interfaces import Draft, Drafter, Executable, KernelBackend
from kinetic_core.reference.tiny_hybrid import KEY, TinyHybrid

SALT = "a tenant"
PHRASE = (5, 6, 7, 8, 9, 10, 11)
"""Repeated, it gives a drafter that looks at the context something to guess."""


class DrafterConformance(OnModels, Conformance, kind="drafter"):
    """Proves that a drafter changes no answer, proposes what the engine can run, and keeps sequences apart::

        class TestGuesser(DrafterConformance):
            target = Guesser
            name = "guesser"

    backend: name or class of what the models run on. formats: the tensor formats they are stored in.
    """

    backend: ClassVar[str | type[KernelBackend]] = "cpu"
    formats: ClassVar[Sequence[str]] = ("F32",)

    @classmethod
    def make_family(cls) -> ModelFamily:
        """The miniature hybrid with everything, and the one with a prediction block."""
        names = ("untied", "prediction")
        return ModelFamily(TinyHybrid, KEY, registered_backend(cls.backend), cls.formats, lambda v: v.name in names)

    def drafter(self, executable: Executable | None = None) -> Drafter:
        """A new object of the class under test, attached where an executable is given."""
        drafter: Drafter = self.target()
        if executable is not None:
            drafter.attach(executable)
        return drafter

    @clause("DRAFT-01", "Greedy answers, of random and of repetitive prompts, are those of plain decoding.")
    def greedy(self, model: TinyModel) -> None:
        """See the statement."""
        self._answers(model, (GREEDY,))

    @clause("DRAFT-02", "Sampled answers with the same seed are those of plain decoding.")
    def sampled(self, model: TinyModel) -> None:
        """See the statement."""
        self._answers(model, SAMPLED)

    def _answers(self, model: TinyModel, kinds: Iterable[SamplingOptions]) -> None:
        for sampling in kinds:
            for what, tokens in (("a random", model.tokens(30, N_PROMPT)), ("a repetitive", PHRASE * 5)):
                expected = answer(model, sampling, tokens=tokens)
                got = answer(model, sampling, drafter=self.drafter(), tokens=tokens)
                require_answer(got, expected, f"the answer to {what} prompt with the drafter against the plain one")

    @clause("DRAFT-03", "Concurrent requests get the answers that they get alone.")
    def concurrent(self, model: TinyModel) -> None:
        """See the statement."""
        prompts = [PHRASE * 4, model.tokens(31, 20), PHRASE * 3 + (1,)]
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
        for _, most, draft in self._proposals(model):
            tree = draft.tree
            if not 0 < len(tree.token_ids) <= most or len(tree.parents) != len(tree.token_ids):
                got = f"{len(tree.token_ids)} tokens with {len(tree.parents)} parents"
                raise Fault(f"a draft of {got}, expected 1 to {most} of each")
            for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
                if not 0 <= token < model.vocab or not -1 <= parent < node:
                    raise Fault(f"node {node} of a draft is token {token} with the parent {parent}")
            if len(draft.expected) != len(tree.token_ids) or not all(0 <= share <= 1 for share in draft.expected):
                raise Fault(f"the estimates of a draft are {draft.expected}, expected one of 0 to 1 per token")

    @clause("DRAFT-05", "A drafter that denies branches proposes chains only.")
    def declared_branches(self, model: TinyModel) -> None:
        """See the statement."""
        for _, _, draft in self._proposals(model):
            chain = tuple(range(-1, len(draft.tree.token_ids) - 1))
            if not self.target.capabilities.branches and draft.tree.parents != chain:
                raise Fault(f"the capabilities say branches=False, a draft has the parents {draft.tree.parents}")

    @clause("DRAFT-06", "A drafter that denies reading hidden states never asks for them.")
    def declared_hidden(self, model: TinyModel) -> None:
        """See the statement."""
        lent = _Watched(model.executable("engine"))
        engine = make_engine(model, lent, drafter=self.drafter())
        try:
            engine.submit(GenerationRequest(PHRASE * 5, GREEDY, 24, ignore_end=True)).result()
        finally:
            engine.close()
        if lent.asked and not self.target.capabilities.reads_hidden:
            raise Fault(f"the capabilities say reads_hidden=False, the drafter called {lent.asked[0]}")

    @clause(
        "DRAFT-07", "A drafter that denies learning across requests proposes after others what it proposes at first."
    )
    def declared_learning(self, model: TinyModel) -> None:
        """See the statement."""
        if self.target.capabilities.learns_across_requests:
            self._salts_are_apart(model)
            return
        if self.target.capabilities.reads_hidden:
            return  # what it reads is the model's last step, not an earlier request
        fresh = self.drafter(model.executable())
        expected = _proposed(fresh, 0, model.tokens(32, 20))
        used = self.drafter(model.executable())
        for seed in (32, 33):
            _proposed(used, 0, (*model.tokens(seed, 20), *PHRASE))
        if _proposed(used, 0, model.tokens(32, 20)) != expected:
            raise Fault("the capabilities say learns_across_requests=False, an earlier request changes a proposal")

    def _salts_are_apart(self, model: TinyModel) -> None:
        """What one tenant's requests taught must not show in another's proposals."""
        fresh = self.drafter(model.executable())
        expected = _proposed(fresh, 0, model.tokens(32, 20))
        used = self.drafter(model.executable())
        for _ in range(3):
            _proposed(used, 0, (*model.tokens(32, 20), *PHRASE), SALT)
        if _proposed(used, 0, model.tokens(32, 20)) != expected:
            raise Fault("what requests of one salt taught changes a proposal for another")

    def _proposals(self, model: TinyModel) -> list[tuple[int, int, Draft]]:
        """(sequence, tokens asked for, draft) of two sequences that take turns, while answers run."""
        recorder = _Recorder(self.drafter())
        answer(model, GREEDY, drafter=recorder, tokens=PHRASE * 5)
        if self.target.capabilities.reads_hidden:
            return recorder.proposals
        drafter = self.drafter(model.executable())
        proposals = list(recorder.proposals)
        for sequence in (0, 1):
            drafter.begin(sequence, (*PHRASE, *PHRASE))
        for token in PHRASE:
            for sequence in (0, 1):
                drafter.committed(sequence, (token,))
                for most in (1, 2, 8):
                    draft = drafter.propose(sequence, most)
                    if draft is not None and draft.tree.token_ids:
                        proposals.append((sequence, most, draft))
        for sequence in (0, 1):
            drafter.end(sequence)
        return proposals


def _proposed(drafter: Drafter, sequence: int, tokens: Sequence[int], salt: str = "") -> list[Any]:
    """What a drafter proposes along a sequence."""
    drafter.begin(sequence, tokens[:10], salt)
    proposed = []
    for token in tokens[10:]:
        drafter.committed(sequence, (token,))
        proposed.append(drafter.propose(sequence, 4))
    drafter.end(sequence)
    return proposed


class _Recorder(Drafter):
    """Passes everything on and keeps the proposals."""

    def __init__(self, drafter: Drafter) -> None:
        self.capabilities = drafter.capabilities  # type: ignore[misc]
        self._drafter = drafter
        self.proposals: list[tuple[int, int, Draft]] = []

    def attach(self, executable: Executable) -> None:
        """As the drafter."""
        self._drafter.attach(executable)

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """As the drafter."""
        self._drafter.begin(sequence_id, token_ids, salt)

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """As the drafter."""
        self._drafter.committed(sequence_id, token_ids)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """As the drafter."""
        draft = self._drafter.propose(sequence_id, max_tokens)
        if draft is None or not draft.tree.token_ids:
            return None
        self.proposals.append((sequence_id, max_tokens, draft))
        return None  # the engine would turn off a drafter of bad proposals; here they are to be looked at

    def end(self, sequence_id: int) -> None:
        """As the drafter."""
        self._drafter.end(sequence_id)


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
