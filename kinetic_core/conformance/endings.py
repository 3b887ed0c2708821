"""Checks of where answers end: guesses that run past the end are neither shown nor counted, nor kept in the state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from kinetic_core.conformance.answers import N_ANSWER, N_PROMPT, answer, make_engine, require_answer
from kinetic_core.conformance.guesses import Guesser, random_tree, right
from kinetic_core.conformance.models import TinyModel
from kinetic_core.conformance.rows import need_drafts
from kinetic_core.conformance.states import need_snapshots
from kinetic_core.conformance.steps import Part, Tokens, require_bytes, step
from kinetic_core.conformance.suite import Fault
from kinetic_core.engine.request import Completion, GenerationRequest, SamplingOptions
from kinetic_core.interfaces import CacheCapabilities, CachedPrefix, Executable, PrefixCache
from kinetic_core.state import BlockPool, SlotPool

MOST_KEPT = 24
"""Tokens that an answer has at most before its end: about so many more would have followed."""
CHAINS, TREES = "right guesses past the end", "random trees"
SAMPLING = SamplingOptions(temperature=1.2, seed=8, presence_penalty=60.0, frequency_penalty=20.0, logprobs=2)
"""Penalties beyond the spread of any miniature's logits keep the text from repeating itself, and its end from coming at
its beginning."""


@attrs.frozen
class Ending:
    """What ends an answer. context_length, end_id: as in `make_engine`.

    passes: may guesses run past it? The engine asks for none that max_tokens or the context leaves no room for.
    """

    what: str
    request: GenerationRequest
    context_length: int = 512
    end_id: int | None = None
    passes: bool = True


@attrs.frozen
class Left:
    """What an ended sequence offers to a cache: its tokens so far, recurrent states and KV blocks, byte for byte."""

    tokens: Tokens
    states: bytes
    blocks: tuple[bytes, ...]


class Keeper(PrefixCache):
    """Keeps what answers leave and finds nothing."""

    capabilities = CacheCapabilities()

    def __init__(self) -> None:
        self.left: list[Left] = []

    def attach(self, executable: Executable, blocks: BlockPool, slots: SlotPool) -> None:
        """Remember where states can be read."""
        self._executable = executable

    def find(self, token_ids: Sequence[int], salt: str = "") -> CachedPrefix | None:
        """Nothing."""
        return None

    def store(self, token_ids: Sequence[int], blocks: Sequence[int], slot: int, salt: str = "") -> None:
        """Keep the bytes."""
        states = self._executable.read_slot(slot) if slot >= 0 else b""
        self.left.append(Left(tuple(token_ids), states, tuple(map(self._executable.read_block, blocks))))

    def wanted_snapshots(self, token_ids: Sequence[int], start: int) -> Sequence[int]:
        """None."""
        return ()

    def clear(self) -> None:
        """Forget."""
        self.left.clear()


def ends_where_plain_decoding_ends(model: TinyModel) -> None:
    """By max_tokens, an end token, a stop string and the end of the context; chains and random trees past all that."""
    need_drafts(model)
    need_snapshots(model)
    tokens = model.tokens(30, N_PROMPT)
    endless = answer(model, SAMPLING, tokens=tokens)
    whole = (*tokens, *endless.token_ids)
    for ending in _endings(tokens, endless):
        expected, plain_left = _ended(model, ending)
        n_tokens = N_PROMPT + expected.usage.completion_tokens
        guesses = {
            "right guesses past the end": right(whole, len(whole)),
            "random trees": random_tree(whole, model.vocab),
        }
        for drafts, guess in guesses.items():
            drafter = Guesser(guess)
            got, left = _ended(model, ending, drafter)
            what = f"an answer that ends by {ending.what}, with {drafts}"
            require_answer(got, expected, f"{what}, against the plain one")
            passed = drafter.reached > n_tokens or drafts == TREES or not ending.passes
            if not got.timings.accepted or not passed:
                raise Fault(f"{what}: no guess came true, or none went past the end, so nothing was checked")
            _require_left(model, left, plain_left, whole, what)


def _endings(tokens: Tokens, endless: Completion) -> Iterable[Ending]:
    text, ids = endless.text, endless.token_ids
    request = GenerationRequest(tokens, SAMPLING, N_ANSWER)
    yield Ending("max_tokens", attrs.evolve(request, max_tokens=MOST_KEPT), passes=False)
    yield Ending("the context's end", attrs.evolve(request, max_tokens=None), len(tokens) + MOST_KEPT, passes=False)
    # The last token, and the last two characters, that are new where they stand.
    at = max(at for at in range(MOST_KEPT) if ids.index(ids[at]) == at)
    yield Ending("an end token", request, end_id=ids[at])
    at = max(at for at in range(min(MOST_KEPT, len(text) // 2)) if text.index(text[at : at + 2]) == at)
    yield Ending("a stop string", attrs.evolve(request, stop=(text[at : at + 2],)))


def _ended(model: TinyModel, ending: Ending, drafter: Guesser | None = None) -> tuple[Completion, Left]:
    """An answer and what it leaves."""
    keeper = Keeper()
    engine = make_engine(
        model,
        model.executable("engine"),
        drafter=drafter,
        cache=keeper,
        context_length=ending.context_length,
        end_id=ending.end_id,
    )
    try:
        completion = engine.submit(ending.request).result()[0]
        if engine.statistics()["drafter_failed"] or engine.statistics()["cache_failed"]:
            raise Fault("the suite's own drafter or cache failed and was turned off")
    finally:
        engine.close()
    (left,) = keeper.left
    return completion, left


def _require_left(model: TinyModel, left: Left, plain: Left, whole: Tokens, what: str) -> None:
    """The state is that of tokens which plain decoding has run by its end, and of nothing else."""
    n_tokens = len(left.tokens)
    if left.tokens != whole[:n_tokens] or n_tokens > len(plain.tokens):
        raise Fault(f"{what}: leaves the state of {n_tokens} tokens, plain decoding that of {len(plain.tokens)}")
    executable = model.executable()
    step(executable, Part(left.tokens, 0, (0,)))
    if model.has_states:
        require_bytes(left.states, executable.read_slot(0), f"{what}: the recurrent states after its {n_tokens} tokens")
    for number, block in enumerate(left.blocks):
        expected = executable.read_block(number)
        require_bytes(block, expected, f"{what}: KV block {number} after its {n_tokens} tokens")
