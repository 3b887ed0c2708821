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


@attrs.define
class NextStep:
    """The step that guesses are chosen for.

    n_answering: sequences that answer in it, with and without guesses. most: draft rows at the most.
    other_s: seconds that it takes besides, for guesses that the model makes.
    """

    n_answering: int
    most: int
    costs: StepCosts
    other_s: float = 0.0

    def seconds(self, n_drafts: int) -> float:
        """How long it takes with so many draft rows."""
        return self.costs.seconds(self.n_answering + n_drafts) + self.other_s

    @property
    def plain_rate(self) -> float:
        """Tokens per second of steps without drafts."""
        return self.n_answering / self.costs.seconds(self.n_answering)


@attrs.frozen
class Choice:
    """Draft rows to run: how many, the tokens and the seconds that the step is expected to have with them."""

    n_drafts: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def saved_s(self, plain_rate: float) -> float:
        """Seconds by which plain decoding would take longer for as many tokens."""
        return self.tokens / plain_rate - self.seconds


def best_rows(trees: Mapping[Key, GuessTree], step: NextStep) -> tuple[dict[Key, list[int]], Choice]:
    """The nodes to run per sequence, ascending, and what is then expected."""
    keys = list(trees)
    guesses = sorted(  # a parent is at least as likely as its children, and earlier
        (-chance, node, number)
        for number, tree in enumerate(trees.values())
        for node, chance in enumerate(tree.chances)
        if chance >= LEAST_CHANCE
    )
    plain = Choice(0, step.n_answering, step.seconds(0))
    chances = (-chance for chance, _, _ in guesses[: step.most])
    best = _best_count(chances, step, plain.rate * LEAST_GAIN) or plain
    chosen: dict[Key, list[int]] = {}
    for _, node, number in guesses[: best.n_drafts]:
        chosen.setdefault(keys[number], []).append(node)
    return {key: sorted(nodes) for key, nodes in chosen.items()}, best


def _best_count(chances: Iterable[float], step: NextStep, to_beat: float) -> Choice | None:
    """The best number of guesses, likeliest first; None where none gives more than `to_beat` tokens per second."""
    best, found = to_beat, None
    tokens = float(step.n_answering)
    for count, chance in enumerate(chances, 1):
        tokens += chance
        seconds = step.seconds(count)
        if tokens > best * seconds:
            found = (count, tokens, seconds)
            best = tokens / seconds
    return Choice(*found) if found else None


@attrs.frozen
class Asked:
    """A sequence for which a source that runs a part of the model could guess, at most `room` tokens deep."""

    record: Acceptance
    room: int


def worthwhile_depths(
    asked: Mapping[Key, Asked], trees: Mapping[Key, GuessTree], step: NextStep, run_s: float
) -> dict[Key, int]:
    """How many tokens ahead a source should guess for each sequence; those for which it should not are left out.

    A run of `run_s` seconds guesses one token more for all of them, as a step runs the rows of all: how many runs pay
    is one question. trees: guesses of the other sources, which are taken where they promise more.
    """
    best = best_rows(trees, step)[1].rate * LEAST_GAIN
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
        chances = (-chance for chance, _, _ in rows[: step.most])
        longer = NextStep(step.n_answering, step.most, step.costs, step.other_s + ahead * run_s)
        found = _best_count(chances, longer, best)
        if found:
            best = found.rate
            depths = Counter(key for _, _, key in rows[: found.n_drafts] if key is not None)
    return dict(depths)
