"""What commands print: answers on the standard output, everything else on the standard error."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Progress

QUIET_S = 1.0
"""Work shorter than this shows no progress."""

NO_DRAFTERS = "none: no installed drafter guesses for this model (pip install kinetic-drafters)"
"""What is said where drafts would be listed."""

_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters, so that an answer cannot drive the terminal."""
    return text.translate(_CONTROL)


def one_line(text: str) -> str:
    """The text on one line without control characters."""
    return printable(" ".join(text.split()))


def warn(text: str) -> None:
    """One line on the standard error."""
    print(f"warning: {one_line(text)}", file=sys.stderr)


def note(text: str) -> None:
    """One line on the standard error that is no warning."""
    print(one_line(text), file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on the standard output."""
    import json

    print(json.dumps(value, ensure_ascii=False, indent=2))


def megabytes(n_bytes: float) -> str:
    """A size for people: 98.4 MB, 1.06 GB, 512 kB."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n_bytes >= limit:
            return f"{n_bytes / limit:.3g} {unit}" if n_bytes < 100 * limit else f"{n_bytes / limit:.0f} {unit}"
    return f"{n_bytes:.0f} B"


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress callback: a bar on a terminal, a line per task elsewhere. Short work shows nothing."""
    began = time.monotonic()
    if not sys.stderr.isatty():
        shown: set[str] = set()

        def say(what: str, share: float) -> None:
            task = re.sub(r"\d+", "#", what)
            if task not in shown and time.monotonic() - began > QUIET_S and share < 1.0:
                shown.add(task)
                note(f"{what} …")

        yield say
        return

    with contextlib.ExitStack() as stack:
        bar: Any = None
        task_id: Any = None
        current = ""

        def draw(what: str, share: float) -> None:
            nonlocal bar, task_id, current
            if bar is None:
                if time.monotonic() - began < QUIET_S:
                    return
                from rich.console import Console
                from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

                columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
                bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
            if task_id is None or what != current:
                if task_id is not None:
                    bar.remove_task(task_id)
                task_id = bar.add_task(what, total=1.0)
                current = what
            bar.update(task_id, completed=share)

        yield draw
