"""What the tests of the guesses from earlier requests have in common."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from kinetic_drafters.learner import Learner
from kinetic_drafters.requests import RequestsDrafter

from kinetic_core.interfaces import Draft


def random_tokens(seed: int | str, n: int, vocabulary: int = 49_152) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocabulary) for _ in range(n)]


IDS = itertools.count(1_000_000)


def learn(drafter: RequestsDrafter, tokens: Sequence[int], salt: str = "", sequence: int = 1000) -> None:
    """A request with these tokens comes and goes; so do some without tokens, until all is learned."""
    drafter.begin(sequence, tokens, salt)
    drafter.end(sequence)
    while drafter.statistics()["waiting_bytes"]:
        learn_nothing(drafter, salt)


def after(drafter: RequestsDrafter, tokens: Sequence[int], salt: str = "", max_tokens: int = 8) -> Draft | None:
    """What a request is proposed after these tokens; it stays."""
    sequence = next(IDS)
    drafter.begin(sequence, tokens, salt)
    return drafter.propose(sequence, max_tokens)


def tokens_of(draft: Draft | None) -> tuple[int, ...]:
    return () if draft is None else draft.tree.token_ids


def learn_nothing(drafter: RequestsDrafter, salt: str = "") -> None:
    sequence = next(IDS)
    drafter.begin(sequence, (), salt)
    drafter.end(sequence)


class Work:
    """What `Learner.learn` was asked for since it was last looked at: tokens, and sequences of which they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = self.calls = 0
        real = Learner.learn

        def learn(learner: Learner, end: int, limit_bytes: int) -> None:
            self.tokens += end - learner.learned
            self.calls += 1
            real(learner, end, limit_bytes)

        monkeypatch.setattr(Learner, "learn", learn)

    def taken(self) -> tuple[int, int]:
        work, self.tokens, self.calls = (self.tokens, self.calls), 0, 0
        return work
