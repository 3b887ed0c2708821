"""Checkpoints that somebody else wrote: what cannot be is refused by name before anything of its size is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint, write_safetensors

from kinetic_core.checkpoint import CheckpointConfig, CheckpointFormat, TensorRule, scaled
from kinetic_core.convert import convert
from kinetic_core.convert.safetensors import INDEX_NAME, read_checkpoint, read_table
from kinetic_core.engine.model import load
from kinetic_core.errors import KineticError, MetadataError, PluginError, RequestError, TensorError, TokenizerError
from kinetic_core.interfaces import Architecture
from kinetic_core.interfaces.backend import LoadOptions
from kinetic_core.plugins import load_registry

HUGE = 2**32 - 1
SMALL_BYTES = 64_000_000
"""What converting a tiny checkpoint takes at most."""


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text("utf-8"))
    change(values)
    path.write_text(json.dumps(values), "utf-8")


def edit_config(folder: Path, **changes: Any) -> None:
    edit(folder / "config.json", lambda values: values.get("text_config", values).update(changes))


def peak_bytes(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


CONFIGS: list[tuple[str, dict[str, Any], type[KineticError], str]] = [
    ("llama3rope-f32", {"num_hidden_layers": HUGE}, MetadataError, "num_hidden_layers.*got 4294967295.*1 to 4096"),
    ("llama3rope-f32", {"num_hidden_layers": 4000}, TensorError, "fewer tensors than blocks.*4000 blocks"),
    ("llama3rope-f32", {"head_dim": HUGE}, MetadataError, "head_dim.*got 4294967295.*2 to 65536"),
    ("llama3rope-f32", {"head_dim": None, "hidden_size": HUGE}, MetadataError, "hidden_size.*65536 times the 4"),
    ("llama3rope-f32", {"rope_scaling": "yarn"}, MetadataError, "rope_scaling.*'yarn'.*an object"),
    ("llama3rope-f32", {"rope_theta": [1]}, MetadataError, "rope_theta.*a finite number"),
    ("lfm2-bf16", {"layer_types": None, "full_attn_idxs": [[1]]}, MetadataError, "full_attn_idxs"),
    (
        "lfm2-bf16",
        {"num_hidden_layers": HUGE, "layer_types": None, "full_attn_idxs": [1]},
        MetadataError,
        "num_hidden_layers.*4096",
    ),
    (
        "lfm2-bf16",
        {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1e38},
        MetadataError,
        "block_ffn_dim_multiplier.*feed-forward width",
    ),
    ("lfm3deep-f32", {"head_dim": HUGE}, MetadataError, "head_dim.*65536"),
    ("lfm3deep-f32", {"rope_parameters": [1]}, MetadataError, r"rope_parameters.*\[1\].*an object"),
    ("granitehybrid-bf16", {"num_hidden_layers": HUGE, "layer_types": None}, MetadataError, "num_hidden_layers.*4096"),
    ("granitehybrid-bf16", {"mamba_n_groups": 2}, MetadataError, "mamba_n_groups.*got 2.*1 or no such key"),
    ("falconh1nonorm-f32", {"mamba_d_ssm": HUGE}, TensorError, "ssm_in.*does not fit.*85899.* rows"),
    ("falconh1nonorm-f32", {"mamba_d_state": HUGE}, TensorError, "ssm_in.*does not fit"),
    ("falconh1nonorm-f32", {"mamba_n_heads": HUGE}, TensorError, "ssm_in.*does not fit"),
    ("qwen35deep-bf16", {"num_hidden_layers": HUGE, "layer_types": None}, MetadataError, "num_hidden_layers.*4096"),
    ("qwen35deep-bf16", {"head_dim": HUGE}, MetadataError, "head_dim.*65536"),
    *(
        ("qwen35deep-bf16", {"rope_parameters": {"mrope_section": wrong}}, MetadataError, "mrope_section.*3 whole")
        for wrong in ([1, "2", 3], [1, 2], "11,11,10", [1, 2, 2**31], [-1, 2, 3], [1.5, 2, 3], [True, 2, 3], {"t": 11})
    ),
    *(
        (
            "qwen35deep-bf16",
            {"rope_parameters": {"partial_rotary_factor": wrong}},
            MetadataError,
            "partial_rotary.*0 to 1",
        )
        for wrong in (-0.5, 1.5, 1e30)
    ),
]


@pytest.mark.parametrize(("file", "changes", "error", "message"), CONFIGS)
def test_a_config_that_cannot_be(
    tmp_path: Path, file: str, changes: dict[str, Any], error: type[KineticError], message: str
):
    folder = write_checkpoint(tmp_path / "checkpoint", f"{file}.gguf")
    edit_config(folder, **changes)

    def refused() -> None:
        with pytest.raises(error, match=message):
            convert(folder, tmp_path / "out.gguf", "f32")

    assert peak_bytes(refused) < SMALL_BYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


@pytest.mark.parametrize("name", ["in_proj_qkvz.weight", "in_proj_ba.weight"])
@pytest.mark.parametrize("shape", ["vector", "transposed", "a row less"])
def test_fused_projections_of_another_shape(tmp_path: Path, name: str, shape: str):
    folder = write_checkpoint(tmp_path / "checkpoint", "qwen35deep-bf16.gguf", fused=True)
    tensors = {name: (entry.read(), "F32") for name, entry in read_table(folder / "model.safetensors").items()}
    full = f"model.language_model.layers.0.linear_attn.{name}"
    array = tensors[full][0]
    changed = {"vector": array.reshape(-1), "transposed": array.T.copy(), "a row less": array[1:]}[shape]
    write_safetensors(folder / "model.safetensors", tensors | {full: (changed, "F32")})
    with pytest.raises(TensorError, match=r"blk\.0\.\w+\.weight.*does not fit config.json.*a matrix of \d+ rows"):
        convert(folder, tmp_path / "out.gguf", "f32")


@pytest.mark.parametrize("name", ["shared_mlp.input_linear.weight", "mamba.in_proj.weight", "mamba.conv1d.weight"])
def test_granite_tensors_that_are_vectors(tmp_path: Path, name: str):
    folder = write_checkpoint(tmp_path / "checkpoint", "granitehybrid-bf16.gguf")
    tensors = {name: (entry.read(), "F32") for name, entry in read_table(folder / "model.safetensors").items()}
    full = next(each for each in tensors if each.endswith(name))
    write_safetensors(folder / "model.safetensors", tensors | {full: (tensors[full][0].reshape(-1), "F32")})
    with pytest.raises(TensorError, match=r"blk\.0\."):
        convert(folder, tmp_path / "out.gguf", "f32")


def test_factors_need_a_row_each():
    with pytest.raises(ValueError, match="3 rows"):
        scaled(np.ones(3))(np.ones((1, 5), np.float32))


TOKENIZERS: list[tuple[str, Any, str]] = [
    ("post_processor", 5, "post_processor.*got 5.*an object with a type"),
    ("post_processor", ["TemplateProcessing"], "post_processor"),
    ("post_processor", {"type": ["Sequence"]}, "post_processor"),
    ("post_processor", {"type": "Sequence", "processors": 7}, "post_processor.*got 7.*a list of processors"),
    ("post_processor", {"type": "Sequence", "processors": [None, 3]}, "post_processor.*got 3"),
    ("post_processor", {"type": "TemplateProcessing", "single": "<s> $A"}, "template of 'post_processor'"),
    ("added_tokens", {"<s>": 0}, "added_tokens.*a list"),
    ("added_tokens", 0, "added_tokens.*got 0"),
    ("added_tokens", [7], "added token.*got 7"),
    ("model", [], "kind of tokenizer"),
]
MODELS: list[tuple[str, Any, str]] = [
    ("vocab", ["a", "b"], r"vocabulary.*\['a', 'b'\].*an object"),
    ("vocab", {"a": "0"}, "number of the token 'a'.*'0'"),
    ("vocab", {"a": 2**70}, "number of the token 'a'"),
    ("merges", {"a": "b"}, "merges.*pairs"),
    ("merges", [["a"]], "merges.*pairs"),
    ("merges", [["a", 1]], "merges.*pairs"),
    ("ignore_merges", "no", "ignore_merges.*'no'.*true or false"),
]


@pytest.mark.parametrize(
    ("inside", "key", "value", "message"), [(False, *c) for c in TOKENIZERS] + [(True, *c) for c in MODELS]
)
def test_a_tokenizer_of_other_types(tmp_path: Path, inside: bool, key: str, value: Any, message: str):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama3rope-f32.gguf")
    edit(folder / "tokenizer.json", lambda values: (values["model"] if inside else values).update({key: value}))
    with pytest.raises(TokenizerError, match=message) as caught:
        convert(folder, tmp_path / "out.gguf", "f32", pre_tokenizer="llama-bpe")
    assert "tokenizer.json" in str(caught.value)


def test_a_template_with_a_name_that_is_no_text(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama3rope-f32.gguf")
    templates = [{"name": ["default"], "template": "x"}, {"name": "default", "template": 5}]
    edit(folder / "tokenizer_config.json", lambda values: values.update(chat_template=templates))
    with pytest.raises(MetadataError, match="chat_template"):
        convert(folder, tmp_path / "out.gguf", "f32")


def test_sampling_figures_that_no_model_loads_with(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama3rope-f32.gguf")
    (folder / "generation_config.json").write_text('{"temperature": -3.5}')
    with pytest.raises(MetadataError, match=r"general\.sampling\.temp.*-3\.5"):
        convert(folder, tmp_path / "out.gguf", "f32")
    assert not (tmp_path / "out.gguf").exists()


INDEXES: list[tuple[str, str]] = [
    ("{", "index.json.*valid JSON"),
    ("[]", "no usable weight_map"),
    ('{"weight_map": ["a.safetensors"]}', "no usable weight_map"),
    ('{"weight_map": {"x": "/etc/passwd"}}', "no usable weight_map"),
    ('{"weight_map": {"x": "../a.safetensors"}}', "no usable weight_map"),
    ('{"weight_map": {"x": "a\\u0000.safetensors"}}', "no usable weight_map"),
    ('{"weight_map": {"x": "\\ud800.safetensors"}}', "no usable weight_map"),
    ('{"weight_map": {"x": 5}}', "no usable weight_map"),
    ('{"weight_map": {"x": "missing.safetensors"}}', r"missing\.safetensors.*no such file"),
    ('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}', "index.json.*'x' is there twice"),
    ('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}', r"disagree about 'x'.*b\.safetensors"),
    ('{"weight_map": {"x": "a.safetensors", "z": "a.safetensors"}}', "in no file.*'z'"),
]


@pytest.mark.parametrize(("text", "message"), INDEXES)
def test_an_index_that_cannot_be(tmp_path: Path, text: str, message: str):
    one = np.ones(1, np.float32), "F32"
    write_safetensors(tmp_path / "a.safetensors", {"x": one})
    write_safetensors(tmp_path / "b.safetensors", {"x": one, "y": one})
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(TensorError, match=message):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_is_no_file(tmp_path: Path, name: str):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama3rope-f32.gguf")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(KineticError, match=f"{name}.*no such file"):
        convert(folder, tmp_path / "out.gguf", "f32")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"x": {}, "x": {}}', "'x' is there twice"),
        (
            '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            ' "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
            "bytes in common.*'x' and 'y'",
        ),
    ],
)
def test_a_header_that_says_things_twice(tmp_path: Path, header: str, message: str):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(TensorError, match=message):
        read_table(path)


class Claiming(Architecture):
    """Never made: only its description is read."""

    checkpoint = CheckpointFormat(("LlamaForCausalLM",), lambda config: {}, lambda config: [])


class Countless(Architecture):
    """Describes checkpoints without a number of blocks."""

    checkpoint = CheckpointFormat(
        ("CountlessForCausalLM",), lambda config: {}, lambda config: [TensorRule("token_embd.weight", "x")]
    )


def registry_with(monkeypatch: pytest.MonkeyPatch, family: type[Architecture]) -> Any:
    """The installed plugins, the last architecture's class replaced."""
    registry = load_registry()
    name = [entry.registration.name for entry in registry.registered("architecture")][-1]
    real = registry.get

    def get(kind: Any, asked: str) -> Any:
        return family if (kind, asked) == ("architecture", name) else real(kind, asked)

    monkeypatch.setattr(registry, "get", get)
    return registry


def test_a_class_that_two_plugins_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama3rope-f32.gguf")
    registry = registry_with(monkeypatch, Claiming)
    with pytest.raises(PluginError, match=r"'LlamaForCausalLM'.*claimed more than once.*llama of kinetic-arch-llama"):
        convert(folder, tmp_path / "out.gguf", "f32", registry=registry)


def test_a_description_without_block_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama3rope-f32.gguf")
    edit_config(folder, architectures=["CountlessForCausalLM"])
    with pytest.raises(PluginError, match=r"Countless gives no usable block_count.*got None"):
        convert(folder, tmp_path / "out.gguf", "f32", registry=registry_with(monkeypatch, Countless))


@pytest.mark.parametrize("n_threads", [0, -1, True, 1.0, 2000])
def test_numbers_of_threads(tmp_path: Path, n_threads: Any):
    with pytest.raises(RequestError, match=r"n_threads cannot be used.*1 to 1024") as caught:
        convert(tmp_path, tmp_path / "out.gguf", n_threads=n_threads)
    assert caught.value.field == "n_threads"
    with pytest.raises(RequestError, match=r"threads cannot be used.*1 to 1024"):
        load("tiny-hybrid", threads=n_threads)
    if n_threads != 2000:  # a backend of somebody else's may have as many
        with pytest.raises(RequestError, match=r"n_threads cannot be used.*at least 1"):
            LoadOptions(n_threads=n_threads)


def test_settings_with_bounds():
    config = CheckpointConfig({"a": 5, "b": 0.5, "c": [1, 2]})
    assert config.get_int("a", maximum=5) == 5 and config.get_float("b", minimum=0.5, maximum=0.5) == 0.5
    assert config.get_ints("c", 2) == (1, 2) and config.get_ints("d", 2, default=None) is None
    for read in (
        lambda: config.get_int("a", maximum=4),
        lambda: config.get_float("b", maximum=0.4),
        lambda: config.get_float("b", minimum=0.6),
        lambda: config.get_ints("c", 3),
        lambda: config.get_ints("d", 1),
    ):
        with pytest.raises(MetadataError):
            read()


def test_mutated_checkpoints():
    """See `mutated_checkpoints`: in a process of its own, whose memory is bounded."""
    script = Path(__file__).with_name("mutated_checkpoints.py")
    done = subprocess.run([sys.executable, script, "40", "11"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["faults"] == []
    assert {"MetadataError", "TensorError", "TokenizerError", "converted"} <= set(result["counts"])
