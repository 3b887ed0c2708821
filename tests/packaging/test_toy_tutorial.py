"""The tutorial shows the example's files as they are, computes what it says, and its mistakes are found as it says."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from toy_tutorial import BLOCKS, EXAMPLE, Mistake, mistakes, shows

from kinetic_core.conformance import ArchitectureConformance
from kinetic_core.conformance.runner import SuiteReport, run_case
from kinetic_core.gguf import read_tensor
from kinetic_core.interfaces import HeadRequest, LoadOptions, RowBatch, SequenceRows
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model

PACKAGE = "kinetic_arch_toy"
SOME = ("ARCH-01", "ARCH-05", "ARCH-18")
"""Of the clauses that run models; all of them take 8 seconds for each mistake."""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """toy(mistake or None): the architecture's module, of a copy of the package with the mistake."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]

    def load(mistake: Mistake | None = None) -> ModuleType:
        shutil.copytree(EXAMPLE / PACKAGE, tmp_path / PACKAGE)
        if mistake is not None:
            mistake.apply(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()
        importlib.invalidate_caches()
        return importlib.import_module(f"{PACKAGE}.architecture")

    yield load
    forget()


def test_the_tutorial_writes_exactly_the_example() -> None:
    shown = {block.path: block.body for block in BLOCKS if block.path.startswith("kinetic-arch-toy/")}
    files = {
        path.relative_to(EXAMPLE.parent).as_posix(): path.read_text(encoding="utf-8")
        for path in EXAMPLE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shown == files


def test_the_example_is_small() -> None:
    lines = [block.body.count("\n") for block in BLOCKS if block.path.startswith("kinetic-arch-toy/")]
    assert sum(lines) < 250


def test_the_tests_of_the_package_are_five_lines() -> None:
    lines = (EXAMPLE / "tests" / "test_conformance.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) == 5


@pytest.mark.parametrize("mistake", mistakes(), ids=lambda mistake: mistake.line.split()[0])
def test_a_mistake_is_found_as_the_tutorial_shows(toy: Any, mistake: Mistake) -> None:
    module = toy(mistake)
    values = {"target": module.Toy, "name": "toy", "formats": ("F32",)}
    suite = type("TestToy", (ArchitectureConformance,), values)
    chosen = (case for case in suite.cases() if case.clause.scope != "model" or case.clause.id in SOME)
    results = tuple(run_case(case) for case in chosen)
    suite.close()
    found = [f"FAILED {line}" for line in SuiteReport("", "", "", "", {}, results).findings()]
    *expected, last = mistake.findings
    more = last == "…"
    if not more:
        expected.append(last)
    assert len(found) == len(expected) or (more and len(found) > len(expected)), found
    for line, printed in zip(expected, found, strict=False):
        assert shows(line, printed), (line, printed)


def test_there_are_mistakes() -> None:
    assert len(mistakes()) >= 4 and all(mistake.findings for mistake in mistakes())


# the equations


def rms(x: Any, weight: Any, eps: float = 1e-5) -> Any:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def unit(x: Any) -> Any:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def equations(tensors: dict[str, Any], metadata: Any, tokens: list[int]) -> Any:
    """f64[tokens, vocab]: the tutorial's equations, written down directly."""
    heads, size = metadata["toy.attention.head_count"], metadata["toy.attention.key_length"]
    kv_heads, n = metadata.get("toy.attention.head_count_kv", heads), len(tokens)
    x = tensors["token_embd.weight"][tokens]
    for layer, attends in enumerate(metadata["toy.attention_layers"]):
        w = {name.removeprefix(f"blk.{layer}."): value for name, value in tensors.items()}
        y = rms(x, w["norm.weight"])
        kind = "attn" if attends else "mem"
        q, k, v = (y @ w[f"{kind}_{name}.weight"].T for name in "qkv")
        if not attends:
            before = np.concatenate([np.zeros((2, k.shape[1])), k])
            k = sum(before[tap : tap + n] * w["mem_conv.weight"][:, tap] for tap in range(3))
            k = k * sigmoid(k)
        q, k = q.reshape(n, -1, size), k.reshape(n, -1, size)
        v = v.reshape(n, -1, size)
        if attends:
            q, k = rms(q, w["attn_q_norm.weight"]), rms(k, w["attn_k_norm.weight"])
            mixed = np.zeros((n, heads, size))
            for t in range(n):
                for head in range(heads):
                    shared = head // (heads // kv_heads)
                    scores = np.exp(k[: t + 1, shared] @ q[t, head] * size**-0.5)
                    mixed[t, head] = scores / scores.sum() @ v[: t + 1, shared]
            mixed = mixed.reshape(n, -1)
        else:
            q, k = unit(q), unit(k)
            time = np.log1p(np.exp(y @ w["mem_time.weight"].T + w["mem_time.bias"]))
            memory = np.zeros((heads, size, size))
            mixed = np.zeros((n, heads, size))
            for t in range(n):
                for head in range(heads):
                    shared = head // (heads // kv_heads)
                    memory[head] *= np.exp(time[t, head] * w["mem_decay"][head])
                    memory[head] += np.outer(k[t, shared], time[t, head] * v[t, head])
                    mixed[t, head] = memory[head].T @ q[t, shared] + w["mem_skip"][head] * v[t, head]
            mixed = sigmoid(y @ w["mem_gate.weight"].T) * mixed.reshape(n, -1)
        x = x + mixed @ w[f"{kind}_output.weight"].T
        gate = y @ w["ffn_gate.weight"].T
        x = x + (gate * sigmoid(gate) * (y @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    return rms(x, tensors["output_norm.weight"]) @ tensors.get("output.weight", tensors["token_embd.weight"]).T


def test_the_forward_pass_is_the_equations(toy: Any) -> None:
    architecture = toy().Toy
    for variant in architecture.tiny():
        source = random_model("toy", variant)
        program = record_program(architecture(source), FullHead(), source)
        options = LoadOptions(n_blocks=1, n_slots=1, kv_type="f32")
        executable = ReferenceBackend().load(program, source, options)
        tokens = [5, 9, 9, 2, 77, 30, 1]
        sequence = SequenceRows(0, 0, len(tokens), np.zeros(1, np.int32), 0)
        executable.run(
            RowBatch(
                np.array(tokens, np.int32),
                np.arange(len(tokens), dtype=np.int32),
                (sequence,),
                [HeadRequest(row, None) for row in range(len(tokens))],
            )
        )
        tensors = {name: read_tensor(source, name).astype(np.float64) for name in source.tensors}
        expected = equations(tensors, source.metadata.raw, tokens)
        for row, logits in enumerate(expected):
            np.testing.assert_allclose(executable.logits(row), logits, rtol=0, atol=1e-4 * expected.std())


def test_what_does_not_fit_is_refused_by_the_keys_name(toy: Any) -> None:
    from kinetic_core.errors import MetadataError
    from kinetic_core.gguf import MemoryTensors

    architecture = toy().Toy
    source = random_model("toy", architecture.tiny()[0])
    tensors = {name: read_tensor(source, name) for name in source.tensors}
    for kv_heads in (3, 0):
        metadata = {**source.metadata.raw, "toy.attention.head_count_kv": kv_heads}
        with pytest.raises(MetadataError, match=r"toy\.attention\.head_count_kv.*got " + str(kv_heads)):
            architecture(MemoryTensors(metadata, tensors))
