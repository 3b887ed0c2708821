"""The engine's side of drafting: asks the sources for guesses and chooses which to run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from kinetic_core.engine.draft_policy import Asked, GuessTree, NextStep, best_rows, worthwhile_depths
from kinetic_core.engine.draft_source import Source
from kinetic_core.engine.sequence import Sequence
from kinetic_core.engine.step_costs import StepCosts
from kinetic_core.interfaces.drafter import DraftTree, SequenceStep

if TYPE_CHECKING:
    from kinetic_core.interfaces.backend import Executable
    from kinetic_core.interfaces.drafter import Drafter, TokenTexts

DraftPolicy = Literal["measured", "always"]
"""measured: guesses that promise more tokens per second. always: every guess that fits, at any cost; for tests."""

MAX_DRAFT = 31
"""Most draft rows of one sequence in a step."""


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
        self._context_length = context_length
        self._policy = policy
        sources = [Source(name, drafter, vocab_size) for name, drafter in drafters.items()]
        # What looks things up is asked first, what runs a part of the model only where that promises more.
        self._lookups = [source for source in sources if not source.runs_model]
        self._readers = [source for source in sources if source.runs_model]
        self._sources = self._lookups + self._readers
        self._continuing = [source for source in sources if source.drafter.capabilities.continues_guesses]
        self._begun: list[tuple[Sequence, Sequence]] = []
        self._run_trees: dict[Sequence, tuple[GuessTree, list[int]]] = {}
        self.costs = StepCosts()
        self.drafted = self.accepted = 0
        self.steps_by_rows: dict[int, int] = {}
        self.guessing_s = self.wasted_s = 0.0
        for source in sources:
            source.call("attach", executable)
            if texts is not None:
                source.call("read_texts", texts)

    # sequences

    def begin(self, sequence: Sequence, parent: Sequence | None = None) -> None:
        """A sequence that will answer was admitted, or starts as a fork of another; one that is known is left alone."""
        request = sequence.active.request
        wanted = request.draft and request.max_tokens != 0 and not sequence.refuses_drafts
        if not self._sources or sequence.is_drafted or not wanted:
            return
        sequence.is_drafted = True
        if parent is not None and not parent.is_drafted:
            parent = None
        for source in self._sources:
            if parent is None:
                source.begin(sequence.number, request.prompt_ids, request.salt, always=self._policy == "always")
            elif source.record(parent.number) is not None:
                source.begin(sequence.number, request.prompt_ids, request.salt, always=True)
        if parent is not None:
            for source in self._lookups:
                source.forked(sequence.number, parent.number)
            self._begun.append((sequence, parent))  # who reads states is told once they are there

    def chosen(self, sequence: Sequence, token: int) -> None:
        """A token became part of a sequence's answer."""
        if not sequence.is_drafted:
            return
        began = time.perf_counter()
        for source in self._sources:
            source.chosen(sequence.number, token)
        self.guessing_s += time.perf_counter() - began

    def end(self, sequence: Sequence) -> None:
        """A sequence is done."""
        if not sequence.is_drafted:
            return
        sequence.is_drafted = False
        for source in self._sources:
            source.end(sequence.number)
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
        # A step without drafts now and then, so that what they are compared with is not a thing of the past.
        measured = self.costs.is_measured and (beside_prompts or not self.costs.is_due(len(answering)))
        trees: dict[Sequence, DraftTree] = {}
        if measured or self._policy == "always":
            trees = self._choose(answering, NextStep(len(answering), n_rows_free, self.costs))
        self.guessing_s += time.perf_counter() - began
        return trees

    def _choose(self, answering: list[Sequence], step: NextStep) -> dict[Sequence, DraftTree]:
        began = time.perf_counter()
        rooms: dict[Sequence, int] = {}
        for sequence in answering:
            if sequence.is_drafted and (most := min(step.most, self._room(sequence), MAX_DRAFT)) >= 1:
                rooms[sequence] = most
        guesses: dict[Sequence, GuessTree] = {}
        for sequence, most in rooms.items():
            for source in self._lookups:
                self._look_up(source, sequence, most, guesses, step)
        running_since = time.perf_counter()
        for source in self._readers:
            if source.knows_any:
                step.other_s += self._run(source, rooms, guesses, step)
        began += time.perf_counter() - running_since  # its gain was weighed before
        if not guesses:
            return {}
        if self._policy == "always":
            chosen = {sequence: list(range(len(tree.token_ids))) for sequence, tree in guesses.items()}
        else:
            chosen, choice = best_rows(guesses, step)
            saved_s = choice.saved_s(step.plain_rate) + step.other_s
            self._judge(guesses, chosen, step, pays=saved_s > time.perf_counter() - began)
        return self._fit(guesses, chosen, step.most)

    def _judge(
        self,
        guesses: dict[Sequence, GuessTree],
        chosen: dict[Sequence, list[int]],
        step: NextStep,
        *,
        pays: bool,
    ) -> None:
        """Sources that look things up and had nothing worth its time for a sequence are left alone for a while.

        pays: does the step save more than looking up and choosing took? Where steps are short (a small model, a fast
        machine) that is much of one.
        """
        for sequence, tree in guesses.items():
            used = set().union(*(tree.sources[node] for node in chosen.get(sequence, ())))
            offered = set().union(*tree.sources)
            for source in self._lookups:
                if source.name in offered:
                    source.paid(sequence.number, pays and source.name in used, step)

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

    def _look_up(
        self, source: Source, sequence: Sequence, most: int, guesses: dict[Sequence, GuessTree], step: NextStep
    ) -> None:
        """Take in what a source that looks things up has for a sequence, if it is to be asked."""
        record = source.record(sequence.number)
        if record is None:
            return
        if self._policy == "measured":
            if not record.is_asked():
                return
            most = min(most, record.most_asked)
        draft = source.ask(sequence.number, most)
        if draft is None:
            source.paid(sequence.number, False, step)
        else:
            guesses.setdefault(sequence, GuessTree()).add(source.name, draft, record)

    def _run(
        self, source: Source, rooms: Mapping[Sequence, int], guesses: dict[Sequence, GuessTree], step: NextStep
    ) -> float:
        """Ask a source that runs a part of the model, where that promises more; the seconds that it takes each time."""
        rooms = {sequence: room for sequence, room in rooms.items() if source.record(sequence.number) is not None}
        depths, pays = rooms, True
        if self._policy == "measured":
            depths, pays = self._depths(source, rooms, guesses, step)
        began = time.perf_counter()
        guessed: dict[Sequence, int] = {}
        for sequence, depth in depths.items():
            record, draft = source.record(sequence.number), source.ask(sequence.number, depth)
            if record is not None and draft is not None:
                guessed[sequence] = guesses.setdefault(sequence, GuessTree()).add(source.name, draft, record)
        seconds = time.perf_counter() - began
        source.run.measured(seconds, max(guessed.values(), default=0), [sequence.number for sequence in depths])
        for sequence in guessed:
            self._continue(sequence, rooms[sequence], guesses[sequence])
        return seconds if pays else 0.0

    def _depths(
        self, source: Source, rooms: Mapping[Sequence, int], guesses: dict[Sequence, GuessTree], step: NextStep
    ) -> tuple[dict[Sequence, int], bool]:
        """How far a source that runs a part of the model is to guess for whom, and whether that promises to pay.

        Sequences for which it does not are asked for one guess, to see how good it is, and then left alone for a while;
        where it pays for nobody the source is, so that many sequences do not take turns in trying it.
        """
        records = {s: record for s in rooms if (record := source.record(s.number)) is not None}
        asked = {s: Asked(record, rooms[s]) for s, record in records.items() if record.is_asked()}
        if not records or not source.pause.is_over():
            for record in records.values():
                record.was_tried = True
            return {}, False
        if not asked:
            return {}, False
        depths = worthwhile_depths(asked, guesses, step, source.run.seconds)
        source.pause.after(bool(depths))
        if depths:
            for sequence in asked:
                records[sequence].paid(sequence in depths)
        return {sequence: depths.get(sequence, 1) for sequence in asked}, bool(depths)

    def _continue(self, sequence: Sequence, most: int, tree: GuessTree) -> None:
        """Let sources that look things up go on where the likeliest guesses end."""
        leaf = tree.likeliest_leaf()
        room = most - tree.depths[leaf]
        for source in self._continuing:
            if room < 1:
                return
            record = source.record(sequence.number)
            draft = None if record is None else source.ask_after(sequence.number, tree.path(leaf), room)
            if record is not None and draft is not None:
                tree.add(source.name, draft, record, leaf)

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
        if self._readers:
            known = [part for part in parts if part[0].is_drafted and part[0].state is not None]
            for source in self._readers:
                self._stepped(source, known)
        for sequence, parent in self._begun:
            if sequence.is_drafted and parent.is_drafted and sequence.state is not None:
                for source in self._readers:
                    source.forked(sequence.number, parent.number)
        self._begun.clear()

    def _stepped(self, source: Source, parts: Iterable[tuple[Sequence, int, tuple[int, ...]]]) -> None:
        steps = []
        for sequence, start, rows in parts:
            if sequence.state is not None and source.record(sequence.number) is not None:
                # Blocks for its guesses, where there is room.
                sequence.state.reserve(min(sequence.n_run + 1 + MAX_DRAFT, self._context_length))
                steps.append(SequenceStep(sequence.number, start, rows, sequence.state.block_table))
        if source.knows_any:  # with no steps too: those before are over
            source.call("stepped", steps)

    def measured(self, n_answering: int, n_rows: int, seconds: float, n_accepted: int) -> None:
        """A step without prompts took so long: one row of each answering sequence, the others are guesses."""
        self.costs.measured(n_rows, seconds)
        self.steps_by_rows[n_rows] = self.steps_by_rows.get(n_rows, 0) + 1
        if n_rows > n_answering:
            extra = max(0.0, self.costs.seconds(n_rows) - self.costs.seconds(n_answering))
            self.wasted_s += extra * (1.0 - n_accepted / (n_rows - n_answering))

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
            "drafter_failed": any(source.failed for source in self._sources),
            "rows_cost": {str(n): cost for n, cost in self.costs.curve().items()},
            "drafters": {source.name: source.statistics() for source in self._sources},
        }
