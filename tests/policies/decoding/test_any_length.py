"""Answers of any length, stepped from outside: rows join, leave and are cancelled between rounds.

The slow twin of plain decoding is one pass over prompt and answer without a cache: every token must
be the likeliest after those before it, and nothing may stand behind a stop token. Drafts are
whatever a script says: right, wrong, half right, stop tokens among them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from deft_policies.decoding import kinds
from deft_policies.decoding.acceptance.rule import ActionSpace, DimensionGroup
from deft_policies.decoding.drafts import DraftSource, Guesses
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import Plan
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import PassRow, Prompt, Scores, Target
from deft_policies.decoding.warm_up import warm_up
from deft_policies.errors import RequestError
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import LlamaDecoder
from tests.policies.decoding.scripts import ScriptedModels, clock
from tests.tiny_target import ACTIONS, VOCABULARY, random_prompts, tiny_decoder

LONGEST = 400
STOP = 5
NEAR = 1e-4  # of two logits that may change places with rounding


@lru_cache(maxsize=2)
def decoder() -> LlamaDecoder:
    """The tiny one, with room for long answers."""
    tiny = tiny_decoder()
    long = LlamaDecoder(replace(tiny.sizes, max_positions=512))
    long.load_state_dict(tiny.state_dict())
    return long.requires_grad_(False).eval()


@lru_cache(maxsize=64)
def prompt(text_length: int, seed: int) -> Prompt:
    return random_prompts(decoder(), [text_length], seed)[0]


@lru_cache(maxsize=256)
def wanted(text_length: int, seed: int, max_tokens: int, stop: int | None) -> tuple[int, ...]:
    """Plain decoding, by a cache of nothing but tokens."""
    embeds = prompt(text_length, seed).embeds[None]
    tokens: list[int] = []
    while len(tokens) < max_tokens and (not tokens or tokens[-1] != stop):
        tokens.append(int(decoder().head(decoder()(embeds)[0, -1]).argmax()))
        embeds = torch.cat((embeds, decoder().embedding(torch.tensor([[tokens[-1]]]))), dim=1)
    return tuple(tokens)


def expect_plain(prompt: Prompt, tokens: Sequence[int], spec: AnswerSpec) -> None:
    """Every token the likeliest after those before it, up to the stop token or the limit."""
    embeds = torch.cat((prompt.embeds, decoder().embedding(torch.tensor(list(tokens)))))
    logits = decoder().head(decoder()(embeds[None])[0, prompt.length - 1 : -1])
    best = logits.amax(dim=1)
    assert torch.all(logits[torch.arange(len(tokens)), torch.tensor(tokens)] >= best - NEAR)
    assert spec.stop is None or spec.stop not in tokens[:-1]
    assert len(tokens) == spec.max_tokens or tokens[-1] == spec.stop


@dataclass(eq=False)
class Scripted(DraftSource):
    """Chains that go on as the answer does, more or less: `skill` is the chance of each token."""

    skill: float
    seed: int
    early: bool
    kind: str = kinds.HEAD
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.rng.seed(self.seed)

    def draft(self, sequence: Answer, depth: int) -> Guesses:
        steps = self.rng.randint(0, min(depth, 300))
        right = list(answer_of(sequence)[sequence.count :])
        right += [STOP] * (steps - len(right))
        return [
            [
                one if self.rng.random() < self.skill else self.rng.randrange(VOCABULARY)
                for one in right[:steps]
            ]
            for _ in range(self.rng.randint(1, 3))
        ]


ASKED: dict[int, tuple[int, int]] = {}  # the prompt of a row, by the noise of its memory


def answer_of(row: Answer) -> tuple[int, ...]:
    return wanted(*ASKED[row.memory.noise], row.spec.max_tokens, row.spec.stop)


def engine_with(scripted: DraftSource) -> Engine:
    return engine_over(Target(decoder(), ACTIONS), scripted)


def engine_over(target: Target, scripted: DraftSource) -> Engine:
    return Engine(target, ScriptedModels(scripted=(scripted,)), widest=512)


def method_with(rides: bool, text: str = "lossless:guard=off") -> Method:
    riders = (kinds.HEAD,) if rides else ()
    return replace(find_method(text), plans=(Plan("case", riders, (kinds.HEAD,)),))


def row_of(method: Method, text_length: int, seed: int, spec: AnswerSpec, number: int) -> Answer:
    row = Answer(method, spec)
    row.memory = replace(row.memory, noise=number)
    ASKED[number] = (text_length, seed)
    return row


specs = st.builds(
    AnswerSpec,
    st.one_of(st.integers(1, 30), st.integers(1, LONGEST)),
    st.one_of(st.none(), st.just(STOP), st.integers(0, VOCABULARY - 1)),
)
asks = st.tuples(st.integers(1, 9), st.integers(0, 5), specs)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # sessions are long, and shrinking takes minutes
)
@given(
    starts=st.lists(st.lists(asks, min_size=1, max_size=3), min_size=1, max_size=4),
    skill=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]),
    rides=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_answers_are_plain_decodings_whoever_joins_or_leaves(
    starts: list[list[tuple[int, int, AnswerSpec]]], skill: float, rides: bool, seed: int
) -> None:
    rng = random.Random(seed)
    engine, method = engine_with(Scripted(skill, seed, rides)), method_with(rides)
    asked: dict[int, tuple[Prompt, AnswerSpec]] = {}
    waiting, answered = list(starts), 0
    open_rows: list[Answer] = []
    with torch.inference_mode():
        while waiting or open_rows:
            if waiting and (not open_rows or rng.random() < 0.4):
                some = waiting.pop()
                prompts = [prompt(length, number) for length, number, _ in some]
                rows = [
                    row_of(method, length, number, spec, len(asked) + index)
                    for index, (length, number, spec) in enumerate(some)
                ]
                for row, one, (_, _, spec) in zip(rows, prompts, some, strict=True):
                    asked[row.memory.noise] = (one, spec)
                engine.start(prompts, rows)
                open_rows += rows
            if open_rows and rng.random() < 0.05:
                engine.cancel(open_rows.pop(rng.randrange(len(open_rows))))
            for row in engine.step(clock()):
                open_rows.remove(row)
                expect_plain(asked[row.memory.noise][0], row.tokens, row.spec)
                answered += 1
                assert row.trace is not None
                assert row.trace.tokens == tuple(row.tokens)
                assert sum(one.accepted_length + 1 for one in row.trace.passes) == len(row.tokens)
    assert answered <= len(asked)


@pytest.mark.parametrize("stop", [None, STOP])
@pytest.mark.parametrize("max_tokens", [1, 2, 40, LONGEST])
def test_right_drafts_of_several_hundred_tokens_take_one_pass(
    max_tokens: int, stop: int | None
) -> None:
    class Whole(Scripted):
        def draft(self, sequence: Answer, depth: int) -> Guesses:
            return [list(answer_of(sequence))]

    spec = AnswerSpec(max_tokens, stop)
    engine, method = engine_with(Whole(1.0, 0, True)), method_with(rides=True)
    with torch.inference_mode():
        row = row_of(method, 4, 1, spec, 0)
        engine.decode([prompt(4, 1)], [row], clock())
    assert tuple(row.tokens) == wanted(4, 1, max_tokens, stop)
    assert row.num_passes == 1


def test_plain_decoding_is_the_same_loop() -> None:
    plain = find_method("autoregressive")
    engine = Engine(Target(decoder(), ACTIONS))
    rows = [row_of(plain, 3, 0, AnswerSpec(50, 24), 0), row_of(plain, 5, 2, AnswerSpec(9), 1)]
    with torch.inference_mode():
        engine.decode([prompt(3, 0), prompt(5, 2)], rows, clock())
    assert [tuple(row.tokens) for row in rows] == [wanted(3, 0, 50, 24), wanted(5, 2, 9, None)]
    assert [row.num_passes for row in rows] == [len(row.tokens) for row in rows]


def test_distances_are_refused_by_name_where_answers_have_no_bins() -> None:
    engine = Engine(Target(decoder(), ACTIONS))
    for name in ("deft", "within-bins", "entropy-radius", "heisd-like", "kerv-like", "lvspec"):
        with pytest.raises(RequestError, match=f"{name!r} measures distances"):
            engine.planner.check(Answer(find_method(name), AnswerSpec(20, STOP)))
    for name in ("lossless", "fly", "top-k", "near-top"):
        engine.planner.check(Answer(find_method(name), AnswerSpec(20, STOP)))


class Near(Scripted):
    """One chain: the answer with every action token moved by a bin, and so is some text."""

    def draft(self, sequence: Answer, depth: int) -> Guesses:
        return [[one + 1 for one in MIXED[sequence.count :]][:depth]]


MIXED = [3, 9, 11, 30, 31, 32, 33, 34, 35, 50, STOP]  # text, an action, the end


class MixedTarget(Target):
    """Says MIXED, whatever was said before: only how many tokens there are counts."""

    num_prompt = 0

    def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
        if rows[0].prompt is not None:
            self.num_prompt = rows[0].prompt.length
        scores, last = super().forward(cache, rows), len(MIXED) - 1
        count = rows[0].start - self.num_prompt + 1
        said = [MIXED[min(count + depth, last)] for depth in rows[0].tree.depths()]
        scores.change(slice(None), one_hot(torch.tensor(said), VOCABULARY).float())
        return scores


@pytest.mark.parametrize("rides", [True, False])
def test_only_action_tokens_behind_text_are_relaxed(rides: bool) -> None:
    """Text must be equal; the action begins behind the last text, wherever that is."""
    method = method_with(rides=rides, text="within-bins:radius=1")
    engine = engine_over(MixedTarget(decoder(), ACTIONS), Near(1.0, 0, rides))
    row = row_of(method, 3, 0, AnswerSpec(30, STOP, ActionSpace.in_bins(7)), 0)
    with torch.inference_mode():
        engine.decode([prompt(3, 0)], [row], clock())
    assert row.target_tokens == MIXED
    assert row.tokens[:3] == MIXED[:3]
    assert row.tokens[-1] == STOP
    moved = [
        done - said for done, said in zip(row.tokens[3:10], row.target_tokens[3:10], strict=True)
    ]
    assert moved == [1] * 7
    assert row.num_passes == 3 + 1  # text, then the action and the end


def test_a_budget_of_an_action_counts_from_where_the_action_begins() -> None:
    """Three bins in all for each group: the moved dimensions are used up, then it is exact."""
    method = method_with(rides=True, text="heisd-like:each=1,total=2")
    space = ActionSpace(
        (DimensionGroup.MOVE,) * 3 + (DimensionGroup.TURN,) * 4, (0.0,) * 7, (None,) * 7
    )
    engine = engine_over(MixedTarget(decoder(), ACTIONS), Near(1.0, 0, True))
    row = row_of(method, 3, 0, AnswerSpec(30, STOP, space), 0)
    with torch.inference_mode():
        engine.decode([prompt(3, 0)], [row], clock())
    moved = [
        done - said for done, said in zip(row.tokens[3:10], row.target_tokens[3:10], strict=True)
    ]
    assert sum(moved[:3]) == 2
    assert sum(moved[3:]) == 2


@pytest.mark.parametrize("text", ["autoregressive", "lossless:guard=off"])
def test_one_method_answers_texts_and_actions_in_any_order(
    text: str,
) -> None:
    """What was set aside for shorter answers, or for answers without actions, is made larger."""
    method, engine = find_method(text), Engine(Target(decoder(), ACTIONS))
    action = AnswerSpec.action(ActionSpace.in_bins(7))
    specs = [AnswerSpec(3), AnswerSpec(40), AnswerSpec(30, STOP), action, AnswerSpec(60)]
    with torch.inference_mode():
        for number, spec in enumerate(specs):
            row = row_of(method, 3, number, spec, 0)
            engine.decode([prompt(3, number)], [row], clock())
            assert tuple(row.tokens) == wanted(3, number, spec.max_tokens, spec.stop)


def test_a_source_that_reads_passes_never_rides_before_the_first_one() -> None:
    class AfterPasses(Scripted):
        def draft(self, sequence: Answer, depth: int) -> Guesses:
            assert sequence.last is not None
            return super().draft(sequence, depth)

    engine, method = engine_with(AfterPasses(0.9, 0, early=False)), method_with(rides=True)
    spec = AnswerSpec(20)
    with torch.inference_mode():
        for number in range(2):
            row = row_of(method, 3, number, spec, 0)
            engine.decode([prompt(3, number)], [row], clock())
            assert tuple(row.tokens) == wanted(3, number, 20, None)
            assert row.trace is not None
            assert len(row.trace.passes[0].tokens) == 1


def test_actions_of_two_lengths_are_guarded_apart() -> None:
    method, engine = find_method("lossless"), Engine(Target(decoder(), ACTIONS))
    specs = [AnswerSpec.action(ActionSpace.in_bins(length)) for length in (4, 9)]
    with torch.inference_mode():
        warm_up(engine, prompt(3, 0), method, specs[0])
        rows = [row_of(method, 3, 0, spec, 0) for spec in specs]
        engine.decode([prompt(3, 0)] * 2, rows, clock())
    assert [len(row.tokens) for row in rows] == [4, 9]
    first, second = (row.guard for row in rows)
    assert first is not None
    assert second is not None
    assert first is not second
    # What a pass costs is known; a longer answer takes more of them.
    assert second.expected_ms("plain") > first.expected_ms("plain")
