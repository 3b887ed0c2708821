"""Folders of machine code that nobody uses are removed, and only those."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from kinetic_core.backends.cpu import compile as kernel_compile
from kinetic_core.backends.cpu import old_code
from kinetic_core.backends.cpu.old_code import MARKER, tidy

DAY_S = 24 * 3600
CURRENT = "c" * 32


def folder(parent: Path, name: str, *, used_days: float | None = None, written_days: float = 0.0) -> Path:
    """A folder with a kernel, last used (None: no marker) and last written so many days ago."""
    made = parent / name
    made.mkdir(parents=True)
    (made / "linear.code").write_bytes(b"code")
    if used_days is not None:
        set_age(made / MARKER, used_days)
    os.utime(made, (time.time() - written_days * DAY_S,) * 2)
    return made


def set_age(marker: Path, days: float) -> None:
    marker.touch()
    os.utime(marker, (time.time() - days * DAY_S,) * 2)


def test_a_month_without_use(tmp_path: Path) -> None:
    current = folder(tmp_path, CURRENT)
    folder(tmp_path, "0" * 32, used_days=31)
    folder(tmp_path, "1" * 32, used_days=29, written_days=400)
    folder(tmp_path, "2" * 32, written_days=31)
    folder(tmp_path, "3" * 32, written_days=29)
    folder(tmp_path, "going-" + "4" * 32, used_days=31)
    folder(tmp_path, "my notes", written_days=400)
    folder(tmp_path, "5" * 31, used_days=400)
    (tmp_path / ("6" * 32)).symlink_to(folder(tmp_path, "elsewhere", used_days=400))
    tidy(current)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {CURRENT, "1" * 32, "3" * 32, "my notes", "5" * 31, "6" * 32, "elsewhere"}
    assert time.time() - (current / MARKER).stat().st_mtime < 60


def test_the_current_one_stays_and_looks_once_a_day(tmp_path: Path) -> None:
    current = folder(tmp_path, CURRENT, used_days=400, written_days=400)
    tidy(current)
    assert (current / "linear.code").exists()
    old = folder(tmp_path, "0" * 32, used_days=31)
    tidy(current)
    assert old.exists(), "it has looked today"
    set_age(current / MARKER, 1.1)
    tidy(current)
    assert not old.exists()


def test_a_use_between_the_two_looks_saves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current, old = folder(tmp_path, CURRENT), folder(tmp_path, "0" * 32, used_days=31)
    rename = os.rename

    def used_then_renamed(source: Path, target: Path) -> None:
        (source / MARKER).touch()
        rename(source, target)

    monkeypatch.setattr(old_code.os, "rename", used_then_renamed)
    tidy(current)
    assert (old / "linear.code").exists()
    assert {path.name for path in tmp_path.iterdir()} == {CURRENT, old.name}


def test_what_another_process_removes_first_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = folder(tmp_path, CURRENT)
    names = [digit * 32 for digit in "0123"]
    for name in names:
        folder(tmp_path, name, used_days=31)
    rename = os.rename

    def removed_meanwhile(source: Path, target: Path) -> None:
        if source.name in names[:2]:
            shutil.rmtree(source)
        rename(source, target)

    monkeypatch.setattr(old_code.os, "rename", removed_meanwhile)
    tidy(current)
    assert {path.name for path in tmp_path.iterdir()} == {CURRENT}


def test_a_cache_that_cannot_be_noted_is_no_error(tmp_path: Path) -> None:
    old = folder(tmp_path, "0" * 32, used_days=31)
    tidy(tmp_path / CURRENT)  # is not there
    assert old.exists()


def test_preparing_kernels_tidies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_compile.prepare(["gather_rows"])
    assert (kernel_compile.cache_directory() / MARKER).exists()
    monkeypatch.setenv("KINETIC_CACHE_DIR", str(tmp_path))
    kernel_compile.cache_directory().mkdir(parents=True)
    old = folder(tmp_path / "kernels", "0" * 32, used_days=31)
    kernel_compile.prepare(["gather_rows"])
    assert not old.exists()
    assert (kernel_compile.cache_directory() / MARKER).exists()
