"""Random traffic: every answer must be that of the same request alone, whatever happens beside it.

Rows join between any two rounds, several in a message, and are cancelled between any two calls. The
slow twin of an answer is an engine of its own. Plans are pinned, because a guard chooses by time.
"""

import logging
import random
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import pytest
import torch

from deft_policies.decoding.acceptance.rule import ActionSpace, DimensionGroup
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Row
from deft_policies.decoding.target import Prompt, Target
from deft_policies.memory import SessionMemory
from deft_policies.model.draft_heads import EagleHead, MedusaHeads, head_sizes
from deft_policies.model.llama import LlamaDecoder, first_layers
from tests.draws import draws
from tests.policies.decoding.scripts import clock
from tests.policies.decoding.test_any_length import decoder, prompt
from tests.tiny_target import ACTIONS, WIDTH

pytestmark = pytest.mark.promise

EXACT = (
    "autoregressive",
    "lossless:plan=memory",
    "lossless:plan=memory+recycled",
    "lossless:drafts=extrapolation+previous,guard=off",
    "lossless:drafts=previous+head,guard=off",
    "lossless:drafts=ngram+recycled,guard=off",
    "lossless:drafts=previous-answer,guard=off",
    "lossless:drafts=medusa,guard=off",
    "small-model",
    "specvlm",
    "pld",
    "token-recycling",
)
RELAXED = ("deft:plan=memory", "spec-vla", "spec-vla-published", "fly:guard=off", "top-k:guard=off")
SAMPLED = ("autoregressive", "lossless:plan=memory", "ratio-test")
STOP = 5
logger = logging.getLogger(__name__)
NEAR_TIE = 1e-5  # of two logits, in float32


@dataclass(frozen=True)
class Request:
    """All that an answer may depend on."""

    method: str
    temperature: float
    text_length: int
    picture: int
    spec: AnswerSpec
    memory: SessionMemory

    def row(self) -> Row:
        return Row(method_of(self.method, self.temperature), self.spec, self.memory, True)


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    own: tuple[int, ...]
    margins: tuple[float, ...]
    passes: tuple[tuple[int, int], ...]
    memory: SessionMemory

    @staticmethod
    def of(row: Row) -> "Answer":
        assert row.is_finite
        assert row.trace is not None
        passes = tuple((one.accepted_length, one.bonus) for one in row.trace.passes)
        margins = row.trace.margins
        return Answer(tuple(row.tokens), tuple(row.target_tokens), margins, passes, row.memory)

    def is_near(self, other: "Answer") -> bool:
        """Whether they part where the two likeliest tokens are as good as equal."""
        pairs = enumerate(zip(self.own, other.own, strict=False))
        parted = next((place for place, (mine, theirs) in pairs if mine != theirs), None)
        return parted is not None and min(self.margins[parted], other.margins[parted]) < NEAR_TIE


@lru_cache
def method_of(text: str, temperature: float) -> Method:
    method = find_method(text)
    return method.with_sampling(temperature, 9) if temperature else method


@dataclass(frozen=True)
class Models:
    """All that decodes, in one format."""

    dtype: torch.dtype

    def engine(self) -> Engine:
        return Engine(Target(self.decoder, ACTIONS), self.drafting)

    @cached_property
    def decoder(self) -> LlamaDecoder:
        return deepcopy(decoder()).to(self.dtype)

    @cached_property
    def drafting(self) -> DraftModels:
        torch.manual_seed(0)
        sizes = head_sizes(WIDTH, 24, 2, 2, max_positions=512)
        small = Target(first_layers(self.decoder, 1), ACTIONS)
        head, medusa = EagleHead(sizes).to(self.dtype), MedusaHeads(WIDTH, 4).to(self.dtype)
        return DraftModels(
            head=head.requires_grad_(False),
            medusa=medusa.requires_grad_(False),
            small_model=small,
        )

    def prompts(self, requests: Sequence["Request"]) -> list[Prompt]:
        each = [prompt(one.text_length, one.picture) for one in requests]
        return [replace(one, embeds=one.embeds.to(self.dtype)) for one in each]

    def alone(self, request: "Request") -> "Answer":
        key = repr(request)
        if key not in self.answers:
            row = request.row()
            with torch.inference_mode():
                engine = Engine(self.twin, self.drafting)
                engine.decode(self.prompts([request]), [row], clock())
            self.answers[key] = Answer.of(row)
        return self.answers[key]

    @cached_property
    def twin(self) -> Target:
        """Keeps nothing of any row, and is made only once: in bfloat16 that takes long."""
        return Target(self.decoder, ACTIONS)

    @cached_property
    def answers(self) -> dict[str, "Answer"]:
        return {}  # by the request, in words


FORMATS = {"float32": Models(torch.float32), "bfloat16": Models(torch.bfloat16)}


SPACES = {
    length: ActionSpace(
        (DimensionGroup.MOVE,) * (length - 1) + (DimensionGroup.GRIP,),
        (1.0,) * length,
        (None,) * (length - 1) + (ACTIONS.first + 24,),
    )
    for length in (5, 7)
}


def a_form(rng: random.Random) -> AnswerSpec:
    if rng.random() < 0.6:
        return AnswerSpec.action(SPACES[rng.choice((5, 7))])
    return AnswerSpec(rng.choice((1, 3, 12, 30)), STOP, SPACES[7])


def a_memory(rng: random.Random, noise: int) -> SessionMemory:
    """Of a session that is new, or has acted some times and perhaps written."""
    memory = SessionMemory(noise=noise)
    length = rng.choice((5, 7))
    own = [rng.randrange(ACTIONS.first, ACTIONS.last) for _ in range(length)]
    for _ in range(rng.choice((0, 1, 4))):
        own[rng.randrange(length)] = rng.randrange(ACTIONS.first, ACTIONS.last)
        memory = memory.after_action(tuple(own), tuple(own), 1.0)
    if rng.random() < 0.5:
        memory = memory.after_text(tuple(rng.choices(range(72), k=rng.choice((2, 20)))))
    return memory


class Traffic:
    """One seeded play on one engine."""

    def __init__(self, seed: int, models: Models) -> None:
        self.rng = random.Random(seed)
        self.models, self.engine = models, models.engine()
        self.asked: dict[Row, Request] = {}
        self.ended: list[tuple[Request, Answer]] = []
        self.kinds = [self._kind() for _ in range(self.rng.choice((1, 1, 2, 4)))]

    def _kind(self) -> tuple[str, float]:
        chance = self.rng.random()
        if chance < 0.15:
            return self.rng.choice(SAMPLED), 0.7
        return self.rng.choice(EXACT if chance < 0.75 else RELAXED), 0.0

    def _request(self) -> Request:
        rng = self.rng
        method, temperature = rng.choice(self.kinds)
        noise = rng.randrange(3)
        if self.ended and rng.random() < 0.3:  # a session that goes on
            memory = rng.choice(self.ended)[1].memory
        else:
            memory = a_memory(rng, noise)
        length, picture = rng.randint(1, 9), rng.randrange(6)
        return Request(method, temperature, length, picture, a_form(rng), memory)

    def _join(self) -> None:
        some = [self._request() for _ in range(self.rng.choice((1, 1, 2, 3)))]
        rows = [one.row() for one in some]
        self.engine.start(self.models.prompts(some), rows)
        self.asked.update(zip(rows, some, strict=True))

    def _cancel(self) -> None:
        if self.asked and self.rng.random() < 0.15:
            row = self.rng.choice(list(self.asked))
            self.engine.cancel(row)
            del self.asked[row]

    def play(self, num_messages: int = 6) -> list[tuple[Request, Answer]]:
        """The answers that ended, and what they were asked with."""
        with torch.inference_mode():
            while num_messages or self.asked:
                self._cancel()
                if num_messages and self.rng.random() < 0.5:
                    num_messages -= 1
                    self._join()
                    self._cancel()
                for row in self.engine.step(clock()):
                    self.ended.append((self.asked.pop(row), Answer.of(row)))
        return self.ended


def check(plays: Sequence[int], precision: str) -> None:
    """Compare every answer of some plays with the same request alone."""
    seen: Counter[str] = Counter()
    models = FORMATS[precision]
    for seed in plays:
        for request, answer in Traffic(seed, models).play():
            twin = models.alone(request)
            seen["answers"] += 1
            if precision == "float32" and answer.is_near(twin):
                seen["near ties"] += 1
                continue
            found = replace(answer, margins=())
            assert found == replace(twin, margins=()), f"play {seed}: {request}"
    logger.info("%s: %s", precision, dict(seen))
    assert seen["answers"] > 4 * len(plays)
    assert seen["near ties"] <= 0.005 * seen["answers"]


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("part", range(3))
def test_every_answer_is_that_of_its_request_alone(part: int, precision: str) -> None:
    check(range(part, draws(24), 3), precision)


def test_an_empty_slot_keeps_nothing_of_a_wider_pass() -> None:
    """Its row ended between the join and the first pass of the row behind it."""
    check([1172], "float32")
