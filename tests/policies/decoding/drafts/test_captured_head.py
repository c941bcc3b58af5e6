"""Drafting in one captured step against drafting operation by operation: the same trees.

Two sources of one head draft for twins of the same answers. A recorder stands for CUDA graphs, and
hidden states are overwritten as soon as they were shown, as the next pass does.
"""

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from deft_policies.decoding.captured import Layout
from deft_policies.decoding.drafts import Branches
from deft_policies.decoding.drafts.captured_head import LARGEST, bytes_of, steps_of
from deft_policies.decoding.drafts.heads import EagleDrafts
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import KeyMask, RopeOffset, TreeShape
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Prompt, Target
from deft_policies.decoding.trace import PassRecord
from deft_policies.decoding.tree import merge
from deft_policies.memory import SessionMemory
from deft_policies.model.draft_heads import HeadPasses
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.kv_cache import KVCache
from tests.fake_graphs import RecordingCapturer
from tests.launches import LaunchCounter
from tests.policies.decoding.drafts.test_head import SIZES, random_head
from tests.policies.decoding.scripts import answer_of
from tests.tiny_target import ACTIONS, VOCABULARY, WIDTH, random_prompts, tiny_decoder

LENGTH = 12  # tokens of an answer
RESERVE = Reserve(8, 5, 20)
LAYOUT = Layout(RESERVE, 64, LENGTH + 1)
SHAPES = (
    LARGEST,
    replace(LARGEST, is_full_depth=True),
    TreeShape(3, 2, 8),
    TreeShape(4, 5, 21),
    TreeShape.chain(5),
    TreeShape(1, 8, 3),
)
METHODS = (
    find_method("autoregressive"),
    find_method("spec-vla"),  # over the whole vocabulary
    find_method("ratio-test"),
    find_method("ratio-test:temperature=0.5"),
)


@lru_cache
def make_sources(
    rope_offset: RopeOffset, key_mask: KeyMask
) -> tuple[StepRunner, Target, list[EagleDrafts]]:
    """An eager source and a captured one; what they remember is of answers, and of slots."""
    runner = StepRunner(RecordingCapturer().capture, RESERVE)
    target = Target(tiny_decoder(), ACTIONS, runner=runner)
    head = random_head().requires_grad_(False)
    sources = [EagleDrafts(head, target, rope_offset, key_mask) for _ in range(2)]
    with torch.inference_mode(), runner.warming_up():
        sources[1].capture(LAYOUT)
    return runner, target, sources


class Twins:
    """Answers that both sources draft for, and what both have been shown."""

    def __init__(
        self,
        seed: int = 0,
        rope_offset: RopeOffset = RopeOffset.CORRECT,
        key_mask: KeyMask = KeyMask.CAUSAL,
    ) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.runner, self.target, self.sources = make_sources(rope_offset, key_mask)
        self.runner.uncaptured.clear()
        self.num_captured = self.runner.num_captured
        self.answers: dict[int, list[Answer]] = {}  # by slot, one of each source

    def join(self, slot: int, method: Method, shape: TreeShape) -> None:
        """Begin an answer in a slot: a prompt, and the pass that answers it."""
        size = self.rng.randint(1, 9)
        (prompt,) = random_prompts(self.target.decoder, [size], self.rng.randrange(1000))
        hidden = torch.randn(prompt.length, WIDTH, generator=self.generator)
        found = []
        for source in self.sources:
            answer = answer_of(SessionMemory(), length=LENGTH)
            answer.method, answer.shape, answer.slot = method, shape, slot
            answer.noise_key = 77 + slot
            embeds, seen = prompt.embeds.clone(), hidden.clone()
            with torch.inference_mode():
                source.observe_prompt(answer, replace(prompt, embeds=embeds), seen)
            embeds.fill_(9.0)
            seen.fill_(9.0)
            found.append(answer)
        self.answers[slot] = found
        self.commit(slot, 0)

    def commit(self, slot: int, num_accepted: int) -> None:
        """A pass that accepts a path through a tree of 16 nodes."""
        nodes = [0, *sorted(self.rng.sample(range(1, 16), num_accepted))]
        new = [self.rng.randrange(VOCABULARY) for _ in nodes]
        hidden = torch.randn(16, WIDTH, generator=self.generator)
        for source, answer in zip(self.sources, self.answers[slot], strict=True):
            answer.tokens = [*answer.tokens, *new]
            tree = merge([0], [("test", [[1] * 15])], 99)
            answer.last = PassRecord(False, tree, [], nodes, 0, [])
            seen = hidden.clone()
            with torch.inference_mode():
                source.observe(answer, seen, torch.zeros(16, 1))
            seen.fill_(9.0)

    def draft(self) -> list[tuple[Answer, Branches, Branches]]:
        """What both sources draft for all answers to which guesses are of use."""
        slots = sorted(slot for slot, (one, _) in self.answers.items() if one.room > 0)
        rows = [[self.answers[slot][index] for slot in slots] for index in range(2)]
        with torch.inference_mode():
            drafts = [one.draft_all(some) for one, some in zip(self.sources, rows, strict=True)]
        found = []
        for answer, eager, captured in zip(rows[0], *drafts, strict=True):
            assert isinstance(eager, Branches)
            assert isinstance(captured, Branches)
            found.append((answer, eager, captured))
        return found

    def check(self) -> None:
        """Draft, and compare."""
        for answer, eager, captured in self.draft():
            about = (answer.method.name, answer.shape, answer.slot)
            assert eager.tokens == captured.tokens, about
            assert eager.parents == captured.parents, about
            assert captured.log_probs == pytest.approx(eager.log_probs, rel=1e-3, abs=1e-3)
            assert (eager.odds is None) == (captured.odds is None)
            if eager.odds is not None and captured.odds is not None:
                torch.testing.assert_close(captured.odds, eager.odds, atol=1e-4, rtol=1e-2)

    def check_nothing_was_captured_since(self) -> None:
        assert self.runner.num_captured == self.num_captured
        assert not self.runner.uncaptured


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_a_captured_step_grows_the_same_trees(num_rows: int) -> None:
    twins = Twins(num_rows)
    for slot in range(num_rows):
        twins.join(slot, METHODS[slot % 2], SHAPES[(slot + num_rows) % len(SHAPES)])
    for _ in range(4):
        twins.check()
        for slot in range(num_rows):
            twins.commit(slot, twins.rng.randrange(3))
    twins.check_nothing_was_captured_since()


@pytest.mark.parametrize("method", METHODS, ids=[one.name for one in METHODS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_is_cut_out_of_the_largest(method: Method, shape: TreeShape) -> None:
    twins = Twins()
    twins.join(0, method, shape)
    for _ in range(5):  # until little is missing
        twins.check()
        twins.commit(0, 1)
    twins.check_nothing_was_captured_since()


@pytest.mark.parametrize("key_mask", list(KeyMask))
@pytest.mark.parametrize("rope_offset", list(RopeOffset))
def test_places_and_masks_are_those_of_the_head(key_mask: KeyMask, rope_offset: RopeOffset) -> None:
    twins = Twins(1, rope_offset, key_mask)
    for slot in range(3):
        twins.join(slot, METHODS[1], LARGEST)
    for _ in range(3):
        twins.check()
        for slot in range(3):
            twins.commit(slot, slot)
    twins.check_nothing_was_captured_since()


@pytest.mark.parametrize("seed", range(4))
def test_answers_join_and_leave_in_any_slots(seed: int) -> None:
    twins = Twins(seed)
    for _ in range(12):
        slot = twins.rng.randrange(8)
        if slot in twins.answers and twins.rng.random() < 0.5:
            del twins.answers[slot]
        else:
            twins.join(slot, twins.rng.choice(METHODS), twins.rng.choice(SHAPES))
        if twins.answers:
            twins.check()
        for one in twins.answers:
            if twins.answers[one][0].room > 0:  # else the engine has ended it
                twins.commit(one, twins.rng.randrange(3))
    twins.check_nothing_was_captured_since()


def test_trees_that_are_not_captured_are_grown_all_the_same_and_said() -> None:
    twins = Twins()
    shapes = (TreeShape.template(3, 3), TreeShape(2, 9, 20), LARGEST)
    for slot, shape in enumerate(shapes):
        twins.join(slot, METHODS[0], shape)
    for _ in range(2):
        twins.check()
        for slot in range(len(shapes)):
            twins.commit(slot, 1)
    assert {key[1] for key in twins.runner.uncaptured if isinstance(key, tuple)} == {*shapes[:2]}
    assert twins.runner.num_captured == twins.num_captured


def test_more_pairs_than_a_step_takes_are_appended_before() -> None:
    twins = Twins()
    twins.join(0, METHODS[0], LARGEST)
    twins.commit(0, 2)  # two passes behind which nothing was drafted
    twins.check()
    twins.commit(0, 1)
    twins.check()


def test_a_default_server_captures_at_most_12_steps_of_a_head() -> None:
    steps = steps_of(RESERVE.batches)
    assert len(set(steps)) == len(steps)
    twins = Twins()
    assert twins.num_captured == len(steps) + 1 <= 12  # and one for prompts


def test_a_round_is_one_upload_one_step_and_one_read() -> None:
    twins = Twins()
    for slot in range(3):
        twins.join(slot, METHODS[0], SHAPES[slot])
    twins.draft()
    for slot in range(3):
        twins.commit(slot, 1)
    captured, replays = twins.sources[1], list[object]()
    run = twins.runner.run
    twins.runner.run = lambda key, *others: replays.append(key) or ()  # type: ignore[method-assign]
    with LaunchCounter() as launches, torch.inference_mode():
        captured.draft_all([twins.answers[slot][1] for slot in range(3)])
    twins.runner.run = run  # type: ignore[method-assign]
    assert len(replays) == 1
    assert {name: one for name, one in launches.counts.items() if one} == {"copy_": 1}


def test_what_is_planned_is_what_is_set_aside() -> None:
    twins = Twins()
    captured = twins.sources[1]._captured
    assert captured is not None
    cache = captured._cache.data
    taken = cache.nbytes + sum(
        one.nbytes for one in vars(captured).values() if isinstance(one, torch.Tensor)
    )
    planned = bytes_of(LAYOUT, replace(SIZES, vocabulary=VOCABULARY), 4)["draft head"]
    assert 0.9 * taken <= planned <= taken


def test_fused_kernels_run_a_head_as_its_modules_do() -> None:
    pytest.importorskip("triton", reason="fused kernels need Triton")
    from tests.triton_twins import Counted

    head, launch = random_head().requires_grad_(False), Counted()
    generator = torch.Generator().manual_seed(0)

    def pairs(num_tokens: int) -> list[torch.Tensor]:
        return [torch.randn(2, num_tokens, WIDTH, generator=generator) for _ in range(2)]

    before, behind = pairs(5), pairs(3)
    whole = [torch.cat(both, dim=1) for both in zip(before, behind, strict=True)]
    expected = head(*whole)[:, 5:].flatten(0, 1)
    for kernels in (None, launch.kernels):
        cache = KVCache(head.sizes, head.fc.weight)
        cache.fix(2, 48, None)
        passes = HeadPasses(head, cache, kernels)
        for slot in range(2):
            passes.read(*(one[slot] for one in before), torch.tensor(slot))
        places = torch.arange(5, 8).expand(2, -1)
        seen = (torch.arange(32) <= places[:, :, None])[:, None]
        attention = passes.attention(behind[0], places, places, seen)
        found = passes.run(*(one.flatten(0, 1) for one in behind), attention)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        kept = attention.of_rows_out(torch.tensor([[2], [0]]))
        found = passes.run(*(one.flatten(0, 1) for one in behind), kept)
        torch.testing.assert_close(found, expected[[2, 3]], atol=1e-4, rtol=1e-4)
    assert {*launch.launched} == {"rms_norm", "gate_times_up"}


def test_prompts_take_the_places_of_longer_ones() -> None:
    """What is padding behind a short prompt is of a longer one that was read before."""
    twins = Twins()
    prompts: list[Prompt] = []
    for length in (9, 1):
        prompts += random_prompts(twins.target.decoder, [length])
        answer = answer_of(SessionMemory(), length=LENGTH)
        answer.slot = 0
        hidden = torch.full((prompts[-1].length, WIDTH), float("nan") if length == 9 else 1.0)
        with torch.inference_mode():
            twins.sources[1].observe_prompt(answer, prompts[-1], hidden)
    assert torch.isfinite(twins.sources[1]._cache.data).all()
