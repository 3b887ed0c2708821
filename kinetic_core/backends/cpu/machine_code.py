"""Machine code on disk and in memory: one object file per kernel, loaded by LLVM's linker alone, without numba.

A file is a head, the digest of what follows it, and the object file as numba's code generator emitted it. What does
not have the length and the digest that its head names is not loaded. Files are written beside their place and renamed,
so that a process which reads while another writes sees the whole file or none.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import attrs

_MAGIC = b"kinetic machine code 1\n"
_DIGEST_BYTES = 32
_NUMBERS = itertools.count()


@attrs.frozen
class MachineCode:
    """A kernel in memory, for the rest of the process.

    address: of `void kernel(int64 args, int64 begin, int64 end)`. code_digest: SHA-256 of its object file, in hex.
    stored: it lay on disk already, nothing was compiled.
    """

    name: str
    address: int
    code_digest: str
    stored: bool


def symbol(name: str) -> str:
    """What a kernel's entry is called in its object file."""
    return f"kinetic_{name}"


def write(path: Path, code: bytes) -> None:
    """Put an object file on disk. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + len(code).to_bytes(8, "little") + hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: Path) -> bytes | None:
    """The object file in `path`; None where there is none, or a damaged one, which is removed."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + 8 + _DIGEST_BYTES
    head, code = data[:start], data[start:]
    if head == _MAGIC + len(code).to_bytes(8, "little") + hashlib.sha256(code).digest():
        return code
    path.unlink(missing_ok=True)
    return None


def load(name: str, code: bytes, *, stored: bool) -> MachineCode:
    """Link an object file into this process. Raises RuntimeError when LLVM cannot."""
    import llvmlite.binding as llvm

    entry = symbol(name)
    # A library of its own: the names of helpers in it are nobody else's.
    library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(entry)
    linked = library.link(_linker(), f"{entry}.{next(_NUMBERS)}")
    address = int(linked[entry])
    linked.detach()  # never unloaded: threads may run it until the process ends
    return MachineCode(name, address, hashlib.sha256(code).hexdigest(), stored)


@functools.cache
def _linker() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    linker = llvm.create_lljit_compiler(target.create_target_machine(jit=True))
    atexit.register(linker.detach)
    return linker
