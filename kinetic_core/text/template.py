"""Chat templates: messages to the text, and the token ids, that a model was trained on.

The template is Jinja2 source from the model's file. It runs in a sandbox in a process of its own, see
`kinetic_core.text.template_worker`. `ChatTemplate.encode` keeps apart what the template wrote and what a message
says: only the template can name special tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinetic_core.errors import RequestError, TemplateError, describe
from kinetic_core.text.special import Marks, SpecialTexts, choose_marks
from kinetic_core.text.template_process import TemplateWorker, shared_worker

if TYPE_CHECKING:
    from kinetic_core.text.tokenizer import Tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"
TOOL_TEMPLATE_KEY = "tokenizer.chat_template.tool_use"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template for files without one whose vocabulary has ChatML's tokens."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})
"""Roles that a template may write into a special token (`'<|' + role + '|>'`); any other role is text."""

MAX_DEPTH = 64
DEFAULT_SECONDS = 5.0
DEFAULT_CHARACTERS = 8_000_000

Message = Mapping[str, Any]


def _guarded(value: Any, texts: SpecialTexts, marks: Marks) -> Any:
    """`value` with the special texts in every string of it, keys included, broken by marks."""
    if isinstance(value, str):
        return texts.guard(value, marks)
    if isinstance(value, Mapping):
        return {_guarded(key, texts, marks): _guarded(item, texts, marks) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_guarded(item, texts, marks) for item in value]
    return value


@dataclass(frozen=True)
class _Form:
    """What a trial with one plain user message showed.

    works: whether the message's text appeared at all. wants_parts: whether only as a list of parts.
    """

    works: bool
    wants_parts: bool


class ChatTemplate:
    """A chat template, ready to render.

    Example:
        template = ChatTemplate.from_metadata(metadata, tokenizer)
        template.start()  # optional: the worker process is then ready when the first chat comes
        ids = template.encode(tokenizer, [{"role": "user", "content": "Hello"}])
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        tool_source: str | None = None,
        seconds: float = DEFAULT_SECONDS,
        characters: int = DEFAULT_CHARACTERS,
        worker: TemplateWorker | None = None,
    ) -> None:
        """Make a template.

        source: Jinja2 source. tool_source: what to use in its place when tools are given.
        bos_token, eos_token: texts that the template may write.
        seconds, characters: bounds of one rendering; beyond them it is stopped with a TemplateError.
        worker: the process to use; default the one that all templates share.
        """
        self.source = source
        self.tool_source = tool_source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.seconds = seconds
        self.characters = characters
        self._worker = worker if worker is not None else shared_worker()
        self._forms: dict[str, _Form] = {}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a GGUF file; ChatML for a file without one that has ChatML's tokens.

        Raises TemplateError if there is neither.
        """

        def text_of(token_id: int | None) -> str:
            return "" if token_id is None else tokenizer.token_text(token_id)

        source = _read_source(metadata, TEMPLATE_KEY)
        if source is None:
            if not {"<|im_start|>", "<|im_end|>"} <= tokenizer.special.ids.keys():
                raise TemplateError(
                    describe(
                        "the model has no chat template",
                        where=TEMPLATE_KEY,
                        got="no key",
                        expected="a template, or a vocabulary with <|im_start|> and <|im_end|>",
                        hint="use text completion, or a chat version of the model",
                    )
                )
            source = CHATML
        return cls(
            source,
            bos_token=text_of(tokenizer.bos_id),
            eos_token=text_of(tokenizer.eos_id),
            tool_source=_read_source(metadata, TOOL_TEMPLATE_KEY),
        )

    def start(self) -> None:
        """Start the worker process, without waiting for it."""
        self._worker.start()

    def render(
        self,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, special tokens written out. Use `encode` for ids.

        messages: mappings with `role` and `content` (a string, or parts {"type": "text", "text": …}), and whatever
            else the template reads.
        add_generation_prompt: whether the text ends where the assistant's answer begins.
        variables: further names that the template reads, such as enable_thinking.
        Raises RequestError, naming the message where it can, for messages that are malformed or that a template
        which works for a plain message refuses or fails on (a system message in the middle, say); TemplateError for a
        template that does not work or exceeds its bounds.
        """
        text, _ = self._render(None, messages, add_generation_prompt, tools, variables)
        return text

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The token ids of a conversation; arguments and errors as for `render`.

        Special tokens come from the template's own text only. Texts of special tokens inside messages, tools and
        variables become plain pieces; in assistant messages only those of control tokens do, because templates look
        for user-defined ones such as <think> in old answers. If the model wants BOS first and the template did not
        write it, it is added.
        """
        text, marks = self._render(tokenizer, messages, add_generation_prompt, tools, variables)
        ids = tokenizer.encode_rendered(text, marks)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def _render(
        self,
        tokenizer: Tokenizer | None,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[str, Marks]:
        """The rendered text, with marks inside the special texts that messages contain if there is a tokenizer."""
        if not messages:
            raise RequestError(describe("there are no messages", expected="at least one"), field="messages")
        checked = [_check_message(message, index) for index, message in enumerate(messages)]
        if tools is not None and not isinstance(tools, (list, tuple)):
            raise RequestError(
                describe("not tools", where="tools", got=type(tools).__name__, expected="a list"), field="tools"
            )
        _check_value(tools, "tools")
        _check_value(variables, "chat_template_kwargs")
        source = self.tool_source if tools and self.tool_source is not None else self.source
        wants_parts = self._form(source).wants_parts
        conversation: list[Any] = [_content_form(message, wants_parts) for message in checked]
        tool_list: Any = list(tools) if tools else None
        names: Any = dict(variables)
        marks = Marks("", "")
        if tokenizer is not None:
            marks = choose_marks(_strings([source, conversation, tool_list, names]))
            for index, message in enumerate(conversation):
                texts = tokenizer.control if message["role"] == "assistant" else tokenizer.special
                kept_role = {"role": message["role"]} if message["role"] in ROLES else {}
                conversation[index] = {**_guarded(message, texts, marks), **kept_role}
            tool_list = _guarded(tool_list, tokenizer.special, marks)
            names = _guarded(names, tokenizer.special, marks)
        answer = self._ask(source, conversation, add_generation_prompt, marks, tools=tool_list, variables=names)
        if "text" in answer:
            return str(answer["text"]), marks
        reason = marks.drop(answer["message"])
        if answer["error"] == "refused" or (answer["error"] == "runtime" and self._forms[source].works):
            index = answer["index"]
            field = "messages" if index is None else f"messages[{index}]"
            raise RequestError(
                describe("the model's chat template does not take these messages", where=field, got=reason),
                field=field,
            )
        raise _failure(answer["error"], reason)

    def _ask(
        self,
        source: str,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        marks: Marks,
        *,
        tools: Any = None,
        variables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The worker's answer to one rendering."""
        names = {
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        }
        limits = {"seconds": self.seconds, "characters": self.characters}
        request = {"source": source, "variables": names, "marks": marks.inside + marks.quote, "limits": limits}
        try:
            return self._worker.ask(request, self.seconds)
        except TypeError as error:  # a value that JSON does not have
            raise RequestError(describe("not a JSON value", where="messages", got=error), field="messages") from error

    def _form(self, source: str) -> _Form:
        """How the template takes one plain message; tried once."""
        known = self._forms.get(source)
        if known is None:
            needle = "needle"
            shown = []
            for content in (needle, [{"type": "text", "text": needle}]):
                answer = self._ask(source, [{"role": "user", "content": content}], False, Marks("", ""))
                if answer.get("error") in ("bounds", "security", "syntax"):
                    raise _failure(answer["error"], answer["message"])
                shown.append(needle in answer.get("text", ""))
                if shown[0]:
                    break
            known = self._forms[source] = _Form(works=any(shown), wants_parts=not shown[0] and any(shown))
        return known


def _failure(kind: str, reason: str) -> TemplateError:
    whats = {
        "bounds": "the chat template exceeds its bounds",
        "security": "the chat template does what the sandbox forbids",
        "syntax": "the chat template is not valid Jinja2",
        "runtime": "the chat template failed",
    }
    return TemplateError(describe(whats[kind], where=TEMPLATE_KEY, got=reason))


def _content_form(message: dict[str, Any], wants_parts: bool) -> dict[str, Any]:
    """The message with its content in the form that the template reads: a string, or parts."""
    content = message.get("content")
    if content is None:
        return message
    texts = [content] if isinstance(content, str) else content
    if wants_parts:
        return {**message, "content": [{"type": "text", "text": text} for text in texts]}
    return {**message, "content": "\n".join(texts)}


def _read_source(metadata: Mapping[str, object], key: str) -> str | None:
    source = metadata.get(key)
    if source is None:
        return None
    if not isinstance(source, str):
        raise TemplateError(
            describe("the chat template is not text", where=key, got=type(source).__name__, expected="a string")
        )
    return source


def _check_message(message: object, index: int) -> dict[str, Any]:
    """A copy of a message with a role; content in parts becomes a list of texts."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            describe("not a message", where=where, expected="a mapping with a role and a content"), field=where
        )
    _check_value(message, where)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            describe(
                "not a content", where=f"{where}.content", got=type(content).__name__, expected="a string or parts"
            ),
            field=f"{where}.content",
        )
    texts: list[str] = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            field = f"{where}.content[{number}]"
            raise RequestError(
                describe("only text is understood", where=field, expected='{"type": "text", "text": "…"}'),
                field=field,
            )
        texts.append(text)
    return {**message, "content": texts}


def _check_value(value: Any, where: str, depth: int = 0) -> None:
    """Raise RequestError, naming the place, for lone surrogates and for nesting that is too deep."""
    if depth > MAX_DEPTH:
        raise RequestError(
            describe("nested too deep", where=where.split(".")[0], expected=f"at most {MAX_DEPTH} levels"),
            field=where.split(".")[0],
        )
    if isinstance(value, str):
        from kinetic_core.text.tokenizer import check_text

        check_text(value, where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_value(key, where, depth + 1)
            _check_value(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_value(item, f"{where}[{index}]", depth + 1)


def _strings(value: Any) -> Iterator[str]:
    """Every string inside a value, without recursion (the depth is checked later)."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value)
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
