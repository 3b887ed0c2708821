"""``kinetic info``: what a model file is, and what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kinetic_core.cli.console import NO_DRAFTERS, megabytes, one_line, print_json, printable, progress_bar
from kinetic_core.cli.options import ContextOption, JSONOption, KVOption, ModelArgument, StrictOption, usable_registry
from kinetic_core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kinetic_core.gguf import TensorSource
    from kinetic_core.plugins import Registry


def info(
    model: ModelArgument = None,
    ctx: ContextOption = None,
    kv: KVOption = "f16",
    as_json: JSONOption = False,
    strict: StrictOption = False,
) -> None:
    """Describe a model: architecture, tensors, context, memory, and what is missing to run it."""
    from kinetic_core.engine.model import open_source

    registry = usable_registry(strict)
    with progress_bar() as progress:
        source, name = open_source(model, progress)
    facts = describe_model(source, name, registry, kv, ctx)
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def describe_model(
    source: TensorSource, name: str, registry: Registry, kv: str = "f16", ctx: int | None = None
) -> dict[str, Any]:
    """What `kinetic info --json` prints. The sizes of keys, values and states need the architecture's plugin.

    Keys: name, title, architecture, plugin (or None), missing (a line, or None), parameters, tensors (type ->
    {count, bytes}), weight_bytes, vocab_size, model_context, context, kv_type, kv_bytes_per_token,
    state_bytes_per_sequence, memory_bytes (weights and one sequence as long as the context), prediction, drafters
    (names of the installed ones that can guess for the model; None without the architecture's plugin).
    Raises ModelError for a file that its architecture refuses.
    """
    from kinetic_core.engine.model import drafter_classes
    from kinetic_core.engine.sizing import choose_sizes
    from kinetic_core.program.record import record_program

    metadata = source.metadata
    key = metadata.get_str("general.architecture")
    tensors: dict[str, dict[str, int]] = {}
    for tensor in source.tensors.values():
        entry = tensors.setdefault(tensor.type.name, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += tensor.n_bytes
    weight_bytes = sum(entry["bytes"] for entry in tensors.values())
    facts: dict[str, Any] = {
        "name": name,
        "title": metadata.get_str("general.name", None),
        "architecture": key,
        "plugin": None,
        "missing": None,
        "parameters": sum(tensor.n_elements for tensor in source.tensors.values()),
        "tensors": tensors,
        "weight_bytes": weight_bytes,
        "vocab_size": None,
        "model_context": metadata.get_int(f"{key}.context_length", None),
        "context": None,
        "kv_type": kv,
        "kv_bytes_per_token": None,
        "state_bytes_per_sequence": None,
        "memory_bytes": None,
        "drafters": None,
        "prediction": bool(metadata.get_int(f"{key}.nextn_predict_layers", None) or 0),
    }
    try:
        architecture_class = registry.architecture_for(key)
    except UnsupportedModelError as error:
        facts["missing"] = str(error)
        return facts
    architecture = architecture_class(source)
    program = record_program(architecture, registry.get("head", "full")(), source)
    sizes = choose_sizes(
        program, architecture.context_length, weight_bytes=weight_bytes, kv_type=kv, ctx=ctx, parallel=1
    )
    kv_bytes = program.kv_bytes_per_position(kv)
    facts |= {
        "plugin": next(entry.distribution for entry in registry.registered("architecture") if key in entry.labels),
        "vocab_size": architecture.vocab_size,
        "model_context": architecture.context_length,
        "context": sizes.context_length,
        "kv_bytes_per_token": kv_bytes,
        "state_bytes_per_sequence": program.state_bytes,
        "memory_bytes": weight_bytes + kv_bytes * sizes.context_length + program.state_bytes,
        "prediction": program.prediction is not None,
        "drafters": list(drafter_classes(registry, program)),
    }
    return facts


def _print(facts: dict[str, Any]) -> None:
    def line(label: str, value: str) -> None:
        print(printable(f"{label}:").ljust(18), one_line(value))

    line("model", facts["title"] or facts["name"])
    line("architecture", facts["architecture"] + (f" (plugin {facts['plugin']})" if facts["plugin"] else ""))
    line("parameters", f"{facts['parameters'] / 1e6:,.1f} million")
    for type_name, entry in facts["tensors"].items():
        line(
            f"  {type_name}",
            f"{entry['count']} tensor{'' if entry['count'] == 1 else 's'}, {megabytes(entry['bytes'])}",
        )
    if facts["vocab_size"]:
        line("vocabulary", f"{facts['vocab_size']} tokens")
    if facts["model_context"]:
        here = f"; here {facts['context']}" if facts["context"] else ""
        line("context", f"{facts['model_context']} tokens{here}")
    line("weights", megabytes(facts["weight_bytes"]))
    if facts["kv_bytes_per_token"] is not None:
        line("keys and values", f"{megabytes(facts['kv_bytes_per_token'])} per token ({facts['kv_type']})")
        line("recurrent state", f"{megabytes(facts['state_bytes_per_sequence'])} per sequence")
        line("memory needed", f"{megabytes(facts['memory_bytes'])} for one sequence of {facts['context']} tokens")
    line("prediction", "yes" if facts["prediction"] else "no")
    if facts["drafters"] is not None:
        line("drafts", ", ".join(facts["drafters"]) or NO_DRAFTERS)
    if facts["missing"]:
        line("missing", facts["missing"])
