"""Words that may come next, whatever stands between them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinetic_drafters import words as module
from kinetic_drafters.words import MOST_INDEXED_BYTES, MOST_MISSED, MOST_RUN_BYTES, NextWords, WordIndex

PEOPLE = (
    ("Anna Berg", "nurse", "Oslo", 34),
    ("Paul Mendes", "baker", "Porto", 51),
    ("Amina Yusuf", "pilot", "Mombasa", 29),
    ("Tom Nowak", "carpenter", "Gdansk", 42),
    ("Lucy Hall", "teacher", "Leeds", 38),
)
FORMS = {
    "lines": "name: {}; job: {}; city: {}; age: {}\n",
    "json": '{{\n  "name": "{}",\n  "job": "{}",\n  "city": "{}",\n  "age": "{}"\n}}\n',
    "csv": "{},{},{},{}\n",
    "sentences": "{} is a {} from {}, {} years old.\n",
}


def index_of(text: str, piece: int = 7) -> WordIndex:
    index = WordIndex()
    data = text.encode()
    for start in range(0, len(data), piece):
        index.text += data[start : start + piece]
        while not index.update():
            pass
    return index


def best(text: str, guessed: str = "") -> str | None:
    """What is likeliest to come after a text and guesses."""
    found = index_of(text).following(guessed.encode())
    assert found == sorted(found, reverse=True) and all(0 <= each.estimate <= 1 for each in found)
    return found[0].words.decode() if found else None


def told(form: str, people: tuple[tuple[object, ...], ...] = PEOPLE) -> str:
    return "".join(FORMS[form].format(*person) for person in people)


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_the_words_behind_the_last_ones_whatever_stands_between(piece: int) -> None:
    index = index_of('Name: Anna Berg; Job: Nurse\n\n{"name": "anna berg", "job": "', piece)
    (found,) = index.following()
    assert found == NextWords(found.estimate, b"", b"Nurse") and found.estimate >= module.MATCHED_ESTIMATES[4]


def test_a_word_that_is_begun() -> None:
    text = 'name: Anna Berg; job: nurse; pay: 12.50\n"name": "Anna Berg", "job": '
    assert index_of(text + '"nu').following()[0][1:] == (b"nu", b"nurse")
    assert best(text + '"x') is None  # nothing there begins so
    assert best(text + '"nurse') is None  # nor goes on
    assert best(text + '"nurse", "pay": "12.5') == "50"
    assert best(text.replace("job: nurse", "job: Nurse") + '"nu') is None  # a token of the other case would be wrong


def test_words_that_go_together() -> None:
    assert best("to: Ann-Marie O'Neil at x.y@example.org, then\nTo: ") is None  # one word is too little
    assert best("and to: Ann-Marie O'Neil at x.y@example.org, then\nAnd to: ") == (
        "Ann-Marie O'Neil at x.y@example.org"
    )
    assert best("see that  one  here\nsee that: ") == "one"  # two spaces are a border
    long = "word " * 30
    assert len(best(f"a b {long}\na b ") or "") == MOST_RUN_BYTES


def test_the_place_where_more_words_agree() -> None:
    text = "red big cat sleeps. small cat runs. the big cat walks.\n"
    assert best(text + "red, big cat: ") == "sleeps"
    assert best(text + "the big: cat ") == "walks"
    found = index_of(text + "red, big cat: ").following()
    assert [each.words for each in found] == [b"sleeps", b"walks"]


def test_guessed_bytes_go_on_from_the_text() -> None:
    text = 'the name: Anna Berg; job: nurse; city: Oslo\nthe "name": "An'
    assert best(text, 'na Berg", "job": "') == "nurse"
    assert best(text, 'na Berg", "job": "nurse", "city": "O') == "Oslo"
    assert best(text) == "Anna Berg"
    index = index_of(text)
    before = (bytes(index.text), list(index.words))
    index.following(b'na Berg", "job": "')
    assert (bytes(index.text), list(index.words)) == before  # guesses are not kept
    assert index.following()[0].words == b"Anna Berg"


@pytest.mark.parametrize(
    ("source", "form"),
    [("csv", "json"), ("lines", "csv"), ("sentences", "json"), ("lines", "sentences"), ("json", "sentences")],
)
def test_the_habits_of_a_form_are_learned(source: str, form: str) -> None:
    text = told(source) + "\nIn the other form:\n" + told(form, PEOPLE[:3])
    pieces = FORMS[form].format("\0", "\0", "\0", "\0").split("\0")
    for before, value in zip(pieces, PEOPLE[3], strict=False):
        text += before
        if value != PEOPLE[3][0]:  # the first one's row begins behind other words each time
            # In sentences other words go with the value.
            assert (best(text) or "").startswith(str(value)), f"after {text[-30:]!r}"
        text += str(value)


def test_habits_are_forgotten_when_the_form_changes() -> None:
    every_second = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    words = every_second.split()
    text = every_second + "\n|one|two|" + "|".join(words[3:10:2]) + "|"
    assert best(text) == "twelve thirteen fourteen"
    text += "eleven|twelve|"
    assert best(text) == "thirteen fourteen"


def test_a_pointer_that_is_lost_finds_another_place() -> None:
    text = told("lines") + "\n" + told("csv", PEOPLE[:2]) + "Amina Yusuf,"
    assert best(text) == "pilot"
    others = " ".join(f"w{n}" for n in range(MOST_MISSED))
    assert best(text + others + ",") == "job"
    assert best(text + others + " w,") is None
    assert best(text + others + " w, Tom Nowak: job ") == "carpenter"


def test_nothing_of_unlike_text() -> None:
    assert best("") is None
    assert best("one") is None
    assert best("...") is None
    assert best("all of these words are new and none comes again, ") is None
    prose = index_of("She said that he was there, and that he was not; he said that she was. " * 2 + "But the ")
    assert all(each.estimate < 0.5 for each in prose.following())


def test_beyond_ascii_nothing_is_cut() -> None:
    assert best("имя: Анна Берг; город: Осло\n«имя»: «Анна Берг», «город»: «") == "Осло"
    assert best("名前 東京 大阪\n名前、東京、") == "大阪"
    assert best("a b Ωmega\na b ", "\u03a9") == "Ωmega"
    index = index_of("a b Ωmega\na b ")
    assert index.following("Ω".encode()[:1]) == []  # a part of a character


def test_a_character_that_comes_in_two_pieces() -> None:
    index = WordIndex()
    for byte in "Zoë Ünal – «Çelik» 𝒳y. ".encode():
        index.text.append(byte)
        index.update()
    once = index_of("Zoë Ünal – «Çelik» 𝒳y. ", 100)
    assert index.words == once.words and index.starts == once.starts and len(once.words) == 4


def test_a_long_text_is_indexed_in_parts() -> None:
    index = WordIndex()
    text = " ".join(f"word{n}" for n in range(6000)).encode()
    index.text += text
    calls = 0
    while not index.update():
        calls += 1
        assert len(index.words) * 8 < (calls + 1) * MOST_INDEXED_BYTES
    assert calls == len(text) // MOST_INDEXED_BYTES
    at_once = index_of(text.decode(), 100)
    assert index.words == at_once.words and index.starts == at_once.starts and index.links == at_once.links
    assert len(index.words) == 5999  # the last may go on


def test_a_word_without_end_ends() -> None:
    index = WordIndex()
    index.text += b"x" * (3 * MOST_INDEXED_BYTES) + b" end of it. End of "
    for _ in range(4):
        done = index.update()
    assert done and index.following()[0].words == b"it"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "Cd", " ", ", ", "\n", "é", "x1"]), max_size=60), st.integers(1, 9))
def test_the_pieces_that_a_text_comes_in_do_not_matter(parts: list[str], piece: int) -> None:
    text = "".join(parts)
    one, other = index_of(text, piece), index_of(text, 10_000)
    assert one.words == other.words and one.starts == other.starts and one.following() == other.following()


def test_habits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HABITS", 16)
    rows = [f"k{n} v{n}" for n in range(100)]
    index = index_of("\n".join(rows) + "\n" + "\n".join(f"k{n} form{n} v{n}" for n in range(100)))
    assert len(index._habits) <= 16
    assert index.held_bytes > 12 * len(index.words)
