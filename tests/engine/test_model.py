"""`kinetic_core.load` and the object it gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

import kinetic_core
from kinetic_core.engine.model import Model, sampling_defaults
from kinetic_core.engine.request import SamplingOptions
from kinetic_core.errors import (
    BackendError,
    GGUFError,
    MetadataError,
    ModelNotFoundError,
    PluginError,
    RequestError,
    UnsupportedModelError,
)
from kinetic_core.gguf import Metadata, write_gguf
from kinetic_core.reference.tiny_hybrid import tiny_hybrid_source

DATA = Path(__file__).parent.parent / "data"
ALPHABET = "abcdefghijklmnopqrstuvwxyz."
HUGE = 10**5000  # longer than Python writes out
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Model]:
    with kinetic_core.load("tiny-hybrid", backend="reference") as model:
        yield model


@pytest.fixture(scope="module")
def llama() -> Iterator[Model]:
    with kinetic_core.load(DATA / "llama-f32.gguf", backend="reference", kv="f32") as model:
        yield model


def test_generate(tiny: Model) -> None:
    completion = tiny.generate("hello\n", temperature=0)
    assert (completion.text, completion.finish_reason) == (ALPHABET, "stop")
    assert tiny.generate([10], temperature=0, max_tokens=3).text == "abc"
    assert tiny.generate(np.array([10], np.int32), temperature=0, max_tokens=3).text == "abc"  # type: ignore[arg-type]


def test_stream(tiny: Model) -> None:
    assert "".join(chunk.text for chunk in tiny.stream("\n", temperature=0)) == ALPHABET
    stream = tiny.stream("\n", temperature=0, max_tokens=2000, ignore_end=True)
    assert next(stream).text == "a"
    stream.close()  # type: ignore[attr-defined]
    assert tiny.generate("\n", temperature=0, max_tokens=1).text == "a"
    assert tiny.engine.statistics()["cancelled"] == 1


def test_chat(tiny: Model) -> None:
    assert tiny.chat(HELLO, temperature=0).text == ALPHABET
    pieces = [chunk.text for chunk in tiny.chat(HELLO, stream=True, temperature=0, max_tokens=3)]
    assert pieces == ["a", "b", "c"]
    assert tiny.chat(HELLO, template_variables={"enable_thinking": False}, temperature=0).text == ALPHABET
    with pytest.raises(RequestError) as caught:
        tiny.chat([])
    assert caught.value.field == "messages"


def test_choices(tiny: Model) -> None:
    assert [c.index for c in tiny.generate_choices("\n", 3, max_tokens=2)] == [0, 1, 2]
    with pytest.raises(RequestError, match="generate_choices") as caught:
        tiny.generate("\n", n=2)
    assert caught.value.field == "n"


def test_tokens(tiny: Model) -> None:
    ids = tiny.tokenize("hé<|im_end|>")
    assert ids[:3] == list("hé".encode()) and 259 not in ids
    assert tiny.tokenize("hé<|im_end|>", parse_special=True) == [*"hé".encode(), 259]
    assert tiny.detokenize(ids) == "hé<|im_end|>"


def test_unknown_and_bad_options_are_refused_by_name(tiny: Model) -> None:
    with pytest.raises(RequestError, match="did you mean 'temperature'") as caught:
        tiny.generate("\n", temprature=1)
    assert caught.value.field == "temprature"
    for field, value in (("temperature", float("nan")), ("top_k", -1), ("max_tokens", "5"), ("seed", 2**64)):
        with pytest.raises(RequestError) as caught:
            tiny.stream("\n", **{field: value})  # type: ignore[arg-type]
        assert caught.value.field == field
    assert tiny.generate("\n", temperature=0, stop=None, max_tokens=2).text == "ab"
    assert tiny.generate("\n", temperature=0, stop="c").text == "ab"


def test_info(tiny: Model) -> None:
    info = tiny.info()
    assert (info["architecture"], info["vocab_size"], info["context_length"]) == ("tiny-hybrid", 300, 2048)
    assert info["tensor_bytes"] == {"F32": sum(t.n_bytes for t in tiny_hybrid_source().tensors.values())}
    assert (info["kv_type"], info["kv_bytes_per_token"]) == ("f16", 512)
    assert info["engine"]["blocks_used"] == 0


def test_goldens(llama: Model) -> None:
    golden = np.load(DATA / "llama-golden.npz")
    ids, expected = golden["ids"], golden["logits_f32"]
    got = llama.logits(ids)
    assert got.shape == (48, 1024) and got.dtype == np.float32
    assert np.abs(got - expected).max() < 1e-4 * expected.std()
    completion = llama.generate(ids, temperature=0, max_tokens=32, ignore_end=True)
    assert completion.token_ids == tuple(golden["greedy_f32"].tolist())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_closing_twice_and_using_after(backend: str) -> None:
    with kinetic_core.load("tiny-hybrid", backend=backend) as model:
        pass
    model.close()
    with pytest.raises(kinetic_core.errors.Cancelled):  # type: ignore[attr-defined]
        model.generate("\n")
    for figures in (model.info, model.executable.statistics):
        with pytest.raises(BackendError, match="closed"):
            figures()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"threads": 0}, "threads"),
        ({"kv": "q4"}, "kv"),
        ({"ctx": 0}, "ctx"),
        ({"ctx": 4096}, "ctx"),
        ({"parallel": 0}, "parallel"),
        *[({field: HUGE}, field) for field in ("threads", "kv", "ctx", "parallel")],
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else value,
)
def test_arguments_out_of_range(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        kinetic_core.load("tiny-hybrid", backend="reference", **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_ctx_and_parallel_size_the_engine() -> None:
    with kinetic_core.load("tiny-hybrid", backend="reference", ctx=300, parallel=2) as model:
        statistics = model.engine.statistics()
        assert (model.context_length, statistics["max_sequences"], statistics["blocks"]) == (300, 2, 4)
        with pytest.raises(kinetic_core.errors.ContextLengthError, match=r"300.*300"):  # type: ignore[attr-defined]
            model.generate([1] * 300)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="cpu"):
        kinetic_core.load("tiny-hybrid", backend="cpuu")
    with pytest.raises(ModelNotFoundError, match="smollm2"):
        kinetic_core.load("smollm3", backend="reference")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(GGUFError, match="truncated"):
        kinetic_core.load(broken, backend="reference")


@pytest.mark.parametrize(
    ("family", "package"),
    [
        ("falcon-h1", "kinetic-arch-falconh1"),
        ("lfm2moe", "kinetic-arch-lfm"),
        ("granitehybrid", "kinetic-arch-granite"),
    ],
)
def test_a_family_without_its_package_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, package: str
) -> None:
    points = [
        point for point in entry_points(group="kinetic") if point.module.split(".")[0] != package.replace("-", "_")
    ]
    monkeypatch.setattr("kinetic_core.plugins.entry_points", lambda group: points)
    path = tmp_path / "family.gguf"
    write_gguf(path, {"general.architecture": family}, {"a": np.zeros(32, np.float32)})
    with pytest.raises(UnsupportedModelError, match=f"pip install {package}"):
        kinetic_core.load(path, backend="reference")


def test_sampling_defaults_come_from_the_file() -> None:
    assert sampling_defaults(Metadata({})) == SamplingOptions()
    keys = {"temp": 0.3, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "penalty_repeat": 1.1}
    metadata = Metadata({f"general.sampling.{key}": value for key, value in keys.items()})
    assert sampling_defaults(metadata) == SamplingOptions(0.3, 20, 0.9, 0.0, 1.1)
    assert sampling_defaults(Metadata({"general.sampling.top_k": -1})).top_k == 0
    for key, value in (("temp", -1.0), ("top_p", float("nan")), ("top_k", "many")):
        with pytest.raises(MetadataError, match=key):
            sampling_defaults(Metadata({f"general.sampling.{key}": value}))


def test_importing_is_light() -> None:
    code = "import kinetic_core, sys; assert callable(kinetic_core.load); assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", "import kinetic_core, sys; assert 'numpy' not in sys.modules"], check=True)
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        kinetic_core.nothing  # noqa: B018


def test_forgotten_models_end_with_the_process() -> None:
    code = (
        "import kinetic_core\n"
        "model = kinetic_core.load('tiny-hybrid', backend='reference')\n"
        "next(iter(model.stream('x', max_tokens=2000, ignore_end=True)))\n"
        "print('end')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("end\n", "")
