"""The golden files' own tokenizers: the prompts of the goldens, and every case of the reference tokenizers."""

from __future__ import annotations

import gzip
import json

import pytest
from golden_models import DATA, FAMILIES, Family, golden, open_golden

from kinetic_core.text import Tokenizer

TEXTS = {path.name.partition("-")[0]: path for path in (DATA / "text").glob("*-tokens.json.gz")}
TEXTS["lfm3"] = TEXTS["lfm2"]  # one tokenizer


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_tokens_of_the_files(family: Family):
    base = max((name for name in TEXTS if family.name.startswith(name)), key=len)
    reference = json.loads(gzip.decompress(TEXTS[base].read_bytes()))
    with open_golden(f"{family.name}-{family.exact or next(iter(family.rms))}") as source:
        tokenizer = Tokenizer.from_metadata(source.metadata.raw)
    for case in [*reference["cases"], *reference["chats"]]:
        assert tokenizer.encode(case["text"], add_bos=False, parse_special=True) == case["ids"], case["text"]
    prompt = tokenizer.encode(reference["prompt"], parse_special=True)
    assert prompt == reference["prompt_ids"]
    data = golden(family.name)
    for ids in (data["ids"], data["long_ids"]):
        assert ids.tolist() == prompt[: len(ids)]
