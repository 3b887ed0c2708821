"""Checks of a backend's contract beside the rows: candidates, refusals, digests, closing, what it says it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from kinetic_core.conformance.models import SEED, ModelFamily, TinyModel
from kinetic_core.conformance.steps import Part, make_batch, require_bytes, require_rows, step
from kinetic_core.conformance.suite import Fault
from kinetic_core.errors import BackendError, NumericalError
from kinetic_core.gguf import MemoryTensors, read_tensor
from kinetic_core.interfaces import Executable, HeadRequest, LoadOptions, RowBatch
from kinetic_core.program.record import record_program
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model

N_TOKENS = 20
OUTPUT = "output.weight"
KV_TYPES = ("f16", "f32")
SMALL = LoadOptions(n_threads=2, n_blocks=2, n_slots=2, max_rows=32, max_outputs=32)


def best(scores: Any, top_k: int, exact_ids: tuple[int, ...] = ()) -> list[int]:
    """Token ids in (score descending, id ascending) order: the best top_k, then those of exact_ids."""
    order = np.lexsort((np.arange(len(scores)), -scores)).tolist()
    return order[:top_k] + [token for token in order[top_k:] if token in exact_ids]


def candidates_are_the_best(model: TinyModel) -> None:
    """Candidates of many k against the whole distribution of the same rows."""
    tokens = model.tokens(60, N_TOKENS)
    whole = step(model.executable(), Part(tokens))[0]
    executable = model.executable()
    kept = tuple(sorted({1 % model.vocab, 7 % model.vocab, model.vocab - 1}))
    requests = ((1, ()), (3, kept), (40, ()), (model.vocab, ()), (model.vocab + 5, ()), (2, kept))
    heads = [HeadRequest(row, top_k, ids) for row, (top_k, ids) in enumerate(requests)]
    executable.run(make_batch(Part(tokens), heads=heads))
    for output, head in enumerate(heads):
        assert head.top_k is not None
        ids, scores = executable.candidates(output)
        expected = best(whole[head.row], head.top_k, head.exact_ids)
        if ids.tolist() != expected:
            raise Fault(f"the candidates of top_k {head.top_k}: got {ids.tolist()[:6]}, expected {expected[:6]}")
        if np.asarray(scores, np.float32).tobytes() != whole[head.row][expected].tobytes():
            raise Fault(f"the candidates' scores of top_k {head.top_k} are not those of the whole distribution")


def ties_go_to_the_lowest_id(family: ModelFamily) -> None:
    """An output layer whose rows come in equal pairs, and zeros of both signs; after a prompt and after drafts."""
    _, source, tensors = _untied(family)
    output = tensors[OUTPUT].copy()
    output[1::2] = output[0 : len(output) - 1 : 2]
    tied = MemoryTensors(source.metadata.raw, {**tensors, OUTPUT: output})
    signs = np.where(np.arange(output.shape[1]) % 2, 0.0, -0.0).astype(np.float32)
    zero = MemoryTensors(source.metadata.raw, {**tensors, OUTPUT: output * signs})
    drafts = ((4, 2), (5, 3), (6, 2)) if family.backend.capabilities.supports_drafts else ()
    for what, weights in (("equal rows", tied), ("zeros of both signs", zero)):
        executable = _load(family, weights)
        try:
            rows = range(2, 3 + len(drafts))
            executable.run(
                make_batch(Part((1, 2, 3), 0, (0,), drafts=drafts), heads=[HeadRequest(r, 40) for r in rows])
            )
            for output, row in enumerate(rows):
                ids, scores = executable.candidates(output)
                order = sorted(zip((-scores).tolist(), ids.tolist(), strict=True))
                if [token for _, token in order] != ids.tolist():
                    where = "a draft row" if row > 2 else "a committed row"
                    raise Fault(f"ties of {what} do not go to the lowest token id in {where}: got {ids.tolist()[:6]}")
        finally:
            executable.close()


def nan_is_an_error(family: ModelFamily) -> None:
    """A NaN in the output layer, wanted and not wanted."""
    _, source, tensors = _untied(family)
    output = tensors[OUTPUT].copy()
    output[5, 3] = np.nan
    executable = _load(family, MemoryTensors(source.metadata.raw, {**tensors, OUTPUT: output}))
    try:
        executable.run(make_batch(Part((1, 2), 0, (0,)), heads=[]))
        for top_k in (None, 1):
            batch = make_batch(Part((3,), 2, (0,)), heads=[HeadRequest(0, top_k)])
            _refused(NumericalError, "a wanted logit that is NaN", executable.run, batch)
    finally:
        executable.close()


def _untied(family: ModelFamily) -> tuple[str, MemoryTensors, dict[str, Any]]:
    """A model with an output layer of its own."""
    name, variant = next((n, v) for n, v in family.variants.items() if OUTPUT in v.tensors)
    source = random_model(family.name, variant, SEED)
    return name, source, {tensor: read_tensor(source, tensor) for tensor in source.tensors}


def _load(family: ModelFamily, source: MemoryTensors, **options: Any) -> Executable:
    program = record_program(family.architecture(source), FullHead(), source)
    kv_type = family.backend.capabilities.kv_types[0]
    return family.backend().load(program, source, attrs.evolve(SMALL, **{"kv_type": kv_type, **options}))


def bad_batches_are_refused(model: TinyModel) -> None:
    """Each way in which a batch can break the contract; a refused step changes nothing."""
    executable = model.executable()
    tokens = model.tokens(60, N_TOKENS)
    step(executable, Part(tokens, 0, (0,)))
    before = executable.read_slot(0), executable.read_block(0)
    good = make_batch(Part(tokens[:2], N_TOKENS, (0,)))
    sequence = good.sequences[0]
    negative = np.array([-1, 2], np.int32)
    batches: dict[str, RowBatch] = {
        "a negative token": attrs.evolve(good, token_ids=negative),
        "a token outside the vocabulary": attrs.evolve(good, token_ids=np.array([model.vocab, 2], np.int32)),
        "positions that do not follow the start": attrs.evolve(good, positions=good.positions + 1),
        "rows that belong to no sequence": attrs.evolve(good, sequences=()),
        "a draft whose parent comes later": attrs.evolve(
            good, sequences=(attrs.evolve(sequence, n_committed=1, draft_parents=(1,)),)
        ),
        "an output of a row that is not there": attrs.evolve(good, heads=[HeadRequest(2, None)]),
        "top_k 0": attrs.evolve(good, heads=[HeadRequest(0, 0)]),
    }
    if model.program.kv_layers:
        table = np.array([99], np.int32)
        batches["a block that does not exist"] = attrs.evolve(
            good, sequences=(attrs.evolve(sequence, block_table=table),)
        )
    if model.has_states:
        batches["a slot that does not exist"] = attrs.evolve(good, sequences=(attrs.evolve(sequence, slot=99),))
    for what, batch in batches.items():
        _refused(BackendError, what, executable.run, batch)
        require_bytes(executable.read_slot(0), before[0], f"the recurrent states after refusing {what}")
        require_bytes(executable.read_block(0), before[1], f"block 0 after refusing {what}")
    got = step(executable, Part(tokens[:1], N_TOKENS, (0,)))[0]
    require_rows(got, model.plain((*tokens, tokens[0]))[0][-1:], "the row after refused batches", N_TOKENS)


def bad_bytes_are_refused(model: TinyModel) -> None:
    """Saved bytes of another length."""
    executable = model.executable()
    for what, restore, data in (
        ("a slot", executable.write_slot, executable.read_slot(0)),
        ("a block", executable.write_block, executable.read_block(0)),
    ):
        for wrong in (data + b"x", data[:-1]):
            if len(wrong) != len(data):
                _refused(BackendError, f"{what} of {len(wrong)} bytes in place of {len(data)}", restore, 1, wrong)


def digests_and_closing(model: TinyModel) -> None:
    """The digest names what could change saved bytes; a closed executable refuses to run."""
    digests = {}
    for kv_type in model.backend.capabilities.kv_types:
        executables = [model.load(kv_type=kv_type) for _ in range(2)]
        found = [executable.kernel_digest for executable in executables]
        for executable in executables:
            executable.close()
            executable.close()
        if found[0] != found[1] or not found[0]:
            raise Fault(f"two loads of one model have the kernel digests {found[0]!r} and {found[1]!r}")
        digests[found[0]] = kv_type
        batch = make_batch(Part(model.tokens(60, 1)))
        _refused(BackendError, "a step after close", executables[0].run, batch)
    if len(digests) != len(model.backend.capabilities.kv_types):
        raise Fault("the kernel digest is the same for caches of different types")


def declared_no_is_refused(model: TinyModel) -> None:
    """A type of the cache that is not listed, a prediction step and the like where the backend says it has none."""
    capabilities = model.backend.capabilities
    for kv_type in (*KV_TYPES, "unheard-of"):
        if kv_type not in capabilities.kv_types:
            _refused(BackendError, f"an {kv_type} cache", model.load, kv_type=kv_type)
    executable = model.executable()
    tokens = model.tokens(60, 3)
    if not capabilities.supports_drafts:
        batch = make_batch(Part(tokens, drafts=((1, 2),)))
        _refused(BackendError, "a step with drafts", executable.run, batch)
    if not capabilities.supports_snapshots and model.has_states:
        batch = make_batch(Part(tokens, snapshots=((1, 2),)))
        _refused(BackendError, "a step with a snapshot", executable.run, batch)
    if not capabilities.supports_prediction:
        step(executable, Part(tokens))
        hidden = np.zeros((2, model.program.hidden.width), np.float32)
        errors = (BackendError, NotImplementedError)
        _refused(errors, "a prediction step", executable.predict, make_batch(Part(tokens[1:], 1)), hidden)


def _refused(kind: Any, what: str, call: Callable[..., Any], *given: Any, **options: Any) -> None:
    try:
        call(*given, **options)
    except kind:
        return
    except Exception as error:
        raise Fault(f"{what} ends in {type(error).__name__}: {error}, expected a BackendError") from error
    raise Fault(f"{what} is accepted")
