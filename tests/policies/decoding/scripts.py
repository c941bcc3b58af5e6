"""Draft sources that say what a test tells them to, and short ways to decode for sessions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from deft_core.types import DecodeTrace
from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.drafts import Branches, DraftSource, Guesses
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import Method, find_method, presets
from deft_policies.decoding.planner import DraftModels, Maker
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import PassRow, Prompt, Scores, Target
from deft_policies.memory import SessionMemory
from deft_policies.model.graphs import StepRunner
from deft_policies.model.sizes import TokenRange
from tests.tiny_target import CPU, LENGTH, scores_of

# For action tokens: `numbers` judges texts, on the host.
METHODS = tuple(find_method(name) for name in presets() if name != "numbers")
# (row, position, tokens committed so far) -> candidate tokens for that position
Guess = Callable[[int, int, tuple[int, ...]], Sequence[int]]


@dataclass(eq=False)
class ScriptedDrafts(DraftSource):
    """A source whose nodes branch as `guess` says."""

    guess: Guess
    max_nodes: int = 24
    max_depth: int | None = None  # else as deep as is of use
    kind: str = kinds.HEAD
    early: bool = False
    depths_asked: list[int] = field(default_factory=list)

    def draft(self, sequence: Answer, depth: int) -> Guesses:
        """Rows are told apart by their slots."""
        self.depths_asked.append(depth)
        committed = tuple(sequence.tokens)
        tokens, parents = list[int](), list[int]()
        paths: list[tuple[int, ...]] = [()]
        node = 0
        while node < len(paths) and len(paths) < self.max_nodes:
            reach = depth if self.max_depth is None else self.max_depth
            if len(paths[node]) < reach:
                position = len(committed) + len(paths[node])
                for token in self.guess(sequence.slot, position, committed + paths[node]):
                    if len(paths) < self.max_nodes:
                        tokens.append(int(token))
                        parents.append(node)
                        paths.append((*paths[node], int(token)))
            node += 1
        return Branches(tokens, parents)


@dataclass(frozen=True)
class ScriptedModels(DraftModels):
    """Sources that a test has made, in the place of those of their kind."""

    scripted: tuple[DraftSource, ...] = ()

    def makers(self, target: Target) -> dict[str, Maker]:
        def maker(one: DraftSource) -> Maker:
            return lambda: one

        return super().makers(target) | {one.kind: maker(one) for one in self.scripted}


class NoCache:
    """Of a target that remembers nothing."""

    def keep(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Nothing is there to move."""

    def clear(self, slot: int) -> None:
        """Nothing is there to clear."""


class AnswerTarget:
    """A target that wants one given action per row, whatever was said before."""

    action_tokens = TokenRange(0, 99)
    num_tokens = 100
    device = CPU
    captured = None
    runner = StepRunner()

    def __init__(self) -> None:
        self.wanted: list[Sequence[int]] = []  # by slot

    def new_cache(self) -> NoCache:
        return NoCache()

    def set_aside(self, cache: NoCache, widest: int, num_tokens: int) -> None:
        """Nothing is captured."""

    def forward(self, cache: NoCache, rows: Sequence[PassRow]) -> Scores:
        wanted = []
        for row in rows:
            prompt = PROMPT_LENGTH - 1
            for depth in row.tree.depths():
                place = min(row.start - prompt + depth, LENGTH - 1)
                wanted.append(self.wanted[row.slot][place])
        logits = torch.nn.functional.one_hot(torch.tensor(wanted), 100).float()
        return scores_of(rows, torch.zeros(len(wanted), 1), logits)


class RepeatExecuted(DraftSource):
    """Guesses what was executed last: the mistake that froze a robot."""

    kind = kinds.PREVIOUS

    def __init__(self) -> None:
        self._last: dict[int, Answer] = {}  # by the identity of the memory that it ended with

    def begin(self, sequence: Answer) -> None:
        """Rows decoded by something else executed what the target wanted."""
        ended = next((one for one in self._last.values() if one.memory is sequence.memory), None)
        own = sequence.memory.own
        sequence.notes["executed"] = ended.tokens if ended else list(own[-1]) if own else []
        self._last[sequence.number] = sequence

    def draft(self, sequence: Answer, depth: int) -> Guesses:
        """What was executed, from the next token on."""
        executed: list[int] = sequence.notes["executed"]
        return [executed[sequence.count :][:depth]]


PROMPT_LENGTH = 3


def blank_prompts(num_rows: int) -> list[Prompt]:
    """For targets that do not read them."""
    return [Prompt(torch.zeros(PROMPT_LENGTH, 1), 0, slice(1, 2)) for _ in range(num_rows)]


@dataclass
class Session:
    """Rows that act step after step, and what is remembered of each."""

    memories: list[SessionMemory]
    spec: AnswerSpec

    @staticmethod
    def of(num_rows: int, space: ActionSpace | None = None) -> "Session":
        spec = AnswerSpec.action(space or ActionSpace.in_bins(LENGTH))
        return Session([SessionMemory() for _ in range(num_rows)], spec)


class Decoding:
    """A method over a target, with an engine of its own."""

    def __init__(
        self,
        target: object,
        method: Method,
        models: DraftModels | None = None,
        *scripted: DraftSource,
    ) -> None:
        """`scripted` sources take the place of those of their kind; targets may be fakes."""
        models = models or DraftModels()
        given = {**vars(models), "scripted": scripted}
        self.engine = Engine(target, ScriptedModels(**given) if scripted else models)  # type: ignore[arg-type]
        self.method = method
        self.engine.planner.plans(method)

    def decode(
        self,
        prompts: Sequence[Prompt],
        session: Session,
        clock: StageClock | None = None,
        wants_margins: bool = False,
    ) -> list[DecodeTrace]:
        """One action of every row, in order."""
        rows = [Answer(self.method, session.spec, one, wants_margins) for one in session.memories]
        self.engine.decode(prompts, rows, clock or StageClock(CPU))
        session.memories = [row.memory for row in rows]
        return [row.trace for row in rows if row.trace is not None]


def answer_of(
    history: SessionMemory, committed: Sequence[int] = (), length: int = LENGTH
) -> Answer:
    """An answer that has come so far, of a session with this history."""
    method = replace(find_method("autoregressive"), name="test")
    found = Answer(method, AnswerSpec.action(ActionSpace.in_bins(length)), history)
    found.limit, found.action_tokens = length, TokenRange(0, 99)
    found.tokens, found.target_tokens = list(committed), list(committed)
    found.num_cached = max(len(committed) - 1, 0)
    return found


def clock() -> StageClock:
    return StageClock(CPU)


def tokens_of(traces: Sequence[DecodeTrace]) -> list[tuple[int, ...]]:
    return [trace.tokens for trace in traces]
