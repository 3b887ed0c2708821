"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kinetic_core.engine.request import Chunk, GenerationRequest
from kinetic_core.errors import KineticError, RequestError, TemplateError
from kinetic_core.server.answers import Answer
from kinetic_core.server.endpoint import CompletionEndpoint, Plan, Writer
from kinetic_core.server.failures import InvalidField
from kinetic_core.server.fields import Fields
from kinetic_core.server.logprobs import chat_logprobs
from kinetic_core.server.messages import read_messages, read_template_variables
from kinetic_core.server.parameters import MAX_TOP_LOGPROBS, read_common

_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str | None], ...] = (
    ("tools", ([],), None),
    ("tool_choice", ("none", "auto"), None),
    ("functions", ([],), None),
    ("function_call", ("none", "auto"), None),
    ("response_format", ({"type": "text"},), "answers are plain text"),
    ("modalities", (["text"],), "answers are plain text"),
    ("audio", (), "answers are plain text"),
    ("prediction", (), None),
    ("reasoning_effort", (), "templates that know such a choice take it in chat_template_kwargs"),
    ("verbosity", ("medium",), None),
    ("web_search_options", (), None),
    ("moderation", (), None),
)


class ChatCompletions(CompletionEndpoint):
    """Answers a conversation, rendered by the model's own chat template."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    event_object_name = "chat.completion.chunk"

    def plan(self, fields: Fields) -> Plan:
        """See `CompletionEndpoint.plan`."""
        for field, harmless, hint in _UNSUPPORTED:
            fields.refuse(field, harmless, hint)
        fields.boolean("parallel_tool_calls", True)
        logprobs = _read_logprobs(fields)
        common = read_common(fields, self.model, max_n=self.settings.max_n, default_max_tokens=None, logprobs=logprobs)
        messages = read_messages(fields)
        variables = read_template_variables(fields)
        fields.finish()
        request = GenerationRequest(
            prompt_ids=self._encode(messages, variables),
            sampling=common.sampling,
            max_tokens=common.max_tokens,
            stop=common.stop,
            n=common.n,
            salt=common.salt,
        )
        return Plan(
            ("messages",), (request,), common.n, common.stream, common.include_usage, ChatWriter(logprobs is not None)
        )

    def _encode(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> tuple[int, ...]:
        try:
            return self.model.encode_chat(messages, variables)
        except TemplateError as error:
            raise InvalidField(*_explain(error, messages), code="template_error") from error
        except RequestError as error:
            if error.field in (None, "messages"):
                raise InvalidField(*_explain(error, messages)) from error
            raise


def _explain(error: KineticError, messages: list[dict[str, Any]]) -> tuple[str, str]:
    # Most templates want at most one system message, and want it first; what they raise rarely says where.
    late = next((index for index, message in enumerate(messages) if index and message["role"] == "system"), None)
    if late is None:
        return str(error), "messages"
    return f"{error}; messages[{late}] is a system message that is not the first message", f"messages[{late}]"


def _read_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs", False)
    top: int | None = fields.integer("top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if not wanted and top is not None:
        fields.fail("top_logprobs", "given without logprobs", expected='"logprobs": true beside it')
    return (top or 0) if wanted else None


class ChatWriter(Writer):
    """OpenAI's chat choices."""

    def __init__(self, logprobs: bool) -> None:
        self._logprobs = logprobs
        self._begun: set[int] = set()

    def choice(self, answer: Answer, first: Answer) -> dict[str, Any]:
        """A whole choice."""
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(answer.logprobs) if self._logprobs else None,
            "finish_reason": answer.finish_reason,
        }

    def pieces(self, choice: int, chunk: Chunk) -> Sequence[dict[str, Any]]:
        """The role first, then text with its tokens, then how it ended."""
        pieces = []
        if choice not in self._begun:
            self._begun.add(choice)
            pieces.append(_piece(choice, {"role": "assistant", "content": ""}))
        if chunk.text or (self._logprobs and chunk.logprobs):
            logprobs = chat_logprobs(chunk.logprobs) if self._logprobs else None
            pieces.append(_piece(choice, {"content": chunk.text}, logprobs))
        if chunk.finish_reason is not None:
            pieces.append(_piece(choice, {}, finish_reason=chunk.finish_reason))
        return pieces


def _piece(
    choice: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
