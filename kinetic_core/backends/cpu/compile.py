"""Machine code of the kernels: compiled once per cache directory, in parallel processes, then loaded from it.

The directory is named by a digest of everything that the machine code depends on, so what is in it is always current.
numba is imported only to compile: a program whose kernels are all there is loaded without it. (numba's own cache is
not used. It notices an edit of the kernel's file only, not of the SIMD vocabulary it is written in.)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kinetic_core import directories
from kinetic_core.backends.cpu import machine_code, old_code
from kinetic_core.backends.cpu.machine_code import MachineCode
from kinetic_core.backends.cpu.target import choose_lowering, compiler_settings, cpu_features
from kinetic_core.errors import BackendError, describe

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Progress

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parent
_COMPILED: dict[str, MachineCode] = {}
_LOCK = threading.RLock()


def kernel_sources() -> list[Path]:
    """Every file whose text the machine code of a kernel depends on, in a fixed order."""
    folders = [path for folder in ("simd", "kernels") for path in sorted((_PACKAGE / folder).rglob("*.py"))]
    return [*folders, _PACKAGE / "emit.py", _PACKAGE / "packing.py", _PACKAGE / "target.py"]


@functools.cache
def kernel_digest() -> str:
    """Names the machine code: sources, numba, llvmlite, Python, CPU, its features, the lowering. 32 hex digits."""
    settings = compiler_settings()
    digest = hashlib.sha256()
    for path in kernel_sources():
        text = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(text)}\n".encode())
        digest.update(text)
    facts = (
        importlib.metadata.version("numba"),
        importlib.metadata.version("llvmlite"),
        sys.version,
        platform.machine(),
        settings.cpu_name,
        ",".join(sorted(cpu_features())),
        choose_lowering(),
        settings.optimization,
        settings.bounds_checks,
    )
    digest.update("\n".join(facts).encode())
    return digest.hexdigest()[:32]


def cache_directory() -> Path:
    """Where the machine code of this process's kernels lies."""
    return directories.cache_directory() / "kernels" / kernel_digest()


def _path(name: str) -> Path:
    return cache_directory() / f"{name}.code"


def get(name: str) -> MachineCode:
    """The compiled kernel `name`; loaded from the cache, or compiled here and now.

    Raises:
        BackendError: no such kernel, or it does not compile.
    """
    with _LOCK:
        compiled = _COMPILED.get(name)
        if compiled is None:
            compiled = _COMPILED[name] = _load(name) or _compile(name)
        return compiled


def _load(name: str) -> MachineCode | None:
    """The kernel from the cache; None when it is not there, or damaged: it is removed then."""
    path = _path(name)
    code = machine_code.read(path)
    if code is None:
        return None
    try:
        return machine_code.load(name, code, stored=True)
    except RuntimeError as error:
        logger.warning("the machine code of the kernel %s cannot be used (%s); compiling it again", name, error)
        path.unlink(missing_ok=True)
        return None


def _compile(name: str) -> MachineCode:
    from kinetic_core.backends.cpu.emit import emit, registry

    function = registry().get(name)
    if function is None:
        raise BackendError(describe("no such kernel", got=name))
    path = _path(name)
    try:
        code = emit(name, function)
        machine_code.write(path, code)
        return machine_code.load(name, code, stored=False)
    except OSError as error:
        raise BackendError(
            describe("cannot write the kernel cache", where=str(path.parent), got=error, hint="set KINETIC_CACHE_DIR")
        ) from error
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(describe(f"the kernel {name} does not compile", got=error)) from error


def prepare(names: Sequence[str], progress: Progress | None = None) -> None:
    """Compile those of `names` that the cache lacks, in parallel processes, then load all into this one.

    progress: called as ``("compiling kernel 7 of 23", 0.3)``.
    """
    wanted = sorted(set(names))
    missing = [name for name in wanted if name not in _COMPILED and not _path(name).exists()]
    n_processes = min(len(missing), _n_cpus())
    if n_processes > 1:
        _compile_in_processes(missing, n_processes, progress)
    for name in wanted:
        get(name)
    old_code.tidy(cache_directory())


def _n_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _compile_in_processes(missing: Sequence[str], n_processes: int, progress: Progress | None) -> None:
    # Taken from the end: the kernels that take longest come first.
    waiting = sorted(missing, key=lambda name: (name.startswith(("attention", "linear")), name.startswith("attention")))
    lock = threading.Lock()
    n_done = 0
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))

    def report() -> None:
        if progress is not None and n_done < len(missing):
            progress(f"compiling kernel {n_done + 1} of {len(missing)}", n_done / len(missing))

    def feed() -> None:
        """Give one process a name at a time. A name that fails is left to `get`, which says why."""
        nonlocal n_done
        command = [sys.executable, "-m", "kinetic_core.backends.cpu.compile"]
        try:
            started = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
            )
        except OSError as error:
            logger.warning("cannot start a process that compiles kernels (%s); compiling here", error)
            return
        with started as process:
            assert process.stdin is not None and process.stdout is not None
            while True:
                with lock:
                    if not waiting:
                        break
                    name = waiting.pop()
                try:
                    process.stdin.write(name + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
                except OSError:
                    answer = ""
                with lock:
                    n_done += 1
                    report()
                if not answer:
                    logger.warning("the process that compiles kernels ended; compiling %s here", name)
                    break
            with contextlib.suppress(OSError):  # unsent bytes for a process that is gone
                process.stdin.close()

    report()
    threads = [threading.Thread(target=feed, name=f"compile-{number}") for number in range(n_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve_names() -> None:
    """The helper process: compiles each name read from standard input, and answers with a line."""
    for line in sys.stdin:
        name = line.strip()
        try:
            get(name)
        except BackendError:
            print("failed", name, flush=True)
        else:
            print("compiled", name, flush=True)


if __name__ == "__main__":
    _serve_names()
