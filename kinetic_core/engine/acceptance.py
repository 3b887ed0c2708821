"""How often a source's guesses come true, by depth and by how sure the source was.

A guess need not be verified for that: what a source proposed is compared with the tokens that were chosen afterwards,
whether or not its rows were run. So a source that is wrong costs no rows while it is found out, and one that has
become right is noticed.
"""

from __future__ import annotations

from bisect import bisect_right

from kinetic_core.interfaces.drafter import Draft

DEPTHS = (1, 2, 3, 5, 9)
"""Depths are told apart up to these: 1, 2, 3–4, 5–8, 9 and deeper."""
ESTIMATES = (0.3, 0.5, 0.7, 0.85, 0.95)
"""A source's own estimates are told apart at these."""
PRIOR_WEIGHT = 3.0
"""The source's own estimate counts as so many observations, and so do all sequences' figures for one sequence."""
KEPT = 0.96
"""What an observation's weight is multiplied with at each later one: about the last 25 count."""
ANY_ESTIMATE = -1
UNSEEN = 0.7
"""What is thought of a source at a depth where none of its guesses was seen yet: enough to try it."""
MAX_FOLLOWED = 4
"""Drafts of one source that are compared with what follows at the same time."""

_DEPTH_CLASS = tuple(sum(depth >= first for first in DEPTHS) - 1 for depth in range(64))


def depth_class(depth: int) -> int:
    """Index into `DEPTHS`; depth counts from 1."""
    return _DEPTH_CLASS[min(depth, 63)]


def estimate_class(estimate: float) -> int:
    """0 … len(ESTIMATES)."""
    return bisect_right(ESTIMATES, estimate)


class Rates:
    """Decayed counts of guesses and of those that came true, per (depth class, estimate class)."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], tuple[float, float]] = {}

    def seen(self, key: tuple[int, int], came_true: bool) -> None:
        """A guess whose parent came true was right or wrong."""
        n, right = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = (KEPT * n + 1.0, KEPT * right + came_true)

    def rate(self, key: tuple[int, int], prior: float) -> float:
        """The share that comes true, `prior` counting as `PRIOR_WEIGHT` observations."""
        n, right = self._counts.get(key, (0.0, 0.0))
        return (PRIOR_WEIGHT * prior + right) / (PRIOR_WEIGHT + n)


PATIENCE = 4
"""Looking for guesses in vain costs a source nothing so many times: texts have such places between what repeats."""
FIRST_REACH = 4.0
"""Guesses that are taken to come true in a row before any has."""
REACH_SMOOTHING = 0.25
"""Weight of the last draft in the number of guesses that come true in a row."""


class Pause:
    """How long something that was in vain is left alone: `patience` times not at all, then for 1, 3, 7 … steps.

    longest: steps at the most. first: it begins with a pause of so many, one of 1, 3, 7, …; those after it are longer.
    """

    def __init__(self, longest: int, patience: int = 0, first: int = 0) -> None:
        self._longest = longest
        self._patience = patience
        self._left = first
        self._in_vain = patience + first.bit_length() if first else 0

    def is_over(self) -> bool:
        """To be asked once before every step."""
        if self._left:
            self._left -= 1
            return False
        return True

    def after(self, success: bool, longest: int | None = None) -> None:
        """How it went this time. longest: in place of what was given at the beginning."""
        self._in_vain = 0 if success else self._in_vain + 1
        beyond = min(self._in_vain - self._patience, 16)
        if beyond > 0:
            self._left = max(self._left, min(longest or self._longest, 2**beyond - 1))


class _Followed:
    """A draft while the tokens that follow are compared with it: at `node` now, `depth` tokens deep."""

    __slots__ = ("children", "depth", "expected", "node", "token_ids")

    def __init__(self, draft: Draft) -> None:
        self.token_ids = draft.tree.token_ids
        self.expected = draft.expected
        self.children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.tree.parents):
            self.children.setdefault(parent, []).append(node)
        self.node = -1
        self.depth = 1


class Acceptance:
    """One source's record with one sequence, on top of its record with everyone.

    A source that had nothing worth a row `patience` times in a row is left alone: for one step, then 3, 7, … up to
    `longest_pause`, until it has; it may begin with a pause, `first_pause`. Where asking costs time of the model
    (`costly`), there is no patience, and the same goes for outright misses, first guesses that were wrong, from the
    second in a row on.

    untold: chosen tokens that the source has not been told yet. was_tried: was it asked, or left alone where it would
    have been? has_paid: were its guesses ever worth their time?
    """

    def __init__(
        self,
        everyone: Rates,
        longest_pause: int,
        *,
        costly: bool = False,
        patience: int = PATIENCE,
        first_pause: int = 0,
    ) -> None:
        self._everyone = everyone
        self._own = Rates()
        self._followed: list[_Followed] = []
        self._unpaid = Pause(longest_pause, 0 if costly else patience, first_pause)
        self._missed = Pause(longest_pause, 1) if costly else None
        self._reach = FIRST_REACH
        self.untold: list[int] = []
        self.was_tried = self.has_paid = False

    @property
    def most_asked(self) -> int:
        """How many guesses are worth asking for: twice as many as lately came true in a row, and a few more."""
        return int(2.0 * self._reach) + 3

    def probability(self, depth: int, estimate: float) -> float:
        """The chance that a guess comes true if its parent does."""
        return self._rate((_DEPTH_CLASS[depth if depth < 63 else 63], bisect_right(ESTIMATES, estimate)), estimate)

    def chance_at(self, depth: int) -> float:
        """The chance that one of the source's guesses at this depth comes true if their parent does."""
        return self._rate((depth_class(depth), ANY_ESTIMATE), UNSEEN)

    def _rate(self, key: tuple[int, int], prior: float) -> float:
        return self._own.rate(key, self._everyone.rate(key, prior))

    def is_asked(self) -> bool:
        """Is the source asked before this step? Counts pauses down."""
        missed = self._missed is None or self._missed.is_over()
        return self._unpaid.is_over() and missed

    def paid(self, pays: bool, longest_pause: int | None = None) -> None:
        """Had the source a guess that was worth its time? longest_pause: steps, in place of the usual ones."""
        self.has_paid = self.has_paid or pays
        self._unpaid.after(pays, longest_pause)

    def proposed(self, draft: Draft) -> None:
        """The source was asked and gave this."""
        self.was_tried = True
        if len(self._followed) < MAX_FOLLOWED:
            self._followed.append(_Followed(draft))

    def chosen(self, token: int) -> None:
        """The sequence's next token is known."""
        if not self._followed:
            return
        alive = []
        for draft in self._followed:
            found = -1
            for node in draft.children[draft.node]:
                came_true = draft.token_ids[node] == token
                self._seen((depth_class(draft.depth), estimate_class(draft.expected[node])), came_true)
                if came_true:
                    found = node
            self._seen((depth_class(draft.depth), ANY_ESTIMATE), found >= 0)
            if found >= 0:
                if self._missed is not None:
                    self._missed.after(True)
                draft.node, draft.depth = found, draft.depth + 1
                if found in draft.children:
                    alive.append(draft)
                else:  # right to its end: who knows how much farther
                    self._reach = max(self._reach, float(draft.depth))
                continue
            self._reach += REACH_SMOOTHING * (draft.depth - 1 - self._reach)
            if draft.depth == 1 and self._missed is not None:
                self._missed.after(False)
        self._followed = alive

    def _seen(self, key: tuple[int, int], came_true: bool) -> None:
        self._own.seen(key, came_true)
        self._everyone.seen(key, came_true)
