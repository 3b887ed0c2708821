"""Which `tokenizer.ggml.pre` does what a tokenizer.json's pre-tokenizer does: found by running both.

Names of stages and spellings of patterns differ between tokenizers that split alike, so pieces are compared: of every
text of up to three characters out of one of each kind that a known pattern tells apart, of contractions in both cases,
and of long runs. A pre-tokenizer is known if it cuts all of these as a known one does; nothing is guessed.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetic_core.errors import TokenizerError, describe, shown
from kinetic_core.text.pretokenizers import PRE_TOKENIZERS, PreTokenizerSpec

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_DEFAULT_NAMES = ("llama-bpe", "dbrx", "qwen2", "qwen35", "smollm", "gpt-2")
"""The name to write where the family has none of its own."""
_HINT = "where you know the one that the model is used with, name it: --pre-tokenizer"
_KINDS = "aSé中12²Ⅷ ._'\n\r\t\u00a0\u200b\u2028\u0301\u093f🙂"
"""Letters in both cases and other scripts, digits and other numbers, white space of every kind, punctuation, marks."""
_ENDINGS = ("s", "t", "re", "ve", "m", "ll", "d", "x", "\u017f")


def recognised(path: Path, tokenizer: dict[str, Any], family: str, *, whole_tokens: bool) -> str:
    """The name; TokenizerError shows a text that the likeliest known one cuts otherwise where there is none.

    tokenizer: the parsed tokenizer.json at `path`. family: the file's architecture, whose own name among equals is
    preferred. whole_tokens: whether pieces are looked up before they are merged.
    """
    given, normalizer = tokenizer.get("pre_tokenizer"), tokenizer.get("normalizer")
    if normalizer is not None and (not isinstance(normalizer, dict) or normalizer.get("type") != "NFC"):
        raise _refused("the normalizer is not supported", path, shown(normalizer, 300), "none or NFC")
    pre = _built(path, given)
    rules = (normalizer is not None, whole_tokens)
    candidates = [name for name, spec in PRE_TOKENIZERS.items() if (spec.nfc, spec.whole_tokens) == rules]
    own = [name for name in candidates if name == family or (name == "lfm2" and family.startswith("lfm"))]
    names = [*own, *(name for name in _DEFAULT_NAMES if name in candidates)]
    differences: dict[PreTokenizerSpec, str | None] = {}
    for name in names:
        spec = PRE_TOKENIZERS[name]
        if spec not in differences:
            differences[spec] = _difference(path, pre, spec.build())
        if differences[spec] is None:
            return name
    facts = f"NFC {rules[0]}, whole tokens first {whole_tokens}"
    got = f"{shown(given, 300)}, {facts}"
    if names:
        got += f"; {differences[PRE_TOKENIZERS[names[0]]]} by {names[0]}"
    raise _refused("no known pre-tokenizer does the same", path, got, f"that of one of {', '.join(PRE_TOKENIZERS)}")


def _built(path: Path, given: Any) -> PreTokenizer:
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    try:
        whole = Tokenizer.from_str(json.dumps({"added_tokens": [], "pre_tokenizer": given, "model": model}))
    except Exception as error:  # whatever the package makes of a file that it cannot read
        got = f"{shown(given, 200)}: {error}"
        raise _refused("'pre_tokenizer' cannot be read", path, got, "stages with their settings") from error
    pre: PreTokenizer | None = whole.pre_tokenizer
    if pre is None:
        raise _refused("there is no pre-tokenizer", path, "null", "stages, ByteLevel the last")
    return pre


def _difference(path: Path, given: PreTokenizer, known: PreTokenizer) -> str | None:
    """The first text that the two cut otherwise, None if there is none."""
    for text in _probes():
        try:
            pieces = [piece for piece, _ in given.pre_tokenize_str(text)]
        except Exception as error:  # a pattern that never comes to an end, say
            raise _refused("the pre-tokenizer fails", path, f"{error} on {text!r}", "pieces") from error
        expected = [piece for piece, _ in known.pre_tokenize_str(text)]
        if pieces != expected:
            return f"it cuts {text!r} into {pieces}, not {expected} as"
    return None


@functools.cache
def _probes() -> tuple[str, ...]:
    short = ("".join(text) for n in (1, 2, 3) for text in itertools.product(_KINDS, repeat=n))
    endings = [case for ending in _ENDINGS for case in (ending, ending.upper(), ending.title())]
    contractions = (f"{a}'{ending}{b}" for ending in endings for a in ("", "a", " ", "1", ".") for b in ("", "a", " "))
    runs = (
        a + b * n + c for n in (4, 5, 6, 7, 40) for a in ("", "a", " ") for b in _KINDS for c in ("", "a", "1", ".")
    )
    return (*contractions, *runs, *short)


def _refused(what: str, path: Path, got: object, expected: str) -> TokenizerError:
    return TokenizerError(describe(what, where=str(path), got=got, expected=expected, hint=_HINT))
