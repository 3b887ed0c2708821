from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from file_server import FileServer

from kinetic_core.errors import DownloadError
from kinetic_core.models import download
from kinetic_core.models.download import fetch, locked

CONTENT = random.Random(1).randbytes(400_000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def get(server: FileServer, target: Path, digest: str = DIGEST, **options: object) -> list[tuple[str, float]]:
    server.files.setdefault("/file", CONTENT)
    seen: list[tuple[str, float]] = []
    fetch(
        f"{server.url}/file?token=secret",
        target,
        sha256=digest,
        what="the file",
        progress=lambda what, share: seen.append((what, share)),
        retry_wait_s=0.0,
    )
    return seen


def test_a_file_arrives_whole_with_progress(server: FileServer, tmp_path: Path) -> None:
    seen = get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert not (tmp_path / "f.part").exists()
    shares = [share for _, share in seen]
    assert shares == sorted(shares) and shares[-1] == 1.0 and shares[0] < 0.5


def test_a_cut_connection_is_resumed_where_it_broke(server: FileServer, tmp_path: Path) -> None:
    server.cuts = [100_000, 50_000]
    get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert [wanted for _, _, wanted in server.requests] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_part_of_an_earlier_process_is_used(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(CONTENT[:399_999])
    get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.requests == [("GET", "/file", "bytes=399999-")]


def test_a_complete_part_needs_no_more_bytes(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(CONTENT)
    get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_thrown_away(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(CONTENT + b"more")
    get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_everything_again(server: FileServer, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "f.part").write_bytes(b"other bytes")
    get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_wrong_digest_is_refused_and_removed(server: FileServer, tmp_path: Path) -> None:
    server.files["/file"] = CONTENT[:-1] + b"\0"
    with pytest.raises(DownloadError, match=f"SHA-256 of the file is wrong .*expected {DIGEST}") as caught:
        get(server, tmp_path / "f")
    assert list(tmp_path.iterdir()) == []
    assert "secret" not in str(caught.value)


def test_giving_up_keeps_the_part_and_says_where_it_resumes(server: FileServer, tmp_path: Path) -> None:
    server.cuts = [1000, 0, 0, 0, 0, 0]
    with pytest.raises(DownloadError, match="resumes from byte 1000"):
        get(server, tmp_path / "f")
    assert (tmp_path / "f.part").stat().st_size == 1000
    assert len(server.requests) == 6
    get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_progress_in_between_renews_the_attempts(server: FileServer, tmp_path: Path) -> None:
    server.cuts = [0, 0, 0, 0, 10, 0, 0, 0, 0]
    get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_an_error_status_is_named(server: FileServer, tmp_path: Path) -> None:
    server.status = 503
    with pytest.raises(DownloadError, match=r"HTTP status 503.*expected 200 or 206"):
        get(server, tmp_path / "f")


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"cannot fetch it .*ConnectError"):
        fetch("http://127.0.0.1:9/x", tmp_path / "f", sha256="", what="it", retry_wait_s=0.0)


def test_a_file_address_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "a file"
    source.write_bytes(CONTENT)
    fetch(source.as_uri(), tmp_path / "f", sha256=DIGEST, what="it")
    assert (tmp_path / "f").read_bytes() == CONTENT
    with pytest.raises(DownloadError, match="cannot copy it"):
        fetch((tmp_path / "none").as_uri(), tmp_path / "g", sha256=DIGEST, what="it")


def test_the_lock_is_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "some" / "where" / "f"
    monkeypatch.setattr(download, "LOCK_TIMEOUT_S", 0.1)
    with locked(target):
        assert target.parent.is_dir()
        with pytest.raises(DownloadError, match="another process has been fetching"), locked(target):
            raise AssertionError("not reached")
    with locked(target):
        pass


def test_certificates_that_cannot_be_read_are_named(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"cannot read the certificates.*none\.pem"):
        fetch(server.url, tmp_path / "f", sha256="", what="it", certificates=str(tmp_path / "none.pem"))
    (tmp_path / "ca").mkdir()
    server.files["/file"] = CONTENT
    fetch(f"{server.url}/file", tmp_path / "f", sha256=DIGEST, what="it", certificates=str(tmp_path / "ca"))
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(DownloadError, match="KINETIC_CACHE_DIR"), locked(tmp_path / "taken" / "f"):
        raise AssertionError("not reached")
