"""The suite's own drafters guess what they say."""

from __future__ import annotations

from kinetic_core.conformance.guesses import Guesser, branching, depths, random_tree, right
from kinetic_core.interfaces import DraftTree

WHOLE = tuple((7 * n * n + n) % 100 for n in range(400))
MOST = 31


def accepted(tree: DraftTree, tokens: tuple[int, ...]) -> list[int]:
    """The nodes that come true when `tokens` follow."""
    nodes, node = [], -1
    for token in tokens:
        found = [
            n for n, (t, p) in enumerate(zip(tree.token_ids, tree.parents, strict=True)) if (t, p) == (token, node)
        ]
        if not found:
            break
        node = found[0]
        nodes.append(node)
    return nodes


def test_random_trees_are_of_every_size_and_shape() -> None:
    guess = random_tree(WHOLE, 100)
    trees = {n: guess(WHOLE[:n], MOST) for n in range(1, 300)}
    assert trees == {n: random_tree(WHOLE, 100)(list(WHOLE[:n]), MOST) for n in trees}
    assert trees != {n: random_tree(WHOLE, 100, seed=1)(WHOLE[:n], MOST) for n in trees}
    runs: list[int] = []
    n_late = n_beside = 0
    for n, tree in trees.items():
        assert tree is not None and len(tree.token_ids) == len(tree.parents) <= MOST
        assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
        assert all(0 <= token < 100 for token in tree.token_ids)
        path = accepted(tree, WHOLE[n:])
        runs.append(len(path))
        n_late += any(node != at for at, node in enumerate(path))  # other rows lie between those that come true
        n_beside += len(path) < len(tree.token_ids)
    assert {len(tree.token_ids) for tree in trees.values() if tree} == set(range(1, MOST + 1))
    assert min(runs) == 0 and max(runs) >= 12 and sum(runs) > 3 * len(runs)
    assert n_late > len(runs) // 3 and n_beside > len(runs) // 2
    assert guess(WHOLE, MOST) is None


def test_branches_hold_the_token_that_comes_next() -> None:
    tree = branching(WHOLE, 100)(WHOLE[:50], MOST)
    assert tree is not None
    a, b, c = WHOLE[50:53]
    assert tree == DraftTree((c, a, c, (c if c != b else (b + 1) % 100), b), (-1, -1, 0, 1, 1))
    assert accepted(tree, WHOLE[50:]) == [1, 4]
    repeating = branching((5, 5, 5, 5), 100)((5,), MOST)
    assert repeating == DraftTree((6, 5, 5, 6, 5), (-1, -1, 0, 1, 1))


def test_how_far_guesses_reached_is_known() -> None:
    guesser = Guesser(right(WHOLE, 9))
    guesser.begin(3, WHOLE[:20])
    guesser.committed(3, WHOLE[20:25])
    draft = guesser.propose(3, 31)
    assert draft is not None and draft.tree == DraftTree.chain(WHOLE[25:34])
    assert guesser.reached == 34
    assert depths(DraftTree((1, 2, 3, 4), (-1, 0, -1, 1))) == [1, 2, 1, 3]
