"""The process that renders chat templates. Run by `kinetic_core.text.template_process`, never imported by it.

A template comes from a model file and is not trusted, so it runs here: in Jinja2's immutable sandbox, in a process of
its own that can be killed, with bounds on time, memory and output. This file imports Jinja2 and the standard library
only, so that the process starts fast.

Messages in both directions are a 4-byte little-endian length and that many bytes of JSON. The first answer, `{}`, says
that the process is ready. A request has `source`, `variables`, `marks` (characters that JSON output must not escape),
`limits` {seconds, characters}; an answer has `text`, or `error` (a kind) with `message` and perhaps `index`.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import re
import signal
import struct
import sys
import time
import traceback
from collections import OrderedDict
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

LENGTH = struct.Struct("<I")
MEMORY_BYTES = 512 << 20
MAX_INTEGER_BITS = 4096
COMPILED_TEMPLATES = 8
# How long to look for the message that made a template refuse, after it did.
SEARCH_SECONDS = 0.5


class RefusedError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class BoundsError(Exception):
    """The template asked for more than its bounds allow."""


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the assistant's part for training: just its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's immutable sandbox, with operators that refuse to make huge values."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    characters = 0

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, after a look at how large its result would be."""
        sized = (str, bytes, list, tuple)
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, sized) and isinstance(count, int) and len(value) * count > self.characters:
                    raise BoundsError(f"a repetition of {len(value) * count} items")
            if _bits(left) + _bits(right) > MAX_INTEGER_BITS:
                raise BoundsError("a huge integer")
        elif operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            if len(left) + len(right) > self.characters:
                raise BoundsError(f"a value of {len(left) + len(right)} items")
        elif operator == "**" and isinstance(right, int) and _bits(left) * abs(right) > MAX_INTEGER_BITS:
            raise BoundsError("a huge integer")
        elif operator == "%" and isinstance(left, str):
            widths = re.findall(r"\d+", left)
            if "*" in left or any(len(width) > 4 for width in widths):
                raise BoundsError("a format with a huge width")
        return super().call_binop(context, operator, left, right)


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _raise_exception(message: object) -> NoReturn:
    raise RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class Renderer:
    """The environment and the templates compiled in it."""

    def __init__(self) -> None:
        self._environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag], cache_size=0
        )
        self._environment.filters["tojson"] = self._tojson
        self._environment.globals.pop("lipsum", None)
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now
        self._compiled: OrderedDict[str, jinja2.Template] = OrderedDict()
        self._marks = ""

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as chat templates expect it: no HTML escaping, other letters as they are."""
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if ensure_ascii and self._marks:
            escapes = {json.dumps(mark)[1:-1]: mark for mark in self._marks}
            pattern = "|".join([r"\\\\", *map(re.escape, escapes)])
            text = re.sub(pattern, lambda found: escapes.get(found[0], found[0]), text)
        return text

    def _template(self, source: str) -> jinja2.Template:
        template = self._compiled.pop(source, None)
        if template is None:
            template = self._environment.from_string(source)
        self._compiled[source] = template
        while len(self._compiled) > COMPILED_TEMPLATES:
            self._compiled.popitem(last=False)
        return template

    def render(self, source: str, variables: dict[str, Any], characters: int, marks: str) -> str:
        """The rendered text. Raises BoundsError when it grows beyond `characters`."""
        self._environment.characters = characters
        self._marks = marks
        out = io.StringIO()
        for piece in self._template(source).generate(variables):
            out.write(piece)
            if out.tell() > characters:
                raise BoundsError(f"more than {characters} characters of output")
        return out.getvalue()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve one request; every failure becomes an answer."""
        source, variables = request["source"], request["variables"]
        characters, marks = request["limits"]["characters"], request["marks"]
        answer = self._attempt(source, variables, characters, marks)
        if answer.get("error") in ("refused", "runtime"):
            answer["index"] = self._failing_message(source, variables, characters, marks, answer)
        return answer

    def _attempt(self, source: str, variables: dict[str, Any], characters: int, marks: str) -> dict[str, Any]:
        try:
            return {"text": self.render(source, variables, characters, marks)}
        except RefusedError as error:
            return {"error": "refused", "message": str(error)}
        except (BoundsError, MemoryError, RecursionError) as error:
            return {"error": "bounds", "message": str(error) or type(error).__name__}
        except SecurityError as error:
            return {"error": "security", "message": str(error)}
        except jinja2.TemplateSyntaxError as error:
            return {"error": "syntax", "message": f"{error.message} (line {error.lineno})"}
        except Exception as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
            place = f" (line {lines[-1]})" if lines else ""
            return {"error": "runtime", "message": f"{type(error).__name__}: {error}{place}"}

    def _failing_message(
        self, source: str, variables: dict[str, Any], characters: int, marks: str, failure: dict[str, Any]
    ) -> int | None:
        """Index of the first message with which the template gives the same failure; None if not found in time."""
        until = time.monotonic() + SEARCH_SECONDS
        messages = variables["messages"]
        for count in range(1, len(messages) + 1):
            if time.monotonic() > until:
                break
            # Another complaint about half a conversation says nothing.
            if self._attempt(source, {**variables, "messages": messages[:count]}, characters, marks) == failure:
                return count - 1
        return None


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # no such limits on this platform: time and size bounds remain
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError):  # the platform names the limit but does not have it
        return


def _send(out: BinaryIO, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    out.write(LENGTH.pack(len(data)) + data)
    out.flush()


def main() -> None:
    """Answer requests until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that started this one
    _limit_memory()
    # Standard output carries the protocol: nothing else may write to it.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    sys.stdout = nowhere
    renderer = Renderer()
    _send(out, {})
    while True:
        head = sys.stdin.buffer.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        request = json.loads(sys.stdin.buffer.read(LENGTH.unpack(head)[0]))
        # Should the parent be gone when a template runs for ever, this ends the process; it needs no interpreter lock.
        faulthandler.dump_traceback_later(request["limits"]["seconds"] + 1, exit=True, file=nowhere)
        answer = renderer.answer(request)
        faulthandler.cancel_dump_traceback_later()
        _send(out, answer)


if __name__ == "__main__":
    main()
