"""A round: one target pass over the rows of a batch. Draft, verify, accept, commit.

`Round.play` is that, in the paper's order. The first pass of a row is its prefill, with the guesses
that need no model behind the prompt. Every pass commits the drafts it accepted and one token of the
target's, so an answer ends when its last token is known and never has one more. The host reads from
the device once a round, and not at all where nothing is checked and the end is known.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance.host_waits import find_wait
from deft_policies.decoding.acceptance.rule import ExactMatch, ScoredTree
from deft_policies.decoding.batch import Batch, Pass, PassRecord, Row, read_lists, runs_of
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.drafts import HIDDEN, LOGITS, MEMORY, PREDICTIONS, DraftSource
from deft_policies.decoding.judge import judge, judge_on_host, predict
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import MOST_GROWN, Plan
from deft_policies.decoding.sampling import first_maximum, noise_keys, top_gap
from deft_policies.decoding.target import WIDTHS, Prompts, Scores, Target, bucket
from deft_policies.decoding.tree import DraftLimits, DraftTree, merge
from deft_policies.model.graphs import Tensors
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import take_rows

_MOST_PREFILL_DRAFTS = 3
Played = tuple[Tensor, int, int]  # a pass as the host may read it, its nodes and its steps
BookTime = Callable[[Stage], object]
Maker = Callable[[Method], DraftSource]


class Round:
    """Plays the passes of one batch by one method and plan."""

    def __init__(
        self,
        target: Target,
        batch: Batch,
        method: Method,
        plan: Plan,
        makers: Mapping[str, Maker],
        known: Mapping[Hashable, DraftSource],
    ) -> None:
        """Draft from sources of this batch that are `known`, or that are made now."""
        self.target, self.batch, self.method, self.plan = target, batch, method, plan
        sources: dict[str, DraftSource] = {}
        for kind in plan.kinds:
            source = known.get(method.drafting(kind))
            if source is None:
                source = makers[kind](method)
                source.allocate(batch)
            sources[kind] = source
        self.sources: dict[Hashable, DraftSource] = {
            method.drafting(kind): one for kind, one in sources.items()
        }
        self.round_drafts = [sources[kind] for kind in plan.rounds]
        # What reads the target's passes has nothing to say before the first of them.
        early = [sources[one] for one in plan.prefill if not sources[one].needs & {HIDDEN, LOGITS}]
        self.prefill_drafts = early[:_MOST_PREFILL_DRAFTS]
        needs = frozenset[str]().union(*(one.needs for one in self.sources.values()))
        self._keeps_hidden, self._keeps_logits = HIDDEN in needs, LOGITS in needs
        self._reads_past, self._reads_nodes = MEMORY in needs, PREDICTIONS in needs
        self._judges_on_host = target.reads_lengths and isinstance(method.rule, ExactMatch)
        self._captured: dict[Hashable, tuple[int, int]] = {}  # nodes and steps of these rounds
        self._is_capturing = False
        self._joining: list[tuple[list[Row], Prompts]] = []  # answers whose first pass is next
        self._unread: list[tuple[list[Row], PassRecord]] = []  # passes not yet read by the host

    def play(
        self,
        rows: Batch,
        drafts: Sequence[DraftSource],
        depth: int,
        lap: BookTime = lambda stage: None,
        tree: DraftTree | None = None,
    ) -> Played:
        """Draft behind what was accepted, verify the drafts, accept some, commit them."""
        rows.last = last = rows.last_pass()
        if tree is None:
            tree = self._draft(rows, drafts, depth, last.bonus)
            lap(Stage.DRAFT)
        tree = replace(tree, answers=last.answers)
        self._keep(rows, last)
        lap(Stage.COMMIT)
        scores = self._penalised(rows, tree, self.target.score(self._cache, tree))
        lap(Stage.VERIFY)
        played = self._commit(rows, self._accept(rows, tree, scores, depth), scores.logits)
        lap(Stage.JUDGE)
        return played

    def prefill(self, rows: list[Row], first: int, prompts: Prompts, clock: StageClock) -> None:
        """The same as the first pass of rows: the prompts, with drafts behind them."""
        part, lap = self._take_in(rows, first, prompts), self._lap(clock, Stage.PREFILL)
        reads_prompt = self.method.rule.needs_patches or self._keeps_hidden
        prompts = replace(prompts, keep_hidden=reads_prompt)
        self._begin(part, prompts, None)
        depth = max(row.limit for row in rows) - 1
        tree = self._draft(part, able(self.prefill_drafts, rows), depth, prompts.last_tokens)
        tree = replace(tree, answers=part.answers)
        lap(Stage.DRAFT)
        scores, hidden = self.target.prefill(self._cache, first, prompts, tree)
        if prompts.seen is not None:
            part.keep("seen", prompts.seen, prompts.seen.shape[1])
        scores = self._penalised(part, tree, scores)
        lap(Stage.PREFILL)
        if self.method.rule.needs_patches:
            patches = hidden[:, prompts.patches]
            part.keep("patches", patches, patches.shape[1])
        played = self._commit(part, self._accept(part, tree, scores, depth), scores.logits)
        lap(Stage.JUDGE)
        self._note(rows, played, first, True, clock)
        if not all(row.is_done for row in rows):
            self._begin(part, prompts, hidden)

    def _draft(
        self, rows: Batch, drafts: Sequence[DraftSource], depth: int, roots: Tensor
    ) -> DraftTree:
        """One tree of what all sources guess."""
        shape = self.plan.shape
        if not drafts or (depth <= 0 and not shape.is_full_depth):
            return rows.root_tree(roots)
        widest, plan = self.batch.widest, self.plan.kinds
        # Of a text much may stand in the prefill; of numbers only a few do at a time.
        copies_text = kinds.PREVIOUS_ANSWER in plan and rows.last is not None
        if self.method.is_guarded and (copies_text or kinds.PREVIOUS_NUMBERS in plan):
            widest = min(widest, self.target.text_width)
        limits = DraftLimits(roots, shape, depth, widest)
        found = [(one.kind, one.draft(rows, limits)) for one in drafts]
        return merge(found, limits, trims=self.target.reads_lengths)

    def _keep(self, rows: Batch, last: Pass) -> None:
        """Keep in the cache what the last pass has accepted."""
        is_captured = self.batch.longest > 0
        kept: Tensor | int = last.num + 1 if is_captured or last.tree.num_nodes > 1 else 1
        if is_captured or None in rows.rows:  # those that have ended keep nothing more
            kept = kept * rows.is_open
        self._cache.keep(last.path, kept, last.tree.is_chain or not self.plan.kinds)

    def _penalised(self, rows: Batch, tree: DraftTree, scores: Scores) -> Scores:
        """With less for what came before; the root is the last token that did."""
        if (seen := rows.seen) is None:
            return scores
        return replace(scores, logits=self.target.penalise(scores.logits, seen, tree))

    def _accept(self, rows: Batch, tree: DraftTree, scores: Scores, depth: int) -> Pass:
        """What the target says after each node, and which path is committed."""
        method, logits, first = self.method, scores.logits, self.target.vocabulary.first
        tokens = predict(method, tree, logits, first, rows.keys, rows.count)
        assert scores.answers is not None
        if tree.num_nodes == 1:
            own = tokens
            if not self.plan.kinds and method.temperature > 0.0:
                own = first_maximum(logits) + first
            root = rows.root_path, rows.none_kept
            done = Pass(tree, own, *root, tokens[:, 0], tokens, own, scores.answers)
        else:
            steps = max(1, min(tree.num_nodes, depth + 1, rows.positions))
            if self._judges_on_host and (tree.odds is None or method.temperature == 0.0):
                stop, room = rows.stop if rows.has_text else None, rows.limit - 1 - rows.count
                done = judge_on_host(tree, tokens, scores.answers, room, stop, steps)
            else:
                done = judge(method, self._scored(rows, tree, scores, tokens), rows.keys, steps)
        if self._keeps_hidden:
            done = replace(done, hidden=take_rows(scores.hidden, done.path))
        if self._keeps_logits:
            bins = self.target.action_tokens.within(self.target.vocabulary)
            done = replace(done, logits=logits[:, :, bins])
        return done

    def _scored(
        self, rows: Batch, tree: DraftTree, scores: Scores, predictions: Tensor
    ) -> ScoredTree:
        """The tree with everything that a rule may read."""
        has_text = rows.has_text
        return ScoredTree(
            tree=tree,
            scores=scores,
            predictions=predictions,
            num_committed=rows.count,
            spent=rows.spent(),
            vocabulary=self.target.vocabulary,
            action_tokens=self.target.action_tokens,
            context=rows.context(),
            num_tokens=self.target.num_tokens,
            limit=rows.limit,
            begin=rows.begin if has_text else None,
            stop=rows.stop if has_text else None,
            written=rows.written() if self.method.rule.reads_numbers else (),
        )

    def _commit(self, rows: Batch, done: Pass, logits: Tensor) -> Played:
        """Write down what a pass has decided: for the next round, and for the host."""
        played = done.for_host(), *done.size  # a copy, before its root is overwritten
        rows.commit(done, is_plain=not self.round_drafts)
        rows.sums.add_(logits.sum(dim=(1, 2)))
        if rows.seen is not None:
            rows.note_seen(done)
        wants_margins = any(row is not None and row.wants_margins for row in rows.rows)
        wants_log_probs = any(row is not None and row.wants_log_probs for row in rows.rows)
        is_known = not self.plan.kinds and self.method.temperature == 0.0
        if is_known and not wants_margins and not wants_log_probs:
            return played
        places = _places_of(rows, done)
        rows.tokens.scatter_(1, places, done.tokens)
        rows.target_tokens.scatter_(1, places, done.target_tokens)
        if wants_margins:
            found = take_rows(logits, done.path)
            rows.margins.scatter_(1, places, top_gap(found, first_maximum(found)))
        if wants_log_probs:
            rows.log_probs.scatter_(1, places, self._log_probs(done, logits))
        if rows.has_text and not self.method.rule.is_exact:
            self._note_text(rows, done)
        rows.count.add_(done.num + 1)
        if rows.num_rows > 1 or self.batch.longest:  # some may have ended before
            torch.minimum(rows.count, rows.limit, out=rows.count)
        return played

    def _log_probs(self, done: Pass, logits: Tensor) -> Tensor:
        """Of the tokens after each node of the path, under the target: [row, step]."""
        found = take_rows(logits, done.path) / (self.method.temperature or 1.0)
        # Steps beyond what was kept hold anything.
        columns = (done.tokens - self.target.vocabulary.first).clamp(0, found.shape[2] - 1)
        return found.log_softmax(dim=2).gather(2, columns[:, :, None]).squeeze(2)

    def _note_text(self, rows: Batch, done: Pass) -> None:
        """Where the action begins that the next token may belong to: behind the last text."""
        steps = torch.arange(1, done.tokens.shape[1] + 1, device=rows.device)
        is_text = ~self.target.action_tokens.contains(done.tokens)
        last = (steps * (is_text & (steps <= done.num[:, None] + 1))).amax(dim=1)
        is_moved = (last > 0) & (rows.begin >= 0)
        rows.begin.copy_(torch.where(is_moved, rows.count + last, rows.begin))

    # What surrounds a pass: who takes part, what the host reads, captured rounds.

    @property
    def _cache(self) -> KVCache:
        assert self.batch.cache is not None
        return self.batch.cache

    def join(self, rows: list[Row], prompts: Prompts) -> None:
        """Let answers begin together with the next step; whoever leaves `rows` until then does not.

        There must be room for them.
        """
        self.batch.join(rows)
        self._joining.append((rows, prompts))

    def step(self, clock: StageClock) -> list[Row]:
        """Play a pass of the rows on their way, and the first of those that joined; the ended."""
        clock.take_laps()  # what came before, as seeing, is no pass
        rows = self.batch.running
        begun = [row for row in rows if row.records]
        if begun:
            self._next_pass(begun, clock)
        while self._joining:
            self._prefill_together(*self._joining[0], clock)
            self._joining.pop(0)
        return [row for row in rows if row.is_done]

    def _next_pass(self, rows: list[Row], clock: StageClock) -> None:
        here, depth = self._in_use(rows), max(row.limit - 1 - row.count for row in rows)
        drafts, tree = able(self.round_drafts, rows), None
        if drafts and not all(one.capturable for one in drafts):
            here.last = here.last_pass()
            tree = self._draft(here, drafts, depth, here.last.bonus)
            clock.lap(Stage.DRAFT)
        played = self._replay(here, drafts, depth, tree) if self.batch.longest else None
        if played is not None:
            clock.lap(Stage.VERIFY)
        else:
            played = self.play(here, drafts, depth, self._lap(clock, Stage.VERIFY), tree)
        self._note(rows, played, 0, False, clock)

    def _in_use(self, rows: list[Row]) -> Batch:
        """The batch up to its last row that has begun."""
        size = 1 + max(row.slot for row in rows)
        if self.batch.longest:
            size = 1 << (size - 1).bit_length()
        here = self.batch.at(0, size)
        here.rows = [row if row is not None and row.records else None for row in here.rows]
        return here

    def _prefill_together(self, group: list[Row], prompts: Prompts, clock: StageClock) -> None:
        """The first pass of rows that begin together, as many as lie side by side at once."""
        for first, stop in runs_of([row.slot for row in group]):
            rows = [row for row in group if first <= row.slot < stop]
            chosen = [row.prompt for row in rows]
            size = 1 << (len(rows) - 1).bit_length()
            if self.batch.longest and first == 0 and not any(self.batch.rows[stop:size]):
                chosen += chosen[:1] * (size - len(rows))  # captured prefills have such sizes
            self.prefill(rows, first, prompts.take(chosen), clock)

    def _take_in(self, rows: list[Row], first: int, prompts: Prompts) -> Batch:
        """The slots of rows that begin; prompts beyond them are copies of the first one's."""
        method, size = self.method, len(prompts.lengths)
        part = self.batch.at(first, first + size)
        every = [*rows, *rows[:1] * (size - len(rows))]
        keys = None
        if method.temperature > 0.0:
            draws = [row.memory.draw for row in every]
            keys = noise_keys(method.seed, draws, self.target.device)
        part.fill(every, keys, bool(self.plan.kinds), self._reads_past)
        part.is_open[len(rows) :] = False
        return part

    def _begin(self, part: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Let sources look at the prompts: those that read hidden states after the pass."""
        for one in self.sources.values():
            if (HIDDEN in one.needs) == (hidden is not None):
                one.begin(part, prompts, hidden)

    def _lap(self, clock: StageClock, whole: Stage) -> BookTime:
        """What books time. Without drafts a pass is a `whole` stage, and ends judged."""
        if self.plan.kinds:
            return clock.lap
        return lambda stage: clock.lap(whole) if stage is Stage.JUDGE else None

    def _note(
        self, rows: list[Row], played: Played, first: int, is_prefill: bool, clock: StageClock
    ) -> None:
        """Remember a pass. Read it now, unless all that the host needs is known without."""
        record = PassRecord(*played, first, is_prefill, clock.take_laps())
        for row in rows:
            row.records.append(record)
            row.count += 1  # it has committed one token at least
        self._unread.append((rows, record))
        is_known = record.num_nodes == 1 and all(
            row.spec.is_action and row.count < row.limit for row in rows
        )
        if not is_known:
            self._read()

    def _read(self) -> None:
        """Read the passes that are not yet read: the one read of a round."""
        unread, self._unread = self._unread, []
        sums, answers = self.batch.sums, self.batch.answers
        parts = [(sums - sums == 0).long()[:, None], answers[:, None]]
        parts += [record.numbers[:, : record.num_read(self._reads_nodes)] for _, record in unread]
        is_finite, in_slots, *found = read_lists(parts)
        for (rows, record), numbers in zip(unread, found, strict=True):
            for row in rows:
                mine = record.split(numbers[row.slot - record.first])
                row.read(mine, is_finite[row.slot] == [1], in_slots[row.slot][0])

    def plays(self, method: Method, plan: Plan) -> bool:
        """Whether it plays this method by this plan."""
        return self.plan == plan and self.method == method

    def let_go(self, row: Row) -> None:
        """Close the slot of a row that has ended, or that nobody waits for any more."""
        self.batch.let_go(row)
        self._unread = [([r for r in rows if r is not row], one) for rows, one in self._unread]

    def _replay(
        self, rows: Batch, drafts: Sequence[DraftSource], depth: int, tree: DraftTree | None
    ) -> Played | None:
        """The same as one launch; None if that is not captured.

        A captured round either drafts inside the graph or takes a finished tree.
        """
        shape, given = self.plan.shape, Tensors()
        is_watched = any(row and (row.wants_margins or row.wants_log_probs) for row in rows.rows)
        if is_watched or (tree is not None and tree.odds is not None):
            return None
        if tree is None:  # deeper trees are of no use to any draft that is captured
            depth = min(depth, max(shape.levels, self.batch.places)) if drafts else 0
        else:
            drafts, depth = (), self.batch.positions
            given = tree.padded(bucket(tree.num_nodes)).columns
        key = (rows.num_rows, *map(id, drafts), depth, *(one.shape for one in given[:1]))
        if not self._is_capturing and key not in self._captured:
            return None

        def step(*columns: Tensor) -> Tensors:
            finished = DraftTree(*columns) if columns else None
            numbers, num_nodes, num_steps = self.play(rows, drafts, depth, tree=finished)
            self._captured[key] = num_nodes, num_steps
            return (numbers,)

        (found,) = self.target.runner.run((self, key), step, given)
        # The next round overwrites it, and a trace is put into words much later.
        return found.clone(), *self._captured[key]

    def capture(self, rows: list[Row], prompts: Prompts) -> None:
        """Capture every round that answers like these may need; they are not decoded to their end.

        Whatever the rounds do to the rows, they keep nothing in the cache and end nowhere.
        """
        batch, shape = self.batch, self.plan.shape
        is_able = isinstance(self.method.rule, Hashable) and find_wait(self.method.rule) is None
        self._is_capturing = is_able and shape.num_open <= MOST_GROWN
        batch.join(rows)
        self._prefill_together(rows, prompts, StageClock(self.target.device))
        here, drafts = self._in_use(rows), able(self.round_drafts, rows)
        here.is_open.fill_(False)
        if all(one.capturable for one in drafts):
            most = max(shape.levels, batch.places) if drafts else 0
            for depth in range(min(most + 1, max(row.limit for row in rows))):
                torch.sub(here.limit, 1 + depth, out=here.count)  # as far as leaves such a depth
                self._replay(here, drafts, depth, None)
        else:
            for width in WIDTHS[: WIDTHS.index(bucket(self.batch.widest)) + 1]:
                self._replay(here, drafts, 0, DraftTree.root_only(here.count).padded(width))
        batch.rows[:] = [None] * batch.capacity
        self._unread, self._is_capturing = [], False


def able(drafts: Sequence[DraftSource], rows: Sequence[Row]) -> tuple[DraftSource, ...]:
    """Those that have something to say, given what the sessions remember."""
    if not drafts:
        return ()
    longest = max(len(row.memory.own) for row in rows)
    return tuple(one for one in drafts if longest >= one.least_steps)


def _places_of(rows: Batch, done: Pass) -> Tensor:
    """Where the tokens of a pass belong, [row, step]; the spare column for what is none."""
    steps = done.path.shape[1]
    if steps == 1:
        return rows.count[:, None].clamp(max=rows.positions)
    numbers = torch.arange(steps, device=rows.device)
    places = rows.count[:, None] + numbers
    places = places.masked_fill_(numbers > done.num[:, None], rows.positions)
    return places.clamp_(max=rows.positions)
