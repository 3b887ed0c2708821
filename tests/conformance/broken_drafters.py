"""Drafters and output heads that are wrong on purpose, each in one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kinetic_core.interfaces import (
    Draft,
    Drafter,
    DrafterCapabilities,
    DraftTree,
)
from kinetic_core.reference.head import FullHead


class LastTokens(Drafter):
    """Proposes the sequence's own last three tokens: honest, and rarely right."""

    capabilities = DrafterCapabilities()

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.executable: Any = None

    def attach(self, executable: Any) -> None:
        self.executable = executable

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        self.tokens[sequence_id] = list(token_ids)

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        self.tokens[sequence_id].extend(token_ids)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        tokens = self.tokens[sequence_id][-min(3, max_tokens) :]
        return Draft(DraftTree.chain(tokens), (0.5,) * len(tokens))

    def end(self, sequence_id: int) -> None:
        del self.tokens[sequence_id]


class MeddlesWithState(LastTokens):
    """Changes the model's state while it guesses."""

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        for slot in range(6):
            self.executable.clear_slot(slot)
        return super().propose(sequence_id, max_tokens)


class FailsBesideOthers(LastTokens):
    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        if self.tokens:
            raise RuntimeError("one at a time")
        super().begin(sequence_id, token_ids, salt)


class TooLong(LastTokens):
    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        tokens = (1,) * (max_tokens + 1)
        return Draft(DraftTree.chain(tokens), (0.5,) * len(tokens))


class Branches(LastTokens):
    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        n = min(2, max_tokens)
        return Draft(DraftTree((1, 2)[:n], (-1, -1)[:n]), (0.5,) * n)


class LooksAtHidden(LastTokens):
    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        self.executable.hidden(0, 1)
        return super().propose(sequence_id, max_tokens)


class Remembers(LastTokens):
    """Proposes what another sequence ended with."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[int] = [0]

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        return Draft(DraftTree.chain(self.last[-1:]), (0.5,))

    def end(self, sequence_id: int) -> None:
        self.last = self.tokens[sequence_id]
        super().end(sequence_id)


class MixesTenants(Remembers):
    capabilities = DrafterCapabilities(learns_across_requests=True)


class ScaledHead(FullHead):
    """Multiplies the logits: the same order, other scores."""

    def record(self, b: Any, hidden: Any, weight: Any, scale: float) -> Any:
        return super().record(b, hidden, weight, scale * 1.5)


class ReversedHead(FullHead):
    def record(self, b: Any, hidden: Any, weight: Any, scale: float) -> Any:
        return super().record(b, hidden, weight, -scale)
