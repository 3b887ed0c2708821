"""``kinetic conform``: what it runs, prints and writes, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from kinetic_core.cli import options
from kinetic_core.conformance import architecture
from kinetic_core.hookspecs import Registration
from kinetic_core.plugins import Plugin, Registered, Registry, load_registry

MODULE = """
import dataclasses

from kinetic_core.interfaces import ArchitectureCapabilities
from kinetic_core.reference.tiny_hybrid import TinyHybrid

class Right(TinyHybrid):
    capabilities = ArchitectureCapabilities(has_recurrent_state=True)

    def output(self, b):
        return b.weight("output.weight", (self.vocab_size, self.d_model)), self.logit_scale

    @classmethod
    def tiny(cls):
        (variant,) = (variant for variant in TinyHybrid.tiny() if variant.name == "recurrent")
        return [dataclasses.replace(variant, optional=())]

class Wrong(Right):
    capabilities = ArchitectureCapabilities(has_recurrent_state=True, has_sliding_window=True)

class Misspelled(Right):
    def output(self, b):
        return b.weight("outputs.weight", (self.vocab_size, self.d_model)), self.logit_scale
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """plugins(class name or None): installs one plugin that registers the class, beside the built-ins."""
    (tmp_path / "toy_for_conform.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(architecture.ArchitectureConformance, "formats", ("F32",))

    def install(name: str | None, error: str | None = None) -> None:
        registration = Registration("tiny-hybrid", f"toy_for_conform:{name}")
        entries = () if name is None else (Registered("architecture", registration, "kinetic-arch-toy"),)
        builtins = [p for p in load_registry().plugins if p.distribution == "kinetic-core"]
        backends = tuple(e for e in builtins[0].registered if e.kind == "backend")
        core = Plugin("builtins", "kinetic_core.builtins", "kinetic-core", "0.1.0", backends)
        toy = Plugin("toy", "toy.plugin", "kinetic-arch-toy", "1.0", entries, error)
        monkeypatch.setattr(options, "load_registry", lambda strict=False: Registry([core, toy]))

    return install


def test_a_right_plugin_conforms(kinetic: Command, plugins: Any, tmp_path: Path) -> None:
    plugins("Right")
    path = tmp_path / "report.json"
    ended = kinetic("conform", "toy", "--backend", "reference", "--json", str(path))
    assert ended.status == 0, ended.out
    assert "architecture tiny-hybrid of kinetic-arch-toy 1.0" in ended.out
    assert "has_recurrent_state: yes, has_prediction_block: no" in ended.out
    assert "ARCH-27" in ended.out and "FAILED" not in ended.out
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["conforms"] is True
    assert document["header"]["kinetic-core"] and document["header"]["lowering"] == "numpy"
    (suite,) = document["suites"]
    assert {result["case"] for result in suite["results"]} >= {"ARCH-01-recurrent-F32", "ARCH-25"}
    assert {result["outcome"] for result in suite["results"]} == {"passed", "not applicable"}


def test_a_wrong_plugin_fails_with_status_1(kinetic: Command, plugins: Any) -> None:
    plugins("Wrong")
    ended = kinetic("conform", "kinetic-arch-toy", "--backend", "reference")
    assert ended.status == 1
    assert "FAILED ARCH-26: the capabilities say has_sliding_window=True, no variant of tiny() shows it" in ended.out
    assert "does not conform" in ended.out


def test_a_variant_that_cannot_be_recorded_is_one_line(kinetic: Command, plugins: Any, tmp_path: Path) -> None:
    plugins("Misspelled")
    path = tmp_path / "report.json"
    ended = kinetic("conform", "toy", "--backend", "reference", "--json", str(path))
    assert ended.status == 1
    missing = "TensorError: the tensor 'outputs.weight' is missing"
    of_plugin, of_variant = (line for line in ended.out.splitlines() if line.startswith("FAILED"))
    assert of_plugin.startswith(f"FAILED ARCH-25 and 2 more: an error ended the check: {missing}")
    assert f" more: the variant 'recurrent' of tiny() cannot be recorded: {missing}" in of_variant
    line = 1 + MODULE.splitlines().index(
        '        return b.weight("outputs.weight", (self.vocab_size, self.d_model)), self.logit_scale'
    )
    assert all(finding.endswith(f" (toy_for_conform.py:{line}, in output)") for finding in (of_plugin, of_variant))
    (suite,) = json.loads(path.read_text(encoding="utf-8"))["suites"]
    of_variants = [result["outcome"] for result in suite["results"] if "recurrent" in result["case"]]
    assert of_variants and set(of_variants) == {"failed"}


def test_nothing_to_check_is_a_failure(kinetic: Command, plugins: Any) -> None:
    plugins(None)
    ended = kinetic("conform", "toy", "--backend", "reference")
    assert ended.status == 1
    kinds = "architecture, backend, drafter, cache, head"
    assert ended.err == f"error: nothing was checked: got toy, expected a plugin that registers one of: {kinds}\n"


def test_what_cannot_be_run_is_one_line(kinetic: Command, plugins: Any, tmp_path: Path) -> None:
    plugins("Right")
    ended = kinetic("conform", "toys")
    assert (ended.status, ended.err.count("\n")) == (6, 1)
    assert "no plugin has this name: got 'toys'" in ended.err and "kinetic-arch-toy, kinetic-core, toy" in ended.err
    ended = kinetic("conform", "toy", "--backend", "abacus")
    assert ended.status == 6 and "abacus" in ended.err
    ended = kinetic("conform", "toy", "--backend", "reference", "--json", str(tmp_path / "none" / "r.json"))
    assert ended.status == 7 and "no such folder" in ended.err
    plugins(None, error="ImportError: no module named nowhere")
    ended = kinetic("conform", "toy", "--backend", "reference")
    assert ended.status == 6
    assert ended.err.splitlines()[-1].startswith("error: the plugin toy cannot be loaded: got ImportError")
