"""Which guesses are run: the tree that sources share, and the rows that promise the most tokens per second."""

from __future__ import annotations

import random

import attrs
import pytest

from kinetic_core.engine.acceptance import Acceptance, Rates
from kinetic_core.engine.draft_policy import (
    LEAST_GAIN,
    Asked,
    Choice,
    GuessTree,
    NextStep,
    best_rows,
    worthwhile_depths,
)
from kinetic_core.engine.step_costs import StepCosts
from kinetic_core.interfaces import Draft, DraftTree


def costs_of(curve: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for n_rows, seconds in curve.items():
        costs.measured(n_rows, seconds)
    return costs


def tree_of(draft: Draft, name: str = "a") -> GuessTree:
    tree = GuessTree()
    tree.add(name, draft, Acceptance(Rates(), 4))
    return tree


def chain(tokens: tuple[int, ...], *expected: float) -> Draft:
    return Draft(DraftTree.chain(tokens), expected)


def test_sources_that_agree_share_rows() -> None:
    record = Acceptance(Rates(), 4)
    tree = GuessTree()
    tree.add("a", chain((5, 6, 7), 0.5, 0.5, 0.5), record)
    tree.add("b", Draft(DraftTree((5, 6, 9, 4), (-1, 0, 1, -1)), (0.9, 0.8, 0.6, 0.1)), record)
    assert tree.token_ids == [5, 6, 7, 9, 4]
    assert tree.parents == [-1, 0, 1, 1, -1]
    assert tree.depths == [1, 2, 3, 3, 1]
    assert tree.chances == pytest.approx([0.9, 0.72, 0.72 * 0.5 / 1.1, 0.72 * 0.6 / 1.1, 0.1])
    assert tree.sources == [{"a", "b"}, {"a", "b"}, {"a"}, {"b"}, {"b"}]
    assert tree.likeliest_leaf() == 3
    assert tree.path(3) == [5, 6, 9]
    assert tree.part([0, 1, 3]) == DraftTree((5, 6, 9), (-1, 0, 1))


def test_guesses_at_one_place_share_its_chance() -> None:
    """Two sources that are sure of different tokens cannot both be right."""
    record = Acceptance(Rates(), 4)
    tree = GuessTree()
    tree.add("a", chain((5, 6), 0.9, 0.5), record)
    tree.add("b", chain((7, 8), 0.9, 0.5), record)
    tree.add("c", chain((7,), 0.6), record)
    assert tree.chances == pytest.approx([0.5, 0.25, 0.5, 0.25])
    tree.add("d", chain((5,), 1.0), record)  # a parent that becomes likelier makes its children so
    assert tree.chances == pytest.approx([10 / 19, 5 / 19, 9 / 19, 4.5 / 19])


def test_guesses_can_go_on_from_others() -> None:
    record = Acceptance(Rates(), 4)
    tree = tree_of(chain((5, 6), 0.5, 0.5))
    tree.add("b", chain((7, 8), 0.5, 0.5), record, root=1)
    assert (tree.token_ids, tree.parents, tree.depths) == ([5, 6, 7, 8], [-1, 0, 1, 2], [1, 2, 3, 4])
    assert tree.chances == pytest.approx([0.5, 0.25, 0.125, 0.0625])
    assert GuessTree().likeliest_leaf() == -1


def test_rows_are_taken_while_they_pay() -> None:
    costs = costs_of({1: 1.0, 2: 1.2, 4: 1.2, 5: 2.4, 8: 2.4, 16: 4.8})
    sure = tree_of(chain(tuple(range(12)), *(0.99,) * 12))
    nodes, choice = best_rows({"s": sure}, NextStep(1, 31, costs))
    assert len(nodes["s"]) == 3  # four rows for 1.2: more rows cost as much each
    assert choice.rate == pytest.approx((1 + 0.99 + 0.99**2 + 0.99**3) / 1.2)
    doubtful = tree_of(chain((1, 2), 0.15, 0.15))
    assert best_rows({"s": doubtful}, NextStep(1, 31, costs)) == ({}, Choice(0, 1, 1.0))
    flat = costs_of({1: 1.0, 16: 1.0})
    assert len(best_rows({"s": sure}, NextStep(1, 31, flat))[0]["s"]) == 12
    assert len(best_rows({"s": sure}, NextStep(1, 5, flat))[0]["s"]) == 5


def test_a_gain_too_small_to_be_trusted_is_left() -> None:
    guess = {"s": tree_of(chain((1,), 0.5))}
    assert best_rows(guess, NextStep(1, 4, costs_of({1: 1.0, 2: 1.5 / (LEAST_GAIN + 0.01)})))[0] == {"s": [0]}
    assert best_rows(guess, NextStep(1, 4, costs_of({1: 1.0, 2: 1.5 / (LEAST_GAIN - 0.01)})))[0] == {}


def test_time_that_the_step_takes_anyway_makes_guesses_cheaper() -> None:
    costs = costs_of({1: 1.0, 2: 1.5})
    guess = {"s": tree_of(chain((1,), 0.4))}
    assert best_rows(guess, NextStep(1, 4, costs))[0] == {}
    assert best_rows(guess, NextStep(1, 4, costs, 5.0))[0] == {"s": [0]}


def test_what_a_step_with_drafts_saves() -> None:
    step = NextStep(2, 4, costs_of({2: 1.0, 4: 1.5}), other_s=0.25)
    assert step.plain_rate == 2.0
    nodes, choice = best_rows({"s": tree_of(chain((1, 2), 1.0, 1.0))}, step)
    assert nodes == {"s": [0, 1]} and choice == Choice(2, 4.0, 1.75)
    assert choice.saved_s(step.plain_rate) == pytest.approx(0.25)  # four tokens in two plain steps take 2


def test_requests_share_the_rows_by_their_chances() -> None:
    costs = costs_of({2: 1.0, 6: 1.2, 7: 9.0})
    trees = {
        "sure": tree_of(chain((1, 2, 3, 4), 0.95, 0.95, 0.95, 0.95)),
        "doubtful": tree_of(Draft(DraftTree((5, 6), (-1, -1)), (0.6, 0.3))),
    }
    nodes, choice = best_rows(trees, NextStep(2, 20, costs))
    # chances .95 .90 .86 .81 | .6 .3: four more rows are the cheap ones
    assert nodes == {"sure": [0, 1, 2, 3]}
    assert choice.rate == pytest.approx((2 + 0.95 + 0.95**2 + 0.95**3 + 0.95**4) / 1.2)


def test_what_is_chosen_is_as_good_as_any_choice() -> None:
    """Against all subtrees that have the parents of their nodes, on small random trees."""
    rng = random.Random(3)
    for _ in range(60):
        n = rng.randrange(1, 7)
        parents = tuple(rng.randrange(-1, node) if node else -1 for node in range(n))
        draft = Draft(DraftTree(tuple(range(n)), parents), tuple(rng.uniform(0.05, 1) for _ in range(n)))
        seconds = 1.0
        costs = costs_of(
            {1: seconds} | {count: (seconds := seconds + rng.uniform(0, 0.8)) for count in range(2, n + 2)}
        )
        tree = tree_of(draft)
        nodes, choice = best_rows({"s": tree}, NextStep(1, n, costs))
        best = 1.0
        for mask in range(1, 1 << n):
            chosen = [node for node in range(n) if mask >> node & 1]
            if all(parents[node] < 0 or parents[node] in chosen for node in chosen):
                tokens = 1 + sum(tree.chances[node] for node in chosen)
                best = max(best, tokens / costs.seconds(1 + len(chosen)))
        if best > LEAST_GAIN:
            assert choice.rate == pytest.approx(best)
            part = tree.part(nodes["s"])
            assert all(parent < node for node, parent in enumerate(part.parents))
        else:
            assert nodes == {}


def depths_for(
    n_sequences: int, costs: StepCosts, run_s: float, *, trees: dict[str, GuessTree] | None = None, **changes: float
) -> dict[str, int]:
    """Of sequences "a", "b", …, of which nothing was seen: 0.7 at every depth."""
    asked = {"abcdefgh"[number]: Asked(Acceptance(Rates(), 128), 8) for number in range(n_sequences)}
    step = attrs.evolve(NextStep(n_sequences, 8, costs), **changes)
    return worthwhile_depths(asked, trees or {}, step, run_s)


def test_how_far_a_source_that_costs_time_should_guess() -> None:
    costs = costs_of({1: 1.0, 2: 1.2, 4: 1.2, 8: 2.4})
    assert depths_for(1, costs, 0.0) == {"a": 3}
    assert depths_for(1, costs, 0.3) == {"a": 2}  # 1.7 in 1.5, 2.19 in 1.8, 2.53 in 2.1
    assert depths_for(1, costs, 0.6) == {}
    assert depths_for(1, costs, 0.3, other_s=5.0) == {"a": 4}  # the step is long anyway
    assert depths_for(1, costs, 0.0, most=2) == {"a": 2}
    assert worthwhile_depths({}, {}, NextStep(1, 8, costs), 0.0) == {}
    short = {"a": Asked(Acceptance(Rates(), 128), 2)}
    assert worthwhile_depths(short, {}, NextStep(1, 8, costs), 0.0) == {"a": 2}


def test_a_run_is_paid_for_by_all_who_are_asked() -> None:
    flat = costs_of(dict.fromkeys(range(1, 33), 1.0))
    assert depths_for(1, flat, 0.66) == {"a": 1}  # 1.7 in 1.66, plain 1 in 1
    assert depths_for(4, flat, 0.66) == dict.fromkeys("abcd", 1)
    assert depths_for(1, flat, 0.7) == depths_for(4, flat, 0.7) == {}
    four = costs_of({1: 1.0, 4: 1.0, 5: 1.6, 8: 1.6})  # more rows cost more, but by fours
    assert depths_for(1, four, 0.45) == {"a": 2}  # 2.19 in 1.9, 1.7 in 1.45
    assert depths_for(4, four, 0.1) == {}  # 6.8 in 1.7: no more than 4 in 1
    rooms = {"a": Asked(Acceptance(Rates(), 128), 8), "b": Asked(Acceptance(Rates(), 128), 1)}
    assert worthwhile_depths(rooms, {}, NextStep(2, 8, flat), 0.15) == {"a": 2, "b": 1}
    assert worthwhile_depths(rooms, {}, NextStep(2, 2, flat), 0.0) == {"a": 1, "b": 1}


def test_what_others_guess_is_taken_where_it_is_better() -> None:
    costs = costs_of({1: 1.0, 2: 1.2, 4: 1.2, 8: 2.4})
    sure = tree_of(chain(tuple(range(8)), *(0.95,) * 8))
    doubtful = tree_of(chain((1, 2), 0.3, 0.3))
    assert depths_for(1, costs, 0.0, trees={"a": sure}) == {}
    assert depths_for(1, costs, 0.0, trees={"a": doubtful}) == {"a": 3}
    flat = costs_of(dict.fromkeys(range(1, 33), 1.0))
    assert depths_for(2, flat, 0.05, trees={"a": sure}, most=16) == {"b": 2}  # 7.39 + 2.19 in 1.1
    halves = tree_of(chain(tuple(range(6)), *(0.5,) * 6))  # 0.98 in all, but 0.5 in one row
    assert depths_for(1, flat, 0.1, trees={"a": halves}, most=1) == {"a": 1}  # 1.7 in 1.1, without 1.5 in 1
    # Somebody who is not asked keeps the guesses that there are, and what they promise has to be beaten.
    asked = {"a": Asked(Acceptance(Rates(), 128), 8)}
    step = NextStep(2, 16, flat)
    assert worthwhile_depths(asked, {"z": sure}, step, 0.05) == {"a": 2}
    assert worthwhile_depths(asked, {"z": sure}, step, 0.06) == {"a": 1}
    assert worthwhile_depths(asked, {"z": sure}, step, 0.1) == {}


def test_as_many_runs_as_any_number_could_pay_for() -> None:
    """Against every number of runs and of rows."""
    rng = random.Random(4)
    for _ in range(200):
        seconds = 1.0
        costs = costs_of({1: 1.0} | {n: (seconds := seconds + rng.uniform(0, 0.5)) for n in range(2, 16)})
        n_sequences, run_s, most = rng.randrange(1, 5), rng.uniform(0, 0.6), rng.randrange(1, 11)
        got = depths_for(n_sequences, costs, run_s, most=most)

        rates: dict[tuple[int, int], float] = {}
        for n_runs in range(1, 9):
            chances = [0.7**ahead for ahead in range(1, n_runs + 1) for _ in range(n_sequences)]
            for n_rows in range(1, min(most, len(chances)) + 1):
                spent = costs.seconds(n_sequences + n_rows) + n_runs * run_s
                rates[n_runs, n_rows] = (n_sequences + sum(chances[:n_rows])) / spent
        best = max(rates.values())
        if best <= LEAST_GAIN * n_sequences / costs.seconds(n_sequences):
            assert got == {}
        else:
            assert rates[max(got.values()), sum(got.values())] == pytest.approx(best)
