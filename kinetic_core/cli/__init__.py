"""The command line, one file per command. `main` is the entry point ``kinetic``; docs/commands.md documents it.

Nothing heavy is imported before a command needs it, so that `kinetic --help` and commands without a model start fast.
Errors are one line on the standard error and the exit status of their class (docs/errors.md); KINETIC_DEBUG=1 shows
tracebacks.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

DEBUG_VARIABLE = "KINETIC_DEBUG"
INTERNAL_ERROR_STATUS = 70
INTERRUPTED_STATUS = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (default: the process's own) and end the process with its exit status."""
    # NumPy's linear algebra is not used here, but its threads would start all the same, and spin for a while.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A vocabulary is some hundred thousand objects at once: looking for cycles among them takes longer than reading it.
    gc.set_threshold(100_000)
    from kinetic_core.cli.application import make_application
    from kinetic_core.errors import KineticError

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a locale without the answer's characters must not end a command
            stream.reconfigure(errors="replace")
    try:
        make_application()(args=None if arguments is None else list(arguments))
    except KineticError as error:
        _show(error, str(error))
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
    except Exception as error:
        _show(error, f"internal error: {type(error).__name__}: {error}; {DEBUG_VARIABLE}=1 shows where")
        sys.exit(INTERNAL_ERROR_STATUS)
    sys.exit(0)


def _show(error: Exception, message: str) -> None:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        import traceback

        traceback.print_exception(error)
    from kinetic_core.cli.console import one_line

    print(f"error: {one_line(message)}", file=sys.stderr)
