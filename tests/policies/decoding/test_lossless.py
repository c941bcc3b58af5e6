"""With exact match the output equals plain decoding, whatever drafts: the property that matters.

The check is `expect_lossless`. The last tests plant mistakes, one at a time, and assert that the
check fails on each: a property that cannot fail proves nothing.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding import round as rounds
from deft_policies.decoding.acceptance.rule import ScoredTree
from deft_policies.decoding.batch import Pass
from deft_policies.decoding.drafts.retrieval import RetrievalIndex, frame_keys
from deft_policies.decoding.engine import DraftModels
from deft_policies.decoding.judge import judge, judge_on_host
from deft_policies.decoding.kinds import OUR_KINDS
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import Plan, TreeShape
from deft_policies.decoding.target import (
    Prompts,
    Scores,
    Target,
)
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import LlamaDecoder, first_layers
from tests.policies.decoding.scripts import Decoding, Guess, ScriptedDrafts, Session, tokens_of
from tests.tiny_target import (
    ACTIONS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    TinyTarget,
    fast_target,
    greedy,
    random_prompts,
    tiny_decoder,
)

FRAME_CHOICES = ((0,), (0, 0), (1, 2), (3, 4, 3))
NUM_DRAFT_SEEDS = 6


@lru_cache(maxsize=4)
def decoder_of(seed: int) -> LlamaDecoder:
    return tiny_decoder(seed)


@lru_cache(maxsize=1024)
def frame(seed: int, lengths: tuple[int, ...], number: int) -> Prompts:
    return random_prompts(decoder_of(seed), list(lengths), number)


@lru_cache(maxsize=1024)
def answers(seed: int, lengths: tuple[int, ...], number: int) -> tuple[tuple[int, ...], ...]:
    return tuple(greedy(decoder_of(seed), frame(seed, lengths, number)))


@dataclass(frozen=True)
class Case:
    """What one session does: frames one after the other, drafted by some sources."""

    seed: int
    lengths: tuple[int, ...]  # text tokens of each row's prompt
    frames: tuple[int, ...]
    drafts: tuple[str, ...]
    shape: TreeShape
    scripted_skill: float | None  # chance of a right guess, where a script stands for the head
    script_seed: int


LENGTH_CHOICES = ((5,), (2,), (3, 3), (1, 6), (4, 2, 7), (5, 5, 5, 5), (1, 7, 3, 2))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = draw(st.lists(st.sampled_from(list(OUR_KINDS)), min_size=1, max_size=4, unique=True))
    shape = TreeShape(
        levels=draw(st.integers(1, 7)),
        top_k=draw(st.integers(1, 5)),
        num_guesses=draw(st.integers(1, 30)),
        is_full_depth=draw(st.booleans()),
    )
    if draw(st.integers(0, 3)) == 0:  # one in four is of fixed shape
        template = TreeShape.template(draw(st.integers(1, 6)), draw(st.integers(1, 3)))
        shape = replace(template, is_full_depth=shape.is_full_depth)
    is_scripted = draw(st.booleans())
    return Case(
        seed=draw(st.integers(0, 1)),
        lengths=draw(st.sampled_from(LENGTH_CHOICES)),
        frames=tuple(draw(st.sampled_from(FRAME_CHOICES))),
        drafts=tuple(kinds),
        shape=shape,
        scripted_skill=draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])) if is_scripted else None,
        script_seed=draw(st.integers(0, NUM_DRAFT_SEEDS - 1)),
    )


def models_of(case: Case) -> DraftModels:
    return random_models(case.seed, case.lengths, case.frames[0], case.script_seed)


@lru_cache(maxsize=256)
def random_models(seed: int, lengths: tuple[int, ...], number: int, draft_seed: int) -> DraftModels:
    """Draft models of random weights: good for nothing, which must not matter."""
    torch.manual_seed(draft_seed)
    decoder = decoder_of(seed)
    head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    medusa = MedusaHeads(WIDTH, 6).requires_grad_(False)
    medusa.weight.normal_(std=0.1)
    stored = frame(seed, lengths, number)
    actions = torch.tensor(answers(seed, lengths, number))
    actions = torch.where(torch.rand(actions.shape) < 0.2, 30, actions)
    return DraftModels(
        head=head,
        medusa=medusa,
        index=RetrievalIndex(frame_keys(stored), actions, "tiny"),
        small_model=fast_target(first_layers(decoder, 1 + draft_seed % 2)),
    )


def script(case: Case, number: int) -> Guess:
    """Guesses that are right with the case's skill, among up to three wrong ones."""
    rng = random.Random(case.script_seed)
    right = answers(case.seed, case.lengths, number)

    def guess(row: int, position: int, before: tuple[int, ...]) -> list[int]:
        wrong = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(3))]
        is_on_track = before == right[row][: len(before)] and position < LENGTH
        if is_on_track and rng.random() < (case.scripted_skill or 0.0):
            wrong.insert(rng.randrange(len(wrong) + 1), right[row][position])
        return wrong

    return guess


def method_of(case: Case) -> Method:
    plan = Plan("case", case.drafts, case.drafts, case.shape)
    method = find_method("lossless:guard=off,patch_share=0.5")
    return replace(method, plans=(plan,), multi_level=case.script_seed % 2 == 1)


def expect_lossless(case: Case, target: object) -> None:
    """The property: every action of the session equals plain decoding of its frame."""
    session = Session.of(len(case.lengths))
    scripted = ScriptedDrafts(lambda *_: [], max_depth=LENGTH)
    is_scripted = case.scripted_skill is not None
    drafted = Decoding(target, method_of(case), models_of(case), *([scripted] * is_scripted))
    for number in case.frames:
        scripted.guess = script(case, number)
        prompts = frame(case.seed, case.lengths, number)
        found = tokens_of(drafted.decode(prompts, session))
        assert found == list(answers(case.seed, case.lengths, number))


SLOW_DRAWS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW_DRAWS)
@given(cases())
def test_exact_match_answers_as_plain_decoding_does(case: Case) -> None:
    expect_lossless(case, fast_target(decoder_of(case.seed)))


@pytest.mark.long(seconds=32)
@settings(max_examples=500, deadline=None, suppress_health_check=SLOW_DRAWS)
@given(cases())
def test_it_does_so_in_500_cases(case: Case) -> None:
    expect_lossless(case, fast_target(decoder_of(case.seed)))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_it_does_so_over_a_target_without_cache_and_masks(case: Case) -> None:
    expect_lossless(case, TinyTarget(decoder_of(case.seed)))


# Planted mistakes.


class SeesEverything(DraftTree):
    """A tree whose nodes attend to all nodes before them: a wrong mask."""

    def ancestor_mask(self) -> Tensor:
        return torch.ones_like(super().ancestor_mask()).tril()


class OneTooDeep(DraftTree):
    """A tree whose guesses stand one position too far: a wrong position."""

    def depths(self) -> Tensor:
        return super().depths() + (self.parents >= 0)


def retyped(tree: DraftTree, kind: type[DraftTree]) -> DraftTree:
    return kind(tree.tokens, tree.parents, tree.is_real, tree.log_probs, tree.sources)


class WrongMaskTarget(Target):
    def score(self, rows: KVCache, tree: DraftTree) -> Scores:
        return super().score(rows, retyped(tree, SeesEverything))


class WrongMaskInPrefillTarget(Target):
    def prefill(
        self, rows: KVCache, first: int, prompts: Prompts, tree: DraftTree
    ) -> tuple[Scores, Tensor]:
        return super().prefill(rows, first, prompts, retyped(tree, SeesEverything))


class WrongPositionTarget(Target):
    def score(self, rows: KVCache, tree: DraftTree) -> Scores:
        return super().score(rows, retyped(tree, OneTooDeep))


class KeepsOneTooFew(KVCache):
    def keep(self, path: Tensor, kept: Tensor | int, in_place: bool, first: int = 0) -> None:
        super().keep(path, (torch.as_tensor(kept) - 1).clamp(min=1), in_place, first)


class KeepsWrongSlots(KVCache):
    def keep(self, path: Tensor, kept: Tensor | int, in_place: bool, first: int = 0) -> None:
        super().keep(torch.arange(path.shape[1]).expand_as(path), kept, True, first)


class KeepsOneTooFewTarget(Target):
    def new_cache(self) -> KVCache:
        return KeepsOneTooFew(self.decoder.sizes, self.decoder.embedding.weight)


class KeepsWrongSlotsTarget(Target):
    def new_cache(self) -> KVCache:
        return KeepsWrongSlots(self.decoder.sizes, self.decoder.embedding.weight)


Judge = Callable[..., Pass]


def wrong_bonus(scored: ScoredTree, accepted: Pass) -> Pass:
    """Takes the root's prediction for the bonus, wherever the path ends."""
    return replace(accepted, bonus=scored.predictions[:, 0])


def one_more(scored: ScoredTree, accepted: Pass) -> Pass:
    """Keeps one draft more than was accepted, where there is one."""
    rows = torch.arange(len(accepted.bonus))
    end = accepted.path[rows, accepted.num]
    is_child = (scored.tree.parents == end[:, None]) & scored.tree.is_real
    child = is_child.int().argmax(dim=1)
    longer = (accepted.num + is_child.any(dim=1)).clamp(max=accepted.path.shape[1] - 1)
    path = accepted.path.scatter(1, longer[:, None], torch.where(longer > 0, child, 0)[:, None])
    bonus = scored.predictions[rows, child]
    return replace(accepted, path=path, num=longer, bonus=bonus)


def own_prediction(scored: ScoredTree) -> ScoredTree:
    """A node judged by what is predicted after it instead of in its place: off by one."""
    above = scored.tree.parents.clamp(min=0)
    return replace(scored, predictions=scored.tree.tokens.scatter(1, above, scored.predictions))


def through_rejected(scored: ScoredTree) -> ScoredTree:
    """Walks on through a rejected parent."""
    return replace(scored, tree=retyped(scored.tree, Lenient))


def planted(
    before: Callable[[ScoredTree], ScoredTree] | None = None,
    after: Callable[[ScoredTree, Pass], Pass] | None = None,
) -> Judge:
    """The judge with a mistake before it or behind it."""

    def wrong(method: Method, scored: ScoredTree, *rest: Any) -> Pass:
        accepted = judge(method, scored if before is None else before(scored), *rest)
        if before is own_prediction:
            accepted = replace(accepted, bonus=judge(method, scored, *rest).bonus)
        return accepted if after is None else after(scored, accepted)

    return wrong


class Lenient(DraftTree):
    """A tree whose nodes think they hang on nothing but the root."""

    def ancestor_mask(self) -> Tensor:
        return torch.eye(self.num_nodes, dtype=torch.bool).expand(len(self.tokens), -1, -1)

    def depths(self) -> Tensor:
        return super().ancestor_mask().sum(dim=2) - 1


def mutation_cases() -> list[Case]:
    """Sessions in which long and short paths are accepted, alone and in batches."""
    return [
        Case(
            seed=0,
            lengths=lengths,
            frames=(number, number + 1, number),
            drafts=(kinds.PREVIOUS, kinds.RETRIEVAL, kinds.HEAD),
            shape=TreeShape(),
            scripted_skill=skill,
            script_seed=number,
        )
        for number, (lengths, skill) in enumerate(
            [((5,), 0.8), ((2,), 0.5), ((1, 6), 0.8), ((3, 3), 0.5), ((4, 2, 7), 1.0)]
        )
    ]


def target_of(kind: type[Target], case: Case) -> Target:
    return kind(decoder_of(case.seed), ACTIONS)


def num_caught(check: Callable[[Case], None]) -> int:
    caught = 0
    for case in mutation_cases():
        try:
            check(case)
        except AssertionError:
            caught += 1
    return caught


def test_nothing_is_caught_where_nothing_is_wrong() -> None:
    assert num_caught(lambda case: expect_lossless(case, target_of(Target, case))) == 0


@pytest.mark.parametrize(
    "kind",
    [
        WrongMaskTarget,
        WrongMaskInPrefillTarget,
        WrongPositionTarget,
        KeepsOneTooFewTarget,
        KeepsWrongSlotsTarget,
    ],
)
def test_a_mistake_planted_in_the_target_is_caught(kind: type[Target]) -> None:
    assert num_caught(lambda case: expect_lossless(case, target_of(kind, case))) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        planted(after=wrong_bonus),
        planted(before=own_prediction),
        planted(after=one_more),
        planted(before=through_rejected),
    ],
    ids=["wrong bonus", "own prediction", "one more", "through rejected"],
)
def test_a_mistake_planted_in_the_judge_is_caught(
    monkeypatch: pytest.MonkeyPatch, wrong: Judge
) -> None:
    monkeypatch.setattr(rounds, "ExactMatch", ())  # no rule is judged on the host
    monkeypatch.setattr(rounds, "judge", planted())
    assert num_caught(lambda case: expect_lossless(case, fast_target(decoder_of(0)))) == 0
    monkeypatch.setattr(rounds, "judge", wrong)
    assert num_caught(lambda case: expect_lossless(case, fast_target(decoder_of(0)))) > 0


@dataclass(frozen=True)
class Seen:
    """What a mistake may look at where exact match is judged on the host."""

    tree: DraftTree
    predictions: Tensor


def planted_on_host(
    before: Callable[[Any], Any] | None = None, after: Callable[[Any, Pass], Pass] | None = None
) -> Judge:
    """`judge_on_host` with a mistake before it or behind it."""

    def wrong(tree: DraftTree, predictions: Tensor, *rest: Any) -> Pass:
        seen = Seen(tree, predictions)
        asked = seen if before is None else before(seen)
        accepted = judge_on_host(asked.tree, asked.predictions, *rest)
        if before is own_prediction:
            right = judge_on_host(tree, predictions, *rest)
            accepted = replace(accepted, bonus=right.bonus)
        return accepted if after is None else after(seen, accepted)

    return wrong


@pytest.mark.parametrize(
    "wrong",
    [
        planted_on_host(after=wrong_bonus),
        planted_on_host(before=own_prediction),
        planted_on_host(after=one_more),
    ],
    ids=["wrong bonus", "own prediction", "one more"],
)
def test_a_mistake_planted_in_the_judge_on_the_host_is_caught(
    monkeypatch: pytest.MonkeyPatch, wrong: Judge
) -> None:
    monkeypatch.setattr(rounds, "judge_on_host", planted_on_host())
    assert num_caught(lambda case: expect_lossless(case, fast_target(decoder_of(0)))) == 0
    monkeypatch.setattr(rounds, "judge_on_host", wrong)
    assert num_caught(lambda case: expect_lossless(case, fast_target(decoder_of(0)))) > 0
