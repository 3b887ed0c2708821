"""Checks of what an architecture reads and records: nothing missing or unknown is tolerated, capabilities are true."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from kinetic_core.conformance.formats import block_size, stored_types
from kinetic_core.conformance.models import SEED, ModelFamily, TinyModel
from kinetic_core.conformance.suite import Fault
from kinetic_core.errors import ModelError
from kinetic_core.gguf import MemoryTensors, RawTensor
from kinetic_core.interfaces import TinyVariant
from kinetic_core.program import Program, ops
from kinetic_core.program.record import record_program
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model


def unknown_tensor_refused(model: TinyModel) -> None:
    """A tensor that no forward pass reads, in a layer and outside."""
    for name in ("unheard_of.weight", "blk.0.unheard_of.weight"):
        tensors = {**_stored(model.source), name: np.ones((4,), np.float32)}
        _require_refusal(model, MemoryTensors(model.source.metadata.raw, tensors), name, "has the unknown tensor")


def missing_tensor_refused(model: TinyModel, family: ModelFamily) -> None:
    """Every tensor left out in turn: accepted where the variant says that it is optional, refused where it does not."""
    stored = _stored(model.source)
    for pattern in model.variant.optional:
        if all(_matching(variant, pattern) for variant in family.variants.values()):
            raise Fault(f"{pattern!r} is declared optional and every variant has it: declare a variant without it")
    for name in stored:
        rest = {other: tensor for other, tensor in stored.items() if other != name}
        source = MemoryTensors(model.source.metadata.raw, rest)
        if any(fnmatchcase(name, pattern) for pattern in model.variant.optional):
            _require_acceptance(model, source, f"lacks {name!r}, which is declared optional,")
        else:
            hint = "if it is optional, say so in the variant"
            _require_refusal(model, source, name, "lacks the tensor", hint)


def wrong_shape_refused(model: TinyModel) -> None:
    """Every tensor with one column more: its rows are counted by some families, its columns by none."""
    stored = _stored(model.source)
    for name, shape in model.variant.tensors.items():
        larger = (*shape[:-1], shape[-1] + 1)
        tensors = {**stored, name: np.ones(larger, np.float32)}
        what = f"has, with the shape {larger} in place of {shape}, the tensor"
        _require_refusal(model, MemoryTensors(model.source.metadata.raw, tensors), name, what)


def missing_key_refused(model: TinyModel) -> None:
    """Every key left out in turn: refused by its own name, or as good as the default that the variant declares.

    A key that the architecture never reads may be missing as well; then the program must be the same.
    """
    raw = dict(model.source.metadata.raw)
    own = [key for key in model.variant.metadata if not key.startswith(("general.", "tokenizer."))]
    for key in [*own, *(key for key in model.variant.defaults if key not in model.variant.metadata)]:
        whole = f"{model.name}.{key}"
        without = {other: value for other, value in raw.items() if other != whole}
        if key in model.variant.defaults:
            default = model.variant.defaults[key]
            missing, given = _outcome(model, without), _outcome(model, {**without, whole: default})
            if missing != given:
                raise Fault(
                    f"a file that lacks the metadata key {whole!r} is not as one with its declared default "
                    f"{default!r}: got {_shown(missing)}, expected {_shown(given)}"
                )
        elif whole in _unread(model):
            missing, given = _outcome(model, without), _outcome(model, raw)
            if missing != given:
                raise Fault(
                    f"the metadata key {whole!r} is read past the metadata's typed reads, and matters: without it the "
                    f"file gives {_shown(missing)}, with it {_shown(given)}"
                )
        else:
            source = MemoryTensors(without, _stored(model.source))
            _require_refusal(
                model, source, whole, "lacks the metadata key", "if it has a default, say so in the variant"
            )


def _unread(model: TinyModel) -> set[str]:
    """Keys that recording the forward pass does not read."""
    source = MemoryTensors(dict(model.source.metadata.raw), _stored(model.source))
    record_program(model.architecture_class(source), FullHead(), source)
    return set(source.metadata.unread_keys())


def _outcome(model: TinyModel, metadata: Mapping[str, Any]) -> tuple[Program | None, str]:
    """(program, context length), or the refusal, of the model's tensors with this metadata."""
    source = MemoryTensors(metadata, _stored(model.source))
    try:
        architecture = model.architecture_class(source)
        return record_program(architecture, FullHead(), source), str(architecture.context_length)
    except ModelError as error:
        return None, str(error)


def _shown(outcome: tuple[Program | None, str]) -> str:
    program, refusal = outcome
    return f"the refusal {refusal!r}" if program is None else f"a program of {len(program.all_ops)} operations"


def _stored(source: MemoryTensors) -> dict[str, Any]:
    return {
        name: RawTensor(source.tensor_bytes(name), info.type, tuple(info.shape))
        for name, info in source.tensors.items()
    }


def _require_refusal(model: TinyModel, source: MemoryTensors, name: str, what: str, hint: str = "") -> None:
    """The file must be refused with a model error that names the tensor or key."""
    try:
        record_program(model.architecture_class(source), FullHead(), source)
    except ModelError as error:
        if not _names(str(error), name):
            raise Fault(f"a file that {what} {name!r} is refused without naming it: {error}") from None
        return
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise Fault(f"a file that {what} {name!r} ends in {got}, expected an error of kinetic_core.errors") from error
    raise Fault(f"a file that {what} {name!r} is accepted{'; ' if hint else ''}{hint}")


def _require_acceptance(model: TinyModel, source: MemoryTensors, what: str) -> None:
    try:
        record_program(model.architecture_class(source), FullHead(), source)
    except Exception as error:
        raise Fault(f"a file that {what} is refused: {' '.join(f'{type(error).__name__}: {error}'.split())}") from error


def _names(message: str, name: str) -> bool:
    """Is the whole name in the message, with or without ``.weight``, and not a longer one that begins or ends so?"""
    stem = re.escape(name.removesuffix(".weight"))
    return re.search(rf"(?<![\w.]){stem}(\.weight)?(?![\w-]|\.\w)", message) is not None


def _matching(variant: TinyVariant, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in variant.tensors)


# capabilities

_SHOWS: Mapping[str, Callable[[Program], bool]] = {
    "has_recurrent_state": lambda program: bool(program.states),
    "has_prediction_block": lambda program: program.prediction is not None,
    "has_experts": lambda program: any(isinstance(op, (ops.Route, ops.Experts)) for op in program.all_ops),
    "has_sliding_window": lambda program: any(layer.window is not None for layer in program.kv_layers),
}


def _programs(family: ModelFamily) -> dict[str, Program]:
    programs = {}
    for name, variant in family.variants.items():
        source = random_model(family.name, variant, SEED)
        programs[name] = record_program(family.architecture(source), FullHead(), source)
    return programs


def declared_no_is_no(family: ModelFamily) -> None:
    """No variant shows what the capabilities deny."""
    capabilities = family.architecture.capabilities
    for name, program in _programs(family).items():
        for question, shows in _SHOWS.items():
            if not getattr(capabilities, question) and shows(program):
                raise Fault(f"the capabilities say {question}=False, the variant {name!r} shows the opposite")


def declared_yes_is_shown(family: ModelFamily) -> None:
    """Some variant shows each thing that the capabilities claim."""
    capabilities, programs = family.architecture.capabilities, _programs(family)
    for question, shows in _SHOWS.items():
        if getattr(capabilities, question) and not any(shows(program) for program in programs.values()):
            raise Fault(f"the capabilities say {question}=True, no variant of tiny() shows it")


def variants_are_usable(family: ModelFamily) -> None:
    """At least one variant, no name twice, sizes that agree with the program."""
    variants = list(family.architecture.tiny())
    if not variants:
        raise Fault("tiny() describes no variant")
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names):
        raise Fault(f"tiny() uses a name twice: {', '.join(names)}")
    for name, variant in family.variants.items():
        source = random_model(family.name, variant, SEED)
        architecture = family.architecture(source)
        program = record_program(architecture, FullHead(), source)
        if architecture.vocab_size != program.logits.width:
            raise Fault(f"{name!r}: vocab_size is {architecture.vocab_size}, the logits have {program.logits.width}")
        if architecture.context_length < 1:
            raise Fault(f"{name!r}: context_length is {architecture.context_length}, expected at least 1")
        if architecture.has_prediction != (program.prediction is not None):
            raise Fault(f"{name!r}: has_prediction is {architecture.has_prediction}, the program shows the opposite")
        again = record_program(family.architecture(source), FullHead(), source)
        if again != program:
            raise Fault(f"{name!r}: recording the forward pass twice gives two programs")


def every_format_is_stored(family: ModelFamily) -> None:
    """Some variant has matrices whose rows are a whole number of the format's blocks."""
    for format_name in family.formats:
        if format_name != "F32" and not any(stored_types(v, format_name) for v in family.variants.values()):
            raise Fault(
                f"no variant of tiny() has a matrix that can be stored as {format_name}: declare one whose rows are a "
                f"multiple of {block_size(format_name)} wide"
            )
