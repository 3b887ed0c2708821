"""The Python interface: `load` a model, then generate, stream, chat, tokenize, look at logits."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.engine.engine import Engine
from kinetic_core.engine.request import Chunk, Completion, GenerationRequest, SamplingOptions
from kinetic_core.engine.sizing import choose_sizes
from kinetic_core.engine.validate import MAX_TOP_K, RANGES, unknown_option
from kinetic_core.errors import CapacityError, RequestError, describe, shown
from kinetic_core.interfaces.backend import LoadOptions
from kinetic_core.models import TINY_HYBRID
from kinetic_core.plugins import load_registry
from kinetic_core.program.record import record_program
from kinetic_core.text import ChatTemplate, Tokenizer
from kinetic_core.text.template import TEMPLATE_KEY
from kinetic_core.text.template_process import shared_worker

if TYPE_CHECKING:
    from kinetic_core.gguf import Metadata, TensorSource
    from kinetic_core.interfaces.architecture import Architecture
    from kinetic_core.interfaces.backend import Executable, Progress
    from kinetic_core.interfaces.drafter import Drafter
    from kinetic_core.plugins import Registry
    from kinetic_core.program import Program

NO_DRAFTER = "none"
"""The drafter of the core, which guesses nothing."""

_SAMPLING_NAMES = frozenset(field.name for field in attrs.fields(SamplingOptions))
_REQUEST_NAMES = frozenset({"max_tokens", "stop", "n", "ignore_end", "echo_logprobs", "draft", "forced_ids", "salt"})


class Model:
    """A loaded model. Made by `load`; safe to use from several threads, whose requests share each step.

    ::

        with kinetic_core.load("smollm2") as model:
            print(model.chat([{"role": "user", "content": "Name one river."}]).text)

    Options of `generate`, `stream` and `chat` are the fields of `SamplingOptions` (temperature, top_k, top_p, min_p,
    repeat_penalty, presence_penalty, frequency_penalty, logit_bias, seed, logprobs) and max_tokens, stop, n,
    ignore_end, echo_logprobs, draft, forced_ids, salt. One that does not exist is refused by name.

    Attributes
    ----------
    name : str
        What the model was loaded as.
    engine : Engine
        Takes requests directly.
    tokenizer : Tokenizer
    defaults : SamplingOptions
        Used where a call names no option: the file's ``general.sampling.*`` keys, else the project's.
    vocab_size, context_length : int
        Rows of the output layer; most tokens of prompt and answer together.
    """

    def __init__(
        self,
        name: str,
        source: TensorSource,
        architecture: Architecture,
        program: Program,
        executable: Executable,
        engine: Engine,
    ) -> None:
        self.name = name
        self.engine = engine
        self.tokenizer: Tokenizer = engine.tokenizer
        self.vocab_size = engine.vocab_size
        self.context_length = engine.options.context_length
        self.kernel_digest = executable.kernel_digest
        self.defaults = sampling_defaults(source.metadata)
        self._source = source
        self._architecture = architecture
        self._program = program
        self._executable = executable
        self._template: ChatTemplate | None = None
        self._closer = weakref.finalize(self, _close, engine, source)

    @property
    def metadata(self) -> Metadata:
        """The file's metadata."""
        return self._source.metadata

    @property
    def source(self) -> TensorSource:
        """The tensors that were loaded."""
        return self._source

    @property
    def program(self) -> Program:
        """What a step computes."""
        return self._program

    @property
    def executable(self) -> Executable:
        """What runs a step. For measurements, and only while no request runs: the engine's thread owns it."""
        return self._executable

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises TemplateError when the model has none."""
        if self._template is None:
            self._template = ChatTemplate.from_metadata(self.metadata.raw, self.tokenizer)
        return self._template

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        """Continue a text.

        Parameters
        ----------
        prompt : str or sequence of int
            The text (BOS is put first where the model wants it), or its token ids as they are.
        **options
            See the class. `n` above 1: use `generate_choices`.

        Returns
        -------
        Completion

        Raises
        ------
        RequestError
            `field` names the option at fault.
        CapacityError
            Too many requests wait.
        """
        return self._one(self.request(prompt, **options))

    def generate_choices(self, prompt: str | Sequence[int], n: int, **options: Any) -> list[Completion]:
        """`n` continuations of one text, which is run once. Parameters and errors as for `generate`."""
        return self._all(self.request(prompt, n=n, **options))

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Chunk]:
        """Continue a text piece by piece; closing the iterator stops the work. Parameters as for `generate`."""
        return self._stream(self.request(prompt, **options))

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[False] = False, **options: Any
    ) -> Completion: ...
    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[True], **options: Any
    ) -> Iterator[Chunk]: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Completion | Iterator[Chunk]:
        """Answer a conversation.

        Parameters
        ----------
        messages : sequence of mappings
            Each with `role` and `content`.
        stream : bool
            Return an iterator of chunks, as `stream` does.
        template_variables : mapping, optional
            Names that the model's chat template reads, such as ``{"enable_thinking": False}``.
        **options
            See the class.

        Raises
        ------
        TemplateError
            The model has no chat template, or it fails.
        RequestError, CapacityError
            As for `generate`; a malformed message is named.
        """
        ids = self.template.encode(self.tokenizer, messages, **dict(template_variables or {}))
        request = self.request(ids, **options)
        return self._stream(request) if stream else self._one(request)

    def request(self, prompt: str | Sequence[int], **options: Any) -> GenerationRequest:
        """The request that `generate` and `stream` submit: defaults filled in, unknown options refused by name."""
        for name in options:
            if name not in _SAMPLING_NAMES and name not in _REQUEST_NAMES:
                raise unknown_option(name, _SAMPLING_NAMES | _REQUEST_NAMES)
        sampling = {name: value for name, value in options.items() if name in _SAMPLING_NAMES}
        others = {name: value for name, value in options.items() if name in _REQUEST_NAMES}
        if isinstance(others.get("stop"), str):
            others["stop"] = (others["stop"],)
        if others.get("stop", ()) is None:
            others["stop"] = ()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        return GenerationRequest(tuple(ids), attrs.evolve(self.defaults, **sampling), **others)

    def tokenize(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Parameters
        ----------
        add_bos : bool, optional
            Put BOS first; None follows the file.
        parse_special : bool
            Read the texts of special tokens as those tokens: only for text that is not a stranger's.
        """
        return self.tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 show as U+FFFD."""
        return self.tokenizer.decode(_ids(token_ids))

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The scores after every token of a text.

        Parameters
        ----------
        token_ids : sequence of int
            At least one, at most `context_length`.

        Returns
        -------
        f32[n_tokens, vocab]
        """
        return self.engine.logits(tuple(_ids(token_ids)))

    def info(self) -> dict[str, Any]:
        """What is loaded: names, sizes in bytes, pools, the backend's figures, the engine's counts.

        Raises BackendError when the model was closed.
        """
        kv_type = self.engine.options.kv_type
        return {
            "name": self.name,
            "model": self.metadata.get_str("general.name", None),
            "architecture": self.metadata.get_str("general.architecture"),
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "model_context_length": self._architecture.context_length,
            "tensor_bytes": tensor_bytes_by_type(self._source),
            "kv_type": kv_type,
            "kv_bytes_per_token": self._program.kv_bytes_per_position(kv_type),
            "state_bytes_per_sequence": self._program.state_bytes,
            "backend": self._executable.statistics(),
            "engine": self.engine.statistics(),
        }

    def close(self) -> None:
        """Cancel what runs and free the model. Idempotent."""
        self._closer()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _one(self, request: GenerationRequest) -> Completion:
        if request.n != 1:
            raise RequestError(
                describe("n cannot be used here", got=shown(request.n), expected="1", hint="call generate_choices"),
                field="n",
            )
        return self._all(request)[0]

    def _all(self, request: GenerationRequest) -> list[Completion]:
        with self.engine.submit(request) as generation:
            return generation.result()

    def _stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        generation = self.engine.submit(request)  # here, so that a bad request is refused by the call itself

        def chunks() -> Iterator[Chunk]:
            with generation:
                yield from generation

        return chunks()


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    backend: str = "auto",
    threads: int | None = None,
    ctx: int | None = None,
    kv: str = "f16",
    parallel: int | None = None,
    draft: bool = True,
    progress: Progress | None = None,
    registry: Registry | None = None,
) -> Model:
    """Load a model.

    Parameters
    ----------
    model : str or path, optional
        A path, ``hf:owner/repo[:quant or file]``, a known name, or ``"tiny-hybrid"``; None is the default model. What
        is not on this machine is fetched.
    backend : str
        ``"auto"`` (the CPU's), or the name of an installed backend; ``"reference"`` is plain NumPy.
    threads : int, optional
        Worker threads; None: the physical cores.
    ctx : int, optional
        Most tokens of prompt and answer together; None: the least of the model's own, 32,768 and what memory allows.
    kv : str
        Type of the cache of keys and values, ``"f16"`` or ``"f32"``.
    parallel : int, optional
        Requests that are answered at the same time; None: 16, or fewer where their states would fill memory.
    draft : bool
        Guess tokens with the installed drafters and verify several in one step (docs/rad1.md); answers are the same
        without.
    progress : callable, optional
        Called with (what is being done, share done).
    registry : Registry, optional
        Plugins to use; None: the installed ones.

    Raises
    ------
    ModelNotFoundError, DownloadError, ModelError
        The file; UnsupportedModelError names the package to install where it is known.
    PluginError, BackendError, CapacityError, RequestError
        The backend, memory, or an argument out of range.
    """
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024):
        raise RequestError(
            describe("threads cannot be used", got=shown(threads), expected="1 to 1024"), field="threads"
        )
    registry = load_registry() if registry is None else registry
    backend_class = registry.get("backend", "cpu" if backend == "auto" else backend)
    if kv not in backend_class.capabilities.kv_types:
        raise RequestError(
            describe(
                "kv cannot be used", got=shown(kv), expected=f"one of {', '.join(backend_class.capabilities.kv_types)}"
            ),
            field="kv",
        )
    source, name = open_source(model, progress)
    try:
        if TEMPLATE_KEY in source.metadata:
            shared_worker().start()  # beside the long work, so that the first chat does not wait for it
        architecture = registry.architecture_for(source.metadata.get_str("general.architecture"))(source)
        program = record_program(architecture, registry.get("head", "full")(), source)
        tokenizer = Tokenizer.from_metadata(source.metadata.raw)
        sampling_defaults(source.metadata)  # a file whose defaults cannot be used is refused before the long work
        sizes = choose_sizes(
            program,
            architecture.context_length,
            weight_bytes=sum(tensor_bytes_by_type(source).values()),
            kv_type=kv,
            ctx=ctx,
            parallel=parallel,
        )
        options = sizes.engine_options(has_states=bool(program.states), kv_type=kv)
        executable = backend_class().load(
            program,
            source,
            LoadOptions(
                n_threads=threads,
                kv_type=kv,
                n_blocks=options.n_blocks,
                n_slots=options.n_slots,
                max_rows=options.max_rows,
                max_outputs=options.max_outputs,
                progress=progress,
            ),
        )
        try:
            cache = registry.get("cache", "none")()
            drafters = {name: drafter() for name, drafter in drafter_classes(registry, program).items() if draft}
            engine = Engine(executable, tokenizer, architecture.vocab_size, options, cache=cache, drafters=drafters)
        except BaseException:
            executable.close()
            raise
    except BaseException as error:
        _close_source(source)
        if isinstance(error, MemoryError):
            raise CapacityError(describe("memory ran out while loading", where=name, hint="lower --ctx")) from error
        raise
    return Model(name, source, architecture, program, executable, engine)


def drafter_classes(registry: Registry, program: Program) -> dict[str, type[Drafter]]:
    """Every installed drafter that can guess for this model, by name. Raises PluginError."""
    classes = {name: registry.get("drafter", name) for name in registry.names("drafter") if name != NO_DRAFTER}
    return {name: drafter for name, drafter in classes.items() if drafter.suits(program)}


def sampling_defaults(metadata: Metadata) -> SamplingOptions:
    """The file's ``general.sampling.*`` keys over the project's defaults. Raises MetadataError out of range."""
    ours = SamplingOptions()

    def number(key: str, field: str) -> float:
        least, greatest = RANGES[field]
        value = metadata.get_float(f"general.sampling.{key}", None, minimum=least, maximum=greatest)
        return float(getattr(ours, field)) if value is None else value

    top_k = metadata.get_int("general.sampling.top_k", ours.top_k, maximum=MAX_TOP_K)
    return SamplingOptions(
        temperature=number("temp", "temperature"),
        top_k=max(0, top_k),  # other engines write -1 for "off"
        top_p=number("top_p", "top_p") or ours.top_p,
        min_p=number("min_p", "min_p"),
        repeat_penalty=number("penalty_repeat", "repeat_penalty"),
    )


def tensor_bytes_by_type(source: TensorSource) -> dict[str, int]:
    """Bytes of the file's tensors per type, in the order in which the types first occur."""
    sizes: dict[str, int] = {}
    for info in source.tensors.values():
        sizes[info.type.name] = sizes.get(info.type.name, 0) + info.n_bytes
    return sizes


def open_source(model: str | os.PathLike[str] | None, progress: Progress | None = None) -> tuple[TensorSource, str]:
    """The tensors that `model` names, and its name; parameters and errors as for `load`."""
    if isinstance(model, str) and model == TINY_HYBRID:
        from kinetic_core.reference.tiny_hybrid import tiny_hybrid_source

        return tiny_hybrid_source(), TINY_HYBRID
    from kinetic_core.gguf import open_model_file
    from kinetic_core.models import DEFAULT_MODEL, KNOWN_MODELS, resolve

    path = resolve(model, progress)
    if model is None:
        return open_model_file(path), DEFAULT_MODEL
    return open_model_file(path), str(model) if str(model) in KNOWN_MODELS else path.stem


def _ids(token_ids: Any) -> list[Any]:
    """Token ids as plain integers; NumPy's are welcome. What is no integer stays, for validation to refuse."""
    listed = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
    return [int(token) if isinstance(token, np.integer) else token for token in listed]


def _close(engine: Engine, source: TensorSource) -> None:
    engine.close()
    _close_source(source)


def _close_source(source: TensorSource) -> None:
    close = getattr(source, "close", None)
    if close is not None:
        close()
