"""Words put into drafts, cut into tokens as they stand in the answer."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence

import pytest
from kinetic_drafters import retelling as module
from kinetic_drafters import words as words_module
from kinetic_drafters.context import ContextDrafter
from kinetic_drafters.edits import SHARES
from kinetic_drafters.retelling import SURE, Retelling, Sketch
from kinetic_drafters.words import MATCHED_ESTIMATES

from kinetic_core.engine.drafting import Drafting
from kinetic_core.errors import RequestError
from kinetic_core.interfaces import Draft, DraftTree

PEOPLE = (("Anna Berg", "nurse", "Oslo"), ("Paul Mendes", "baker", "Porto"), ("Amina Yusuf", "pilot", "Mombasa"))
LINES = "".join(f"name: {name}; job: {job}; city: {city}\n" for name, job, city in PEOPLE)
FILLED = [json.dumps({"name": name, "job": job, "city": city}) + "\n" for name, job, city in PEOPLE]

PIECES = ["name", "job", "city", " nurse", " baker", " pilot", "nur", "se", "ba", "ker", "pi", "lot", '": "', '", "']
PIECES += [" Anna", " Berg", "Anna", " Paul", "Paul", " Mendes", "Amina", " Yusuf", " Oslo", "Os", "lo", '{"', '"}\n']
UNWRITTEN = 900
"""A token of the output layer that the tokenizer does not have."""


class Texts:
    """Longest piece first, else single bytes (ids 0 to 255). space: one is put before every text."""

    def __init__(self, space: bool = False) -> None:
        self.pieces = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES]
        self.longest_first = sorted(range(len(self.pieces)), key=lambda token: -len(self.pieces[token]))
        self.space = space
        self.encoded: list[str] = []

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= len(self.pieces):
            raise RequestError("no such token", field="prompt")
        return self.pieces[token_id]

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        assert add_bos is False
        if "\U00010330" in text:
            raise RequestError("cannot be expressed", field="prompt")
        self.encoded.append(text)
        data, tokens = (" " * self.space + text).encode(), []
        while data:
            token = next(token for token in self.longest_first if data.startswith(self.pieces[token]))
            tokens.append(token)
            data = data[len(self.pieces[token]) :]
        return tokens

    def tokens(self, text: str) -> list[int]:
        """As a model would write it, without a space before."""
        return Texts().encode(text, add_bos=False)


def drafter_after(texts: Texts, tokens: Sequence[int]) -> ContextDrafter:
    drafter = ContextDrafter()
    drafter.read_texts(texts)
    drafter.begin(1, tokens)
    return drafter


def likeliest(draft: Draft | None) -> list[int]:
    """The tokens of the path that takes the likeliest guess at each place."""
    found: list[int] = []
    node = -1
    while draft is not None:
        children = [child for child, parent in enumerate(draft.tree.parents) if parent == node]
        if not children:
            break
        node = max(children, key=lambda child: draft.expected[child])
        found.append(draft.tree.token_ids[node])
    return found


def nothing_follows(_guessed: Sequence[int], _most: int) -> None:
    return None


def with_edit(old: int, new: int, tokens: Sequence[int], guesses: Sequence[int], shares: Sequence[float]) -> list[int]:
    """The tokens of a chain of guesses and what is put in, where a replacement was made before; no token is a word."""
    retelling = Retelling(Texts())
    retelling.edits.learn([old], [new])
    draft = Draft(DraftTree.chain(guesses), tuple(shares))
    improved = retelling.improved(draft, array("i", tokens), 1, must_not_be_asked, 8)
    assert improved is not None
    return list(improved.tree.token_ids)


@pytest.mark.parametrize(
    ("shares", "is_made"),
    [((0.9, 0.9), True), ((0.5, 0.2), True), ((0.3, 0.3), False)],  # LEAST_REACHED is 0.1
)
def test_a_replacement_is_made_where_it_is_likely_enough_to_be_reached(
    shares: tuple[float, float], is_made: bool
) -> None:
    tokens, guesses = [59, 33, 34, 40, 35, 36], [33, 34, 40, 35]
    expected = [*guesses, *([41, 35, 36] if is_made else [])]
    assert with_edit(40, 41, tokens, guesses, (*shares, 0.9, 0.9)) == expected


def must_not_be_asked(guessed: Sequence[int], _most: int) -> None:
    raise AssertionError(f"asked for what follows {guessed}")


@pytest.mark.parametrize(("share", "is_looked_at"), [(SURE, False), (SURE - 0.01, True)])
def test_words_are_looked_for_beside_guesses_that_are_not_sure(share: float, is_looked_at: bool) -> None:
    texts = Texts()
    tokens = array("i", texts.tokens(LINES + '{"name": "Anna Berg", "job": "'))
    draft = Draft(DraftTree.chain([ord("x"), ord("|")]), (share, 0.5))
    improved = Retelling(texts).improved(draft, tokens, len(tokens), nothing_follows, 8)
    assert improved is not None
    roots = [token for token, parent in zip(improved.tree.token_ids, improved.tree.parents, strict=True) if parent < 0]
    assert roots == [ord("x"), *([texts.tokens("nurse")[0]] if is_looked_at else [])]


def test_words_are_left_alone_in_a_pause_though_a_replacement_may_be_made() -> None:
    texts = Texts()
    retelling = Retelling(texts)
    tokens = array("i", texts.tokens(LINES + '{"name": "Anna Berg", "job": "'))
    assert likeliest(retelling.improved(None, tokens, len(tokens), nothing_follows, 8)) == texts.tokens("nurse")
    retelling.edits.learn([tokens[0]], [33])
    retelling._watched, retelling._left = None, 2
    for expected in ([], [], texts.tokens("nurse")):
        assert likeliest(retelling.improved(None, tokens, 0, nothing_follows, 8)) == expected
        assert retelling._in_vain == 0  # a pause is no look in vain


def test_the_first_word_that_is_put_in_is_watched() -> None:
    texts = Texts()
    tokens = array("i", texts.tokens(LINES + "".join(FILLED[:2]) + '{"name": "'))
    drafter = drafter_after(texts, tokens)
    draft = drafter.propose(1, 31)
    assert draft is not None and texts.tokens("pilot")[0] in draft.tree.token_ids  # another one behind it
    retelling = drafter._sequences[1].retelling
    assert retelling is not None and retelling._watched == (len(tokens), (texts.tokens("Amina")[0],))


def test_what_follows_is_asked_for_behind_likelier_words_only() -> None:
    texts = Texts()
    tokens = array("i", texts.tokens("qq a; b; d. ww z a, b c ee; a. b "))
    draft = Draft(DraftTree.chain([ord("c")]), (0.75,))
    improved = Retelling(texts).improved(draft, tokens, len(tokens), must_not_be_asked, 2)
    assert improved is not None and set(improved.tree.token_ids) == {ord("c"), ord("d")}
    asked: list[tuple[list[int], int]] = []
    tokens = array("i", texts.tokens(LINES + '{"name": "Anna Berg", "job": "'))
    Retelling(texts).improved(None, tokens, len(tokens), lambda path, most: asked.append(([*path], most)), 3)
    assert asked == [(texts.tokens("nurse"), 1)]
    Retelling(texts).improved(None, tokens, len(tokens), must_not_be_asked, 2)  # "nurse" is all there is room for
    nothing_found = array("i", texts.tokens("no word comes again. "))
    assert Retelling(texts).improved(None, nothing_found, len(nothing_found), must_not_be_asked, 8) is None


@pytest.mark.parametrize(("share", "left"), [(0.9, 0.4), (0.2, 0.2)])
def test_what_may_be_replaced_is_no_likelier_than_that_it_is_not(share: float, left: float) -> None:
    assert SHARES[0] == 0.6
    retelling = Retelling(Texts())
    retelling.edits.learn([40], [41])
    draft = Draft(DraftTree.chain([40]), (share,))
    improved = retelling.improved(draft, array("i", [59, 40]), 1, nothing_follows, 8)
    assert improved is not None and improved.tree == DraftTree((40, 41), (-1, -1))
    assert improved.expected == pytest.approx((left, 0.6))


def test_no_replacement_is_made_of_what_is_not_guessed() -> None:
    guesses = [33, 34]
    assert with_edit(40, 41, [59, 40, 34, 35], guesses, (0.9, 0.9)) == guesses  # another place's token is likelier
    assert with_edit(34, 41, [59, 33, 35, 34], guesses, (0.9, 0.9)) == guesses  # the place went on otherwise
    assert with_edit(40, 41, [59, 33, 40], [33, 40], (0.9, 0.9)) == [33, 40, 41]


def test_no_replacement_is_made_behind_the_last_guess() -> None:
    retelling = Retelling(Texts())
    retelling.edits.learn([34, 36], [41])
    draft = Draft(DraftTree.chain([33, 34]), (0.9, 0.9))
    tokens = array("i", [59, 33, 34, 34, 36])
    assert retelling.improved(draft, tokens, 1, nothing_follows, 8) == draft


def guessed_text(texts: Texts, text: str, most: int = 12) -> str:
    draft = drafter_after(texts, texts.tokens(text)).propose(1, most)
    return b"".join(map(texts.token_bytes, likeliest(draft))).decode()


@pytest.mark.parametrize("space", [False, True])
def test_a_word_is_cut_as_it_stands_in_the_answer(space: bool) -> None:
    texts = Texts(space)
    text = LINES + '{"name": "Anna Berg", "job": "'
    draft = drafter_after(texts, texts.tokens(text)).propose(1, 2)
    assert texts.tokens(" nurse") == [256 + PIECES.index(" nurse")]  # another token behind a space
    assert likeliest(draft) == [256 + PIECES.index("nur"), 256 + PIECES.index("se")]


def test_without_a_tokenizer_there_are_no_words() -> None:
    texts = Texts()
    tokens = texts.tokens(LINES + '{"name": "Anna Berg", "job": "')
    drafter = ContextDrafter()
    drafter.begin(1, tokens)
    draft = drafter.propose(1, 4)
    assert draft is None or 256 + PIECES.index("nur") not in draft.tree.token_ids


def test_tokens_and_words_in_turn() -> None:
    text = LINES + "".join(FILLED[:2]) + '{"name": "'
    assert guessed_text(Texts(), text, 31).startswith('Amina Yusuf", "job": "pilot", "city": "Mombasa"}\n')


def test_a_word_that_is_begun_goes_on() -> None:
    text = LINES + FILLED[0] + '{"name": "Paul Mendes", "job": "ba'
    assert guessed_text(Texts(), text).startswith("ker")


def test_a_guess_with_a_space_before_it() -> None:
    texts = Texts()
    text = "".join(FILLED) + "name: Anna Berg; job: nurse; city: Oslo\nname: Paul Mendes; job:"
    assert guessed_text(texts, text).startswith(" baker; city: ")
    draft = drafter_after(texts, texts.tokens(text)).propose(1, 1)
    assert likeliest(draft) == [256 + PIECES.index(" baker")]


def test_no_border_between_tokens_no_guess() -> None:
    texts = Texts()
    text = LINES + '{"name": "Anna Berg", "job": "n'
    texts.pieces.append(b'"nurse')  # now the quote and the word are one token, and "nurse" alone cannot be cut so
    texts.longest_first.insert(0, len(texts.pieces) - 1)
    assert Retelling(texts)._cut(b'"', b"nurse") == []
    assert Retelling(texts)._encoded(b'"', b"nurse") == texts.tokens("nurse")
    assert guessed_text(texts, text).startswith("urse")


def test_what_is_sure_is_not_looked_at() -> None:
    texts = Texts()
    verbatim = "The quick brown fox jumps over the lazy dog, and then it sleeps until the evening comes.\n"
    drafter = drafter_after(texts, texts.tokens(verbatim + verbatim + verbatim[:40]))
    texts.encoded.clear()
    draft = drafter.propose(1, 8)
    assert draft is not None and min(draft.expected) >= SURE and texts.encoded == []
    retelling = Retelling(texts)
    for share, n_read in ((SURE, 0), (SURE - 0.01, 4)):
        draft = Draft(DraftTree.chain([33, 34]), (1.0, share))
        assert retelling.improved(draft, array("i", [35, 33, 34, 36]), 1, nothing_follows, 8) == draft
        assert retelling._n_read == n_read  # the text is taken in when words are looked for


def test_tokens_and_texts_that_a_tokenizer_does_not_have() -> None:
    texts = Texts()
    drafter = drafter_after(texts, [*texts.tokens(LINES), UNWRITTEN, *texts.tokens('{"name": "Anna Berg", "job": "')])
    assert likeliest(drafter.propose(1, 2)) == texts.tokens("nurse")
    inexpressible = "a b \U00010330d\na b ".encode()  # a letter
    drafter_after(texts, [*inexpressible, UNWRITTEN]).propose(1, 8)
    assert Retelling(texts)._encoded(b"", "\U00010330".encode()) == []


def test_drafts_fit_whatever_the_text_is() -> None:
    source, texts = random.Random(3), Texts()
    drafter = drafter_after(texts, texts.tokens(LINES))
    for turn in range(300):
        piece = source.choice([*FILLED, LINES[: source.randrange(60)], "x y, ", "\n", '"', "n", "\u00e9", "|"])
        drafter.committed(1, texts.tokens(piece)[: source.randrange(1, 12)])
        most = source.choice([1, 2, 5, 31])
        draft = drafter.propose(1, most)
        if draft is None:
            continue
        tree = draft.tree
        assert 1 <= len(tree.token_ids) == len(tree.parents) == len(draft.expected) <= most, turn
        assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
        assert all(0 <= share <= 1 for share in draft.expected)
        siblings = list(zip(tree.parents, tree.token_ids, strict=True))
        assert len(set(siblings)) == len(siblings)


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_READ", 50)
    texts = Texts()
    tokens = array("i", texts.tokens(LINES + '{"name": "Anna Berg", "job": "'))
    retelling = Retelling(texts)
    drafts = [retelling.improved(None, tokens, len(tokens), nothing_follows, 4) for _ in range(-(-len(tokens) // 50))]
    assert len(drafts) > 1 and drafts[:-1] == [None] * (len(drafts) - 1)
    assert likeliest(drafts[-1]) == texts.tokens("nurse")


def test_nothing_is_put_in_before_all_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "MOST_INDEXED_BYTES", 40)
    texts = Texts()
    drafter = drafter_after(texts, texts.tokens(LINES + '{"name": "Anna Berg", "job": "'))
    drafts = [likeliest(drafter.propose(1, 2)) for _ in range(-(-len(LINES) // 40) + 1)]
    nurse = texts.tokens("nurse")
    assert drafts[0] != nurse and drafts[-1] == nurse


def test_the_first_token_is_read() -> None:
    texts = Texts()
    draft = drafter_after(texts, texts.tokens("x y z. x: y, ")).propose(1, 1)
    assert likeliest(draft) == texts.tokens("z")


def test_shares_of_what_is_put_in() -> None:
    texts = Texts()
    draft = drafter_after(texts, texts.tokens(LINES + '{"name": "Anna Berg", "job": "')).propose(1, 31)
    assert draft is not None
    nurse = draft.tree.token_ids.index(texts.tokens("nurse")[0])
    assert draft.tree.parents[nurse] == -1 and draft.expected[nurse] >= MATCHED_ESTIMATES[4]
    within = draft.tree.token_ids.index(texts.tokens("nurse")[1])
    assert draft.tree.parents[within] == nurse and draft.expected[within] == module.ESTIMATE_WITHIN


@pytest.mark.parametrize("most", [1, 2, 4])
def test_words_are_put_in_at_few_places(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(module, "MOST_WORDS", most)
    monkeypatch.setattr(module, "LEAST_REACHED", 0.0)
    text = guessed_text(Texts(), LINES + "".join(FILLED[:2]) + '{"name": "', 31)
    right = 'Amina Yusuf", "job": "pilot", "city": "Mombasa"}\n'
    n_right = sum(value in text for value in PEOPLE[2])
    assert n_right == min(most, 3) and (text.startswith(right) if most > 2 else not text.startswith(right))


def test_what_is_less_likely_than_the_tokens_guess_is_a_branch_beside_it() -> None:
    """After ` b ` came c, after the words "a b" came d as well, elsewhere."""
    texts = Texts()
    text = "qq a; b; d. ww z a, b c ee; a. b "
    draft = drafter_after(texts, texts.tokens(text)).propose(1, 31)
    assert draft is not None and likeliest(draft)[0] == ord("c")
    roots = {token for token, parent in zip(draft.tree.token_ids, draft.tree.parents, strict=True) if parent < 0}
    assert {ord("c"), ord("d")} <= roots


def test_words_are_looked_for_less_often_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    following = words_module.WordIndex.following
    monkeypatch.setattr(
        words_module.WordIndex, "following", lambda self, guessed: looked.append(1) or following(self, guessed)
    )
    texts = Texts()
    drafter = drafter_after(texts, texts.tokens(LINES))
    for number in range(300):  # words that never come again
        drafter.committed(1, texts.tokens(f"{number * 7919:x}z "))
        drafter.propose(1, 4)
    assert module.PATIENCE <= len(looked) < 60
    n_drafts = 0
    for token in texts.tokens("\n" + "".join(FILLED)):  # and then they do
        drafter.committed(1, [token])
        n_drafts += 1
        if likeliest(drafter.propose(1, 4))[:1] == texts.tokens("pilot")[:1]:
            break
    assert n_drafts < len(texts.tokens("\n" + "".join(FILLED)))


def test_words_that_came_are_looked_for_again_at_once() -> None:
    texts = Texts()
    drafter = drafter_after(texts, texts.tokens(LINES))
    guessed = 0
    for token in texts.tokens("".join(FILLED)):
        drafter.propose(1, 4)
        retelling = drafter._sequences[1].retelling
        assert retelling is not None and retelling._in_vain < module.PATIENCE + 2
        guessed += retelling._left == 0
        drafter.committed(1, [token])
    assert guessed > 20


def test_kept_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 8)
    texts = Texts()
    retelling = Retelling(texts)
    for number in range(50):
        retelling._encoded(b'"', b"%d" % number)
        assert len(retelling._tokens_of) <= 8
    texts.encoded.clear()
    retelling._encoded(b'"', b"49")
    assert texts.encoded == []  # kept
    assert retelling.held_bytes > 0


def test_a_sketch_keeps_the_likeliest_with_their_parents() -> None:
    sketch = Sketch(Draft(DraftTree((1, 2, 3), (-1, 0, -1)), (0.5, 0.9, 0.3)))
    assert sketch.likeliest(-1) == 0 and sketch.likeliest(1) == -1
    assert sketch.add(-1, 3, 0.6) == 2  # the same guess again, thought to be likelier
    assert sketch.add(-1, 3, 0.2) == 2 and sketch.shares[2] == 0.6  # nor less likely for another reason
    assert sketch.likeliest(-1) == 2
    sketch.graft(2, Draft(DraftTree((7, 8), (-1, 0)), (0.5, 0.1)))
    assert sketch.best(9) == Draft(DraftTree((1, 2, 3, 7, 8), (-1, 0, -1, 2, 3)), (0.5, 0.9, 0.6, 0.5, 0.1))
    assert sketch.best(3) == Draft(DraftTree((1, 2, 3), (-1, 0, -1)), (0.5, 0.9, 0.6))
    assert Sketch(None).best(4) is None


def test_the_engine_hands_on_its_tokenizer() -> None:
    texts, drafter = Texts(), ContextDrafter()
    Drafting({"context": drafter}, None, 300, 100, texts=texts)  # type: ignore[arg-type]
    drafter.begin(1, texts.tokens(LINES + '{"name": "Anna Berg", "job": "'))
    assert likeliest(drafter.propose(1, 2)) == texts.tokens("nurse")
