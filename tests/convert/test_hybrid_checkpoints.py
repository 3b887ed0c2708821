"""What the hybrid families' checkpoints have besides: variants, factors, parts that stay out, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import DATA, write_checkpoint, write_safetensors
from hybrid_families import FALCON_H1_MULTIPLIERS

from kinetic_core.convert import convert
from kinetic_core.convert.safetensors import read_table
from kinetic_core.errors import KineticError, MetadataError, TensorError
from kinetic_core.gguf import open_model_file, read_tensor


def edit_config(folder: Path, **changes: Any) -> None:
    """Of the text model, where config.json has one of its own."""
    values = json.loads((folder / "config.json").read_text("utf-8"))
    values.get("text_config", values).update(changes)
    (folder / "config.json").write_text(json.dumps(values), "utf-8")


REFUSED: list[tuple[str, dict[str, Any], type[KineticError], str]] = [
    ("qwen35deep-bf16", {"mtp_num_hidden_layers": 2}, MetadataError, "mtp_num_hidden_layers.*2"),
    ("qwen35deep-bf16", {"attention_bias": True}, MetadataError, "attention_bias"),
    ("qwen35deep-bf16", {"attn_output_gate": False}, MetadataError, "attn_output_gate"),
    ("qwen35deep-bf16", {"linear_value_head_dim": 32}, MetadataError, "linear_value_head_dim.*32.*16"),
    ("qwen35deep-bf16", {"linear_num_value_heads": 5}, MetadataError, "linear_num_value_heads.*5"),
    ("qwen35deep-bf16", {"linear_num_value_heads": 8}, TensorError, "ssm_a.*does not fit config.json"),
    ("qwen35deep-bf16", {"layer_types": ["conv"] * 8}, MetadataError, "layer_types"),
    ("qwen35deep-bf16", {"rope_parameters": {"rope_type": "yarn"}}, MetadataError, "rope_type.*yarn"),
    ("qwen35deep-bf16", {"tie_word_embeddings": None, "num_hidden_layers": 7}, MetadataError, "layer_types"),
    ("qwen35moe-q4_k_m", {"num_experts": 7}, TensorError, "ffn_.*7"),
    ("qwen35moe-q4_k_m", {"mlp_only_layers": [0]}, MetadataError, "mlp_only_layers"),
    ("falconh1nonorm-f32", {"time_step_limit": [0.01, 0.1]}, MetadataError, "time_step_limit.*0.01"),
    ("falconh1nonorm-f32", {"ssm_multipliers": [1, 2, 3, 4]}, MetadataError, "ssm_multipliers.*5 finite numbers"),
    ("falconh1nonorm-f32", {"mlp_multipliers": [1, True]}, MetadataError, "mlp_multipliers.*2 finite numbers"),
    ("falconh1nonorm-f32", {"mamba_d_ssm": 90}, TensorError, "does not fit config.json"),
    ("falconh1-q8_0", {"mamba_norm_before_gate": None}, MetadataError, "mamba_norm_before_gate"),
    ("falconh1-q8_0", {"mamba_rms_norm": False}, TensorError, r"does not know.*mamba\.norm"),
    ("granitehybrid-bf16", {"time_step_limit": [0.0, 0.1]}, MetadataError, "time_step_limit.*0.1"),
    ("granitehybrid-bf16", {"residual_multiplier": 10**400}, MetadataError, "residual_multiplier.*finite number"),
    ("granitehybrid-bf16", {"residual_multiplier": 1e39}, MetadataError, "residual_multiplier.*finite number"),
    (
        "lfm3deep-f32",
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            }
        },
        MetadataError,
        "sliding_attention.*partial_rotary_factor.*0.5",
    ),
    ("lfm3deep-f32", {"use_attention_gate": False}, MetadataError, "use_attention_gate"),
]


@pytest.mark.parametrize(("file", "changes", "error", "message"), REFUSED)
def test_refused_by_name(tmp_path: Path, file: str, changes: dict[str, Any], error: type[KineticError], message: str):
    folder = write_checkpoint(tmp_path / "checkpoint", f"{file}.gguf")
    edit_config(folder, **changes)
    with pytest.raises(error, match=message):
        convert(folder, tmp_path / "out.gguf", "f32")


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = {name: (entry.read(), "F32") for name, entry in read_table(folder / "model.safetensors").items()}
    change(table)
    write_safetensors(folder / "model.safetensors", table)


def test_split_and_fused_projections_at_once_are_refused(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "qwen35deep-bf16.gguf")
    layer = "model.language_model.layers.0.linear_attn."

    def both(table: dict[str, Any]) -> None:
        qkv, z = table[layer + "in_proj_qkv.weight"][0], table[layer + "in_proj_z.weight"][0]
        table[layer + "in_proj_qkvz.weight"] = np.concatenate([qkv, z]), "F32"

    edit_tensors(folder, both)
    with pytest.raises(TensorError, match=r"blk\.0\.attn_qkv\.weight' twice.*in_proj_qkvz"):
        convert(folder, tmp_path / "out.gguf", "f32")


def test_a_prediction_block_that_was_not_saved_is_left_out(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "qwen35-bf16.gguf")
    edit_tensors(folder, lambda table: [table.pop(name) for name in list(table) if name.startswith("mtp.")])
    convert(folder, tmp_path / "out.gguf", "f32")
    with open_model_file(tmp_path / "out.gguf") as made:
        assert made.metadata.get_int("qwen35.block_count") == 4
        assert "qwen35.nextn_predict_layers" not in made.metadata
        assert made.metadata.get_bools_per_layer("qwen35.attention.recurrent_layers", 4) == (True, True, True, False)


def test_an_untied_model_without_an_output_layer_is_refused(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama3rope-f32.gguf")
    edit_tensors(folder, lambda table: table.pop("lm_head.weight"))
    with pytest.raises(TensorError, match=r"no output layer.*lm_head\.weight"):
        convert(folder, tmp_path / "out.gguf", "f32")


def test_tied_falcon_h1_layers_have_factors_of_their_own(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "falconh1nonorm-f32.gguf")
    edit_config(folder, tie_word_embeddings=True)
    convert(folder, tmp_path / "out.gguf", "f32")
    with open_model_file(tmp_path / "out.gguf") as made:
        embeddings, output = (read_tensor(made, name) for name in ("token_embd.weight", "output.weight"))
    assert np.array_equal(embeddings, 32 * output)
    edit_config(folder, lm_head_multiplier=4.0)
    convert(folder, tmp_path / "out.gguf", "f32", overwrite=True)
    with open_model_file(tmp_path / "out.gguf") as made:
        assert "output.weight" not in made.tensors


def test_falcon_h1_biases_are_scaled_by_what_is_behind_them(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "falconh1nonorm-f32.gguf")
    layer = "model.layers.1."

    def biased(table: dict[str, Any]) -> None:
        for name in [n for n in table if n.startswith(layer) and n.endswith("_proj.weight")]:
            table[name.replace("weight", "bias")] = np.ones(len(table[name][0]), np.float32), "F32"

    edit_tensors(folder, biased)
    convert(folder, tmp_path / "out.gguf", "f32")
    with open_model_file(tmp_path / "out.gguf") as made:
        found = {n.split(".")[2]: read_tensor(made, n) for n in made.tensors if n.endswith("bias") and "blk.1" in n}
    m = FALCON_H1_MULTIPLIERS
    alike = {name: set(found[name].tolist()) for name in found if not name.startswith("ssm_")}
    assert alike == {
        "attn_q": {1.0},
        "attn_k": {m["key_multiplier"]},
        "attn_v": {1.0},
        "attn_output": {m["attention_out_multiplier"]},
        "ffn_gate": {m["mlp_multipliers"][0]},
        "ffn_up": {1.0},
        "ffn_down": {m["mlp_multipliers"][1]},
    }
    assert set(found["ssm_out"].tolist()) == {m["ssm_out_multiplier"]}
    assert np.array_equal(found["ssm_in"], np.repeat(m["ssm_multipliers"], [96, 96, 16, 16, 6]))


def test_what_follows_from_the_rest_is_left_out(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "falconh1nonorm-f32.gguf")
    derived = np.ones((1, 1, 230), np.float32), "F32"
    edit_tensors(folder, lambda table: table.update({"model.layers.0.mamba.mup_vector": derived}))
    edit_config(folder, tie_word_embeddings=True, embedding_multiplier=2.0, lm_head_multiplier=2.0)
    done = convert(folder, tmp_path / "out.gguf", "f32")
    with open_model_file(tmp_path / "out.gguf") as made:
        assert "output.weight" not in made.tensors  # the folder's lm_head.weight is a copy of the embeddings
    assert done.notices == ()


@pytest.mark.parametrize("spelling", [[0.0, {"__float__": "Infinity"}], None])
def test_spellings_of_no_limit(tmp_path: Path, spelling: Any):
    folder = write_checkpoint(tmp_path / "checkpoint", "falconh1nonorm-f32.gguf")
    edit_config(folder, time_step_limit=spelling)
    convert(folder, tmp_path / "out.gguf", "f32")


def test_granite_layers_by_their_newer_names(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "granitehybrid-bf16.gguf")
    kinds = {"mamba": "linear_attention", "attention": "full_attention"}
    old = json.loads((folder / "config.json").read_text("utf-8"))["layer_types"]
    edit_config(folder, layer_types=[kinds[kind] for kind in old])
    convert(folder, tmp_path / "out.gguf", "f32")
    with open_model_file(tmp_path / "out.gguf") as made, open_model_file(DATA / "granitehybrid-bf16.gguf") as golden:
        key = "granitehybrid.attention.head_count_kv"
        assert np.array_equal(made.metadata.raw[key], golden.metadata.raw[key])
