"""An engine over the stand-in of a GPU, whose passes are recorded, and one without captures."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import KeyMask
from deft_policies.decoding.planner import WIDEST, DraftModels
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Prompt, Target
from deft_policies.decoding.warm_up import capture
from deft_policies.memory import SessionMemory
from deft_policies.model.block_head import BlockHead, block_sizes
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.llama import LlamaDecoder, RotaryTable, first_layers
from deft_policies.model.sizes import LlamaSizes
from tests.fake_graphs import RecordingCapturer
from tests.policies.decoding.scripts import clock
from tests.tiny_target import ACTIONS, LENGTH, WIDTH, random_prompts, tiny_decoder

FORM = AnswerSpec.action(ActionSpace.in_bins(LENGTH))
TEXT = AnswerSpec(12, stop=5)
LONGEST_ANSWER = 12
PROMPTS = (1, 7, 3, 2, 5, 4, 6, 2)  # lengths, behind the patches


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
    block = random_block(decoder().sizes)
    return DraftModels(
        head, key_mask=KeyMask.CAUSAL, medusa=medusa, block=block, small_model=small_model
    )


def random_block(target: LlamaSizes, num_layers: int = 2, seed: int = 0) -> BlockHead:
    """A block head that reads one layer of a tiny target beside the final states."""
    head = BlockHead(block_sizes(target, ACTIONS, (1,), places=7, num_layers=num_layers, rank=8))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3, generator=generator)
    return head.requires_grad_(False).eval()


class Captured:
    """An engine whose passes were captured by the stand-in, and one that captures nothing."""

    def __init__(self, rows: int = 8, widest: int = WIDEST) -> None:
        self.capturer = RecordingCapturer()
        self.runner = StepRunner(self.capturer.capture, Reserve(rows, 5, 20))
        target = Target(decoder(), ACTIONS, runner=self.runner)
        self.engine = Engine(target, models(), widest, longest_answer=LONGEST_ANSWER)
        with torch.inference_mode(), self.runner.warming_up():
            capture(self.engine)
        self.num_captured = self.capturer.num_captured

    def check_nothing_was_captured_since(self) -> None:
        assert self.capturer.num_captured == self.num_captured
        assert not self.runner.uncaptured


def plain_engine() -> Engine:
    """One that captures nothing."""
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
