"""The conformance suite on the prediction block's drafter, and what it finds in a broken one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from kinetic_drafters.mtp import MtpDrafter

from kinetic_core.conformance import ClauseFailure, DrafterConformance, NotApplicable
from kinetic_core.interfaces import SequenceStep


class TestMtp(DrafterConformance):
    target = MtpDrafter
    name = "mtp"
    models = ("tiny-hybrid/prediction", "tiny-hybrid/recurrent", "qwen35/prediction*", "qwen35moe/experts-prediction")


class ReadsAnothersRows(MtpDrafter):
    """Takes the first sequence's hidden states for everybody's."""

    def stepped(self, steps: Sequence[SequenceStep]) -> None:
        first = steps[0].rows[0]
        super().stepped([attrs.evolve(step, rows=tuple(range(first, first + len(step.rows)))) for step in steps])


class DeniesBranches(MtpDrafter):
    capabilities = type(MtpDrafter.capabilities)(reads_hidden=True)


def run(target: type[MtpDrafter], clause_id: str, variant: str = "prediction") -> None:
    model = f"tiny-hybrid/{variant}"
    suite: Any = type("TestIt", (DrafterConformance,), {"target": target, "name": "it", "models": (model,)})
    try:
        next(case for case in suite.cases() if case.id == f"{clause_id}-{model}-F32").run()
    finally:
        suite.close()


@pytest.mark.parametrize(
    ("target", "clause_id", "words"),
    [
        (ReadsAnothersRows, "DRAFT-07", "a request beside it changes a proposal"),
        (DeniesBranches, "DRAFT-05", "say branches=False"),
    ],
)
def test_a_broken_one_fails_at_its_clause(target: type[MtpDrafter], clause_id: str, words: str) -> None:
    with pytest.raises(ClauseFailure, match=words):
        run(target, clause_id)


def test_a_model_without_a_prediction_block_is_left_out() -> None:
    with pytest.raises(NotApplicable, match="does not suit"):
        run(MtpDrafter, "DRAFT-01", "untied")
