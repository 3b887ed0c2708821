"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kinetic_core.engine.request import Chunk, GenerationRequest, TokenLogprob
from kinetic_core.errors import ContextLengthError, RequestError
from kinetic_core.server.answers import Answer
from kinetic_core.server.endpoint import CompletionEndpoint, Plan, Writer
from kinetic_core.server.failures import InvalidField
from kinetic_core.server.fields import Fields
from kinetic_core.server.json_body import type_name
from kinetic_core.server.logprobs import TextLogprobs, joined
from kinetic_core.server.parameters import MAX_TOP_LOGPROBS, read_common

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route: a text has no end of turn, so an answer would often run to the context's end."""


@attrs.frozen
class Prompt:
    """One prompt. text: what `echo` gives; tokens: the bytes of each id, when log-probabilities are echoed."""

    ids: tuple[int, ...]
    text: str
    tokens: tuple[bytes, ...] = ()


class Completions(CompletionEndpoint):
    """Continues a text or a sequence of token ids."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    event_object_name = "text_completion"

    def plan(self, fields: Fields) -> Plan:
        """See `CompletionEndpoint.plan`."""
        fields.refuse("suffix", ())
        logprobs: int | None = fields.integer("logprobs", None, 0, MAX_TOP_LOGPROBS)
        echo = fields.boolean("echo", False)
        common = read_common(
            fields,
            self.model,
            max_n=self.settings.max_n,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=logprobs,
        )
        fields.refuse("best_of", (common.n,), "ask for n answers")
        values = self._read_prompts(fields, common.n)
        fields.finish()
        echo_logprobs = echo and logprobs is not None
        prompts = [self._encode(value, path, echo, echo_logprobs) for path, value in values]
        requests = tuple(
            GenerationRequest(
                prompt_ids=prompt.ids,
                sampling=common.sampling,
                max_tokens=common.max_tokens,
                stop=common.stop,
                n=common.n,
                salt=common.salt,
                echo_logprobs=echo_logprobs,
            )
            for prompt in prompts
        )
        writer = TextWriter(prompts, common.n, echo=echo, logprobs=logprobs is not None)
        return Plan(tuple(path for path, _ in values), requests, common.n, common.stream, common.include_usage, writer)

    def _read_prompts(self, fields: Fields, n: int) -> list[tuple[str, str | list[Any]]]:
        """Each prompt with its name: one string or array of ids, or an array of such."""
        value = fields.take("prompt")
        if isinstance(value, str):
            return [("prompt", value)]
        if not isinstance(value, list) or not value:
            got = "an empty array" if value == [] else "nothing" if not fields.has("prompt") else type_name(value)
            fields.fail("prompt", "no prompt", got=got, expected="a string, token ids, or an array of such")
        if not isinstance(value[0], str | list):
            return [("prompt", value)]
        for index, item in enumerate(value):
            if not isinstance(item, str | list):
                fields.fail(f"prompt[{index}]", "not a prompt", got=type_name(item), expected="a string or token ids")
        most = self.settings.max_n
        if len(value) * n > most:
            fields.fail("prompt", "too many answers", got=f"{len(value)} prompts × {n}", expected=f"at most {most}")
        if len(value) == 1:
            return [("prompt", value[0])]
        return [(f"prompt[{index}]", item) for index, item in enumerate(value)]

    def _encode(self, value: str | list[Any], path: str, echo: bool, echo_logprobs: bool) -> Prompt:
        try:
            if isinstance(value, str):
                ids, text = self.model.encode_text(value), value
            else:
                if len(value) > self.model.context_tokens:  # before millions of ids are looked at one by one
                    raise ContextLengthError(len(value), self.model.context_tokens)
                reader = Fields({})
                top = self.model.vocab_size - 1
                ids = tuple(
                    reader.integer_value(f"{path}[{index}]", token_id, 0, top) for index, token_id in enumerate(value)
                )
                text = self.model.decode(ids) if echo else ""
            if not ids:
                raise InvalidField(f"the prompt has no tokens in {path}: expected at least one", path)
        except RequestError as error:
            error.field = path
            raise
        return Prompt(ids, text, tuple(map(self.model.token_bytes, ids)) if echo_logprobs else ())


class TextWriter(Writer):
    """OpenAI's text choices."""

    def __init__(self, prompts: Sequence[Prompt], n: int, *, echo: bool, logprobs: bool) -> None:
        self._prompts = prompts
        self._n = n
        self._echo = echo
        self._logprobs = logprobs
        self._running: dict[int, TextLogprobs] = {}
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob | None]] = {}
        self._waiting: dict[int, list[tuple[int, Chunk]]] = {}

    def choice(self, answer: Answer, first: Answer) -> dict[str, Any]:
        """A whole choice."""
        body = TextLogprobs()
        echoed, logprobs = self._begin(answer.index, body, first.prompt_logprobs)
        if logprobs is not None:
            logprobs = joined(logprobs, body.answer(answer.logprobs))
        return _piece(answer.index, echoed + answer.text, logprobs, answer.finish_reason)

    def pieces(self, choice: int, chunk: Chunk) -> Sequence[dict[str, Any]]:
        """Text with its tokens; the first carries the echo, the last how it ended."""
        if not (self._echo and self._logprobs):
            return self._pieces(choice, chunk)
        # Only the prompt's first choice is told the prompt's log-probabilities; the others wait until it was.
        prompt = choice // self._n
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = chunk.prompt_logprobs
        waiting = self._waiting.setdefault(prompt, [])
        waiting.append((choice, chunk))
        if prompt not in self._prompt_logprobs:
            return ()
        pieces = [piece for held in waiting for piece in self._pieces(*held)]
        waiting.clear()
        return pieces

    def _pieces(self, choice: int, chunk: Chunk) -> Sequence[dict[str, Any]]:
        text, logprobs = "", None
        if choice not in self._running:
            self._running[choice] = TextLogprobs()
            text, logprobs = self._begin(choice, self._running[choice], self._prompt_logprobs.get(choice // self._n))
        elif self._logprobs:
            logprobs = self._running[choice].answer(())
        if logprobs is not None:
            logprobs = joined(logprobs, self._running[choice].answer(chunk.logprobs))
        text += chunk.text
        if not text and chunk.finish_reason is None and not (logprobs and logprobs["tokens"]):
            return ()
        return (_piece(choice, text, logprobs, chunk.finish_reason),)

    def _begin(
        self, choice: int, body: TextLogprobs, prompt_logprobs: Sequence[TokenLogprob | None] | None
    ) -> tuple[str, dict[str, Any] | None]:
        """What comes before a choice's first token: the echoed text and its tokens' log-probabilities."""
        prompt = self._prompts[choice // self._n]
        if not self._echo:
            return "", body.answer(()) if self._logprobs else None
        if not self._logprobs:
            return prompt.text, None
        tokens = list(zip(prompt.tokens, prompt_logprobs or (), strict=True))
        return prompt.text, body.prompt(tokens, prompt.text)


def _piece(choice: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
