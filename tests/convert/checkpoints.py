"""Checkpoint folders made from GGUF files: what their families' checkpoints store otherwise is turned back here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from families import checkpoint_of

from kinetic_core.gguf import GGUFFile, open_model_file
from kinetic_core.text.pretokenizers import pre_tokenizer_spec

DATA = Path(__file__).parent.parent / "data"


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
    stages.append(
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": spec.pattern is None}
    )
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


def write_checkpoint(folder: Path, file: str, *, shards: int = 1, **variants: Any) -> Path:
    """The folder of a checkpoint that converts to tests/data/`file`; variants: see `families.checkpoint_of`."""
    folder.mkdir()
    with open_model_file(DATA / file) as model:
        config, tensors = checkpoint_of(model, **variants)
        (folder / "config.json").write_text(json.dumps(config))
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
