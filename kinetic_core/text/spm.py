"""SentencePiece vocabularies: pieces with scores, merged best score first, bytes for what is not in them.

The method is SentencePiece's BPE decoding (Kudo and Richardson 2018): start from single characters and keep joining
the adjacent pair whose union is the piece with the highest score, the leftmost of equal ones. A space is written as
U+2581, and by default one is put before each text. A character outside the vocabulary becomes the byte tokens
`<0x00>` to `<0xFF>` of its UTF-8 form.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping

from kinetic_core.errors import RequestError, TokenizerError, describe
from kinetic_core.text.special import SpecialTexts
from kinetic_core.text.tokenizer import Tokenizer
from kinetic_core.text.vocabulary import (
    BYTE,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    metadata_bool,
    metadata_list,
)

SCORES_KEY = "tokenizer.ggml.scores"
SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>", re.ASCII)


class SentencePieceTokenizer(Tokenizer):
    """A vocabulary with `tokenizer.ggml.model` = "llama"."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        vocabulary = Vocabulary.from_metadata(metadata)
        super().__init__(vocabulary, add_bos=vocabulary.read_add_bos(metadata, True))
        if metadata_bool(metadata, "tokenizer.ggml.remove_extra_whitespaces", False):
            raise TokenizerError(
                describe(
                    "text normalization is not supported",
                    where="tokenizer.ggml.remove_extra_whitespaces",
                    got="true",
                    expected="false",
                )
            )
        self._add_space = metadata_bool(metadata, "tokenizer.ggml.add_space_prefix", True)
        scores = _read_scores(metadata, self.vocab_size)
        tokens, types = vocabulary.tokens, vocabulary.types
        # From the highest id down, so that of equal texts the lowest id stays.
        backwards = range(self.vocab_size - 1, -1, -1)
        self._pieces = {tokens[i]: (scores[i], i) for i in backwards if types[i] == NORMAL and tokens[i]}
        self._byte_values = {
            i: int(found[1], 16)
            for i in backwards
            if types[i] == BYTE and (found := _BYTE_TOKEN.fullmatch(tokens[i])) is not None
        }
        self._byte_ids = {value: i for i, value in self._byte_values.items()}
        # User-defined pieces are part of SentencePiece's own segmentation: they count in any text.
        self._user_defined = SpecialTexts(
            {text: i for text, i in vocabulary.special.items() if types[i] == USER_DEFINED}
        )
        self._unknown_id = next((i for i, token_type in enumerate(types) if token_type == UNKNOWN), None)

    @property
    def strips_first_space(self) -> bool:
        """Whether a space was put before the text."""
        return self._add_space

    def _make_bytes(self, token_id: int) -> bytes:
        value = self._byte_values.get(token_id)
        if value is not None:
            return bytes([value])
        text = self.vocabulary.tokens[token_id]
        if self.vocabulary.types[token_id] == NORMAL:
            text = text.replace(SPACE, " ")
        return text.encode("utf-8", errors="replace")

    def _encode_segments(self, segments: Iterable[str | int], field: str) -> list[int]:
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, int):
                ids.append(segment)
            elif segment:
                # A stretch of text begins the whole or follows a special token: a word may begin there.
                plain = " " + segment if self._add_space else segment
                for part in self._user_defined.split(plain):
                    ids.extend([part] if isinstance(part, int) else self._encode_plain(part, field))
        return ids

    def _encode_plain(self, text: str, field: str) -> list[int]:
        ids: list[int] = []
        for symbol in self.merge(text.replace(" ", SPACE)):
            known = self._pieces.get(symbol)
            if known is not None:
                ids.append(known[1])
                continue
            data = symbol.encode("utf-8")
            if all(byte in self._byte_ids for byte in data):
                ids.extend(self._byte_ids[byte] for byte in data)
            elif self._unknown_id is not None:
                ids.append(self._unknown_id)
            else:
                raise RequestError(
                    describe(
                        "the model's vocabulary cannot express this text",
                        where=field,
                        got=f"{symbol!r}, for which it has no token",
                    ),
                    field=field,
                )
        return ids

    def merge(self, text: str) -> list[str]:
        """The symbols that are left when no adjacent pair joins to a piece any more."""
        symbols: list[str | None] = list(text)
        before = list(range(-1, len(symbols) - 1))
        after = [*range(1, len(symbols)), -1]
        # Entries: minus the score, place of the left part, place of the right part, the whole. An entry is out of
        # date when its parts have since become others.
        heap: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            whole = f"{symbols[left]}{symbols[right]}"
            known = self._pieces.get(whole)
            if known is not None:
                heapq.heappush(heap, (-known[0], left, right, whole))

        for left in range(len(symbols) - 1):
            offer(left, left + 1)
        while heap:
            _, left, right, whole = heapq.heappop(heap)
            if symbols[left] is None or symbols[right] is None or f"{symbols[left]}{symbols[right]}" != whole:
                continue
            symbols[left], symbols[right] = whole, None
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
                offer(left, after[right])
            if before[left] >= 0:
                offer(before[left], left)
        return [symbol for symbol in symbols if symbol is not None]


def _read_scores(metadata: Mapping[str, object], n_tokens: int) -> list[float]:
    values = metadata_list(metadata, SCORES_KEY)
    if values is None or len(values) != n_tokens:
        raise TokenizerError(
            describe(
                "a SentencePiece vocabulary needs one score per token",
                where=SCORES_KEY,
                got="no key" if values is None else len(values),
                expected=f"{n_tokens} numbers",
            )
        )
    scores = [float(value) for value in values if isinstance(value, (int, float)) and value == value]
    if len(scores) != n_tokens:
        raise TokenizerError(describe("not all scores are numbers", where=SCORES_KEY, expected="numbers, no NaN"))
    return scores
