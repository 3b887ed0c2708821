"""The parent's side of the template worker: starting it, asking it, killing it in time."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from kinetic_core.errors import TemplateError, describe

_WORKER = Path(__file__).with_name("template_worker.py")
_LENGTH_BYTES = 4
_START_SECONDS = 30.0


class TemplateWorker:
    """One worker process, started on first use (or by `start`) and again after it was killed.

    Requests are served one at a time; calls from several threads wait for each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._ready = False

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The process, if one was started."""
        return self._process

    def start(self) -> None:
        """Start the process if none runs, without waiting until it is ready."""
        with self._lock:
            self._running()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises TemplateError when no answer came within `seconds` (the process is killed) or the process died.
        """
        data = json.dumps(request).encode()
        with self._lock:
            process = self._running()
            if not self._ready:
                if self._exchange(process, b"", _START_SECONDS) is None:
                    self._discard()
                    raise TemplateError(
                        describe(
                            "the process for chat templates did not start",
                            got=f"exit status {process.poll()}",
                            hint=f"try: {sys.executable} {_WORKER}",
                        )
                    )
                self._ready = True
            answer = self._exchange(process, len(data).to_bytes(_LENGTH_BYTES, "little") + data, seconds)
            if answer is None:
                timed_out = self._timed_out
                self._discard()
                if timed_out:
                    raise TemplateError(
                        describe("the chat template took too long and was stopped", expected=f"at most {seconds:g} s")
                    )
                raise TemplateError(
                    describe("the chat template ended its process", hint="it probably asked for too much memory")
                )
            if self._timed_out:  # the answer came just before the kill
                self._discard()
            return answer

    def close(self) -> None:
        """End the process; a later request starts another."""
        with self._lock:
            self._discard()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # a fork: the pipes are the parent's
            self._process = None
            self._owner = os.getpid()
        if self._process is not None and self._process.poll() is not None:
            self._discard()
        if self._process is None:
            self._ready = False
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
                )
            except OSError as error:
                raise TemplateError(describe("the process for chat templates cannot be started", got=error)) from error
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], data: bytes, seconds: float) -> dict[str, Any] | None:
        """Write `data`, read one message. None if the process died or was killed after `seconds`."""
        assert process.stdin is not None and process.stdout is not None
        state = threading.Lock()
        finished = False
        self._timed_out = False

        def kill() -> None:
            with state:
                if not finished:
                    self._timed_out = True
                    process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            if data:
                process.stdin.write(data)
                process.stdin.flush()
            return _read_message(process.stdout)
        except (OSError, ValueError):
            return None
        finally:
            with state:
                finished = True
            timer.cancel()

    def _discard(self) -> None:
        process, self._process, self._ready = self._process, None, False
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unsent bytes for a process that is gone
                    continue
        process.wait()


def _read_message(pipe: BinaryIO | Any) -> dict[str, Any] | None:
    head = pipe.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    data = pipe.read(size)
    if len(data) < size:
        return None
    message: dict[str, Any] = json.loads(data)
    return message


_shared = TemplateWorker()
atexit.register(_shared.close)


def shared_worker() -> TemplateWorker:
    """The worker that all chat templates of this process share."""
    return _shared
