"""Models on a Hugging Face hub: ``hf:owner/repo[:quant or file]``, through huggingface_hub.

HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean there, and files lie in its cache, shared with
other programs. What has been fetched is used as it is; `kinetic pull` asks the hub again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kinetic_core.errors import DownloadError, ModelNotFoundError, describe

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Progress

PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q6_K", "Q8_0")
"""Which quantization to take when none is named, best first."""

_REFERENCE = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+?)(?::(?P<choice>[^:]+))?")
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@attrs.frozen
class HubReference:
    """A parsed reference. choice: a quantization such as ``Q4_K_M``, a file's path in the repository, or None."""

    repository: str
    choice: str | None

    @classmethod
    def parse(cls, text: str) -> HubReference:
        """Read ``hf:owner/repo[:quant or file]``; ModelNotFoundError when it has another form."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise ModelNotFoundError(
                describe("cannot read the model's name", got=repr(text), expected="hf:owner/repo[:quant or file]")
            )
        return cls(match["repository"], match["choice"])

    def __str__(self) -> str:
        return f"hf:{self.repository}" + (f":{self.choice}" if self.choice else "")


def select(files: Sequence[str], reference: HubReference) -> tuple[str, ...]:
    """The files to fetch: one file, or every part of a split set in order.

    Raises ModelNotFoundError naming what there is when none or several match, or when a part is missing.
    """
    sets: dict[str, list[str]] = {}
    for file in sorted(files):
        name = file.rsplit("/", 1)[-1].lower()
        if name.endswith(".gguf") and not name.startswith("mmproj"):
            split = _SPLIT.fullmatch(file)
            sets.setdefault(split["stem"] if split else file[: -len(".gguf")], []).append(file)
    if not sets:
        raise ModelNotFoundError(describe("the repository has no GGUF file", where=f"hf:{reference.repository}"))
    if reference.choice is None:
        stems = _preferred(list(sets))
    elif reference.choice.lower().endswith(".gguf"):
        stems = [stem for stem, parts in sets.items() if reference.choice in parts]
    else:
        stems = [stem for stem in sets if _has_quant(stem, reference.choice)]
    if len(stems) != 1:
        raise ModelNotFoundError(
            describe(
                "no file matches" if not stems else "several files match",
                where=str(reference),
                got=", ".join(stems or sets),
                expected="one" if stems else None,
                hint=f"name one: hf:{reference.repository}:FILE",
            )
        )
    parts = sets[stems[0]]
    split = _SPLIT.fullmatch(parts[0])
    if split:
        numbers = [int(part["number"]) for part in map(_SPLIT.fullmatch, parts) if part]
        if numbers != list(range(1, int(split["count"]) + 1)):
            raise ModelNotFoundError(
                describe(
                    "the split set is incomplete",
                    where=str(reference),
                    got=f"parts {numbers}",
                    expected=f"1 to {int(split['count'])}",
                )
            )
    return tuple(parts)


def _has_quant(stem: str, quant: str) -> bool:
    return re.search(rf"(^|[-._/]){re.escape(quant)}($|[-./])", stem, re.IGNORECASE) is not None


def _preferred(stems: list[str]) -> list[str]:
    if len(stems) == 1:
        return stems
    for quant in PREFERRED:
        matching = [stem for stem in stems if _has_quant(stem, quant)]
        if matching:
            return matching
    return stems


def fetch(reference: HubReference, progress: Progress | None = None, refresh: bool = False) -> Path:
    """The path of the model's file (of a split set's first part), fetched when needed.

    refresh: ask the hub even if the files are there.
    Raises ModelNotFoundError and DownloadError.
    """
    if not refresh:
        cached = _cached(reference)
        if cached is not None:
            return cached
    import httpx
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    token = {"hint": "set HF_TOKEN to a token that may read it"}
    try:
        files = select(huggingface_hub.HfApi().list_repo_files(reference.repository), reference)
        paths = []
        for number, file in enumerate(files, 1):
            label = f"fetching {file}" + (f" (part {number} of {len(files)})" if files[1:] else "")
            bar = _progress_class(label, progress)
            paths.append(Path(huggingface_hub.hf_hub_download(reference.repository, file, tqdm_class=bar)))
    except hub_errors.GatedRepoError as error:
        raise DownloadError(describe("the repository is gated", where=str(reference), **token)) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            describe("no such repository on the hub, or it is private", where=str(reference), **token)
        ) from error
    except (hub_errors.HfHubHTTPError, hub_errors.OfflineModeIsEnabled) as error:
        raise _failed(reference, error) from error
    except (OSError, httpx.HTTPError) as error:
        raise _failed(reference, error) from error
    except Exception as error:
        # huggingface_hub's own transport library is not ours to import; anything else is not ours to explain.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "requests", "hf_xet"):
            raise
        raise _failed(reference, error) from error
    return paths[0]


def _failed(reference: HubReference, error: Exception) -> DownloadError:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return DownloadError(
        describe(
            f"the hub cannot deliver {reference}",
            got=text[:300],
            hint="check the connection, the name and HF_ENDPOINT, or give the path of a GGUF file that is here",
        )
    )


def _cached(reference: HubReference) -> Path | None:
    """What the cache holds, if it surely is what the hub would give: a named choice, or the first preference."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                reference.repository, allow_patterns=["*.gguf", "*.GGUF"], local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, OSError):
        return None
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        chosen = select(files, reference)
    except ModelNotFoundError:
        return None
    if reference.choice is None and not _has_quant(chosen[0].rsplit(".", 1)[0], PREFERRED[0]):
        return None
    return folder / chosen[0]


def _progress_class(label: str, progress: Progress | None) -> Any:
    """A class with the interface of tqdm that reports to `progress` and prints nothing."""
    from huggingface_hub.utils import tqdm

    class Reporting(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.update(disable=True)
            self._expected = options.get("total") or 0
            self._done = options.get("initial") or 0
            super().__init__(*args, **options)

        def update(self, n: float | None = 1) -> bool | None:
            self._done += n or 0
            if progress and self._expected:
                size = f"{label} ({self._expected / 1e6:.0f} MB)"
                progress(size, min(1.0, self._done / self._expected))
            return None

    return Reporting


def cached_files() -> tuple[tuple[str, str, Path, int], ...]:
    """(repository, file, path, size in bytes) of the GGUF files in the cache; of a split set, its first part."""
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = huggingface_hub.scan_cache_dir()
    except CacheNotFound:
        return ()
    found: dict[tuple[str, str], tuple[Path, int]] = {}
    for repository in cache.repos:
        revisions = sorted(repository.revisions, key=lambda revision: revision.last_modified)
        for revision in revisions if repository.repo_type == "model" else ():
            for file in revision.files:
                split = _SPLIT.fullmatch(file.file_name)
                if file.file_name.lower().endswith(".gguf") and (split is None or int(split["number"]) == 1):
                    name = file.file_path.relative_to(revision.snapshot_path).as_posix()
                    found[repository.repo_id, name] = (file.file_path, file.size_on_disk)
    return tuple((repository, name, *found[repository, name]) for repository, name in sorted(found))
