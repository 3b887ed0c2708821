"""`convert`: a Hugging Face folder in, a GGUF file out, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kinetic_core.backends.cpu.workers import default_threads
from kinetic_core.checkpoint import CheckpointConfig, CheckpointFormat, unchanged
from kinetic_core.convert.quantize import prepare, quantize, stored_types
from kinetic_core.convert.safetensors import CheckpointTensor, read_checkpoint
from kinetic_core.convert.vocabulary import read_json, vocabulary_metadata
from kinetic_core.engine.model import sampling_defaults
from kinetic_core.errors import (
    KineticError,
    PluginError,
    RequestError,
    TensorError,
    UnsupportedModelError,
    describe,
    shown,
)
from kinetic_core.gguf import GGMLType, RawTensor, open_model_file, stream_gguf
from kinetic_core.interfaces import Architecture
from kinetic_core.program.record import record_program
from kinetic_core.reference.head import FullHead
from kinetic_core.text import Tokenizer
from kinetic_core.text.pretokenizers import pre_tokenizer_spec

if TYPE_CHECKING:
    from kinetic_core.checkpoint.transforms import Make
    from kinetic_core.interfaces.backend import Progress
    from kinetic_core.plugins import Registry

TYPES: Mapping[str, tuple[GGMLType, int]] = MappingProxyType(
    {
        "f32": (GGMLType.F32, 0),
        "f16": (GGMLType.F16, 1),
        "bf16": (GGMLType.BF16, 32),
        "q8_0": (GGMLType.Q8_0, 7),
        "q4_k_m": (GGMLType.Q4_K, 15),
        "q5_k_m": (GGMLType.Q5_K, 17),
        "q6_k": (GGMLType.Q6_K, 18),
    }
)
"""What ``type`` may be: the type of matrices, and its number under ``general.file_type``."""
_MIXED = ("q4_k_m", "q5_k_m")
"""Those in which some matrices get more bits."""

_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_DERIVED = (".rotary_emb.inv_freq", ".mup_vector")
"""Endings of tensors that some checkpoints carry and that follow from config.json."""
_OUTPUT = "lm_head.weight"


@attrs.frozen
class Converted:
    """What `convert` wrote: the file, its architecture, its tensors per type, its size, what it left out."""

    path: Path
    architecture: str
    n_tensors: Mapping[str, int]
    n_bytes: int
    notices: tuple[str, ...] = ()


@attrs.frozen
class _Planned:
    """A tensor of the file and what it is made from (several tensors: stacked experts; none: an extra)."""

    make: Make
    sources: tuple[CheckpointTensor, ...] = ()
    stacked: bool = False
    extra: npt.NDArray[np.float32] | None = None


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    type: str = "bf16",
    *,
    registry: Registry | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    n_threads: int | None = None,
    pre_tokenizer: str | None = None,
) -> Converted:
    """Convert the checkpoint in the folder `source` to the GGUF file `out`.

    type: one of `TYPES`. n_threads: threads of the quantizers; None: the physical cores. pre_tokenizer: a value of
    ``tokenizer.ggml.pre`` to write without looking at tokenizer.json's own. The file appears under its name only when
    it is complete, its own architecture has recorded its forward pass from it, and its tokenizer has been read. Raises
    RequestError for the arguments, UnsupportedModelError for a family or variant that cannot be converted, PluginError
    for a class that two plugins claim, MetadataError, TensorError and TokenizerError for what is wrong in the folder.
    """
    folder, path = Path(source), Path(out)
    if type not in TYPES:
        raise RequestError(
            describe("unknown type", got=shown(type), expected=f"one of {', '.join(TYPES)}"), field="type"
        )
    if pre_tokenizer is not None:
        pre_tokenizer_spec(pre_tokenizer)  # refuses unknown ones
    if n_threads is not None and not _is_count_of_threads(n_threads):
        raise RequestError(
            describe("n_threads cannot be used", got=shown(n_threads), expected="1 to 1024, or None"), field="n_threads"
        )
    if not folder.is_dir():
        raise RequestError(describe("no such folder", got=str(folder), expected="a checkpoint's"), field="source")
    if path.exists() and not overwrite:
        raise RequestError(describe("the file exists already", got=str(path), hint="remove it first"), field="out")
    tensors = read_checkpoint(folder)
    config = CheckpointConfig(read_json(folder / "config.json"), tensors=tensors.keys())
    if registry is None:
        from kinetic_core.plugins import load_registry

        registry = load_registry()
    key, family, format_ = _family(registry, config)
    config = config.flattened("text_config")
    metadata = {
        "general.architecture": key,
        "general.type": "model",
        "general.name": folder.resolve().name,
        **{f"{key}.{name}": value for name, value in format_.metadata(config).items()},
        "general.file_type": TYPES[type][1],
        "general.quantization_version": 2,
        **_sampling(folder),
    }
    planned, notices = _plan(format_, config, _block_count(key, family, metadata, tensors), tensors)
    shapes = {name: _shape(name, tensor) for name, tensor in planned.items()}
    if "token_embd.weight" not in shapes:
        raise TensorError(describe("the checkpoint has no token embeddings", where=str(folder)))
    n_tokens = shapes["token_embd.weight"][0]
    metadata |= {f"{key}.vocab_size": n_tokens, **vocabulary_metadata(folder, key, n_tokens, config, pre_tokenizer)}
    n_blocks, n_experts = (metadata.get(f"{key}.{name}", 0) for name in ("block_count", "expert_count"))
    types = stored_types(shapes, TYPES[type][0], mixed=type in _MIXED, n_blocks=n_blocks, n_experts=n_experts)
    table = {name: (types[name], shape) for name, shape in shapes.items()}
    prepare(types.values(), progress)
    done = iter(range(1, len(table) + 1))
    with _finished(path) as partial, ThreadPoolExecutor(n_threads or default_threads()) as threads:

        def produce(name: str) -> RawTensor:
            stored = quantize(name, _make(planned[name]), types[name], threads)
            if progress:
                progress("converting", next(done) / len(table))
            return stored

        stream_gguf(partial, metadata, table, produce)
        with open_model_file(partial) as model:
            record_program(family(model), FullHead(), model)
            Tokenizer.from_metadata(model.metadata.raw)
            sampling_defaults(model.metadata)
    kinds = [type_.name for type_, _ in table.values()]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return Converted(path, key, counts, path.stat().st_size, notices)


def _is_count_of_threads(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024


def _family(registry: Registry, config: CheckpointConfig) -> tuple[str, type[Architecture], CheckpointFormat]:
    """The key of the architecture that reads checkpoints of this class, it, and how it reads them."""
    known: dict[str, list[tuple[str, type[Architecture], CheckpointFormat, str]]] = {}
    for entry in registry.registered("architecture"):
        with contextlib.suppress(KineticError):  # a plugin that cannot be used is listed by `kinetic plugins`
            family = registry.get("architecture", entry.registration.name)
            label = (*entry.registration.keys, entry.registration.name)[0]
            if family.checkpoint is not None:
                for name in dict.fromkeys(family.checkpoint.classes):
                    known.setdefault(name, []).append((label, family, family.checkpoint, entry.distribution))
    names = config.get_strings("architectures")
    for name in names:
        claims = known.get(name, [])
        if len(claims) > 1:
            raise PluginError(
                describe(
                    f"checkpoints of the class {name!r} are claimed more than once",
                    got=" and ".join(f"{label} of {distribution}" for label, _, _, distribution in claims),
                    expected="one architecture",
                    hint="uninstall one of them, or leave it out with KINETIC_PLUGINS=-NAME",
                )
            )
        if claims:
            return claims[0][:3]
    raise UnsupportedModelError(
        describe(
            "no installed plugin converts checkpoints of this class",
            where="config.json, key 'architectures'",
            got=", ".join(names)[:200],
            expected=f"one of {', '.join(known) or 'none'}",
        )
    )


def _block_count(
    key: str, family: type[Architecture], metadata: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor]
) -> int:
    """The file's ``block_count``; every block has a tensor, so no loop over blocks is longer than the checkpoint."""
    count = metadata.get(f"{key}.block_count")
    if type(count) is not int or count < 1:
        what = f"the checkpoint description of {family.__qualname__} gives no usable block_count"
        raise PluginError(describe(what, got=shown(count), expected="a positive whole number in its metadata"))
    if count > len(tensors):
        got = f"{count} blocks, {len(tensors)} tensors"
        raise TensorError(
            describe("the checkpoint has fewer tensors than blocks", got=got, expected="tensors for each block")
        )
    return count


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
    format_: CheckpointFormat, config: CheckpointConfig, n_blocks: int, tensors: Mapping[str, CheckpointTensor]
) -> tuple[dict[str, _Planned], tuple[str, ...]]:
    """Every tensor of the file by name, and a line for each part of the checkpoint that stays out of it.

    Raises TensorError for tensors of the checkpoint that no tensor of the file is made from, and for a missing output
    layer that config.json does not tie to the embeddings.
    """
    tied = config.get_bool("tie_word_embeddings", "tie_embedding", default=None)
    used = {name for name in tensors if name.endswith(_DERIVED) or (tied and name == _OUTPUT)}
    planned: dict[str, _Planned] = {}
    for rule in format_.rules(config):
        for layer in range(n_blocks) if "{layer}" in rule.name else (0,):
            name, wanted = (text.replace("{layer}", str(layer)) for text in (rule.name, rule.source))
            found = _sources(wanted, tensors, tied=bool(tied))
            if found and name in planned:
                raise TensorError(describe(f"the checkpoint has {name!r} twice", got=wanted, expected="one of them"))
            if found:
                used |= set(found)
                sources = tuple(tensors[each] for each in found)
                planned[name] = _Planned(rule.make, sources, stacked="{expert}" in wanted)
    planned |= {name: _Planned(unchanged, extra=array) for name, array in format_.extras(config).items()}
    notices = []
    for beginning, part in format_.skipped.items():
        left_out = {name for name in tensors if name.startswith(beginning)} - used
        used |= left_out
        if left_out:
            notices.append(f"left out: {part}, {len(left_out)} tensors called {beginning}*")
    unused = sorted(set(tensors) - used)
    if unused:
        got = f"{len(unused)}, the first {unused[0][:200]!r}"
        raise TensorError(describe("the family does not know tensors of the checkpoint", got=got, expected="none"))
    if tied is False and "output.weight" not in planned:
        got = "tie_word_embeddings false"
        raise TensorError(describe("the checkpoint has no output layer", got=got, expected=repr(_OUTPUT)))
    return planned, tuple(notices)


def _sources(wanted: str, tensors: Mapping[str, CheckpointTensor], *, tied: bool) -> list[str]:
    """The tensors of the checkpoint that `wanted` stands for: itself, each expert's in turn, or none."""
    if "{expert}" not in wanted:
        return [wanted] if wanted in tensors and not (tied and wanted == _OUTPUT) else []
    found: list[str] = []
    while (expert := wanted.replace("{expert}", str(len(found)))) in tensors:
        found.append(expert)
    return found


def _shape(name: str, tensor: _Planned) -> tuple[int, ...]:
    """The shape of a tensor of the file, found on zeros that take no memory where elements only move."""
    if tensor.extra is not None:
        return tensor.extra.shape
    shape = tensor.sources[0].shape
    if any(other.shape != shape for other in tensor.sources):
        raise TensorError(describe(f"the experts of {name!r} differ in shape"))
    zeros = np.broadcast_to(np.float32(0), (len(tensor.sources), *shape) if tensor.stacked else shape)
    try:
        return tensor.make(zeros).shape
    except (ValueError, IndexError) as error:  # IndexError: an axis that the tensor does not have
        what = f"the checkpoint's tensor for {name!r} does not fit config.json"
        raise TensorError(describe(what, got=f"shape {shape}", expected=str(error))) from error


def _make(tensor: _Planned) -> npt.NDArray[np.float32]:
    if tensor.extra is not None:
        return tensor.extra
    arrays = [each.read() for each in tensor.sources]
    return tensor.make(np.stack(arrays) if tensor.stacked else arrays[0])


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
