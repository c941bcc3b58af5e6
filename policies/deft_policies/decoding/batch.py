"""The rows that are decoded together, and everything that changes from round to round.

`Row` is what the host knows of one answer on its way; `Batch` holds the tensors of many, allocated
once and written in place, so that a round can be recorded by running it on them; `Pass` is what the
last target pass left behind for the next round.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from deft_client.types import DecodeTrace, PassTrace
from deft_policies.decoding.acceptance.rule import (
    NO_CLASS,
    ActionContext,
    ActionSpace,
    SpaceTensors,
)
from deft_policies.decoding.clock import Lap, Stage, sum_ms
from deft_policies.decoding.kinds import source_kinds
from deft_policies.decoding.methods import Method
from deft_policies.decoding.target import Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import MixedAnswersError
from deft_policies.memory import STEPS_KEPT, SessionMemory
from deft_policies.model.staging import to_device

NO_STOP = -1
NOBODY = -1  # in place of an answer's number
_NUMBERS = count()  # of answers


@dataclass(frozen=True)
class Form:
    """What an answer is: how many tokens at most, what ends it, where its actions are.

    With a `space` and no stop token an answer is one action, exactly `max_tokens` long. With a stop
    token it is text that may hold action tokens; those that follow each other are one action, and
    they alone are ever relaxed. Without a space nothing is.
    """

    max_tokens: int
    stop: int | None = None
    space: ActionSpace | None = None

    @staticmethod
    def action(space: ActionSpace) -> "Form":
        """One action, as OpenVLA answers."""
        return Form(space.length, None, space)

    @property
    def num_places(self) -> int:
        """Tokens of one action, at least one."""
        return 1 if self.space is None else self.space.length

    @property
    def is_action(self) -> bool:
        """Whether the answer is an action from its first token to its last."""
        return self.stop is None and self.space is not None


@dataclass(eq=False)
class Row:
    """One answer on its way. What it is asked with comes first, the rest fills up."""

    method: Method
    form: Form
    memory: SessionMemory = field(default_factory=SessionMemory)
    wants_margins: bool = False
    plan: str = ""
    reason: str = ""  # of the guard
    remembers: bool = False  # whether the session had anything to draft from
    limit: int = 0  # tokens that are decoded at most: a loop may look at some behind an action
    prompt: int = 0  # its row in the prompts that it began with
    slot: int = -1  # in its batch
    tokens: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)  # the target's, given what stands before
    drafted: list[int] = field(default_factory=list)  # the last tree's tokens, the root first
    predictions: list[int] = field(default_factory=list)  # the target's token after each of them
    count: int = 0  # tokens that are known to be decoded, though perhaps not yet read
    is_done: bool = False
    is_finite: bool = True
    trace: DecodeTrace | None = None
    records: list["Record"] = field(default_factory=list)  # of its passes, the prefill's first
    number: int = field(default_factory=lambda: next(_NUMBERS))  # no two answers have the same

    @property
    def num_passes(self) -> int:
        """Target forwards so far, the prefill included."""
        return len(self.records)

    @property
    def knows_steps(self) -> bool:
        """Whether what the session remembers are actions like the one that is asked for."""
        own = self.memory.own
        return self.form.is_action and bool(own) and len(own[-1]) == self.form.max_tokens

    @property
    def knows_drift(self) -> bool:
        """Whether its drift is one of such actions."""
        return self.form.space is not None and len(self.memory.drift) == self.form.num_places

    def note(self, record: "Record") -> None:
        """Remember a pass for the trace; it has committed one token at least."""
        self.records.append(record)
        self.count += 1

    def take(self, told: Sequence[list[int]], is_finite: bool, in_slot: int) -> None:
        """Take in what the host has read of a pass: the first of `Pass.told`.

        Raises `MixedAnswersError` if the pass or the slot was another answer's.
        """
        (num_kept,), (answer,), tokens, own, *nodes = told
        if not answer == in_slot == self.number:
            raise MixedAnswersError(
                f"a pass of answer {answer} was read from slot {self.slot} of answer {in_slot}, "
                f"where answer {self.number} was expected; nothing of this round is used"
            )
        self.tokens += tokens[: num_kept + 1]
        self.own += own[: num_kept + 1]
        if nodes:
            self.drafted, self.predictions = nodes
        self.count = max(self.count, len(self.tokens))
        self.is_finite = self.is_finite and is_finite
        ended = self.form.stop is not None and self.tokens[-1:] == [self.form.stop]
        self.is_done = ended or self.count >= self.limit

    def finish(self, rule: str, margins: Sequence[float]) -> None:
        """Tell what happened, and what is to be remembered."""
        told = slice(self.form.max_tokens)
        self.tokens, self.own = self.tokens[told], self.own[told]
        tokens, own = tuple(self.tokens), tuple(self.own)
        if self.form.is_action:
            self.memory = self.memory.after_action(tokens, own, self.method.rule.drift_leak)
        else:
            self.memory = self.memory.after_text(tokens)
        self.trace = DecodeTrace(
            method=self.method.name,
            tokens=tokens,
            predicted=own,
            margins=tuple(margins),
            passes=LaterPasses(self.records, self.slot),
            guard=self.reason,
            rule=rule,
            plan=self.plan,
        )


@dataclass(eq=False)
class Pass:
    """What a target pass leaves behind for the next round."""

    tree: DraftTree
    predictions: Tensor  # [row, node], the target's token after each node
    path: Tensor  # [row, step] node indices, the root first
    num: Tensor  # [row], drafts kept of the path
    bonus: Tensor  # [row], the target's token after them: the next root
    tokens: Tensor  # [row, step], the token after each node of the path
    own: Tensor  # [row, step], the target's own there
    hidden: Tensor | None  # [row, step, width] at each node of the path, where a draft reads it
    logits: Tensor | None  # [row, node, action token], where a draft reads them
    # [row], whose it is. The number goes with the tokens from draft to commit, so that a wrong
    # index shows when the host reads it. It cannot show a neighbour's keys and values, a wrong
    # mask, or rows that a source or a rule mixes among themselves.
    answers: Tensor

    @staticmethod
    def blank(target: Target, rows: int, nodes: int, steps: int) -> "Pass":
        """Memory for passes of so many rows, nodes and steps."""

        def whole(*sizes: int) -> Tensor:
            return torch.zeros(rows, *sizes, dtype=torch.int64, device=target.device)

        with torch.inference_mode(False):
            return Pass(
                tree=DraftTree.root_only(whole()).padded(nodes),
                predictions=whole(nodes),
                path=whole(steps),
                num=whole(),
                bonus=whole(),
                tokens=whole(steps),
                own=whole(steps),
                hidden=torch.zeros_like(target.embed(whole(steps))),
                logits=whole(nodes, len(target.action_tokens)).float(),
                answers=whole().fill_(NOBODY),
            )

    @property
    def num_nodes(self) -> int:
        """Nodes per row, the root included."""
        return self.tree.num_nodes

    @property
    def told(self) -> tuple[Tensor, ...]:
        """What the host reads, [row, number] each: what is committed, then by node, for a trace."""
        tree = self.tree
        nodes = (tree.tokens, self.predictions, tree.parents, tree.sources, tree.is_real)
        committed = (self.num[:, None], self.answers[:, None], self.tokens, self.own)
        return *committed, *nodes, self.path, self.bonus[:, None]

    def put(self, other: "Pass", first: int) -> None:
        """Write the rows of another here, from `first` on; it may have fewer nodes and steps."""
        here = slice(first, first + len(other.num))
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            if mine is not None and theirs is not None:
                (mine[here, : theirs.shape[1]] if mine.dim() > 1 else mine[here]).copy_(theirs)
        self.tree.is_real[here, other.num_nodes :] = False

    def of_rows(self, num_rows: int) -> "Pass":
        """That of the first rows; what was computed of its tree is forgotten."""
        values = [None if one is None else one[:num_rows] for one in self._tensors()]
        size = len(self.tree.columns)
        tree = DraftTree(*values[:size], is_chain=self.tree.is_chain)  # type: ignore[arg-type]
        return Pass(tree, *values[size:])  # type: ignore[arg-type]

    def _tensors(self) -> tuple[Tensor | None, ...]:
        rest = (value for name, value in vars(self).items() if name != "tree")
        return *self.tree.columns, *rest


@dataclass(eq=False)
class Record:
    """What is read of a pass: on the device, and put into words when somebody asks."""

    told: tuple[Tensor, ...]  # [row, number]: see `Pass`
    first: int  # the slot of its first row
    is_prefill: bool
    laps: list[Lap]

    @property
    def num_nodes(self) -> int:
        """Of its tree, padding among them."""
        return self.told[4].shape[1]

    def ms(self, *stages: Stage) -> float:
        """Time spent in these stages."""
        return sum_ms(self.laps, stages)

    def describe(self, slot: int) -> PassTrace:
        """One row's pass, without the nodes that were only padding."""
        row = slot - self.first
        found = [one[0] for one in read_lists([one[row : row + 1] for one in self.told])]
        (num_kept,), _, _, _, tokens, predictions, parents, sources, is_real, path, (bonus,) = found
        real = [node for node, is_one in enumerate(is_real) if is_one]
        number = {-1: -1, **{node: index for index, node in enumerate(real)}}
        names = (*source_kinds(), "")  # the root's source is -1: the last
        return PassTrace(
            is_prefill=self.is_prefill,
            tokens=tuple(tokens[node] for node in real),
            parents=tuple(number[parents[node]] for node in real),
            sources=tuple(names[sources[node]] for node in real),
            predictions=tuple(predictions[node] for node in real),
            path=tuple(number[node] for node in path[1 : num_kept + 1]),
            bonus=bonus,
            draft_ms=self.ms(Stage.DRAFT),
            pass_ms=self.ms(Stage.PREFILL, Stage.VERIFY),
            judge_ms=self.ms(Stage.JUDGE),
        )


class LaterPasses(Sequence[PassTrace]):
    """Passes that are put into words when they are first looked at; how many is known before.

    Equal to any sequence of the same passes. Any thread may ask.
    """

    def __init__(self, records: Sequence["Record"], slot: int) -> None:
        self._records, self._slot = records, slot

    @cached_property
    def _described(self) -> tuple[PassTrace, ...]:
        return tuple(one.describe(self._slot) for one in self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._described[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._described == tuple(other)

    def __hash__(self) -> int:
        return hash(self._described)

    def __reduce__(self) -> tuple[type[tuple[PassTrace, ...]], tuple[tuple[PassTrace, ...]]]:
        return tuple, (self._described,)


class Batch:
    """Tensors of up to `num_rows` answers, [row, ...] each; those of the first rows are in use.

    A row that has ended stays where it is, closed, until another takes its place. `at` looks at
    some of the rows; what is written there is written here.
    """

    def __init__(
        self, device: torch.device, num_rows: int, positions: int, places: int, longest: int = 0
    ) -> None:
        """Room for answers of `positions` tokens and actions of `places` tokens.

        `longest` says how many positions of prompts memory is to be set aside for at once, where
        steps are recorded; 0: room is made when rows begin.
        """
        self.device = device
        self.positions, self.places, self.longest = positions, places, longest
        self.first, self.num_rows = 0, num_rows  # those in use, closed ones among them
        self.last: Pass | None = None
        self.capacity = num_rows
        self.rows: list[Row | None] = [None] * num_rows  # by slot; None where none is on its way
        whole, real = torch.int64, torch.float32
        with torch.inference_mode(False):

            def blank(*shape: int, dtype: torch.dtype = whole, value: float = 0) -> Tensor:
                return torch.full((num_rows, *shape), value, dtype=dtype, device=device)

            # One column more than an answer has: what overshoots is written there, never read.
            self.tokens = blank(positions + 1)
            self.own = blank(positions + 1)  # the target's own, given what stands before
            self.margins = blank(positions + 1, dtype=real)  # gap of the two largest logits
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
            self.zeros = blank(1)  # the path that is only a root
            self.zero = blank()  # and what is kept of it
            self.none = blank(1, value=-1)  # its parent and its source
            self.is_real = blank(1, dtype=torch.bool, value=True)
            self.no_odds = blank(1, dtype=real)
        self.all_rows = self.rows  # also those that a part of the batch leaves out
        self.shared: dict[str, Tensor] = {}  # of all rows, what only some methods need
        self._parts: dict[tuple[int, int], Batch] = {}
        self._all = {name: one for name, one in vars(self).items() if isinstance(one, Tensor)}

    def root_tree(self, roots: Tensor) -> DraftTree:
        """A tree without guesses; what never changes of it is not made again."""
        tokens, none = roots[:, None], self.none
        return DraftTree(tokens, none, self.is_real, self.no_odds, none, is_chain=True)

    @property
    def has_text(self) -> bool:
        """Whether any answer is more than an action."""
        return any(row is not None and not row.form.is_action for row in self.rows)

    def at(self, first: int, stop: int) -> "Batch":
        """The rows from `first` to `stop`, as a batch: the same one each time."""
        part = self._parts.get((first, stop))
        if part is None:
            part = self._parts[first, stop] = copy(self)
            part.first, part.num_rows = first, stop - first
            for name, tensor in self._all.items():
                setattr(part, name, tensor[first:stop])
        part.rows = self.rows[first:stop]
        return part

    def fill(
        self, rows: Sequence[Row], keys: Tensor | None, drafts: bool, reads_past: bool
    ) -> None:
        """Take in answers to begin with; the batch looks at exactly their rows."""
        numbers = [
            (
                row.limit,
                NO_STOP if row.form.stop is None else row.form.stop,
                -int(row.form.is_action),
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
        torch._foreach_zero_((self.count, self.tokens, self.own))
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
        spaces = [row.form.space or ActionSpace.in_bins(1) for row in rows]
        fitted = tuple(one.with_more(self.places - one.length) for one in spaces)
        space = SpaceTensors.of(fitted, self.device)
        self.groups.copy_(space.groups)
        self.unit_per_bin.copy_(space.unit_per_bin)
        self.class_boundary.copy_(space.class_boundary)

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
        space = SpaceTensors(self.groups, self.unit_per_bin, self.class_boundary)
        return ActionContext(space, self.drift, self.num_steps, self.patches)

    def spent(self) -> Tensor:
        """How far the present action has been relaxed, executed minus own, [row, place]."""
        far = self.tokens - self.own
        if not self.has_text:
            return far[:, : self.places]
        places = self.begin.clamp(min=0)[:, None] + torch.arange(self.places, device=self.device)
        return far.gather(1, places.clamp(max=self.positions))

    def keep_patches(self, patches: Tensor) -> None:
        """Remember the hidden states of image patches [row, patch, width] for the rule."""
        whole = self.shared.get("patches")
        if whole is None or whole.shape[1:] != patches.shape[1:]:
            whole = self.shared["patches"] = patches.new_zeros(self.capacity, *patches.shape[1:])
        whole[self.first : self.first + len(patches)] = patches

    @property
    def patches(self) -> Tensor | None:
        """[row, patch, width], where the rule reads them."""
        whole = self.shared.get("patches")
        return None if whole is None else whole[self.first : self.first + self.num_rows]


def read_lists(parts: Sequence[Tensor]) -> list[list[list[int]]]:
    """Tensors [row, number] as lists, in one read from the device."""
    numbers: Iterator[int] = iter(torch.cat([one.flatten() for one in parts]).tolist())
    return [[list(islice(numbers, one.shape[1])) for _ in range(len(one))] for one in parts]


def runs_of(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Slots in order, as runs (first, stop) without gaps."""
    edges = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(slots)) if b != a + 1), len(slots)]
    return [(slots[a], slots[b - 1] + 1) for a, b in pairwise(edges)]
