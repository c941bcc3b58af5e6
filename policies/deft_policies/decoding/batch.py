"""The rows that are decoded together, and all that changes from pass to pass.

`Row` is what the host knows of one answer. `Batch` holds the tensors of many: its memory is set
aside when it is made and never moves, so that a round can be captured by playing it once. `Pass` is
the part of it that one target pass leaves behind for the next.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deft_client.types import CountedPasses, DecodeTrace, PassTrace
from deft_policies.decoding.acceptance.numbers import WrittenNumbers, drift_of_steps
from deft_policies.decoding.acceptance.rule import (
    NO_CLASS,
    ActionContext,
    ActionSpace,
    space_tensors,
)
from deft_policies.decoding.clock import Lap, Stage, milliseconds
from deft_policies.decoding.guard import Choice, Guard
from deft_policies.decoding.kinds import source_kinds
from deft_policies.decoding.methods import Method
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import MixedAnswersError
from deft_policies.memory import STEPS_KEPT, SessionMemory
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.staging import to_device

NO_STOP = -1
NOBODY = -1  # in place of an answer's number
_NUMBERS = count()  # of answers
Name = Callable[[Sequence[int]], tuple[int, ...]]


@dataclass(frozen=True)
class AnswerSpec:
    """What an answer is: how many tokens at most, what ends it, where its actions are.

    With a `space` and no stop token an answer is one action, exactly `max_tokens` long. With a stop
    token it is text that may hold action tokens; those that follow each other are one action, and
    they alone are ever relaxed. Without a space nothing is. Text of rows of numbers has the space
    of a row, number by number.
    `ids` are what tokens are called outside, where the decoder knows none but those of answers.
    """

    max_tokens: int
    stop: int | None = None
    space: ActionSpace | None = None
    ids: tuple[int, ...] = ()

    @staticmethod
    def action(space: ActionSpace) -> "AnswerSpec":
        """One action, as OpenVLA answers."""
        return AnswerSpec(space.length, None, space)

    @property
    def action_length(self) -> int:
        """Tokens of one action, at least one."""
        return 1 if self.space is None else self.space.length

    def name(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Tokens as they are called outside."""
        return tuple(self.ids[one] for one in tokens) if self.ids else tuple(tokens)

    @property
    def numbers_in_row(self) -> int:
        """Numbers of an action that is written as text; 0 where none is."""
        return self.space.length if self.space and self.space.largest_number else 0

    @property
    def is_action(self) -> bool:
        """Whether the answer is an action from its first token to its last."""
        return self.stop is None and self.space is not None


@dataclass(eq=False)
class Row:
    """One answer on its way. What it is asked with comes first, the rest fills up."""

    method: Method
    spec: AnswerSpec
    memory: SessionMemory = field(default_factory=SessionMemory)
    wants_margins: bool = False
    wants_log_probs: bool = False
    executed_steps: int | None = None  # of the last answer; None: as many as before
    choice: Choice = Choice("", "")  # the plan
    guard: Guard | None = None  # who learns from it
    has_history: bool = False  # whether the session had anything to draft from
    limit: int = 0  # tokens that are decoded at most: a loop may look at some behind an action
    beside: list["Row"] = field(default_factory=list)  # the answers that begin with it
    prompt: int = 0  # its row in the prompts that they begin with
    slot: int = -1  # in its batch
    tokens: list[int] = field(default_factory=list)
    target_tokens: list[int] = field(default_factory=list)  # given what stands before each
    drafted: list[int] = field(default_factory=list)  # the last tree's tokens, the root first
    predictions: list[int] = field(default_factory=list)  # the target's token after each of them
    count: int = 0  # tokens that are known to be decoded, though perhaps not yet read
    num_kept: int = 0  # drafts that stood in the last pass
    is_done: bool = False
    is_finite: bool = True
    trace: DecodeTrace | None = None
    log_probs: tuple[float, ...] = ()  # of its tokens, where they are wanted
    records: list["PassRecord"] = field(default_factory=list)  # of its passes, the prefill's first
    number: int = field(default_factory=lambda: next(_NUMBERS))  # no two answers have the same

    @property
    def num_passes(self) -> int:
        """Target forwards so far, the prefill included."""
        return len(self.records)

    @property
    def knows_steps(self) -> bool:
        """Whether what the session remembers are actions like the one that is asked for."""
        own = self.memory.own
        return self.spec.is_action and bool(own) and len(own[-1]) == self.spec.max_tokens

    @property
    def knows_drift(self) -> bool:
        """Whether its drift is one of such actions."""
        return self.spec.space is not None and len(self.memory.drift) == self.spec.action_length

    @property
    def num_executed(self) -> int:
        """Steps of the last answer that the robot has executed."""
        known = self.executed_steps
        return self.memory.executed_steps if known is None else known

    @cached_property
    def drift(self) -> tuple[float, ...]:
        """Of numbers: of the session, and of the steps of its last answer that were executed."""
        assert self.spec.space is not None
        known = self.memory.drift if self.knows_drift else (0.0,) * self.spec.space.length
        if not self.memory.target_answer:
            return known
        last = (self.memory.answer, self.memory.target_answer)
        written = WrittenNumbers(*last, self.spec.space, known)
        return drift_of_steps(written, self.num_executed)

    def read(self, found: Mapping[str, list[int]], is_finite: bool, in_slot: int) -> None:
        """Take in what the host has read of a pass: see `PassRecord.split`.

        Raises `MixedAnswersError` if the pass or the slot was another answer's.
        """
        num_kept, answer = found["num_kept"][0], found["answer"][0]
        if not answer == in_slot == self.number:
            raise MixedAnswersError(
                f"a pass of answer {answer} was read from slot {self.slot} of answer {in_slot}, "
                f"where answer {self.number} was expected; nothing of this round is used"
            )
        self.num_kept = num_kept
        self.drafted, self.predictions = found["drafted"], found["predictions"]
        self.tokens += found["tokens"][: num_kept + 1]
        self.target_tokens += found["target_tokens"][: num_kept + 1]
        self.count = max(self.count, len(self.tokens))
        self.is_finite = self.is_finite and is_finite
        ended = self.spec.stop is not None and self.tokens[-1:] == [self.spec.stop]
        self.is_done = ended or not self.is_finite or self.count >= self.limit

    def finish(self, margins: Sequence[float]) -> None:
        """Make the trace, and the memory that the session goes on with."""
        kept = slice(self.spec.max_tokens)
        self.tokens, self.target_tokens = self.tokens[kept], self.target_tokens[kept]
        tokens, target_tokens = tuple(self.tokens), tuple(self.target_tokens)
        if self.spec.is_action:
            leak = self.method.rule.drift_leak
            self.memory = self.memory.after_action(tokens, target_tokens, leak)
        elif self.spec.numbers_in_row:
            known = target_tokens, self.drift, self.num_executed  # of the answer before this one
            self.memory = self.memory.after_text(tokens).after_numbers(*known)
        else:
            self.memory = self.memory.after_text(tokens)
        drafts = any(plan.kinds for plan in self.method.plans)
        self.trace = DecodeTrace(
            method=self.method.name,
            tokens=self.spec.name(tokens),
            predicted=self.spec.name(target_tokens),
            margins=tuple(margins),
            passes=LazyPassTraces(self.records, self.slot, self.spec.name),
            guard=self.choice.reason,
            rule=str(self.method.rule) if drafts else "",
            plan=self.choice.plan,
        )


@dataclass(frozen=True, eq=False)
class Pass:
    """What a target pass leaves behind for the next round."""

    tree: DraftTree
    predictions: Tensor  # [row, node], the target's token after each node
    path: Tensor  # [row, step] node indices, the root first
    num: Tensor  # [row], drafts kept of the path
    bonus: Tensor  # [row], the target's token after them: the next root
    tokens: Tensor  # [row, step], the token after each node of the path
    target_tokens: Tensor  # [row, step], what the target would have there
    # [row], whose it is. The number goes with the tokens from draft to commit, so that a wrong
    # index shows when the host reads it. It cannot show a neighbour's keys and values, a wrong
    # mask, or rows that a source or a rule mixes among themselves.
    answers: Tensor
    hidden: Tensor | None = None  # [row, step, width] at each node of the path, where a draft reads
    logits: Tensor | None = None  # [row, node, action token], where a draft reads them

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Every tensor that all methods have."""
        accepted = (self.predictions, self.path, self.num, self.bonus)
        return *self.tree.columns, *accepted, self.tokens, self.target_tokens, self.answers

    @property
    def size(self) -> tuple[int, int]:
        """Nodes and steps of every row."""
        return self.tree.num_nodes, self.path.shape[1]

    def for_host(self) -> Tensor:
        """All that the host may read, as `PassRecord.split` takes it apart: [row, number], a copy.

        What is committed comes first, then the tree.
        """
        tree = self.tree
        committed = (self.num[:, None], self.answers[:, None], self.tokens, self.target_tokens)
        nodes = (tree.tokens, self.predictions, tree.parents, tree.sources, tree.is_real)
        return torch.cat((*committed, *nodes, self.path, self.bonus[:, None]), dim=1)


@dataclass(eq=False)
class PassRecord:
    """A pass that the host remembers; it is put into words when somebody asks."""

    numbers: Tensor  # [row, number]: `Pass.for_host`
    num_nodes: int  # of its tree, padding among them
    num_steps: int
    first: int  # the slot of its first row
    is_prefill: bool
    laps: list[Lap]

    @cached_property
    def spent_ms(self) -> Mapping[Stage, float]:
        """Time by stage. May wait for the device when it is first asked for."""
        spent = dict.fromkeys(Stage, 0.0)
        for stage, *marks in self.laps:
            spent[stage] += milliseconds(*marks)
        return spent

    def ms(self, *stages: Stage) -> float:
        """Time spent in these stages."""
        return sum(self.spent_ms[one] for one in stages)

    def num_read(self, with_nodes: bool) -> int:
        """How many of a row's numbers the host reads at once: what is committed, and the nodes."""
        return 2 + 2 * self.num_steps + 2 * self.num_nodes * with_nodes

    def split(self, numbers: Sequence[int]) -> dict[str, list[int]]:
        """The numbers of one row as `Pass.for_host` lays them; those not read yet are missing."""
        node, step, rest = self.num_nodes, self.num_steps, iter(numbers)
        sizes = {"num_kept": 1, "answer": 1, "tokens": step, "target_tokens": step}
        sizes |= {"drafted": node, "predictions": node, "parents": node, "sources": node}
        sizes |= {"is_real": node, "path": step, "bonus": 1}
        return {name: list(islice(rest, size)) for name, size in sizes.items()}

    def describe(
        self, numbers: Sequence[int], spent_ms: Mapping[Stage, float], name: Name
    ) -> PassTrace:
        """The pass of a row with these `numbers`, without padding, and tokens by their `name`."""
        found = self.split(numbers)
        tokens, predictions, parents = found["drafted"], found["predictions"], found["parents"]
        sources, path = found["sources"], found["path"][1 : found["num_kept"][0] + 1]
        real = [node for node, is_one in enumerate(found["is_real"]) if is_one]
        number = {-1: -1, **{node: index for index, node in enumerate(real)}}
        names = (*source_kinds(), "")  # the root's source is -1: the last
        return PassTrace(
            is_prefill=self.is_prefill,
            tokens=name([tokens[node] for node in real]),
            parents=tuple(number[parents[node]] for node in real),
            sources=tuple(names[sources[node]] for node in real),
            predictions=name([predictions[node] for node in real]),
            path=tuple(number[node] for node in path),
            bonus=name(found["bonus"])[0],
            draft_ms=spent_ms[Stage.DRAFT],
            pass_ms=spent_ms[Stage.PREFILL] + spent_ms[Stage.VERIFY],
            judge_ms=spent_ms[Stage.JUDGE],
        )


class LazyPassTraces(CountedPasses):
    """Passes that are put into words when they are first looked at.

    All that the words need is read from the device here, so any thread may look and none waits.
    Equal to any sequence of the same passes.
    """

    def __init__(self, records: Sequence[PassRecord], slot: int, name: Name = tuple) -> None:
        """`name` makes of tokens what they are called outside."""
        rows = read_lists([one.numbers[slot - one.first, None] for one in records])
        self._passes = [
            (record, numbers, record.spent_ms)
            for record, [numbers] in zip(records, rows, strict=True)
        ]
        self._name = name
        self.accepted_lengths = tuple(numbers[0] for _, numbers, _ in self._passes)

    @cached_property
    def _described(self) -> tuple[PassTrace, ...]:
        return tuple(
            record.describe(numbers, spent_ms, self._name)
            for record, numbers, spent_ms in self._passes
        )

    def __len__(self) -> int:
        return len(self._passes)

    def __getitem__(self, index: Any) -> Any:
        return self._described[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._described == tuple(other)

    def __hash__(self) -> int:
        return hash(self._described)

    def __reduce__(self) -> tuple[type[tuple[PassTrace, ...]], tuple[tuple[PassTrace, ...]]]:
        return tuple, (self._described,)


class Batch:
    """Tensors of up to `capacity` answers, [row, ...] each, set aside at once and never moved.

    A row has one slot from its first pass to its last. When it has ended the slot stays where it
    is, closed, until another row takes it. `at` looks at some of the rows, as a batch; what is
    written there is written here.
    """

    def __init__(
        self,
        device: torch.device,
        num_rows: int,
        positions: int,
        places: int,
        nodes: int = 64,
        longest: int = 0,
    ) -> None:
        """Memory for answers of `positions` tokens, actions of `places` tokens, trees of `nodes`.

        `longest` says for prompts of how many positions rounds are captured; 0: none are.
        """
        self.device, self.capacity = device, num_rows
        self.positions, self.places, self.longest = positions, places, longest
        self.first, self.num_rows = 0, num_rows  # those that this batch looks at
        self.rows: list[Row | None] = [None] * num_rows  # by slot; None where none is on its way
        self.widest, self.num_slots = nodes, 0  # nodes of a tree; positions of a row in the cache
        self.cache: KVCache | None = None
        whole, real = torch.int64, torch.float32
        with torch.inference_mode(False):

            def blank(*shape: int, dtype: torch.dtype = whole, value: float = 0) -> Tensor:
                return torch.full((num_rows, *shape), value, dtype=dtype, device=device)

            # One column more than an answer has: what overshoots is written there, never read.
            self.tokens = blank(positions + 1)
            self.target_tokens = blank(positions + 1)  # given what stands before each
            self.margins = blank(positions + 1, dtype=real)  # gap of the two largest logits
            self.log_probs = blank(positions + 1, dtype=real)  # of the tokens, where wanted
            self.count = blank()  # committed tokens
            self.limit = blank()  # and how many there may be; 0 where no answer is on its way
            self.stop = blank(value=NO_STOP)
            self.answers = blank(value=NOBODY)  # whose slot it is: `Row.number`
            self.is_open = blank(dtype=torch.bool)
            self.begin = blank()  # where an action behind text begins; -1: all is one action
            self.sums = blank(dtype=real)  # of all logits: not finite where one of them was not
            self.keys = blank()  # of noise
            self.groups = blank(places)
            self.unit_per_bin = blank(places, dtype=real)
            self.class_boundary = blank(places, value=NO_CLASS)
            self.drift = blank(places, dtype=real)  # executed minus own over past steps, in bins
            self.num_steps = blank()  # since the episode began
            self.past = blank(STEPS_KEPT, places)  # own tokens of past actions, the newest last
            self.num_past = blank()
            self.root_path = blank(1)  # the path that is only a root
            self.none_kept = blank()  # and what is kept of it
            self.no_parent = blank(1, value=-1)  # its parent and its source
            self.root_is_real = blank(1, dtype=torch.bool, value=True)
            self.root_log_prob = blank(1, dtype=real)
            # The last pass of every row: the widest there may be. Beyond its own no node is real.
            steps = min(nodes, positions)
            tree = DraftTree.root_only(blank()).padded(nodes)
            accepted = blank(nodes), blank(steps), blank(), blank()
            whose = blank(value=NOBODY)
            self._last = Pass(tree, *accepted, blank(steps), blank(steps), whose)
        # Of the last passes in use; a captured round cannot know it, and reads all there is.
        self._width, self._is_chain = (nodes, steps), False
        self._extra: dict[str, Tensor] = {}  # of all rows, what only some methods need
        self._parts: dict[tuple[int, int], Batch] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._all = {name: one for name, one in vars(self).items() if isinstance(one, Tensor)}
        self._whole: Batch | None = None  # what this is a part of
        self.last: Pass | None = None  # of these rows; None before the first

    @property
    def whole(self) -> "Batch":
        """What this is a part of, or itself."""
        return self._whole or self

    def free(self) -> None:
        """Give the memory back now: a batch and its parts know each other."""
        self._parts.clear()
        self.cache = None

    @property
    def running(self) -> list[Row]:
        """The answers that are on their way, in all of the batch."""
        return [row for row in self.whole.rows if row is not None]

    @property
    def has_text(self) -> bool:
        """Whether any answer is more than an action."""
        return any(row is not None and not row.spec.is_action for row in self.rows)

    @property
    def own(self) -> Tensor:
        """`target_tokens`, by the name that it had for plugins written for f28efa1."""
        return self.target_tokens

    @property
    def slots(self) -> slice:
        """Those of all rows that this batch looks at."""
        return slice(self.first, self.first + self.num_rows)

    def at(self, first: int, stop: int) -> "Batch":
        """The rows from `first` to `stop`, as a batch: the same one each time."""
        part = self._parts.get((first, stop))
        if part is None:
            part = self._parts[first, stop] = copy(self)
            part.first, part.num_rows, part._views = first, stop - first, {}
            part._whole = self.whole
            for name, tensor in self._all.items():
                setattr(part, name, tensor[first:stop])
        part.rows, part.last = self.rows[first:stop], None
        return part

    def root_tree(self, roots: Tensor) -> DraftTree:
        """A tree without guesses; what never changes of it is not made again."""
        rest = (self.no_parent, self.root_is_real, self.root_log_prob, self.no_parent)
        return DraftTree(roots[:, None], *rest, is_chain=True)

    def last_pass(self) -> Pass:
        """What the last pass of these rows left behind."""
        whole = self.whole
        nodes, steps = whole._width
        columns = self._last_columns(nodes, steps)
        tree = DraftTree(*columns[:5], is_chain=whole._is_chain)
        extra: dict[str, Any] = {
            "hidden": self._kept("hidden", steps),
            "logits": self._kept("logits", nodes),
        }
        return Pass(tree, *columns[5:], **extra)

    def commit(self, done: Pass, is_plain: bool = False) -> None:
        """Let this be the last pass of these rows; if it `is_plain`, no draft source reads it."""
        whole, last = self.whole, self.whole._last
        if is_plain and whole._width == done.size == (1, 1):  # then the rest stays as it is
            *_, bonus, _, _, answers = self._last_columns(1, 1)
            torch._foreach_copy_((bonus, answers), (done.bonus, done.answers))
            return
        nodes, steps = done.tree.num_nodes, done.path.shape[1]
        # One after the other: the root's token may be the bonus that is written later.
        torch._foreach_copy_(self._last_columns(nodes, steps), done.columns)
        last.tree.is_real[self.slots, nodes:] = False
        if done.hidden is not None:
            self.keep("hidden", done.hidden, last.path.shape[1])
        if done.logits is not None:
            self.keep("logits", done.logits, last.predictions.shape[1])
        if whole.longest:
            return
        if any(row.records and row not in self.rows for row in self.running):
            before = whole._width
            whole._width = max(before[0], nodes), max(before[1], steps)
            whole._is_chain &= done.tree.is_chain
        else:
            if steps < whole._width[1]:  # empty slots kept more of an older and wider pass
                last.num[: self.first] = 0
                last.num[self.first + self.num_rows :] = 0
            whole._width, whole._is_chain = (nodes, steps), done.tree.is_chain

    def _last_columns(self, nodes: int, steps: int) -> list[Tensor]:
        """The memory of a pass of such a width."""
        if (nodes, steps) not in self._views:
            here, last = self.slots, self.whole._last
            self._views[nodes, steps] = [
                *(one[here, :nodes] for one in (*last.tree.columns, last.predictions)),
                *(last.path[here, :steps], last.num[here], last.bonus[here]),
                *(last.tokens[here, :steps], last.target_tokens[here, :steps], last.answers[here]),
            ]
        return self._views[nodes, steps]

    def _kept(self, name: str, size: int | None = None) -> Tensor | None:
        """What was kept of these rows, of each the first `size`; None where it is not."""
        return self._extra[name][self.slots, :size] if name in self._extra else None

    def keep(self, name: str, values: Tensor, size: int) -> None:
        """Write [row, number up to `size`, ...], which only some methods need."""
        shape = (self.capacity, size, *values.shape[2:])
        if name not in self._extra or self._extra[name].shape != shape:
            with torch.inference_mode(False):
                self._extra[name] = values.new_zeros(shape)
        self._extra[name][self.slots, : values.shape[1]] = values

    def join(self, rows: Sequence[Row]) -> None:
        """Give rows a slot each; there must be room."""
        free = [slot for slot, one in enumerate(self.rows) if one is None]
        for row, slot in zip(rows, free, strict=False):
            self.rows[slot], row.slot = row, slot

    def let_go(self, row: Row) -> None:
        """Close a slot: who goes on, or joins behind it, does so beside an empty place."""
        self.rows[row.slot] = None
        if row.records:
            assert self.cache is not None
            self.is_open[row.slot] = False
            self.limit[row.slot] = 0
            self.cache.length[row.slot] = 0

    def clear(self, slot: int) -> None:
        """Forget what a slot held that is not finite, for the next answer there."""
        assert self.cache is not None
        self.cache.clear(slice(slot, slot + 1))
        for kept in self._extra.values():
            kept[slot].zero_()

    def fill(
        self, rows: Sequence[Row], keys: Tensor | None, drafts: bool, reads_past: bool
    ) -> None:
        """Take in answers to begin with; the batch looks at exactly their rows."""
        numbers = [
            (
                row.limit,
                NO_STOP if row.spec.stop is None else row.spec.stop,
                -int(row.spec.is_action),
                row.memory.num_steps,
                len(row.memory.own) if row.knows_steps else 0,
                row.number,
            )
            for row in rows
        ]
        whole = to_device(numbers, self.device)
        kept = (self.limit, self.stop, self.begin, self.num_steps, self.num_past, self.answers)
        torch._foreach_copy_(kept, whole.unbind(1))
        if keys is not None:
            self.keys.copy_(keys)
        torch._foreach_zero_((self.count, self.tokens, self.target_tokens))
        torch._foreach_zero_((self.sums, self.margins))
        self.is_open.fill_(True)
        if drafts:
            self._fill_spaces(rows)
        if reads_past:
            self._fill_past(rows)

    def _fill_spaces(self, rows: Sequence[Row]) -> None:
        """What rules measure with."""
        drift = [row.memory.drift if row.knows_drift else () for row in rows]
        reals = [(*one, *(0.0,) * (self.places - len(one))) for one in drift]
        self.drift.copy_(to_device(reals, self.device, torch.float32))
        spaces = [row.spec.space or ActionSpace.in_bins(1) for row in rows]
        fitted = tuple(one.with_more(self.places - one.length) for one in spaces)
        kept = (self.groups, self.unit_per_bin, self.class_boundary)
        for one, values in zip(kept, space_tensors(fitted, self.device), strict=True):
            one.copy_(values)

    def _fill_past(self, rows: Sequence[Row]) -> None:
        """What sources from memory read; steps that are no actions like these are left out."""
        blank = (0,) * self.places
        steps = []
        for row in rows:
            known = row.memory.own if row.knows_steps else ()
            missing = [blank] * (STEPS_KEPT - len(known))
            steps.append([*missing, *((*step, *blank[len(step) :]) for step in known)])
        self.past.copy_(to_device(steps, self.device))

    def context(self) -> ActionContext:
        """What rules may know beyond the tree."""
        space = (self.groups, self.unit_per_bin, self.class_boundary)
        return ActionContext(*space, self.drift, self.num_steps, self._kept("patches"))

    def written(self) -> list[WrittenNumbers | None]:
        """The answers of numbers so far, [row]; None where there is none."""
        return [
            WrittenNumbers(row.tokens, row.target_tokens, row.spec.space, row.drift)
            if row is not None and row.spec.space is not None
            else None
            for row in self.rows
        ]

    @property
    def seen(self) -> Tensor | None:
        """Which tokens these rows hold, prompts among them, [row, token]; None where not kept."""
        return self._kept("seen")

    def note_seen(self, done: Pass) -> None:
        """Add what a pass has committed."""
        seen, steps = self.seen, torch.arange(done.tokens.shape[1], device=self.device)
        assert seen is not None
        hot = functional.one_hot(done.tokens, seen.shape[1]) > 0
        seen |= (hot & (steps <= done.num[:, None])[:, :, None]).any(dim=1)

    def spent(self) -> Tensor:
        """How far the present action has been relaxed, executed minus target, [row, place]."""
        far = self.tokens - self.target_tokens
        if not self.has_text:
            return far[:, : self.places]
        places = self.begin.clamp(min=0)[:, None] + torch.arange(self.places, device=self.device)
        return far.gather(1, places.clamp(max=self.positions))


def read_lists(parts: Sequence[Tensor]) -> list[list[list[int]]]:
    """Tensors [row, number] as lists, in one read from the device."""
    flat = torch.cat([one.flatten() for one in parts]).tolist() if parts else []
    numbers: Iterator[int] = iter(flat)
    return [[list(islice(numbers, one.shape[1])) for _ in range(len(one))] for one in parts]


def runs_of(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Slots in order, as runs (first, stop) without gaps."""
    edges = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(slots)) if b != a + 1), len(slots)]
    return [(slots[a], slots[b - 1] + 1) for a, b in pairwise(edges) if slots]
