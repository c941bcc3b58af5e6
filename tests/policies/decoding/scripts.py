"""Draft sources that say what a test tells them to, and short ways to decode for sessions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deft_client.types import DecodeTrace
from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.batch import AnswerSpec, Batch, Pass, Row
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.drafts import (
    LOGITS,
    MEMORY,
    Chains,
    DraftLimits,
    DraftSource,
    remaining_tokens,
)
from deft_policies.decoding.engine import DraftModels, Engine
from deft_policies.decoding.kinds import source_number
from deft_policies.decoding.methods import PRESETS, Method, find_method
from deft_policies.decoding.plan import TreeShape
from deft_policies.decoding.steps import Maker
from deft_policies.decoding.target import Prompts, Scores, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.memory import SessionMemory
from deft_policies.model.graphs import StepRunner
from deft_policies.model.sizes import TokenRange
from tests.tiny_target import CPU, LENGTH

# For action tokens: `numbers` judges texts, on the host.
METHODS = tuple(find_method(name) for name in PRESETS if name != "numbers")
# (row, position, tokens committed so far) -> candidate tokens for that position
Guess = Callable[[int, int, tuple[int, ...]], Sequence[int]]


@dataclass
class ScriptedDrafts(DraftSource):
    """A source whose nodes branch as `guess` says, padded to the widest row with false nodes."""

    guess: Guess
    max_nodes: int = 24
    max_depth: int | None = None  # else as deep as is of use
    kind: str = kinds.HEAD
    needs: frozenset[str] = frozenset({LOGITS})
    capturable: bool = False
    depths_asked: list[int] = field(default_factory=list)

    def draft(self, batch: Batch, limits: DraftLimits) -> DraftTree:
        self.depths_asked.append(limits.depth)
        grown = [self._row(batch, limits, row) for row in range(len(limits.roots))]
        widest = max(len(tokens) for tokens, _ in grown)
        padding = [widest - len(tokens) for tokens, _ in grown]
        tokens = [one + [one[0]] * pad for (one, _), pad in zip(grown, padding, strict=True)]
        parents = [one + [0] * pad for (_, one), pad in zip(grown, padding, strict=True)]
        real = [[True] * (widest - pad) + [False] * pad for pad in padding]
        sources = torch.full((len(tokens), widest), source_number(self.kind))
        sources[:, 0] = -1
        return DraftTree(
            tokens=torch.tensor(tokens),
            parents=torch.tensor(parents),
            is_real=torch.tensor(real),
            log_probs=torch.zeros(len(tokens), widest),
            sources=sources,
        )

    def _row(self, batch: Batch, limits: DraftLimits, row: int) -> tuple[list[int], list[int]]:
        committed = tuple(batch.tokens[row, : int(batch.count[row])].tolist())
        tokens, parents = [int(limits.roots[row])], [-1]
        paths: list[tuple[int, ...]] = [()]
        node = 0
        while node < len(tokens) and len(tokens) < self.max_nodes:
            depth = len(paths[node])
            if depth < (limits.depth if self.max_depth is None else self.max_depth):
                position = len(committed) + depth
                for token in self.guess(row, position, committed + paths[node]):
                    if len(tokens) < self.max_nodes:
                        tokens.append(int(token))
                        parents.append(node)
                        paths.append((*paths[node], int(token)))
            node += 1
        return tokens, parents


@dataclass(frozen=True)
class ScriptedModels(DraftModels):
    """Sources that a test has made, in the place of those of their kind."""

    scripted: tuple[DraftSource, ...] = ()

    def makers(self, target: Target) -> dict[str, Maker]:
        def maker(one: DraftSource) -> Maker:
            return lambda method: one

        return super().makers(target) | {one.kind: maker(one) for one in self.scripted}


@dataclass
class Counters:
    """The place of a row's last root, where nothing is cached: see `KVCache`."""

    length: Tensor = field(default_factory=lambda: torch.zeros(64, dtype=torch.int64))
    roots: Tensor = field(default_factory=lambda: torch.zeros(64, dtype=torch.int64))

    def reserve(self, rows: int, length: int) -> None:
        assert rows <= len(self.length)

    def keep(self, path: Tensor, kept: Tensor | int, in_place: bool, first: int = 0) -> None:
        here = slice(first, first + len(path))
        self.length[here] = self.roots[here] + kept


class AnswerTarget:
    """A target that wants one given action per row, whatever was said before."""

    action_tokens = TokenRange(0, 99)
    vocabulary = TokenRange(0, 99)
    num_tokens = 100
    device = CPU
    reads_lengths = True
    runner = StepRunner()

    def __init__(self) -> None:
        self.wanted: list[Sequence[int]] = []

    def new_cache(self) -> Counters:
        return Counters()

    def prefill(
        self, rows: Counters, first: int, prompts: Prompts, tree: DraftTree
    ) -> tuple[Scores, Tensor]:
        here = slice(first, first + len(prompts.lengths))
        rows.length[here] = rows.roots[here] = 0
        return self._answer(tree, rows.length[here]), prompts.embeds

    def score(self, rows: Counters, tree: DraftTree) -> Scores:
        num_rows = len(tree.tokens)
        rows.roots[:num_rows] = rows.length[:num_rows]
        return self._answer(tree, rows.length[:num_rows])

    def _answer(self, tree: DraftTree, committed: Tensor) -> Scores:
        places = (committed[:, None] + tree.depths()).clamp(max=LENGTH - 1)
        wanted = torch.tensor([list(row) for row in self.wanted]).gather(1, places)
        logits = torch.nn.functional.one_hot(wanted, 100).float()
        return Scores(logits, torch.zeros(*places.shape, 1), tree.answers)


class RepeatExecuted(DraftSource):
    """Guesses what was executed last: the mistake that froze a robot."""

    kind = kinds.PREVIOUS
    needs = frozenset({MEMORY})
    capturable = False
    least_steps = 1

    def __init__(self) -> None:
        self._rows: list[Row | None] = []
        self._executed: list[list[int]] = []

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Rows decoded by something else executed what the target wanted."""
        last = [row for row in self._rows if row is not None]
        rows = [row for row in batch.rows if row is not None]
        self._executed = [
            next((one.tokens for one in last if one.memory is row.memory), list(row.memory.own[-1]))
            for row in rows
            if row.memory.own
        ]
        self._rows = list(batch.rows)

    def draft(self, batch: Batch, limits: DraftLimits) -> Chains:
        tokens = torch.tensor(self._executed)[:, None]
        return remaining_tokens(batch, tokens, torch.ones_like(tokens, dtype=torch.bool), limits)


def blank_prompts(num_rows: int) -> Prompts:
    """For targets that do not read them."""
    lengths = torch.full((num_rows,), 3)
    last = torch.zeros(num_rows, dtype=torch.int64)
    return Prompts(torch.zeros(num_rows, 3, 1), lengths, last, slice(1, 2))


@dataclass
class Session:
    """Rows that act step after step, and what is remembered of each."""

    memories: list[SessionMemory]
    form: AnswerSpec

    @staticmethod
    def of(num_rows: int, space: ActionSpace | None = None) -> "Session":
        form = AnswerSpec.action(space or ActionSpace.in_bins(LENGTH))
        return Session([SessionMemory() for _ in range(num_rows)], form)


class Decoding:
    """A method over a target, with an engine of its own."""

    def __init__(
        self, target: object, method: Method, models: DraftModels | None = None, *scripted: object
    ) -> None:
        """`scripted` sources take the place of those of their kind; targets may be fakes."""
        models = models or DraftModels()
        given = {**vars(models), "scripted": scripted}
        self.engine = Engine(target, ScriptedModels(**given) if scripted else models)  # type: ignore[arg-type]
        self.method = method
        self.engine.plans(method)

    def decode(
        self,
        prompts: Prompts,
        session: Session,
        clock: StageClock | None = None,
        wants_margins: bool = False,
    ) -> list[DecodeTrace]:
        """One action of every row, in order."""
        rows = [Row(self.method, session.form, one, wants_margins) for one in session.memories]
        self.engine.decode(prompts, rows, clock or StageClock(CPU))
        session.memories = [row.memory for row in rows]
        return [row.trace for row in rows if row.trace is not None]


def batch_of(
    histories: Sequence[SessionMemory], committed: Sequence[Sequence[int]], length: int = LENGTH
) -> Batch:
    """A batch whose rows have come so far."""
    method = Method("test", None, ())  # type: ignore[arg-type]
    form = AnswerSpec.action(ActionSpace.in_bins(length))
    rows = [Row(method, form, one) for one in histories]
    return filled(rows, committed)


def filled(rows: Sequence[Row], committed: Sequence[Sequence[int]]) -> Batch:
    places = rows[0].spec.action_length
    batch = Batch(CPU, len(rows), rows[0].spec.max_tokens, places)
    for slot, row in enumerate(rows):
        row.limit = row.spec.max_tokens
        batch.rows[slot], row.slot = row, slot
    batch.fill(rows, None, drafts=True, reads_past=True)
    for slot, tokens in enumerate(committed):
        if tokens:
            number = rows[slot].number
            found = {"num_kept": [len(tokens) - 1], "answer": [number], "tokens": list(tokens)}
            found |= {"target_tokens": list(tokens), "drafted": [], "predictions": []}
            rows[slot].read(found, is_finite=True, in_slot=number)
        batch.tokens[slot, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int64)
        batch.count[slot] = len(tokens)
    return batch


def pass_of(
    tree: DraftTree,
    predictions: Tensor,
    num: Sequence[int],
    tokens: Tensor,
    hidden: Tensor | None = None,
) -> Pass:
    """A finished pass along its tree's first nodes; the bonus is among `tokens` [row, step]."""
    num_rows, steps = tokens.shape
    kept = torch.tensor(list(num))
    return Pass(
        tree=tree,
        predictions=predictions,
        path=torch.arange(steps).expand(num_rows, -1),
        num=kept,
        bonus=tokens.gather(1, kept[:, None]).squeeze(1),
        tokens=tokens,
        target_tokens=tokens,
        hidden=hidden,
        logits=None,
        answers=torch.arange(num_rows),
    )


def limits_of(
    batch: Batch, shape: TreeShape | None = None, roots: Tensor | None = None
) -> DraftLimits:
    """What is still of use, and nodes enough."""
    if roots is None:
        last = (batch.count - 1).clamp(min=0)[:, None]
        roots = batch.tokens.gather(1, last).squeeze(1)
    depth = int((batch.limit - 1 - batch.count).max())
    return DraftLimits(roots, shape or TreeShape(), depth, 64)


def clock() -> StageClock:
    return StageClock(CPU)


def tokens_of(traces: Sequence[DecodeTrace]) -> list[tuple[int, ...]]:
    return [trace.tokens for trace in traces]
