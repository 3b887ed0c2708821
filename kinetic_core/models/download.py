"""Fetching one file over HTTP so that it resumes, and verifying it before anybody sees it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kinetic_core.errors import DownloadError, describe

if TYPE_CHECKING:
    import httpx

    from kinetic_core.interfaces.backend import Progress

CHUNK_BYTES = 1 << 20
ATTEMPTS = 5
"""Attempts in a row that bring no new byte before a download gives up."""
LOCK_TIMEOUT_S = 3600.0
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of a file that is being made, so that two processes do not fetch it twice or mix their parts.

    Raises DownloadError when the directory cannot be written, or the other process takes longer than an hour.
    """
    import filelock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{target}.lock", timeout=LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout as error:
        raise DownloadError(
            describe(
                "another process has been fetching for an hour", where=str(target), hint="end it or remove the lock"
            )
        ) from error
    except OSError as error:
        raise DownloadError(
            describe("cannot write", where=str(target.parent), got=error, hint="KINETIC_CACHE_DIR names another place")
        ) from error


def fetch(
    url: str,
    target: Path,
    *,
    sha256: str,
    what: str,
    progress: Progress | None = None,
    certificates: str | None = None,
    retry_wait_s: float = 1.0,
) -> None:
    """Fetch `url` (http, https or file) to `target`, verified and complete or not at all.

    Bytes go to ``<target>.part``, from which an interrupted download resumes. Call it inside `locked`.

    sha256:       of the whole file, hexadecimal; a file with another digest is removed.
    certificates: a file of certificate authorities to trust besides the usual ones.
    Raises DownloadError.
    """
    part = target.with_name(target.name + ".part")
    report = progress or (lambda _what, _share: None)
    if urlsplit(url).scheme == "file":
        _copy(url, part, what, report)
    else:
        _download(url, part, what, report, certificates, retry_wait_s)
    digest = sha256_of(part)
    if digest != sha256:
        part.unlink()
        raise DownloadError(
            describe(
                f"the SHA-256 of {what} is wrong",
                where=_shown(url),
                got=digest,
                expected=sha256,
                hint="the file was removed; try again, or check the index that pip is configured for",
            )
        )
    os.replace(part, target)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(url: str, part: Path, what: str, report: Progress) -> None:
    source = Path(url2pathname(urlsplit(url).path))
    try:
        total = source.stat().st_size
        with source.open("rb") as reader, part.open("wb") as writer:
            while chunk := reader.read(CHUNK_BYTES):
                writer.write(chunk)
                report(f"copying {what}", writer.tell() / max(total, 1))
    except OSError as error:
        raise DownloadError(describe(f"cannot copy {what}", where=str(source), got=error)) from error


def _download(url: str, part: Path, what: str, report: Progress, certificates: str | None, retry_wait_s: float) -> None:
    import httpx

    failures = 0
    with httpx.Client(follow_redirects=True, timeout=httpx.Timeout(30.0), verify=_trust(certificates)) as client:
        while True:
            before = part.stat().st_size if part.exists() else 0
            try:
                if _continue(client, url, part, what, report):
                    return
                problem = "the connection ended early"
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except httpx.HTTPError as error:
                raise DownloadError(describe(f"cannot fetch {what}", where=_shown(url), got=error)) from error
            have = part.stat().st_size if part.exists() else 0
            failures = 0 if have > before else failures + 1
            if failures == ATTEMPTS:
                raise DownloadError(
                    describe(
                        f"cannot fetch {what}",
                        where=_shown(url),
                        got=problem,
                        hint=f"run it again: it resumes from byte {have}",
                    )
                )
            time.sleep(retry_wait_s * failures)


def _continue(client: httpx.Client, url: str, part: Path, what: str, report: Progress) -> bool:
    """Fetch what is missing of the file; True when it is complete."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with client.stream("GET", url, headers=headers) as response:
        start, total = _content_range(response)
        if response.status_code == 416:  # nothing after `have`: complete, or a part of another file
            if total == have:
                return True
            part.unlink()
            return False
        if response.status_code == 206 and start == have:
            mode = "ab"
        elif response.status_code == 200:
            mode, have = "wb", 0
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
        else:
            raise DownloadError(
                describe(
                    f"cannot fetch {what}",
                    where=_shown(url),
                    got=f"HTTP status {response.status_code} {response.reason_phrase}",
                    expected="200 or 206",
                )
            )
        label = f"fetching {what}" + (f" ({total / 1e6:.0f} MB)" if total else "")
        with part.open(mode) as file:
            for chunk in response.iter_raw():
                file.write(chunk)
                have += len(chunk)
                report(label, have / total if total else 0.0)
    return total is None or have >= total


def _content_range(response: httpx.Response) -> tuple[int | None, int | None]:
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None:
        return None, None
    start, total = match.groups()
    return (int(start) if start is not None else None), (int(total) if total != "*" else None)


def _trust(certificates: str | None) -> ssl.SSLContext:
    """The system's certificate authorities, certifi's, and the given file's."""
    import certifi

    context = ssl.create_default_context(cafile=certifi.where())
    context.load_default_certs()
    if certificates:
        try:
            if Path(certificates).is_dir():
                context.load_verify_locations(capath=certificates)
            else:
                context.load_verify_locations(cafile=certificates)
        except OSError as error:
            raise DownloadError(describe("cannot read the certificates", where=certificates, got=error)) from error
    return context


def _shown(url: str) -> str:
    """The address without a password or a signed query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
