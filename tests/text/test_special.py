from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic_core.errors import RequestError
from kinetic_core.text.special import _CANDIDATES, Marks, SpecialTexts, choose_marks

MARKS = Marks("\ufdd0", "\ufdd1")


def test_split_takes_the_longest_at_the_leftmost_place() -> None:
    special = SpecialTexts({"<a": 1, "<a>": 2, "a>b": 3, "x": 4})
    assert list(special.split("<a>b")) == [2, "b"]
    assert list(special.split("za>b<ax")) == ["z", 3, 1, 4]
    assert list(special.split("<<a<")) == ["<", 1, "<"]
    assert list(special.split("")) == []
    assert list(SpecialTexts({}).split("ab")) == ["ab"]
    assert list(SpecialTexts({}).split("")) == []
    assert list(SpecialTexts({"": 1, "b": 2}).split("ab")) == ["a", 2]


def test_split_leaves_quoted_places_alone() -> None:
    special = SpecialTexts({"x": 4, "xy": 5})
    assert list(special.split("qxyx", "q")) == ["qxy", 4]
    assert list(special.split("qxyx")) == ["q", 5, 4]


@pytest.mark.parametrize(
    ("text", "guarded"),
    [
        ("plain", "plain"),
        ("", ""),
        ("a<s>b", "a<|s>b"),
        ("<s><s>", "<|s><|s>"),
        ("</s", "<|/s"),  # could be completed by what follows
        ("a < b", "a < b"),
        ("a <  \n", "a <|  \n"),
        (" \ts> a", " \t|s> a"),  # could complete what stands before
        ("a s> a", "a s> a"),
    ],
)
def test_guard(text: str, guarded: str) -> None:
    special = SpecialTexts({"<s>": 1, "</s>": 2})
    assert special.guard(text, MARKS).replace(MARKS.inside, "|") == guarded
    assert MARKS.drop(special.guard(text, MARKS)) == text


def test_guard_of_one_character_texts() -> None:
    special = SpecialTexts({"x": 4, "xy": 5})
    guarded = special.guard("xyx", MARKS)
    assert MARKS.drop(guarded) == "xyx"
    assert all(isinstance(part, str) for part in special.split(guarded, MARKS.quote))


fragments = st.lists(
    st.sampled_from(["<s>", "</s>", "<", "s>", "/s", "s", ">", " ", "\n", "<s", "x", "xy", "y", "\ufdd0", "a"]),
    max_size=8,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(first=fragments, second=fragments, trim=st.booleans())
def test_guarded_texts_give_no_special_token_wherever_they_stand(first: str, second: str, trim: bool) -> None:
    special = SpecialTexts({"<s>": 1, "</s>": 2, "<s>s": 3, "xy": 5, "x": 4})
    marks = choose_marks([first, second])
    guarded = [special.guard(text, marks) for text in (first, second)]
    assert [marks.drop(text) for text in guarded] == [first, second]
    if trim:
        guarded = [text.strip() for text in guarded]
        first, second = first.strip(), second.strip()
    # Beside each other, and beside text and tokens of a template.
    for before, middle, after in (("", "", ""), ("<s>", "<s>", "</s>"), ("<", "a", ">"), ("a", "", "s>")):
        rendered = before + guarded[0] + middle + guarded[1] + after
        parts = list(special.split(rendered, marks.quote))
        wanted = [part for text in (before, middle, after) for part in special.split(text) if isinstance(part, int)]
        assert [part for part in parts if isinstance(part, int)] == wanted
        text = "".join(marks.drop(part) if isinstance(part, str) else "" for part in parts)
        plain = [part for text in (before, middle, after) for part in special.split(text)]
        assert len(text) == len(first) + len(second) + sum(len(part) for part in plain if isinstance(part, str))


def test_marks_avoid_what_is_used() -> None:
    assert choose_marks(["a\U0001d000b", "\U0001d002"]) == Marks("\U0001d001", "\U0001d003")
    everything = "".join(map(chr, _CANDIDATES))
    assert choose_marks([everything[2:], "a"]) == Marks("\U0001d000", "\U0001d001")
    assert choose_marks([everything[:-2]]) == Marks("\U0010fffc", "\U0010fffd")
    with pytest.raises(RequestError, match="rare character"):
        choose_marks([everything[1:]])
    with pytest.raises(RequestError, match="rare character"):
        choose_marks([everything])


def test_first_marks_are_left_alone_by_text_operations() -> None:
    for mark in map(chr, _CANDIDATES[:800]):
        assert mark.isprintable() and repr([mark]) == f"['{mark}']"
        assert mark.upper() == mark.lower() == mark.title() == mark == mark.strip()
        assert {unicodedata.normalize(form, mark) for form in ("NFC", "NFD", "NFKC", "NFKD")} == {mark}
