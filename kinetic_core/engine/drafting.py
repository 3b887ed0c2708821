"""The engine's side of drafting: asks the sources for guesses, chooses which to run, isolates their faults."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import attrs

from kinetic_core.engine.acceptance import PATIENCE, Acceptance, Pause, Rates
from kinetic_core.engine.draft_policy import Asked, GuessTree, best_rows, worthwhile_depths
from kinetic_core.engine.sequence import Sequence
from kinetic_core.engine.step_costs import RunCost, StepCosts
from kinetic_core.errors import describe
from kinetic_core.interfaces.drafter import Draft, DraftTree, SequenceStep

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Executable
    from kinetic_core.interfaces.drafter import Drafter, TokenTexts

logger = logging.getLogger("kinetic.engine")

DraftPolicy = Literal["measured", "always"]
"""measured: guesses that promise more tokens per second. always: every guess that fits, at any cost; for tests."""

MAX_DRAFT = 31
"""Most draft rows of one sequence in a step."""
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
LONGEST_MODEL_PAUSE = 128
"""The same for a source that runs a part of the model: a useless run in 129 steps costs less than 1 %."""


@attrs.define(eq=False)
class _Source:
    """A drafter and its figures.

    asked, proposed, drafted, accepted: how often it was asked; its guesses, those that were run, and that came true.
    seconds: that its calls took. failed: is it turned off?

    ask_s: seconds that it takes to ask it once, lately. useful: share of the last asks that gave rows to run.
    run, pause: of a source that runs a part of the model: the cost of a run, and the pause after runs that paid for no
    sequence.
    """

    name: str
    drafter: Drafter
    runs_model: bool
    everyone: Rates = attrs.field(factory=Rates)
    asked: int = 0
    proposed: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    failed: bool = False
    run: RunCost = attrs.field(factory=RunCost)
    pause: Pause = attrs.field(factory=lambda: Pause(LONGEST_MODEL_PAUSE))
    ask_s: float = 0.0
    useful: float = 1.0

    def longest_pause(self, n_answering: int, costs: StepCosts) -> int:
        """Steps for which it is left alone at most, where it looks things up."""
        if not costs.is_measured:
            return LONGEST_PAUSE
        steps = n_answering * self.ask_s / (IN_VAIN_SHARE * costs.seconds(n_answering))
        return int(min(max(steps, LONGEST_PAUSE), MOST_PAUSE))


class Drafting:
    """The drafters of a model. One that raises is turned off for good: guesses never change an answer, nor end it.

    drafted, accepted: tokens so far. steps_by_rows: steps without prompts, by their number of rows.
    guessing_s: seconds spent on guesses and on choosing among them. wasted_s: seconds by which steps were longer for
    rows whose guesses did not come true, as far as known.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        executable: Executable,
        vocab_size: int,
        context_length: int,
        policy: DraftPolicy = "measured",
        texts: TokenTexts | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._policy = policy
        self._sources: list[_Source] = []  # those that work
        self._by_name: dict[str, _Source] = {}
        self._records: dict[int, dict[str, Acceptance]] = {}
        self._begun: list[tuple[Sequence, Sequence]] = []
        self._run_trees: dict[Sequence, tuple[GuessTree, list[int]]] = {}
        self.costs = StepCosts()
        self.drafted = self.accepted = 0
        self.steps_by_rows: dict[int, int] = {}
        self.guessing_s = self.wasted_s = 0.0
        self.failed = False
        for name, drafter in drafters.items():
            source = _Source(name, drafter, drafter.capabilities.reads_hidden)
            self._sources.append(source)
            self._by_name[name] = source
            try:
                drafter.attach(executable)
                if texts is not None:
                    drafter.read_texts(texts)
            except Exception:
                self._fail(source)
        # What looks things up is asked first, what runs a part of the model only where that promises more.
        self._sources.sort(key=lambda source: source.runs_model)

    # sequences

    def begin(self, sequence: Sequence, parent: Sequence | None = None) -> None:
        """A sequence that will answer was admitted, or starts as a fork of another; one that is known is left alone."""
        request = sequence.active.request
        wanted = request.draft and request.max_tokens != 0 and not sequence.refuses_drafts
        if not self._sources or sequence.is_drafted or not wanted:
            return
        sequence.is_drafted = True
        self._records[sequence.number] = {
            source.name: Acceptance(
                source.everyone,
                LONGEST_MODEL_PAUSE if source.runs_model else LONGEST_PAUSE,
                costly=source.runs_model,
                patience=PATIENCE if source.useful >= SELDOM else 1,
            )
            for source in self._sources
        }
        for source in list(self._sources):
            self._call(source, "begin", sequence.number, request.prompt_ids, request.salt)
        if parent is not None and parent.is_drafted:
            for source in self._of(runs_model=False):
                self._tell(source, parent)
                self._call(source, "forked", sequence.number, parent.number)
            self._begun.append((sequence, parent))  # who reads states is told once they are there

    def chosen(self, sequence: Sequence, token: int) -> None:
        """A token became part of a sequence's answer."""
        if not sequence.is_drafted:
            return
        began = time.perf_counter()
        for name, record in self._records[sequence.number].items():
            record.chosen(token)
            record.untold.append(token)
            if record.is_costly or len(record.untold) == MOST_UNTOLD:
                self._tell(self._by_name[name], sequence)
        self.guessing_s += time.perf_counter() - began

    def _tell(self, source: _Source, sequence: Sequence) -> None:
        """Hand on the tokens that were chosen since the last time."""
        record = self._records[sequence.number][source.name]
        if record.untold:
            tokens, record.untold = tuple(record.untold), []
            self._call(source, "committed", sequence.number, tokens)

    def end(self, sequence: Sequence) -> None:
        """A sequence is done."""
        if not sequence.is_drafted:
            return
        sequence.is_drafted = False
        for source in list(self._sources):
            self._tell(source, sequence)
            self._call(source, "end", sequence.number)
        self._records.pop(sequence.number, None)
        self._run_trees.pop(sequence, None)

    # guesses

    def propose(
        self, sequences: Iterable[Sequence], n_rows_free: int, *, beside_prompts: bool = False
    ) -> dict[Sequence, DraftTree]:
        """Guesses to run for these answering sequences. n_rows_free: rows in all. beside_prompts: in the same step."""
        self._run_trees.clear()
        if not self._sources:
            return {}
        began = time.perf_counter()
        answering = list(sequences)
        trees: dict[Sequence, DraftTree] = {}
        try:
            # A step without drafts now and then, so that what they are compared with is not a thing of the past.
            measured = self.costs.is_measured and (beside_prompts or not self.costs.is_due(len(answering)))
            if measured or self._policy == "always":
                trees = self._choose(answering, n_rows_free)
        finally:
            self.guessing_s += time.perf_counter() - began
        return trees

    def _choose(self, answering: list[Sequence], n_rows_free: int) -> dict[Sequence, DraftTree]:
        rooms = {s: min(n_rows_free, self._room(s), MAX_DRAFT) for s in answering if s.is_drafted}
        rooms = {sequence: most for sequence, most in rooms.items() if most >= 1}
        guesses: dict[Sequence, GuessTree] = {}
        for sequence, most in rooms.items():
            for source in self._of(runs_model=False):
                self._ask(source, sequence, most, guesses, len(answering))
        guessing_s = 0.0  # of guesses that will take as long in the next steps
        for source in self._of(runs_model=True):
            guessing_s += self._ask_model(source, rooms, guesses, len(answering), n_rows_free, guessing_s)
        if not guesses:
            return {}
        if self._policy == "always":
            chosen = {sequence: list(range(len(tree.token_ids))) for sequence, tree in guesses.items()}
        else:
            chosen, _ = best_rows(guesses, len(answering), self.costs, most=n_rows_free, other_s=guessing_s)
            self._judge(guesses, chosen, len(answering))
        return self._fit(guesses, chosen, n_rows_free)

    def _judge(self, guesses: dict[Sequence, GuessTree], chosen: dict[Sequence, list[int]], n_answering: int) -> None:
        """Sources that look things up and had nothing worth a row for a sequence are left alone for a while."""
        for sequence, tree in guesses.items():
            used = set().union(*(tree.sources[node] for node in chosen.get(sequence, ())))
            offered = set().union(*tree.sources)
            for source in self._of(runs_model=False):
                if source.name in offered:
                    record = self._records[sequence.number][source.name]
                    self._paid(source, record, source.name in used, n_answering)

    def _paid(self, source: _Source, record: Acceptance, pays: bool, n_answering: int) -> None:
        source.useful += ASK_SMOOTHING * (pays - source.useful)
        record.paid(pays, source.longest_pause(n_answering, self.costs))

    def _of(self, *, runs_model: bool) -> list[_Source]:
        return [source for source in self._sources if source.runs_model is runs_model]

    def _fit(
        self, guesses: dict[Sequence, GuessTree], chosen: dict[Sequence, list[int]], n_rows_free: int
    ) -> dict[Sequence, DraftTree]:
        """The trees to run: within the rows and blocks that are free, and counted."""
        trees: dict[Sequence, DraftTree] = {}
        for sequence, nodes in chosen.items():
            tree, nodes = guesses[sequence], nodes[: min(n_rows_free, MAX_DRAFT)]
            if not nodes:
                continue
            # A block for accepted tokens must be there before the step; nobody gives way for a guess.
            depth = max(tree.depths[node] for node in nodes)
            if sequence.state is None or not sequence.state.reserve(sequence.n_run + 1 + depth):
                continue
            trees[sequence] = tree.part(nodes)
            self._run_trees[sequence] = (tree, nodes)
            n_rows_free -= len(nodes)
            self.drafted += len(nodes)
            sequence.active.drafted += len(nodes)
            for source in self._sources:
                source.drafted += sum(source.name in tree.sources[node] for node in nodes)
        return trees

    def _ask(
        self, source: _Source, sequence: Sequence, most: int, guesses: dict[Sequence, GuessTree], n_answering: int
    ) -> int:
        """Take a source's guesses in; how many tokens ahead they go."""
        record = self._records[sequence.number][source.name]
        if self._policy == "measured" and not source.runs_model:
            if not record.is_asked():
                return 0
            most = min(most, record.most_asked)
        began = time.perf_counter()
        self._tell(source, sequence)
        source.asked += 1
        draft = self._draft(source, most, "propose", sequence.number, most)
        source.ask_s += ASK_SMOOTHING * (time.perf_counter() - began - source.ask_s)
        if draft is None:
            if not source.runs_model:
                self._paid(source, record, False, n_answering)
            return 0
        record.proposed(draft)
        return guesses.setdefault(sequence, GuessTree()).add(source.name, draft, record)

    def _ask_model(
        self,
        source: _Source,
        rooms: Mapping[Sequence, int],
        guesses: dict[Sequence, GuessTree],
        n_answering: int,
        n_rows_free: int,
        other_s: float,
    ) -> float:
        """Ask a source that runs a part of the model, where that promises more; the seconds that it takes each time."""
        depths, pays = dict(rooms), True
        if self._policy == "measured":
            depths, pays = self._depths(source, rooms, guesses, n_answering, n_rows_free, other_s)
        began = time.perf_counter()
        guessed: dict[Sequence, int] = {}
        for sequence, depth in depths.items():
            if not source.failed:
                guessed[sequence] = self._ask(source, sequence, depth, guesses, n_answering)
        seconds = time.perf_counter() - began
        source.run.measured(seconds, max(guessed.values(), default=0), [sequence.number for sequence in guessed])
        for sequence, depth in guessed.items():
            if depth:
                self._continue(sequence, rooms[sequence], guesses[sequence])
        return seconds if pays else 0.0

    def _depths(
        self,
        source: _Source,
        rooms: Mapping[Sequence, int],
        guesses: dict[Sequence, GuessTree],
        n_answering: int,
        n_rows_free: int,
        other_s: float,
    ) -> tuple[dict[Sequence, int], bool]:
        """How far a source that runs a part of the model is to guess for whom, and whether that promises to pay.

        Sequences for which it does not are asked for one guess, to see how good it is, and then left alone for a while;
        where it pays for nobody the source is, so that many sequences do not take turns in trying it.
        """
        records = {sequence: self._records[sequence.number][source.name] for sequence in rooms}
        asked = {s: Asked(record, rooms[s]) for s, record in records.items() if record.is_asked()}
        if not source.pause.is_over() or not asked:
            return {}, False
        depths = worthwhile_depths(
            asked, guesses, n_answering, self.costs, source.run.seconds, most=n_rows_free, other_s=other_s
        )
        source.pause.after(bool(depths))
        if depths:
            for sequence in asked:
                records[sequence].paid(sequence in depths)
        return {sequence: depths.get(sequence, 1) for sequence in asked}, bool(depths)

    def _continue(self, sequence: Sequence, most: int, tree: GuessTree) -> None:
        """Let sources that look things up go on where the likeliest guesses end."""
        leaf = tree.likeliest_leaf()
        room = most - tree.depths[leaf]
        for source in [source for source in self._sources if source.drafter.capabilities.continues_guesses]:
            if room < 1:
                return
            self._tell(source, sequence)
            draft = self._draft(source, room, "propose_after", sequence.number, tree.path(leaf), room)
            if draft is not None:
                tree.add(source.name, draft, self._records[sequence.number][source.name], leaf)

    def _room(self, sequence: Sequence) -> int:
        """Most tokens that a draft of this sequence may be deep."""
        request = sequence.active.request
        if sequence.history.n_answer == 0 and request.n > 1:
            return 0  # the other choices start from the state after the prompt, without anybody's guesses
        # The token after the last accepted guess needs a place as well.
        room = self._context_length - len(sequence.history.tokens) - 1
        if request.max_tokens is not None:
            room = min(room, request.max_tokens - sequence.n_generated - 1)
        return room

    def _draft(self, source: _Source, most: int, method: str, *arguments: Any) -> Draft | None:
        """A source's guesses, checked; None for none, and from one that is turned off for what it gave."""
        if source.failed:
            return None
        began = time.perf_counter()
        try:
            draft = getattr(source.drafter, method)(*arguments)
            checked = None if draft is None else self._checked(draft, most)
            source.proposed += len(checked.tree.token_ids) if checked is not None else 0
            return checked
        except Exception:
            self._fail(source)
            return None
        finally:
            source.seconds += time.perf_counter() - began

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

    # after a step

    def kept(self, sequence: Sequence, node: int) -> None:
        """A node of the tree that was run for a sequence is what the sampler chose."""
        self.accepted += 1
        sequence.active.accepted += 1
        tree, nodes = self._run_trees[sequence]
        for source in self._sources:
            source.accepted += source.name in tree.sources[nodes[node]]

    def stepped(self, parts: Iterable[tuple[Sequence, int, tuple[int, ...]]]) -> None:
        """A step ended: (sequence, position of its first row, its rows that are now committed), while still running."""
        readers = self._of(runs_model=True)
        if readers:
            steps = []
            for sequence, start, rows in parts:
                if sequence.is_drafted and sequence.state is not None:
                    # Blocks for its guesses, where there is room.
                    sequence.state.reserve(min(sequence.n_run + 1 + MAX_DRAFT, self._context_length))
                    steps.append(SequenceStep(sequence.number, start, rows, sequence.state.block_table))
            for source in readers:
                self._call(source, "stepped", steps)
        for sequence, parent in self._begun:
            if sequence.is_drafted and parent.is_drafted and sequence.state is not None:
                for source in self._of(runs_model=True):
                    self._call(source, "forked", sequence.number, parent.number)
        self._begun.clear()

    def measured(self, n_answering: int, n_rows: int, seconds: float, n_accepted: int) -> None:
        """A step without prompts took so long: one row of each answering sequence, the others are guesses."""
        self.costs.measured(n_rows, seconds)
        self.steps_by_rows[n_rows] = self.steps_by_rows.get(n_rows, 0) + 1
        if n_rows > n_answering:
            extra = max(0.0, self.costs.seconds(n_rows) - self.costs.seconds(n_answering))
            self.wasted_s += extra * (1.0 - n_accepted / (n_rows - n_answering))

    # faults

    def _call(self, source: _Source, method: str, *arguments: Any) -> None:
        if source.failed:
            return
        began = time.perf_counter()
        try:
            getattr(source.drafter, method)(*arguments)
        except Exception:
            self._fail(source)
        finally:
            source.seconds += time.perf_counter() - began

    def _fail(self, source: _Source) -> None:
        """Called while its exception is handled."""
        logger.exception("the drafter %r failed and is off from now on; answers are the same without it", source.name)
        self.failed = source.failed = True
        if source in self._sources:
            self._sources.remove(source)

    def statistics(self) -> dict[str, Any]:
        """Counts per source and in all, none of which ever falls; the cost of n rows as it is believed now.

        Called on any thread.
        """
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "steps_by_rows": {str(n): count for n, count in sorted(self.steps_by_rows.copy().items())},
            "guessing_s": self.guessing_s,
            "wasted_s": self.wasted_s,
            "drafter_failed": self.failed,
            "rows_cost": {str(n): cost for n, cost in self.costs.curve().items()},
            "drafters": {source.name: self._figures(source) for source in self._by_name.values()},
        }

    def _figures(self, source: _Source) -> dict[str, Any]:
        try:
            own = dict(source.drafter.statistics())
        except Exception:  # on a thread of whoever asks: no reason to turn it off
            logger.exception("the drafter %r has no figures", source.name)
            own = {}
        counts = ("asked", "proposed", "drafted", "accepted", "seconds", "failed")
        own |= {name: getattr(source, name) for name in counts}
        return own | {"run_s": source.run.seconds} if source.runs_model else own
