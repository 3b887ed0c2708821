"""The vocabulary as a GGUF file stores it, checked: tokens, their types, and the ids with a role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from kinetic_core.errors import TokenizerError, describe

TOKENS_KEY = "tokenizer.ggml.tokens"
TYPES_KEY = "tokenizer.ggml.token_type"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

END_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
END_OF_TURN_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<|return|>",
        "<|eot|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<EOT>",
        "_<EOT>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Texts that end a turn or a document in published models, where they are control tokens.

Not every file names its end of turn: Falcon-H1's `eos_token_id` is `<|end_of_text|>` while its chats end with
`<|im_end|>`, and no key says so.
"""


def metadata_list(metadata: Mapping[str, object], key: str) -> list[object] | None:
    """The array under `key` as a list of its own; None when the key is missing. TokenizerError if it is no array."""
    value = metadata.get(key)
    if value is None:
        return None
    to_list = getattr(value, "tolist", None)  # a NumPy array, without importing NumPy
    if callable(to_list):
        value = to_list()
    if not isinstance(value, (list, tuple)):
        raise TokenizerError(describe("not an array", where=key, got=type(value).__name__, expected="an array"))
    return list(value)


def metadata_strings(metadata: Mapping[str, object], key: str) -> list[str] | None:
    """The array of strings under `key`; None when the key is missing."""
    values = metadata_list(metadata, key)
    if values is None:
        return None
    if not set(map(type, values)) <= {str}:
        index, value = next((i, v) for i, v in enumerate(values) if type(v) is not str)
        raise TokenizerError(
            describe(f"entry {index} is not a string", where=key, got=type(value).__name__, expected="a string")
        )
    return cast("list[str]", values)


def metadata_bool(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    """The flag under `key`, `default` when the key is missing."""
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise TokenizerError(describe("not a flag", where=key, got=repr(value), expected="true or false"))
    return value


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a model, by id.

    Attributes:
        tokens: [n_tokens] the stored texts (byte alphabet for normal tokens of a byte-level vocabulary).
        types: [n_tokens] 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
        bos_id, eos_id: ids, or None when the file names none.
        end_ids: the ids that end an answer.
        lowest: text to its lowest id; duplicated texts keep every id for decoding.
        others: the ids of the tokens that are not normal, ascending.
        special: text to id of the control and user-defined tokens, which template text may name.
    """

    tokens: list[str]
    types: list[int]
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    lowest: dict[str, int] = field(repr=False)
    others: list[int] = field(repr=False)
    special: dict[str, int] = field(repr=False)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Vocabulary:
        """Read and check the `tokenizer.ggml.*` keys. Raises TokenizerError naming the key at fault."""
        tokens = metadata_strings(metadata, TOKENS_KEY)
        if not tokens:
            raise TokenizerError(
                describe("the file has no vocabulary", where=TOKENS_KEY, expected="an array of strings")
            )
        types = _read_types(metadata, len(tokens))
        # Written from the highest id down, so that of equal texts the lowest id stays.
        lowest = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
        others = [token_id for token_id, token_type in enumerate(types) if token_type != NORMAL]
        special: dict[str, int] = {}
        for token_id in others:
            if types[token_id] in (CONTROL, USER_DEFINED) and tokens[token_id]:
                special.setdefault(tokens[token_id], token_id)
        named_ends = (_read_id(metadata, key, len(tokens)) for key in END_KEYS)
        end_ids = {end_id for end_id in named_ends if end_id is not None}
        end_ids.update(
            token_id for token_id in others if types[token_id] == CONTROL and tokens[token_id] in END_OF_TURN_TEXTS
        )
        return cls(
            tokens=tokens,
            types=types,
            bos_id=_read_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens)),
            eos_id=_read_id(metadata, "tokenizer.ggml.eos_token_id", len(tokens)),
            end_ids=frozenset(end_ids),
            lowest=lowest,
            others=others,
            special=special,
        )

    def read_add_bos(self, metadata: Mapping[str, object], default: bool) -> bool:
        """Whether BOS is put before a text by default. `default` holds for files without the key that have a BOS."""
        key = "tokenizer.ggml.add_bos_token"
        if key not in metadata:
            return default and self.bos_id is not None
        add_bos = metadata_bool(metadata, key, default)
        if add_bos and self.bos_id is None:
            raise TokenizerError(
                describe("BOS is asked for but not named", where=key, expected="a tokenizer.ggml.bos_token_id")
            )
        return add_bos


def _read_types(metadata: Mapping[str, object], n_tokens: int) -> list[int]:
    types = metadata_list(metadata, TYPES_KEY)
    if types is None:
        return [NORMAL] * n_tokens
    if len(types) != n_tokens:
        raise TokenizerError(
            describe("the number of types is wrong", where=TYPES_KEY, got=len(types), expected=f"{n_tokens} entries")
        )
    if set(map(type, types)) != {int}:
        raise TokenizerError(describe("not all entries are integers", where=TYPES_KEY, expected="integers 1 to 6"))
    return cast("list[int]", types)


def _read_id(metadata: Mapping[str, object], key: str, n_tokens: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TokenizerError(describe("not a token id", where=key, got=repr(value), expected="an integer"))
    token_id = int(value.__index__())
    if not 0 <= token_id < n_tokens:
        raise TokenizerError(
            describe("no such token", where=key, got=token_id, expected=f"an id from 0 to {n_tokens - 1}")
        )
    return token_id
