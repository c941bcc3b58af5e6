"""With exact match the output equals plain decoding, whatever drafts: the property that matters.

The check is `expect_lossless`. The last tests plant mistakes, one at a time, and assert that the
check fails on each: a property that cannot fail proves nothing.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deft_policies.decoding.acceptance.rule import ScoredTree
from deft_policies.decoding.decoder import Decoder, DraftModels
from deft_policies.decoding.drafts.eagle import EagleHead, HeadSizes
from deft_policies.decoding.drafts.guessers import RetrievalIndex, frame_keys
from deft_policies.decoding.drafts.medusa import MedusaHeads, MedusaSizes
from deft_policies.decoding.drafts.small_model import first_layers
from deft_policies.decoding.drafts.sources import Sources
from deft_policies.decoding.history import ActionHistory
from deft_policies.decoding.knobs import find_method
from deft_policies.decoding.llama_target import LlamaTarget, Room
from deft_policies.decoding.methods import RIDES_IN_PREFILL, Method
from deft_policies.decoding.plan import OUR_KINDS, DraftKind, Plan, TreeShape, TreeTemplate
from deft_policies.decoding.target import PromptFeatures, Prompts, Scores, TargetModel
from deft_policies.decoding.tree import DraftTree
from deft_policies.decoding.verify import AcceptedPath, Verifier
from deft_policies.model.llama import LlamaDecoder
from tests.policies.decoding.scripts import Guess, ScriptedDrafts, Session, clock, tokens_of
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
    drafts: tuple[DraftKind, ...]
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
        template = TreeTemplate.harmonic(draw(st.integers(1, 6)), draw(st.integers(1, 3)))
        shape = replace(TreeShape.of_template(template), is_full_depth=shape.is_full_depth)
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
    head = EagleHead(HeadSizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    medusa = MedusaHeads(MedusaSizes(WIDTH, 6)).requires_grad_(False)
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
    riders = tuple(kind for kind in case.drafts if kind in RIDES_IN_PREFILL)[:3]
    plan = Plan("case", riders, case.drafts, case.shape)
    method = find_method("lossless:guard=off,patch_share=0.5")
    return replace(method, plans=(plan,), multi_level=case.script_seed % 2 == 1)


def expect_lossless(
    case: Case,
    target: TargetModel,
    build: Callable[[TargetModel, Method, Sources], Decoder] = Decoder,
) -> None:
    """The property: every action of the session equals plain decoding of its frame."""
    session = Session.of(len(case.lengths))
    method = method_of(case)
    sources = models_of(case).sources_for(target, method)
    scripted = None
    if case.scripted_skill is not None:
        scripted = ScriptedDrafts(lambda *_: [], max_depth=LENGTH)
        others = tuple(one for one in sources.growers if one.kind is not DraftKind.HEAD)
        sources = Sources(sources.guessers, (scripted, *others))
    decoder = build(target, method, sources)
    for number in case.frames:
        if scripted is not None:
            scripted.guess = script(case, number)
        prompts = frame(case.seed, case.lengths, number)
        found = tokens_of(decoder.decode(prompts, session.rows, clock()))
        assert found == list(answers(case.seed, case.lengths, number))


@settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases())
def test_exact_match_answers_as_plain_decoding_does(case: Case) -> None:
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


class WrongMaskTarget(LlamaTarget):
    def score(self, tree: DraftTree) -> Scores:
        return super().score(retyped(tree, SeesEverything))


class WrongMaskInPrefillTarget(LlamaTarget):
    def prefill(self, prompts: Prompts, tree: DraftTree) -> tuple[Scores, PromptFeatures]:
        return super().prefill(prompts, retyped(tree, SeesEverything))


class WrongPositionTarget(LlamaTarget):
    def score(self, tree: DraftTree) -> Scores:
        return super().score(retyped(tree, OneTooDeep))


class KeepsOneTooFewTarget(LlamaTarget):
    def commit(self, path: Tensor, lengths: Tensor) -> None:
        super().commit(path, (lengths - 1).clamp(min=1))


class KeepsWrongSlotsTarget(LlamaTarget):
    def commit(self, path: Tensor, lengths: Tensor) -> None:
        steps = torch.arange(path.shape[1]).expand_as(path)
        super().commit(steps, lengths)


@dataclass(frozen=True)
class WrongBonus(Verifier):
    """Takes the root's prediction for the bonus, wherever the path ends."""

    def judge(self, scored: ScoredTree) -> AcceptedPath:
        return replace(super().judge(scored), bonus=scored.predictions[:, 0])


@dataclass(frozen=True)
class OwnPrediction(Verifier):
    """Judges a node by what is predicted after it instead of in its place: off by one."""

    def judge(self, scored: ScoredTree) -> AcceptedPath:
        above = scored.tree.parents.clamp(min=0)
        shifted = replace(
            scored, predictions=scored.tree.tokens.scatter(1, above, scored.predictions)
        )
        return replace(super().judge(shifted), bonus=super().judge(scored).bonus)


@dataclass(frozen=True)
class OneMore(Verifier):
    """Keeps one draft more than was accepted, where there is one."""

    def judge(self, scored: ScoredTree) -> AcceptedPath:
        accepted = super().judge(scored)
        rows = torch.arange(len(accepted.bonus))
        end = accepted.path[rows, accepted.num_accepted]
        is_child = (scored.tree.parents == end[:, None]) & scored.tree.is_real
        child = is_child.int().argmax(dim=1)
        longer = accepted.num_accepted + is_child.any(dim=1)
        longer = longer.clamp(max=accepted.path.shape[1] - 1)
        path = accepted.path.scatter(1, longer[:, None], torch.where(longer > 0, child, 0)[:, None])
        return AcceptedPath(path, longer, scored.predictions[rows, child], accepted.own)


@dataclass(frozen=True)
class ThroughRejected(Verifier):
    """Walks on through a rejected parent."""

    def judge(self, scored: ScoredTree) -> AcceptedPath:
        lenient = replace(scored, tree=retyped(scored.tree, Lenient))
        return super().judge(lenient)


class Lenient(DraftTree):
    """A tree whose nodes think they hang on nothing but the root."""

    def ancestor_mask(self) -> Tensor:
        return torch.eye(self.num_nodes, dtype=torch.bool).expand(len(self.tokens), -1, -1)

    def depths(self) -> Tensor:
        return super().ancestor_mask().sum(dim=2) - 1


def decoder_with(kind: type[Verifier]) -> Callable[[TargetModel, Method, Sources], Decoder]:
    class Broken(Decoder):
        def verifier_for(
            self, histories: Sequence[ActionHistory], length: int, device: torch.device
        ) -> Verifier:
            right = super().verifier_for(histories, length, device)
            return kind(right.rule, right.tie_break, right.first_token)

    return Broken


def mutation_cases() -> list[Case]:
    """Sessions in which long and short paths are accepted, alone and in batches."""
    return [
        Case(
            seed=0,
            lengths=lengths,
            frames=(number, number + 1, number),
            drafts=(DraftKind.PREVIOUS, DraftKind.RETRIEVAL, DraftKind.HEAD),
            shape=TreeShape(),
            scripted_skill=skill,
            script_seed=number,
        )
        for number, (lengths, skill) in enumerate(
            [((5,), 0.8), ((2,), 0.5), ((1, 6), 0.8), ((3, 3), 0.5), ((4, 2, 7), 1.0)]
        )
    ]


def target_of(kind: type[LlamaTarget], case: Case) -> LlamaTarget:
    return kind(decoder_of(case.seed), ACTIONS, room=Room(new_tokens=16, nodes=64))


def num_caught(check: Callable[[Case], None]) -> int:
    caught = 0
    for case in mutation_cases():
        try:
            check(case)
        except AssertionError:
            caught += 1
    return caught


def test_nothing_is_caught_where_nothing_is_wrong() -> None:
    assert num_caught(lambda case: expect_lossless(case, target_of(LlamaTarget, case))) == 0
    build = decoder_with(Verifier)
    assert num_caught(lambda case: expect_lossless(case, fast_target(decoder_of(0)), build)) == 0


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
def test_a_mistake_planted_in_the_target_is_caught(kind: type[LlamaTarget]) -> None:
    assert num_caught(lambda case: expect_lossless(case, target_of(kind, case))) > 0


@pytest.mark.parametrize("kind", [WrongBonus, OwnPrediction, OneMore, ThroughRejected])
def test_a_mistake_planted_in_the_verifier_is_caught(kind: type[Verifier]) -> None:
    build = decoder_with(kind)
    assert num_caught(lambda case: expect_lossless(case, fast_target(decoder_of(0)), build)) > 0
