"""`hf:` references: which files are taken, and the real huggingface_hub against a server with the hub's paths."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer

from kinetic_core.errors import ModelNotFoundError
from kinetic_core.models.hub import HubReference, select

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "README.md": b"text",
    "tiny-Q4_K_M.gguf": b"GGUF" + bytes(200_000),
    "tiny-Q8_0.gguf": b"GGUF" + bytes(100),
    "big/tiny-F16-00001-of-00002.gguf": b"GGUF one",
    "big/tiny-F16-00002-of-00002.gguf": b"GGUF two",
    "mmproj-tiny-Q8_0.gguf": b"GGUF",
}


@pytest.mark.parametrize(
    ("text", "repository", "choice"),
    [
        ("hf:owner/repo", "owner/repo", None),
        ("hf:owner/re.po-1:Q4_K_M", "owner/re.po-1", "Q4_K_M"),
        ("hf:owner/repo:dir/file.gguf", "owner/repo", "dir/file.gguf"),
    ],
)
def test_references(text: str, repository: str, choice: str | None) -> None:
    reference = HubReference.parse(text)
    assert (reference.repository, reference.choice) == (repository, choice)
    assert str(reference) == text


@pytest.mark.parametrize("text", ["hf:", "hf:repo", "hf:a/b/c", "hf:a/b:", "hf:a b/c", "hf:a/b:c:d"])
def test_malformed_references(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match="expected hf:owner/repo"):
        HubReference.parse(text)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ["tiny-Q4_K_M.gguf"]),
        ("Q8_0", ["tiny-Q8_0.gguf"]),
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("F16", ["big/tiny-F16-00001-of-00002.gguf", "big/tiny-F16-00002-of-00002.gguf"]),
        (
            "big/tiny-F16-00002-of-00002.gguf",
            ["big/tiny-F16-00001-of-00002.gguf", "big/tiny-F16-00002-of-00002.gguf"],
        ),
        ("mmproj-tiny-Q8_0.gguf", None),
        ("Q4_K", None),
        ("none.gguf", None),
    ],
)
def test_which_files_are_taken(choice: str | None, expected: list[str] | None) -> None:
    reference = HubReference("o/r", choice)
    if expected is None:
        with pytest.raises(ModelNotFoundError, match=r"no file matches.*tiny-Q8_0"):
            select(list(FILES), reference)
    else:
        assert list(select(list(FILES), reference)) == expected


def test_preference_ambiguity_and_missing_parts() -> None:
    assert select(["a-Q8_0.gguf", "a-Q4_0.gguf"], HubReference("o/r", None)) == ("a-Q4_0.gguf",)
    assert select(["only-IQ2.gguf"], HubReference("o/r", None)) == ("only-IQ2.gguf",)
    with pytest.raises(ModelNotFoundError, match=r"several files match.*a-Q8_0, b-Q8_0"):
        select(["a-Q8_0.gguf", "b-Q8_0.gguf"], HubReference("o/r", "Q8_0"))
    with pytest.raises(ModelNotFoundError, match=r"incomplete.*parts \[1, 3\], expected 1 to 3"):
        select(["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"], HubReference("o/r", None))
    with pytest.raises(ModelNotFoundError, match="no GGUF file"):
        select(["README.md"], HubReference("o/r", None))


def serve_repository(server: FileServer) -> None:
    tree = [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for name, content in FILES.items()
    ]
    server.files["/api/models/owner/repo/tree/main"] = json.dumps(tree).encode()
    server.types["/api/models/owner/repo/tree/main"] = "application/json"
    for name, content in FILES.items():
        path = f"/owner/repo/resolve/main/{name}"
        server.files[path] = content
        server.headers[path] = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}


def run(endpoint: str, home: Path, body: str) -> Any:
    """Run `body` in a fresh process: huggingface_hub reads its environment when it is imported."""
    script = (
        "import json\nfrom kinetic_core.errors import KineticError\nfrom kinetic_core.models import *\n"
        f"seen = []\nbar = lambda what, share: seen.append((what, share))\n{body}"
    )
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "KINETIC_CACHE_DIR": str(home),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_fetching_with_progress_then_from_the_cache(server: FileServer, tmp_path: Path) -> None:
    serve_repository(server)
    body = "path = resolve('hf:owner/repo', bar)\nprint(json.dumps([str(path), path.stat().st_size, seen]))"
    path, size, seen = run(server.url, tmp_path, body)
    assert path.endswith("tiny-Q4_K_M.gguf") and size == 200_004
    assert seen[-1] == ["fetching tiny-Q4_K_M.gguf (0 MB)", 1.0]
    server.requests.clear()
    again, _, seen = run(server.url, tmp_path, body)
    assert (again, seen, server.requests) == (path, [], [])
    body = "print(json.dumps([(m.name, m.n_bytes) for m in fetched_models()]))"
    assert run(server.url, tmp_path, body) == [["hf:owner/repo:tiny-Q4_K_M.gguf", 200_004]]


def test_a_split_set_comes_whole(server: FileServer, tmp_path: Path) -> None:
    serve_repository(server)
    body = (
        "p = resolve('hf:owner/repo:F16', bar)\nprint(json.dumps([p.name, sorted(x.name for x in p.parent.iterdir())]))"
    )
    first, names = run(server.url, tmp_path, body)
    assert first == "tiny-F16-00001-of-00002.gguf"
    assert names == ["tiny-F16-00001-of-00002.gguf", "tiny-F16-00002-of-00002.gguf"]


def test_pull_asks_the_hub_again(server: FileServer, tmp_path: Path) -> None:
    serve_repository(server)
    run(server.url, tmp_path, "print(json.dumps(str(resolve('hf:owner/repo:Q8_0'))))")
    server.requests.clear()
    run(server.url, tmp_path, "print(json.dumps(str(pull('hf:owner/repo:Q8_0'))))")
    assert any(method == "HEAD" for method, _, _ in server.requests)


def test_a_small_cached_choice_does_not_decide_the_default(server: FileServer, tmp_path: Path) -> None:
    serve_repository(server)
    run(server.url, tmp_path, "print(json.dumps(str(resolve('hf:owner/repo:Q8_0'))))")
    assert run(server.url, tmp_path, "print(json.dumps(resolve('hf:owner/repo').name))") == "tiny-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("status", "code", "error", "text"),
    [
        (404, "RepoNotFound", "ModelNotFoundError", "no such repository"),
        (401, "RepoNotFound", "ModelNotFoundError", "HF_TOKEN"),
        (403, "GatedRepo", "DownloadError", "gated"),
        (400, "", "DownloadError", "cannot deliver hf:owner/repo: got BadRequestError"),
        (400, "", "DownloadError", "or give the path of a GGUF file"),
    ],
)
def test_refusals_are_ours(server: FileServer, tmp_path: Path, status: int, code: str, error: str, text: str) -> None:
    server.status = status
    server.status_headers = {"X-Error-Code": code}
    body = (
        "try:\n    resolve('hf:owner/repo')\n"
        "except KineticError as e:\n    print(json.dumps([type(e).__name__, str(e)]))"
    )
    name, message = run(server.url, tmp_path, body)
    assert name == error and text in message and "\n" not in message


@pytest.mark.slow  # huggingface_hub tries for half a minute
def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    body = (
        "try:\n    resolve('hf:owner/repo')\n"
        "except KineticError as e:\n    print(json.dumps([type(e).__name__, str(e)]))"
    )
    name, message = run("http://127.0.0.1:9", tmp_path, body)
    assert name == "DownloadError" and "hf:owner/repo" in message and "check the connection" in message
