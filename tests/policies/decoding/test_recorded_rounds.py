"""Rounds that are recorded: one launch each, nothing recorded afterwards, the same answers.

A recorder stands for CUDA graphs: it repeats operations on the memory they were recorded with, so
that what a round read of the host is frozen, and what moved since is an error.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.batch import AnswerSpec, Row
from deft_policies.decoding.drafts.retrieval import RetrievalIndex, frame_keys
from deft_policies.decoding.engine import DraftModels, Engine
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import KeyMask, RopeOffset, TreeShape
from deft_policies.decoding.target import Prompts, Target
from deft_policies.memory import SessionMemory
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.llama import LlamaDecoder, first_layers
from tests.launches import LaunchCounter, UncountedRunner
from tests.policies.decoding.scripts import METHODS, clock
from tests.tiny_target import ACTIONS, LENGTH, WIDTH, greedy, random_prompts, tiny_decoder

MOST_PER_ROUND = 12  # the launch of the recording and the read of what it says among them
RESERVE = Reserve(rows=1, shortest=16, longest=16)
FORM = AnswerSpec.action(ActionSpace.in_bins(LENGTH))
TEXT = AnswerSpec(24, 5)
HOST_DRAFTS = {"fly", "lvspec", "small-model", "specvlm"}  # their model's passes are recorded
DRAFTING = [method.name for method in METHODS if method.plans[0].kinds]


@lru_cache(maxsize=1)
def decoder() -> LlamaDecoder:
    return tiny_decoder()


def models(runner: StepRunner, key_mask: KeyMask = KeyMask.CAUSAL) -> DraftModels:
    torch.manual_seed(0)
    head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False)
    medusa = MedusaHeads(WIDTH, 6).requires_grad_(False)
    stored = random_prompts(decoder(), [3, 4], 1)
    actions = torch.tensor(greedy(decoder(), stored))
    return DraftModels(
        head=head,
        rope_offset=RopeOffset.CORRECT,
        key_mask=key_mask,
        medusa=medusa,
        index=RetrievalIndex(frame_keys(stored), actions, "tiny"),
        small_model=Target(first_layers(decoder(), 1), ACTIONS, runner=runner),
    )


def engine_on(runner: StepRunner, key_mask: KeyMask = KeyMask.CAUSAL) -> Engine:
    return Engine(Target(decoder(), ACTIONS, runner=runner), models(runner, key_mask))


class Recorded:
    """An engine on recorded steps, which promises methods one after the other."""

    def __init__(self, reserve: Reserve = RESERVE, key_mask: KeyMask = KeyMask.CAUSAL) -> None:
        self.runner = UncountedRunner(reserve)
        self.engine = engine_on(self.runner, key_mask)
        self._batches = [prompts_of(rows, 0) for rows in reserve.batches]

    def promise(self, method: Method, form: AnswerSpec = FORM) -> None:
        with self.runner.warming_up(), torch.inference_mode():
            self.engine.capture(method, self._batches, form)
        self.num_captured = self.runner.num_captured

    def check(self, method: Method, sizes: Sequence[int], form: AnswerSpec = FORM) -> None:
        """Answers as where nothing is recorded, and no recording more."""
        fresh = engine_on(StepRunner())
        assert serve(self.engine, method, sizes, form) == serve(fresh, method, sizes, form)
        assert self.runner.num_captured == self.num_captured
        assert not self.runner.uncaptured


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded()


def prompts_of(rows: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return random_prompts(decoder(), [rng.randint(2, 8) for _ in range(rows)], seed)


def serve(
    engine: Engine, method: Method, sizes: Sequence[int], form: AnswerSpec = FORM
) -> list[tuple[tuple[int, ...], int]]:
    """Tokens and passes of sessions over frames, so many rows at a time."""
    memories, answers = [SessionMemory(noise=one) for one in range(8)], []
    with torch.inference_mode():
        for frame, size in enumerate(sizes):
            rows = [Row(method, form, memories[one]) for one in range(size)]
            engine.decode(prompts_of(size, frame % 3), rows, clock())
            for one, row in enumerate(rows):
                memories[one] = row.memory
                assert row.trace is not None
                assert sum(p.accepted_length + 1 for p in row.trace.passes) >= len(row.tokens)
                answers.append((tuple(row.tokens), row.num_passes))
    return answers


@pytest.mark.parametrize("name", [*DRAFTING, "autoregressive"])
def test_a_recorded_round_is_one_launch_and_answers_as_one_that_is_not(
    recorded: Recorded, name: str
) -> None:
    """Sources that ask a model of their own, step by step, are counted without that."""
    method = small(name)
    recorded.promise(method)
    recorded.check(method, [1, 1, 1])
    assert count_rounds(recorded, method, name not in HOST_DRAFTS) > 2


@pytest.mark.parametrize("name", ["lossless", "lvspec", "spec-vla-published"])
def test_rounds_of_two_rows_are_recorded_too(name: str) -> None:
    method, recorded = small(name), Recorded(replace(RESERVE, rows=2))
    recorded.promise(method)
    recorded.check(method, [1, 2, 2])


def small(name: str) -> Method:
    """With small trees, which are recorded faster."""
    method = replace(find_method(name), is_guarded=False)
    shape = method.plans[0].shape
    if shape.paths:
        return method.with_shape(TreeShape.branches(2, 2))
    sizes = (min(shape.levels, 2), min(shape.top_k, 2), min(shape.num_guesses, 5))
    smaller = TreeShape(*sizes, is_full_depth=shape.is_full_depth)
    return method.with_shape(smaller) if method.plans[0].kinds else method


def count_rounds(recorded: Recorded, method: Method, is_whole: bool) -> int:
    """Rounds of three frames; every one is a launch, and few operations beside it."""
    memory, num_rounds, runner = SessionMemory(), 0, recorded.runner
    for frame in range(3):
        row = Row(method, FORM, memory)
        with torch.inference_mode():
            recorded.engine.start(prompts_of(1, frame), [row])
            recorded.engine.step(clock())
            while not row.is_done:
                before = len(runner.before_rounds)
                with LaunchCounter() as counter:
                    runner.counter = counter
                    recorded.engine.step(clock())
                runner.counter = None
                assert len(runner.before_rounds) == before + 1
                assert not is_whole or counter.total + 1 <= MOST_PER_ROUND, counter.counts
                num_rounds += 1
        memory = row.memory
    return num_rounds


@pytest.mark.parametrize("text", ["autoregressive", "lossless:guard=off"])
def test_text_is_verified_in_recorded_widths(recorded: Recorded, text: str) -> None:
    recorded.promise(find_method(text), TEXT)
    recorded.check(find_method(text), [1, 1, 1], TEXT)


def test_a_head_that_sees_the_prompt_alone_is_recorded_too() -> None:
    method, mask, sizes = small("spec-vla"), KeyMask.PREFIX_ONLY, [1, 1]
    recorded = Recorded(RESERVE, mask)
    recorded.promise(method)
    answers = serve(recorded.engine, method, sizes)
    assert answers == serve(engine_on(StepRunner(), mask), method, sizes)
    assert not recorded.runner.uncaptured


def test_answers_beyond_the_reserve_record_nothing(
    recorded: Recorded,
) -> None:
    promised, other = small("lossless"), find_method("top-k:guard=off,k=7")
    recorded.promise(promised)
    recorded.check(promised, [3, 1, 4])
    recorded.check(other, [1, 1])  # nobody promised that


def test_rows_that_join_recorded_ones_and_leave_them_change_nothing() -> None:
    method, recorded = small("spec-vla-strict"), Recorded(replace(RESERVE, rows=4))
    recorded.promise(method)
    engine = recorded.engine
    with torch.inference_mode():
        early = [Row(method, FORM, SessionMemory()) for _ in range(2)]
        engine.start(prompts_of(2, 0), early)
        engine.step(clock())
        late = Row(method, FORM, SessionMemory())
        engine.start(prompts_of(1, 1), [late])
        engine.cancel(early[0])
        while not (late.is_done and early[1].is_done):
            engine.step(clock())
    assert tuple(early[1].tokens) == tuple(greedy(decoder(), prompts_of(2, 0))[1])
    assert tuple(late.tokens) == tuple(greedy(decoder(), prompts_of(1, 1))[0])
