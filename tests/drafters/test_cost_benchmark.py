"""The benchmark of what guesses cost prints a line per source and stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "drafter_cost.py"


def test_it_prints_a_line_per_source_and_stream() -> None:
    command = [sys.executable, str(SCRIPT), "--tokens", "600", "--sources", "context,requests"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        [source, stream, "600"]
        for source in ("context", "requests")
        for stream in ("random", "prose", "repetitive", "copy")
    ]
    drafts = {tuple(line.split()[:2]): int(line.split()[-2]) for line in lines[1:]}
    assert drafts["context", "random"] <= 1 and drafts["context", "repetitive"] == 100
