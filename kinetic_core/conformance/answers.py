"""Checks of whole answers through the engine: drafted equals plain, greedy and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kinetic_core.conformance.guesses import Guesser, branching, random_tree, right, wrong
from kinetic_core.conformance.models import MAX_ROWS, N_BLOCKS, N_SLOTS, TinyModel
from kinetic_core.conformance.rows import need_drafts
from kinetic_core.conformance.suite import Fault
from kinetic_core.engine.engine import Engine, EngineOptions
from kinetic_core.engine.request import Completion, GenerationRequest, SamplingOptions
from kinetic_core.interfaces import Drafter, Executable, PrefixCache
from kinetic_core.reference.tiny_tokenizer import MIN_VOCAB, tokenizer_metadata
from kinetic_core.text import Tokenizer
from kinetic_core.text.vocabulary import NORMAL

N_PROMPT, N_ANSWER = 33, 40
GREEDY = SamplingOptions(temperature=0.0, logprobs=2)
SAMPLED = (
    SamplingOptions(temperature=1.2, seed=5),
    SamplingOptions(
        temperature=0.9,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repeat_penalty=2.0,
        presence_penalty=8.0,
        frequency_penalty=4.0,
        seed=6,
        logprobs=2,
    ),
    SamplingOptions(
        temperature=40.0, top_k=60, top_p=1.0, min_p=0.0, presence_penalty=60.0, frequency_penalty=20.0, seed=7
    ),
)
"""Without penalties; with penalties on the whole distribution; with penalties on the best tokens.

The penalties are as large as the spread of any miniature's logits, so that a draft row shows that is judged by another
row's history. So does one that asks for fewer candidates than its own needs: at the last's temperature every one of
them moves the choice, and penalties push out most of those that were chosen before.
"""


class Borrowed(Executable):
    """An executable whose owner closes it, lent to an engine that closes what it is given."""

    def __init__(self, lender: Executable) -> None:
        self._lender = lender

    @property
    def max_rows(self) -> int:
        """As the lender."""
        return self._lender.max_rows

    def run(self, batch: Any) -> None:
        """As the lender."""
        self._lender.run(batch)

    def logits(self, output: int) -> Any:
        """As the lender."""
        return self._lender.logits(output)

    def candidates(self, output: int) -> Any:
        """As the lender."""
        return self._lender.candidates(output)

    def commit(self, sequence: Any, accepted: Sequence[int]) -> None:
        """As the lender."""
        self._lender.commit(sequence, accepted)

    def hidden(self, first_row: int, n_rows: int) -> Any:
        """As the lender."""
        return self._lender.hidden(first_row, n_rows)

    def predict(self, batch: Any, hidden: Any) -> None:
        """As the lender."""
        self._lender.predict(batch, hidden)

    def copy_block(self, source: int, target: int) -> None:
        """As the lender."""
        self._lender.copy_block(source, target)

    def read_block(self, block: int) -> bytes:
        """As the lender."""
        return self._lender.read_block(block)

    def write_block(self, block: int, data: bytes) -> None:
        """As the lender."""
        self._lender.write_block(block, data)

    def clear_slot(self, slot: int) -> None:
        """As the lender."""
        self._lender.clear_slot(slot)

    def copy_slot(self, source: int, target: int) -> None:
        """As the lender."""
        self._lender.copy_slot(source, target)

    def read_slot(self, slot: int) -> bytes:
        """As the lender."""
        return self._lender.read_slot(slot)

    def write_slot(self, slot: int, data: bytes) -> None:
        """As the lender."""
        self._lender.write_slot(slot, data)

    @property
    def kernel_digest(self) -> str:
        """As the lender."""
        return self._lender.kernel_digest

    def close(self) -> None:
        """Nothing: the lender's owner does."""


def make_engine(
    model: TinyModel,
    executable: Executable,
    *,
    drafter: Drafter | None = None,
    cache: PrefixCache | None = None,
    context_length: int = N_BLOCKS * 256,
    end_id: int | None = None,
) -> Engine:
    """An engine on a borrowed executable. end_id: the token that ends an answer; None: no token does."""
    options = EngineOptions(
        context_length=context_length,
        n_blocks=N_BLOCKS,
        n_slots=N_SLOTS,
        max_rows=MAX_ROWS,
        max_outputs=MAX_ROWS,
        has_states=model.has_states,
        kv_type=model.backend.capabilities.kv_types[0],
        max_sequences=4,
        draft_policy="always",
    )
    drafters = {} if drafter is None else {"drafter": drafter}
    tokenizer = _tokenizer(model.vocab, end_id)
    return Engine(Borrowed(executable), tokenizer, model.vocab, options, cache=cache, drafters=drafters)


def _tokenizer(vocab: int, end_id: int | None) -> Tokenizer:
    """Every token is text: the first 256 are the bytes."""
    metadata = tokenizer_metadata(max(MIN_VOCAB, vocab))
    metadata["tokenizer.ggml.token_type"] = np.full(max(MIN_VOCAB, vocab), NORMAL, np.int32)
    del metadata["tokenizer.ggml.eos_token_id"]
    if end_id is not None:
        metadata["tokenizer.ggml.eos_token_id"] = end_id
    return Tokenizer.from_metadata(metadata)


def answer(
    model: TinyModel,
    sampling: SamplingOptions,
    *,
    drafter: Drafter | None = None,
    tokens: Sequence[int] | None = None,
    n_answer: int = N_ANSWER,
) -> Completion:
    """One answer of a fresh engine. Raises Fault when the drafter was turned off."""
    engine = make_engine(model, model.executable("engine"), drafter=drafter)
    try:
        ids = tuple(model.tokens(30, N_PROMPT) if tokens is None else tokens)
        completion = engine.submit(GenerationRequest(ids, sampling, n_answer, ignore_end=True)).result()[0]
        if engine.statistics()["drafter_failed"]:
            raise Fault("the drafter failed and was turned off")
        return completion
    finally:
        engine.close()


def require_answer(got: Completion, expected: Completion, what: str) -> None:
    """Raise Fault unless token ids, log-probabilities, text, end and counts are the same."""
    if got.token_ids != expected.token_ids:
        pairs = zip(got.token_ids, expected.token_ids, strict=False)
        at = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), len(expected.token_ids))
        raise Fault(
            f"{what}: the answers part at token {at}: got {got.token_ids[at : at + 4]}, "
            f"expected {expected.token_ids[at : at + 4]}"
        )
    if got.logprobs != expected.logprobs:
        at = next(n for n, (a, b) in enumerate(zip(got.logprobs, expected.logprobs, strict=True)) if a != b)
        raise Fault(f"{what}: the same tokens with other log-probabilities, first at token {at}")
    ends = [(c.text, c.finish_reason, c.usage.completion_tokens) for c in (got, expected)]
    if ends[0] != ends[1]:
        raise Fault(f"{what}: the same tokens with another text, end or count: got {ends[0]}, expected {ends[1]}")


def drafted_equals_plain(model: TinyModel, sampling: SamplingOptions, lengths: Sequence[int]) -> None:
    """Plain, then with drafts that are always right (of these lengths), always wrong, branching, and random trees."""
    need_drafts(model)
    expected = answer(model, sampling)
    whole = (*model.tokens(30, N_PROMPT), *expected.token_ids)
    guesses = {f"always right drafts of {length}": right(whole, length) for length in lengths}
    guesses["always wrong drafts"] = wrong(whole, model.vocab)
    guesses["branching drafts"] = branching(whole, model.vocab)
    guesses["random trees"] = random_tree(whole, model.vocab)
    for what, guess in guesses.items():
        got = answer(model, sampling, drafter=Guesser(guess))
        require_answer(got, expected, f"an answer with {what} against the plain one")
        accepted, drafted = got.timings.accepted, got.timings.drafted
        if what.startswith("always right") and accepted != drafted:
            raise Fault(f"{what}: {accepted} of {drafted} guesses were accepted, expected all")
        if what == "always wrong drafts" and accepted:
            raise Fault(f"{what}: {accepted} of {drafted} guesses were accepted, expected none")
        if what in ("branching drafts", "random trees") and not 0 < accepted < drafted:
            raise Fault(f"{what}: {accepted} of {drafted} guesses were accepted, expected some and not all")
        if not drafted:
            raise Fault(f"{what}: no guess was made, so nothing was checked")


def greedy(model: TinyModel) -> None:
    """Greedy answers."""
    drafted_equals_plain(model, GREEDY, (1, 7))


def sampled(model: TinyModel) -> None:
    """Sampled answers, with penalties too, for the same seed."""
    for sampling in SAMPLED:
        drafted_equals_plain(model, sampling, (7,))
