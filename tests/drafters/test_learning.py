"""When the drafter of earlier requests learns, how much at a time, who is credited, and who gives way."""

from __future__ import annotations

import random

import pytest
from kinetic_drafters.learner import SLICE, Learner
from kinetic_drafters.ngrams import LONGEST
from kinetic_drafters.requests import LEAST_AT_TOKENS, MOST_AT_ENDS, MOST_AT_TOKENS, RequestsDrafter
from kinetic_drafters.tenant import Document, TenantIndex
from kinetic_drafters.tenants import TENANT_BYTES, WAITING_SHARE, Tenant, Tenants
from requests_support import Work, after, learn, learn_nothing, random_tokens, tokens_of


def test_what_a_call_learns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    drafter = RequestsDrafter()
    text = random_tokens(20, 12_000)
    drafter.begin(1, text[:11_000])
    assert work.taken() == (0, 0)
    for token in text[11_000:11_003]:
        drafter.committed(1, (token,))
        assert work.taken() == (MOST_AT_TOKENS, 1)
    drafter.committed(1, text[11_003:])
    assert work.taken() == (MOST_AT_TOKENS, 1)
    assert drafter.propose(1, 4) is None and work.taken() == (0, 0)
    drafter.end(1)
    assert work.taken() == (MOST_AT_ENDS, 1)
    left = 12_000 - 4 * MOST_AT_TOKENS  # held until all of it is learned
    assert 4 * left < drafter.statistics()["waiting_bytes"] < 4 * left + 1000
    for n_calls in range(1, 4):  # once more in less than that, the same text is known by now
        drafter.begin(1 + n_calls, text)
        assert work.taken() == (MOST_AT_ENDS, 1)
    drafter.committed(2, (text[0],))
    assert work.taken() == (MOST_AT_TOKENS, 1)
    drafter.end(3)
    assert work.taken() == (MOST_AT_ENDS, 1)
    drafter.end(4)
    assert work.taken() == (480 + MOST_AT_ENDS - 8 * SLICE, 2)  # the last of one and the first of another
    drafter.end(2)
    assert work.taken() == (MOST_AT_ENDS, 1)
    while drafter.statistics()["waiting_bytes"]:
        learn_nothing(drafter)
        assert 0 < work.taken()[0] <= 2 * MOST_AT_ENDS
    assert drafter.statistics()["tokens_indexed"] in range(12_000, 12_064)
    assert tokens_of(after(drafter, text[-50:-10])) == tuple(text[-10:-2])


def test_many_short_texts_that_wait_are_bounded_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = RequestsDrafter()
    learn(drafter, random_tokens(21, 100))
    drafter.begin(1, random_tokens(22, 4 * MOST_AT_ENDS))
    for number in range(100):
        drafter.begin(10 + number, random_tokens(number, 5))
    drafter.end(1)
    monkeypatch.setattr("kinetic_drafters.requests.MOST_AT_ENDS", SLICE)  # so that they get behind the long one
    for number in range(100):
        drafter.end(10 + number)
    monkeypatch.undo()
    work = Work(monkeypatch)
    n_calls = 0
    while drafter.statistics()["waiting_bytes"]:
        drafter.begin(200 + n_calls, ())
        tokens, calls = work.taken()
        assert 0 < tokens <= MOST_AT_ENDS and calls <= MOST_AT_ENDS // SLICE
        n_calls += 1
    assert n_calls >= (100 * SLICE) // MOST_AT_ENDS


def test_the_next_request_is_drafted_from_the_last_at_once() -> None:
    """As an agent's: each begins when the one before has ended, with its text and some more."""
    drafter = RequestsDrafter()
    text = random_tokens(23, 2 * MOST_AT_ENDS)
    drafter.begin(1, text)
    drafter.committed(1, (5,))
    drafter.end(1)
    drafter.begin(2, text[:-20])
    assert tokens_of(drafter.propose(2, 8)) == tuple(text[-20:-12])


def test_what_waits_is_learned_before_the_text_that_repeats_it() -> None:
    """Else it would be known by the running sequence's own document, which it makes nothing of."""
    drafter = RequestsDrafter()
    text = random_tokens(24, 5 * MOST_AT_ENDS)
    drafter.begin(1, text)
    drafter.end(1)
    drafter.begin(2, text[: 4 * MOST_AT_ENDS])
    for token in text[4 * MOST_AT_ENDS :][: 3 * MOST_AT_ENDS // MOST_AT_TOKENS]:
        drafter.committed(2, (token,))
    at = 4 * MOST_AT_ENDS + 3 * MOST_AT_ENDS // MOST_AT_TOKENS
    assert tokens_of(drafter.propose(2, 8)) == tuple(text[at : at + 8])


def test_no_other_tenant_delays_what_is_learned() -> None:
    drafter = RequestsDrafter()
    theirs, mine = random_tokens(25, 10 * MOST_AT_ENDS), random_tokens(26, 1000)
    drafter.begin(1, theirs, "they")
    drafter.end(1)
    learned = drafter.statistics()["tokens_indexed"]
    drafter.begin(2, mine[:500], "me")  # of theirs as much as is left of a call
    assert drafter.statistics()["tokens_indexed"] == learned + MOST_AT_ENDS
    for n_more in (1, 2):
        drafter.committed(2, (mine[499 + n_more],))
        assert drafter._tenants.all()[1].index.n_indexed == LEAST_AT_TOKENS  # the rest is too little yet
    drafter.committed(2, mine[502:])
    drafter.end(2)
    drafter.begin(3, mine[:900], "me")
    assert tokens_of(drafter.propose(3, 8)) == tuple(mine[900:908])
    n_calls = 0
    while drafter.statistics()["waiting_bytes"]:
        drafter.committed(3, (mine[0],))
        n_calls += 1
    assert n_calls > 10
    assert tokens_of(after(drafter, theirs[-50:-10], "they")) == tuple(theirs[-10:-2])


def test_the_texts_of_several_tenants_are_learned_in_turns() -> None:
    drafter = RequestsDrafter()
    for number, salt in enumerate("abc"):
        drafter.begin(number, random_tokens(salt, 4 * MOST_AT_ENDS), salt)
    for number in range(3):
        drafter.end(number)
    drafter.begin(4, (), "d")
    indexes = [tenant.index for tenant in drafter._tenants.all()[:3]]
    assert [index.n_indexed for index in indexes] == [2 * MOST_AT_ENDS, MOST_AT_ENDS, MOST_AT_ENDS]
    for _ in range(2):
        drafter.end(4)
        drafter.begin(4, (), "d")
    assert sorted(index.n_indexed for index in indexes) == [2 * MOST_AT_ENDS, 3 * MOST_AT_ENDS, 3 * MOST_AT_ENDS]


def test_what_waits_is_bounded_and_the_oldest_is_dropped() -> None:
    bound = 8 * TENANT_BYTES
    drafter = RequestsDrafter(bound)
    text = random_tokens(27, 100_000)
    for start in range(0, 100_000, 5000):
        drafter.begin(start, text[start : start + 5000])
        drafter.end(start)
        statistics = drafter.statistics()
        assert statistics["waiting_bytes"] <= bound // WAITING_SHARE
        assert statistics["memory_bytes"] <= bound
    assert statistics["waiting_bytes"] > bound // WAITING_SHARE // 2
    while drafter.statistics()["waiting_bytes"]:
        learn_nothing(drafter)
    assert tokens_of(after(drafter, text[-100:-50])) == tuple(text[-50:-42])


def test_of_a_text_that_is_too_long_to_wait_the_end_is_kept() -> None:
    text = random_tokens(38, 100_000)
    drafter = RequestsDrafter(8 * TENANT_BYTES)
    drafter.begin(1, text)
    drafter.end(1)
    most = 8 * TENANT_BYTES // WAITING_SHARE
    assert most - 8 < drafter.statistics()["waiting_bytes"] <= most
    while drafter.statistics()["waiting_bytes"]:
        learn_nothing(drafter)
    assert tokens_of(after(drafter, text[-100:-50])) == tuple(text[-50:-42])


def test_a_text_whose_middle_was_dropped_is_not_put_together() -> None:
    index = TenantIndex()
    text = random_tokens(39, 10_000)
    learner = Learner(1, index, text)
    learner.learn(1000, 1 << 20)
    learner.ended(learner_bytes := 10_000)
    assert learner_bytes - 8 < learner.held_bytes <= learner_bytes
    learner.learn(len(learner.tokens), 1 << 20)
    first, second = (document for document in index._slots if document is not None)
    assert first.tokens.tolist() == text[:1000]
    assert second.tokens.tolist() == text[-len(second.tokens) :] and second.lead == LONGEST


def test_what_waits_gives_way_where_no_document_can(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = RequestsDrafter(TENANT_BYTES)
    monkeypatch.setattr(TenantIndex, "evict", lambda index: False)
    for seed in range(5):
        learn(drafter, random_tokens(f"no room {seed}", 1000))
        assert drafter.statistics()["memory_bytes"] <= TENANT_BYTES


def test_no_document_leaves_for_texts_that_wait_beyond_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of these are dropped before anybody is asked for memory."""
    bound = 8 * TENANT_BYTES
    drafter = RequestsDrafter(bound)
    number = 0
    while drafter.statistics()["memory_bytes"] < bound - 2 * bound // WAITING_SHARE:
        learn(drafter, random_tokens(f"known {number}", 300))
        number += 1
    monkeypatch.setattr("kinetic_drafters.requests.MOST_AT_ENDS", 0)  # nothing is learned meanwhile
    n_tokens = bound // WAITING_SHARE // 4 - 1000
    for sequence in range(6):
        drafter.begin(sequence, random_tokens(f"waits {sequence}", n_tokens))
        drafter.end(sequence)
        statistics = drafter.statistics()
        assert 4 * n_tokens < statistics["waiting_bytes"] <= bound // WAITING_SHARE
        assert statistics["evictions"] == 0 and statistics["documents"] == number
    assert bound - statistics["memory_bytes"] < 4 * n_tokens  # two would not have had room


def test_a_tenant_may_hold_an_equal_share_or_what_the_others_leave() -> None:
    tenants = Tenants(10 * TENANT_BYTES)
    small, large = tenants.enter("small"), tenants.enter("large")
    assert small is not None and large is not None
    for number in range(200):
        text = random_tokens(number, 400)
        tenants.learn(large, Learner(number, large.index, text), len(text))
    assert large.held_bytes > 9 * TENANT_BYTES
    assert tenants._limit_bytes(small) == 5 * TENANT_BYTES
    assert tenants._limit_bytes(large) == 10 * TENANT_BYTES - small.held_bytes
    assert tenants.held_bytes == small.held_bytes + large.held_bytes <= 10 * TENANT_BYTES


def test_what_waits_is_dropped_beyond_its_share_of_what_others_leave() -> None:
    tenants = Tenants(10 * TENANT_BYTES)
    first, other = tenants.enter("first"), tenants.enter("other")
    assert first is not None and other is not None
    for number in range(6):
        tenants.wait(first, Learner(number, first.index, random_tokens(f"waits {number}", 3000)))
    waiting_bytes = first.waiting_bytes
    for number in range(200):
        text = random_tokens(number, 400)
        tenants.learn(other, Learner(10 + number, other.index, text), len(text))
    most_bytes = tenants._limit_bytes(first) // WAITING_SHARE
    assert most_bytes < first.waiting_bytes == waiting_bytes  # the other one has given way so far
    assert tenants.work_off(first, 0) == 0
    assert most_bytes // 2 < first.waiting_bytes <= most_bytes
    assert tenants.held_bytes == first.held_bytes + other.held_bytes


def test_the_memory_may_be_held_to_the_last_byte() -> None:
    tenants = Tenants(TENANT_BYTES)
    tenant = tenants.enter("")
    assert tenant is not None
    text = random_tokens(45, 1000)
    tenants.learn(tenant, Learner(1, tenant.index, text), len(text))
    tenants.memory_bytes = tenants.held_bytes
    tenants._changed(tenant)
    assert tenant.index.n_documents == 1
    tenants.memory_bytes -= 1
    tenants._changed(tenant)
    assert tenant.index.n_documents == 0 and tenants.held_bytes == tenant.held_bytes


def test_what_waits_gives_way_when_the_share_gets_smaller() -> None:
    drafter = RequestsDrafter(16 * TENANT_BYTES)
    drafter.begin(1, random_tokens(28, 30_000), "first")
    drafter.end(1)
    assert drafter.statistics()["waiting_bytes"] > TENANT_BYTES
    for number in range(15):
        drafter.begin(2 + number, random_tokens(number, 3000), f"other {number}")
        for _ in range(12):
            drafter.committed(2 + number, (5,))
        assert drafter.statistics()["memory_bytes"] <= 16 * TENANT_BYTES
    first = drafter._tenants.all()[0]
    drafter.begin(100, (), "first")
    assert first.waiting_bytes <= drafter._tenants._limit_bytes(first) // WAITING_SHARE


def test_a_tenant_that_is_put_out_takes_what_waits_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = RequestsDrafter(2 * TENANT_BYTES)
    for number, salt in enumerate("ab"):
        drafter.begin(number, random_tokens(salt, 3 * MOST_AT_ENDS), salt)
    monkeypatch.setattr("kinetic_drafters.requests.MOST_AT_ENDS", SLICE)
    drafter.end(0)
    drafter.end(1)
    tenants = drafter._tenants
    assert len(tenants._owing) == 2 and drafter.statistics()["waiting_bytes"] > 8000
    drafter.begin(2, random_tokens("c", 200), "c")
    monkeypatch.undo()
    drafter.end(2)
    drafter.begin(3, (), "d")
    assert drafter.statistics()["tenants"] == 2 and not tenants._owing
    assert drafter.statistics()["waiting_bytes"] == 0
    assert tenants.held_bytes == drafter.statistics()["memory_bytes"] == sum(tenants._sizes.values())
    assert tokens_of(after(drafter, random_tokens("c", 200)[:50], "c")) == tuple(random_tokens("c", 200)[50:58])


def test_who_ended_last_is_put_out_last() -> None:
    drafter = RequestsDrafter(2 * TENANT_BYTES)
    drafter.begin(1, random_tokens("a", 200), "a")
    learn(drafter, random_tokens("b", 200), "b")
    drafter.end(1)  # began before, and was without a request for less long
    learn(drafter, random_tokens("c", 200), "c")
    assert after(drafter, random_tokens("a", 200)[:50], "a") is not None


def documents_of(drafter: RequestsDrafter) -> list[Document]:
    return [d for tenant in drafter._tenants.all() for d in tenant.index._slots if d is not None]


def test_forks_of_a_request_do_not_credit_each_other() -> None:
    drafter = RequestsDrafter()
    prompt, answer = random_tokens(30, 1000), random_tokens(31, 300)
    drafter.begin(1, prompt)
    for child, parent in ((2, 1), (3, 1), (4, 3)):
        drafter.begin(child, prompt)
        drafter.forked(child, parent)
    n_drafts = 0
    for sequence in (1, 2, 3, 4):
        for token in answer:
            n_drafts += drafter.propose(sequence, 4) is not None
            drafter.committed(sequence, (token,))
    assert n_drafts > 600  # they do guess for each other
    for sequence in (2, 4, 1, 3):
        drafter.end(sequence)
    assert drafter.statistics()["tokens_indexed"] in range(1300, 1300 + 3 * SLICE)
    assert [document.helped for document in documents_of(drafter)] == [0] * drafter.statistics()["documents"]
    drafter.begin(5, prompt)  # asks for the same again
    for token in answer[:5]:
        drafter.propose(5, 4)
        drafter.committed(5, (token,))
    assert sum(document.helped for document in documents_of(drafter)) >= 5
    drafter.end(5)
    assert sum(document.is_helpful for document in documents_of(drafter)) > 0


def test_the_prompt_of_forks_is_learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = RequestsDrafter()
    prompt = random_tokens(32, 1000)
    drafter.begin(1, prompt)
    drafter.begin(2, prompt)
    drafter.forked(2, 1)
    work = Work(monkeypatch)
    drafter.committed(2, (1,))
    drafter.end(2)  # with its first token
    assert work.taken() == (1, 1)
    drafter.end(1)
    assert work.taken() == (1000, 1)


def test_forks_without_a_place_for_their_tenant() -> None:
    drafter = RequestsDrafter(TENANT_BYTES)
    drafter.begin(1, [1, 2], "a")
    for sequence in (2, 3):
        drafter.begin(sequence, [1, 2], "b")
    drafter.forked(3, 2)
    drafter.end(1)
    drafter.begin(4, [1, 2], "b")  # by now there is one
    drafter.forked(4, 2)
    for sequence in (2, 3, 4):
        drafter.committed(sequence, (5,))
        drafter.end(sequence)
    assert drafter.statistics()["sequences"] == 0


def test_a_text_that_repeats_itself_does_not_help_itself() -> None:
    drafter = RequestsDrafter()
    text = random_tokens(33, 300)
    learn(drafter, [*text, *text, *text])
    assert [document.helped for document in documents_of(drafter)] == [0]
    learn(drafter, text)
    assert [document.helped for document in documents_of(drafter)] == [300]


def test_a_text_that_left_is_not_held_for_an_edit() -> None:
    drafter = RequestsDrafter()
    text = random_tokens(34, 200)
    learn(drafter, text)
    drafter.begin(1, text[:50])
    for token in (*text[50:60], 1):
        drafter.propose(1, 4)
        drafter.committed(1, (token,))
    drafter.propose(1, 4)
    _, learner = drafter._sequences[1] or (None, None)
    assert learner is not None and learner.parted is not None
    index = drafter._tenants.all()[0].index
    while index.evict():
        pass
    assert drafter.propose(1, 4) is None and learner.parted is None


def test_the_largest_gives_way_and_is_found_without_looking_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = RequestsDrafter(64 * TENANT_BYTES)
    tenants = drafter._tenants
    source = random.Random(35)
    n_looks = n_evictions = 0
    held_bytes, evict = Tenant.held_bytes.fget, TenantIndex.evict  # type: ignore[attr-defined]
    in_learning = False

    def look(tenant: Tenant) -> int:
        nonlocal n_looks
        n_looks += 1
        return held_bytes(tenant)

    def checked(index: TenantIndex) -> bool:
        nonlocal n_evictions
        if not in_learning:
            n_evictions += 1
            sizes = {tenant.index: held_bytes(tenant) for tenant in tenants.all()}
            assert sizes[index] == max(sizes.values()) and tenants.held_bytes == sum(sizes.values())
        return evict(index)

    real = Learner.learn

    def learn_inside(learner: Learner, end: int, limit_bytes: int) -> None:
        nonlocal in_learning
        in_learning = True
        real(learner, end, limit_bytes)
        in_learning = False

    monkeypatch.setattr(Learner, "learn", learn_inside)
    monkeypatch.setattr(TenantIndex, "evict", checked)
    monkeypatch.setattr(Tenant, "held_bytes", property(look))
    for number in range(600):
        n_tokens = source.choice((30, 300, 2000))
        drafter.begin(
            number, random_tokens(number, n_tokens), f"tenant {source.randrange(90) if n_tokens < 2000 else 0}"
        )
        drafter.end(number)
        assert len(tenants._by_size) <= 2 * 64 + 16
    assert n_evictions > 50 and n_looks < 10 * (600 + n_evictions)
    assert drafter.statistics()["memory_bytes"] <= 64 * TENANT_BYTES


def test_memory_that_nobody_can_give_ends_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = RequestsDrafter(TENANT_BYTES)
    monkeypatch.setattr(TenantIndex, "evict", lambda index: False)
    drafter.begin(1, random_tokens(36, 5000))
    for _ in range(15):
        drafter.committed(1, (5,))
    assert drafter.statistics()["memory_bytes"] > TENANT_BYTES


def test_many_small_texts_leave_room_for_others() -> None:
    """What a tenant keeps per document that left must not take the others' place for good."""
    drafter = RequestsDrafter(20 * TENANT_BYTES)
    for number in range(1500):
        learn(drafter, random_tokens(number, 4), "many")
    for number in range(19):
        for seed in range(5):
            learn(drafter, random_tokens(f"{number} {seed}", 400), f"other {number}")
            assert drafter.statistics()["memory_bytes"] <= 20 * TENANT_BYTES
        text = random_tokens(f"{number} 4", 400)
        assert tokens_of(after(drafter, text[:50], f"other {number}")) == tuple(text[50:58])


def test_a_fork_goes_on_in_a_document_of_its_own() -> None:
    index = TenantIndex()
    text = random_tokens(40, 1000)
    parent, child = Learner(1, index, text[:900]), Learner(2, index, text[:900])
    child.learn(200, 1 << 20)  # before it is known to be a fork
    child.forked(parent)
    child.pending.extend(text[900:])
    assert child.n_unlearned == 100
    child.learn(1000, 1 << 20)
    first, second = (document for document in index._slots if document is not None)
    assert first.tokens.tolist() == text[:200]
    assert second.tokens.tolist() == text[900 - LONGEST :] and second.lead == LONGEST


def test_no_more_is_taken_for_known_than_was_to_be_learned() -> None:
    index = TenantIndex()
    text = random_tokens(47, 500)
    Learner(1, index, text).learn(500, 1 << 20)
    learner = Learner(2, index, text)
    for end in (100, 300):
        learner.learn(end, 1 << 20)
        assert learner.learned == end and index.n_indexed == 500


def test_what_waits_holds_nothing_but_its_tokens() -> None:
    index = TenantIndex()
    text = random_tokens(41, 500)
    earlier = Learner(1, index, text)
    earlier.learn(500, 1 << 20)
    learner = Learner(2, index, text[:50])
    for token in (*text[50:60], 1, *text[100:120]):
        learner.draft((), 4)
        learner.pending.append(token)
    learner.draft((), 4)
    assert learner.alignment is not None and learner.parted is not None
    learner.ended(10_000)
    assert learner.alignment is learner.parted is None and not learner.pending
    assert learner.tokens.tolist() == [*text[:60], 1, *text[100:120]]


def test_a_tenant_with_a_running_sequence_is_not_put_out() -> None:
    drafter = RequestsDrafter(TENANT_BYTES)
    for number in (1, 2):
        drafter.begin(number, random_tokens("mine", 200), "mine")
    drafter.end(1)
    learn(drafter, random_tokens("other", 200), "other")
    assert [tenant.salt for tenant in drafter._tenants.all()] == ["mine"]
    drafter.end(2)
    learn(drafter, random_tokens("other", 200), "other")
    assert [tenant.salt for tenant in drafter._tenants.all()] == ["other"]


def test_the_index_may_hold_what_waiting_texts_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = RequestsDrafter(8 * TENANT_BYTES)
    left: list[int] = []
    real = Learner.learn

    def learn_within(learner: Learner, end: int, limit_bytes: int) -> None:
        left.append(8 * TENANT_BYTES - limit_bytes)
        real(learner, end, limit_bytes)

    monkeypatch.setattr(Learner, "learn", learn_within)
    drafter.begin(1, random_tokens(42, 10_000))
    drafter.end(1)
    assert left == [drafter.statistics()["waiting_bytes"]] and left[0] > 40_000


def test_a_call_learns_no_more_for_all_tenants_together(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = RequestsDrafter()
    drafter.begin(1, random_tokens(43, 5 * MOST_AT_ENDS), "they")
    drafter.end(1)
    drafter.begin(2, random_tokens(44, LEAST_AT_TOKENS - 1), "me")
    mine = drafter._tenants.all()[1].index
    work = Work(monkeypatch)
    drafter.committed(2, (5,))
    assert work.taken() == (MOST_AT_TOKENS, 1) and mine.n_indexed == LEAST_AT_TOKENS  # one's own first
    drafter.committed(2, (6,))
    assert work.taken() == (MOST_AT_TOKENS, 1) and mine.n_indexed == LEAST_AT_TOKENS  # now it is theirs
