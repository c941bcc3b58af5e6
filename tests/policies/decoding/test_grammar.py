"""A toy grammar in the real engine: logits adjusted by node, forced tokens, any drafts.

The slow twin recomputes everything for every token, masks the logits by what has been written, and
takes the likeliest: it knows no trees, no cache and no forced tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import pytest
import torch
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.drafts import DraftSource, Guesses
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import Plan
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Prompt, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.decoding.warm_up import capture
from deft_policies.memory import SessionMemory
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.llama import LlamaDecoder, RotaryTable
from tests.fake_graphs import RecordingCapturer
from tests.policies.decoding.scripts import ScriptedModels, clock
from tests.tiny_target import ACTIONS, VOCABULARY, random_prompts, tiny_decoder

STOP = 5
TEXT = AnswerSpec(24, STOP)
ACTION = AnswerSpec.action(ActionSpace.in_bins(7))
OPEN, CLOSE = 6, 7


@dataclass(frozen=True)
class Brackets:
    """Words, and brackets that hold a countdown: behind OPEN and n come n - 1, ..., 0 and CLOSE.

    Numbers are tokens 8 to 8 + `largest`. An even word is followed by a bracket.
    """

    largest: int = 3

    def allowed(self, tokens: Sequence[int]) -> set[int]:
        """What may follow."""
        last = tokens[-1] if tokens else CLOSE
        if last == OPEN:
            return set(range(8, 9 + self.largest))
        if last == 8:
            return {CLOSE}
        if 8 < last <= 8 + self.largest:
            return {last - 1}
        if last > 8 and last % 2 == 0:
            return {OPEN}
        return {*range(9 + self.largest, VOCABULARY), STOP}

    def adjust(self, logits: Tensor, answer: Answer, tree: DraftTree) -> Tensor:
        """Minus infinity where a token may not follow what stands on a node's path."""
        before = [answer.tokens[: answer.num_cached + 1]]  # up to node 0
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            before.append([*before[parent], token])
        rows = [[token in self.allowed(one) for token in range(VOCABULARY)] for one in before]
        return logits.masked_fill(~torch.tensor(rows), -torch.inf)

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """A bracket behind an even word, and all of it behind its number."""
        found = list[int]()
        while len(allowed := self.allowed([*tokens, *found])) == 1:
            found += allowed
        return found


@lru_cache(maxsize=1)
def decoder() -> LlamaDecoder:
    found = tiny_decoder()
    found.rotary = RotaryTable(replace(found.sizes, max_positions=512))
    return found


GRAMMARS = (Brackets(), Brackets(largest=12))


@cache
def wanted(prompt: int, grammar: Brackets, spec: AnswerSpec) -> tuple[int, ...]:
    """The slow twin's answer."""
    embeds, tokens = prompts()[prompt].embeds, list[int]()
    while len(tokens) < spec.max_tokens and (not tokens or tokens[-1] != spec.stop):
        words = decoder().embedding(torch.tensor(tokens, dtype=torch.int64))
        logits = decoder().head(decoder()(torch.cat((embeds, words))[None])[0, -1])
        allowed = sorted(grammar.allowed(tokens))
        tokens.append(allowed[int(logits[allowed].argmax())])
    return tuple(tokens)


@lru_cache(maxsize=1)
def prompts() -> list[Prompt]:
    return random_prompts(decoder(), [1, 3, 2, 5, 4, 7], seed=3)


@dataclass(eq=False)
class Scripted(DraftSource):
    """Chains that are right for a while, whatever the grammar says of the rest."""

    rng: random.Random
    kind: str = kinds.HEAD

    def draft(self, sequence: Answer, depth: int) -> Guesses:
        number = sequence.memory.noise
        assert isinstance(sequence.grammar, Brackets)
        right = wanted(number, sequence.grammar, sequence.spec)[sequence.count :]
        chains = []
        for _ in range(self.rng.randint(0, 3)):
            chain = list(right[: self.rng.randint(0, depth)])
            wrong = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(0, 3))]
            chains.append(chain + wrong)
        return chains


def engine_of(is_captured: bool, rng: random.Random) -> Engine:
    runner = StepRunner()
    if is_captured:
        runner = StepRunner(RecordingCapturer().capture, Reserve(8, 5, 20))
    target = Target(decoder(), ACTIONS, runner=runner)
    engine = Engine(target, ScriptedModels(scripted=(Scripted(rng),)), longest_answer=24)
    with torch.inference_mode(), runner.warming_up():
        capture(engine)
    return engine


PLAIN = find_method("autoregressive")
DRAFTED = replace(
    find_method("lossless:guard=off"), plans=(Plan("case", (kinds.HEAD,), (kinds.HEAD,)),)
)


def play(
    engine: Engine, grammar: Brackets, spec: AnswerSpec, methods: list[Method]
) -> list[Answer]:
    given = [replace(one, grammar=grammar) for one in prompts()]
    rows = [
        Answer(method, spec, SessionMemory(noise=index), wants_margins=True, wants_log_probs=True)
        for index, method in enumerate(methods)
    ]
    with torch.inference_mode():
        engine.decode(given, rows, clock())
    return rows


@pytest.mark.parametrize("is_captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("spec", [TEXT, ACTION], ids=["text", "action"])
@pytest.mark.parametrize("grammar", GRAMMARS, ids=["short", "long"])
def test_answers_are_those_of_masked_plain_decoding(
    is_captured: bool, spec: AnswerSpec, grammar: Brackets
) -> None:
    rng = random.Random(0)
    engine = engine_of(is_captured, rng)
    num_forced = 0
    for _ in range(6):
        methods = [rng.choice((PLAIN, DRAFTED)) for _ in prompts()]
        for index, row in enumerate(play(engine, grammar, spec, methods)):
            assert tuple(row.tokens) == wanted(index, grammar, spec)
            assert row.target_tokens == row.tokens
            assert len(row.margins) == len(row.log_probs) == len(row.tokens)
            assert all(0 <= margin < float("inf") for margin in row.margins)
            num_forced += len(row.tokens) - row.num_passes if row.method is PLAIN else 0
    assert num_forced > 10  # plain decoding needs no pass for what is forced


@pytest.mark.parametrize("is_captured", [False, True], ids=["plain", "captured"])
def test_more_forced_tokens_than_a_pass_holds_take_several(is_captured: bool) -> None:
    """The rest is committed by the passes that follow, whose logits leave nothing else."""
    grammar, spec = Brackets(largest=60), AnswerSpec(40, STOP)
    engine = engine_of(is_captured, random.Random(0))
    engine.planner.widest = 8
    for index, row in enumerate(play(engine, grammar, spec, [PLAIN] * len(prompts()))):
        assert tuple(row.tokens) == wanted(index, grammar, spec)
        assert max(one.tree.num_nodes for one in row.records) <= 8


@dataclass(frozen=True)
class Ending(Brackets):
    """A bracket ends the answer: the stop token is forced, and a grammar may go on behind it."""

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        found = list(super().forced(tokens))
        return [*found, STOP, OPEN] if CLOSE in found else found


def test_nothing_is_forced_behind_a_stop_token() -> None:
    rows = play(engine_of(False, random.Random(0)), Ending(), TEXT, [PLAIN] * len(prompts()))
    assert any(row.tokens[-2:] == [CLOSE, STOP] for row in rows)
    assert all(STOP not in row.tokens[:-1] for row in rows)


def test_samples_are_the_same_with_and_without_drafts() -> None:
    method = "lossless:guard=off,temperature=1"
    drafted = replace(find_method(method), plans=DRAFTED.plans)
    engine = engine_of(False, random.Random(1))
    for grammar in GRAMMARS:
        plain = play(engine, grammar, TEXT, [PLAIN.with_sampling(1.0)] * len(prompts()))
        found = play(engine, grammar, TEXT, [drafted] * len(prompts()))
        assert [one.tokens for one in found] == [one.tokens for one in plain]
