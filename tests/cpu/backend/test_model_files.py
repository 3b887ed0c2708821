"""Every family's files: any split of a prompt, equal best tokens, and the memory that `kinetic info` foretells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pytest
from cpu_steps import same_bits, tokens_of

from kinetic_core.backends.cpu.backend import CpuExecutable
from kinetic_core.cli.info import describe_model
from kinetic_core.conformance.steps import Part, make_batch, prompt
from kinetic_core.engine.history import History
from kinetic_core.engine.request import SamplingOptions
from kinetic_core.engine.sampler import Sampler
from kinetic_core.gguf import MemoryTensors, RawTensor, TensorSource, open_model_file
from kinetic_core.interfaces import HeadRequest
from kinetic_core.interfaces.batch import BLOCK_TOKENS
from kinetic_core.plugins import FAMILY_PACKAGES, load_registry
from kinetic_core.program.record import record_program
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.tiny_hybrid import tiny_hybrid_source

DATA = Path(__file__).parents[2] / "data"
REGISTRY = load_registry()
FILES = sorted(path.stem for path in DATA.glob("*.gguf"))
TOKENS = tokens_of(330, vocab=1000)

Load = Callable[..., CpuExecutable]

every_file = pytest.mark.parametrize("name", FILES)


def load_source(load: Load, source: TensorSource, **options: int | str) -> CpuExecutable:
    architecture = REGISTRY.architecture_for(source.metadata.get_str("general.architecture"))(source)
    return load(record_program(architecture, FullHead(), source), source, **options)


def test_every_family_has_a_file() -> None:
    families = set()
    for name in FILES:
        with open_model_file(DATA / f"{name}.gguf") as source:
            families.add(source.architecture)
    assert families == set(FAMILY_PACKAGES)


@every_file
def test_w9_any_split_of_a_prompt(load: Load, name: str) -> None:
    with open_model_file(DATA / f"{name}.gguf") as source:
        executable = load_source(load, source, kv_type="f16", n_slots=8)
    whole = prompt(executable, TOKENS, [len(TOKENS)])
    assert len(np.unique(whole, axis=0)) == len(TOKENS)
    for slot, size in enumerate((1, 2, 63, 64, 65, 256), 1):
        # The first positions of the second block are among those of the shorter prompt, too.
        tokens = TOKENS if size > 2 else TOKENS[:270]
        assert same_bits(prompt(executable, tokens, [size], slot=slot), whole[: len(tokens)]), size


# equal best tokens

OUTPUT_ROWS = ("output.weight", "token_embd.weight")
"""The output layer's matrix; without the first, the embedding is that, too."""
PATHS = {
    "greedy": SamplingOptions(temperature=0.0),
    "greedy, whole": SamplingOptions(temperature=0.0, logprobs=0),
    "greedy, candidates": SamplingOptions(temperature=0.0, repeat_penalty=1.1),
    "top_k": SamplingOptions(top_k=1),
    "top_k, whole": SamplingOptions(top_k=1, logprobs=0),
}


def with_row_copied(source: TensorSource, row: int, target: int) -> MemoryTensors:
    """The model with one row of its output layer a copy of another's."""
    matrix = next(name for name in OUTPUT_ROWS if name in source.tensors)
    tensors = {name: RawTensor(source.tensor_bytes(name), i.type, i.shape) for name, i in source.tensors.items()}
    rows = source.tensor_bytes(matrix).reshape(source.tensors[matrix].shape[0], -1).copy()
    rows[target] = rows[row]
    tensors[matrix] = attrs.evolve(tensors[matrix], data=rows)
    return MemoryTensors(source.metadata.raw, tensors)


def last_row(executable: CpuExecutable, tokens: tuple[int, ...], top_k: int | None) -> None:
    executable.clear_slot(0)
    executable.run(make_batch(Part(tokens), heads=[HeadRequest(len(tokens) - 1, top_k)]))


@every_file
def test_d3_of_two_equal_rows_the_lower_token_wins(load: Load, name: str) -> None:
    tokens = TOKENS[:12]
    with open_model_file(DATA / f"{name}.gguf") as source:
        executable = load_source(load, source)
        last_row(executable, tokens, None)
        best = int(np.argmax(executable.logits(0)))
        vocab = executable.program.logits.width
        free = [token for token in range(vocab) if token not in (*tokens, best)]
        # One twin before the best token and one behind it, each in another group of packed rows.
        before, behind = [t for t in free if t < best - 64][:1], [t for t in free if t > best + 64][-1:]
        models = [(twin, with_row_copied(source, best, twin)) for twin in (*before, *behind)]
    assert models
    for twin, model in models:
        executable, lower = load_source(load, model), min(best, twin)
        last_row(executable, tokens, None)
        logits = executable.logits(0).copy()
        assert logits[twin].tobytes() == logits[best].tobytes() == logits.max().tobytes()
        for top_k in (1, 2, 40, 200):
            last_row(executable, tokens, top_k)
            assert executable.candidates(0)[0][:2].tolist() == [lower, max(best, twin)][:top_k]
        for path, options in PATHS.items():
            sampler, history = Sampler(options, vocab, seed=3), History(tokens)
            wanted = sampler.head_top_k(history)
            last_row(executable, tokens, wanted)
            assert sampler.choose(executable, 0, wanted, history).token_id == lower, path


# memory


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("name", [*FILES, "tiny-hybrid"])
def test_info_foretells_the_memory_of_a_sequence(load: Load, name: str, kv_type: str) -> None:
    n_blocks, n_slots = 3, 5
    if name == "tiny-hybrid":
        source: TensorSource = tiny_hybrid_source()
        facts = describe_model(source, name, REGISTRY, kv_type)
        executable = load_source(load, source, kv_type=kv_type, n_blocks=n_blocks, n_slots=n_slots)
    else:
        with open_model_file(DATA / f"{name}.gguf") as source:
            facts = describe_model(source, name, REGISTRY, kv_type)
            executable = load_source(load, source, kv_type=kv_type, n_blocks=n_blocks, n_slots=n_slots)
    blocks, slots = executable._blocks, executable._slots
    assert blocks.block_bytes == len(executable.read_block(0)) == blocks._data.nbytes / n_blocks
    assert slots.slot_bytes == len(executable.read_slot(0)) == slots._data.nbytes / n_slots
    assert facts["kv_bytes_per_token"] == pytest.approx(blocks.block_bytes / BLOCK_TOKENS, rel=0.05)
    assert facts["state_bytes_per_sequence"] == pytest.approx(slots.slot_bytes, rel=0.05)
