"""`convert`: a Hugging Face folder in, a GGUF file out, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.convert.quantize import q4_k_m_type, quantize, stored_type
from kinetic_core.convert.safetensors import CheckpointTensor, read_checkpoint
from kinetic_core.convert.vocabulary import read_json, vocabulary_metadata
from kinetic_core.errors import KineticError, RequestError, TensorError, UnsupportedModelError, describe, shown
from kinetic_core.gguf import GGMLType, RawTensor, open_model_file, stream_gguf
from kinetic_core.interfaces import Architecture, CheckpointConfig
from kinetic_core.program.record import record_program
from kinetic_core.reference.head import FullHead

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Progress
    from kinetic_core.plugins import Registry

TYPES: Mapping[str, tuple[GGMLType, int]] = MappingProxyType(
    {
        "f32": (GGMLType.F32, 0),
        "f16": (GGMLType.F16, 1),
        "bf16": (GGMLType.BF16, 32),
        "q8_0": (GGMLType.Q8_0, 7),
        "q4_k_m": (GGMLType.Q4_K, 15),
    }
)
"""What ``type`` may be: the type of matrices, and its number under ``general.file_type``."""

_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_DERIVED = (".rotary_emb.inv_freq",)
"""Endings of tensors that some checkpoints carry and that follow from config.json."""


@attrs.frozen
class Converted:
    """What `convert` wrote: the file, its architecture, its tensors per type, and its size."""

    path: Path
    architecture: str
    n_tensors: Mapping[str, int]
    n_bytes: int


@attrs.frozen
class _Planned:
    """A tensor of the file and what it is made from (several tensors: stacked experts; none: an extra)."""

    sources: tuple[CheckpointTensor, ...]
    stacked: bool
    extra: npt.NDArray[np.float32] | None = None


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    type: str = "bf16",
    *,
    registry: Registry | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Converted:
    """Convert the checkpoint in the folder `source` to the GGUF file `out`.

    type: one of `TYPES`. The file appears under its name only when it is complete and its own architecture has
    recorded its forward pass from it. Raises RequestError for the arguments, UnsupportedModelError for a family or
    variant that cannot be converted, MetadataError, TensorError and TokenizerError for what is wrong in the folder.
    """
    folder, path = Path(source), Path(out)
    if type not in TYPES:
        raise RequestError(
            describe("unknown type", got=shown(type), expected=f"one of {', '.join(TYPES)}"), field="type"
        )
    if not folder.is_dir():
        raise RequestError(describe("no such folder", got=str(folder), expected="a checkpoint's"), field="source")
    if path.exists() and not overwrite:
        raise RequestError(describe("the file exists already", got=str(path), hint="remove it first"), field="out")
    config = CheckpointConfig(read_json(folder / "config.json"))
    if registry is None:
        from kinetic_core.plugins import load_registry

        registry = load_registry()
    key, family = _family(registry, config)
    metadata = {
        "general.architecture": key,
        "general.type": "model",
        "general.name": folder.resolve().name,
        **{f"{key}.{name}": value for name, value in family.from_checkpoint(config).items()},
        "general.file_type": TYPES[type][1],
        "general.quantization_version": 2,
        **_sampling(folder),
    }
    planned = _plan(family, config, metadata[f"{key}.block_count"], read_checkpoint(folder))
    shapes = {name: shape for name, tensor in planned.items() if (shape := _shape(family, config, name, tensor))}
    if "token_embd.weight" not in shapes:
        raise TensorError(describe("the checkpoint has no token embeddings", where=str(folder)))
    n_tokens = shapes["token_embd.weight"][0]
    metadata |= {f"{key}.vocab_size": n_tokens, **vocabulary_metadata(folder, key, n_tokens, config)}
    n_blocks, tied = metadata[f"{key}.block_count"], "output.weight" not in shapes
    wanted = {name: q4_k_m_type(name, n_blocks, tied) if type == "q4_k_m" else TYPES[type][0] for name in shapes}
    table = {name: (stored_type(name, shape, wanted[name]), shape) for name, shape in shapes.items()}
    done = iter(range(1, len(table) + 1))

    def produce(name: str) -> RawTensor:
        array = _make(family, config, name, planned[name])
        stored = quantize(name, array, table[name][0])
        if progress:
            progress("converting", next(done) / len(table))
        return stored

    with _finished(path) as partial:
        stream_gguf(partial, metadata, table, produce)
        with open_model_file(partial) as model:
            record_program(family(model), FullHead(), model)
    kinds = [type_.name for type_, _ in table.values()]
    return Converted(path, key, {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}, path.stat().st_size)


def _family(registry: Registry, config: CheckpointConfig) -> tuple[str, type[Architecture]]:
    """The architecture that reads checkpoints of this class, and its key."""
    known: dict[str, tuple[str, type[Architecture]]] = {}
    for entry in registry.registered("architecture"):
        with contextlib.suppress(KineticError):  # a plugin that cannot be used is listed by `kinetic plugins`
            family = registry.get("architecture", entry.registration.name)
            label = (*entry.registration.keys, entry.registration.name)[0]
            known |= dict.fromkeys(family.checkpoint_classes(), (label, family))
    names = config.get_strings("architectures")
    for name in names:
        if name in known:
            return known[name]
    raise UnsupportedModelError(
        describe(
            "no installed plugin converts checkpoints of this class",
            where="config.json, key 'architectures'",
            got=", ".join(names)[:200],
            expected=f"one of {', '.join(known) or 'none'}",
        )
    )


def _sampling(folder: Path) -> dict[str, Any]:
    """generation_config.json's figures for the choice of tokens as ``general.sampling.*``."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    config = CheckpointConfig(read_json(path), "generation_config.json")
    read = {
        ours: config.get_int(theirs) if ours == "top_k" else config.get_float(theirs)
        for theirs, ours in _SAMPLING.items()
        if theirs in config
    }
    return {f"general.sampling.{key}": value for key, value in read.items()}


def _plan(
    family: type[Architecture], config: CheckpointConfig, n_blocks: int, tensors: Mapping[str, CheckpointTensor]
) -> dict[str, _Planned]:
    """Every tensor of the file by name; raises TensorError for tensors of the checkpoint that none is made from."""
    planned: dict[str, _Planned] = {}
    used: set[str] = set()
    for ours, theirs in family.checkpoint_names().items():
        for layer in range(n_blocks) if "{layer}" in ours else (0,):
            name, wanted = ours.replace("{layer}", str(layer)), theirs.replace("{layer}", str(layer))
            stacked = "{expert}" in wanted
            found = [wanted] if wanted in tensors else []
            while stacked and (expert := wanted.replace("{expert}", str(len(found)))) in tensors:
                found.append(expert)
            if found:
                used |= set(found)
                planned[name] = _Planned(tuple(tensors[each] for each in found), stacked)
    planned |= {name: _Planned((), False, array) for name, array in family.checkpoint_extras(config).items()}
    if config.get_bool("tie_word_embeddings", "tie_embedding", default=False) and "output.weight" in planned:
        del planned["output.weight"]  # a copy of the embeddings
    unused = sorted(name for name in tensors if name not in used and not name.endswith(_DERIVED))
    if unused:
        got = f"{len(unused)}, the first {unused[0][:200]!r}"
        raise TensorError(describe("the family does not know tensors of the checkpoint", got=got, expected="none"))
    return planned


def _shape(family: type[Architecture], config: CheckpointConfig, name: str, tensor: _Planned) -> tuple[int, ...] | None:
    """The shape of a tensor of the file, None where this model has none: found on zeros that take no memory."""
    if tensor.extra is not None:
        return tensor.extra.shape
    shape = tensor.sources[0].shape
    if any(other.shape != shape for other in tensor.sources):
        raise TensorError(describe(f"the experts of {name!r} differ in shape"))
    zeros = np.broadcast_to(np.float32(0), (len(tensor.sources), *shape) if tensor.stacked else shape)
    made = family.checkpoint_tensor(name, zeros, config)
    return None if made is None else made.shape


def _make(family: type[Architecture], config: CheckpointConfig, name: str, tensor: _Planned) -> npt.NDArray[np.float32]:
    if tensor.extra is not None:
        return tensor.extra
    arrays = [each.read() for each in tensor.sources]
    made = family.checkpoint_tensor(name, np.stack(arrays) if tensor.stacked else arrays[0], config)
    assert made is not None, name  # `_shape` left it out otherwise
    return made


@contextlib.contextmanager
def _finished(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when all went well and is removed otherwise."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        where = str(error.filename or path)
        raise RequestError(
            describe("cannot write", where=where, got=error.strerror or str(error)), field="out"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
