"""The plugin that docs/plugins.md shows whole, put together and run."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import tomllib
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinetic_arch_llama.architecture import Llama

from kinetic_core.conformance import DrafterConformance, recorded
from kinetic_core.conformance.formats import FORMATS
from kinetic_core.conformance.models import ModelFamily
from kinetic_core.gguf import read_tensor
from kinetic_core.interfaces import Draft, DraftTree, HeadRequest, LoadOptions, RowBatch, SequenceRows
from kinetic_core.plugins import load_registry
from kinetic_core.program.record import record_program
from kinetic_core.reference.backend import ReferenceBackend
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model

TEXT = (Path(__file__).parent.parent.parent / "docs" / "plugins.md").read_text(encoding="utf-8")


def block(language: str, containing: str) -> str:
    (found,) = (
        body
        for body in re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
        if containing in body
    )
    return str(found)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Distribution:
    """The package as pip would leave it: modules and a dist-info directory with entry points."""
    project = tomllib.loads(block("toml", "[project]"))["project"]
    package = tmp_path / "kinetic_arch_bag"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(block("python", "@hookimpl"))
    (package / "architecture.py").write_text(block("python", "class Bag"))
    info = tmp_path / "kinetic_arch_bag-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "".join(f"{name} = {value}\n" for name, value in project["entry-points"]["kinetic"].items())
    (info / "entry_points.txt").write_text(f"[kinetic]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    (distribution,) = distributions(name="kinetic-arch-bag")
    return distribution


def test_it_is_found_and_runs(installed: Distribution) -> None:
    registry = load_registry(strict=True)
    (plugin,) = (plugin for plugin in registry.plugins if plugin.distribution == "kinetic-arch-bag")
    assert plugin.version == "1.0" and [entry.registration.name for entry in plugin.registered] == ["bag"]
    assert "kinetic_arch_bag.architecture" not in sys.modules
    architecture = registry.architecture_for("bag")
    (variant,) = architecture.tiny()
    source = random_model("bag", variant)
    program = record_program(architecture(source), registry.get("head", "full")(), source)
    executable = registry.get("backend", "reference")().load(program, source, LoadOptions(n_blocks=1, n_slots=1))
    executable.run(
        RowBatch(
            np.array([5, 9], np.int32),
            np.array([0, 1], np.int32),
            (SequenceRows(0, 0, 2, np.zeros(1, np.int32), -1 if not program.states else 0),),
            [HeadRequest(1, None)],
        )
    )
    table = np.frombuffer(source.tensor_bytes("token_embd.weight").tobytes(), np.float32).reshape(300, 256)
    norm = np.frombuffer(source.tensor_bytes("output_norm.weight").tobytes(), np.float32)
    x = table[9].astype(np.float64)
    expected = table @ (x / np.sqrt(np.mean(x * x) + 1e-5) * norm)
    np.testing.assert_allclose(executable.logits(0), expected, rtol=1e-4, atol=1e-5)


def test_its_prediction_block_runs() -> None:
    names: dict[str, Any] = {"__name__": "documented"}
    for containing in ("class Bag", "class WithPrediction"):
        exec(block("python", containing), names)
    bag = type("BagWithPrediction", (names["WithPrediction"], names["Bag"]), {})
    (variant,) = bag.tiny()
    (d,) = variant.tensors["output_norm.weight"]
    own = {"nextn.enorm.weight": (d,), "nextn.hnorm.weight": (d,), "nextn.eh_proj.weight": (d, 2 * d)}
    source = random_model("bag", dataclasses.replace(variant, tensors={**variant.tensors, **own}))
    program = record_program(bag(source), FullHead(), source)
    executable = ReferenceBackend().load(program, source, LoadOptions(n_blocks=1, n_slots=1))
    sequence = SequenceRows(0, 1, 1, np.zeros(1, np.int32), -1)
    hidden = np.random.default_rng(0).standard_normal((1, d)).astype(np.float32)
    executable.predict(
        RowBatch(np.array([9], np.int32), np.array([1], np.int32), (sequence,), [HeadRequest(0, None)]), hidden
    )
    tensors = {name: read_tensor(source, name).astype(np.float64) for name in source.tensors}
    table = tensors["token_embd.weight"]
    inputs = [
        x / np.sqrt(np.mean(x * x) + 1e-5) * tensors[f"nextn.{norm}.weight"]
        for norm, x in (("enorm", table[9]), ("hnorm", hidden[0].astype(np.float64)))
    ]
    expected = table @ (tensors["nextn.eh_proj.weight"] @ np.concatenate(inputs))
    np.testing.assert_allclose(executable.logits(0), expected, rtol=1e-4, atol=1e-5)


def documented(name: str) -> Any:
    names: dict[str, Any] = {"__name__": "documented"}
    exec(block("python", f"class {name}("), names)
    return names[name]


@pytest.fixture
def plain() -> Any:
    return documented("Plain")


def test_the_decoder_of_shared_parts_is_llama_without_its_options(plain: Any) -> None:
    for variant in plain.tiny():
        source, llama = random_model("plain", variant), random_model("llama", variant)
        expected = record_program(Llama(llama), FullHead(), llama)
        assert record_program(plain(source), FullHead(), source) == expected


@pytest.mark.parametrize("name", ["Bag", "Plain"])
def test_the_architectures_refuse_and_declare_as_they_should(name: str) -> None:
    family = ModelFamily(documented(name), name.lower(), ReferenceBackend, FORMATS)
    recorded.variants_are_usable(family)
    recorded.declared_no_is_no(family)
    recorded.every_format_is_stored(family)
    for label in family.labels():
        if label.endswith("-F32"):
            recorded.unknown_tensor_refused(family.model(label))
            recorded.missing_tensor_refused(family.model(label), family)
            recorded.wrong_shape_refused(family.model(label))
            recorded.missing_key_refused(family.model(label))


class TestDocumentedDrafter(DrafterConformance):
    target = documented("Pairs")
    name = "pairs"
    models = ("tiny-hybrid/attention",)


def test_the_drafter_guesses_what_followed() -> None:
    drafter = documented("Pairs")()
    drafter.begin(7, [1, 2, 3, 1])
    assert drafter.propose(7, 4) == Draft(DraftTree((2, 3, 1, 2), (-1, 0, 1, 2)), (0.3,) * 4)
    drafter.committed(7, [5])
    assert drafter.propose(7, 4) is None


def test_the_entry_point_group_is_the_contract(installed: Distribution) -> None:
    assert [point.group for point in installed.entry_points] == ["kinetic"]
    assert isinstance(next(iter(installed.entry_points)), EntryPoint)
