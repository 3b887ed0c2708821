"""Guesses from a text that tells the same again, with replacements or in another form.

Tokens are guessed from tokens as long as that is sure. Where it is not, and a word begins, the words that follow in
the retold text are put in, cut into tokens as they stand here, and the tokens go on behind them. And where tokens come
that were replaced before, their replacement is put in.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat

from kinetic_core.errors import RequestError
from kinetic_core.interfaces import Draft, DraftTree, TokenTexts
from kinetic_drafters.edits import Edits
from kinetic_drafters.words import RUN, WORD, WordIndex

SURE = 0.8
"""A guess of this estimate is not looked at."""
ESTIMATE_WITHIN = 0.9
"""How likely the tokens of words, or of a replacement, after the first are."""
ESTIMATE_BEHIND_EDIT = 0.92
"""The same of those that stood behind what is replaced."""
FORM_ESTIMATES = (0.9, 0.75)
"""How likely a token is that stood behind other words in the same form: one without a word, and one with."""
LONGEST_WORDS = 16
"""Tokens within which words that are replaced have to end."""
LEAST_REACHED = 0.1
"""Places that are reached with a lower estimated probability are not looked at."""
MOST_WORDS = 4
"""Places where words are put in, one after the other, with tokens between them."""
PATIENCE, LONGEST_PAUSE = 4, 31
"""Words are looked for in vain so many times in a row, then left alone for 1, 3, 7 and at most so many drafts."""
WRONG = 0.3
"""Words that were found and did not come count as so many looks in vain: habits are still being learned."""
MOST_READ = 4096
"""Tokens whose text is taken in at a time."""
MOST_KEPT = 1024
"""Words whose tokens are kept."""

Continue = Callable[[Sequence[int], int], Draft | None]
"""(tokens guessed, most more) -> what may follow these tokens."""


class Sketch:
    """A draft that grows. shares[i]: how likely token i is, given its parent."""

    __slots__ = ("_children", "parents", "shares", "token_ids")

    def __init__(self, draft: Draft | None) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.shares: list[float] = []
        self._children: dict[int, list[int]] = {}
        self.graft(-1, draft)

    def add(self, parent: int, token: int, share: float) -> int:
        """A guess after `parent`; its number."""
        token_ids = self.token_ids
        node = len(token_ids)
        children = self._children.get(parent)
        if children is None:
            self._children[parent] = [node]
        else:
            for child in children:
                if token_ids[child] == token:
                    self.shares[child] = max(self.shares[child], share)
                    return child
            children.append(node)
        token_ids.append(token)
        self.parents.append(parent)
        self.shares.append(share)
        return node

    def chain(self, parent: int, tokens: Iterable[int], shares: Iterable[float]) -> int:
        """Guesses one after the other after `parent`; the last one's number."""
        for token, share in zip(tokens, shares, strict=False):
            parent = self.add(parent, token, share)
        return parent

    def graft(self, parent: int, draft: Draft | None) -> None:
        """Another draft after `parent`."""
        if draft is None:
            return
        own: list[int] = []
        for token, above, share in zip(draft.tree.token_ids, draft.tree.parents, draft.expected, strict=True):
            own.append(self.add(parent if above < 0 else own[above], token, share))

    def likeliest(self, node: int) -> int:
        """The likeliest guess after `node`; -1: none."""
        children = self._children.get(node)
        if children is None:
            return -1
        return children[0] if len(children) == 1 else max(children, key=self.shares.__getitem__)

    def best(self, most: int) -> Draft | None:
        """The `most` guesses that are likeliest to be reached, as a draft."""
        token_ids, parents, shares = self.token_ids, self.parents, self.shares
        if len(token_ids) <= most:
            return Draft(DraftTree(tuple(token_ids), tuple(parents)), tuple(shares)) if token_ids else None
        unlikely: list[float] = []  # how likely each is reached, negated
        for parent, share in zip(parents, shares, strict=True):
            unlikely.append(-share if parent < 0 else unlikely[parent] * share)
        # Stable, and a guess is never likelier than what it follows: parents come along.
        nodes = sorted(sorted(range(len(unlikely)), key=unlikely.__getitem__)[:most])
        place = {node: number for number, node in enumerate(nodes)}
        place[-1] = -1
        tree = DraftTree(tuple([token_ids[node] for node in nodes]), tuple([place[parents[node]] for node in nodes]))
        return Draft(tree, tuple([shares[node] for node in nodes]))


class Retelling:
    """One sequence's words and replacements, and drafts with them.

    edits: the replacements so far; kept up by whoever sees the text run alongside itself.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self.edits = Edits()
        self._index = WordIndex()
        self._n_read = 0
        self._watched: tuple[int, tuple[int, ...]] | None = None  # (index, tokens) with the first word that was put in
        self._in_vain, self._left = 0.0, 0
        self._tokens_of: dict[tuple[bytes, bytes], list[int]] = {}

    def improved(
        self, draft: Draft | None, tokens: array[int], ahead: int, follow: Continue, max_tokens: int
    ) -> Draft | None:
        """A draft, with words and replacements put in.

        tokens: the sequence's. ahead: index among them of the one that the draft's likeliest guesses begin with, their
        number if there is none. follow: gives what may follow guesses.
        """
        looks = (draft is None or min(draft.expected) < SURE) and self._looks(tokens) and self._read(tokens)
        if not looks and not self.edits.touches(tokens[ahead : ahead + max_tokens]):
            return draft
        sketch = Sketch(draft)
        n_given = len(sketch.token_ids)
        path: list[int] = []
        node, n_words, chance = -1, 0, 1.0
        while len(path) < max_tokens and chance >= LEAST_REACHED:
            child = sketch.likeliest(node)
            if child < 0 or ahead >= len(tokens) or tokens[ahead] != sketch.token_ids[child]:
                ahead = len(tokens)
            share: float = 0.0
            put_in: Sequence[int] = ()
            edit = self.edits.at(tokens, ahead)
            if edit is not None:
                share, put_in = edit.share, edit.new
                sketch.shares[child] = min(sketch.shares[child], 1.0 - share)
            elif looks and n_words < MOST_WORDS and (child < 0 or sketch.shares[child] < SURE):
                share, put_in = self._next_words(sketch, child, tokens, path)
                if put_in and self._watched is None:
                    self._watched = len(tokens), (*path, put_in[0])
            leaf = sketch.chain(node, put_in, chain((share,), repeat(ESTIMATE_WITHIN))) if put_in else node
            if not put_in or (child >= 0 and share <= sketch.shares[child]):
                if child < 0:
                    break
                node, ahead = child, ahead + 1
                chance *= sketch.shares[child]
                path.append(sketch.token_ids[child])
                continue
            node = leaf
            chance *= share * ESTIMATE_WITHIN ** (len(put_in) - 1)
            path.extend(put_in)
            room = max_tokens - len(path)
            if edit is not None:
                ahead += len(edit.old)
                sketch.chain(leaf, tokens[ahead : ahead + room], repeat(ESTIMATE_BEHIND_EDIT))
                continue
            n_words += 1
            ahead = self._behind_word(tokens, ahead)
            if ahead < len(tokens):
                following = tokens[ahead : ahead + room]
                sketch.chain(leaf, following, map(self._form_estimate, following))
            elif room > 0:
                sketch.graft(leaf, follow(path, room))
        if looks and self._watched is None:
            self._judge(self._in_vain + 1.0)
        return sketch.best(max_tokens) if len(sketch.token_ids) > n_given else draft

    def _looks(self, tokens: array[int]) -> bool:
        """Are words looked for this time? Not for a while where none were found, or others came, many times."""
        if self._watched is not None:
            start, expected = self._watched
            got = tuple(tokens[start : start + len(expected)])
            if len(got) < len(expected) and got == expected[: len(got)]:
                return True  # not there yet
            self._watched = None
            if len(got) == len(expected) and got[:-1] == expected[:-1]:
                self._judge(0.0 if got[-1] == expected[-1] else self._in_vain + WRONG)
        if self._left:
            self._left -= 1
            return False
        return True

    def _judge(self, in_vain: float) -> None:
        self._in_vain = in_vain
        if in_vain >= PATIENCE + 1:
            self._left = min(LONGEST_PAUSE, 2 ** min(int(in_vain - PATIENCE), 8) - 1)

    def _behind_word(self, tokens: array[int], at: int) -> int:
        """Index of the token behind the words that stand at `at`; the number of tokens where none ends there."""
        pieces = list(map(self._bytes, tokens[at : at + LONGEST_WORDS]))
        text = b"".join(pieces)
        first = WORD.search(text)
        words = RUN.match(text, first.start()) if first is not None else None
        if words is not None:
            left = words.end()
            for piece in pieces:
                at += 1
                left -= len(piece)
                if left <= 0:
                    return at if left == 0 else len(tokens)
        return len(tokens)

    def _form_estimate(self, token: int) -> float:
        """How likely a token is that stood behind other words in this form. Where a word begins it is less sure."""
        return FORM_ESTIMATES[WORD.search(self._bytes(token)) is not None]

    def _read(self, tokens: array[int]) -> bool:
        """Take in text that came since; False where some is left."""
        new = tokens[self._n_read : self._n_read + MOST_READ]
        self._index.text += b"".join(map(self._bytes, new))
        self._n_read += len(new)
        return self._index.update() and self._n_read == len(tokens)

    def _bytes(self, token: int) -> bytes:
        try:
            return self._texts.token_bytes(token)
        except RequestError:  # the output layer may have more rows than the tokenizer has tokens
            return b""

    def _next_words(
        self, sketch: Sketch, child: int, tokens: array[int], path: Sequence[int]
    ) -> tuple[float, Sequence[int]]:
        """(estimate, tokens) of other words than those that begin with the guess `child` after the guesses `path`."""
        ahead = lead = b""
        if child >= 0:
            ahead = self._bytes(sketch.token_ids[child])
            first = WORD.search(ahead)
            if first is None:
                return 0.0, ()  # another word does not begin here
            lead = ahead[: first.start()]
        guessed = b"".join(map(self._bytes, path))
        for found in self._index.following(guessed + lead)[:2]:
            new = lead + found.words[len(found.begun) :]
            while child >= 0 and len(ahead) < len(new):
                child = sketch.likeliest(child)
                ahead += self._bytes(sketch.token_ids[child]) if child >= 0 else b""
            if ahead and (ahead.startswith(new) or new.startswith(ahead)):
                continue
            behind = found.begun or self._bytes(path[-1] if path else tokens[-1])
            return found.estimate, self._encoded(behind, new)
        return 0.0, ()

    def _encoded(self, behind: bytes, new: bytes) -> Sequence[int]:
        """Tokens of `new` after `behind`; none where no border between tokens lies between them."""
        known = self._tokens_of.get((behind, new))
        if known is None:
            known = self._cut(behind, new) or (self._cut(b"", new) if behind else [])
            if len(self._tokens_of) == MOST_KEPT:
                self._tokens_of.clear()
            self._tokens_of[behind, new] = known
        return known

    def _cut(self, behind: bytes, new: bytes) -> list[int]:
        try:
            tokens = self._texts.encode((behind + new).decode("utf-8", "ignore"), add_bos=False)
        except RequestError:
            return []
        left = len(new)
        for at in range(len(tokens) - 1, -1, -1):
            left -= len(self._bytes(tokens[at]))
            if left <= 0:
                return tokens[at:] if left == 0 else []
        return []

    @property
    def held_bytes(self) -> int:
        """Bytes of memory, about."""
        return self._index.held_bytes + self.edits.held_bytes + 300 * len(self._tokens_of)
