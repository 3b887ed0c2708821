"""The sequences that a source serves, and what it refuses."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from kinetic_core.errors import describe

Entry = TypeVar("Entry")


class Running(dict[int, Entry]):
    """Sequence id -> what a source keeps of it. Raises ValueError for an id that did not begin, or began already."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._where = f"the drafter {source}"

    def __missing__(self, sequence_id: int) -> NoReturn:
        raise ValueError(
            describe(
                "no such sequence", where=self._where, got=sequence_id, expected="one that began and has not ended"
            )
        )

    def check_new(self, sequence_id: int) -> None:
        """Raise ValueError if a sequence of this id is running."""
        if sequence_id in self:
            raise ValueError(
                describe("a sequence began twice", where=self._where, got=sequence_id, hint="end the first before")
            )

    def take(self, sequence_id: int) -> Entry:
        """Remove a sequence and return what was kept of it."""
        entry = self[sequence_id]
        del self[sequence_id]
        return entry

    def check_most(self, max_tokens: int) -> None:
        """Raise ValueError if a draft of at most so many tokens cannot be."""
        if max_tokens < 1:
            raise ValueError(describe("max_tokens", where=self._where, got=max_tokens, expected="at least 1"))
