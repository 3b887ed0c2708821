"""Every exception that Kinetic raises on purpose.

    KineticError                      exit status 1
    ├── ModelError                    1   the model file or what it describes
    │   ├── GGUFError                     the bytes of the file: header, metadata, tensor table, split set
    │   ├── MetadataError                 a metadata key: missing, of another type, out of range
    │   ├── TensorError                   a tensor: missing, unknown, of another shape or type
    │   ├── UnsupportedModelError         a valid file that no installed plugin can run
    │   ├── TokenizerError                the vocabulary, merges or pre-tokenizer
    │   └── TemplateError                 the chat template: syntax, run time, bounds
    ├── ModelNotFoundError            4   no such path, repository or known name
    ├── DownloadError                 5   fetching or verifying a file failed
    ├── PluginError                   6   a plugin: broken, duplicate or unknown name
    ├── RequestError                  7   what a caller asked for; `field` names it
    │   └── ContextLengthError            prompt longer than the context
    ├── CapacityError                 8   memory for states or keys and values, queue full
    ├── BackendError                  9   a kernel backend: compile, load, worker
    │   └── NumericalError                a NaN logit
    └── Cancelled                     10  the request was cancelled

A message says what went wrong, where, what was got, what was expected and what to do next; use `describe` to build
one. `exit_status` is what a command ends with; docs/errors.md lists them. Status 2 is a usage error of the command
line itself.
"""

from __future__ import annotations

from typing import ClassVar


def describe(
    what: str,
    *,
    where: str | None = None,
    got: object = None,
    expected: object = None,
    hint: str | None = None,
) -> str:
    """One line: what, where, got, expected, next step. Empty parts are left out."""
    parts = [what]
    if where:
        parts.append(f"in {where}")
    line = " ".join(parts)
    if got is not None:
        line += f": got {shown(got) if type(got) is int else got}"
    if expected is not None:
        line += f", expected {expected}"
    if hint:
        line += f"; {hint}"
    return line


def shown(value: object, limit: int = 80) -> str:
    """A caller's value for a message: its `repr`, cut to `limit` characters, whatever the value is."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes out (sys.set_int_max_str_digits), or one inside
        if isinstance(value, int):
            return f"a whole number of {value.bit_length()} bits"
        return f"a {type(value).__name__} that holds a number too long to write out"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class KineticError(Exception):
    """The root: catch it to catch everything that Kinetic raises on purpose."""

    exit_status: ClassVar[int] = 1


class ModelError(KineticError):
    """The model file, or what it describes, cannot be used."""

    exit_status = 1


class GGUFError(ModelError):
    """The bytes of a GGUF file are not a valid, complete file.

    `key` names the metadata key or tensor, `offset` is the byte offset in the file; both may be None.
    """

    def __init__(self, message: str, *, key: str | None = None, offset: int | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.offset = offset


class MetadataError(ModelError):
    """A metadata key is missing, of another type, or out of range."""


class TensorError(ModelError):
    """A tensor is missing, unknown, or of another shape or type than the architecture describes."""


class UnsupportedModelError(ModelError):
    """The file is valid, but no installed plugin can run it."""


class TokenizerError(ModelError):
    """The vocabulary, the merges or the pre-tokenizer cannot be used."""


class TemplateError(ModelError):
    """The chat template failed: syntax, run time, or its bounds on time and output size."""


class ModelNotFoundError(KineticError):
    """No such path, repository or known name."""

    exit_status = 4


class DownloadError(KineticError):
    """Fetching a file, or verifying what was fetched, failed."""

    exit_status = 5


class PluginError(KineticError):
    """A plugin is broken, or a name is registered twice or not at all."""

    exit_status = 6


class RequestError(KineticError):
    """What a caller asked for cannot be done; `field` names the option at fault."""

    exit_status = 7

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(RequestError):
    """The prompt is longer than the context: never cut silently."""

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, the context holds {context_tokens} (one is left for the "
            "answer); shorten the prompt or raise --ctx",
            field="prompt",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class CapacityError(KineticError):
    """No memory is left for states, for keys and values, or no place in the queue."""

    exit_status = 8


class BackendError(KineticError):
    """A kernel backend cannot compile, load or run."""

    exit_status = 9


class NumericalError(BackendError):
    """The model produced a NaN logit."""


class Cancelled(KineticError):  # noqa: N818 - reads as the state it reports
    """The request was cancelled by its caller."""

    exit_status = 10
