"""A drafter as the engine keeps it: what is known of its guesses and their cost, and its faults kept inside."""

from __future__ import annotations

import logging
import time
from operator import index
from typing import TYPE_CHECKING, Any

from kinetic_core.engine.acceptance import PATIENCE, Acceptance, Pause, Rates
from kinetic_core.engine.step_costs import RunCost
from kinetic_core.errors import describe
from kinetic_core.interfaces.drafter import Draft, DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kinetic_core.engine.draft_policy import NextStep
    from kinetic_core.interfaces.drafter import Drafter

logger = logging.getLogger("kinetic.engine")

MOST_UNTOLD = 64
"""Chosen tokens that a source that looks things up is told together, where it is not asked before."""
LONGEST_PAUSE, MOST_PAUSE = 7, 63
"""Steps for which a source that only looks things up is left alone at most; and where asking takes much of a step."""
IN_VAIN_SHARE = 0.003
"""How much of a step such a source may take where it has had nothing for long, over all sequences."""
ASK_SMOOTHING = 0.05
"""Weight of the last ask in what is known of asking a source."""
SELDOM = 0.1
"""A source that was useful less often is not asked several times in vain before new sequences' first pause."""
HARDLY_EVER, FIRST_PAUSE = 0.01, 15
"""With one that was useful less often still, new sequences begin with a pause of so many steps."""
LONGEST_MODEL_PAUSE = 128
"""The same for a source that runs a part of the model: a useless run in 129 steps costs less than 1 %."""
MOST_SEQUENCES_WITHOUT = 15
"""Sequences in a row that such a source may be kept from, where it paid for none of the last: it runs their prompts."""


class Source:
    """A drafter, its figures, and its record with each sequence that it knows.

    asked, proposed, drafted, accepted: how often it was asked; its guesses, those that were run, and that came true.
    seconds: that its calls took. failed: is it turned off?

    ask_s: seconds that it takes to ask it once, lately. useful: share of the last asks that gave rows to run.
    run, pause: of a source that runs a part of the model: the cost of a run, and the pause after runs that paid for no
    sequence.
    """

    def __init__(self, name: str, drafter: Drafter, vocab_size: int) -> None:
        self.name = name
        self.drafter = drafter
        self._vocab_size = vocab_size
        self.runs_model = drafter.capabilities.reads_hidden
        self.asked = self.proposed = self.drafted = self.accepted = 0
        self.seconds = 0.0
        self.failed = False
        self.ask_s = 0.0
        self.useful = 1.0
        self.run = RunCost()
        self.pause = Pause(LONGEST_MODEL_PAUSE)
        self._without = Pause(MOST_SEQUENCES_WITHOUT, 1)
        self._everyone = Rates()
        self._records: dict[int, Acceptance] = {}

    # sequences

    def begin(self, number: int, prompt_ids: Sequence[int], salt: str, *, always: bool = False) -> None:
        """Tell it of a sequence, unless it runs a part of the model and paid for none of the last. always: do."""
        if self.failed or not (always or not self.runs_model or self._without.is_over()):
            return
        self._records[number] = Acceptance(
            self._everyone,
            LONGEST_MODEL_PAUSE if self.runs_model else LONGEST_PAUSE,
            costly=self.runs_model,
            patience=PATIENCE if self.useful >= SELDOM else 1,
            first_pause=FIRST_PAUSE if self.useful < HARDLY_EVER else 0,
        )
        self.call("begin", number, prompt_ids, salt)

    def record(self, number: int) -> Acceptance | None:
        """What is known of its guesses for a sequence; None where it does not know the sequence, or is turned off."""
        return self._records.get(number)

    @property
    def knows_any(self) -> bool:
        """Is there a sequence that it was told of and that is not done?"""
        return bool(self._records)

    def forked(self, number: int, parent: int) -> None:
        """A sequence that it was told of goes on from another's state."""
        if number in self._records and parent in self._records:
            self.tell(parent)
            self.call("forked", number, parent)

    def chosen(self, number: int, token: int) -> None:
        """A sequence's next token is known. What looks things up is told many together."""
        record = self._records.get(number)
        if record is not None:
            record.chosen(token)
            record.untold.append(token)
            if self.runs_model or len(record.untold) == MOST_UNTOLD:
                self.tell(number)

    def tell(self, number: int) -> None:
        """Hand on the tokens that were chosen since the last time, if it knows the sequence."""
        record = self._records.get(number)
        if record is not None and record.untold:
            tokens, record.untold = tuple(record.untold), []
            self.call("committed", number, tokens)

    def end(self, number: int) -> None:
        """A sequence that it may have been told of is done."""
        record = self._records.get(number)
        if record is None:
            return
        self.tell(number)
        self.call("end", number)
        self._records.pop(number, None)
        if self.runs_model and record.was_tried:
            self._without.after(record.has_paid)

    # guesses

    def ask(self, number: int, most: int) -> Draft | None:
        """Its guesses for a sequence, at most so many tokens; None where it has none, or does not know it."""
        if number not in self._records:
            return None
        began = time.perf_counter()
        self.tell(number)
        self.asked += 1
        draft = self._draft(most, "propose", number, most)
        self.ask_s += ASK_SMOOTHING * (time.perf_counter() - began - self.ask_s)
        record = self._records.get(number)
        if draft is not None and record is not None:
            record.proposed(draft)
        return draft

    def ask_after(self, number: int, guessed: Sequence[int], most: int) -> Draft | None:
        """What follows these guesses for a sequence, at most so many tokens; None as for `ask`."""
        if number not in self._records:
            return None
        self.tell(number)
        return self._draft(most, "propose_after", number, guessed, most)

    def paid(self, number: int, pays: bool, step: NextStep) -> None:
        """Of a source that looks things up: was what it had for a sequence worth a row and its time?"""
        self.useful += ASK_SMOOTHING * (pays - self.useful)
        record = self._records.get(number)
        if record is not None:
            record.paid(pays, self.longest_pause(step))

    def longest_pause(self, step: NextStep) -> int:
        """Steps for which it is left alone at most, where it looks things up."""
        if not step.costs.is_measured:
            return LONGEST_PAUSE
        n_steps = step.n_answering * self.ask_s / (IN_VAIN_SHARE * step.costs.seconds(step.n_answering))
        return int(min(max(n_steps, LONGEST_PAUSE), MOST_PAUSE))

    def _draft(self, most: int, method: str, *arguments: Any) -> Draft | None:
        """Guesses that fit, with plain numbers; None for none, and from one that is turned off for what it gave."""
        if self.failed:
            return None
        began = time.perf_counter()
        try:
            draft = getattr(self.drafter, method)(*arguments)
            checked = None if draft is None else self._checked(draft, most)
            self.proposed += len(checked.tree.token_ids) if checked is not None else 0
            return checked
        except Exception:
            self.fail()
            return None
        finally:
            self.seconds += time.perf_counter() - began

    def _checked(self, draft: Draft, most: int) -> Draft | None:
        """The draft with plain numbers; None without tokens. Raises ValueError, or what its parts raise."""
        tokens, parents = tuple(map(index, draft.tree.token_ids)), tuple(map(index, draft.tree.parents))
        expected = tuple(map(float, draft.expected))
        if not len(tokens) == len(parents) == len(expected) <= most:
            got = f"{len(tokens)} tokens, {len(parents)} parents, {len(expected)} estimates"
            raise ValueError(describe("the parts of a draft do not fit", got=got, expected=f"at most {most} of each"))
        for node, (token, parent, estimate) in enumerate(zip(tokens, parents, expected, strict=True)):
            if not (0 <= token < self._vocab_size and -1 <= parent < node and 0.0 <= estimate <= 1.0):
                got = f"token {token}, parent {parent}, estimate {estimate}"
                raise ValueError(describe("a guess cannot be run", where=f"node {node} of a draft", got=got))
        return Draft(DraftTree(tokens, parents), expected) if tokens else None

    # faults

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of the drafter that gives nothing back; one that raises turns it off."""
        if self.failed:
            return
        began = time.perf_counter()
        try:
            getattr(self.drafter, method)(*arguments)
        except Exception:
            self.fail()
        finally:
            self.seconds += time.perf_counter() - began

    def fail(self) -> None:
        """Turn it off for good. Called while its exception is handled."""
        logger.exception("the drafter %r failed and is off from now on; answers are the same without it", self.name)
        self.failed = True
        self._records.clear()

    def statistics(self) -> dict[str, Any]:
        """Its own figures, and those that are kept here. Called on any thread."""
        try:
            own = dict(self.drafter.statistics())
        except Exception:  # on a thread of whoever asks: no reason to turn it off
            logger.exception("the drafter %r has no figures", self.name)
            own = {}
        counts = ("asked", "proposed", "drafted", "accepted", "seconds", "failed")
        own |= {name: getattr(self, name) for name in counts}
        return own | {"run_s": self.run.seconds} if self.runs_model else own
