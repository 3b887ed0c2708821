"""Checks of whole answers through the engine: drafted equals plain, greedy and sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kinetic_core.conformance.models import MAX_ROWS, N_BLOCKS, N_SLOTS, TinyModel
from kinetic_core.conformance.rows import need_drafts
from kinetic_core.conformance.suite import Fault
from kinetic_core.engine.engine import Engine, EngineOptions
from kinetic_core.engine.request import Completion, GenerationRequest, SamplingOptions
from kinetic_core.interfaces import Draft, Drafter, DrafterCapabilities, DraftTree, Executable, PrefixCache
from kinetic_core.reference.tiny_tokenizer import MIN_VOCAB, tokenizer_metadata
from kinetic_core.text import Tokenizer

N_PROMPT, N_ANSWER = 33, 40
GREEDY = SamplingOptions(temperature=0.0, logprobs=2)
SAMPLED = (
    SamplingOptions(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, seed=5, logprobs=2),
    SamplingOptions(temperature=0.9, seed=6, repeat_penalty=1.4, presence_penalty=1.0, frequency_penalty=0.5),
)

Guess = Callable[[Sequence[int], int], DraftTree | None]


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


class Guesser(Drafter):
    """Drafts what a function makes of the sequence's tokens."""

    capabilities = DrafterCapabilities(branches=True)

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self._tokens: dict[int, list[int]] = {}

    def begin(self, sequence_id: int, token_ids: Sequence[int], salt: str = "") -> None:
        """Remember the tokens."""
        self._tokens[sequence_id] = list(token_ids)

    def committed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Remember these too."""
        self._tokens[sequence_id].extend(token_ids)

    def propose(self, sequence_id: int, max_tokens: int) -> Draft | None:
        """The function's guess."""
        tree = self._guess(self._tokens[sequence_id], max_tokens)
        return None if tree is None else Draft(tree, (0.5,) * len(tree.token_ids))

    def end(self, sequence_id: int) -> None:
        """Forget."""
        del self._tokens[sequence_id]


def right(whole: Sequence[int], length: int) -> Guess:
    """Always right: knows prompt and answer."""

    def guess(tokens: Sequence[int], most: int) -> DraftTree | None:
        rest = whole[len(tokens) : len(tokens) + min(length, most)]
        return DraftTree.chain(rest) if rest else None

    return guess


def wrong(whole: Sequence[int], vocab: int) -> Guess:
    """Always wrong: another token than the answer's, four deep."""

    def guess(tokens: Sequence[int], most: int) -> DraftTree | None:
        rest = whole[len(tokens) : len(tokens) + min(4, most)]
        return DraftTree.chain([(token + 1) % vocab for token in rest]) if rest else None

    return guess


def branching(whole: Sequence[int], vocab: int) -> Guess:
    """A tree whose right branch is not its first."""

    def guess(tokens: Sequence[int], most: int) -> DraftTree | None:
        rest = [*whole[len(tokens) : len(tokens) + 2]]
        if len(rest) < 2 or most < 5:
            return None
        a, b = rest
        return DraftTree(((a + 1) % vocab, a, b, (b + 1) % vocab, b), (-1, -1, 0, 1, 1))

    return guess


def make_engine(
    model: TinyModel, executable: Executable, *, drafter: Drafter | None = None, cache: PrefixCache | None = None
) -> Engine:
    """An engine on a borrowed executable."""
    options = EngineOptions(
        context_length=N_BLOCKS * 256,
        n_blocks=N_BLOCKS,
        n_slots=N_SLOTS,
        max_rows=MAX_ROWS,
        max_outputs=MAX_ROWS,
        has_states=model.has_states,
        kv_type=model.backend.capabilities.kv_types[0],
        max_sequences=4,
        draft_policy="always",
    )
    tokenizer = Tokenizer.from_metadata(tokenizer_metadata(max(MIN_VOCAB, model.vocab)))
    drafters = {} if drafter is None else {"drafter": drafter}
    return Engine(Borrowed(executable), tokenizer, model.vocab, options, cache=cache, drafters=drafters)


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
    """Raise Fault unless token ids and log-probabilities are the same."""
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


def drafted_equals_plain(model: TinyModel, sampling: SamplingOptions) -> None:
    """Plain, then with drafts that are always right, always wrong, and branching."""
    need_drafts(model)
    expected = answer(model, sampling)
    whole = (*model.tokens(30, N_PROMPT), *expected.token_ids)
    guesses = {
        "always right drafts of 1": right(whole, 1),
        "always right drafts of 7": right(whole, 7),
        "always wrong drafts": wrong(whole, model.vocab),
        "branching drafts": branching(whole, model.vocab),
    }
    for what, guess in guesses.items():
        got = answer(model, sampling, drafter=Guesser(guess))
        require_answer(got, expected, f"an answer with {what} against the plain one")
        accepted, drafted = got.timings.accepted, got.timings.drafted
        if what.startswith("always right") and accepted != drafted:
            raise Fault(f"{what}: {accepted} of {drafted} guesses were accepted, expected all")
        if what == "always wrong drafts" and accepted:
            raise Fault(f"{what}: {accepted} of {drafted} guesses were accepted, expected none")
        if not drafted:
            raise Fault(f"{what}: no guess was made, so nothing was checked")


def greedy(model: TinyModel) -> None:
    """Greedy answers."""
    drafted_equals_plain(model, GREEDY)


def sampled(model: TinyModel) -> None:
    """Sampled answers, with penalties too, for the same seed."""
    for sampling in SAMPLED:
        drafted_equals_plain(model, sampling)
