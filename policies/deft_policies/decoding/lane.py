"""Answers that are decoded together, round by round: draft, verify, judge, commit.

`Lane._play` is a round. The first pass of an answer is its prefill, with the guesses that need no
model riding behind the prompt. Every pass commits the drafts it accepted and one token of the
target's own, so an answer ends when its last token is known and never has one more. The host reads
from the device once a round, and not at all where nothing is checked and the end is known.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance.host_waits import find_wait
from deft_policies.decoding.acceptance.rule import ScoredTree
from deft_policies.decoding.batch import Batch, Pass, Record, Row, read_lists, runs_of
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.drafts import HIDDEN, LOGITS, MEMORY, PREDICTIONS, DraftSource
from deft_policies.decoding.guard import Choice, Guard
from deft_policies.decoding.judge import judge, predict
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import MOST_GROWN, Plan
from deft_policies.decoding.sampling import first_maximum, noise_keys, top_gap
from deft_policies.decoding.target import WIDTHS, Prompts, Scores, Target, bucket
from deft_policies.decoding.tree import DraftLimits, DraftTree, merge
from deft_policies.memory import Average
from deft_policies.model.layout import Tensors
from deft_policies.model.llama import take_rows
from deft_policies.model.staging import to_device

_DRAFTS_KEPT = 4  # of methods that are asked for in turn: each may have a cache of its own
_MOST_RIDERS = 3  # sources that draft behind the prompt
BookTime = Callable[[Stage], object]
Maker = Callable[[Method], DraftSource]


@dataclass(eq=False)
class Group:
    """Answers that begin together, by one plan: what a guard learns from."""

    rows: list[Row]
    prompts: Prompts
    choice: Choice
    guard: Guard | None

    @property
    def is_over(self) -> bool:
        """Whether none of them is on its way any more."""
        return all(row.is_done for row in self.rows)

    def learn_passes(self, row: Row) -> None:
        """Tell the guard, and the session, what an answer has needed."""
        if self.guard is not None and row.remembers:
            needed = dict(row.memory.passes_needed)
            self.guard.learn_passes(row.plan, row.num_passes - 1, needed)
            _learn_of_repeating(self.guard, row, needed)
            row.memory = replace(row.memory, passes_needed=needed)

    def learn_cost(self) -> None:
        """Tell the guard what they have cost together: the longest was there all the time."""
        if self.guard is not None:
            records = max((row.records for row in self.rows), key=len)
            passes = [(one.num_nodes, one.ms(*Stage)) for one in records]
            self.guard.learn(self.choice, len(self.rows), passes)


class Lane:
    """One batch, decoded by one method and plan at a time, and all the memory that this takes.

    The memory of one that `is_fixed` never moves, so that rounds can be recorded: what `record`
    has played is a single launch from then on.
    """

    method: Method
    plan: Plan

    def __init__(
        self, target: Target, makers: Mapping[str, Maker], widest: int, whole: Batch
    ) -> None:
        self.target = target
        self.is_fixed = whole.longest > 0
        self.is_recording = False
        self._makers, self._widest, self._whole = makers, widest, whole
        self._made: dict[Hashable, DraftSource] = {}
        self._num_promised = 0  # of these, the first: recordings may use them
        self._recorded: set[Hashable] = set()
        self._cache = target.new_cache()
        self._groups: list[Group] = []
        self._unread: list[tuple[list[Row], Record]] = []  # passes that the host has not read yet
        self._is_switched = False  # to any method
        self._last: Pass | None = None  # of all rows in use
        if self.is_fixed:
            nodes = bucket(widest)
            self._last = Pass.blank(target, whole.capacity, nodes, min(nodes, whole.positions))
            self._cache.fix(whole.capacity, whole.longest + whole.positions + nodes)
            target.record(self._cache, widest)

    @property
    def rows(self) -> list[Row]:
        """The answers that are on their way."""
        return [one for one in self._whole.rows if one is not None]

    def switch_to(self, method: Method, plan: Plan) -> None:
        """Decode by another method and plan from now on; nobody is on the way here."""
        if self._is_switched and self.method == method and self.plan == plan:
            return
        self.method, self.plan, self._is_switched = method, plan, True
        by_kind = {kind: self._draft_of(kind) for kind in plan.kinds}
        self._drafts = tuple(by_kind.values())
        # What reads the target's own passes has nothing to say before the first of them.
        riders = [by_kind[kind] for kind in plan.prefill]
        riders = [one for one in riders if not one.needs & {HIDDEN, LOGITS}]
        self._riders = tuple(riders[:_MOST_RIDERS])
        self._between = tuple(by_kind[kind] for kind in plan.rounds)
        needs = frozenset[str]().union(*(one.needs for one in self._drafts))
        self._keeps_hidden, self._keeps_logits = HIDDEN in needs, LOGITS in needs
        self._reads_past = MEMORY in needs
        self._num_read = 6 if PREDICTIONS in needs else 4  # of what a pass tells
        self._rule = str(method.rule) if any(one.kinds for one in method.plans) else ""

    def _draft_of(self, kind: str) -> DraftSource:
        key, made = self.method.drafting(kind), self._made
        if key not in made:
            if len(made) >= self._num_promised + (16 if self.is_fixed else _DRAFTS_KEPT):
                del made[list(made)[self._num_promised]]
            made[key] = self._makers[kind](self.method)
            made[key].allocate(self._whole)
        return made[key]

    def fits(self, prompts: Prompts, rows: Sequence[Row]) -> bool:
        """Whether there is room for these."""
        whole, reserve = self._whole, self.target.runner.reserve
        return (
            whole.rows.count(None) >= len(rows)
            and all(one.form.is_action == rows[0].form.is_action for one in self.rows)
            and max(row.limit for row in rows) <= whole.positions
            and max(row.form.num_places for row in rows) <= whole.places
            and (not self.is_fixed or reserve is None or reserve.holds(*prompts.embeds.shape[:2]))
        )

    def join(self, group: Group) -> None:
        """Let answers in; their prefill is part of the next step."""
        free = [slot for slot, one in enumerate(self._whole.rows) if one is None]
        for prompt, (row, slot) in enumerate(zip(group.rows, free, strict=False)):
            self._whole.rows[slot], row.slot, row.prompt = row, slot, prompt
        self._groups.append(group)

    def step(self, clock: StageClock) -> list[Row]:
        """Play a round of what is on its way, and the first one of what has joined."""
        clock.take_laps()  # what came before, as seeing, is no pass
        rows = self.rows
        playing = [row for row in rows if row.records]
        if playing:
            self._round(playing, clock)
        if len(playing) < len(rows):
            for group in self._groups:
                if any(not row.records for row in group.rows):
                    self._prefill(group, clock)
        done = [row for row in rows if row.is_done]
        return self._finish(done) if done else done

    def _round(self, rows: list[Row], clock: StageClock) -> None:
        """The next pass of rows that have begun."""
        batch = self._in_use()
        drafts, depth = _able(self._between, rows), max(row.limit - 1 - row.count for row in rows)
        tree = None
        if drafts and not all(one.capturable for one in drafts):
            tree = self._draft(batch, drafts, depth)
            clock.lap(Stage.DRAFT)
        done = self._replay(batch, drafts, depth, tree) if self.is_fixed else None
        if done is not None:
            clock.lap(Stage.VERIFY)
        else:
            last = self._play(batch, drafts, depth, tree, self._lap(clock, Stage.VERIFY))
            done = last.told
        self._note(rows, Record(done, 0, False, clock.take_laps()))

    def _play(
        self,
        batch: Batch,
        drafts: Sequence[DraftSource],
        depth: int,
        tree: DraftTree | None,
        lap: BookTime,
    ) -> Pass:
        """A round: draft behind what was accepted, verify the drafts, judge them, commit."""
        last = batch.last
        assert last is not None
        if tree is None:
            tree = self._draft(batch, drafts, depth)
            lap(Stage.DRAFT)
        tree = replace(tree, answers=last.answers)
        self._keep(batch, last)
        lap(Stage.COMMIT)
        scores = self.target.score(self._cache, tree)
        lap(Stage.VERIFY)
        done = self._judge(batch, tree, scores, depth)
        self._commit(batch, done, scores.logits)
        lap(Stage.JUDGE)
        return done

    def _keep(self, batch: Batch, last: Pass) -> None:
        """Keep in the cache what the last pass has accepted."""
        is_alone = last.num_nodes == 1 and not self.is_fixed
        kept: Tensor | int = 1 if is_alone else last.num + 1
        if self.is_fixed or None in batch.rows:  # those that have ended keep nothing more
            kept = kept * batch.is_open
        self._cache.keep(last.path, kept, last.tree.is_chain or not self.plan.kinds)

    def _replay(
        self, batch: Batch, drafts: Sequence[DraftSource], depth: int, tree: DraftTree | None
    ) -> Tensors | None:
        """The same as one launch: what it tells; None if it is not recorded.

        What is recorded drafts, too, or is given a tree that could only be made step by step.
        """
        method, shape, given = self.method, self.plan.shape, Tensors()
        rows = [row for row in batch.rows if row is not None]
        if any(row.wants_margins for row in rows) or (tree is not None and tree.odds is not None):
            return None
        if tree is None:  # deeper trees are of no use to any draft that is recorded
            depth = min(depth, max(shape.levels, self._whole.places)) if drafts else 0
        else:
            drafts, depth = (), self._whole.positions
            given = tree.padded(bucket(tree.num_nodes)).columns
        forms = frozenset((row.form.stop is None, row.form.is_action) for row in rows)
        verifying = (method.rule, method.loop, method.tie_break, method.temperature)
        drafting = (shape, *map(id, drafts), self._keeps_hidden, self._keeps_logits, depth)
        key = (batch.num_rows, forms, verifying, drafting, *(one.shape for one in given[:1]))
        if not isinstance(method.rule, Hashable):
            return None
        if self.is_recording and shape.num_open <= MOST_GROWN and find_wait(method.rule) is None:
            self._recorded.add(key)
        if key not in self._recorded:
            return None

        def step(*columns: Tensor) -> Tensors:
            assert self._last is not None
            batch.last = self._last.of_rows(batch.num_rows)
            guessed = DraftTree(*columns) if columns else None
            self._play(batch, drafts, depth, guessed, lambda _: None)
            return (torch.cat(self._last.of_rows(batch.num_rows).told, dim=1),)

        (found,) = self.target.runner.run((self, key), step, given)
        assert batch.last is not None
        # The next round overwrites it, and a trace is put into words much later.
        return torch.split(found.clone(), [one.shape[1] for one in batch.last.told], dim=1)

    def record(self, group: Group, method: Method, plan: Plan) -> None:
        """Record every round that answers like these may need; they are not decoded to their end.

        Whatever the rounds do to the rows, they keep nothing in the cache and end nowhere. The
        sources that they draft from are kept from then on.
        """
        self.is_recording = True
        self.switch_to(method, plan)
        self._num_promised = len(self._made)
        self.join(group)
        self._prefill(group, StageClock(self.target.device))
        batch, drafts, shape = self._in_use(), _able(self._between, group.rows), self.plan.shape
        batch.is_open.fill_(False)
        if all(one.capturable for one in drafts):
            most = max(shape.levels, self._whole.places) if drafts else 0
            for depth in range(min(most + 1, max(row.limit for row in group.rows))):
                torch.sub(batch.limit, 1 + depth, out=batch.count)  # as far as leaves such a depth
                self._replay(batch, drafts, depth, None)
        else:
            for width in WIDTHS[: WIDTHS.index(bucket(self._widest)) + 1]:
                tree = DraftTree.root_only(batch.count).padded(width)
                self._replay(batch, drafts, 0, tree)
        self._whole.rows[:] = [None] * self._whole.capacity
        self._groups, self._unread = [], []
        self.is_recording = False

    def _prefill(self, group: Group, clock: StageClock) -> None:
        """Run prompts, with the guesses that need no model riding behind them."""
        for first, stop in runs_of([row.slot for row in group.rows]):
            rows = [row for row in group.rows if first <= row.slot < stop]
            chosen = [row.prompt for row in rows]
            if self.is_fixed and first == 0:
                size = 1 << (len(rows) - 1).bit_length()
                if not any(self._whole.rows[stop:size]):
                    chosen += chosen[:1] * (size - len(rows))  # what is recorded has such sizes
            self._prefill_rows(first, rows, take(group.prompts, chosen), clock)

    def _prefill_rows(
        self, first: int, rows: list[Row], prompts: Prompts, clock: StageClock
    ) -> None:
        method, size = self.method, len(prompts.lengths)
        part = self._whole.at(first, first + size)
        every = [*rows, *rows[:1] * (size - len(rows))]
        keys = None
        if method.temperature > 0.0:
            draws = [row.memory.draw for row in every]
            keys = noise_keys(method.seed, draws, self.target.device)
        part.fill(every, keys, bool(self.plan.kinds), self._reads_past)
        if len(rows) < size:
            part.is_open[len(rows) :] = False
        reads_prompt = self.method.rule.needs_patches or self._keeps_hidden
        prompts = replace(prompts, keep_hidden=reads_prompt)
        for one in self._drafts:
            if HIDDEN not in one.needs:
                one.begin(part, prompts, None)
        depth, lap = max(row.limit for row in rows) - 1, self._lap(clock, Stage.PREFILL)
        tree = self._draft(part, _able(self._riders, rows), depth, prompts.last_tokens)
        tree = replace(tree, answers=part.answers)
        lap(Stage.DRAFT)
        self._reserve(first + size, prompts, depth)
        scores, hidden = self.target.prefill(self._cache, first, prompts, tree)
        lap(Stage.PREFILL)
        if self.method.rule.needs_patches:
            part.keep_patches(hidden[:, prompts.patches])
        done = self._judge(part, tree, scores, depth)
        self._commit(part, done, scores.logits)
        lap(Stage.JUDGE)
        self._note(rows, Record(done.told, first, True, clock.take_laps()))
        if not all(row.is_done for row in rows):
            for one in self._drafts:
                if HIDDEN in one.needs:
                    one.begin(part, prompts, hidden)

    def _lap(self, clock: StageClock, whole: Stage) -> BookTime:
        """What books time. Without drafts a pass is a `whole` stage, and ends judged."""
        if self.plan.kinds:
            return clock.lap
        return lambda stage: clock.lap(whole) if stage is Stage.JUDGE else None

    def _reserve(self, num_rows: int, prompts: Prompts, depth: int) -> None:
        """Room for the whole of these answers and a tree behind."""
        longest, reserve = prompts.embeds.shape[1], self.target.runner.reserve
        if reserve is not None:
            longest = reserve.padded(longest)
        self._cache.reserve(num_rows, longest + 2 * depth + self._widest)

    def _in_use(self) -> Batch:
        """The batch up to its last row that has begun, and what its last pass has left."""
        size = 1 + max((row.slot for row in self.rows if row.records), default=0)
        if self.is_fixed:
            size = 1 << (size - 1).bit_length()
        batch = self._whole.at(0, size)
        batch.rows = [row if row is not None and row.records else None for row in batch.rows]
        assert self._last is not None
        is_whole = self._last.num.shape[0] == size and not self.is_fixed
        batch.last = self._last if is_whole else self._last.of_rows(size)
        return batch

    def _draft(
        self, batch: Batch, drafts: Sequence[DraftSource], depth: int, roots: Tensor | None = None
    ) -> DraftTree:
        """One tree of what all sources guess, behind the last pass if no roots are given."""
        shape, is_first = self.plan.shape, roots is not None
        if roots is None:
            assert batch.last is not None
            roots = batch.last.bonus
        if not drafts or (depth <= 0 and not shape.is_full_depth):
            return batch.root_tree(roots)
        widest = self._widest
        if not is_first and self.method.is_guarded and kinds.PREVIOUS_ANSWER in self.plan.kinds:
            widest = min(widest, self.target.text_width)
        limits = DraftLimits(roots, shape, depth, widest)
        found = [(one.kind, one.draft(batch, limits)) for one in drafts]
        return merge(found, limits, trims=self.target.reads_lengths)

    def _judge(self, batch: Batch, tree: DraftTree, scores: Scores, depth: int) -> Pass:
        """What the target says after each node, and which path is committed."""
        method, logits, first = self.method, scores.logits, self.target.vocabulary.first
        predictions = predict(method, tree, logits, first, batch.keys, batch.count)
        if tree.num_nodes == 1:
            path, num, answers = batch.zeros, batch.zero, scores.answers
            bonus, tokens, own = predictions[:, 0], predictions, predictions
            if not self.plan.kinds and method.temperature > 0.0:
                predictions = own = first_maximum(logits) + first
        else:
            has_stop = any(row is not None and row.form.stop is not None for row in batch.rows)
            steps = max(1, min(tree.num_nodes, depth + 1, batch.positions))
            scored = self._scored(batch, tree, scores, predictions)
            stop = batch.stop if has_stop else None
            accepted = judge(method, scored, batch.keys, stop, steps)
            path, num, bonus, own = accepted.path, accepted.num, accepted.bonus, accepted.own
            answers = accepted.answers
            tokens = _next_tokens(tree, path, num, bonus)
        hidden = take_rows(scores.hidden, path) if self._keeps_hidden else None
        said = None
        if self._keeps_logits:
            said = logits[:, :, self.target.action_tokens.within(self.target.vocabulary)]
        assert answers is not None
        return Pass(tree, predictions, path, num, bonus, tokens, own, hidden, said, answers)

    def _scored(
        self, batch: Batch, tree: DraftTree, scores: Scores, predictions: Tensor
    ) -> ScoredTree:
        """The tree with everything that a rule may read."""
        return ScoredTree(
            tree=tree,
            scores=scores,
            predictions=predictions,
            num_committed=batch.count,
            spent=batch.spent(),
            vocabulary=self.target.vocabulary,
            action_tokens=self.target.action_tokens,
            context=batch.context(),
            num_tokens=self.target.num_tokens,
            limit=batch.limit,
            begin=batch.begin if batch.has_text else None,
            stop=batch.stop if batch.has_text else None,
        )

    def _commit(self, batch: Batch, done: Pass, logits: Tensor) -> None:
        """Write down what a pass has decided: for the next round, and where somebody will read."""
        self._settle(done, batch.first)
        batch.sums.add_(logits.sum(dim=(1, 2)))
        wants_margins = any(row is not None and row.wants_margins for row in batch.rows)
        is_plain = not self.plan.kinds and self.method.temperature == 0.0
        if is_plain and not wants_margins:
            return
        places = _places_of(batch, done.num, done.path.shape[1])
        batch.tokens.scatter_(1, places, done.tokens)
        batch.own.scatter_(1, places, done.own)
        if wants_margins:
            found = take_rows(logits, done.path)
            batch.margins.scatter_(1, places, top_gap(found, first_maximum(found)))
        if batch.has_text and not self.method.rule.is_exact:
            self._note_text(batch, done)
        batch.count.add_(done.num + 1)
        if batch.num_rows > 1 or self.is_fixed:  # some may have ended before
            torch.minimum(batch.count, batch.limit, out=batch.count)

    def _settle(self, done: Pass, first: int) -> None:
        """Let this be the last pass of the rows from `first` on, beside that of others."""
        old, stop = self._last, first + len(done.num)
        begun = [row.slot for row in self.rows if row.records]
        others = [slot + 1 for slot in begun if not first <= slot < stop]
        if self.is_fixed and old is not None:
            old.put(done, first)
        elif first == 0 and not others:
            self._last = done
        else:  # a row is read at its own slot, whoever has left the slots before it
            passes = [(done, first)]
            if old is not None and others:
                passes.insert(0, (old.of_rows(max(others)), 0))
            nodes = max(one.num_nodes for one, _ in passes)
            steps = max(one.path.shape[1] for one, _ in passes)
            self._last = Pass.blank(self.target, max(stop, *others, 0), nodes, steps)
            for one, start in passes:
                self._last.put(one, start)

    def _note_text(self, batch: Batch, done: Pass) -> None:
        """Where the action begins that the next token may belong to: behind the last text."""
        steps = torch.arange(1, done.tokens.shape[1] + 1, device=batch.device)
        is_text = ~self.target.action_tokens.contains(done.tokens)
        last = (steps * (is_text & (steps <= done.num[:, None] + 1))).amax(dim=1)
        is_moved = (last > 0) & (batch.begin >= 0)
        batch.begin.copy_(torch.where(is_moved, batch.count + last, batch.begin))

    def _note(self, rows: list[Row], record: Record) -> None:
        """Tell the host of a pass, which reads what was committed where it cannot know that."""
        for row in rows:
            row.note(record)
        self._unread.append((rows, record))
        is_known = record.num_nodes == 1 or not self.plan.kinds
        for row in rows:
            is_known = is_known and row.form.is_action and row.count < row.limit
        if not is_known:
            self._read()

    def _read(self) -> None:
        """Read what passes have told since the last time: the one read of a round."""
        unread, self._unread = self._unread, []
        sums, answers = self._whole.sums, self._whole.answers
        parts = [(sums - sums == 0).long()[:, None], answers[:, None]]
        parts += [part for _, record in unread for part in record.told[: self._num_read]]
        is_finite, in_slots, *told = self.read_from_device(parts)
        for rows, record in unread:
            read, told = told[: self._num_read], told[self._num_read :]
            for row in rows:
                mine = [one[row.slot - record.first] for one in read]
                row.take(mine, is_finite[row.slot] == [1], in_slots[row.slot][0])

    def read_from_device(self, parts: Sequence[Tensor]) -> list[list[list[int]]]:
        """The one place where the host waits for the device."""
        return read_lists(parts)

    def _finish(self, done: list[Row]) -> list[Row]:
        """Let go of what has ended, tell what happened, and let the guards learn."""
        for row in done:
            margins: list[float] = []
            if row.wants_margins:
                num_tokens = min(len(row.tokens), row.form.max_tokens)
                margins = self._whole.margins[row.slot, :num_tokens].tolist()
            row.finish(self._rule, margins)
            group = next(one for one in self._groups if row in one.rows)
            self._let_go(row)
            group.learn_passes(row)
        for group in [one for one in self._groups if one.is_over]:
            group.learn_cost()
            self._groups.remove(group)
        return done

    def _let_go(self, row: Row) -> None:
        self._whole.rows[row.slot] = None
        if row.records:  # whoever goes on, or joins behind it, does so beside an empty place
            self._whole.is_open[row.slot] = False
            self._whole.limit[row.slot] = 0
            self._cache.length[row.slot] = 0

    def cancel(self, row: Row) -> bool:
        """Let go of an answer that nobody waits for any more; whether it was on its way here."""
        if row not in self.rows:
            return False
        self._unread = [
            ([one for one in rows if one is not row], record) for rows, record in self._unread
        ]
        row.is_done = True
        self._let_go(row)
        left = self.rows
        for group in self._groups:
            group.rows = [one for one in group.rows if one is not row]
        self._groups = [one for one in self._groups if any(row in left for row in one.rows)]
        return True


def _able(drafts: Sequence[DraftSource], rows: Sequence[Row]) -> tuple[DraftSource, ...]:
    """Those that have something to say, given what the sessions remember."""
    if not drafts:
        return ()
    longest = max(len(row.memory.own) for row in rows)
    return tuple(one for one in drafts if longest >= one.least_steps)


def _learn_of_repeating(guard: Guard, row: Row, needed: dict[str, Average]) -> None:
    """Tell a guard what plans that only repeat the last action would have needed.

    With exact match that can be counted afterwards: one pass for every token that changed.
    """
    own = row.memory.own
    if not (row.form.is_action and row.method.rule.is_exact and len(own) > 1):
        return
    num_changed = sum(a != b for a, b in zip(own[-2][:-1], own[-1][:-1], strict=True))
    for plan in row.method.plans:
        if plan.name != row.plan and plan.kinds == {kinds.PREVIOUS}:
            guard.learn_passes(plan.name, num_changed, needed)


def take(prompts: Prompts, rows: list[int]) -> Prompts:
    """Some rows of prompts, or all as they are."""
    if rows == list(range(len(prompts.lengths))):
        return prompts
    index = to_device(rows, prompts.embeds.device)
    features, for_draft = prompts.features, prompts.for_draft
    return replace(
        prompts,
        embeds=prompts.embeds[index],
        lengths=prompts.lengths[index],
        last_tokens=prompts.last_tokens[index],
        features=None if features is None else features[index],
        for_draft=None if for_draft is None else lambda: take(for_draft(), rows),
    )


def _places_of(batch: Batch, num: Tensor, steps: int) -> Tensor:
    """Where the tokens of a pass belong, [row, step]; the spare column for what is none."""
    if steps == 1:
        return batch.count[:, None].clamp(max=batch.positions)
    numbers = torch.arange(steps, device=num.device)
    places = batch.count[:, None] + numbers
    places = places.masked_fill_(numbers > num[:, None], batch.positions)
    return places.clamp_(max=batch.positions)


def _next_tokens(tree: DraftTree, path: Tensor, num: Tensor, bonus: Tensor) -> Tensor:
    """The token after each node of the path: the next draft on it, or the bonus. [row, step]."""
    if path.shape[1] == 1:
        return bonus[:, None]
    drafted = tree.tokens.gather(1, path[:, 1:])
    shifted = torch.cat((drafted, bonus[:, None]), dim=1)
    return shifted.scatter_(1, num[:, None], bonus[:, None])
