"""Checks against the NumPy reference, within a stated table."""

from __future__ import annotations

import numpy as np

from kinetic_core.conformance.models import TinyModel
from kinetic_core.conformance.rows import folded
from kinetic_core.conformance.steps import F32, Part, make_batch, run, step
from kinetic_core.conformance.suite import Fault
from kinetic_core.program import ops

FLOATS = 1e-4
QUANTIZED = 0.04
HALF_CACHE = 2**-11
"""Of the spread of the reference's logits. F32, F16 and BF16 files with an f32 cache: the largest difference of any
logit. Quantized files, whose activations are rounded to 8 bits: the root of the mean square. An f16 cache adds half a
step of float16, where a key or value lies near the middle of two."""
ROUNDED = frozenset({"F32", "F16", "BF16"})


def agrees_with_reference(model: TinyModel) -> None:
    """A prompt, a tree of drafts, a commit and what follows, each against the reference."""
    for kv_type in model.backend.capabilities.kv_types:
        if kv_type in ("f16", "f32"):
            _agrees(model, kv_type)


def _agrees(model: TinyModel, kv_type: str) -> None:
    executables = [model.executable("reference", kv_type=kv_type), model.reference(kv_type)]
    tokens = model.tokens(40, 70)
    drafts = tuple(zip(folded((5, 6, 7, 8), model.vocab), (49, 50, 50, 52), strict=True))
    if not model.backend.capabilities.supports_drafts:
        drafts = ()
    got: list[F32] = []
    for executable in executables:
        batch = make_batch(Part(tokens[:50], drafts=drafts))
        rows = [run(executable, batch)[0]]
        at = 50
        if drafts:
            executable.commit(batch.sequences[0], (50, 52, 53))
            at = 53
        rows.append(step(executable, Part(tokens[50:], at))[0])
        got.append(np.concatenate(rows))
    require_agreement(model, got[0], got[1], f"{model.tensor_type} with an {kv_type} cache")


def require_agreement(model: TinyModel, got: F32, expected: F32, what: str) -> None:
    """Raise Fault unless the difference is inside the table."""
    spread = float(expected.std())
    difference = got.astype(np.float64) - expected
    quantized = any(info.type.name not in ROUNDED for info in model.source.tensors.values())
    cache = HALF_CACHE if what.endswith("f16 cache") else 0.0
    if quantized:
        # A choice of experts that falls otherwise moves a whole row: then the median row is what is stated.
        per_row = np.sqrt(np.mean(difference**2, axis=1))
        routed = any(isinstance(op, ops.Route) for op in model.program.all_ops)
        error = float(np.median(per_row) if routed else np.sqrt(np.mean(per_row**2))) / spread
        limit, kind = QUANTIZED + cache, "median row's root mean square" if routed else "root mean square"
    else:
        error, limit, kind = float(np.abs(difference).max()) / spread, FLOATS + cache, "largest difference"
    if not error <= limit:
        raise Fault(f"{what}: the {kind} from the reference is {error:.2g} of the spread, expected at most {limit:.2g}")
