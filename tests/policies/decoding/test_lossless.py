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

from deft_policies.decoding import engine as engines
from deft_policies.decoding import kinds
from deft_policies.decoding.accept import accept
from deft_policies.decoding.kinds import OUR_KINDS
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import Plan, TreeShape
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.sequence import PassResult
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import PassRow, Prompt, Scores, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.kv_cache import KVCache, Move
from deft_policies.model.llama import LlamaDecoder, first_layers
from tests.draws import draws
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

pytestmark = pytest.mark.promise

FRAME_CHOICES = ((0,), (0, 0), (1, 2), (3, 4, 3))
NUM_DRAFT_SEEDS = 6


@lru_cache(maxsize=4)
def decoder_of(seed: int) -> LlamaDecoder:
    return tiny_decoder(seed)


@lru_cache(maxsize=1024)
def frame(seed: int, lengths: tuple[int, ...], number: int) -> list[Prompt]:
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


@lru_cache(maxsize=256)
def random_models(seed: int, draft_seed: int) -> DraftModels:
    """Draft models of random weights: good for nothing, which must not matter."""
    torch.manual_seed(draft_seed)
    decoder = decoder_of(seed)
    head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    medusa = MedusaHeads(WIDTH, 6).requires_grad_(False)
    medusa.weight.normal_(std=0.1)
    return DraftModels(
        head=head,
        medusa=medusa,
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
    multi_level = "on" if case.script_seed % 2 else "off"
    method = find_method(f"lossless:guard=off,patch_share=0.5,multi_level={multi_level}")
    return replace(method, plans=(plan,))


def expect_lossless(case: Case, target: object) -> None:
    """The property: every action of the session equals plain decoding of its frame."""
    session = Session.of(len(case.lengths))
    scripted = ScriptedDrafts(lambda *_: [], max_depth=LENGTH)
    is_scripted = case.scripted_skill is not None
    drafted = Decoding(
        target,
        method_of(case),
        random_models(case.seed, case.script_seed),
        *([scripted] * is_scripted),
    )
    for number in case.frames:
        scripted.guess = script(case, number)
        prompts = frame(case.seed, case.lengths, number)
        found = tokens_of(drafted.decode(prompts, session))
        assert found == list(answers(case.seed, case.lengths, number))


SLOW_DRAWS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=draws(40), deadline=None, suppress_health_check=SLOW_DRAWS)
@given(cases())
def test_exact_match_answers_as_plain_decoding_does(case: Case) -> None:
    expect_lossless(case, fast_target(decoder_of(case.seed)))


@settings(max_examples=draws(10), deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_exact_match_is_lossless_over_a_target_without_cache_and_masks(case: Case) -> None:
    expect_lossless(case, TinyTarget(decoder_of(case.seed)))


# Planted mistakes.


def as_chain(tree: DraftTree) -> DraftTree:
    """A tree whose nodes attend to all nodes before them: a wrong mask."""
    return replace(tree, is_chain=True)


class WrongMaskTarget(Target):
    def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
        if rows[0].prompt is None:
            rows = [replace(row, tree=as_chain(row.tree)) for row in rows]
        return super().forward(cache, rows)


class WrongMaskInPrefillTarget(Target):
    def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
        if rows[0].prompt is not None:
            rows = [replace(row, tree=as_chain(row.tree)) for row in rows]
        return super().forward(cache, rows)


class OneTooDeep(DraftTree):
    """A tree whose guesses stand one position too far: a wrong position."""

    def depths(self) -> list[int]:
        return [depth + (node > self.root) for node, depth in enumerate(super().depths())]


class WrongPositionTarget(Target):
    def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
        wrong = [OneTooDeep(**vars(row.tree)) for row in rows]
        for tree in wrong:
            tree.is_chain = tree.is_chain and not tree.has_guesses
        return super().forward(
            cache, [replace(row, tree=tree) for row, tree in zip(rows, wrong, strict=True)]
        )


class KeepsNothing(KVCache):
    """Nodes stay where the pass has put them."""

    def keep(self, moves: Sequence[Move]) -> None:
        """Move none."""


class KeepsInTurn(KVCache):
    """Writes come before reads, the last move first."""

    def keep(self, moves: Sequence[Move]) -> None:
        for move in reversed(moves):
            super().keep([move])


class KeepsNothingTarget(Target):
    def new_cache(self) -> KVCache:
        return KeepsNothing(self.decoder.sizes, self.decoder.embedding.weight)


class KeepsInTurnTarget(Target):
    def new_cache(self) -> KVCache:
        return KeepsInTurn(self.decoder.sizes, self.decoder.embedding.weight)


Accept = Callable[[Answer, DraftTree, PassResult], tuple[list[int], int]]


def wrong_bonus(sequence: Answer, tree: DraftTree, found: PassResult) -> tuple[list[int], int]:
    """Takes the root's prediction for the bonus, wherever the path ends."""
    path, _ = accept(sequence, tree, found)
    return path, found.predictions[tree.root]


def one_more(sequence: Answer, tree: DraftTree, found: PassResult) -> tuple[list[int], int]:
    """Keeps one draft more than was accepted, where there is one."""
    path, bonus = accept(sequence, tree, found)
    child = next(
        (n for n in range(tree.root + 1, tree.num_nodes) if tree.parents[n] == path[-1]), 0
    )
    if not child or len(path) - tree.root > sequence.room:
        return path, bonus
    return [*path, child], found.predictions[child]


def own_prediction(sequence: Answer, tree: DraftTree, found: PassResult) -> tuple[list[int], int]:
    """A node judged by what is predicted after it instead of in its place: off by one."""
    shifted = list(found.predictions)
    for node in range(tree.root + 1, tree.num_nodes):
        shifted[tree.parents[node]] = found.predictions[node]
    path, _ = accept(sequence, tree, replace(found, predictions=shifted))
    return path, accept(sequence, tree, found)[1]


def through_rejected(sequence: Answer, tree: DraftTree, found: PassResult) -> tuple[list[int], int]:
    """Walks on through a rejected parent."""
    fine = [
        node
        for node in range(tree.root + 1, tree.num_nodes)
        if tree.tokens[node] == found.predictions[tree.parents[node]]
        and len(tree.path_to(node)) - 1 - tree.root <= sequence.room
    ]
    last = max(fine, key=lambda node: len(tree.path_to(node)), default=tree.root)
    return tree.path_to(last), found.predictions[last]


def mutation_cases() -> list[Case]:
    """Sessions in which long and short paths are accepted, alone and in batches."""
    return [
        Case(
            seed=0,
            lengths=lengths,
            frames=(number, number + 1, number + 1),
            drafts=(kinds.EXTRAPOLATION, kinds.PREVIOUS, kinds.HEAD),
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
        KeepsNothingTarget,
        KeepsInTurnTarget,
    ],
)
def test_a_mistake_planted_in_the_target_is_caught(kind: type[Target]) -> None:
    assert num_caught(lambda case: expect_lossless(case, target_of(kind, case))) > 0


@pytest.mark.parametrize("wrong", [wrong_bonus, own_prediction, one_more, through_rejected])
def test_a_mistake_planted_in_acceptance_is_caught(
    monkeypatch: pytest.MonkeyPatch, wrong: Accept
) -> None:
    monkeypatch.setattr(engines, "accept", wrong)
    assert num_caught(lambda case: expect_lossless(case, fast_target(decoder_of(0)))) > 0
