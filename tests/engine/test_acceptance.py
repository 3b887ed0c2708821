"""What is known of a source: every proposal is compared with the tokens that follow, whether or not it was run."""

from __future__ import annotations

import pytest

from kinetic_core.engine.acceptance import (
    ANY_ESTIMATE,
    PATIENCE,
    PRIOR_WEIGHT,
    UNSEEN,
    Acceptance,
    Rates,
    depth_class,
    estimate_class,
)
from kinetic_core.interfaces import Draft, DraftTree


def chain(*tokens: int, estimate: float = 0.5) -> Draft:
    return Draft(DraftTree.chain(tokens), (estimate,) * len(tokens))


def test_classes() -> None:
    assert [depth_class(depth) for depth in (1, 2, 3, 4, 5, 8, 9, 100)] == [0, 1, 2, 2, 3, 3, 4, 4]
    assert [estimate_class(share) for share in (0.0, 0.3, 0.6, 0.7, 0.9, 0.99)] == [0, 1, 2, 3, 4, 5]


def test_a_rate_starts_at_the_prior_and_goes_to_what_is_seen() -> None:
    rates = Rates()
    assert rates.rate((0, 0), 0.5) == 0.5
    rates.seen((0, 0), True)
    assert rates.rate((0, 0), 0.5) == pytest.approx((PRIOR_WEIGHT * 0.5 + 1) / (PRIOR_WEIGHT + 1))
    for _ in range(500):
        rates.seen((0, 0), False)
    assert rates.rate((0, 0), 0.5) < 0.06
    assert rates.rate((1, 0), 0.5) == 0.5


def test_guesses_are_followed_to_their_first_fault() -> None:
    everyone = Rates()
    record = Acceptance(everyone, 4)
    before = [record.probability(depth, 0.5) for depth in (1, 2, 3)]
    record.proposed(chain(5, 6, 7, 8))
    for token in (5, 6, 9, 8):
        record.chosen(token)
    after = [record.probability(depth, 0.5) for depth in (1, 2, 3)]
    assert after[0] > before[0] and after[1] > before[1] and after[2] < before[2]
    assert record.probability(5, 0.5) == 0.5  # never reached
    assert record.probability(1, 0.9) == 0.9  # another class of estimates
    assert Acceptance(everyone, 4).probability(1, 0.5) > 0.5  # another sequence starts from what all have seen


def test_a_branch_is_followed_where_it_is_right() -> None:
    record = Acceptance(Rates(), 4)
    draft = Draft(DraftTree((5, 6, 7, 8), (-1, -1, 1, 0)), (0.8, 0.2, 0.6, 0.6))
    record.proposed(draft)
    record.chosen(6)
    record.chosen(7)
    assert record.probability(1, 0.8) < 0.8
    assert record.probability(1, 0.2) > 0.2
    assert record.probability(2, 0.6) > 0.6
    assert record.chance_at(1) > UNSEEN  # one of the two was right
    assert record.is_asked()


def test_misses_pause_for_longer_and_longer_and_a_hit_ends_that() -> None:
    record = Acceptance(Rates(), 6, costly=True)

    def pause_after(draft: Draft, token: int) -> int:
        record.proposed(draft)
        record.chosen(token)
        pauses = 0
        while not record.is_asked():
            pauses += 1
        return pauses

    assert [pause_after(chain(5), 1) for _ in range(6)] == [0, 1, 3, 6, 6, 6]
    assert pause_after(chain(5), 5) == 0
    assert [pause_after(chain(5), 1) for _ in range(2)] == [0, 1]
    record.proposed(chain(5, 6))
    record.chosen(5)
    record.chosen(1)  # wrong at the second token: no outright miss
    assert record.is_asked()
    cheap = Acceptance(Rates(), 6)
    cheap.proposed(chain(5))
    cheap.chosen(1)
    assert cheap.is_asked()  # where asking costs nothing, only what is not worth a row pauses


def test_guesses_that_would_not_pay_pause_as_well() -> None:
    def pauses(record: Acceptance, *pays: bool) -> list[int]:
        counts = []
        for paid in pays:
            record.paid(paid)
            counts.append(0)
            while not record.is_asked():
                counts[-1] += 1
        return counts

    no, yes = False, True
    assert pauses(Acceptance(Rates(), 100, costly=True), no, no, no, yes, no) == [1, 3, 7, 0, 1]
    cheap = pauses(Acceptance(Rates(), 7), *[no] * (PATIENCE + 4), yes, *[no] * (PATIENCE + 1))
    assert cheap == [0] * PATIENCE + [1, 3, 7, 7] + [0] * (1 + PATIENCE) + [1]


def test_a_pause_may_be_longer_than_usual() -> None:
    record, counts = Acceptance(Rates(), 3, patience=1), []
    for longest in (None, None, None, 20, 20, 20, None):
        record.paid(False, longest)
        counts.append(0)
        while not record.is_asked():
            counts[-1] += 1
    assert counts == [0, 1, 3, 7, 15, 20, 3]


def test_more_is_asked_for_while_all_comes_true_and_less_when_little_does() -> None:
    record = Acceptance(Rates(), 4)
    assert record.most_asked == 11
    asked = []
    for _ in range(3):
        length = record.most_asked
        record.proposed(chain(*range(length)))
        for token in range(length):
            record.chosen(token)
        asked.append(record.most_asked)
    assert asked == [2 * 12 + 3, 2 * 28 + 3, 2 * 60 + 3]  # each draft came true to its end
    for _ in range(20):
        record.proposed(chain(5, 6, 7))
        record.chosen(5)
        record.chosen(1)
    assert record.most_asked == 5  # one of them in a row
    for _ in range(20):
        record.proposed(chain(5, 6, 7))
        record.chosen(1)
    assert record.most_asked == 3


def test_chances_by_depth_count_all_estimates_together() -> None:
    rates = Rates()
    record = Acceptance(rates, 4)
    for estimate in (0.1, 0.4, 0.9):
        record.proposed(chain(5, estimate=estimate))
        record.chosen(5)
    assert rates.rate((0, ANY_ESTIMATE), UNSEEN) > (PRIOR_WEIGHT * UNSEEN + 2) / (PRIOR_WEIGHT + 3)
