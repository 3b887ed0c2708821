"""Typed, bounded reads of a JSON object's fields. Null means the default; what nobody reads is refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from kinetic_core.errors import describe
from kinetic_core.server.failures import InvalidField
from kinetic_core.server.json_body import type_name


class Fields:
    """One object of a body. Every read notes the field's name; `finish` refuses the rest.

    path: how messages call the object: ``""`` for the body, else such as ``messages[2]``.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        """The field's full name."""
        return f"{self._path}.{field}" if self._path else field

    def take(self, field: str) -> Any:
        """The field's value as parsed; None when it is absent or null."""
        self._read.add(field)
        return self._values.get(field)

    def has(self, field: str) -> bool:
        """Whether the field is there, null included."""
        return field in self._values

    def fail(
        self, field: str, what: str, *, got: object = None, expected: object = None, hint: str | None = None
    ) -> NoReturn:
        """Raise InvalidField for a field."""
        raise InvalidField(
            describe(what, where=self.name(field), got=got, expected=expected, hint=hint), self.name(field)
        )

    def number(
        self, field: str, default: float, minimum: float, maximum: float, *, above_minimum: bool = False
    ) -> float:
        """A number from `minimum` (left out with `above_minimum`) to `maximum`."""
        value = self.take(field)
        if value is None:
            return default
        expected = f"a number {'above' if above_minimum else 'from'} {minimum:g}, at most {maximum:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(field, "not a number", got=type_name(value), expected=expected)
        # Compared before any conversion: an integer of JSON may be larger than any float.
        if not minimum <= value <= maximum or (above_minimum and value == minimum):
            self.fail(field, "out of range", got=_short(value), expected=expected)
        return float(value)

    def integer(self, field: str, default: Any, minimum: int, maximum: int) -> Any:
        """An integer from `minimum` to `maximum`, or `default`."""
        value = self.take(field)
        if value is None:
            return default
        return self.integer_value(field, value, minimum, maximum)

    def integer_value(self, field: str, value: Any, minimum: int, maximum: int) -> int:
        """`value`, which belongs to `field`, as an integer in range. 3.0 is an integer, true and "3" are not."""
        expected = f"an integer from {minimum} to {maximum}"
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(
                field,
                "not an integer",
                got=_short(value) if isinstance(value, float) else type_name(value),
                expected=expected,
            )
        if not minimum <= value <= maximum:
            self.fail(field, "out of range", got=_short(value), expected=expected)
        return int(value)

    def boolean(self, field: str, default: bool) -> bool:
        """True or false."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(field, "not a boolean", got=type_name(value), expected="true or false")
        return bool(value)

    def string(self, field: str, default: Any = None) -> Any:
        """A string, or `default`."""
        value = self.take(field)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(field, "not a string", got=type_name(value), expected="a string")
        return value

    def object(self, field: str) -> Fields:
        """An object's fields; an empty object when the field is absent or null."""
        value = self.take(field)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.fail(field, "not an object", got=type_name(value), expected="an object")
        return Fields(value, self.name(field))

    def names(self) -> list[str]:
        """The names that the object has."""
        return list(self._values)

    def accept(self, *fields: str) -> None:
        """Let fields pass that change nothing here."""
        self._read.update(fields)

    def refuse(self, field: str, harmless: Collection[Any], hint: str | None = None) -> None:
        """Refuse a field that this server does not support, unless its value asks for nothing."""
        value = self.take(field)
        if value is None or any(type(value) is type(other) and value == other for other in harmless):
            return
        raise InvalidField(
            describe("this field is not supported", where=self.name(field), hint=hint),
            self.name(field),
            code="unsupported_parameter",
        )

    def finish(self) -> None:
        """Refuse the fields that nobody read."""
        for field in self._values:
            if field not in self._read:
                near = difflib.get_close_matches(field[:100], self._read, n=1)
                shown = field if len(field) <= 100 else field[:100] + "…"
                raise InvalidField(
                    describe(
                        "unknown field",
                        where=self._path or None,
                        got=repr(shown),
                        hint=f"did you mean {near[0]!r}?" if near else "docs/server.md lists the fields",
                    ),
                    self.name(shown),
                    code="unknown_parameter",
                )


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return str(value)
