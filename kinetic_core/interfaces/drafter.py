"""The drafter contract: guesses the next tokens of a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import attrs

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Executable


@dataclass(frozen=True)
class DrafterCapabilities:
    """Questions about a drafter; every default is no."""

    branches: bool = False
    """May a draft be a tree and not a chain?"""
    reads_hidden: bool = False
    """Does it need the model's hidden states (a prediction block)?"""
    learns_across_requests: bool = False
    """Does it remember tokens of earlier requests (kept apart per tenant)?"""


@attrs.frozen
class DraftTree:
    """Guessed tokens. parents[i] is the index of token i's parent in the tree, -1 for the sequence's last token."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> DraftTree:
        """A draft without branches."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)))


@attrs.frozen
class Draft:
    """A proposal: the tree and, per token, the drafter's own estimate of its acceptance (0 to 1)."""

    tree: DraftTree
    expected: tuple[float, ...]


class Drafter(ABC):
    """Guesses what follows. Whatever it guesses, the answer does not change: a wrong guess only costs time.

    One object serves one loaded model; sequences are told apart by `sequence_id`.
    """

    capabilities: ClassVar[DrafterCapabilities]

    def attach(self, executable: Executable, salt: str = "") -> None:  # noqa: B027 - optional
        """Called once, with the loaded model. `salt` keeps what is learned apart per tenant."""

    @abstractmethod
    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """A sequence starts with these tokens committed."""

    @abstractmethod
    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """These tokens became part of the sequence."""

    @abstractmethod
    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """A draft of at most `max_tokens` tokens that continue the sequence, or None."""

    @abstractmethod
    def end(self, sequence_id: int) -> None:
        """The sequence is done."""
