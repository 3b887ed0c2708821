"""The messages of a chat request, and the variables that its template may be given."""

from __future__ import annotations

from typing import Any

from kinetic_core.server.failures import InvalidField
from kinetic_core.server.fields import Fields
from kinetic_core.server.json_body import type_name

ROLES = ("system", "developer", "user", "assistant")

RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "raise_exception",
        "self",
        "tokenizer",
    }
)
"""Variables of chat templates that the server itself sets, or that carry what it does not support."""


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation as a template takes it: role and content, both strings, and what else a message carries.

    Null content is the empty text; an array of text parts is joined; `developer` is called `system`.
    """
    value = fields.take("messages")
    if not isinstance(value, list) or not value:
        got = "an empty array" if value == [] else "nothing" if not fields.has("messages") else type_name(value)
        fields.fail("messages", "no messages", got=got, expected="an array of at least one message")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _read_message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidField(f"not a message in {path}: got {type_name(value)}, expected an object", path)
    fields = Fields(value, path)
    role = fields.string("role")
    if role in ("tool", "function"):
        raise InvalidField(
            f"this role is not supported in {path}.role: got {role!r}, expected one of {', '.join(ROLES)}",
            f"{path}.role",
            code="unsupported_parameter",
        )
    if role not in ROLES:
        got = "nothing" if role is None else repr(role[:40])
        fields.fail("role", "no such role", got=got, expected=f"one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _read_content(fields)}
    name = fields.string("name")
    if name is not None:
        message["name"] = name
    if role == "assistant":
        reasoning = fields.string("reasoning_content")
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        # What OpenAI's clients send back of an answer, empty.
        fields.refuse("tool_calls", ([],))
        fields.refuse("annotations", ([],))
        for field in ("function_call", "audio", "refusal"):
            fields.refuse(field, ())
    fields.finish()
    return message


def _read_content(fields: Fields) -> str:
    if not fields.has("content"):
        fields.fail("content", "no content", got="nothing", expected="a string, an array of text parts, or null")
    value = fields.take("content")
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        got = "an empty array" if value == [] else type_name(value)
        fields.fail("content", "not a message's content", got=got, expected="a string, an array of text parts, or null")
    return "".join(_read_part(part, f"{fields.name('content')}[{index}]") for index, part in enumerate(value))


def _read_part(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        raise InvalidField(f"not a content part in {path}: got {type_name(value)}, expected an object", path)
    part = Fields(value, path)
    kind = part.string("type")
    if kind != "text":
        got = "nothing" if kind is None else repr(kind[:40])
        raise InvalidField(
            f"this kind of content is not supported in {path}.type: got {got}, expected 'text'",
            f"{path}.type",
            code="invalid_value" if kind is None else "unsupported_parameter",
        )
    text = part.string("text")
    if text is None:
        part.fail("text", "no text", got="nothing", expected="a string")
    part.finish()
    return str(text)


def read_template_variables(fields: Fields) -> dict[str, Any]:
    """The variables of `chat_template_kwargs`, for example {"enable_thinking": false}."""
    given = fields.object("chat_template_kwargs")
    variables: dict[str, Any] = {}
    for name in given.names():
        if name in RESERVED_VARIABLES or not name.isidentifier() or name.startswith("_"):
            given.fail(
                name[:100],
                "not a variable that a request may set",
                expected="a name that the server does not set itself",
            )
        variables[name] = given.take(name)
    return variables
