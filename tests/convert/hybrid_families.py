"""The families with Mamba-2 or delta-net layers, back to their checkpoints; see `families`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from families import Stored, Tensors

# Powers of two, so that folding them back is exact; no product below equals another layer's.
FALCON_H1_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 4.0,
    "lm_head_multiplier": 0.125,
    "attention_in_multiplier": 0.5,
    "key_multiplier": 16.0,
    "attention_out_multiplier": 2.0,
    "ssm_in_multiplier": 0.25,
    "ssm_multipliers": [2.0, 0.5, 8.0, 32.0, 0.125],
    "ssm_out_multiplier": 64.0,
    "mlp_multipliers": [0.0625, 128.0],
}


def half_split(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of adjacent pairs (2i, 2i + 1) back to (i, i + d/2), one row at a time."""
    out = np.empty_like(array)
    for row in range(len(array)):
        head, within = divmod(row, head_dim)
        i, second = divmod(within, 2)
        out[head * head_dim + i + second * (head_dim // 2)] = array[row]
    return out


def log_of_decay(a: np.ndarray) -> np.ndarray:
    """A_log in float32 with -exp(A_log) nearest to a. (Above 1 its steps are coarser than a's: some are missed.)"""
    log = np.log(-a.astype(np.float64)).astype(np.float32)
    candidates = np.array([log, np.nextafter(log, np.float32(np.inf)), np.nextafter(log, np.float32(-np.inf))])
    error = np.abs(np.exp(candidates.astype(np.float64)).astype(np.float32) + a)
    return np.take_along_axis(candidates, error.argmin(0)[None], 0)[0]


def mamba2(name: str, array: np.ndarray) -> np.ndarray:
    """What Mamba-2 layers store otherwise."""
    if name == "ssm_a":
        return log_of_decay(array.reshape(-1))
    if name in ("ssm_d", "ssm_norm.weight"):
        return array.reshape(-1)
    return array[:, None, :] if name == "ssm_conv1d.weight" else array


def mamba2_config(stored: Stored) -> dict[str, Any]:
    meta = stored.meta
    return {
        "mamba_d_conv": meta.get_int("ssm.conv_kernel"),
        "mamba_d_state": meta.get_int("ssm.state_size"),
        "mamba_n_groups": meta.get_int("ssm.group_count"),
        "mamba_n_heads": meta.get_int("ssm.time_step_rank"),
    }


def granite(stored: Stored) -> tuple[dict[str, Any], Tensors]:
    meta = stored.meta
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    shared = {"ffn_gate": "input_linear", "ffn_down": "output_linear"}
    inside = {
        "attn_norm.weight": "input_layernorm.weight",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ssm_in.weight": "mamba.in_proj.weight",
        "ssm_conv1d.weight": "mamba.conv1d.weight",
        "ssm_conv1d.bias": "mamba.conv1d.bias",
        "ssm_dt.bias": "mamba.dt_bias",
        "ssm_a": "mamba.A_log",
        "ssm_d": "mamba.D",
        "ssm_norm.weight": "mamba.norm.weight",
        "ssm_out.weight": "mamba.out_proj.weight",
        "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
        **{f"{ours}_exps.weight": f"block_sparse_moe.{theirs}.weight" for ours, theirs in shared.items()},
        **{f"{ours}_shexp.weight": f"shared_mlp.{theirs}.weight" for ours, theirs in shared.items()},
        **{f"{ours}.weight": f"shared_mlp.{theirs}.weight" for ours, theirs in shared.items()},
    }
    tensors: Tensors = {}
    for name in stored.model.tensors:
        layer, rest = stored.block(name)
        if rest.startswith("ffn_up"):
            continue  # behind the gate's rows
        array = mamba2(rest, stored[name])
        if rest.startswith("ffn_gate") and "inp" not in rest:
            array = np.concatenate([array, stored[name.replace("ffn_gate", "ffn_up")]], -2)
        if rest in ("attn_q.weight", "attn_k.weight"):
            array = half_split(array, 64)
        theirs = outside[rest] if layer < 0 else f"model.layers.{layer}.{inside[rest]}"
        tensors[theirs] = array, stored.dtype(name)
    common = stored.common()
    kv_heads = meta.get_ints_per_layer("attention.head_count_kv", common["num_hidden_layers"])
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **common,
        **mamba2_config(stored),
        "mamba_expand": meta.get_int("ssm.inner_size") // common["hidden_size"],
        "intermediate_size": meta.get_int("feed_forward_length"),
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["attention" if n else "mamba" for n in kv_heads],
        "rms_norm_eps": meta.get_float("attention.layer_norm_rms_epsilon"),
        "attention_multiplier": meta.get_float("attention.scale"),
        "embedding_multiplier": meta.get_float("embedding_scale"),
        "residual_multiplier": meta.get_float("residual_scale"),
        "logits_scaling": meta.get_float("logit_scale"),
        "num_local_experts": meta.get_int("expert_count"),
        "num_experts_per_tok": meta.get_int("expert_used_count"),
        "shared_intermediate_size": meta.get_int("expert_shared_feed_forward_length"),
        "position_embedding_type": "nope",
    }, tensors


def falcon_h1(stored: Stored) -> tuple[dict[str, Any], Tensors]:
    meta, m = stored.meta, FALCON_H1_MULTIPLIERS
    inner, heads = meta.get_int("ssm.inner_size"), meta.get_int("ssm.time_step_rank")
    states = meta.get_int("ssm.group_count") * meta.get_int("ssm.state_size")
    rows = [inner, inner, states, states, heads]
    slices = np.concatenate([np.full((n, 1), f, np.float32) for n, f in zip(rows, m["ssm_multipliers"], strict=True)])
    gate, down = m["mlp_multipliers"]
    attention_in = m["attention_in_multiplier"]
    names: dict[str, tuple[str, Any]] = {
        "token_embd.weight": ("model.embed_tokens.weight", m["embedding_multiplier"]),
        "output_norm.weight": ("model.final_layernorm.weight", 1.0),
        "output.weight": ("lm_head.weight", m["lm_head_multiplier"]),
        "attn_norm.weight": ("input_layernorm.weight", 1.0),
        "ffn_norm": ("pre_ff_layernorm.weight", 1.0),
        "attn_q.weight": ("self_attn.q_proj.weight", attention_in),
        "attn_k.weight": ("self_attn.k_proj.weight", attention_in * m["key_multiplier"]),
        "attn_v.weight": ("self_attn.v_proj.weight", attention_in),
        "attn_output.weight": ("self_attn.o_proj.weight", m["attention_out_multiplier"]),
        "ssm_in.weight": ("mamba.in_proj.weight", m["ssm_in_multiplier"] * slices),
        "ssm_conv1d.weight": ("mamba.conv1d.weight", 1.0),
        "ssm_conv1d.bias": ("mamba.conv1d.bias", 1.0),
        "ssm_dt.bias": ("mamba.dt_bias", 1.0),
        "ssm_a": ("mamba.A_log", 1.0),
        "ssm_d": ("mamba.D", 1.0),
        "ssm_norm.weight": ("mamba.norm.weight", 1.0),
        "ssm_out.weight": ("mamba.out_proj.weight", m["ssm_out_multiplier"]),
        "ffn_gate.weight": ("feed_forward.gate_proj.weight", gate),
        "ffn_up.weight": ("feed_forward.up_proj.weight", 1.0),
        "ffn_down.weight": ("feed_forward.down_proj.weight", down),
    }
    tensors: Tensors = {}
    for name in stored.model.tensors:
        layer, rest = stored.block(name)
        theirs, factor = names[rest]
        if layer >= 0:
            theirs = f"model.layers.{layer}.{theirs}"
        tensors[theirs] = (mamba2(rest, stored[name]) / np.float32(factor)).astype(np.float32), "F32"
    return {
        "architectures": ["FalconH1ForCausalLM"],
        **stored.common(),
        **mamba2_config(stored),
        **m,
        "mamba_d_ssm": inner,
        "mamba_expand": 2,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in stored,
        "mamba_norm_before_gate": False,
        "time_step_limit": [0.0, float("inf")],
        "intermediate_size": meta.get_int("feed_forward_length"),
        "num_key_value_heads": meta.get_int("attention.head_count_kv"),
        "head_dim": meta.get_int("attention.key_length"),
        "rms_norm_eps": meta.get_float("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get_float("rope.freq_base"),
    }, tensors


def qwen35(
    stored: Stored, *, fused: bool = False, packed: bool = False, vision: bool = True
) -> tuple[dict[str, Any], Tensors]:
    """fused: two projections per delta net in place of four. packed: all experts in one tensor. vision: around it."""
    meta, common = stored.meta, stored.common()
    n_predicted = meta.get_int("nextn_predict_layers", 0)
    n_layers = common["num_hidden_layers"] = common["num_hidden_layers"] - n_predicted
    model = "model.language_model." if vision else "model."
    d, key_heads = meta.get_int("ssm.state_size"), meta.get_int("ssm.group_count")
    value_heads = meta.get_int("ssm.time_step_rank")

    def grouped(array: np.ndarray, size: int) -> np.ndarray:
        """Rows of value heads of `size`: tiled head h, of key head h mod key_heads, back beside its siblings."""
        order = sorted(range(value_heads), key=lambda h: (h % key_heads, h // key_heads))
        return np.concatenate([array[h * size : (h + 1) * size] for h in order])

    def values_grouped(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array[: 2 * key_heads * d], grouped(array[2 * key_heads * d :], d)])

    plain = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
        "ssm_norm": "linear_attn.norm",
        "nextn.eh_proj": "mtp.fc",
    }
    norms = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "nextn.enorm": "mtp.pre_fc_norm_embedding",
        "nextn.hnorm": "mtp.pre_fc_norm_hidden",
        "nextn.shared_head_norm": "mtp.norm",
    }
    tensors: Tensors = {
        f"{model}embed_tokens.weight": (stored["token_embd.weight"], stored.dtype("token_embd.weight")),
        f"{model}norm.weight": (stored["output_norm.weight"] - 1, "F32"),
    }
    if "output.weight" in stored:
        tensors["lm_head.weight"] = stored["output.weight"], stored.dtype("output.weight")
    for name in stored.model.tensors:
        block, rest = stored.block(name)
        if block < 0:
            continue
        layer = f"{model}layers.{block}." if block < n_layers else f"mtp.layers.{block - n_layers}."
        kind, array, dtype = rest.removesuffix(".weight"), stored[name], stored.dtype(name)
        if kind in plain or kind in norms:
            theirs = plain.get(kind) or norms[kind]
            made = array - 1 if kind in norms else array
            tensors[(theirs if theirs.startswith("mtp.") else layer + theirs) + ".weight"] = made, dtype
        elif kind == "ffn_gate_exps" and packed:
            both = np.concatenate([array, stored[name.replace("gate", "up")]], 1)
            tensors[layer + "mlp.experts.gate_up_proj"] = both, dtype
        elif kind.endswith("_exps") and packed:
            if kind == "ffn_down_exps":
                tensors[layer + "mlp.experts.down_proj"] = array, dtype
        elif kind.endswith("_exps"):
            part = kind.removeprefix("ffn_").removesuffix("_exps") + "_proj"
            tensors |= {f"{layer}mlp.experts.{e}.{part}.weight": (array[e], dtype) for e in range(len(array))}
        else:
            made = {
                "attn_qkv": values_grouped,
                "attn_gate": lambda a: grouped(a, d),
                "ssm_alpha": lambda a: grouped(a, 1),
                "ssm_beta": lambda a: grouped(a, 1),
                "ssm_conv1d": lambda a: values_grouped(a)[:, None, :],
                "ssm_a": lambda a: log_of_decay(grouped(a, 1)),
                "ssm_dt.bias": lambda a: grouped(a, 1),
                "ssm_out": lambda a: grouped(a.T, d).T,
            }[kind](array)
            theirs = {
                "attn_qkv": "in_proj_qkv.weight",
                "attn_gate": "in_proj_z.weight",
                "ssm_alpha": "in_proj_a.weight",
                "ssm_beta": "in_proj_b.weight",
                "ssm_conv1d": "conv1d.weight",
                "ssm_a": "A_log",
                "ssm_dt.bias": "dt_bias",
                "ssm_out": "out_proj.weight",
            }[kind]
            tensors[f"{layer}linear_attn.{theirs}"] = np.ascontiguousarray(made), dtype
    if fused:
        tensors = _fused(tensors, d, key_heads, value_heads // key_heads)
    if vision:
        tensors["model.visual.patch_embed.proj.weight"] = np.ones((4, 3, 2, 2, 2), np.float32), "BF16"
        tensors["model.visual.blocks.0.norm1.weight"] = np.ones(4, np.float32), "BF16"
    return _qwen35_config(stored, common, n_predicted, vision), tensors


def _fused(tensors: Tensors, d: int, key_heads: int, r: int) -> Tensors:
    """in_proj_qkvz and in_proj_ba: for one key head after the other its rows of q, k, v, z, and of b, a."""
    out: Tensors = {}
    for name, (array, dtype) in tensors.items():
        if name.endswith("in_proj_qkv.weight"):
            z = tensors[name.replace("_qkv", "_z")][0]
            rows = []
            for head in range(key_heads):
                rows += [array[head * d : (head + 1) * d], array[(key_heads + head) * d : (key_heads + head + 1) * d]]
                values = slice(head * r * d, (head + 1) * r * d)
                rows += [array[2 * key_heads * d :][values], z[values]]
            out[name.replace("_qkv", "_qkvz")] = np.concatenate(rows), dtype
        elif name.endswith("in_proj_b.weight"):
            a = tensors[name.replace("_b", "_a")][0]
            heads = [slice(head * r, (head + 1) * r) for head in range(key_heads)]
            out[name.replace("_b", "_ba")] = np.concatenate([x[s] for s in heads for x in (array, a)]), dtype
        elif not name.endswith(("in_proj_z.weight", "in_proj_a.weight")):
            out[name] = array, dtype
    return out


def _qwen35_config(stored: Stored, common: dict[str, Any], n_predicted: int, vision: bool) -> dict[str, Any]:
    meta, n_layers = stored.meta, common["num_hidden_layers"]
    recurrent = meta.get_bools_per_layer("attention.recurrent_layers", n_layers + n_predicted)[:n_layers]
    head_dim = meta.get_int("attention.key_length")
    text = common | {
        "num_key_value_heads": meta.get_int("attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": meta.get_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attn_output_gate": True,
        "layer_types": ["linear_attention" if r else "full_attention" for r in recurrent],
        "full_attention_interval": meta.get_int("full_attention_interval"),
        "linear_conv_kernel_dim": meta.get_int("ssm.conv_kernel"),
        "linear_key_head_dim": meta.get_int("ssm.state_size"),
        "linear_value_head_dim": meta.get_int("ssm.state_size"),
        "linear_num_key_heads": meta.get_int("ssm.group_count"),
        "linear_num_value_heads": meta.get_int("ssm.time_step_rank"),
        "mtp_num_hidden_layers": n_predicted,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": meta.get_float("rope.freq_base"),
            "partial_rotary_factor": meta.get_int("rope.dimension_count") / head_dim,
            "mrope_section": meta.get_ints("rope.dimension_sections")[:3].tolist(),
            "mrope_interleaved": True,
        },
    }
    if stored.key == "qwen35":
        text["intermediate_size"] = meta.get_int("feed_forward_length")
    else:
        text |= {
            "num_experts": meta.get_int("expert_count"),
            "num_experts_per_tok": meta.get_int("expert_used_count"),
            "moe_intermediate_size": meta.get_int("expert_feed_forward_length"),
            "shared_expert_intermediate_size": meta.get_int("expert_shared_feed_forward_length"),
        }
    name = "Qwen3_5" if stored.key == "qwen35" else "Qwen3_5Moe"
    if not vision:
        return {"architectures": [f"{name}ForCausalLM"], **text}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 4, "num_hidden_layers": 1},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
