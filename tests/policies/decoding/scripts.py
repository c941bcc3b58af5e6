"""Draft sources that say what a test tells them to, and short ways to run a decoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from deft_client.types import DecodeTrace
from deft_policies.decoding.action_space import ActionSpace
from deft_policies.decoding.drafting import Sources
from deft_policies.decoding.drafts.source import DraftKind, Progress, TreeShape
from deft_policies.decoding.history import ActionHistory
from deft_policies.decoding.methods import DecodeRow
from deft_policies.decoding.target import PromptFeatures, Prompts
from deft_policies.decoding.trace import StageClock
from deft_policies.decoding.tree import DraftTree
from tests.tiny_target import CPU, LENGTH

# (row, position, tokens committed so far) -> candidate tokens for that position
Guess = Callable[[int, int, tuple[int, ...]], Sequence[int]]


@dataclass
class ScriptedDrafts:
    """A grower whose nodes branch as `guess` says, padded to the widest row with false nodes."""

    guess: Guess
    max_nodes: int = 24
    max_depth: int = LENGTH
    kind: DraftKind = DraftKind.HEAD
    needs_hidden: bool = False
    depths_asked: list[int] = field(default_factory=list)

    def begin(self, prompts: Prompts, features: PromptFeatures) -> None:
        pass

    def grow(self, progress: Progress, shape: TreeShape) -> DraftTree:
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

    def _row(self, progress: Progress, row: int) -> tuple[list[int], list[int]]:
        committed = tuple(progress.tokens[row, : int(progress.num_committed[row])].tolist())
        tokens, parents = [int(progress.roots[row])], [-1]
        paths: list[tuple[int, ...]] = [()]
        node = 0
        while node < len(tokens) and len(tokens) < self.max_nodes:
            depth = len(paths[node])
            if depth < self.max_depth:
                position = len(committed) + depth
                for token in self.guess(row, position, committed + paths[node]):
                    if len(tokens) < self.max_nodes:
                        tokens.append(int(token))
                        parents.append(node)
                        paths.append((*paths[node], int(token)))
            node += 1
        return tokens, parents


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
