"""Passes that are captured once and replayed: nothing is captured later, and answers are the same.

A recorder stands for CUDA graphs: it repeats operations on the memory that they were recorded with,
so that what a pass read of the host is frozen, and what has moved since is an error.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.captured import shapes_of
from deft_policies.decoding.drafts.captured_head import steps_of
from deft_policies.decoding.engine import DraftModels, Engine
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import KeyMask
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Prompt, Target
from deft_policies.memory import SessionMemory
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.llama import LlamaDecoder, RotaryTable, first_layers
from tests.policies.decoding.scripts import METHODS, clock
from tests.recorder import RecordingCapturer
from tests.tiny_target import ACTIONS, LENGTH, WIDTH, greedy, random_prompts, tiny_decoder

FORM = AnswerSpec.action(ActionSpace.in_bins(LENGTH))
TEXT = AnswerSpec(12, stop=5)
LONGEST_ANSWER = 12
PROMPTS = (1, 7, 3, 2, 5, 4, 6, 2)  # lengths, behind the patches

# What two robots at once had to run uncaptured before: other radii, traces, log-probabilities.
MIXED = (
    "autoregressive",
    "within-bins:radius=1",
    "within-bins:radius=3",
    "spec-vla-strict",
    "lossless:drafts=previous+head,guard=off",
    "lossless:drafts=medusa,guard=off",
    "fly",
    "autoregressive:temperature=1",
)


@lru_cache(maxsize=1)
def decoder() -> LlamaDecoder:
    found = tiny_decoder()
    found.rotary = RotaryTable(replace(found.sizes, max_positions=512))
    return found


@lru_cache(maxsize=1)
def models() -> DraftModels:
    torch.manual_seed(0)
    head = EagleHead(head_sizes(WIDTH, 24, 2, 2, max_positions=256)).requires_grad_(False)
    medusa = MedusaHeads(WIDTH, 6).requires_grad_(False)
    medusa.weight.normal_(std=0.1)
    small_model = Target(first_layers(decoder(), 1), ACTIONS)
    return DraftModels(head, key_mask=KeyMask.CAUSAL, medusa=medusa, small_model=small_model)


class Captured:
    """An engine whose passes were captured by the stand-in, and one that captures nothing."""

    def __init__(self, rows: int = 8) -> None:
        self.capturer = RecordingCapturer()
        self.runner = StepRunner(self.capturer.capture, Reserve(rows, 5, 20))
        target = Target(decoder(), ACTIONS, runner=self.runner)
        self.engine = Engine(target, models(), longest_answer=LONGEST_ANSWER)
        with torch.inference_mode(), self.runner.warming_up():
            self.engine.capture()
        self.num_captured = self.capturer.num_captured

    def check_nothing_was_captured_since(self) -> None:
        assert self.capturer.num_captured == self.num_captured
        assert not self.runner.uncaptured


@pytest.fixture(scope="module")
def captured() -> Captured:
    return Captured()


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine(Target(decoder(), ACTIONS), models(), longest_answer=LONGEST_ANSWER)


def prompts_of(sizes: Sequence[int], seed: int) -> list[Prompt]:
    return random_prompts(decoder(), list(sizes), seed)


def said(answer: Answer) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Tokens, the target's own, and passes."""
    return tuple(answer.tokens), tuple(answer.target_tokens), answer.num_passes


def play(
    engine: Engine, methods: Sequence[Method], spec: AnswerSpec = FORM, num_frames: int = 3
) -> list[object]:
    """What is answered when sessions decode together, a method each, frame after frame."""
    memories, found = [SessionMemory(noise=one) for one in range(len(methods))], list[object]()
    with torch.inference_mode():
        for frame in range(num_frames):
            both = zip(methods, memories, strict=True)
            rows = [Answer(method, spec, memory) for method, memory in both]
            engine.decode(prompts_of(PROMPTS[: len(rows)], frame % 2), rows, clock())
            memories = [row.memory for row in rows]
            found += map(said, rows)
    return found


@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
def test_a_method_answers_as_where_nothing_is_captured(
    captured: Captured, plain: Engine, method: Method
) -> None:
    method = replace(method, is_guarded=False)
    assert play(captured.engine, [method]) == play(plain, [method])
    captured.check_nothing_was_captured_since()


def test_any_methods_share_the_captured_passes(captured: Captured, plain: Engine) -> None:
    methods = [find_method(name) for name in MIXED]
    assert play(captured.engine, methods) == play(plain, methods)
    captured.check_nothing_was_captured_since()


def test_an_answer_among_others_is_the_answer_alone(captured: Captured) -> None:
    methods = [find_method(name) for name in MIXED]
    together = play(captured.engine, methods, num_frames=1)
    prompts = prompts_of(PROMPTS, 0)
    for method, prompt, among in zip(methods, prompts, together, strict=True):
        alone = Answer(method, FORM, SessionMemory(noise=methods.index(method)))
        with torch.inference_mode():
            captured.engine.decode([prompt], [alone], clock())
        assert said(alone) == among, method.name


def test_traces_and_log_probabilities_need_no_pass_of_their_own(
    captured: Captured, plain: Engine
) -> None:
    def found(engine: Engine) -> list[Answer]:
        rows = [
            Answer(find_method(name), FORM, wants_margins=True, wants_log_probs=True)
            for name in MIXED
        ]
        with torch.inference_mode():
            engine.decode(prompts_of(PROMPTS, 0), rows, clock())
        return rows

    for replayed, computed in zip(found(captured.engine), found(plain), strict=True):
        assert said(replayed) == said(computed)
        assert replayed.trace is not None
        assert replayed.margins == pytest.approx(computed.margins, abs=1e-4)
        assert replayed.log_probs == pytest.approx(computed.log_probs, abs=1e-4)
        assert len(replayed.margins) == len(replayed.log_probs) == LENGTH
        for one, other in zip(replayed.records, computed.records, strict=True):
            assert (one.tree.tokens, one.predictions) == (other.tree.tokens, other.predictions)
    captured.check_nothing_was_captured_since()


def test_texts_are_decoded_by_captured_passes(captured: Captured, plain: Engine) -> None:
    methods = [find_method(name) for name in ("autoregressive", "lossless:guard=off")]
    assert play(captured.engine, methods, TEXT) == play(plain, methods, TEXT)
    captured.check_nothing_was_captured_since()


def test_answers_that_join_and_leave_change_nothing(captured: Captured) -> None:
    """Also while passes of plain decoding run ahead of what the host has read."""
    engine, rng = captured.engine, random.Random(5)
    for seed in range(6):
        prompts = prompts_of(PROMPTS, seed)
        names = [rng.choice(("autoregressive", *MIXED[3:6])) for _ in prompts]
        rows = [Answer(find_method(name), FORM) for name in names]
        with torch.inference_mode():
            engine.start(prompts[:5], rows[:5])
            for _ in range(rng.randint(1, 4)):
                engine.step(clock())
            engine.cancel(rows[1])
            engine.start(prompts[5:], rows[5:])
            while engine.rows:
                engine.step(clock())
        del rows[1]
        wanted = [one for index, one in enumerate(greedy(decoder(), prompts)) if index != 1]
        assert [tuple(row.tokens) for row in rows] == wanted
    captured.check_nothing_was_captured_since()


def test_more_answers_than_slots_wait_for_one(captured: Captured) -> None:
    prompts = prompts_of([*PROMPTS, *PROMPTS], 7)
    rows = [Answer(find_method("autoregressive"), FORM) for _ in prompts]
    with torch.inference_mode():
        captured.engine.decode(prompts, rows, clock())
    assert [tuple(row.tokens) for row in rows] == greedy(decoder(), prompts)
    captured.check_nothing_was_captured_since()


def test_plain_decoding_runs_ahead_of_the_host(captured: Captured) -> None:
    """Two passes at most are unread, so that the device never waits for the host."""
    engine = captured.engine
    (prompt,), row = prompts_of([3], 1), Answer(find_method("autoregressive"), FORM)
    unread = []
    with torch.inference_mode():
        engine.start([prompt], [row])
        while engine.rows:
            engine.step(clock())
            unread.append(row.num_unread)
    assert max(unread) == 2
    assert tuple(row.tokens) == greedy(decoder(), [prompt])[0]


def test_what_is_captured_depends_on_the_reserve_alone(captured: Captured) -> None:
    reserve = captured.runner.reserve
    shapes = shapes_of(reserve, captured.engine.captured.widest, True)
    assert len(set(shapes)) == len(shapes)
    of_head = len(steps_of(reserve.batches)) + 1  # and that of prompts
    assert captured.num_captured == len(shapes) + of_head
