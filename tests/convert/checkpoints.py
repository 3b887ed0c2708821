"""Checkpoint folders made from GGUF files: what their families' checkpoints store otherwise is turned back here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kinetic_core.gguf import GGMLType, GGUFFile, open_model_file, read_tensor
from kinetic_core.plugins import load_registry
from kinetic_core.text.pretokenizers import pre_tokenizer_spec

DATA = Path(__file__).parent.parent / "data"
CLASSES = {
    "llama": "LlamaForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


def bytes_of(array: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any()
        return (bits >> 16).astype("<u2").tobytes()
    return array.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_safetensors(path: Path, tensors: Mapping[str, tuple[np.ndarray, str]]) -> None:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (array, dtype) in tensors.items():
        raw = bytes_of(array, dtype)
        offsets = [len(data), len(data) + len(raw)]
        table[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def half_split(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of adjacent pairs (2i, 2i + 1) back to (i, i + d/2), one row at a time."""
    out = np.empty_like(array)
    for row in range(len(array)):
        head, within = divmod(row, head_dim)
        i, second = divmod(within, 2)
        out[head * head_dim + i + second * (head_dim // 2)] = array[row]
    return out


def checkpoint_tensors(model: GGUFFile) -> dict[str, tuple[np.ndarray, str]]:
    """Every tensor under its name in the checkpoint, bfloat16 where the file has bfloat16."""
    key = model.architecture
    names = load_registry().architecture_for(key).checkpoint_names()
    out: dict[str, tuple[np.ndarray, str]] = {}
    for ours, info in model.tensors.items():
        if ours == "rope_freqs.weight":
            continue
        layer = ours.split(".")[1] if ours.startswith("blk.") else ""
        theirs = names[ours.replace(f"blk.{layer}.", "blk.{layer}.")].replace("{layer}", layer)
        array = read_tensor(model, ours)
        if key == "granitehybrid":
            array, done = granite(model, ours, array)
            if not done:
                continue
        if key == "llama" and ours.split(".")[2:3] in (["attn_q"], ["attn_k"]):
            array = half_split(array, model.metadata.get_int("llama.attention.key_length"))
        if "shortconv.conv" in ours:
            array = array[:, None, :]
        dtype = "BF16" if info.type == GGMLType.BF16 else "F32"
        if "{expert}" in theirs:
            out |= {theirs.replace("{expert}", str(e)): (array[e], dtype) for e in range(len(array))}
        else:
            out[theirs] = array, dtype
    return out


def granite(model: GGUFFile, name: str, array: np.ndarray) -> tuple[np.ndarray, bool]:
    """The checkpoint's tensor, and whether it is one: up rows are stored behind the gate's."""
    kind = name.split(".")[2] if name.startswith("blk.") else name
    if kind.startswith("ffn_up"):
        return array, False
    if kind.startswith("ffn_gate") and kind != "ffn_gate_inp":
        array = np.concatenate([array, read_tensor(model, name.replace("ffn_gate", "ffn_up"))], -2)
    if kind in ("attn_q", "attn_k"):
        array = half_split(array, 64)
    if kind == "ssm_a":
        array = np.log(-array.astype(float)).reshape(-1).astype(np.float32)
    if kind == "ssm_d" or kind == "ssm_norm":
        array = array.reshape(-1)
    if name.endswith("ssm_conv1d.weight"):
        array = array[:, None, :]
    return array, True


def config(model: GGUFFile) -> dict[str, Any]:
    """config.json as the families' checkpoints have it."""
    key, meta = model.architecture, model.metadata.prefixed(model.architecture)
    values: dict[str, Any] = {
        "architectures": [CLASSES[key]],
        "hidden_size": meta.get_int("embedding_length"),
        "num_hidden_layers": meta.get_int("block_count"),
        "num_attention_heads": meta.get_int("attention.head_count"),
        "intermediate_size": meta.get_int("feed_forward_length"),
        "max_position_embeddings": meta.get_int("context_length"),
        "vocab_size": meta.get_int("vocab_size"),
        "tie_word_embeddings": "output.weight" not in model.tensors,
    }
    if key == "llama":
        values |= {
            "num_key_value_heads": meta.get_int("attention.head_count_kv"),
            "head_dim": meta.get_int("attention.key_length"),
            "rms_norm_eps": meta.get_float("attention.layer_norm_rms_epsilon"),
            "rope_theta": meta.get_float("rope.freq_base"),
            "rope_scaling": None,
        }
        return values
    kv_heads = meta.get_ints_per_layer("attention.head_count_kv", values["num_hidden_layers"])
    if key == "granitehybrid":
        shared = meta.get_int("expert_shared_feed_forward_length")
        return values | {
            "num_key_value_heads": max(kv_heads),
            "layer_types": ["attention" if n else "mamba" for n in kv_heads],
            "rms_norm_eps": meta.get_float("attention.layer_norm_rms_epsilon"),
            "attention_multiplier": meta.get_float("attention.scale"),
            "embedding_multiplier": meta.get_float("embedding_scale"),
            "residual_multiplier": meta.get_float("residual_scale"),
            "logits_scaling": meta.get_float("logit_scale"),
            "num_local_experts": meta.get_int("expert_count"),
            "num_experts_per_tok": meta.get_int("expert_used_count"),
            "shared_intermediate_size": shared,
            "position_embedding_type": "nope",
            "mamba_d_conv": meta.get_int("ssm.conv_kernel"),
            "mamba_d_state": meta.get_int("ssm.state_size"),
            "mamba_n_groups": meta.get_int("ssm.group_count"),
            "mamba_expand": meta.get_int("ssm.inner_size") // values["hidden_size"],
            "mamba_n_heads": meta.get_int("ssm.time_step_rank"),
        }
    slides = meta.get_bools_per_layer("attention.sliding_window_pattern", len(kv_heads), False)
    kinds = [
        "conv" if not n else "sliding_attention" if s else "full_attention"
        for n, s in zip(kv_heads, slides, strict=True)
    ]
    values |= {
        "num_key_value_heads": max(kv_heads),
        "layer_types": kinds,
        "norm_eps": meta.get_float("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": meta.get_int("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "rope_theta": meta.get_float("rope.freq_base"),
    }
    if key == "lfm2moe":
        values |= {
            "num_experts": meta.get_int("expert_count"),
            "num_experts_per_tok": meta.get_int("expert_used_count"),
            "moe_intermediate_size": meta.get_int("expert_feed_forward_length"),
            "num_dense_layers": meta.get_int("leading_dense_block_count"),
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }
    if key == "lfm3":
        turning = int((read_tensor(model, "rope_freqs.weight") == 1).sum())
        head_dim = meta.get_int("attention.key_length")
        values |= {
            "head_dim": head_dim,
            "sliding_window": meta.get_int("attention.sliding_window"),
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": meta.get_float("rope.freq_base"),
                    "partial_rotary_factor": 2 * turning / head_dim,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": meta.get_float("rope.freq_base_swa")},
            },
        }
        del values["rope_theta"]
    return values


def tokenizer(model: GGUFFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json."""
    meta = model.metadata
    tokens = meta.get_strs("tokenizer.ggml.tokens")
    types = meta.get_ints("tokenizer.ggml.token_type").tolist()
    spec = pre_tokenizer_spec(meta.get_str("tokenizer.ggml.pre"))
    stages: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if spec.digits_alone else []
    if spec.pattern:
        split = {"type": "Split", "pattern": {"Regex": spec.pattern}, "behavior": "Isolated", "invert": False}
        stages.append(split)
    stages.append({"type": "ByteLevel", "add_prefix_space": False, "use_regex": spec.pattern is None})
    added = [{"id": i, "content": tokens[i], "special": t == 3} for i, t in enumerate(types) if t in (3, 4)]
    settings: dict[str, Any] = {
        f"{theirs}_token": tokens[meta.get_int(f"tokenizer.ggml.{ours}_token_id")]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"))
        if f"tokenizer.ggml.{ours}_token_id" in meta
    }
    settings["chat_template"] = meta.get_str("tokenizer.chat_template")
    if meta.get_bool("tokenizer.ggml.add_bos_token", False):
        bos = {"SpecialToken": {"id": settings["bos_token"], "type_id": 0}}
        single = [bos, {"Sequence": {"id": "A", "type_id": 0}}]
        processor = {"type": "Sequence", "processors": [{"type": "TemplateProcessing", "single": single}]}
    else:
        processor = None
    return {
        "normalizer": {"type": "NFC"} if spec.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": stages},
        "post_processor": processor,
        "added_tokens": added,
        "model": {
            "type": "BPE",
            "vocab": {t: i for i, t in enumerate(tokens) if types[i] == 1},
            "merges": [m.split(" ") for m in meta.get_strs("tokenizer.ggml.merges")],
            "ignore_merges": spec.whole_tokens,
            "byte_fallback": False,
        },
    }, settings


def write_checkpoint(folder: Path, file: str, *, shards: int = 1) -> Path:
    """The folder of a checkpoint that converts to tests/data/`file`."""
    folder.mkdir()
    with open_model_file(DATA / file) as model:
        tensors = checkpoint_tensors(model)
        (folder / "config.json").write_text(json.dumps(config(model)))
        first, second = tokenizer(model)
    (folder / "tokenizer.json").write_text(json.dumps(first), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(second), "utf-8")
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    places = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for part in set(places.values()):
        write_safetensors(folder / part, {name: t for name, t in tensors.items() if places[name] == part})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder
