"""The drafter contract: guesses the next tokens of a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Executable
    from kinetic_core.program.program import Program


@dataclass(frozen=True)
class DrafterCapabilities:
    """Questions about a drafter; every default is no."""

    branches: bool = False
    """May a draft be a tree and not a chain?"""
    continues_guesses: bool = False
    """Can it go on from another drafter's guesses (`propose_after`)?"""
    reads_hidden: bool = False
    """Does it need the model's hidden states or its prediction block (`stepped`)? It is then asked last: it costs time
    of the model."""
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
    """A proposal: the tree and, per token, the drafter's own estimate of its acceptance (0 to 1).

    An estimate is of a token given that its parent was accepted. The engine corrects the estimates by what it sees, so
    their order matters more than their size.
    """

    tree: DraftTree
    expected: tuple[float, ...]


@attrs.frozen(eq=False)
class SequenceStep:
    """What a step left of one sequence, for a drafter that reads hidden states.

    start:       position of the first of these rows: the tokens that had been run before.
    rows:        rows of the step's batch, committed ones and accepted drafts, at positions start, start + 1, …
    block_table: i32[n_blocks]: the sequence's KV blocks; may cover positions beyond those that have been run, where a
                 prediction block's keys and values may be put.
    """

    sequence_id: int
    start: int
    rows: tuple[int, ...]
    block_table: npt.NDArray[np.int32]


class TokenTexts(Protocol):
    """What tokens stand for: a model's tokenizer, as far as drafters need it. May be called on any thread."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for. Raises RequestError for an id that the tokenizer does not have."""
        ...

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The tokens of a text. add_bos: with the token that begins a text; None: where the model's file says so.

        A tokenizer may put a space before the text. Raises RequestError for text that it cannot express.
        """
        ...


class Drafter(ABC):
    """Guesses what follows. Whatever it guesses, the answer does not change: a wrong guess only costs time.

    One object serves one loaded model, on the engine's thread; sequences are told apart by `sequence_id`. The order
    of calls for a sequence: `begin`; `stepped` after every step that ran rows of it (where `reads_hidden`);
    `committed` for every token chosen; `propose` before a step, where the engine wants drafts; `end`.
    """

    capabilities: ClassVar[DrafterCapabilities]

    @classmethod
    def suits(cls, program: Program) -> bool:
        """Can it guess for this model? A drafter that needs a prediction block says no where there is none."""
        return True

    def attach(self, executable: Executable) -> None:  # noqa: B027 - optional
        """Called once, with the loaded model."""

    def read_texts(self, texts: TokenTexts) -> None:  # noqa: B027 - optional
        """Called once after `attach`, where the model has a tokenizer: for a drafter that looks into tokens."""

    @abstractmethod
    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """A sequence starts with these tokens, its prompt. `salt` keeps what is learned apart per tenant."""

    def forked(self, sequence_id: int, parent_id: int) -> None:  # noqa: B027 - optional
        """A sequence that just began shares all that was run of another: the same tokens, hidden states and blocks.

        Both are of one request. Called right after `begin`; where `reads_hidden`, after the step's `stepped`.
        """

    @abstractmethod
    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """These tokens were chosen: they follow all earlier ones. The model has not run the last of them yet."""

    def stepped(self, steps: Sequence[SequenceStep]) -> None:
        """A step ended; only where `reads_hidden`. `Executable.hidden` gives the rows' states until the next step.

        A sequence whose `start` is not where its last rows ended starts over from there (its state was given up, or
        came from a cache). Tokens that the step's outputs chose have been `committed` by now.
        """
        raise NotImplementedError(f"{type(self).__name__} reads no hidden states")

    @abstractmethod
    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """A draft of at most `max_tokens` tokens that continue the sequence, or None."""

    def propose_after(self, sequence_id: int, guessed: Sequence[int], max_tokens: int) -> Draft | None:
        """A draft that continues the sequence and these guesses, or None; only where `continues_guesses`."""
        raise NotImplementedError(f"{type(self).__name__} continues no guesses")

    @abstractmethod
    def end(self, sequence_id: int) -> None:
        """The sequence is done."""

    def statistics(self) -> dict[str, Any]:
        """Figures for `Engine.statistics()`, such as the memory held in bytes. Called on any thread."""
        return {}
