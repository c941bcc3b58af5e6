"""The steps of a batch: who takes part in the next pass, and what the host reads of the last.

`Round` plays the pass itself. The host reads from the device once a step, and not at all where
nothing is checked and the end is known. On a GPU steps are captured and replayed.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.host_waits import find_wait
from deft_policies.decoding.batch import Batch, PassRecord, Row, read_lists, runs_of
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.drafts import HIDDEN, LOGITS, MEMORY, PREDICTIONS, DraftSource
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import MOST_GROWN, Plan
from deft_policies.decoding.round import BookTime, Played, Round
from deft_policies.decoding.sampling import noise_keys
from deft_policies.decoding.target import WIDTHS, Prompts, Target, bucket
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.graphs import Tensors

_MOST_PREFILL_DRAFTS = 3
Maker = Callable[[Method], DraftSource]


class BatchSteps:
    """Steps through the passes of one batch by one method and plan."""

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
        self._drafts = [sources[kind] for kind in plan.rounds]
        # What reads the target's passes has nothing to say before the first of them.
        early = [sources[one] for one in plan.prefill if not sources[one].needs & {HIDDEN, LOGITS}]
        self._prefill_drafts = early[:_MOST_PREFILL_DRAFTS]
        needs = frozenset[str]().union(*(one.needs for one in self.sources.values()))
        self._reads_past, self._reads_nodes = MEMORY in needs, PREDICTIONS in needs
        self._round = Round(target, batch, method, plan, needs)
        self._captured: dict[Hashable, tuple[int, int]] = {}  # nodes and steps of these rounds
        self._is_capturing = False
        self._joining: list[tuple[list[Row], Prompts]] = []  # answers whose first pass is next
        self._unread: list[tuple[list[Row], PassRecord]] = []  # passes not yet read by the host

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
        drafts, tree = able(self._drafts, rows), None
        if drafts and not all(one.capturable for one in drafts):
            here.last = here.last_pass()
            tree = self._round.draft(here, drafts, depth, here.last.bonus)
            clock.lap(Stage.DRAFT)
        played = self._replay(here, drafts, depth, tree) if self.batch.longest else None
        if played is not None:
            clock.lap(Stage.VERIFY)
        else:
            played = self._round.play(here, drafts, depth, self._lap(clock, Stage.VERIFY), tree)
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
            self._prefill(rows, first, prompts.take(chosen), clock)

    def _prefill(self, rows: list[Row], first: int, prompts: Prompts, clock: StageClock) -> None:
        part, lap = self._take_in(rows, first, prompts), self._lap(clock, Stage.PREFILL)
        reads_prompt = self.method.rule.needs_patches or self._round.keeps_hidden
        prompts = replace(prompts, keep_hidden=reads_prompt)
        self._begin(part, prompts, None)
        drafts, depth = able(self._prefill_drafts, rows), max(row.limit for row in rows) - 1
        played, hidden = self._round.prefill(part, drafts, prompts, depth, lap)
        self._note(rows, played, first, True, clock)
        if not all(row.is_done for row in rows):
            self._begin(part, prompts, hidden)

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
        """Close the slot of a row that has ended, or that nobody waits for any more.

        Where its numbers are not finite, nothing of them stays: a masked NaN is still NaN.
        """
        self.batch.let_go(row)
        is_finite = row.is_finite
        if any(row in rows for rows, _ in self._unread):
            is_finite = math.isfinite(self.batch.sums[row.slot].item())
        if not is_finite:
            self.batch.clear(row.slot)
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
            numbers, num_nodes, num_steps = self._round.play(rows, drafts, depth, tree=finished)
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
        here, drafts = self._in_use(rows), able(self._drafts, rows)
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
