"""Checkpoints convert to the files they came from, to the bit, and what cannot be converted is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA, write_checkpoint, write_safetensors
from families import checkpoint_of

from kinetic_core.checkpoint import CheckpointConfig
from kinetic_core.convert import convert
from kinetic_core.engine.model import load
from kinetic_core.errors import (
    KineticError,
    MetadataError,
    RequestError,
    TensorError,
    TokenizerError,
    UnsupportedModelError,
)
from kinetic_core.gguf import GGMLType, RawTensor, dequantize, open_model_file, read_tensor, write_gguf
from kinetic_core.plugins import load_registry
from kinetic_core.text.pretokenizers import PRE_TOKENIZERS, PreTokenizerSpec

FILES = {
    "llama-f32": "f32",
    "llama3rope-f32": "f32",
    "lfm2-bf16": "bf16",
    "lfm2moe-bf16": "bf16",
    "lfm3-bf16": "bf16",
    "lfm3deep-f32": "f32",
    "granitehybrid-bf16": "bf16",
    "granitehybridmoe-bf16": "bf16",
    "falconh1-q8_0": "q8_0",
    "falconh1nonorm-f32": "f32",
    "qwen35-bf16": "bf16",
    "qwen35deep-bf16": "bf16",
    "qwen35moe-q4_k_m": "f32",
}
"""The golden files, and the type that gives them back."""
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "qwen35-bf16": [{"vision": False}],
    "qwen35deep-bf16": [{"fused": True}],
    "qwen35moe-q4_k_m": [{"packed": True}, {"fused": True, "vision": False}],
}
"""Other checkpoints of the same models."""
CASES = [(file, {}) for file in FILES] + [(file, variant) for file in VARIANTS for variant in VARIANTS[file]]
NOT_THE_MODELS = ("general.", "lfm2moe.expert_weights")
"""Keys that name the file, or say what is so without them."""
ONE_PER_FAMILY = [file for file in FILES if "deep" not in file and "rope" not in file and "nonorm" not in file]


@pytest.mark.parametrize(("file", "variant"), CASES, ids=[f"{f}-{'-'.join(v)}".rstrip("-") for f, v in CASES])
def test_converted_equals_the_golden_file(tmp_path: Path, file: str, variant: dict[str, Any]):
    out, type_ = tmp_path / "out.gguf", FILES[file]
    folder = write_checkpoint(tmp_path / "checkpoint", f"{file}.gguf", shards=3 if "lfm2" in file else 1, **variant)
    done = convert(folder, out, type_)
    with open_model_file(DATA / f"{file}.gguf") as golden, open_model_file(out) as made:
        assert done.architecture == made.architecture == golden.architecture
        assert set(made.tensors) == set(golden.tensors)
        for name, info in golden.tensors.items():
            assert made.tensors[name].shape == info.shape, name
            if name.endswith("ssm_a"):  # another exp made the golden one
                np.testing.assert_array_max_ulp(read_tensor(made, name), read_tensor(golden, name), 1)
                continue
            if type_ == "f32":
                assert np.array_equal(read_tensor(made, name), read_tensor(golden, name)), name
            else:
                assert made.tensors[name].type == info.type, name
                assert made.tensor_bytes(name).tobytes() == golden.tensor_bytes(name).tobytes(), name
        for key, value in golden.metadata.raw.items():
            if not key.startswith(NOT_THE_MODELS) and key != "tokenizer.ggml.add_sep_token":
                optional = key.endswith(("attention.value_length", "attention.key_length", "rope.dimension_count"))
                if key in made.metadata or not optional:
                    assert np.array_equal(made.metadata.raw[key], value), key


def with_decays_of(made: Path, golden: Path, path: Path) -> Path:
    """The golden file, with the decays that a checkpoint's float32 logarithms can express where it has others."""
    with open_model_file(golden) as old, open_model_file(made) as new:
        tensors = {n: RawTensor(old.tensor_bytes(n), info.type, info.shape) for n, info in old.tensors.items()}
        decays = {name: read_tensor(new, name) for name in new.tensors if name.endswith("ssm_a")}
        write_gguf(path, old.metadata.raw, {**tensors, **decays})
    return path


@pytest.mark.parametrize("file", ONE_PER_FAMILY)
def test_there_is_a_rule_for_every_tensor_of_the_family(file: str):
    """Of every variant, biases included. Frequency factors follow from config.json; the dense file has no experts'."""
    with open_model_file(DATA / f"{file}.gguf") as model:
        family = load_registry().architecture_for(model.architecture)
        values, tensors = checkpoint_of(model)
    assert family.checkpoint is not None
    config = CheckpointConfig(values, tensors=tensors).flattened("text_config")
    sources = [rule.source for rule in family.checkpoint.rules(config)]
    names = {of_any_block(rule.name) for rule in family.checkpoint.rules(config)}
    experts = any("exps" in name for name in names)
    assert len(set(sources)) == len(sources) or file.startswith(("granite", "qwen35"))  # rows of several in one
    for variant in family.tiny():
        if any("exps" in name for name in variant.tensors) == experts:
            wanted = {of_any_block(name) for name in variant.tensors}
            assert wanted - names <= {"rope_freqs.weight", "output_norm.weight", "blk.{layer}.ffn_norm.weight"}


def of_any_block(name: str) -> str:
    parts = name.split(".")
    return ".".join(["blk", "{layer}", *parts[2:]]) if parts[0] == "blk" else name


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    return load(str(path), backend="reference", kv="f32", ctx=64).logits(tokens)


def rms(error: np.ndarray) -> float:
    return float(np.sqrt((error.astype(float) ** 2).mean()))


@pytest.mark.parametrize("file", FILES)
def test_the_logits_are_the_golden_files(tmp_path: Path, file: str):
    folder = write_checkpoint(tmp_path / "checkpoint", f"{file}.gguf")
    convert(folder, tmp_path / "out.gguf", "f32")
    golden = with_decays_of(tmp_path / "out.gguf", DATA / f"{file}.gguf", tmp_path / "golden.gguf")
    tokens = list(range(3, 35))
    assert np.array_equal(logits(golden, tokens), logits(tmp_path / "out.gguf", tokens))


@pytest.mark.parametrize("file", ONE_PER_FAMILY)
def test_q8_0_moves_the_logits_no_farther_than_the_golden_file(tmp_path: Path, file: str):
    golden = np.load(DATA / f"{file.partition('-')[0]}-golden.npz")
    tokens = golden["ids"].tolist()
    convert(write_checkpoint(tmp_path / "checkpoint", f"{file}.gguf"), tmp_path / "out.gguf", "q8_0")
    made = logits(tmp_path / "out.gguf", tokens)
    if "logits_q8_0" not in golden:  # the golden file of experts is q4_k_m, so are the weights here
        expected = golden["logits_q4_k_m"]
        assert 0 < rms(made - expected) < 0.02 * expected.std()
    elif file.endswith("q8_0"):  # its own blocks again
        assert rms(made - golden["logits_q8_0"]) < 1e-4 * golden["logits_q8_0"].std()
    else:
        moved = rms(golden["logits_q8_0"] - golden["logits_f32"])
        assert 0.8 * moved < rms(made - golden["logits_f32"]) < 1.1 * moved


def test_q8_0_is_within_half_a_step(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama-f32.gguf")
    done = convert(folder, tmp_path / "out.gguf", "q8_0")
    assert done.n_tensors["Q8_0"] == 15
    with open_model_file(DATA / "llama-f32.gguf") as golden, open_model_file(tmp_path / "out.gguf") as made:
        for name, info in made.tensors.items():
            exact, stored = read_tensor(golden, name), read_tensor(made, name)
            if info.type != GGMLType.Q8_0:
                assert np.array_equal(exact, stored)
                continue
            steps = np.abs(exact.reshape(-1, 32)).max(1) / 127
            error = np.abs(exact - stored).reshape(-1, 32).max(1)
            assert (error <= steps * 0.5 * 1.001 + steps * 127 * 2**-11).all(), name
            assert error.max() > 0


def test_numbers_that_no_type_holds():
    from kinetic_core.convert.quantize import quantize

    values = ((GGMLType.F16, 1e6), (GGMLType.F32, np.nan), (GGMLType.Q8_0, -np.inf), (GGMLType.Q4_K, 7e4))
    for type_, value in values:
        x = np.zeros((1, 256), np.float32)
        x[0, 3] = value
        with pytest.raises(TensorError, match="'odd' cannot be stored"):
            quantize("odd", x, type_)


@pytest.mark.parametrize("type_", [GGMLType.F16, GGMLType.BF16])
def test_rounding_is_to_the_nearest_even(type_: GGMLType):
    from kinetic_core.convert.quantize import quantize

    bits = 7 if type_ == GGMLType.BF16 else 10
    step = 2.0**-bits
    x = np.array([[1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -1 - step / 2]], np.float32)
    raw = quantize("x", x, type_)
    expected = [1, 1 + 2 * step, 1 + step, -1]
    assert dequantize(raw.to_bytes(), type_, x.shape).tolist() == [expected]


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(values | changes), "utf-8")


def edit_model(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text("utf-8"))
    values["model"] |= changes
    path.write_text(json.dumps(values), "utf-8")


REFUSED: list[tuple[str, dict[str, Any], type[KineticError], str]] = [
    ("config.json", {"architectures": ["GPT2LMHeadModel"]}, UnsupportedModelError, "GPT2LMHeadModel"),
    ("config.json", {"rope_scaling": {"rope_type": "yarn"}}, MetadataError, "rope_type.*yarn"),
    ("config.json", {"hidden_act": "gelu"}, MetadataError, "hidden_act.*gelu"),
    ("config.json", {"num_attention_heads": None}, MetadataError, "num_attention_heads"),
    ("config.json", {"num_hidden_layers": "2"}, MetadataError, "num_hidden_layers"),
    ("config.json", {"num_hidden_layers": 1}, TensorError, r"does not know.*model\.layers\.1"),
    ("config.json", {"num_hidden_layers": 3}, MetadataError, "block_count"),
    ("config.json", {"intermediate_size": 256}, TensorError, "ffn"),
    ("tokenizer.json", {"pre_tokenizer": {"type": "Metaspace"}}, TokenizerError, "cannot be read.*Metaspace"),
    ("tokenizer.json", {"pre_tokenizer": None}, TokenizerError, "no pre-tokenizer.*ByteLevel"),
    ("tokenizer.json", {"pre_tokenizer": [1]}, TokenizerError, "pre_tokenizer"),
    ("tokenizer.json", {"normalizer": {"type": "NFKC"}}, TokenizerError, "NFKC"),
    ("tokenizer.json", {"model": {"type": "Unigram"}}, TokenizerError, "Unigram"),
    ("tokenizer.json", {"added_tokens": [{"id": 5000, "content": "x"}]}, TokenizerError, "5000"),
    ("tokenizer.json", {"added_tokens": [{"id": 0, "content": "x", "lstrip": True}]}, TokenizerError, "lstrip"),
    ("tokenizer_config.json", {"eos_token": "nowhere"}, MetadataError, "eos_token.*nowhere"),
]


@pytest.mark.parametrize(("file", "changes", "error", "message"), REFUSED)
def test_refused_by_name(tmp_path: Path, file: str, changes: dict[str, Any], error: type[KineticError], message: str):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama-f32.gguf")
    edit(folder / file, **changes)
    with pytest.raises(error, match=message):
        convert(folder, tmp_path / "out.gguf", "f32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


CONTRACTIONS = r"'(?i:[sdmt]|ll|ve|re)|"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def edit_pattern(folder: Path, pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    edit(folder / "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]})


@pytest.mark.parametrize("numbers", [r"\p{N}{1,3}|", r"(?:\p{N}\p{N}\p{N}|\p{N}\p{N}|\p{N})|"])
def test_another_spelling_of_the_same_split_is_recognised(tmp_path: Path, numbers: str):
    folder = write_checkpoint(tmp_path / "checkpoint", "lfm3deep-f32.gguf")
    edit_pattern(folder, CONTRACTIONS + LETTERS + numbers + REST)
    convert(folder, tmp_path / "out.gguf", "f32")
    with open_model_file(tmp_path / "out.gguf") as made:
        assert made.metadata.get_str("tokenizer.ggml.pre") == "lfm2"


@pytest.mark.parametrize(
    ("pattern", "shown"),
    [
        (
            CONTRACTIONS + LETTERS + r"\p{N}{1,4}|" + REST,
            r"'1111' into \['1111'\], not \['111', '1'\] as by lfm2",
        ),
        (r"'(?:[sdmt]|ll|ve|re)|" + LETTERS + r"\p{N}{1,3}|" + REST, r"\\?'S"),
        (CONTRACTIONS + LETTERS + r"\p{N}{1,3}|" + REST.replace(r"[\r\n]*", ""), r"\.\\n"),
        (r"\p{L}+", "it cuts"),
    ],
)
def test_a_pattern_that_no_known_tokenizer_has_is_refused(tmp_path: Path, pattern: str, shown: str):
    folder = write_checkpoint(tmp_path / "checkpoint", "lfm3deep-f32.gguf")
    edit_pattern(folder, pattern)
    with pytest.raises(TokenizerError, match=rf"no known pre-tokenizer.*{shown}.*--pre-tokenizer"):
        convert(folder, tmp_path / "out.gguf", "f32")
    with pytest.raises(TokenizerError, match=r"llama-bpf.*llama-bpe"):
        convert(folder, tmp_path / "out.gguf", "f32", pre_tokenizer="llama-bpf")
    convert(folder, tmp_path / "out.gguf", "f32", pre_tokenizer="llama-bpe")
    with open_model_file(tmp_path / "out.gguf") as made:
        assert made.metadata.get_str("tokenizer.ggml.pre") == "llama-bpe"


def test_known_pre_tokenizers_are_told_apart():
    from kinetic_core.convert.pretokenizer import recognised

    for name, spec in PRE_TOKENIZERS.items():
        given = {
            "pre_tokenizer": json.loads(spec.build().__getstate__()),
            "normalizer": {"type": "NFC"} if spec.nfc else None,
        }
        found = recognised(Path("tokenizer.json"), given, "none", whole_tokens=spec.whole_tokens)
        assert PRE_TOKENIZERS[found] in (spec, PreTokenizerSpec(**{**vars(spec), "add_bos": not spec.add_bos})), name


def test_the_whole_token_rule_chooses_the_name(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "lfm3deep-f32.gguf")
    edit_model(folder / "tokenizer.json", ignore_merges=False)
    convert(folder, tmp_path / "out.gguf", "f32")
    with open_model_file(tmp_path / "out.gguf") as made:
        assert made.metadata.get_str("tokenizer.ggml.pre") == "dbrx"


def test_sampling_template_and_tied_output(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama-f32.gguf")
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7, "eos_token_id": [1, 2]}')
    (folder / "chat_template.jinja").write_text("{{ 'hello' }}")
    convert(folder, tmp_path / "out.gguf", "f32")
    with open_model_file(tmp_path / "out.gguf") as made:
        assert made.metadata.get_float("general.sampling.temp") == 0.25
        assert made.metadata.get_int("general.sampling.top_k") == 7
        assert made.metadata.get_str("tokenizer.chat_template") == "{{ 'hello' }}"
    with pytest.raises(RequestError, match="exists already"):
        convert(folder, tmp_path / "out.gguf", "f32")
    convert(folder, tmp_path / "out.gguf", "f16", overwrite=True)
    with pytest.raises(RequestError, match="q3_k_s"):
        convert(folder, tmp_path / "other.gguf", "q3_k_s")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "F8_E4M3"),
        ({"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, "F32"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "4 bytes, expected 8 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "outside the file"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "outside the file"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}, "do not match"),
        ([], "no object"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, entry: Any, message: str):
    from kinetic_core.convert.safetensors import read_table

    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(TensorError, match=message):
        read_table(path)


@pytest.mark.parametrize("raw", [b"", b"1234567", (2**63).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"[]"])
def test_a_header_that_cannot_be(tmp_path: Path, raw: bytes):
    from kinetic_core.convert.safetensors import read_table

    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(TensorError, match="header"):
        read_table(tmp_path / "x")


def test_an_index_does_not_lead_outside(tmp_path: Path):
    from kinetic_core.convert.safetensors import INDEX_NAME, read_checkpoint

    (tmp_path / "in").mkdir()
    write_safetensors(tmp_path / "out.safetensors", {"x": (np.ones(1, np.float32), "F32")})
    (tmp_path / "in" / INDEX_NAME).write_text('{"weight_map": {"x": "../out.safetensors"}}')
    with pytest.raises(TensorError, match="weight_map"):
        read_checkpoint(tmp_path / "in")
