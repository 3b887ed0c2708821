"""Loading `fits`: where numba keeps the machine code of its loops, and compiling them with a word about it.

The machine code lies in Kinetic's cache directory, in numba's own cache. That notices an edit of the file that a
function is in, another numba and another CPU, and all that is compiled here is in one file.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kinetic_core import directories
from kinetic_core.errors import BackendError, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kinetic_core.interfaces.backend import Progress

SIGNATURES = {
    "fit_with_minimum": "void(float32[:,::1], float32[::1], float32, boolean, float32[::1], float32[::1])",
    "fit_signed": "void(float32[:,::1], float32[::1], float32, float32, float32[::1])",
    "numbers": "void(float32[:,::1], float32[::1], float32[::1], float32, float32, int8[:,::1])",
}


@functools.cache
def load() -> ModuleType:
    """The module `fits`, its functions not yet compiled. Raises BackendError where the cache cannot be written."""
    folder = directories.cache_directory() / "quantizers"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BackendError(
            describe("cannot write the cache", where=str(folder), got=error, hint="set KINETIC_CACHE_DIR")
        ) from error
    import numba

    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(folder)
    try:
        from kinetic_core.convert import fits
    finally:
        settings.CACHE_DIR = before
    return fits


def prepare(names: Sequence[str], progress: Progress | None = None) -> None:
    """Compile those functions, or load their machine code; `progress` is told which."""
    for done, name in enumerate(names):
        function = getattr(load(), name)
        if not function.signatures:
            if progress is not None:
                progress(f"compiling the quantizers' loop {name}", done / len(names))
            function.compile(SIGNATURES[name])
