"""The suite of output heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kinetic_core.conformance.contract import best
from kinetic_core.conformance.models import ModelFamily, TinyModel
from kinetic_core.conformance.on_models import OnModels, registered_backend
from kinetic_core.conformance.steps import F32, Part, make_batch, prompt, require_rows, step
from kinetic_core.conformance.suite import Conformance, Fault, clause
from kinetic_core.interfaces import HeadRequest, KernelBackend
from kinetic_core.reference.tiny_hybrid import KEY, TinyHybrid

N_TOKENS = 30


class HeadConformance(OnModels, Conformance, kind="head"):
    """Proves that a head gives the full output layer's tokens, order and scores::

        class TestQuick(HeadConformance):
            target = QuickHead
            name = "quick"

    backend: name or class of what the models run on. formats: the tensor formats they are stored in.
    """

    backend: ClassVar[str | type[KernelBackend]] = "cpu"
    formats: ClassVar[Sequence[str]] = ("F32", "Q8_0", "Q4_0")

    @classmethod
    def make_family(cls) -> ModelFamily:
        """The miniature hybrid's variants without a prediction block, with the target as their head."""
        backend = registered_backend(cls.backend)
        tied_and_untied = ("untied", "tied")
        return ModelFamily(TinyHybrid, KEY, backend, cls.formats, lambda v: v.name in tied_and_untied, head=cls.target)

    def full(self, model: TinyModel) -> F32:
        """f32[N_TOKENS, vocab] of the full head."""
        whole = TinyModel(model.architecture_class, model.name, model.variant, model.tensor_type, model.backend)
        try:
            return step(whole.executable(), Part(model.tokens(70, N_TOKENS)))[0]
        finally:
            whole.close()

    @clause("HEAD-01", "Every row's whole distribution has the bits of the full output layer.")
    def distribution(self, model: TinyModel) -> None:
        """See the statement."""
        got = step(model.executable(), Part(model.tokens(70, N_TOKENS)))[0]
        require_rows(got, self.full(model), "the head's logits against the full output layer's")

    @clause("HEAD-02", "The best k tokens, their order and scores are the full layer's, for every k.")
    def candidates(self, model: TinyModel) -> None:
        """See the statement."""
        whole, executable = self.full(model), model.executable()
        sizes = [1, 2, 5, 40, model.vocab]
        heads = [HeadRequest(row, sizes[row % len(sizes)]) for row in range(N_TOKENS)]
        executable.run(make_batch(Part(model.tokens(70, N_TOKENS)), heads=heads))
        for output, head in enumerate(heads):
            ids, scores = executable.candidates(output)
            _require_candidates(ids.tolist(), scores, whole[head.row], best(whole[head.row], head.top_k or 0), head)

    @clause("HEAD-03", "Tokens that are asked for by name come with the full layer's scores.")
    def exact_ids(self, model: TinyModel) -> None:
        """See the statement."""
        whole, executable = self.full(model), model.executable()
        wanted = (0, 3, model.vocab - 1)
        heads = [HeadRequest(row, 2, wanted) for row in range(N_TOKENS)]
        executable.run(make_batch(Part(model.tokens(70, N_TOKENS)), heads=heads))
        for output, head in enumerate(heads):
            ids, scores = executable.candidates(output)
            _require_candidates(ids.tolist(), scores, whole[head.row], best(whole[head.row], 2, wanted), head)

    @clause("HEAD-04", "A row's scores do not depend on which other rows are wanted, nor on the split of the prompt.")
    def wanted_rows(self, model: TinyModel) -> None:
        """See the statement."""
        whole, executable = self.full(model), model.executable()
        tokens = model.tokens(70, N_TOKENS)
        heads = [HeadRequest(row, None) for row in (0, 7, 8, N_TOKENS - 1)]
        executable.run(make_batch(Part(tokens), heads=heads))
        for output, head in enumerate(heads):
            got = np.array(executable.logits(output))[None]
            require_rows(got, whole[head.row : head.row + 1], "a wanted row among few", head.row)
        require_rows(prompt(model.executable(), tokens, [1, 9, 3]), whole, "the head's logits of a split prompt")


def _require_candidates(ids: list[int], scores: F32, whole: F32, expected: list[int], head: HeadRequest) -> None:
    if ids != expected:
        raise Fault(f"row {head.row}, top_k {head.top_k}: got the tokens {ids[:6]}, expected {expected[:6]}")
    if np.asarray(scores, np.float32).tobytes() != whole[expected].tobytes():
        raise Fault(f"row {head.row}, top_k {head.top_k}: the scores are not the full output layer's")
