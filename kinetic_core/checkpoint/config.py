"""A checkpoint's config.json as an architecture reads it: typed, and every error names the key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kinetic_core.errors import MetadataError, describe, shown

_REQUIRED: Any = object()
_GREATEST = (2 - 2**-23) * 2.0**127
"""The greatest float32, in which files and kernels hold what a config.json says."""


class CheckpointConfig:
    """The keys of a config.json, read with their types; null counts as absent.

    values: the parsed object. where: how messages call it. tensors: names that the checkpoint's files hold.

    A reader names one key or several that mean the same in older and newer files; the first that is there is taken.
    Without a default a missing key raises MetadataError, as does any value of another type.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str = "config.json", tensors: Collection[str] = frozenset()
    ) -> None:
        self.values = values
        self.where = where
        self.tensors = tensors

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get_int(self, *keys: str, default: Any = _REQUIRED, minimum: int = 0, maximum: int = 2**32 - 1) -> Any:
        """A whole number from `minimum` to `maximum`."""
        key, value = self._find(keys, default)
        if key is None:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self._refused(key, value, f"a whole number from {minimum} to {maximum}")
        return value

    def get_float(
        self, *keys: str, default: Any = _REQUIRED, minimum: float = -_GREATEST, maximum: float = _GREATEST
    ) -> Any:
        """A number that float32 can hold, from `minimum` to `maximum`."""
        key, value = self._find(keys, default)
        if key is None:
            return value
        if not _fits_float32(value):
            raise self._refused(key, value, "a finite number of float32")
        if not minimum <= value <= maximum:
            raise self._refused(key, value, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def get_bool(self, *keys: str, default: Any = _REQUIRED) -> Any:
        """True or false."""
        return self._typed(keys, default, bool, "true or false")

    def get_str(self, *keys: str, default: Any = _REQUIRED) -> Any:
        """A text."""
        return self._typed(keys, default, str, "a text")

    def get_strings(self, *keys: str, default: Any = _REQUIRED) -> Any:
        """A list of texts, as a tuple."""
        key, value = self._find(keys, default)
        if key is None:
            return value
        if not isinstance(value, list | tuple) or not all(isinstance(element, str) for element in value):
            raise self._refused(key, value, "a list of texts")
        return tuple(value)

    def get_floats(self, key: str, count: int, *, default: float) -> tuple[float, ...]:
        """`count` numbers that float32 can hold; where the key is absent, `default` as often."""
        value = self.values.get(key)
        if value is None:
            return (default,) * count
        numbers = value if isinstance(value, list | tuple) else ()
        if len(numbers) != count or not all(map(_fits_float32, numbers)):
            raise self._refused(key, value, f"{count} finite numbers of float32")
        return tuple(map(float, numbers))

    def get_ints(self, key: str, count: int, *, default: Any = _REQUIRED) -> Any:
        """`count` whole numbers that int32 can hold, none negative, as a tuple."""
        found, value = self._find((key,), default)
        if found is None:
            return value
        numbers = value if isinstance(value, list | tuple) else ()
        if len(numbers) != count or not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
            raise self._refused(key, value, f"{count} whole numbers from 0 to {2**31 - 1}")
        return tuple(numbers)

    def flattened(self, key: str) -> CheckpointConfig:
        """The object under `key`, with the keys beside it for what it lacks; this one where there is no such object."""
        inner = self.section(key).values
        others = {name: value for name, value in self.values.items() if name != key}
        return CheckpointConfig(
            {**others, **{n: v for n, v in inner.items() if v is not None}}, self.where, self.tensors
        )

    def section(self, key: str) -> CheckpointConfig:
        """The object under `key`, empty where the key is absent."""
        value = self._typed((key,), {}, dict, "an object")
        return CheckpointConfig(value, f"{self.where}, {key}")

    def expect(self, key: str, expected: Any) -> None:
        """Refuse any value but `expected` or none: models of another variant than the family's code covers."""
        value = self.values.get(key)
        if value is not None and value != expected:
            raise self._refused(key, value, f"{expected!r} or no such key")

    def refused(self, key: str, expected: str) -> MetadataError:
        """The error for a value of `key` that the family cannot use."""
        return self._refused(key, self.values.get(key), expected)

    def _typed(self, keys: tuple[str, ...], default: Any, kind: type, expected: str) -> Any:
        key, value = self._find(keys, default)
        if key is not None and not isinstance(value, kind):
            raise self._refused(key, value, expected)
        return value

    def _find(self, keys: tuple[str, ...], default: Any) -> tuple[str | None, Any]:
        for key in keys:
            if key in self:
                return key, self.values[key]
        if default is _REQUIRED:
            raise MetadataError(describe("a key is missing", where=self.where, expected=" or ".join(map(repr, keys))))
        return None, default

    def _refused(self, key: str, value: Any, expected: str) -> MetadataError:
        where = f"{self.where}, key {key!r}"
        return MetadataError(describe("a key cannot be used", where=where, got=shown(value), expected=expected))


def _fits_float32(value: Any) -> bool:
    # Compared, not converted: a whole number of hundreds of digits has no float.
    return isinstance(value, int | float) and not isinstance(value, bool) and -_GREATEST <= value <= _GREATEST
