"""``kinetic convert`` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "convert"))
from checkpoints import write_checkpoint


def test_convert_says_what_it_wrote(kinetic, tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "llama-f32.gguf")
    done = kinetic("convert", str(folder), str(tmp_path / "a.gguf"), "--type", "q8_0")
    assert done.status == 0
    assert "llama" in done.out
    assert "15 Q8_0" in done.out
    done = kinetic("convert", str(folder), str(tmp_path / "b.gguf"), "--json")
    said = json.loads(done.out)
    assert said["bytes"] == (tmp_path / "b.gguf").stat().st_size
    assert said["tensors"]["BF16"] == 15
    again = kinetic("convert", str(folder), str(tmp_path / "b.gguf"))
    assert (again.status, "exists already" in again.err) == (7, True)
    assert kinetic("convert", str(folder), str(tmp_path / "b.gguf"), "--overwrite").status == 0


def test_convert_says_what_it_leaves_out(kinetic, tmp_path: Path):
    folder = write_checkpoint(tmp_path / "checkpoint", "qwen35deep-bf16.gguf")
    done = kinetic("convert", str(folder), str(tmp_path / "a.gguf"), "--threads", "1", "--type", "q4_k_m")
    assert done.status == 0
    assert "left out: the vision part, 2 tensors called model.visual.*" in done.err
    done = kinetic("convert", str(folder), str(tmp_path / "b.gguf"), "--json")
    assert json.loads(done.out)["notices"] == ["left out: the vision part, 2 tensors called model.visual.*"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [(["nowhere", "x.gguf"], 7, "nowhere"), (["nowhere", "x.gguf", "--type", "q3_k_s"], 2, "q3_k_s")],
)
def test_convert_refuses_by_name(kinetic, words: list[str], status: int, message: str):
    done = kinetic("convert", *words)
    assert done.status == status
    assert message in done.err
