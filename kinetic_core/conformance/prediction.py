"""Checks of the block that predicts the token after the next."""

from __future__ import annotations

import numpy as np

from kinetic_core.conformance.agreement import N_PROMPTS, PROMPT_LENGTH, Rows, cache_types, require_agreement
from kinetic_core.conformance.models import TinyModel, tokens_of
from kinetic_core.conformance.steps import F32, Part, Tokens, make_batch, require_bytes, require_rows, step
from kinetic_core.conformance.suite import NotApplicable
from kinetic_core.interfaces import Executable

N_TOKENS = 41


def need_prediction(model: TinyModel) -> None:
    """Raise NotApplicable without a prediction block, or where the backend runs none."""
    if model.program.prediction is None:
        raise NotApplicable("no prediction block")
    if not model.backend.capabilities.supports_prediction:
        raise NotApplicable("the backend runs no prediction blocks")


def predict(executable: Executable, tokens: Tokens, start: int, hidden: F32) -> tuple[F32, F32]:
    """(logits f32[rows, vocab], hidden f32[rows, d_model]) of a prediction step of these tokens from `start` on."""
    batch = make_batch(Part(tokens, start))
    executable.predict(batch, hidden)
    logits = np.array([executable.logits(row) for row in range(batch.n_rows)])
    return logits, np.array(executable.hidden(0, batch.n_rows))


def prediction_depends_on_its_path(model: TinyModel) -> None:
    """One batch against one by one, and again after wrong guesses were run at the same positions."""
    need_prediction(model)
    tokens = model.tokens(50, N_TOKENS)
    executable = model.executable()
    rows = step(executable, Part(tokens))[0]
    require_rows(rows, model.plain(tokens)[0], "a prompt of a model with a prediction block against one by one")
    hidden = np.array(executable.hidden(0, N_TOKENS))
    states = executable.read_slot(0)
    expected, expected_hidden = predict(executable, tokens[1:], 1, hidden[:-1])
    require_bytes(executable.read_slot(0), states, "the recurrent states after a prediction step")

    executable = model.executable()
    step(executable, Part(tokens))
    for at in range(1, N_TOKENS):
        guessed = tuple((token + 1) % model.vocab for token in tokens[at : at + 3])
        predict(executable, guessed, at, hidden[at - 1 : at - 1 + len(guessed)])
        got, got_hidden = predict(executable, tokens[at : at + 1], at, hidden[at - 1 : at])
        what = "a prediction row by itself, after wrong guesses at its position, against all in one step"
        require_rows(got, expected[at - 1 : at], what, at)
        require_rows(got_hidden, expected_hidden[at - 1 : at], f"the hidden state of {what}", at)
    following = model.tokens(51, 1)
    got = step(executable, Part(following, N_TOKENS))[0]
    require_rows(got, model.plain((*tokens, *following))[0][-1:], "the next row after prediction steps", N_TOKENS)


def prediction_agrees_with_reference(model: TinyModel) -> None:
    """The prediction block's logits against the reference's, on the same hidden states."""
    need_prediction(model)
    for kv_type in cache_types(model):
        executable = model.executable("reference", kv_type=kv_type)
        whole = _predicted(executable, model.tokens(50, N_TOKENS))
        prompts = [_predicted(executable, tokens_of(100 + n, PROMPT_LENGTH, model.vocab)) for n in range(N_PROMPTS)]
        what = f"the prediction block, {model.tensor_type} with an {kv_type} cache"
        require_agreement(model, kv_type, what, whole, prompts)


def _predicted(trunk: Executable, tokens: Tokens) -> Rows:
    """A prediction step of these tokens on the hidden states that `trunk` gives for them."""
    trunk.clear_slot(0)
    step(trunk, Part(tokens))
    hidden = np.array(trunk.hidden(0, len(tokens)))
    return lambda executable: predict(executable, tokens[1:], 1, hidden[:-1])[0]
