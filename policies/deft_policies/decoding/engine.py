"""The engine: a pool of slots, and one target pass a round for all answers, whatever their methods.

`start` takes sequences in, `step` runs one round and returns the finished ones, `cancel` removes
one between two rounds. Plain decoding is the same round with trees that are only a root. The host
owns every answer (`Sequence`); the device holds weights, keys and values, by slot. Every answer is
a row of the pass, whatever its method; drafts are accepted answer by answer (`accept`).
"""

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

from deft_policies.decoding.accept import accept
from deft_policies.decoding.captured import UNREAD
from deft_policies.decoding.clock import Span, Stage, StageClock
from deft_policies.decoding.drafts import DraftSource, Guesses, ModelSource
from deft_policies.decoding.plan import Plan
from deft_policies.decoding.planner import WIDEST, DraftModels, Planner
from deft_policies.decoding.plugins import ask_rule
from deft_policies.decoding.read import Reading, note_log_probs, read_log_probs
from deft_policies.decoding.sequence import Found, Sequence
from deft_policies.decoding.target import PassRow, Prompt, Scores, Target
from deft_policies.decoding.trace import PassRecord
from deft_policies.decoding.tree import DraftTree, merge
from deft_policies.errors import NotFiniteError, PolicyError
from deft_policies.model.kv_cache import Move

MOST_AHEAD = 2  # passes that the host has not read, of answers that draft nothing


@dataclass
class _Pass:
    """One pass of the target for some answers, until it is committed. Lists are [answer]."""

    sequences: list[Sequence]
    trees: list[DraftTree]
    rows: list[PassRow]
    scores: Scores
    reading: Reading
    is_prefill: bool
    spans: list[Span]


class Engine:
    """Decodes answers by any methods over one target. Used by one thread."""

    def __init__(
        self,
        target: Target,
        models: DraftModels | None = None,
        widest: int = WIDEST,
        longest_answer: int = WIDEST,
    ) -> None:
        """`widest` bounds the nodes of a tree over text.

        Where passes are captured, memory is set aside for answers of `longest_answer` tokens.
        """
        self.target = target
        if models is not None and models.block is not None:
            target.read_layers(models.block.sizes.read_layers)
        self.cache = target.new_cache()
        self.captured = target.set_aside(self.cache, widest, longest_answer + 1)
        self.planner = Planner(target, models, widest)
        self.sequences: list[Sequence] = []  # active: they have had their prefill; by slot
        self._waiting: list[Sequence] = []  # for their prefill
        self._unread: list[_Pass] = []  # passes that the host has not read, the oldest first

    @property
    def unfinished(self) -> list[Sequence]:
        """The answers that have not ended."""
        return [*self.sequences, *self._waiting]

    def start(
        self, prompts: Items[Prompt], sequences: Items[Sequence], plan: Plan | None = None
    ) -> None:
        """Take in answers, a prompt each; `RequestError` for what cannot be done.

        Where one cannot begin none does. No two may share a memory. A `plan` is for measurements:
        else the method or its guard names it.
        """
        for sequence in sequences:
            self.planner.check(sequence)
        for prompt, sequence in zip(prompts, sequences, strict=True):
            self.planner.prepare(sequence, prompt, plan)
        self._waiting += sequences

    def step(self, clock: StageClock, first: Collection[Sequence] = ()) -> list[Sequence]:
        """Run one round for active sequences, and a prefill for new ones; return the finished.

        Finished sequences have their trace and memory set; one that is not `is_finite` has no valid
        answer. Where `first` names some, the others sit this round out.
        """
        active = [sequence for sequence in self.sequences if not first or sequence in first]
        finished = self._round(active, clock) if active else []
        joining = [sequence for sequence in self._waiting if not first or sequence in first]
        if joining := self._take_slots(joining):
            finished += self._round(joining, clock)
        return [self._finish(sequence) for sequence in finished]

    def _round(self, active: list[Sequence], clock: StageClock) -> list[Sequence]:
        """Draft, verify, accept, commit, with one pass of the target for all; return the finished.

        A prefill is the same, with the prompts before the trees.
        """
        clock.pop_spans()  # time before this round, as of the vision towers, is no pass's
        is_read_later = self._can_be_read_later(active)
        trees = self._draft(active)
        clock.record(Stage.DRAFT)
        this = self._verify(active, trees, clock)
        if is_read_later:
            self._read_later(this)
        else:
            self._commit(this)
            clock.record(Stage.JUDGE)
            self._observe(this)
            clock.record(Stage.COMMIT)
            this.spans += clock.pop_spans()
        return [sequence for sequence in active if sequence.is_done]

    def _draft(self, active: list[Sequence]) -> list[DraftTree]:
        """A tree for every answer, of all that its sources guess. Each source is asked once."""
        asked: dict[DraftSource, list[Sequence]] = {}
        for sequence in active:
            for source in _sources_of(sequence):
                asked.setdefault(source, []).append(sequence)
        guessed: dict[tuple[DraftSource, int], Guesses] = {}
        for source, some in asked.items():
            for sequence, guesses in zip(some, _ask(source, some), strict=True):
                guessed[source, sequence.number] = guesses
        return [
            merge(
                _pending(sequence),
                [
                    (source.kind, _cut(guessed[source, sequence.number], sequence.num_missing))
                    for source in _sources_of(sequence)
                ],
                self.planner.widest_of(sequence),
            )
            for sequence in active
        ]

    def _verify(self, active: list[Sequence], trees: list[DraftTree], clock: StageClock) -> _Pass:
        """The one pass of the target: score every node of every tree, and begin to read it."""
        rows = [self._pass_row(*both) for both in zip(active, trees, strict=True)]
        is_prefill = rows[0].prompt is not None
        scores = self.target.forward(self.cache, rows)
        clock.record(Stage.PREFILL if is_prefill else Stage.VERIFY)
        self._show_prompts(active, rows, scores)
        reading = Reading(active, trees, scores)
        return _Pass(active, trees, rows, scores, reading, is_prefill, clock.pop_spans())

    def _commit(self, this: _Pass) -> None:
        """Accept a path of every tree, commit its tokens, and keep its nodes in the cache."""
        moves: list[Move] = []
        found = this.reading.finish()
        columns = zip(this.sequences, this.trees, this.rows, found, strict=True)
        for index, (sequence, tree, row, scored) in enumerate(columns):
            if sequence.slot < 0:  # released since
                continue
            if tree.tokens == [UNREAD]:  # its root was on the device alone when it was made
                tree.tokens = sequence.tokens[-1:]
            path, bonus = _accept(sequence, tree, scored)
            record = PassRecord(this.is_prefill, tree, scored.predictions, path, bonus, this.spans)
            sequence.commit(tree, path, bonus, scored, record)
            if sequence.wants_log_probs:
                note_log_probs(sequence, tree, this.scores.logits[this.scores.nodes(index, tree)])
            if sequence.grammar is not None and not sequence.is_done:
                room = self.planner.widest_of(sequence) - 1  # beside the bonus, in the next tree
                sequence.extend(sequence.grammar.forced(sequence.tokens), room)
            moves += [
                (row.slot, row.start + node, row.start + at)
                for at, node in enumerate(path)
                if node != at
            ]
        self.cache.keep(moves)

    def _observe(self, this: _Pass) -> None:
        """Show drafting models what the target computed, of the sequences that go on."""
        for index, sequence in enumerate(this.sequences):
            prompt = this.rows[index].prompt
            nodes = this.scores.nodes(index, this.trees[index])
            for source in sequence.round_sources:
                if not isinstance(source, ModelSource):
                    continue
                if sequence.is_done and not source.reads_ends:
                    continue
                prompts, hidden = this.scores.prompts, this.scores.hidden
                if source.reads_states and this.scores.states is not None:
                    prompts, hidden = this.scores.prompt_states, this.scores.states
                with sequence.failing():
                    if prompt is not None and source.reads_prompts:
                        source.observe_prompt(sequence, prompt, prompts[index])
                    source.observe(sequence, hidden[nodes], this.scores.logits[nodes])

    def _can_be_read_later(self, active: list[Sequence]) -> bool:
        """Whether the next pass can run before this host has read the last one.

        Else, and where the answers are others than those of the last pass, that one is read now.
        """
        can_wait = self.captured is not None and all(map(_needs_no_reading, active))
        if self._unread and (not can_wait or self._unread[-1].sequences != active):
            self._read_all_but(0)
        return can_wait

    def _read_later(self, this: _Pass) -> None:
        """Leave a pass unread, and read the oldest of more than `MOST_AHEAD`."""
        for sequence in this.sequences:
            sequence.num_unread += 1
        self._unread.append(this)
        self._read_all_but(MOST_AHEAD)

    def _read_all_but(self, most: int) -> None:
        """Read and commit the oldest unread passes, until at most so many are left."""
        while len(self._unread) > most:
            oldest = self._unread.pop(0)
            for sequence in oldest.sequences:
                sequence.num_unread -= 1
            self._commit(oldest)

    def _pass_row(self, sequence: Sequence, tree: DraftTree) -> PassRow:
        """A sequence's row in a pass. Node 0 of a prefill is the prompt's last token."""
        prompt = None if sequence.records else sequence.prompt
        cached = sequence.num_cached + sequence.num_unread
        start = sequence.num_prompt + cached - (prompt is not None)
        keeps = sequence.method.rule.reads_prompts or any(
            isinstance(source, ModelSource) and source.reads_prompts
            for source in sequence.round_sources
        )
        is_action = sequence.spec.is_action
        return PassRow(sequence.slot, start, tree, sequence.number, is_action, prompt, keeps)

    def _show_prompts(self, active: Items[Sequence], rows: Items[PassRow], scores: Scores) -> None:
        """Show the hidden states of prompts to rules that read them."""
        for index, (sequence, row) in enumerate(zip(active, rows, strict=True)):
            rule = sequence.method.rule
            if row.prompt is not None and rule.reads_prompts:
                with sequence.failing():
                    given = sequence, row.prompt, scores.prompts[index]
                    ask_rule(rule, partial(rule.observe_prompt, *given))

    def _take_slots(self, joining: Items[Sequence]) -> list[Sequence]:
        """Give each the lowest free slot, as long as there are any; those that have one now."""
        taken = {one.slot for one in self.sequences}
        passes = self.captured
        most = len(taken) + len(joining) if passes is None else passes.num_slots
        free = [slot for slot in range(most) if slot not in taken]
        begun = list(joining[: len(free)])
        for sequence, slot in zip(begun, free, strict=False):
            sequence.slot = slot
            self._waiting.remove(sequence)
        self.sequences = sorted([*self.sequences, *begun], key=lambda one: one.slot)
        return begun

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
        """Release an answer that has ended, with trace and memory; its guard learns from it.

        One that a plugin has failed has neither.
        """
        if sequence.wants_log_probs:
            read_log_probs(sequence)
        had_history = bool(sequence.past)  # or there was nothing to draft from
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
        left = {one.number for one in sequences}
        try:
            while left:
                left -= {one.number for one in self.step(clock)}
        except BaseException:
            for one in sequences:
                self.cancel(one)
            raise
        for one in sequences:
            if one.error is not None:
                raise one.error
        num_broken = sum(not one.is_finite for one in sequences)
        if num_broken:
            raise NotFiniteError(
                f"the model's logits hold NaN or infinity in {num_broken} of {len(sequences)} "
                "answers; its weights or its number format are broken, nothing was answered"
            )


def _ask(source: DraftSource, sequences: list[Sequence]) -> list[Guesses]:
    """The guesses of a source; none where a plugin fails, which fails those that name it."""
    try:
        return source.draft_all(sequences)
    except PolicyError as error:
        for sequence in sequences:
            sequence.error = error
        return [[] for _ in sequences]


def _accept(sequence: Sequence, tree: DraftTree, scored: Found) -> tuple[list[int], int]:
    """The path to commit and the bonus; no drafts where a rule fails, which fails its answer."""
    with sequence.failing():
        return accept(sequence, tree, scored)
    return accept(sequence, tree, scored)  # with its error, so that no draft stands


def _sources_of(sequence: Sequence) -> list[DraftSource]:
    """What drafts for the next pass of an answer, where a guess can be of use."""
    if sequence.draft_depth <= 0:
        return []
    return sequence.round_sources if sequence.records else sequence.prefill_sources


def _pending(sequence: Sequence) -> list[int]:
    """Committed tokens that are not cached, the root last; of a prefill the prompt's last."""
    if not sequence.records:
        assert sequence.prompt is not None
        return [sequence.prompt.last_token, *sequence.tokens]
    return [UNREAD] if sequence.num_unread else sequence.tokens[sequence.num_cached :]


def _needs_no_reading(sequence: Sequence) -> bool:
    """Whether the next pass of an answer can be read later: it drafts nothing, and does not end."""
    is_plain = not sequence.round_sources and sequence.method.temperature == 0.0
    is_watched = sequence.wants_log_probs or sequence.grammar is not None
    goes_on = sequence.spec.is_action and bool(sequence.records) and sequence.num_missing > 0
    return is_plain and not is_watched and goes_on


def _cut(guesses: Guesses, depth: int) -> Guesses:
    """Chains no deeper than what is missing."""
    return [chain[:depth] for chain in guesses] if isinstance(guesses, list) else guesses
