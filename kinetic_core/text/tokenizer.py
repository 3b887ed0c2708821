"""Text to token ids and back, built from the `tokenizer.ggml.*` metadata of a GGUF file.

Two kinds of vocabulary are known. `tokenizer.ggml.model` = "gpt2" is byte-level byte pair encoding (Sennrich et al.
2016, over bytes as in GPT-2): the `tokenizers` package runs the split and the merges. "llama" is a SentencePiece
vocabulary with scores, see `kinetic_core.text.spm`.

The built tokenizer is not kept on disk: of 248,320 tokens, building took 0.3 to 0.6 s and reading back what
`tokenizers` saves 0.8 to 1.0 s, and the model's file holds the vocabulary and merges anyway.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import cast

from kinetic_core.errors import RequestError, TokenizerError, describe
from kinetic_core.text.pretokenizers import pre_tokenizer_spec
from kinetic_core.text.special import Marks, SpecialTexts
from kinetic_core.text.vocabulary import (
    CONTROL,
    NORMAL,
    Vocabulary,
    metadata_strings,
)

_log = logging.getLogger(__name__)

MODEL_KEY = "tokenizer.ggml.model"
MERGES_KEY = "tokenizer.ggml.merges"

MAX_CHARACTERS = 8_000_000
"""Longest text that `Tokenizer.encode` takes: beyond it the regular expressions may give up on one long run."""

_LONG = 16_384
"""From this many characters on, a text is encoded as a batch of one: `tokenizers` keeps the global interpreter lock
while it encodes a single text, for seconds where it is long, but not for a batch."""

# GPT-2's byte alphabet: printable bytes stand for themselves, the other 68 are U+0100 to U+0143 in ascending order.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PRINTABLE)]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)
}
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
# C0, C1 and F5 to FF occur in no UTF-8 text.
_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1} - frozenset(range(0xF5, 0x100))


def check_text(text: str, field: str) -> None:
    """Raise RequestError naming `field` unless `text` is valid Unicode of a length that can be encoded."""
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            describe("text too long", where=field, got=len(text), expected=f"at most {MAX_CHARACTERS} characters"),
            field=field,
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            describe(
                "text is not valid Unicode",
                where=field,
                got=f"a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
                expected="whole characters",
            ),
            field=field,
        ) from None


class Tokenizer(ABC):
    """A model's tokenizer. Build one with `from_metadata`; safe to use from several threads.

    Attributes:
        vocabulary: tokens, types and ids as read from the file.
        add_bos: whether `encode` puts BOS first by default.
        special: the texts that template text may name: control and user-defined tokens.
        control: those of control tokens alone.
    """

    def __init__(self, vocabulary: Vocabulary, *, add_bos: bool) -> None:
        self.vocabulary = vocabulary
        self.add_bos = add_bos
        self.special = SpecialTexts(vocabulary.special)
        self.control = SpecialTexts(
            {text: i for text, i in vocabulary.special.items() if vocabulary.types[i] == CONTROL}
        )
        self._bytes: dict[int, bytes] = {}

    @staticmethod
    def from_metadata(metadata: Mapping[str, object]) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes.

        metadata: key to value (int, float, str, bool, list or array), as read from the file.
        Raises TokenizerError naming the key at fault.
        """
        model = metadata.get(MODEL_KEY)
        if model == "gpt2":
            return ByteLevelTokenizer(metadata)
        if model == "llama":
            from kinetic_core.text.spm import SentencePieceTokenizer

            return SentencePieceTokenizer(metadata)
        raise TokenizerError(
            describe(
                "this kind of vocabulary is not supported" if model is not None else "the file has no tokenizer",
                where=MODEL_KEY,
                got=repr(model) if model is not None else "no key",
                expected='"gpt2" (byte pair encoding) or "llama" (SentencePiece)',
            )
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text; None if the file names none."""
        return self.vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text; None if the file names none."""
        return self.vocabulary.eos_id

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end an answer: the file's end keys and well-known end-of-turn control tokens."""
        return self.vocabulary.end_ids

    def token_text(self, token_id: int) -> str:
        """The token's text as a person reads it; incomplete characters show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes the token stands for; a special token's are its text in UTF-8."""
        known = self._bytes.get(token_id)
        if known is None:
            self._check_id(token_id)
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token: one that steers the model and that typed text never gives."""
        self._check_id(token_id)
        return self.vocabulary.types[token_id] == CONTROL

    def encode(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = False, field: str = "prompt"
    ) -> list[int]:
        """Token ids of `text`.

        add_bos: whether to put BOS first; None follows the file.
        parse_special: whether the texts of control and user-defined tokens in `text` become those tokens. Only for
            text that a template or the program itself wrote: without it no text gives a control token.
        field: how errors call this text.
        Raises RequestError for a lone surrogate, a text that is too long, or one the vocabulary cannot express.
        """
        check_text(text, field)
        ids = self._bos(self.add_bos if add_bos is None else add_bos)
        segments: Iterable[str | int] = self.special.split(text) if parse_special else [text] if text else []
        ids.extend(self._encode_segments(segments, field))
        return ids

    def encode_rendered(self, text: str, marks: Marks, *, field: str = "messages") -> list[int]:
        """Token ids of a rendered template: special texts count unless `marks` break them; BOS is not added."""
        check_text(text, field)
        segments = (
            segment if isinstance(segment, int) else marks.drop(segment)
            for segment in self.special.split(text, marks.quote)
        )
        return self._encode_segments(segments, field)

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first token begins with a space that is not the text's (SentencePiece)."""
        return False

    def decode(self, ids: Sequence[int], *, continues: bool = False) -> str:
        """The text of `ids`. Bytes that are no UTF-8 show as U+FFFD, one per maximal incomplete sequence.

        continues: whether the ids go on after other text. If not, and the vocabulary puts a space before every text
        (SentencePiece), that space is taken off again.
        """
        pieces = [self.token_bytes(token_id) for token_id in ids]
        if self.strips_first_space and not continues:
            first = next((i for i, token_id in enumerate(ids) if not self.is_special(token_id)), None)
            if first is not None:
                pieces[first] = pieces[first].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", errors="replace")

    def _bos(self, add_bos: bool) -> list[int]:
        if not add_bos:
            return []
        if self.bos_id is None:
            raise RequestError(
                describe("BOS is asked for, but the model has none", hint="leave add_bos out"), field="add_bos"
            )
        return [self.bos_id]

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                describe("no such token", got=token_id, expected=f"an id from 0 to {self.vocab_size - 1}"),
                field="prompt",
            )

    @abstractmethod
    def _make_bytes(self, token_id: int) -> bytes:
        """The bytes of a valid id."""

    @abstractmethod
    def _encode_segments(self, segments: Iterable[str | int], field: str) -> list[int]:
        """Ids of a text cut into special ids and stretches of plain text."""


class ByteLevelTokenizer(Tokenizer):
    """Byte-level byte pair encoding with the pre-tokenizer that `tokenizer.ggml.pre` names."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        import tokenizers
        from tokenizers import normalizers
        from tokenizers.models import BPE

        spec = pre_tokenizer_spec(metadata.get("tokenizer.ggml.pre"))
        vocabulary = Vocabulary.from_metadata(metadata)
        super().__init__(vocabulary, add_bos=vocabulary.read_add_bos(metadata, spec.add_bos))
        vocab, merges = _mergeable(vocabulary, _read_merges(metadata, vocabulary))
        try:
            model = BPE(vocab=vocab, merges=merges, ignore_merges=spec.whole_tokens)
        except Exception as error:  # the package raises bare Exception
            merges = _usable(merges, vocab, str(error))
            model = BPE(vocab=vocab, merges=merges, ignore_merges=spec.whole_tokens)
        self._backend = tokenizers.Tokenizer(model)
        self._backend.pre_tokenizer = spec.build()
        if spec.nfc:
            self._backend.normalizer = normalizers.NFC()
        self._missing = (
            frozenset(byte for byte, character in CHARACTER_OF_BYTE.items() if character not in vocab) & _UTF8_BYTES
        )

    def split(self, text: str) -> list[str]:
        """The pieces that merges stay within, after normalization."""
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        pieces = self._backend.pre_tokenizer.pre_tokenize_str(text)
        return [bytes(BYTE_OF_CHARACTER[character] for character in piece).decode("utf-8") for piece, _ in pieces]

    def _make_bytes(self, token_id: int) -> bytes:
        text = self.vocabulary.tokens[token_id]
        if self.vocabulary.types[token_id] == NORMAL:
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in text)
            except KeyError:
                pass  # not written in the byte alphabet: plain text
        return text.encode("utf-8", errors="replace")

    def _encode_segments(self, segments: Iterable[str | int], field: str) -> list[int]:
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, int):
                ids.append(segment)
            elif segment:
                if self._missing:
                    self._check_expressible(segment, field)
                ids.extend(self._encode_text(segment))
        return ids

    def _encode_text(self, text: str) -> list[int]:
        if len(text) < _LONG:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        else:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            ids = encoding.ids
        return ids

    def _check_expressible(self, text: str, field: str) -> None:
        # The package leaves out what the vocabulary lacks without a word.
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        missing = self._missing.intersection(text.encode("utf-8"))
        if missing:
            raise RequestError(
                describe(
                    "the model's vocabulary cannot express this text",
                    where=field,
                    got=f"byte {min(missing):#04x}, for which it has no token",
                ),
                field=field,
            )


def _read_merges(metadata: Mapping[str, object], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges in order of rank, as pairs of token texts."""
    lines = metadata_strings(metadata, MERGES_KEY)
    needed = any(
        len(token) > 1 and token_type == NORMAL
        for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
    )
    if lines is None or (not lines and needed):
        raise TokenizerError(
            describe(
                "byte pair encoding without merges: text would fall apart into bytes",
                where=MERGES_KEY,
                got="no key" if lines is None else "an empty array",
                expected='an array of strings "left right"',
                hint="convert the model again with a current converter",
            )
        )
    pairs = [tuple(line.split(" ")) for line in lines]
    if not set(map(len, pairs)) <= {2} or "" in chain.from_iterable(pairs):
        index = next(i for i, pair in enumerate(pairs) if len(pair) != 2 or "" in pair)
        raise TokenizerError(
            describe(f"merge {index} is malformed", where=MERGES_KEY, got=repr(lines[index]), expected='"left right"')
        )
    return cast("list[tuple[str, str]]", pairs)


def _usable(merges: list[tuple[str, str]], vocab: Mapping[str, int], problem: str) -> list[tuple[str, str]]:
    """The merges whose parts and whole are all in the vocabulary; the others can never apply, and are logged.

    Raises TokenizerError when that is not what is wrong with them.
    """
    usable = [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]
    if len(usable) == len(merges):
        raise TokenizerError(describe("the merges cannot be used", where=MERGES_KEY, got=problem))
    _log.warning(
        "%d of %d merges in %s name tokens that the vocabulary lacks and are left out (%s)",
        len(merges) - len(usable),
        len(merges),
        MERGES_KEY,
        problem,
    )
    return usable


def _mergeable(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """What byte pair encoding works with: text to lowest id of the tokens plain text may give, and the merges.

    Those are the normal tokens, and of the user-defined and unused ones those that merges name and single bytes.
    Control tokens never: a merge that makes or uses one is left out.
    """
    tokens, types = vocabulary.tokens, vocabulary.types
    vocab = dict(vocabulary.lowest)
    if not vocabulary.others:
        return vocab, merges
    for i in vocabulary.others:
        vocab.pop(tokens[i], None)
    if len(vocabulary.lowest) != len(tokens):  # a text may also be a normal token's
        doubtful = {tokens[i] for i in vocabulary.others}
        for i in range(len(tokens) - 1, -1, -1):
            if types[i] == NORMAL and tokens[i] in doubtful:
                vocab[tokens[i]] = i
    others = [i for i in vocabulary.others if tokens[i] not in vocab]
    control = {tokens[i] for i in others if types[i] == CONTROL}
    texts = {tokens[i] for i in others}
    named = texts.intersection(chain.from_iterable(merges))
    # Making every merge's result takes long; only a text with two parts in the vocabulary can be one.
    parts = named.union(vocab) if named else vocab
    makeable = {text for text in texts if any(text[:n] in parts and text[n:] in parts for n in range(1, len(text)))}
    if makeable:
        named.update(makeable.intersection(a + b for a, b in merges))
    if not control.isdisjoint(named):
        merges = [(a, b) for a, b in merges if control.isdisjoint((a, b, a + b))]
    for i in others:
        if types[i] != CONTROL and (tokens[i] in named or tokens[i] in BYTE_OF_CHARACTER):
            vocab.setdefault(tokens[i], i)
    return vocab, merges
