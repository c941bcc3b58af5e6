"""Draft sources that say what a test tells them to, and short ways to run a decoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deft_client.types import DecodeTrace
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.decoder import DecodeRow
from deft_policies.decoding.drafts.sources import Guesses, Seen, Sources
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.plan import DraftKind, TreeShape
from deft_policies.decoding.records import BatchProgress, StageClock
from deft_policies.decoding.target import PromptFeatures, Prompts, Scores
from deft_policies.decoding.tree import DraftTree, TokenRange
from tests.tiny_target import CPU, LENGTH

# (row, position, tokens committed so far) -> candidate tokens for that position
Guess = Callable[[int, int, tuple[int, ...]], Sequence[int]]


@dataclass
class ScriptedDrafts:
    """A grower whose nodes branch as `guess` says, padded to the widest row with false nodes."""

    guess: Guess
    max_nodes: int = 24
    max_depth: int | None = None  # else as deep as is of use
    kind: DraftKind = DraftKind.HEAD
    needs_hidden: bool = False
    steps_needed: int = 0
    depths_asked: list[int] = field(default_factory=list)

    def begin(self, seen: Seen, features: PromptFeatures) -> None:
        pass

    def warm_up(self, shape: TreeShape, length: int) -> None:
        pass

    def grow(self, progress: BatchProgress, shape: TreeShape) -> DraftTree:
        self.depths_asked.append(progress.depth)
        grown = [self._row(progress, row) for row in range(len(progress.roots))]
        widest = max(len(tokens) for tokens, _ in grown)
        padding = [widest - len(tokens) for tokens, _ in grown]
        tokens = [one + [one[0]] * pad for (one, _), pad in zip(grown, padding, strict=True)]
        parents = [one + [0] * pad for (_, one), pad in zip(grown, padding, strict=True)]
        real = [[True] * (widest - pad) + [False] * pad for pad in padding]
        sources = torch.full((len(tokens), widest), self.kind.number)
        sources[:, 0] = -1
        return DraftTree(
            tokens=torch.tensor(tokens),
            parents=torch.tensor(parents),
            is_real=torch.tensor(real),
            log_probs=torch.zeros(len(tokens), widest),
            sources=sources,
        )

    def _row(self, progress: BatchProgress, row: int) -> tuple[list[int], list[int]]:
        committed = tuple(progress.tokens[row, : int(progress.num_committed[row])].tolist())
        tokens, parents = [int(progress.roots[row])], [-1]
        paths: list[tuple[int, ...]] = [()]
        node = 0
        while node < len(tokens) and len(tokens) < self.max_nodes:
            depth = len(paths[node])
            if depth < (progress.depth if self.max_depth is None else self.max_depth):
                position = len(committed) + depth
                for token in self.guess(row, position, committed + paths[node]):
                    if len(tokens) < self.max_nodes:
                        tokens.append(int(token))
                        parents.append(node)
                        paths.append((*paths[node], int(token)))
            node += 1
        return tokens, parents


class AnswerTarget:
    """A target that wants one given action per row, whatever was said before."""

    action_tokens = TokenRange(0, 99)
    vocabulary = TokenRange(0, 99)
    widest_tree = 64
    num_tokens = 100

    def __init__(self) -> None:
        self.wanted: list[Sequence[int]] = []
        self._committed = torch.zeros(0, dtype=torch.int64)

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens[..., None].float()

    def logits(self, hidden: Tensor, tokens: TokenRange | None = None) -> Tensor:
        raise AssertionError("no draft head is asked here")

    def prefill(self, prompts: Prompts, tree: DraftTree) -> tuple[Scores, PromptFeatures]:
        self._committed = torch.zeros(len(self.wanted), dtype=torch.int64)
        features = PromptFeatures(prompts.embeds, prompts.embeds, prompts.lengths, prompts.patches)
        return self._answer(tree, self._committed), features

    def score(self, tree: DraftTree) -> Scores:
        return self._answer(tree, self._committed)

    def commit(self, path: Tensor, lengths: Tensor) -> None:
        self._committed = self._committed + lengths

    def _answer(self, tree: DraftTree, committed: Tensor) -> Scores:
        places = (committed[:, None] + tree.depths()).clamp(max=LENGTH - 1)
        wanted = torch.tensor([list(row) for row in self.wanted]).gather(1, places)
        logits = torch.nn.functional.one_hot(wanted, 100).float()
        return Scores(logits, torch.zeros(*places.shape, 1))


@dataclass(frozen=True)
class RepeatExecuted:
    """Guesses what was executed last: the mistake that froze a robot."""

    histories: Sequence[ActionHistory]
    kind: DraftKind = DraftKind.PREVIOUS
    steps_needed: int = 0
    guesses_once: bool = True

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        return bool(self.histories[0].executed)

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: BatchProgress) -> Guesses:
        tokens = torch.tensor([[list(one.executed[-1])] for one in self.histories])
        return Guesses(tokens, torch.ones_like(tokens, dtype=torch.bool))


def blank_prompts(num_rows: int) -> Prompts:
    """For targets that do not read them."""
    lengths = torch.full((num_rows,), 3)
    last = torch.zeros(num_rows, dtype=torch.int64)
    return Prompts(torch.zeros(num_rows, 3, 1), lengths, last, slice(1, 2))


def seen_of(prompts: Prompts, histories: Sequence[ActionHistory] = ()) -> Seen:
    """What growers are shown of a batch; of sessions that know nothing unless they are given."""
    known = histories or [ActionHistory() for _ in range(len(prompts.embeds))]
    return Seen(prompts, known, HistoryTensors.of(known, LENGTH, 16, CPU), 64)


@dataclass(frozen=True)
class Session:
    """Rows that act step after step."""

    rows: tuple[DecodeRow, ...]

    @staticmethod
    def of(num_rows: int, space: ActionSpace | None = None) -> "Session":
        chosen = space or ActionSpace.in_bins(LENGTH)
        return Session(tuple(DecodeRow(ActionHistory(), chosen) for _ in range(num_rows)))


def sources_of(*growers: ScriptedDrafts) -> Sources:
    return Sources((), tuple(growers))


def clock() -> StageClock:
    return StageClock(CPU)


def tokens_of(traces: Sequence[DecodeTrace]) -> list[tuple[int, ...]]:
    return [trace.tokens for trace in traces]
