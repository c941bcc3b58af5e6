"""The engine: a pool of slots, and rounds of one target pass for answers of any methods.

`start` queues sequences. `step` runs one round for the active ones and one for the prefill of new
ones, and returns the finished; `cancel` removes one between two rounds. A round (`_round`) drafts a
tree for each answer, scores all trees in one pass of the target, accepts a path of each tree
(`accept`), and commits it. Plain decoding is the same round with trees that are only a root.

A tree begins with a chain of committed tokens that the cache does not hold yet. Node 0 is the first
of them, the root the last; usually there is one, which is both. Guesses follow the root.

The host owns every answer (`Sequence`); the device holds weights, keys and values, by slot. Every
answer is one row of the pass, whatever its method. On a GPU the target runs that pass as at most
two captured ones, of the narrow and of the wide trees (`captured`).
"""

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

from deft_policies.decoding.accept import accept
from deft_policies.decoding.captured import UNREAD
from deft_policies.decoding.clock import Span, Stage, StageClock
from deft_policies.decoding.drafts import DraftSource, Guesses, ModelSource
from deft_policies.decoding.plan import Plan
from deft_policies.decoding.planner import WIDEST, DraftModels, Planner
from deft_policies.decoding.plugins import ask_rule
from deft_policies.decoding.read import Reading, note_log_probs, read_log_probs
from deft_policies.decoding.sequence import PassResult, Sequence
from deft_policies.decoding.target import PassRow, Prompt, Scores, Target
from deft_policies.decoding.trace import PassRecord
from deft_policies.decoding.tree import DraftTree, merge
from deft_policies.errors import NotFiniteError, PolicyError
from deft_policies.model.kv_cache import Move

MOST_AHEAD = 2  # passes of plain decoding that are launched before the host has read them


@dataclass
class _Pass:
    """One pass of the target for some answers, until it is committed. Lists are [answer]."""

    sequences: list[Sequence]
    rows: list[PassRow]  # each has its tree
    scores: Scores
    reading: Reading
    spans: list[Span]
    results: list[PassResult] = field(default_factory=list)  # once it is read
    records: list[PassRecord | None] = field(default_factory=list)  # None: cancelled meanwhile


class Engine:
    """Decodes answers by any methods over one target. Used by one thread."""

    def __init__(
        self,
        target: Target,
        models: DraftModels | None = None,
        widest: int = WIDEST,
        longest_answer: int = WIDEST,
    ) -> None:
        """`widest` bounds the nodes of a tree; one of an action has at most `WIDEST` anyway.

        Where passes are captured, memory is set aside for answers of `longest_answer` tokens.
        """
        self.target = target
        if models is not None and models.block is not None:
            target.read_layers(models.block.sizes.read_layers)
        self.cache = target.new_cache()
        self.captured = target.set_aside(self.cache, widest, longest_answer + 1)
        self.planner = Planner(target, models, widest)
        self.sequences: list[Sequence] = []  # active: their prefill has run; ordered by slot
        self._waiting: list[Sequence] = []  # their prefill has not run
        self._unread: list[_Pass] = []  # passes that the host has not read, the oldest first

    @property
    def unfinished(self) -> list[Sequence]:
        """The answers that have not ended."""
        return [*self.sequences, *self._waiting]

    def start(
        self, prompts: Items[Prompt], sequences: Items[Sequence], plan: Plan | None = None
    ) -> None:
        """Queue answers, with a prompt each; `step` decodes them.

        Raises `RequestError`, and queues none, if one of them cannot be decoded. No two may share a
        memory. A `plan` is for measurements; otherwise the method or its guard chooses it.
        """
        for sequence in sequences:
            self.planner.check(sequence)
        num_rows = len(self.unfinished) + len(sequences)
        for prompt, sequence in zip(prompts, sequences, strict=True):
            self.planner.prepare(sequence, prompt, plan, num_rows)
        self._waiting += sequences

    def step(self, clock: StageClock, only: Collection[Sequence] = ()) -> list[Sequence]:
        """Run one round for active sequences, and a prefill for new ones; return the finished.

        Finished sequences have trace and memory set; one that is not `is_finite` has no valid
        answer. If `only` is not empty, other sequences wait for a later round.
        """
        active = [sequence for sequence in self.sequences if not only or sequence in only]
        finished = self._round(active, clock) if active else []
        joining = [sequence for sequence in self._waiting if not only or sequence in only]
        if joining := self._take_slots(joining):
            finished += self._round(joining, clock)
        return [self._finish(sequence) for sequence in finished]

    def _round(self, active: list[Sequence], clock: StageClock) -> list[Sequence]:
        """Draft, verify, accept, commit, with one pass of the target for all; return the finished.

        A prefill is the same, with the prompts before the trees. Plain decoding on a GPU leaves its
        pass unread and launches the next one.
        """
        clock.pop_spans()  # drop what was measured before this round, such as the vision towers
        is_ahead = self._may_run_ahead(active)
        self._catch_up(active, is_ahead)
        trees = self._draft(active)
        clock.record(Stage.DRAFT)
        this_pass = self._verify(active, trees, clock)
        if is_ahead:
            self._read_later(this_pass)
        else:
            self._accept(this_pass)
            clock.record(Stage.JUDGE)
            self._commit(this_pass)
            self._observe(this_pass)
            clock.record(Stage.COMMIT)
            this_pass.spans += clock.pop_spans()  # in place: the pass's records hold this list
        return [sequence for sequence in active if sequence.is_done]

    def _draft(self, active: list[Sequence]) -> list[DraftTree]:
        """One tree for every answer, of the guesses of all its sources. A source is called once."""
        by_source: dict[DraftSource, list[Sequence]] = {}
        for sequence in active:
            for source in _sources_of(sequence):
                by_source.setdefault(source, []).append(sequence)
        guessed: dict[tuple[DraftSource, int], Guesses] = {}
        for source, its_sequences in by_source.items():
            guesses_of_all = _ask(source, its_sequences)
            for sequence, guesses in zip(its_sequences, guesses_of_all, strict=True):
                guessed[source, sequence.number] = guesses
        return [
            merge(
                _pending(sequence),
                [
                    (source.kind, _cut(guessed[source, sequence.number], sequence.room))
                    for source in _sources_of(sequence)
                ],
                self.planner.widest_of(sequence),
            )
            for sequence in active
        ]

    def _verify(self, active: list[Sequence], trees: list[DraftTree], clock: StageClock) -> _Pass:
        """Score every node of every tree in one pass of the target, and begin to read scores."""
        rows = list(map(self._pass_row, active, trees))
        is_prefill = rows[0].prompt is not None
        scores = self.target.forward(self.cache, rows)
        clock.record(Stage.PREFILL if is_prefill else Stage.VERIFY)
        self._show_prompts(active, rows, scores)
        reading = Reading(active, trees, scores)
        return _Pass(active, rows, scores, reading, clock.pop_spans())

    def _accept(self, this_pass: _Pass) -> None:
        """Read a pass, and choose a path of each tree whose answer was not cancelled meanwhile."""
        this_pass.results = this_pass.reading.finish()
        columns = zip(this_pass.sequences, this_pass.rows, this_pass.results, strict=True)
        for sequence, row, result in columns:
            if sequence.slot < 0:  # cancelled after this pass was launched
                this_pass.records.append(None)
                continue
            tree, is_prefill = row.tree, row.prompt is not None
            if tree.tokens == [UNREAD]:  # the root was not read when this pass was launched
                tree.tokens = sequence.tokens[-1:]
            path, bonus = _accept_or_fail(sequence, tree, result)
            this_pass.records.append(
                PassRecord(is_prefill, tree, result.predictions, path, bonus, this_pass.spans)
            )

    def _commit(self, this_pass: _Pass) -> None:
        """Commit the tokens of the accepted paths, and keep their nodes in the cache."""
        moves: list[Move] = []
        for index, record in enumerate(this_pass.records):
            if record is None:
                continue
            sequence, row = this_pass.sequences[index], this_pass.rows[index]
            sequence.commit(record, this_pass.results[index])
            if sequence.wants_log_probs:
                nodes = this_pass.scores.nodes(index, row.tree)
                note_log_probs(sequence, row.tree, this_pass.scores.logits[nodes])
            if sequence.grammar is not None and not sequence.is_done:
                room = self.planner.widest_of(sequence) - 1  # of the next tree, but for the bonus
                sequence.extend(sequence.grammar.forced(sequence.tokens), room)
            # Kept nodes lie scattered in the cache; they move next to each other.
            moves += [
                (row.slot, row.start + node, row.start + at)
                for at, node in enumerate(record.path)
                if node != at
            ]
        self.cache.keep(moves)

    def _observe(self, this_pass: _Pass) -> None:
        """Give draft heads and models the target's states and logits, for sequences that go on."""
        scores = this_pass.scores
        for index, (sequence, row) in enumerate(
            zip(this_pass.sequences, this_pass.rows, strict=True)
        ):
            prompt, nodes = row.prompt, scores.nodes(index, row.tree)
            for source in sequence.round_sources:
                if not isinstance(source, ModelSource):
                    continue
                if sequence.is_done and not source.reads_ends:
                    continue
                prompts, hidden = scores.prompts, scores.hidden
                if source.reads_states and scores.states is not None:
                    prompts, hidden = scores.prompt_states, scores.states
                with sequence.failing():
                    if prompt is not None and source.reads_prompts:
                        source.observe_prompt(sequence, prompt, prompts[index])
                    source.observe(sequence, hidden[nodes], scores.logits[nodes])

    def _may_run_ahead(self, active: list[Sequence]) -> bool:
        """Whether the next pass can run before the host has read the last one."""
        return self.captured is not None and all(map(_needs_no_reading, active))

    def _catch_up(self, active: list[Sequence], is_ahead: bool) -> None:
        """Read and commit unread passes, unless the next one runs ahead for the same answers."""
        if self._unread and (not is_ahead or self._unread[-1].sequences != active):
            self._read_all_but(0)

    def _read_later(self, this_pass: _Pass) -> None:
        """Leave a pass unread. Where more than `MOST_AHEAD` are, read the oldest."""
        for sequence in this_pass.sequences:
            sequence.num_unread += 1
        self._unread.append(this_pass)
        self._read_all_but(MOST_AHEAD)

    def _read_all_but(self, most: int) -> None:
        """Read and commit the oldest unread passes, until at most so many are left."""
        while len(self._unread) > most:
            oldest = self._unread.pop(0)
            for sequence in oldest.sequences:
                sequence.num_unread -= 1
            self._accept(oldest)
            self._commit(oldest)

    def _pass_row(self, sequence: Sequence, tree: DraftTree) -> PassRow:
        """A sequence's row in a pass. Node 0 of a prefill is the prompt's last token."""
        prompt = None if sequence.records else sequence.prompt
        cached = sequence.num_cached + sequence.num_unread
        is_prefill = prompt is not None
        start = sequence.num_prompt + cached - is_prefill  # of node 0
        keeps_hidden = sequence.method.rule.reads_prompts or any(
            isinstance(source, ModelSource) and source.reads_prompts
            for source in sequence.round_sources
        )
        is_action = sequence.spec.is_action
        return PassRow(sequence.slot, start, tree, sequence.number, is_action, prompt, keeps_hidden)

    def _show_prompts(self, active: Items[Sequence], rows: Items[PassRow], scores: Scores) -> None:
        """Show the hidden states of prompts to rules that read them."""
        for index, (sequence, row) in enumerate(zip(active, rows, strict=True)):
            rule = sequence.method.rule
            if row.prompt is not None and rule.reads_prompts:
                with sequence.failing():
                    arguments = sequence, row.prompt, scores.prompts[index]
                    ask_rule(rule, partial(rule.observe_prompt, *arguments))

    def _take_slots(self, joining: Items[Sequence]) -> list[Sequence]:
        """Give waiting answers the lowest free slots; return those that got one."""
        in_use = {sequence.slot for sequence in self.sequences}
        passes = self.captured
        num_slots = len(in_use) + len(joining) if passes is None else passes.num_slots
        free = [slot for slot in range(num_slots) if slot not in in_use]
        placed = list(joining[: len(free)])
        for sequence, slot in zip(placed, free, strict=False):
            sequence.slot = slot
            self._waiting.remove(sequence)
        self.sequences = sorted([*self.sequences, *placed], key=lambda sequence: sequence.slot)
        return placed

    def cancel(self, sequence: Sequence) -> None:
        """Remove a sequence between two rounds, whether it waits or has begun."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self.sequences:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free the sequence's slot; others keep theirs."""
        self.sequences.remove(sequence)
        if not sequence.is_finite:
            self.cache.clear(sequence.slot)
        for source in sequence.sources:
            if isinstance(source, ModelSource):
                with sequence.failing():
                    source.release(sequence)
        sequence.prompt, sequence.slot = None, -1
        sequence.notes.clear()

    def _finish(self, sequence: Sequence) -> Sequence:
        """Release an answer that has ended, and set its trace and memory; its guard learns from it.

        An answer that a plugin has failed gets neither.
        """
        if sequence.wants_log_probs:
            read_log_probs(sequence)
        had_history = bool(sequence.past)  # without one there is nothing to draft from
        self._release(sequence)
        if sequence.error is not None:
            return sequence
        if sequence.guard is not None and had_history and sequence.is_finite:
            sequence.guard.learn(sequence.choice.plan, sequence.num_passes - 1)
        sequence.finish()
        return sequence

    def decode(self, prompts: Items[Prompt], sequences: Items[Sequence], clock: StageClock) -> None:
        """Decode answers to their end; `NotFiniteError` if the model's numbers mean nothing.

        Raises the error of a plugin that one of them names.
        """
        self.start(prompts, sequences)
        unfinished = {sequence.number for sequence in sequences}
        try:
            while unfinished:
                unfinished -= {finished.number for finished in self.step(clock)}
        except BaseException:
            for sequence in sequences:
                self.cancel(sequence)
            raise
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error
        num_broken = sum(not sequence.is_finite for sequence in sequences)
        if num_broken:
            raise NotFiniteError(
                f"the model's logits hold NaN or infinity in {num_broken} of {len(sequences)} "
                "answers; its weights or its number format are broken, nothing was answered"
            )


def _ask(source: DraftSource, sequences: list[Sequence]) -> list[Guesses]:
    """The guesses of a source. If a plugin raises, the answers that name it fail, and no others."""
    try:
        return source.draft_all(sequences)
    except PolicyError as error:
        for sequence in sequences:
            sequence.error = error
        return [[] for _ in sequences]


def _accept_or_fail(
    sequence: Sequence, tree: DraftTree, result: PassResult
) -> tuple[list[int], int]:
    """The path to commit and the bonus. If a rule raises, its answer fails and keeps no draft."""
    try:
        return accept(sequence, tree, result)
    except PolicyError as error:
        sequence.error = error
        return tree.path_to(tree.root), result.predictions[tree.root]


def _sources_of(sequence: Sequence) -> list[DraftSource]:
    """The sources of an answer's next pass; none where only the last token, a bonus, is left."""
    if sequence.draft_depth <= 0:
        return []
    return sequence.round_sources if sequence.records else sequence.prefill_sources


def _pending(sequence: Sequence) -> list[int]:
    """Committed tokens that are not cached, the root last. A prefill has the prompt's last, too."""
    if not sequence.records:
        assert sequence.prompt is not None
        return [sequence.prompt.last_token, *sequence.tokens]
    return [UNREAD] if sequence.num_unread else sequence.tokens[sequence.num_cached :]


def _needs_no_reading(sequence: Sequence) -> bool:
    """Whether the next pass of an answer can be read later: nothing is drafted or looked at."""
    is_plain = not sequence.round_sources and sequence.method.temperature == 0.0
    is_watched = sequence.wants_log_probs or sequence.grammar is not None
    goes_on = sequence.spec.is_action and bool(sequence.records) and sequence.room > 0
    return is_plain and not is_watched and goes_on


def _cut(guesses: Guesses, depth: int) -> Guesses:
    """Chains cut to the answer's room. `Branches` stay whole: a rule's `best_path` bounds those."""
    return [chain[:depth] for chain in guesses] if isinstance(guesses, list) else guesses
