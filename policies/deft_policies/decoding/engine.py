"""The engine: a pool of slots, and one target pass a round for all answers, whatever their methods.

`start` takes sequences in, `step` runs one round and returns the finished ones, `cancel` removes
one between two rounds. Plain decoding is the same round with trees that are only a root. The host
owns every answer (`Sequence`); the device holds weights, keys and values.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

import torch

from deft_policies.decoding import kinds
from deft_policies.decoding.accept import accept
from deft_policies.decoding.captured import UNREAD, shapes_of
from deft_policies.decoding.clock import Span, Stage, StageClock
from deft_policies.decoding.drafts import (
    DraftSource,
    Guesses,
    ModelSource,
    PluginSource,
    captured_block,
    captured_head,
    heads,
)
from deft_policies.decoding.drafts import session as of_session
from deft_policies.decoding.drafts.block import BlockDrafts
from deft_policies.decoding.drafts.numbers import PreviousNumbers
from deft_policies.decoding.drafts.previous_answer import PreviousAnswer
from deft_policies.decoding.drafts.small_model import SmallModelDrafts
from deft_policies.decoding.guard import Choice, Guard, Price, best_width
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import (
    NUMBER_PLANS,
    PLAIN,
    TEXT_PLANS,
    UNNAMED,
    KeyMask,
    Plan,
    RopeOffset,
)
from deft_policies.decoding.plugins import ask_rule, find_plugins, from_files
from deft_policies.decoding.read import Reading
from deft_policies.decoding.sampling import noise_key
from deft_policies.decoding.sequence import AnswerSpec, Found, Sequence
from deft_policies.decoding.target import PassRow, Prompt, Scores, Target
from deft_policies.decoding.trace import PassRecord
from deft_policies.decoding.tree import DraftTree, merge
from deft_policies.errors import NotFiniteError, PolicyError, RequestError
from deft_policies.memory import STEPS_KEPT, SessionMemory
from deft_policies.model.block_head import BlockHead
from deft_policies.model.draft_heads import EagleHead, MedusaHeads
from deft_policies.model.kv_cache import Move
from deft_policies.model.staging import to_device

_log = logging.getLogger(__name__)
Maker = Callable[[], DraftSource]
WIDEST = 64  # nodes of a tree of actions
MOST_AHEAD = 2  # passes that the host has not read, of answers that draft nothing
_MOST_PREFILL_SOURCES = 3
_WIDTHS = (1, 8, 16, 32, 64, 128)  # of passes over text that are timed
_STEADY_WIDTH = 32  # nodes of a later pass over text where the answer depends on it
_WARM_UP_RUNS = 4
_GUARDS_KEPT = 128
# Tokens between two edits of an old answer: a pass with the widest drafts of the golden sessions
# writes 8 of a text, and one of a taught policy that writes numbers 5 or 6.
_EDITS_APART, _NUMBERS_APART = 7, 4


@dataclass(frozen=True)
class DraftModels:
    """What drafts with weights of its own; None for what is not there."""

    head: EagleHead | None = None
    rope_offset: RopeOffset = RopeOffset.CORRECT
    key_mask: KeyMask = KeyMask.CAUSAL
    medusa: MedusaHeads | None = None
    block: BlockHead | None = None
    others: Mapping[str, Maker] = field(default_factory=dict)  # what makes them, by kind
    small_model: Target | None = None

    def makers(self, target: Target) -> dict[str, Maker]:
        """What makes the source of every kind that needs no engine."""
        files: dict[str, Callable[[Target], DraftSource]] = from_files("SOURCES")
        makers: dict[str, Maker] = {
            **{name: partial(make, target) for name, make in files.items()},
            **self.others,
            kinds.PREVIOUS: of_session.PreviousAction,
            kinds.EXTRAPOLATION: lambda: of_session.Extrapolation(target.action_tokens),
            kinds.RECYCLED: of_session.JacobiDrafts,
        }
        if (block := self.block) is not None:
            makers[kinds.BLOCK] = lambda: BlockDrafts(block, target)
        if (medusa := self.medusa) is not None:
            makers[kinds.MEDUSA] = lambda: heads.MedusaDrafts(medusa, target)
        if (head := self.head) is not None:
            makers[kinds.HEAD] = lambda: heads.EagleDrafts(
                head, target, self.rope_offset, self.key_mask
            )
        if (model := self.small_model) is not None:
            makers[kinds.SMALL_MODEL] = lambda: SmallModelDrafts(model, target)
        return makers


@dataclass
class _Pass:
    """A pass of the target for some answers, until it is committed."""

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
        self.sequences: list[Sequence] = []  # that have begun, by slot
        self._waiting: list[Sequence] = []  # for their prefill
        self._unread: list[_Pass] = []  # passes that the host has not read, the oldest first
        self._widest = widest
        self._block = None if models is None else models.block
        self._makers = (models or DraftModels()).makers(target)
        self._makers[kinds.PREVIOUS_ANSWER] = lambda: PreviousAnswer(widest, self._width_of)
        self._makers[kinds.PREVIOUS_NUMBERS] = lambda: PreviousNumbers(widest, self._width_of)
        for name, found in find_plugins(kinds.SOURCES).items():
            self._makers[name] = partial(PluginSource, found, target)
        self._sources: dict[str, DraftSource] = {}  # by kind, made when first asked for
        self._broken: dict[str, RequestError] = {}  # sources that could not be made
        # By a method's text, its rule and an action's tokens (0: a text); the last used comes last.
        self._guards: dict[tuple[str, str, int], Guard] = {}
        self._prices: dict[Plan, Price] = {}  # measured before anybody waits
        self.text_width = widest  # nodes of a later pass over text, of exact methods with a guard
        self._has_timed_widths = False

    @property
    def unfinished(self) -> list[Sequence]:
        """The answers that have not ended."""
        return [*self.sequences, *self._waiting]

    def start(self, prompts: Items[Prompt], sequences: Items[Sequence]) -> None:
        """Take in answers, a prompt each; `RequestError` for what cannot be done.

        Where one cannot begin none does. No two may share a memory.
        """
        for sequence in sequences:
            self.check(sequence)
        for prompt, sequence in zip(prompts, sequences, strict=True):
            self._prepare(sequence, prompt)
        self._waiting += sequences

    def step(self, clock: StageClock, first: Collection[Sequence] = ()) -> list[Sequence]:
        """Run one pass for active sequences and a prefill for new ones; return the finished.

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
        runs_ahead = self.captured is not None and all(map(_needs_no_reading, active))
        if self._unread and (not runs_ahead or self._unread[-1].sequences != active):
            self._read_behind(0)
        trees = self._draft(active)
        clock.record(Stage.DRAFT)
        rows = [self._pass_row(*both) for both in zip(active, trees, strict=True)]
        is_prefill = rows[0].prompt is not None
        scores = self.target.forward(self.cache, rows)
        clock.record(Stage.PREFILL if is_prefill else Stage.VERIFY)
        self._show_prompts(active, rows, scores)
        reading = Reading(active, trees, scores)
        last = _Pass(active, trees, rows, scores, reading, is_prefill, clock.pop_spans())
        if runs_ahead:
            for sequence in active:
                sequence.num_unread += 1
            self._unread.append(last)
            self._read_behind(MOST_AHEAD)
        else:
            self._commit(last)
            clock.record(Stage.JUDGE)
            self._observe(last)
            clock.record(Stage.COMMIT)
            last.spans += clock.pop_spans()
        return [sequence for sequence in active if sequence.is_done]

    def _read_behind(self, most: int) -> None:
        """Read the oldest passes that the host has not read, until at most so many are left."""
        while len(self._unread) > most:
            oldest = self._unread.pop(0)
            for one in oldest.sequences:
                one.num_unread -= 1
            self._commit(oldest)

    def _commit(self, last: "_Pass") -> None:
        """Accept a path of every tree, commit its tokens, and keep its nodes in the cache."""
        moves: list[Move] = []
        found = last.reading.finish()
        columns = zip(last.sequences, last.trees, last.rows, found, strict=True)
        for index, (sequence, tree, row, scored) in enumerate(columns):
            if sequence.slot < 0:  # released since
                continue
            if tree.tokens == [UNREAD]:
                tree.tokens = sequence.tokens[-1:]
            path, bonus = _accept(sequence, tree, scored)
            spans = last.spans
            record = PassRecord(last.is_prefill, tree, scored.predictions, path, bonus, spans)
            sequence.commit(tree, path, bonus, scored, record)
            if sequence.wants_log_probs:
                _note_log_probs(sequence, tree, last.scores.logits[last.scores.nodes(index, tree)])
            if sequence.grammar is not None and not sequence.is_done:
                room = self._widest_of(sequence) - 1  # beside the bonus, in the next tree
                sequence.extend(sequence.grammar.forced(sequence.tokens), room)
            start = row.start
            moves += [
                (sequence.slot, start + node, start + at)
                for at, node in enumerate(path)
                if node != at
            ]
        self.cache.keep(moves)

    def _show_prompts(self, active: Items[Sequence], rows: Items[PassRow], scores: Scores) -> None:
        """Show the hidden states of prompts to rules that read them."""
        for index, (sequence, row) in enumerate(zip(active, rows, strict=True)):
            rule = sequence.method.rule
            if row.prompt is not None and rule.reads_prompts:
                with sequence.failing():
                    given = sequence, row.prompt, scores.prompts[index]
                    ask_rule(rule, partial(rule.observe_prompt, *given))

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
                self._widest_of(sequence),
            )
            for sequence in active
        ]

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

    def _observe(self, last: "_Pass") -> None:
        """Show drafting models what the target computed, of the sequences that go on."""
        for index, sequence in enumerate(last.sequences):
            prompt = last.rows[index].prompt
            nodes = last.scores.nodes(index, last.trees[index])
            for source in sequence.round_sources:
                if not isinstance(source, ModelSource):
                    continue
                if sequence.is_done and not source.reads_ends:
                    continue
                prompts, hidden = last.scores.prompts, last.scores.hidden
                if source.reads_states and last.scores.states is not None:
                    prompts, hidden = last.scores.prompt_states, last.scores.states
                with sequence.failing():
                    if prompt is not None and source.reads_prompts:
                        source.observe_prompt(sequence, prompt, prompts[index])
                    source.observe(sequence, hidden[nodes], last.scores.logits[nodes])

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
            _read_log_probs(sequence)
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

    def plans(self, method: Method) -> tuple[Plan, ...]:
        """Those of a method's plans whose sources are there; plain decoding if none.

        Raises `RequestError` when the method cannot do without a source that is missing, or that
        could not be made. Makes no source: any thread may ask.
        """
        for kind in method.required & self._broken.keys():
            raise self._broken[kind]
        known = self._makers.keys()
        missing = method.required - known
        if missing:
            names = ", ".join(sorted(missing))
            raise RequestError(
                "decoding",
                f"{method.name!r} needs draft sources that were not loaded: {names}; load a draft "
                "head (--draft-head DIR), a draft model (--draft-model DIR) or whatever they need, "
                "or choose another method",
            )
        return tuple(plan for plan in method.plans if plan.kinds <= known) or (PLAIN,)

    def check(self, sequence: Sequence) -> None:
        """Raise `RequestError` for an answer that cannot be decoded as it is asked for."""
        self.plans(sequence.method)
        method = sequence.method
        problem = ask_rule(method.rule, lambda: method.rule.problem(sequence.spec))
        if problem:
            raise RequestError("decoding", f"{method.name!r} {problem}")

    def _plans_for(self, method: Method, spec: AnswerSpec) -> tuple[Plan, ...]:
        """Where a method names no plans, text is drafted in other ways than actions."""
        plans = self.plans(method)
        if spec.is_action or method.plans not in UNNAMED:
            return plans
        return NUMBER_PLANS if spec.numbers_in_row else TEXT_PLANS

    def _prepare(self, sequence: Sequence, prompt: Prompt, tried: Plan | None = None) -> None:
        """Write into a sequence how it is decoded: by the guard's plan, or by one that is timed."""
        method, spec = sequence.method, sequence.spec
        plans = self._plans_for(method, spec)
        guard = None if tried is not None else self._guard(method, plans, spec)
        choice, plan = Choice((tried or plans[0]).name), tried or plans[0]
        if guard is not None:
            choice = guard.choose()
            plan = next((one for one in plans if one.name == choice.plan), PLAIN)
        sequence.prompt, sequence.num_prompt = prompt, prompt.length
        sequence.grammar = prompt.grammar
        sequence.action_tokens = self.target.action_tokens
        sequence.guard, sequence.choice, sequence.shape = guard, choice, plan.shape
        sequence.limit = spec.max_tokens + method.rule.tokens_behind * spec.is_action
        if prompt.grammar is not None:  # how every answer begins: cached by the prefill
            sequence.extend(prompt.grammar.forced(()), self._widest_of(sequence) - 1)
        if method.temperature > 0.0:
            sequence.noise_key = noise_key(method.seed, sequence.memory.draw)
        sources = {kind: self._source(kind) for kind in (*plan.prefill, *plan.rounds)}
        early = [sources[kind] for kind in plan.prefill if sources[kind].early]
        sequence.prefill_sources = early[:_MOST_PREFILL_SOURCES]
        sequence.round_sources = [sources[kind] for kind in plan.rounds]
        for source in sources.values():
            with sequence.failing():
                source.begin(sequence)

    def _source(self, kind: str) -> DraftSource:
        """The source of a kind. One that cannot be made is tried once, and then refused by name."""
        if kind not in self._sources:
            try:
                self._sources[kind] = self._makers[kind]()
            except RequestError as error:
                self._broken[kind] = error
                raise
        return self._sources[kind]

    def _width_of(self, sequence: Sequence) -> int:
        """Nodes of a later pass over text: fixed where the answer may depend on it."""
        if not sequence.method.rule.is_exact:
            return min(_STEADY_WIDTH, self._widest)
        return self.text_width if sequence.method.is_guarded else self._widest

    def _widest_of(self, sequence: Sequence) -> int:
        """Nodes of a tree at most: what actions are drafted by makes no wider ones."""
        return min(self._widest, WIDEST) if sequence.spec.is_action else self._widest

    def _guard(self, method: Method, plans: Items[Plan], spec: AnswerSpec) -> Guard | None:
        """The guard for answers like these; None where there is nothing to choose."""
        if not method.is_guarded or plans == (PLAIN,) or not spec.is_action:
            return None
        key = method.name, str(method.rule), spec.max_tokens
        guard = self._guards.pop(key, None)
        if guard is None:
            guard = Guard(plans, spec.max_tokens, method.name)
            guard.measured(self._prices_of(plans))
        self._guards[key] = guard
        if len(self._guards) > _GUARDS_KEPT:
            # Methods that callers make up push out no method that has a name of its own.
            made_up = [key for key in self._guards if ":" in key[0]]
            del self._guards[made_up[0] if made_up else next(iter(self._guards))]
        return guard

    @property
    def decisions(self) -> dict[str, str]:
        """What the guard of each method has decided, and why. Any thread may ask."""
        decided = {key[0]: one for key, one in [*self._guards.items()] if one.has_decided}
        found = {name: f"{one.choice.plan}: {one.choice.reason}" for name, one in decided.items()}
        if self._has_timed_widths:
            found["texts"] = f"{self.text_width} tokens a pass, which writes most in a millisecond"
        return found

    def _prices_of(self, plans: Items[Plan]) -> dict[str, Price]:
        """What is known of plans and of plain decoding. What they cost hangs on no rule."""
        known = self._prices
        return {plan.name: known[plan] for plan in (*plans, PLAIN) if plan in known}

    def capture(self) -> None:
        """Capture every pass and prefill that any method may need. Does nothing without a GPU.

        Heads that read prompts have their hidden states kept by every prefill.
        """
        passes = self.captured
        if passes is None:
            return
        trained = [kind for kind in (kinds.HEAD, kinds.BLOCK) if kind in self._makers]
        passes.keeps_hidden = bool(trained)
        started, sizes = time.perf_counter(), self.target.decoder.sizes
        itemsize = self.target.decoder.embedding.weight.element_size()
        num_graphs = len(shapes_of(passes.reserve, passes.widest, passes.keeps_hidden))
        planned = passes.layout.bytes_of(sizes, itemsize, num_graphs)
        if kinds.HEAD in trained:
            planned |= captured_head.bytes_of(passes.layout, sizes, itemsize)
        if self._block is not None:
            planned |= captured_block.bytes_of(passes.layout, self._block.sizes, itemsize)
        said = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in planned.items())
        _log.info(
            "capturing %d passes and prefills; memory beside the weights: %s", num_graphs, said
        )
        passes.capture()
        for kind in trained:
            head = self._source(kind)
            if isinstance(head, ModelSource):
                head.capture(passes.layout)
        _log.info("captured in %.0f s", time.perf_counter() - started)

    def warm_up(self, prompt: Prompt, method: Method, spec: AnswerSpec) -> None:
        """Measure what passes cost here: every plan of a method, or every width over text."""
        if not spec.is_action:
            if not self._has_timed_widths:  # they are the same for every method
                self._measure_widths(prompt, spec)
            return
        plans = self._plans_for(method, spec)
        guard = self._guard(method, plans, spec)
        if guard is None:
            self._time_plan(prompt, method, spec, plans[0])
            return
        for _ in range(_WARM_UP_RUNS):  # in turn, so that other work slows all down alike
            for plan in (*plans, PLAIN):
                found = self._time_plan(prompt, method, spec, plan)
                known = self._prices.get(plan, found)
                least = min(known.prefill_ms, found.prefill_ms), min(known.pass_ms, found.pass_ms)
                self._prices[plan] = Price(*least)
        guard.measured(self._prices_of(plans))

    def _time_plan(self, prompt: Prompt, method: Method, spec: AnswerSpec, plan: Plan) -> Price:
        """Decode one answer of a session with a constant history; what its passes took."""
        own = ((0,) * spec.action_length,) * STEPS_KEPT
        sequence = Sequence(method, spec, SessionMemory(own=own))
        self._prepare(sequence, prompt, plan)
        self._waiting.append(sequence)
        clock = StageClock(self.target.device)
        while sequence in self.unfinished:
            self.step(clock)
        prefill, *later = [one.ms(*Stage) for one in sequence.records]
        return Price(prefill, min(later, default=prefill))

    def _measure_widths(self, prompt: Prompt, spec: AnswerSpec) -> None:
        """Time passes of every width, and choose how much of an old text a pass carries here."""
        widths = [one for one in _WIDTHS if one <= self._widest]
        took = dict.fromkeys(widths, float("inf"))
        root = prompt.last_token
        for _ in range(_WARM_UP_RUNS):
            for width in widths:
                clock = StageClock(self.target.device)
                tree = DraftTree.of_committed([root] * width)
                row = PassRow(0, prompt.length, tree, 0, is_action=False)
                clock.restart()
                scores = self.target.forward(self.cache, [row])
                float(scores.logits.sum())
                clock.record(Stage.VERIFY)
                took[width] = min(took[width], clock.timings().verify_ms)
        apart = _NUMBERS_APART if spec.numbers_in_row else _EDITS_APART
        self.text_width, self._has_timed_widths = best_width(took, apart), True
        by_width = ", ".join(f"{width}: {ms:.2f}" for width, ms in took.items())
        _log.info("a pass carries %d tokens of a text; ms by width: %s", self.text_width, by_width)


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
    return accept(sequence, tree, scored)


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


def _note_log_probs(sequence: Sequence, tree: DraftTree, logits: torch.Tensor) -> None:
    """Keep on the device how likely the target was to write each token of the last pass."""
    assert sequence.last is not None
    path = sequence.last.path[tree.root :]
    found = logits[path] / (sequence.method.temperature or 1.0)
    tokens = to_device(sequence.tokens[-len(path) :], logits.device, torch.int64)
    here = found.log_softmax(dim=1).gather(1, tokens[:, None]).squeeze(1)
    sequence.notes.setdefault("log_probs", []).append((len(sequence.tokens), here))


def _read_log_probs(sequence: Sequence) -> None:
    """Tokens that a grammar has forced were certain."""
    found = list[float]()
    for stop, part in sequence.notes.get("log_probs", []):
        found += [0.0] * (stop - len(part) - len(found)) + part.tolist()
    found += [0.0] * (len(sequence.tokens) - len(found))
    sequence.log_probs = tuple(found[: sequence.spec.max_tokens])
