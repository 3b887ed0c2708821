"""Typed reads of a model's metadata: every refusal says which key, what was got and what was expected.

The same class serves a GGUF file's header and a plain dict of an in-memory model:

    metadata = Metadata({"general.architecture": "llama", "llama.block_count": 2})
    llama = metadata.prefixed("llama")
    n_layers = llama.get_int("block_count", minimum=1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kinetic_core.errors import MetadataError, UnsupportedModelError, describe
from kinetic_core.gguf.header import TensorInfo, Value

Default = TypeVar("Default")


class _Required:
    """The default of a key that must be there."""


_REQUIRED = _Required()


class Metadata:
    """A read-only set of metadata keys with typed reads.

    Every `get_*` takes the key without the view's prefix; without `default` a missing key raises MetadataError. A
    key that is there is always checked, also when a default is given. Numbers are refused outside `minimum` and
    `maximum` (inclusive); floats that are not finite are always refused. An integer is accepted where a float is
    expected, never the other way round, and a bool is neither.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Wrap `values`: bool, int, float, str, NumPy scalars and 1-d arrays, lists and tuples of one type.

        Raises MetadataError for a value of any other kind.
        """
        self._values: Mapping[str, Value] = MappingProxyType({k: _normalized(k, v) for k, v in values.items()})
        self._read: set[str] = set()
        self._prefix = ""

    @property
    def raw(self) -> Mapping[str, Value]:
        """All values by their full keys, without any check: scalars, tuples of str, read-only NumPy arrays."""
        return self._values

    @property
    def prefix(self) -> str:
        """What is put before every key: "" or "llama."."""
        return self._prefix

    def prefixed(self, architecture: str) -> Metadata:
        """A view in which "block_count" means "<architecture>.block_count"; it shares `unread_keys`."""
        view = object.__new__(Metadata)
        view._values, view._read = self._values, self._read
        view._prefix = f"{architecture}."
        return view

    def unread_keys(self) -> list[str]:
        """The full keys under this view's prefix that nobody has read, in the file's order."""
        return [key for key in self._values if key.startswith(self._prefix) and key not in self._read]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._prefix + key in self._values

    def __iter__(self) -> Iterator[str]:
        """The keys of this view, without the prefix."""
        start = len(self._prefix)
        return (key[start:] for key in self._values if key.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<Metadata {self._prefix or 'all'}: {len(self)} keys>"

    @overload
    def get_int(self, key: str, *, minimum: int | None = None, maximum: int | None = None) -> int: ...
    @overload
    def get_int(
        self, key: str, default: Default, *, minimum: int | None = None, maximum: int | None = None
    ) -> int | Default: ...
    def get_int(
        self, key: str, default: Any = _REQUIRED, *, minimum: int | None = None, maximum: int | None = None
    ) -> Any:
        """An integer of any GGUF width."""
        return self._get(key, default, lambda full, value: _as_int(full, value, minimum, maximum))

    @overload
    def get_float(self, key: str, *, minimum: float | None = None, maximum: float | None = None) -> float: ...
    @overload
    def get_float(
        self, key: str, default: Default, *, minimum: float | None = None, maximum: float | None = None
    ) -> float | Default: ...
    def get_float(
        self, key: str, default: Any = _REQUIRED, *, minimum: float | None = None, maximum: float | None = None
    ) -> Any:
        """A finite float; the value a float32 of the file holds exactly, as a Python float."""
        return self._get(key, default, lambda full, value: _as_float(full, value, minimum, maximum))

    @overload
    def get_bool(self, key: str) -> bool: ...
    @overload
    def get_bool(self, key: str, default: Default) -> bool | Default: ...
    def get_bool(self, key: str, default: Any = _REQUIRED) -> Any:
        """A bool; numbers are refused."""
        return self._get(key, default, _as_bool)

    @overload
    def get_str(self, key: str, *, choices: Iterable[str] | None = None) -> str: ...
    @overload
    def get_str(self, key: str, default: Default, *, choices: Iterable[str] | None = None) -> str | Default: ...
    def get_str(self, key: str, default: Any = _REQUIRED, *, choices: Iterable[str] | None = None) -> Any:
        """A string, one of `choices` if given."""
        return self._get(key, default, lambda full, value: _as_str(full, value, choices))

    @overload
    def get_ints(
        self, key: str, *, length: int | None = None, minimum: int | None = None, maximum: int | None = None
    ) -> npt.NDArray[np.int64]: ...
    @overload
    def get_ints(
        self,
        key: str,
        default: Default,
        *,
        length: int | None = None,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> npt.NDArray[np.int64] | Default: ...
    def get_ints(
        self,
        key: str,
        default: Any = _REQUIRED,
        *,
        length: int | None = None,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> Any:
        """An array of integers as `i64[length]`."""

        def convert(full: str, value: Value) -> npt.NDArray[np.int64]:
            array = _as_array(full, value, length, "iu", "an array of integers")
            if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
                raise _refused("an element is out of range", full, int(array.max()), "at most 2**63 - 1")
            _check_elements(full, array, minimum, maximum)
            return array.astype(np.int64)

        return self._get(key, default, convert)

    @overload
    def get_floats(
        self, key: str, *, length: int | None = None, minimum: float | None = None, maximum: float | None = None
    ) -> npt.NDArray[np.float64]: ...
    @overload
    def get_floats(
        self,
        key: str,
        default: Default,
        *,
        length: int | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> npt.NDArray[np.float64] | Default: ...
    def get_floats(
        self,
        key: str,
        default: Any = _REQUIRED,
        *,
        length: int | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> Any:
        """An array of finite floats as `f64[length]`."""

        def convert(full: str, value: Value) -> npt.NDArray[np.float64]:
            array = _as_array(full, value, length, "fiu", "an array of floats").astype(np.float64)
            finite = np.isfinite(array)
            if not finite.all():
                index = int(np.argmin(finite))
                raise _refused(f"element {index} is not finite", full, array[index], "a finite number")
            _check_elements(full, array, minimum, maximum)
            return array

        return self._get(key, default, convert)

    @overload
    def get_bools(self, key: str, *, length: int | None = None) -> npt.NDArray[np.bool_]: ...
    @overload
    def get_bools(
        self, key: str, default: Default, *, length: int | None = None
    ) -> npt.NDArray[np.bool_] | Default: ...
    def get_bools(self, key: str, default: Any = _REQUIRED, *, length: int | None = None) -> Any:
        """An array of bools as `bool[length]`."""
        return self._get(
            key,
            default,
            lambda full, value: _as_array(full, value, length, "b", "an array of bools").astype(np.bool_),
        )

    @overload
    def get_strs(self, key: str, *, length: int | None = None) -> tuple[str, ...]: ...
    @overload
    def get_strs(self, key: str, default: Default, *, length: int | None = None) -> tuple[str, ...] | Default: ...
    def get_strs(self, key: str, default: Any = _REQUIRED, *, length: int | None = None) -> Any:
        """An array of strings as a tuple."""

        def convert(full: str, value: Value) -> tuple[str, ...]:
            if isinstance(value, np.ndarray) and not value.size:
                value = ()
            if not isinstance(value, tuple):
                raise _refused("a metadata key has another type", full, _kind(value), "an array of strings")
            _check_length(full, len(value), length)
            return value

        return self._get(key, default, convert)

    def get_ints_per_layer(
        self,
        key: str,
        n_layers: int,
        default: int | _Required = _REQUIRED,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> tuple[int, ...]:
        """One integer per layer: the key holds one for all layers, or an array with exactly one per layer."""
        return self._per_layer(key, n_layers, default, lambda k, v: _as_int(k, v, minimum, maximum))

    def get_floats_per_layer(
        self,
        key: str,
        n_layers: int,
        default: float | _Required = _REQUIRED,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> tuple[float, ...]:
        """One float per layer: the key holds one for all layers, or an array with exactly one per layer."""
        return self._per_layer(key, n_layers, default, lambda k, v: _as_float(k, v, minimum, maximum))

    def get_bools_per_layer(self, key: str, n_layers: int, default: bool | _Required = _REQUIRED) -> tuple[bool, ...]:
        """One bool per layer: the key holds one for all layers, or an array with exactly one per layer."""
        return self._per_layer(key, n_layers, default, _as_bool)

    def does_not_fit(self, key: str, got: object, expected: str) -> MetadataError:
        """The error, to be raised, of a key whose value contradicts another's."""
        return _refused("a metadata key does not fit", self._prefix + key, got, expected)

    def unsupported(self, key: str, got: object, expected: str) -> UnsupportedModelError:
        """The error, to be raised, of a key that asks for a variant of the family that is not covered."""
        where = f"key {self._prefix + key!r}"
        return UnsupportedModelError(
            describe("models of this variant are not supported", where=where, got=got, expected=expected)
        )

    def _per_layer(self, key: str, n_layers: int, default: Any, convert: Callable[[str, Any], Any]) -> Any:
        def convert_all(full: str, value: Value) -> tuple[Any, ...]:
            if isinstance(value, np.ndarray | tuple):
                _check_length(full, len(value), n_layers)
                elements = value.tolist() if isinstance(value, np.ndarray) else value
                return tuple(convert(f"{full}[{index}]", element) for index, element in enumerate(elements))
            return (convert(full, value),) * n_layers

        result = self._get(key, default, convert_all)
        return result if isinstance(result, tuple) else (result,) * n_layers

    def _get(self, key: str, default: Any, convert: Callable[[str, Value], Any]) -> Any:
        full = self._prefix + key
        self._read.add(full)
        value = self._values.get(full)
        if value is not None:
            return convert(full, value)
        if default is _REQUIRED:
            raise MetadataError(describe(f"the metadata key {full!r} is missing"))
        return default


def check_block_count(metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> int:
    """The number of blocks, once the "blk.N." tensors agree with the metadata.

    metadata: the architecture's view, in which "block_count" is the number of blocks of the file, prediction blocks
    included. The tensors must have exactly the blocks 0 to block_count - 1. Raises MetadataError otherwise.
    """
    n_blocks = metadata.get_int("block_count", minimum=1)
    found: set[int] = set()
    for name in tensors:
        prefix, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if prefix == "blk" and number.isascii() and number.isdigit():
            found.add(int(number))
    if len(found) != n_blocks or max(found) != n_blocks - 1:
        last = f", the last is blk.{max(found)}" if found else ""
        raise _refused(
            "block_count does not match the tensors found",
            f"{metadata.prefix}block_count",
            f"{n_blocks}, with tensors of {len(found)} blocks{last}",
            "one set of blk.N tensors for every N below block_count",
        )
    return n_blocks


def _refused(what: str, key: str, got: object, expected: object) -> MetadataError:
    return MetadataError(describe(what, where=f"key {key!r}", got=got, expected=expected))


def _kind(value: object) -> str:
    """A value as a message shows it: its type, and a scalar's value in a bounded length."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype}"
    if isinstance(value, tuple):
        return f"an array of {len(value)} strings"
    if isinstance(value, str):
        return f"the string {value[:60]!r}"
    return f"the {type(value).__name__} {value!r}"


def _check_range(key: str, value: float, minimum: float | None, maximum: float | None) -> None:
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        raise _refused("a metadata key is out of range", key, value, _range(minimum, maximum))


def _range(minimum: float | None, maximum: float | None) -> str:
    if minimum is None:
        return f"at most {maximum}"
    return f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"


def _check_elements(key: str, array: npt.NDArray[Any], minimum: float | None, maximum: float | None) -> None:
    if array.size:
        for bound in (array.min(), array.max()):
            _check_range(f"{key}[{int(np.argmax(array == bound))}]", bound.item(), minimum, maximum)


def _check_length(key: str, length: int, expected: int | None) -> None:
    if expected is not None and length != expected:
        raise _refused("an array has another length", key, f"{length} elements", expected)


def _as_int(key: str, value: object, minimum: int | None, maximum: int | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refused("a metadata key has another type", key, _kind(value), "an integer")
    _check_range(key, value, minimum, maximum)
    return value


def _as_float(key: str, value: object, minimum: float | None, maximum: float | None) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _refused("a metadata key has another type", key, _kind(value), "a float")
    if not math.isfinite(value):
        raise _refused("a metadata key is not finite", key, value, "a finite number")
    _check_range(key, value, minimum, maximum)
    return float(value)


def _as_bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refused("a metadata key has another type", key, _kind(value), "a bool")
    return value


def _as_str(key: str, value: object, choices: Iterable[str] | None) -> str:
    if not isinstance(value, str):
        raise _refused("a metadata key has another type", key, _kind(value), "a string")
    if choices is not None:
        known = tuple(choices)
        if value not in known:
            raise _refused("a metadata key has an unknown value", key, _kind(value), f"one of {', '.join(known)}")
    return value


def _as_array(key: str, value: Value, length: int | None, kinds: str, expected: str) -> npt.NDArray[Any]:
    if isinstance(value, tuple) and not value:  # an empty array has no element of a wrong type
        value = np.empty(0, np.dtype({"b": "?", "f": "f8", "i": "i8"}[kinds[0]]))
    if not isinstance(value, np.ndarray) or (value.dtype.kind not in kinds and value.size):
        raise _refused("a metadata key has another type", key, _kind(value), expected)
    _check_length(key, value.size, length)
    return value


def _normalized(key: str, value: Any) -> Value:
    """A value of a plain dict in the form that a header has it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | float | str) or (isinstance(value, int) and -(2**63) <= value < 2**64):
        return value
    if isinstance(value, list | tuple):
        types = set(map(type, value))
        if types <= {str} or all(isinstance(element, str) for element in value):
            return tuple(value)
        if len(types) == 1:
            value = np.array(value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "biuf":
        if not value.flags.writeable:
            return value
        copy = value.copy()
        copy.flags.writeable = False
        return copy
    raise _refused(
        "not a metadata value", key, f"a {type(value).__name__}", "a bool, number, string or array of one type"
    )
