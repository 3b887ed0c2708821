"""Which guesses are run: the rows with the most expected tokens per second, over all sequences of a step together.

The proposals of all sources become one tree per sequence: guesses that agree are one row. A guess's chance is the
product of the chances along its path. Rows are taken in the order of their chances, over all sequences, and as many as
give the most expected tokens per second by the measured costs; so source, length and shape of a draft, and how
concurrent requests share the rows, all follow from one rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

from kinetic_core.engine.acceptance import Acceptance
from kinetic_core.engine.step_costs import StepCosts
from kinetic_core.interfaces.drafter import Draft, DraftTree

LEAST_GAIN = 1.02
"""Drafting has to promise at least so much more tokens per second: the figures it goes by are not exact."""
LEAST_CHANCE = 0.02
"""Guesses below this chance are not looked at."""

Key = TypeVar("Key", bound=Hashable)


class GuessTree:
    """The merged proposals for one sequence. Nodes in an order in which parents come first.

    sources[i]: who proposed node i.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.sources: list[set[str]] = []
        self._children: dict[tuple[int, int], int] = {}
        self._shares: list[float] = []
        self._chances: list[float] | None = None

    def add(self, name: str, draft: Draft, record: Acceptance, root: int = -1) -> int:
        """Take in a proposal, which continues node `root`; `record` corrects the source's own estimates.

        Returns the depth that its deepest node has now.
        """
        own: list[int] = []
        self._chances = None
        for token, parent, estimate in zip(draft.tree.token_ids, draft.tree.parents, draft.expected, strict=True):
            above = root if parent < 0 else own[parent]
            depth = 1 if above < 0 else self.depths[above] + 1
            share = record.probability(depth, estimate)
            node = self._children.get((above, token), -1)
            if node < 0:
                node = self._children[above, token] = len(self.token_ids)
                self.token_ids.append(token)
                self.parents.append(above)
                self._shares.append(share)
                self.depths.append(depth)
                self.sources.append({name})
            else:
                self._shares[node] = max(self._shares[node], share)
                self.sources[node].add(name)
            own.append(node)
        return max((self.depths[node] for node in own), default=0)

    @property
    def chances(self) -> list[float]:
        """Per node: that all guesses from the first to it come true. Guesses at one place share one at the most."""
        if self._chances is None:
            totals: dict[int, float] = {}
            for parent, share in zip(self.parents, self._shares, strict=True):
                totals[parent] = totals.get(parent, 0.0) + share
            chances: list[float] = []
            for parent, share in zip(self.parents, self._shares, strict=True):
                chances.append((chances[parent] if parent >= 0 else 1.0) * share / max(1.0, totals[parent]))
            self._chances = chances
        return self._chances

    def likeliest_leaf(self) -> int:
        """The deepest node reached by always taking the likeliest child; -1 for an empty tree."""
        chances, node = self.chances, -1
        while True:
            children = [child for child, parent in enumerate(self.parents) if parent == node]
            if not children:
                return node
            node = max(children, key=lambda child: (chances[child], -child))

    def path(self, node: int) -> list[int]:
        """The tokens from the first guess to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tokens[::-1]

    def part(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of these nodes, ascending, every parent among them."""
        index = {node: place for place, node in enumerate(nodes)}
        return DraftTree(
            tuple(self.token_ids[node] for node in nodes),
            tuple(index.get(self.parents[node], -1) for node in nodes),
        )


def best_rows(
    trees: Mapping[Key, GuessTree],
    n_answering: int,
    costs: StepCosts,
    *,
    most: int,
    other_s: float = 0.0,
) -> tuple[dict[Key, list[int]], float]:
    """The nodes to run per sequence, ascending, and the tokens per second that are then expected.

    n_answering: sequences that answer in this step, with and without guesses. most: draft rows at the most.
    other_s: seconds that every such step takes besides, for making guesses.
    """
    guesses = [
        (-chance, node, key)
        for key, tree in trees.items()
        for node, chance in enumerate(tree.chances)
        if chance >= LEAST_CHANCE
    ]
    guesses.sort(key=lambda guess: guess[:2])  # a parent is at least as likely, and earlier
    plain = n_answering / (costs.seconds(n_answering) + other_s)
    chances = (-chance for chance, _, _ in guesses[:most])
    rate, taken = _best_count(chances, n_answering, costs, other_s, plain * LEAST_GAIN)
    chosen: dict[Key, list[int]] = {}
    for _, node, key in guesses[:taken]:
        chosen.setdefault(key, []).append(node)
    return {key: sorted(nodes) for key, nodes in chosen.items()}, (rate if taken else plain)


def _best_count(
    chances: Iterable[float], n_answering: int, costs: StepCosts, other_s: float, to_beat: float
) -> tuple[float, int]:
    """(tokens per second, rows) of the best number of guesses, likeliest first; (to_beat, 0) where none is better."""
    best, taken = to_beat, 0
    tokens = float(n_answering)
    for count, chance in enumerate(chances, 1):
        tokens += chance
        rate = tokens / (costs.seconds(n_answering + count) + other_s)
        if rate > best:
            best, taken = rate, count
    return best, taken


@attrs.frozen
class Asked:
    """A sequence for which a source that runs a part of the model could guess, at most `room` tokens deep."""

    record: Acceptance
    room: int


def worthwhile_depths(
    asked: Mapping[Key, Asked],
    trees: Mapping[Key, GuessTree],
    n_answering: int,
    costs: StepCosts,
    run_s: float,
    *,
    most: int,
    other_s: float,
) -> dict[Key, int]:
    """How many tokens ahead a source should guess for each sequence; those for which it should not are left out.

    A run of `run_s` seconds guesses one token more for all of them, as a step runs the rows of all: how many runs pay
    is one question. trees: guesses of the other sources, which are taken where they promise more. most, other_s: as
    for `best_rows`.
    """
    best = best_rows(trees, n_answering, costs, most=most, other_s=other_s)[1] * LEAST_GAIN
    others = {key: sorted(tree.chances, reverse=True) for key, tree in trees.items()}
    own: dict[Key, list[float]] = {key: [] for key in asked}
    depths: dict[Key, int] = {}
    for ahead in range(1, max((entry.room for entry in asked.values()), default=0) + 1):
        gain = 0.0
        for key, entry in asked.items():
            if ahead <= entry.room:
                chance = (own[key][-1] if ahead > 1 else 1.0) * entry.record.chance_at(ahead)
                own[key].append(chance)
                gain += chance
        if gain < LEAST_CHANCE or gain <= best * run_s:
            break  # neither this run nor a later one gives so many tokens in its time
        rows: list[tuple[float, int, Key | None]] = []
        for key in dict.fromkeys([*own, *others]):
            mine, theirs = own.get(key, []), others.get(key, [])
            if sum(mine) > sum(theirs[: len(mine)]):
                rows += [(-chance, depth, key) for depth, chance in enumerate(mine)]
            else:
                rows += [(-chance, 0, None) for chance in theirs]
        rows.sort(key=lambda row: row[:2])
        chances = (-chance for chance, _, _ in rows[:most])
        rate, taken = _best_count(chances, n_answering, costs, other_s + ahead * run_s, best)
        if taken:
            best, depths = rate, Counter(key for _, _, key in rows[:taken] if key is not None)
    return dict(depths)
