"""From a file back to its family's checkpoint: names, settings and orders as Hugging Face's have them.

Written from what checkpoints look like, not from what the plugins say of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from hybrid_families import falcon_h1, granite, half_split, qwen35

from kinetic_core.gguf import GGMLType, GGUFFile, read_tensor

Tensors = dict[str, tuple[np.ndarray, str]]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Stored:
    """The file's tensors, each with the checkpoint's type of numbers: bfloat16 where the file has it, else float32."""

    def __init__(self, model: GGUFFile) -> None:
        self.model, self.key, self.meta = model, model.architecture, model.metadata.prefixed(model.architecture)

    def __contains__(self, name: str) -> bool:
        return name in self.model.tensors

    def __getitem__(self, name: str) -> np.ndarray:
        return read_tensor(self.model, name)

    def dtype(self, name: str) -> str:
        return "BF16" if self.model.tensors[name].type == GGMLType.BF16 else "F32"

    def block(self, name: str) -> tuple[int, str]:
        """Number of the block and the rest of the name, -1 outside."""
        parts = name.split(".", 2)
        return (int(parts[1]), parts[2]) if parts[0] == "blk" else (-1, name)

    def common(self) -> dict[str, Any]:
        meta = self.meta
        return {
            "hidden_size": meta.get_int("embedding_length"),
            "num_hidden_layers": meta.get_int("block_count"),
            "num_attention_heads": meta.get_int("attention.head_count"),
            "max_position_embeddings": meta.get_int("context_length"),
            "vocab_size": self["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in self,
        }


def checkpoint_of(model: GGUFFile, **variants: Any) -> tuple[dict[str, Any], Tensors]:
    """config.json and the tensors. variants: what the family's function takes besides."""
    stored = Stored(model)
    families: Mapping[str, Callable[..., tuple[dict[str, Any], Tensors]]] = {
        "llama": llama,
        "lfm2": lfm,
        "lfm2moe": lfm,
        "lfm3": lfm,
        "granitehybrid": granite,
        "falcon-h1": falcon_h1,
        "qwen35": qwen35,
        "qwen35moe": qwen35,
    }
    return families[stored.key](stored, **variants)


def llama(stored: Stored) -> tuple[dict[str, Any], Tensors]:
    meta, tensors = stored.meta, {}
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    inside = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for name in stored.model.tensors:
        layer, rest = stored.block(name)
        kind, _, suffix = rest.rpartition(".")
        array = stored[name]
        if kind in ("attn_q", "attn_k"):
            array = half_split(array, meta.get_int("attention.key_length"))
        if name != "rope_freqs.weight":
            theirs = outside[kind] if layer < 0 else f"model.layers.{layer}.{inside[kind]}"
            tensors[f"{theirs}.{suffix}"] = array, stored.dtype(name)
    return {
        "architectures": ["LlamaForCausalLM"],
        **stored.common(),
        "intermediate_size": meta.get_int("feed_forward_length"),
        "num_key_value_heads": meta.get_int("attention.head_count_kv"),
        "head_dim": meta.get_int("attention.key_length"),
        "rms_norm_eps": meta.get_float("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get_float("rope.freq_base"),
        "rope_scaling": LLAMA3 if "rope_freqs.weight" in stored else None,
    }, tensors


def lfm(stored: Stored) -> tuple[dict[str, Any], Tensors]:
    lfm3 = stored.key == "lfm3"
    outside = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm"}
    inside = {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "post_attention_norm": "post_operator_norm",
        "post_ffw_norm": "post_ffn_norm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_gate": "self_attn.gate_proj",
        "attn_output": "self_attn.o_proj" if lfm3 else "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_norm" if lfm3 else "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_norm" if lfm3 else "self_attn.k_layernorm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate_exps": "feed_forward.experts.E.w1",
        "ffn_up_exps": "feed_forward.experts.E.w3",
        "ffn_down_exps": "feed_forward.experts.E.w2",
    }
    tensors: Tensors = {}
    for name in stored.model.tensors:
        layer, rest = stored.block(name)
        kind = rest.removesuffix(".weight")
        array, dtype = stored[name], stored.dtype(name)
        if name == "rope_freqs.weight":
            continue
        if kind == "exp_probs_b.bias":
            tensors[f"model.layers.{layer}.feed_forward.expert_bias"] = array, dtype
        elif layer < 0:
            tensors[f"{outside[kind]}.weight"] = array, dtype
        elif kind.endswith("_exps"):
            theirs = f"model.layers.{layer}.{inside[kind]}.weight"
            tensors |= {theirs.replace(".E.", f".{e}."): (array[e], dtype) for e in range(len(array))}
        else:
            theirs = f"model.layers.{layer}.{inside[kind]}.weight"
            tensors[theirs] = (array[:, None, :] if kind == "shortconv.conv" else array), dtype
    return _lfm_config(stored), tensors


def _lfm_config(stored: Stored) -> dict[str, Any]:
    meta, common = stored.meta, stored.common()
    kv_heads = meta.get_ints_per_layer("attention.head_count_kv", common["num_hidden_layers"])
    slides = meta.get_bools_per_layer("attention.sliding_window_pattern", len(kv_heads), False)
    kinds = [
        "conv" if not n else "sliding_attention" if s else "full_attention"
        for n, s in zip(kv_heads, slides, strict=True)
    ]
    classes = {"lfm2": "Lfm2ForCausalLM", "lfm2moe": "Lfm2MoeForCausalLM", "lfm3": "Lfm3ForCausalLM"}
    config = common | {
        "architectures": [classes[stored.key]],
        "intermediate_size": meta.get_int("feed_forward_length"),
        "num_key_value_heads": max(kv_heads),
        "layer_types": kinds,
        "norm_eps": meta.get_float("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": meta.get_int("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "rope_theta": meta.get_float("rope.freq_base"),
    }
    if stored.key == "lfm2moe":
        config |= {
            "num_experts": meta.get_int("expert_count"),
            "num_experts_per_tok": meta.get_int("expert_used_count"),
            "moe_intermediate_size": meta.get_int("expert_feed_forward_length"),
            "num_dense_layers": meta.get_int("leading_dense_block_count"),
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }
    if stored.key == "lfm3":
        turning = int((stored["rope_freqs.weight"] == 1).sum())
        head_dim = meta.get_int("attention.key_length")
        config |= {
            "head_dim": head_dim,
            "sliding_window": meta.get_int("attention.sliding_window"),
            "use_sandwich_norm": True,
            "use_attention_gate": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": meta.get_float("rope.freq_base"),
                    "partial_rotary_factor": 2 * turning / head_dim,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": meta.get_float("rope.freq_base_swa")},
            },
        }
        del config["rope_theta"]
    return config
