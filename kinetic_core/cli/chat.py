"""``kinetic chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from kinetic_core.cli.console import NO_DRAFTERS, note, one_line, printable
from kinetic_core.cli.options import (
    BackendOption,
    ContextOption,
    FrequencyOption,
    KVOption,
    MaxTokensOption,
    MinPOption,
    ModelArgument,
    NoDraftOption,
    PresenceOption,
    RepeatOption,
    SeedOption,
    StopOption,
    StrictOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    answer_options,
    load_model,
)
from kinetic_core.cli.run import speed_line
from kinetic_core.errors import ContextLengthError, KineticError

if TYPE_CHECKING:
    from kinetic_core.engine.model import Model

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message (without TEXT: show it)
/help          this list
/quit          end (also Ctrl-D)
Enter sends; Alt-Enter starts a new line. Ctrl-C stops an answer, or empties the line."""

HISTORY_FILE = "chat_history"


def chat(
    model: ModelArgument = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    repeat_penalty: RepeatOption = None,
    presence_penalty: PresenceOption = None,
    frequency_penalty: FrequencyOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    threads: ThreadsOption = None,
    ctx: ContextOption = None,
    kv: KVOption = "f16",
    backend: BackendOption = "auto",
    no_draft: NoDraftOption = False,
    strict: StrictOption = False,
) -> None:
    """Talk with a model. Messages also come from a pipe, one a line."""
    options = answer_options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
    )
    from kinetic_core.engine.validate import validate_request
    from kinetic_core.models import KNOWN_MODELS

    loaded = load_model(
        model, threads=threads, ctx=ctx, kv=kv, backend=backend, strict=strict, parallel=1, draft=not no_draft
    )
    with loaded:
        # An option out of range is refused before the first message.
        validate_request(loaded.request([0], **options), loaded.vocab_size, loaded.context_length)
        _ = loaded.template  # and so is a model that cannot chat
        known = KNOWN_MODELS.get(loaded.name)
        title = known.title if known else loaded.metadata.get_str("general.name", loaded.name)
        note(f"{title} · context {loaded.context_length} tokens · /help lists the commands")
        if not no_draft and not loaded.engine.statistics()["drafters"]:
            note(f"drafts: {NO_DRAFTERS}")
        Conversation(loaded, options, system).run(_typed() if _on_terminal() else _piped())


class Conversation:
    """The messages so far, and what is done with a line that the user enters.

    options: passed on with every request. system: the system message, or None.
    """

    def __init__(
        self, model: Model, options: dict[str, Any], system: str | None = None, out: TextIO | None = None
    ) -> None:
        self._model = model
        self._options = options
        self._out = out or sys.stdout
        self._system = system
        self._messages: list[dict[str, str]] = []

    def run(self, lines: Iterator[str]) -> None:
        """Take lines until they end or one is /quit."""
        for line in lines:
            if not line.strip():
                continue
            if line.startswith("/"):
                if not self.command(line):
                    return
            else:
                self.answer(line)

    def command(self, line: str) -> bool:
        """Do what a line that starts with a slash says; False when it ends the conversation."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name == "/reset":
            self._messages.clear()
            self._say("The conversation is forgotten.")
        elif name == "/system":
            if rest.strip():
                self._system = rest.strip()
                self._say("The system message is set.")
            else:
                self._say(self._system if self._system is not None else "No system message is set.")
        elif name == "/help":
            self._say(HELP)
        else:
            self._say(f"There is no command {one_line(name)}; /help lists them.")
        return True

    def answer(self, text: str) -> None:
        """Answer a message. An error is one line and leaves the conversation as it was."""
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            self._stream(pieces)
        except KeyboardInterrupt:
            self._say("")  # the terminal has put ^C behind the answer
            note("stopped")
        except ContextLengthError as error:
            note(
                f"error: the conversation is too long ({error.prompt_tokens} of {error.context_tokens} tokens); /reset"
            )
        except KineticError as error:
            note(f"error: {error}")
        answered = "".join(pieces)
        if answered:
            self._messages.append({"role": "assistant", "content": answered})
        else:
            self._messages.pop()

    def _stream(self, pieces: list[str]) -> None:
        """Print an answer as it comes and collect its pieces, whatever interrupts it."""
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        began = time.perf_counter()
        first_s = 0.0
        for chunk in self._model.chat([*system, *self._messages], stream=True, **self._options):
            if not first_s and chunk.text:
                first_s = time.perf_counter() - began
            if chunk.text:
                pieces.append(chunk.text)
                self._out.write(printable(chunk.text))
                self._out.flush()
            if chunk.usage and chunk.timings:
                self._say("")
                speed = speed_line(chunk.usage, chunk.timings)
                why = " · the answer reached its length limit" if chunk.finish_reason == "length" else ""
                note(f"[{speed} · first after {first_s:.2f} s{why}]")

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def _on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _piped() -> Iterator[str]:
    for line in sys.stdin or ():
        yield line.rstrip("\r\n")


def _typed() -> Iterator[str]:
    """Lines from the terminal, with history and editing."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from kinetic_core.directories import cache_directory

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    path = cache_directory() / HISTORY_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        history: FileHistory | InMemoryHistory = FileHistory(str(path))
    except OSError as error:
        note(f"warning: the history is not kept: {error}")
        history = InMemoryHistory()
    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys, multiline=True)
    prompt = FormattedText([("bold", "> ")])
    while True:
        try:
            yield session.prompt(prompt, prompt_continuation="  ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
