"""The command line, one file per command. `main` is the entry point ``kinetic``; docs/commands.md documents it.

Nothing heavy is imported before a command needs it, so that `kinetic --help` and commands without a model start fast.
Errors are one line on the standard error and the exit status of their class (docs/errors.md); KINETIC_DEBUG=1 shows
tracebacks.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

DEBUG_VARIABLE = "KINETIC_DEBUG"
NOBODY_READS_STATUS = 1
INTERNAL_ERROR_STATUS = 70
OUTPUT_ERROR_STATUS = 74
INTERRUPTED_STATUS = 130

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write that the command can do nothing about."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (default: the process's own) and end the process with its exit status."""
    # NumPy's linear algebra is not used here, but its threads would start all the same, and spin for a while.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A vocabulary is some hundred thousand objects at once: looking for cycles among them takes longer than reading it.
    gc.set_threshold(100_000)
    from kinetic_core.cli.application import Abort, UsageError, make_application
    from kinetic_core.errors import KineticError

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a locale without the answer's characters must not end a command
            stream.reconfigure(errors="replace")
    try:
        words = None if arguments is None else list(arguments)
        status = make_application()(args=words, prog_name="kinetic", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error is a line and a status
    except UsageError as error:
        _show(error, _usage(error))
        sys.exit(error.exit_code)
    except KineticError as error:
        _show(error, str(error))
        sys.exit(error.exit_status)
    except (KeyboardInterrupt, Abort):
        sys.exit(INTERRUPTED_STATUS)
    except Exception as error:
        # An error of opening a file names the file; without one it was a write to what the shell has opened.
        if isinstance(error, OSError) and error.filename is None and error.errno in (errno.EPIPE, *_FULL):
            _drop_output()
            if error.errno == errno.EPIPE:
                sys.exit(NOBODY_READS_STATUS)
            _show(error, f"the output cannot be written: {error.strerror}")
            sys.exit(OUTPUT_ERROR_STATUS)
        _show(error, f"internal error: {type(error).__name__}: {error}; {DEBUG_VARIABLE}=1 shows where")
        sys.exit(INTERNAL_ERROR_STATUS)
    sys.exit(status or 0)


def _usage(error: Any) -> str:
    """What is wrong with a command line, and where its options are listed."""
    message = error.format_message().strip().removesuffix(".")
    command = error.ctx.command_path if getattr(error, "ctx", None) else "kinetic"
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"


def _drop_output() -> None:
    """What is still buffered for the standard output goes nowhere, so that the process ends without another error."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _show(error: BaseException, message: str) -> None:
    from kinetic_core.cli.console import one_line

    with contextlib.suppress(OSError):  # nobody can be told
        if os.environ.get(DEBUG_VARIABLE) == "1":
            import traceback

            traceback.print_exception(error)
        print(f"error: {one_line(message)}", file=sys.stderr)
