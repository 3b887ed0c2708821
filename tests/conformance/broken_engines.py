"""Engines that are wrong on purpose: each function breaks the engine in one way until the test ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kinetic_core.conformance.guesses import depths
from kinetic_core.engine import step
from kinetic_core.engine.answer import AnswerText
from kinetic_core.engine.engine import Engine
from kinetic_core.engine.history import History
from kinetic_core.engine.reuse import Reuse
from kinetic_core.interfaces import DraftTree

Seen = Callable[[DraftTree, int], Sequence[int]]
"""(tree, node) -> the guesses that penalties see in the place of the node's path."""


def no_path(tree: DraftTree, node: int) -> Sequence[int]:
    """The sequence as it was before the step."""
    return ()


def all_rows_before(tree: DraftTree, node: int) -> Sequence[int]:
    """As if the rows of a step were one text."""
    return tree.token_ids[: node + 1]


def first_branch(tree: DraftTree, node: int) -> Sequence[int]:
    """The first row of every depth, whether or not it is an ancestor."""
    found = depths(tree)
    return [tree.token_ids[found.index(depth)] for depth in range(1, found[node] + 1)]


class _Judged(History):
    """A wrong history that is as long as the right one, so that the random number stays the right one."""

    length = 0

    @property
    def n_answer(self) -> int:
        return self.length


class _Sampler:
    """A sampler that is given another history."""

    def __init__(self, sampler: Any, history: History) -> None:
        self._sampler = sampler
        self._history = history

    def choose(self, outputs: Any, output: int, top_k: int | None, history: History) -> Any:
        return self._sampler.choose(outputs, output, top_k, self._history)


def wrong_history(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    """The penalties of a draft row see what `seen` gives."""
    verify, choose = Engine._verify, Engine._choose

    def wrong_verify(self: Any, ran: Any, output: int, sequence: Any, tree: Any, token: Any) -> Any:
        self.judging = (output, tree, sequence.history.tokens[:-1])  # the chosen token is the first of the path
        try:
            return verify(self, ran, output, sequence, tree, token)
        finally:
            self.judging = None

    def wrong_choose(self: Any, sequence: Any, output: int, top_k: Any) -> Any:
        judging = self.__dict__.get("judging")
        if judging is None:
            return choose(self, sequence, output, top_k)
        first, tree, tokens = judging
        n_prompt, right = sequence.history.n_prompt, sequence.sampler
        history = _Judged(tokens[:n_prompt])
        for token in (*tokens[n_prompt:], *seen(tree, output - first - 1)):
            history.push(token)
        history.length = sequence.history.n_answer
        sequence.sampler = _Sampler(right, history)
        try:
            return choose(self, sequence, output, top_k)
        finally:
            sequence.sampler = right

    monkeypatch.setattr(Engine, "_verify", wrong_verify)
    monkeypatch.setattr(Engine, "_choose", wrong_choose)


def too_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft row asks for as many candidates as its sequence's history needs, without its path."""

    def wrong(sequence: Any, tree: DraftTree, end: int) -> list[step.Head]:
        top_k = sequence.sampler.head_top_k(sequence.history)
        return [
            step.Head(sequence, end - 1 + depth, top_k, chooses=True, node=node)
            for node, depth in enumerate(depths(tree))
        ]

    monkeypatch.setattr(step, "_draft_heads", wrong)


def _while_verifying(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, result: Any) -> None:
    """A method gives `result` where drafts are verified."""
    verify, method = Engine._verify, getattr(owner, name)
    verifying = []

    def marked(self: Any, *given: Any) -> Any:
        verifying.append(True)
        try:
            return verify(self, *given)
        finally:
            verifying.pop()

    def wrong(self: Any, *given: Any) -> Any:
        found = method(self, *given)
        return result if verifying else found

    monkeypatch.setattr(Engine, "_verify", marked)
    monkeypatch.setattr(owner, name, wrong)


def overlooks_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string that guesses complete does not end the answer there."""
    _while_verifying(monkeypatch, AnswerText, "push", False)


def overlooks_end_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guessed end token is a token of the answer, which goes on to the draft's end."""
    choose = Engine._choose

    class Forgiving:
        """A tokenizer without end tokens."""

        end_ids: frozenset[int] = frozenset()

        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

    def wrong(self: Any, sequence: Any, output: int, top_k: Any) -> Any:
        right = self.tokenizer
        if sequence.active.accepted:
            self.tokenizer = Forgiving(right)
        try:
            return choose(self, sequence, output, top_k)
        finally:
            self.tokenizer = right

    monkeypatch.setattr(Engine, "_choose", wrong)


def keeps_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of an answer that ended among its guesses is kept as that of one token more."""
    keep = Reuse.keep

    def wrong(self: Any, sequence: Any) -> None:
        if sequence.active.accepted:
            sequence.state.advance(1)
        keep(self, sequence)

    monkeypatch.setattr(Reuse, "keep", wrong)


def counts_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that ended among its guesses is one token longer by its count."""
    end = Engine._end

    def wrong(self: Any, sequence: Any, reason: Any) -> None:
        sequence.n_generated += sequence.active.accepted > 0
        end(self, sequence, reason)

    monkeypatch.setattr(Engine, "_end", wrong)
