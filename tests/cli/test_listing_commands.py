"""plugins, models, info, pull: what needs no running model."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from kinetic_core.gguf import RawTensor, write_gguf
from kinetic_core.models import KNOWN_MODELS, default

DATA = Path(__file__).parent.parent / "data"

HEAVY = (
    "{'numba', 'llvmlite', 'cupy', 'numpy', 'httpx', 'starlette', 'prompt_toolkit', 'huggingface_hub', 'tokenizers'}"
)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plugins"], ["plugins", "--json"]])
def test_light_commands_import_nothing_heavy(words: list[str]) -> None:
    script = (
        f"import sys\nfrom kinetic_core.cli import main\ntry:\n    main({words!r})\n"
        f"except SystemExit:\n    print('heavy', sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("heavy []\n")


def test_help_names_every_command(kinetic: Any) -> None:
    ended = kinetic("--help")
    assert ended.status == 0
    for command in ("chat", "run", "serve", "bench", "info", "pull", "models", "plugins"):
        assert f" {command} " in ended.out
        assert kinetic(command, "--help").status == 0


def test_plugins_lists_the_built_ins(kinetic: Any) -> None:
    ended = kinetic("plugins")
    assert ended.status == 0 and ended.err == ""
    for line in ("kinetic-core 0.1.0: builtins", "  backend       reference", "  architecture  tiny-hybrid"):
        assert line in ended.out


def test_plugins_as_json(kinetic: Any) -> None:
    listed = json.loads(kinetic("plugins", "--json").out)
    assert listed["problems"] == []
    (core,) = (plugin for plugin in listed["plugins"] if plugin["distribution"] == "kinetic-core")
    assert {"architecture", "backend", "drafter", "cache", "head"} == {entry["kind"] for entry in core["registered"]}


def test_a_problem_is_shown_and_fatal_when_strict(kinetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETIC_PLUGINS", "-nobody")
    ended = kinetic("plugins")
    assert ended.status == 0 and "problem: KINETIC_PLUGINS names no plugin: got nobody" in ended.err
    ended = kinetic("plugins", "--strict")
    assert ended.status == 6 and ended.err.startswith("error: problems with plugins") and ended.err.count("\n") == 1


def test_models(kinetic: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KINETIC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    out = kinetic("models").out
    for name in (*KNOWN_MODELS, "tiny-hybrid"):
        assert f"\n  {name} " in out
    listed = json.loads(kinetic("models", "--json").out)
    assert [m["name"] for m in listed["known"]] == [*KNOWN_MODELS, "tiny-hybrid"]
    assert listed["default"] == "smollm2" and not any(m["name"] == "smollm2" for m in listed["here"])
    path = default.model_path()
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(default.SMOLLM2.n_bytes)
    assert f"smollm2  98.4 MB  {path}" in kinetic("models").out


def test_pull_prints_the_path(kinetic: Any, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert kinetic("pull", str(file)).out == f"{file}\n"
    ended = kinetic("pull", str(tmp_path / "none.gguf"))
    assert (ended.status, ended.out) == (4, "") and "does not exist" in ended.err


def test_pull_of_the_miniature(kinetic: Any) -> None:
    ended = kinetic("pull", "tiny-hybrid")
    assert (ended.status, ended.out, ended.err) == (
        4,
        "",
        "error: tiny-hybrid lives in memory: there is no file to fetch\n",
    )


def test_info_of_a_llama_file(kinetic: Any) -> None:
    path = DATA / "llama-q4_k_m.gguf"
    facts = json.loads(kinetic("info", str(path), "--json", "--ctx", "64").out)
    assert facts["architecture"] == "llama" and facts["plugin"] == "kinetic-arch-llama" and facts["missing"] is None
    assert facts["weight_bytes"] == sum(entry["bytes"] for entry in facts["tensors"].values())
    assert facts["weight_bytes"] < path.stat().st_size < facts["weight_bytes"] * 1.5
    assert facts["context"] == 64 and facts["prediction"] is False and facts["state_bytes_per_sequence"] == 0
    per_token = facts["kv_bytes_per_token"]
    assert facts["memory_bytes"] == facts["weight_bytes"] + 64 * per_token
    doubled = json.loads(kinetic("info", str(path), "--json", "--kv", "f32").out)
    assert doubled["kv_bytes_per_token"] == 2 * per_token


def test_info_of_the_miniature(kinetic: Any) -> None:
    out = kinetic("info", "tiny-hybrid").out
    assert "architecture:      tiny-hybrid (plugin kinetic-core)" in out
    assert "prediction:        no" in out and "recurrent state:   11.3 kB per sequence" in out


def test_info_without_the_plugin_says_what_to_install(
    kinetic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    points = [point for point in entry_points(group="kinetic") if point.name != "qwen35"]
    monkeypatch.setattr("kinetic_core.plugins.entry_points", lambda group: points)
    path = tmp_path / "q.gguf"
    metadata = {
        "general.architecture": "qwen35",
        "qwen35.block_count": 1,
        "qwen35.context_length": 77,
        "qwen35.nextn_predict_layers": 1,
    }
    write_gguf(path, metadata, {"output_norm.weight": RawTensor.from_array(np.ones(8, np.float32))})
    ended = kinetic("info", str(path))
    assert ended.status == 0
    assert "prediction:        yes" in ended.out and "77 tokens" in ended.out
    (missing,) = (line for line in ended.out.splitlines() if line.startswith("missing:"))
    assert missing.endswith("pip install kinetic-arch-qwen35")
    ended = kinetic("run", str(path), "hello", "--backend", "reference")
    assert ended.status == 1 and ended.err.endswith("pip install kinetic-arch-qwen35\n") and ended.err.count("\n") == 1


@pytest.mark.parametrize("data", [b"", b"GGU", b"GGUF", b"GGUF\x03\x00\x00\x00"])
def test_g3_a_header_cut_short(kinetic: Any, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(data)
    ended = kinetic("info", str(path))
    assert ended.status == 1 and "truncated header" in ended.err and ended.err.count("\n") == 1


def test_info_of_a_broken_file(kinetic: Any, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes((DATA / "llama-q4_k_m.gguf").read_bytes()[:5000])
    ended = kinetic("info", str(path))
    assert ended.status == 1 and ended.err.startswith("error: ") and ended.err.count("\n") == 1
