"""How each known `tokenizer.ggml.pre` splits text before byte pair encoding.

A pre-tokenizer cuts text into pieces; merges never cross a piece's edge. The patterns are those of the published
tokenizers (GPT-2's byte-level split, Llama 3's, Qwen2's, Qwen3.5's), run by the regular expressions of the
`tokenizers` package: `\\p{L}`, `\\p{N}` and `\\p{M}` are the Unicode classes letter, number and mark, `\\s` is the
Unicode property white space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinetic_core.errors import TokenizerError, describe

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"

LLAMA3_PATTERN = (
    _CONTRACTIONS_ANY_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACE_TAIL
)
QWEN2_PATTERN = _CONTRACTIONS_ANY_CASE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACE_TAIL
QWEN35_PATTERN = (
    _CONTRACTIONS_ANY_CASE + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACE_TAIL
)


@dataclass(frozen=True)
class PreTokenizerSpec:
    """What a value of `tokenizer.ggml.pre` stands for.

    Attributes:
        pattern: the split's regular expression; None for GPT-2's split.
        digits_alone: whether every number character is cut out first.
        nfc: whether text is brought to Unicode normal form C before the split.
        whole_tokens: whether a piece that is itself in the vocabulary is taken whole, without merging.
        add_bos: whether BOS is put first when the file has no `tokenizer.ggml.add_bos_token`.
    """

    pattern: str | None = None
    digits_alone: bool = False
    nfc: bool = False
    whole_tokens: bool = False
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """The split followed by the byte alphabet, as the `tokenizers` package runs it."""
        from tokenizers import Regex
        from tokenizers import pre_tokenizers as pre

        stages: list[PreTokenizer] = []
        if self.digits_alone:
            stages.append(pre.Digits(individual_digits=True))
        if self.pattern is not None:
            stages.append(pre.Split(Regex(self.pattern), behavior="isolated"))
        stages.append(pre.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre.Sequence(stages)


_LLAMA3 = PreTokenizerSpec(pattern=LLAMA3_PATTERN, whole_tokens=True, add_bos=True)
_DIGITS_ALONE = PreTokenizerSpec(digits_alone=True)
_GPT2 = PreTokenizerSpec()

PRE_TOKENIZERS: dict[str, PreTokenizerSpec] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "lfm2": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": PreTokenizerSpec(pattern=LLAMA3_PATTERN),
    "qwen2": PreTokenizerSpec(pattern=QWEN2_PATTERN, nfc=True),
    "qwen35": PreTokenizerSpec(pattern=QWEN35_PATTERN, nfc=True),
    "smollm": _DIGITS_ALONE,
    "refact": _DIGITS_ALONE,
    "starcoder": _DIGITS_ALONE,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
}


def pre_tokenizer_spec(name: object) -> PreTokenizerSpec:
    """The entry for `name`, the value of `tokenizer.ggml.pre` (None when the file has no such key).

    Raises TokenizerError, listing the known names: a guess would split some text wrongly without a word.
    """
    spec = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if spec is None:
        raise TokenizerError(
            describe(
                "no such pre-tokenizer" if name is not None else "the file does not name its pre-tokenizer",
                where="tokenizer.ggml.pre",
                got=repr(name) if name is not None else "no key",
                expected="one of " + ", ".join(sorted(PRE_TOKENIZERS)),
                hint="convert the model again with a current converter",
            )
        )
    return spec
