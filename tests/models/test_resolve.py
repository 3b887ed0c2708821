from __future__ import annotations

from pathlib import Path

import pytest

from kinetic_core.directories import cache_directory
from kinetic_core.errors import ModelNotFoundError
from kinetic_core.models import DEFAULT_MODEL, KNOWN_MODELS, default, fetched_models, resolve


def test_a_path_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(file) == file
    assert resolve(str(file)) == file


@pytest.mark.parametrize("model", ["smolm2", "no/such/file.gguf", "", "a\0b", "x" * 5000])
def test_what_does_not_exist(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="hf:owner/repo") as caught:
        resolve(model)
    assert ("did you mean smollm2?" in str(caught.value)) == (model == "smolm2")


def test_a_directory_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is a directory"):
        resolve(tmp_path)


def test_none_and_the_known_name_are_the_default_model(cache: Path) -> None:
    path = default.model_path()
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(default.SMOLLM2.n_bytes)
    assert resolve() == resolve(DEFAULT_MODEL) == path
    assert (DEFAULT_MODEL, path, 98_362_432) in [(m.name, m.path, m.n_bytes) for m in fetched_models()]


def test_the_table_is_sound() -> None:
    assert KNOWN_MODELS[DEFAULT_MODEL].source == "embedded"
    for name, model in KNOWN_MODELS.items():
        assert name == model.name and model.license and model.n_bytes > 10**7
        assert model.source == "embedded" or model.source.startswith("hf:")


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KINETIC_CACHE_DIR", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.setenv("KINETIC_CACHE_DIR", "here")
    assert cache_directory() == Path.cwd() / "here"
    monkeypatch.delenv("KINETIC_CACHE_DIR")
    assert cache_directory().name == "kinetic"
