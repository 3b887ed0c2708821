"""Checks of what an architecture reads and records: nothing missing or unknown is tolerated, capabilities are true."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from kinetic_core.conformance.models import SEED, ModelFamily, TinyModel
from kinetic_core.conformance.suite import Fault
from kinetic_core.errors import ModelError
from kinetic_core.gguf import MemoryTensors, RawTensor
from kinetic_core.interfaces import TinyVariant
from kinetic_core.program import Program, ops
from kinetic_core.program.record import record_program
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model

_NAMED = re.compile(r"'[\w-]+(\.[\w-]+)+'")
"""A tensor or key in an error's message."""
_LAYER = re.compile(r"^(.*?\.)(\d+)\.(.*)$")


def unknown_tensor_refused(model: TinyModel) -> None:
    """A tensor that no forward pass reads, in a layer and outside."""
    for name in ("unheard_of.weight", "blk.0.unheard_of.weight"):
        tensors = {**_stored(model.source), name: np.ones((4,), np.float32)}
        _require_refusal(model, MemoryTensors(model.source.metadata.raw, tensors), name, "has the unknown tensor")


def missing_tensor_refused(model: TinyModel, family: ModelFamily) -> None:
    """Every tensor left out in turn, but for those that another declared variant lacks."""
    stored = _stored(model.source)
    for name in stored:
        if not _optional_tensor(name, model.variant, family.variants.values()):
            rest = {other: tensor for other, tensor in stored.items() if other != name}
            _require_refusal(model, MemoryTensors(model.source.metadata.raw, rest), name, "lacks the tensor")


def wrong_shape_refused(model: TinyModel) -> None:
    """Every tensor with one column more: its rows are counted by some families, its columns by none."""
    stored = _stored(model.source)
    for name, shape in model.variant.tensors.items():
        larger = (*shape[:-1], shape[-1] + 1)
        tensors = {**stored, name: np.ones(larger, np.float32)}
        what = f"has, with the shape {larger} in place of {shape}, the tensor"
        _require_refusal(model, MemoryTensors(model.source.metadata.raw, tensors), name, what)


def missing_key_refused(model: TinyModel, family: ModelFamily) -> None:
    """Every key that is read left out in turn, but for those that another declared variant lacks.

    A default that contradicts the file is refused by the name of the tensor or key that does not fit it: enough.
    """
    raw = dict(model.source.metadata.raw)
    others = [set(variant.metadata) for variant in family.variants.values()]
    fresh = MemoryTensors(raw, _stored(model.source))
    record_program(model.architecture_class(fresh), FullHead(), fresh)
    unread = set(fresh.metadata.unread_keys())
    for key in model.variant.metadata:
        whole = key if key in raw else f"{model.name}.{key}"
        if key.startswith(("general.", "tokenizer.")) or any(key not in other for other in others):
            continue
        if whole in unread:
            continue
        rest = {other: value for other, value in raw.items() if other != whole}
        source = MemoryTensors(rest, _stored(model.source))
        _require_refusal(model, source, whole, "lacks the metadata key", or_another=True)


def _stored(source: MemoryTensors) -> dict[str, Any]:
    return {
        name: RawTensor(source.tensor_bytes(name), info.type, tuple(info.shape))
        for name, info in source.tensors.items()
    }


def _require_refusal(model: TinyModel, source: MemoryTensors, name: str, what: str, or_another: bool = False) -> None:
    """The file must be refused with a model error that names what is wrong. or_another: any tensor or key does."""
    try:
        record_program(model.architecture_class(source), FullHead(), source)
    except ModelError as error:
        if name.removesuffix(".weight") not in str(error) and not (or_another and _NAMED.search(str(error))):
            raise Fault(f"a file that {what} {name!r} is refused without naming it: {error}") from None
        return
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise Fault(f"a file that {what} {name!r} ends in {got}, expected an error of kinetic_core.errors") from error
    declared = "; if it is optional, declare a variant without it" if what.startswith("lacks") else ""
    raise Fault(f"a file that {what} {name!r} is accepted{declared}")


def _roles(names: Iterable[str]) -> tuple[set[str], dict[str, set[str]]]:
    """(tensors outside layers, layer -> names inside it)."""
    outside: set[str] = set()
    layers: dict[str, set[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        if match is None:
            outside.add(name)
        else:
            layers.setdefault(match[1] + match[2], set()).add(match[3])
    return outside, layers


def _optional_tensor(name: str, variant: TinyVariant, variants: Iterable[TinyVariant]) -> bool:
    """Does a declared variant show a file without this tensor?

    Outside layers: any variant without it. In a layer: a layer, of any variant, that lacks it and has nothing but
    other tensors of this one, or all others of the same part (``ssm_``, ``ffn_``, ...), biases aside; for a bias, one
    that has the weight alone. So a layer of another kind is no excuse.
    """
    outside, layers = _roles(variant.tensors)
    shown = [_roles(other.tensors) for other in variants]
    if name in outside:
        return any(name not in other_outside for other_outside, _ in shown)
    match = _LAYER.match(name)
    assert match is not None
    role, own = match[3], layers[match[1] + match[2]]
    stem = role.removesuffix(".bias")
    for layer in (layer for _, other_layers in shown for layer in other_layers.values() if role not in layer):
        if (
            layer < own
            or _part(own - {role}, role) <= _part(layer, role)
            or (stem != role and f"{stem}.weight" in layer)
        ):
            return True
    return False


def _part(roles: set[str], role: str) -> set[str]:
    """The weights of the part of a layer that `role` belongs to."""
    return {other for other in roles if other.split("_")[0] == role.split("_")[0] and not other.endswith(".bias")}


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
