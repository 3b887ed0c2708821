"""Models with a prediction block, and what the block says when it is run from scratch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kinetic_drafters.mtp import estimates

from kinetic_core.conformance.driven import Driven
from kinetic_core.conformance.models import ModelFamily, TinyModel
from kinetic_core.conformance.on_models import registered_backend
from kinetic_core.conformance.steps import Part, make_batch
from kinetic_core.gguf import open_model_file
from kinetic_core.interfaces import Executable, HeadRequest, LoadOptions
from kinetic_core.plugins import load_registry
from kinetic_core.program.record import record_program
from kinetic_core.reference.tiny_hybrid import KEY, TinyHybrid

DATA = Path(__file__).parent.parent / "data"
TRAINED = DATA / "qwen35-trained-q4_k_m.gguf"
MAX_ROWS = 320


def tiny_models(backend: str) -> ModelFamily:
    """The miniature hybrid with a prediction block, random: its block's guesses are nearly always wrong."""
    family = registered_backend(backend)
    return ModelFamily(TinyHybrid, KEY, family, ("F32",), lambda variant: variant.name == "prediction")


def tiny_model(family: ModelFamily) -> TinyModel:
    return family.model("prediction-F32")


def load_trained(**options: Any) -> Executable:
    """A small model trained on Python source, whose block's guesses are mostly right."""
    source = open_model_file(TRAINED)
    registry = load_registry()
    architecture = registry.architecture_for(source.metadata.get_str("general.architecture"))(source)
    program = record_program(architecture, registry.get("head", "full")(), source)
    values = {"n_threads": 2, "n_blocks": 6, "n_slots": 4, "max_rows": MAX_ROWS, **options}
    return registry.get("backend", "cpu")().load(program, source, LoadOptions(**values))


def trained_prompts() -> list[list[int]]:
    """40 prompts of 64 tokens from files that the model has not seen."""
    prompts: list[list[int]] = json.loads((DATA / "qwen35-trained-prompts.json").read_text())
    return prompts


class Scratch:
    """The prediction block over a whole sequence, every time anew, on an executable that nothing else uses."""

    table = (2, 1)

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._hidden: dict[tuple[int, ...], np.ndarray] = {}

    def guesses(self, tokens: Sequence[int], depth: int) -> list[tuple[int, int, float]]:
        """(best, second best, estimate) of the `depth` tokens after these, each from the guess before it."""
        hidden = self._trunk(tuple(tokens[:-1]))
        found = []
        ids, lead, state = self._predict(tokens[1:], 1, hidden)
        for number in range(depth):
            found.append((ids[0], ids[1], estimates(lead)[0]))
            if number + 1 < depth:
                ids, lead, state = self._predict([ids[0]], len(tokens) + number, state)
        return found

    def _trunk(self, tokens: tuple[int, ...]) -> np.ndarray:
        """f32[tokens, d_model]: hidden states."""
        self._executable.clear_slot(0)
        hidden = []
        for start in range(0, len(tokens), MAX_ROWS):
            part = Part(tokens[start : start + MAX_ROWS], start, self.table)
            self._executable.run(make_batch(part, heads=()))
            hidden.append(self._executable.hidden(0, len(part.tokens)).copy())
        return np.concatenate(hidden)

    def _predict(self, tokens: Sequence[int], start: int, hidden: np.ndarray) -> tuple[list[int], float, np.ndarray]:
        for at in range(0, len(tokens), MAX_ROWS):
            own = tuple(tokens[at : at + MAX_ROWS])
            batch = make_batch(Part(own, start + at, self.table), heads=[HeadRequest(len(own) - 1, 2)])
            self._executable.predict(batch, hidden[at : at + MAX_ROWS])
        ids, scores = self._executable.candidates(0)
        return ids.tolist(), float(scores[0] - scores[1]), self._executable.hidden(len(own) - 1, 1).copy()


def require_proposals(sequence: Driven, scratch: Scratch, least: int, *, room: int | None = None) -> None:
    """Every draft is the chain that the block gives from scratch, and its second best first guess at most once.

    least: drafts that there must be. room: positions that the sequence has blocks for; None: enough.
    """
    n_drafts = 0
    for n_tokens, most, draft in sequence.drafts:
        if draft is None:
            assert room is not None and n_tokens > room
            continue
        n_drafts += 1
        tree = draft.tree
        chain, node = [], -1
        branches = []
        for index, parent in enumerate(tree.parents):
            if parent == node:
                chain.append(index)
                node = index
            else:
                branches.append(index)
        expected = scratch.guesses(sequence.tokens[:n_tokens], len(chain))
        got = [(tree.token_ids[index], draft.expected[index]) for index in chain]
        assert got == [(token, estimate) for token, _, estimate in expected], (n_tokens, most)
        assert [(tree.token_ids[index], tree.parents[index]) for index in branches] in ([], [(expected[0][1], -1)])
        limit = most if room is None else min(most, room - n_tokens + 1)
        assert len(chain) <= limit and (len(chain) == limit or len(tree.token_ids) == most)
    assert n_drafts >= least
