"""A sequence that earlier requests make guesses for, and whose own tokens are learned."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kinetic_core.interfaces import Draft
from kinetic_drafters.alignment import CREDIT, WORTH_KEEPING, Alignment
from kinetic_drafters.continuation import Place, merged
from kinetic_drafters.ngrams import LONGEST
from kinetic_drafters.tenant import DOCUMENT, Document, TenantIndex

SLICE = 64
"""Tokens of a running sequence that are learned at a time, and the least that are recognized as known."""
PLACES = 4
"""Places that a draft is made of."""
TRAILING = 32
"""Tokens that a document keeps of what follows it in another document: drafts go on over the edge."""
LEARNER_BYTES = 600
"""What a sequence holds besides its tokens."""


class Learner:
    """One sequence: its tokens, how many of them were learned or known, and the document that is being written.

    serial:  the later it began, the higher.
    request: the serial number of the first sequence of its request.
    """

    __slots__ = ("alignment", "document", "index", "learned", "parted", "pending", "request", "serial", "tokens")

    def __init__(self, serial: int, index: TenantIndex, token_ids: Sequence[int]) -> None:
        self.serial = serial
        self.request = serial
        self.index = index
        self.tokens = array("i")
        self.pending = list(token_ids)
        self.learned = 0
        self.document: Document | None = None
        self.alignment: Alignment[Document] | None = None
        self.parted: Alignment[Document] | None = None

    @property
    def n_unlearned(self) -> int:
        """Tokens that are still to be learned."""
        return len(self.tokens) + len(self.pending) - self.learned

    @property
    def held_bytes(self) -> int:
        """Bytes of memory, once it has ended."""
        return LEARNER_BYTES + self.tokens.itemsize * len(self.tokens)

    def pull(self) -> None:
        """Take in the tokens that came since."""
        if self.pending:
            self.tokens.fromlist(self.pending)
            self.pending = []

    def forked(self, parent: Learner) -> None:
        """It goes on from its parent's text, which the parent teaches."""
        self.request = parent.request
        self.learned = len(self.tokens) + len(self.pending)
        self.document = None

    def ended(self, most_bytes: int) -> None:
        """Keep nothing but what is to be learned, in so many bytes: of a longer text the end."""
        self.pull()
        self.alignment = self.parted = None
        most = (most_bytes - LEARNER_BYTES) // self.tokens.itemsize - LONGEST
        if self.n_unlearned > most:
            self.learned = len(self.tokens) - most
            self.document = None  # the text does not go on in it
        start = max(0, self.learned - LONGEST)
        self.tokens = self.tokens[start:]
        self.learned -= start

    def learn(self, end: int, limit_bytes: int) -> None:
        """Remember the tokens up to `end` that no document has yet. Documents of the own request are not helpful."""
        self.pull()
        index, tokens = self.index, self.tokens
        while self.learned < end:
            known = index.known(tokens[self.learned : end])
            if known is not None:
                document, n_known = known
                self._credit(document, n_known)
                if self.document is not None and self.document.slot >= 0:
                    index.append(self.document, tokens[self.learned : self.learned + TRAILING])
                self.document = None
                self.learned += n_known
                continue
            new = self.learned + SLICE
            while new < end and index.known(tokens[new:end]) is None:
                new += SLICE
            new = min(new, end)
            while self.learned < new:
                if self.document is None or self.document.slot < 0 or len(self.document.tokens) == DOCUMENT:
                    lead = tokens[max(0, self.learned - LONGEST) : self.learned]
                    self.document = index.open(lead, self.serial, self.request)
                self.learned += index.extend(self.document, tokens[self.learned : new], limit_bytes)

    def _credit(self, document: Document, n_tokens: int) -> None:
        if document.request != self.request:
            self.index.helped(document, n_tokens)

    def _follow(self) -> None:
        """See whether the text went on as the document that it ran alongside."""
        ahead = self.alignment
        if ahead is None:
            return
        count = ahead.follow(self.tokens)
        gone = ahead.source.slot < 0
        if count and not gone:
            self._credit(ahead.source, count)
        if gone or ahead.at < len(self.tokens):
            self.alignment = None
            if ahead.length >= WORTH_KEEPING and not gone:
                self.parted = ahead

    def _met_again(self) -> tuple[int, Document, int] | None:
        """Where the text agrees again with the document that it parted from."""
        ahead = self.parted
        if ahead is None:
            return None
        if ahead.source.slot < 0:
            self.parted = None  # nor is its text held any longer
            return None
        met = ahead.met_again(self.tokens, len(ahead.text))
        return None if met is None else (met[1] + CREDIT, ahead.source, met[0])

    def draft(self, guessed: Sequence[int], max_tokens: int) -> Draft | None:
        """What followed the places that look like the end of the text and these guesses."""
        self.pull()
        self._follow()
        tail = self.tokens[-LONGEST:]
        if guessed:
            tail.extend(guessed)
            del tail[:-LONGEST]
        if not tail:
            return None
        found = self.index.find(tail, self.serial)
        ahead = self.alignment
        if ahead is None:
            met = None if guessed else self._met_again()
        else:
            expected = ahead.text[ahead.position + 1 : ahead.position + 1 + len(guessed)]
            met = None
            if expected.tolist() == list(guessed):
                met = (ahead.length + len(guessed), ahead.source, ahead.position + len(guessed))
        if met is not None:
            found = [place for place in found if place[1:] != met[1:]]
            found.append(met)
            found.sort(key=lambda place: (-place[0], -place[1].serial, -place[2]))
        if not found:
            return None
        if not guessed:
            length, document, position = found[0]
            if ahead is None or document is not ahead.source or position != ahead.position:
                self.alignment = Alignment(document, document.tokens, position, length, len(self.tokens))
        places = [Place(length, d.tokens[index + 1 : index + 1 + max_tokens]) for length, d, index in found[:PLACES]]
        return merged(places, max_tokens)
