"""A model file on disk: one GGUF file or a split set, memory-mapped, checked before any view is made.

A file must not be cut short while it is mapped: the operating system ends a process that touches a page that is gone.
Replace model files by renaming, as downloaders do.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NoReturn

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.errors import GGUFError, ModelError, ModelNotFoundError, describe
from kinetic_core.gguf.header import GGUFHeader, TensorInfo, Value, parse_header
from kinetic_core.gguf.metadata import Metadata
from kinetic_core.gguf.source import require_tensor

SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
"""How the parts of a split set are named: `model-00002-of-00003.gguf`, counted from 1."""

MAX_PARTS = 9999
_SPLIT_NUMBER, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_OF_ONE_PART = (_SPLIT_NUMBER, _SPLIT_COUNT, _SPLIT_TENSORS, "general.alignment")
_DIGEST_CHUNK_BYTES = 4 * 1024 * 1024

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@attrs.frozen
class FileIdentity:
    """What tells that a file is still the one whose digest is remembered: device, inode, size, time of change."""

    device: int
    inode: int
    n_bytes: int
    modified_ns: int


class _Part:
    """One open file: its handle, its mapping and its checked header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = _open_regular(path)
        self.map: mmap.mmap | None = None
        try:
            status = os.fstat(self.file.fileno())
            self.identity = FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if status.st_size:
                self.map = mmap.mmap(self.file.fileno(), status.st_size, access=mmap.ACCESS_READ)
            self.header: GGUFHeader = parse_header(self.map if self.map is not None else b"", str(path))
        except OSError as error:
            self.close()
            raise GGUFError(describe("the file cannot be mapped", where=str(path), got=error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.file.close()
        if self.map is not None:
            with contextlib.suppress(BufferError):  # a view is in use: the mapping ends with the last of them
                self.map.close()
            self.map = None


class GGUFFile:
    """An open model: metadata, tensor table and read-only views of the tensors' bytes.

    Made by `open_model_file`. Use it as a context manager, or call `close`; views that were handed out stay valid
    after that, the mapping ends with the last of them. Reading is safe from several threads.
    """

    def __init__(self, parts: list[_Part]) -> None:
        """Take over parts that have been opened and, if there are several, checked against each other."""
        self._parts = parts
        self._digest_lock = threading.Lock()
        self._digest: str | None = None
        self._closed = False
        values: dict[str, Value] = dict(parts[0].header.metadata)
        infos: dict[str, TensorInfo] = {}
        for index, part in enumerate(parts):
            for key, value in part.header.metadata.items():
                if key not in _OF_ONE_PART:
                    values.setdefault(key, value)
            for name, info in part.header.tensors.items():
                infos[name] = attrs.evolve(info, part=index) if index else info
        self.metadata = Metadata(values)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(infos)

    @property
    def path(self) -> Path:
        """The file, or the first part of a split set."""
        return self._parts[0].path

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file of the model in order."""
        return tuple(part.path for part in self._parts)

    @property
    def headers(self) -> tuple[GGUFHeader, ...]:
        """The header of every file in order."""
        return tuple(part.header for part in self._parts)

    @property
    def architecture(self) -> str:
        """The key that architectures register for, "llama"; MetadataError when the file names none."""
        return self.metadata.get_str("general.architecture")

    @property
    def n_bytes(self) -> int:
        """Size of all files together."""
        return sum(part.identity.n_bytes for part in self._parts)

    @property
    def identity(self) -> tuple[FileIdentity, ...]:
        """The identity of every file as it was when it was opened; the key under which a digest is remembered."""
        return tuple(part.identity for part in self._parts)

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes in the file as a read-only view `u8[n_bytes]`.

        Raises TensorError for an unknown tensor, ModelError after `close`.
        """
        info = require_tensor(self.tensors, name)
        return np.frombuffer(self._map_of(info), np.uint8, info.n_bytes, info.offset)

    def release(self, name: str) -> int:
        """Drop the file's pages that lie wholly inside the tensor from this process; they are read again on use.

        Returns the bytes dropped, 0 where the platform has no such call. Raises as `tensor_bytes` does.
        """
        info = require_tensor(self.tensors, name)
        mapped = self._map_of(info)
        if not hasattr(mmap, "MADV_DONTNEED"):
            return 0
        begin = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + info.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end <= begin:
            return 0
        mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        return end - begin

    def digest(self, progress: Progress | None = None) -> str:
        """The SHA-256 of the file in hexadecimal; computed at the first call, which reads the whole file.

        A split set's is the SHA-256 of its parts' digests, 32 bytes each, in order. `progress` may raise to give up.
        Raises ModelError after `close`, GGUFError when a file has changed since it was opened.
        """
        with self._digest_lock:
            if self._digest is None:
                digests = []
                done = 0
                for part in self._parts:
                    digests.append(self._digest_part(part, done, progress))
                    done += part.identity.n_bytes
                whole = digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()
                self._digest = whole.hex()
            return self._digest

    def close(self) -> None:
        """Give up the files; safe to call twice."""
        self._closed = True
        for part in self._parts:
            part.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path}: {len(self.tensors)} tensors, {self.n_bytes} bytes>"

    def _map_of(self, info: TensorInfo) -> mmap.mmap:
        mapped = self._parts[info.part].map
        if mapped is None:
            raise ModelError(describe("the model file is closed", where=str(self.path)))
        return mapped

    def _digest_part(self, part: _Part, done: int, progress: Progress | None) -> bytes:
        if self._closed:
            raise ModelError(describe("the model file is closed", where=str(self.path)))
        sha = hashlib.sha256()
        buffer = memoryview(bytearray(_DIGEST_CHUNK_BYTES))
        read = 0
        try:
            part.file.seek(0)
            while n_bytes := part.file.readinto(buffer):
                sha.update(buffer[:n_bytes])
                read += n_bytes
                if progress is not None:
                    progress(done + read, self.n_bytes)
            status = os.fstat(part.file.fileno())
        except OSError as error:
            raise GGUFError(describe("the file cannot be read", where=str(part.path), got=error)) from error
        except ValueError as error:  # how Python reports a handle that another thread closed meanwhile
            if self._closed:
                raise ModelError(describe("the model file is closed", where=str(self.path))) from error
            raise
        if read != part.identity.n_bytes or status.st_mtime_ns != part.identity.modified_ns:
            raise GGUFError(
                describe("the file changed while it was in use", where=str(part.path), hint="load it again")
            )
        return sha.digest()


def open_model_file(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file; any part of a split set opens the whole set.

    Raises ModelNotFoundError when there is nothing at `path`, GGUFError when the file or its set is not valid and
    complete.
    """
    first = _Part(Path(path))
    parts = [first]
    try:
        count = _split_number(first, _SPLIT_COUNT, 0, MAX_PARTS) if _SPLIT_COUNT in first.header.metadata else 1
        if count > 1:
            parts = _open_split_set(first, count)
        return GGUFFile(parts)
    except BaseException:
        for part in parts:
            part.close()
        raise


def _open_split_set(opened: _Part, count: int) -> list[_Part]:
    """All parts of a set of `count`, one of which is `opened`; closes what it opened when it refuses."""
    named = SPLIT_NAME.fullmatch(opened.path.name)
    number = _split_number(opened, _SPLIT_NUMBER, 0, count - 1)
    if named is None or int(named["count"]) != count or int(named["number"]) != number + 1:
        _refuse_part(
            opened,
            "the name does not fit the part of the split set it holds",
            f"{opened.path.name!r} for part {number + 1} of {count}",
            f"a name that ends in -{number + 1:05d}-of-{count:05d}.gguf",
            hint="give the parts the names they were made with",
        )
    parts: list[_Part] = []
    try:
        for index in range(count):
            path = opened.path.with_name(f"{named['stem']}-{index + 1:05d}-of-{count:05d}.gguf")
            if index == number:
                parts.append(opened)
                continue
            try:
                parts.append(_Part(path))
            except ModelNotFoundError as error:
                raise GGUFError(
                    describe(
                        f"part {index + 1} of {count} of the split set is missing",
                        where=str(path),
                        hint="put all parts into one directory",
                    )
                ) from error
        _check_split_set(parts)
        return parts
    except BaseException:
        for part in parts:
            part.close()
        raise


def _check_split_set(parts: list[_Part]) -> None:
    """Refuse a set whose parts disagree about numbers, counts, metadata or tensors."""
    count = len(parts)
    n_tensors = sum(len(part.header.tensors) for part in parts)
    values: dict[str, Value] = {}
    owner: dict[str, int] = {}
    for index, part in enumerate(parts):
        which = f"part {index + 1} of {count}"
        claimed = _split_number(part, _SPLIT_COUNT, 0, MAX_PARTS)
        if claimed != count:
            _refuse_part(part, f"{which} claims another number of parts", f"{_SPLIT_COUNT} {claimed}", count)
        number = _split_number(part, _SPLIT_NUMBER, 0, count - 1)
        if number != index:
            _refuse_part(part, f"{which} is another part", f"{_SPLIT_NUMBER} {number}", f"{_SPLIT_NUMBER} {index}")
    for index, part in enumerate(parts):
        which = f"part {index + 1} of {count}"
        total = _split_number(part, _SPLIT_TENSORS, 0, 2**31 - 1)
        if total != n_tensors:
            _refuse_part(
                part,
                f"{which} claims another number of tensors",
                f"{_SPLIT_TENSORS} {total}",
                f"{n_tensors}, the tensors that all parts hold",
            )
        for name in part.header.tensors:
            if name in owner:
                _refuse_part(part, f"tensor {name!r} is in part {owner[name] + 1} and in {which}", None, "one place")
            owner[name] = index
        for key, value in part.header.metadata.items():
            if key not in _OF_ONE_PART and not _same(values.setdefault(key, value), value):
                _refuse_part(part, f"{which} has another value of key {key!r}", None, "that of the earlier part")


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and np.array_equal(a, b)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _split_number(part: _Part, key: str, minimum: int, maximum: int) -> int:
    value = part.header.metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        got = "no such key" if value is None else repr(value)[:60]
        _refuse_part(part, f"bad key {key!r}", got, f"an integer from {minimum} to {maximum}")
    return value


def _refuse_part(part: _Part, what: str, got: object, expected: object, *, hint: str | None = None) -> NoReturn:
    raise GGUFError(describe(what, where=str(part.path), got=got, expected=expected, hint=hint))


def _open_regular(path: Path) -> FileIO:
    """A binary, unbuffered handle of a regular file; a pipe or device is refused before it could block."""
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISREG(kind):
            return FileIO(path, "rb")
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise ModelNotFoundError(
            describe("no such model file", got=repr(str(path)), hint="check the path, or `kinetic pull` the model")
        ) from error
    except OSError as error:
        raise GGUFError(describe("the model file cannot be opened", where=str(path), got=error.strerror)) from error
    what = "a directory" if stat.S_ISDIR(kind) else "not a regular file"
    raise GGUFError(describe("not a model file", where=str(path), got=what, expected="a .gguf file"))
