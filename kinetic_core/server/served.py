"""The model behind the server: the few things that endpoints ask of it, under one name."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinetic_core.engine.answer import token_bytes
from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from kinetic_core.errors import TemplateError

if TYPE_CHECKING:
    from kinetic_core.engine.generation import Generation
    from kinetic_core.engine.model import Model

log = logging.getLogger("kinetic.server")

_FINGERPRINT_DIGITS = 12


class ServedModel:
    """A loaded model with the name it is served under.

    created: Unix time at which serving began. fingerprint: short form of the kernel digest: two servers with the same
    one, the same model file and the same seed give the same answer.
    """

    def __init__(self, model: Model, name: str | None = None) -> None:
        self._model = model
        self.name = name or model.name
        self.created = int(time.time())
        self.sampling: SamplingOptions = model.defaults
        self.vocab_size: int = model.vocab_size
        self.context_tokens: int = model.context_length
        self.fingerprint = f"kinetic-{model.kernel_digest[:_FINGERPRINT_DIGITS]}"

    def start(self) -> None:
        """Make ready what the first chat would wait for."""
        try:
            self._model.template.start()
        except TemplateError as error:
            log.warning("chat completions will be refused: %s", error)

    @property
    def failure(self) -> BaseException | None:
        """Why the engine no longer runs; None while it does."""
        return self._model.engine.failure

    def submit(self, request: GenerationRequest) -> Generation:
        """Give a request to the engine. Raises RequestError or CapacityError."""
        return self._model.engine.submit(request)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids of a conversation. Slow: a thread's work. Raises RequestError or TemplateError."""
        return tuple(self._model.template.encode(self._model.tokenizer, messages, **variables))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """The ids of a text; texts of special tokens in it are plain text. Slow: a thread's work."""
        return tuple(self._model.tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; those that only pad the output layer have none."""
        tokenizer = self._model.tokenizer
        return tokenizer.decode([token_id for token_id in ids if token_id < tokenizer.vocab_size])

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of an id; none for one that only pads the output layer."""
        return token_bytes(self._model.tokenizer, token_id)
