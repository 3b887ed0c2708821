"""``kinetic conform --markdown``: the report as a page."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Command

from kinetic_core.conformance import runner
from kinetic_core.conformance.head import HeadConformance
from kinetic_core.reference.head import FullHead


def test_the_page_is_written(kinetic: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"target": FullHead, "name": "full", "backend": "reference", "formats": ("F32",)}
    monkeypatch.setattr(runner, "suites_of", lambda *given: [type("TestFull", (HeadConformance,), values)])
    path = tmp_path / "report.md"
    ended = kinetic("conform", "kinetic-core", "--backend", "reference", "--markdown", str(path))
    assert ended.status == 0, ended.out
    page = path.read_text(encoding="utf-8")
    assert "| head | full | 4 | 0 | 0 | 2 | F32 | 8 |" in page and "Everything conforms" in page


def test_a_folder_that_is_not_there_is_refused_at_once(kinetic: Command, tmp_path: Path) -> None:
    ended = kinetic("conform", "kinetic-core", "--backend", "reference", "--markdown", str(tmp_path / "none" / "r.md"))
    assert ended.status == 7
    assert "no such folder" in ended.err and "--markdown" in ended.err
