"""Drafts that know the answer and err to order, so that speed can be measured without training.

With random weights no draft source would ever be right. These know the tokens that plain decoding
gives (found beforehand, outside the timing) and keep as many of them as a given distribution says.
What a real source would cost is still paid: a draft head runs before its tree is overwritten.
Verified with exact match, so answers stay the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deft_client.types import ActOptions
from deft_policies.base import ActAnswer, ActRequest
from deft_policies.benchmark.replay import ReplayFrame
from deft_policies.decoding.autoregressive import AUTOREGRESSIVE
from deft_policies.decoding.decoder import DraftModels
from deft_policies.decoding.drafts.eagle import EagleHead, HeadSizes
from deft_policies.decoding.drafts.head import HeadDrafts
from deft_policies.decoding.drafts.sources import Guesses, Sources
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import DraftKind, Plan, TreeShape
from deft_policies.decoding.records import BatchProgress
from deft_policies.decoding.target import Prompts, TargetModel
from deft_policies.decoding.tree import DraftTree, TokenRange
from deft_policies.model.layout import StepRunner
from deft_policies.model.vla import OpenVLAModel
from deft_policies.openvla.policy import OpenVLAPolicy, PolicySettings

# Spec-VLA's Table 2, LIBERO-Goal: share of passes by accepted length 0..5.
SPEC_VLA_STRICT = (0.5024, 0.3328, 0.1396, 0.0223, 0.0019, 0.0)
SPEC_VLA_RELAXED = (0.2301, 0.1898, 0.3999, 0.1541, 0.0253, 0.0008)

_ACTION_LENGTH = 7
_HEAD_LEVELS = 5
_NUM_DRAWS = 4096
_BINS_OFF = 64  # a wrong guess is this far away, too far for any rule


@dataclass(frozen=True)
class Script:
    """How often drafts are right: by token for chains in the prefill, or by accepted length."""

    name: str
    right: float = 1.0  # of each token of each chain
    num_chains: int = 0  # riding in the prefill
    lengths: tuple[float, ...] = ()  # of the head's path, by accepted length; empty: no head
    is_guarded: bool = False

    @staticmethod
    def of_head(name: str, right: float, is_guarded: bool = False) -> "Script":
        """A head whose path is right for as long as every one of its tokens is."""
        shares = [right**length * (1 - right) for length in range(_HEAD_LEVELS)]
        lengths = (*shares, right**_HEAD_LEVELS)
        return Script(name, lengths=lengths, is_guarded=is_guarded)

    @property
    def method(self) -> Method:
        """Exact match by the one plan of this script."""
        riders = (DraftKind.RETRIEVAL,) if self.num_chains else ()
        rounds = (DraftKind.HEAD,) if self.lengths else (DraftKind.RETRIEVAL,)
        plan = Plan(self.name, riders, rounds, TreeShape(_HEAD_LEVELS, 8, 49))
        lossless = find_method("lossless")
        return replace(lossless, name=self.name, plans=(plan,), is_guarded=self.is_guarded)


class Dice:
    """Random numbers on the device, drawn beforehand and used in turn."""

    def __init__(self, values: Tensor) -> None:
        self._values = values  # [draw, ...]
        self._next = 0

    @staticmethod
    def coins(share: float, shape: tuple[int, ...], device: torch.device) -> "Dice":
        """True with this probability, in this shape."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand((_NUM_DRAWS, *shape), generator=generator)
        return Dice((drawn < share).to(device))

    @staticmethod
    def lengths(shares: Sequence[float], device: torch.device) -> "Dice":
        """0, 1, ... with these probabilities."""
        generator = torch.Generator().manual_seed(0)
        weights = torch.tensor(shares)
        drawn = torch.multinomial(weights, _NUM_DRAWS, replacement=True, generator=generator)
        return Dice(drawn.to(device))

    def roll(self, num_rows: int) -> Tensor:
        """One draw per row."""
        start = self._next % (_NUM_DRAWS - num_rows)
        self._next = start + num_rows
        return self._values[start : start + num_rows]


@dataclass(eq=False)
class Answers:
    """What a script's drafts know: the right tokens of the batch that is answered next."""

    script: Script
    tokens: Tensor  # [row, position]


@dataclass(frozen=True)
class ScriptedChains:
    """Whole actions in which every token is right with a given probability, several at a time."""

    answers: Answers
    coins: Dice  # of [chain, position]
    action_tokens: TokenRange
    kind = DraftKind.RETRIEVAL  # a stored answer, with errors
    steps_needed = 0
    guesses_once = True

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """Always: the answer is there."""
        return True

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: BatchProgress) -> Guesses:
        """Repeat the answer, with errors."""
        answer = self.answers.tokens[:, None]
        is_right = self.coins.roll(len(answer))
        tokens = torch.where(is_right, answer, spoil(answer, self.action_tokens))
        return Guesses(tokens, torch.ones_like(is_right))


class ScriptedHead(HeadDrafts):
    """A draft head that runs as ever; then one path of its tree is replaced by a scripted one.

    Kept tokens follow a distribution over accepted lengths, the rest of the path is wrong.
    """

    def __init__(
        self, head: EagleHead, target: TargetModel, runner: StepRunner, answers: Answers
    ) -> None:
        super().__init__(head, target, runner=runner)
        self._answers = answers
        self._lengths = Dice.lengths(answers.script.lengths, head.fc.weight.device)

    def grow(self, progress: BatchProgress, shape: TreeShape) -> DraftTree:
        """Grow the head's tree and put the scripted path in the place of its last nodes."""
        tree = super().grow(progress, shape)
        depth = min(shape.levels, progress.depth, tree.num_nodes - 1)
        answer = self._answers.tokens
        steps = torch.arange(depth, device=answer.device)
        places = (progress.num_committed[:, None] + steps).clamp(max=progress.length - 1)
        answer = answer.gather(1, places)
        is_right = steps < self._lengths.roll(len(answer))[:, None]
        path = torch.where(is_right, answer, spoil(answer, self._drafted))
        chain = torch.cat((progress.roots[:, None], path), dim=1)
        kept = torch.arange(tree.num_nodes - depth, device=answer.device)
        return DraftTree.side_by_side([tree.select(kept), DraftTree.chain(chain, self.kind.number)])


@dataclass(frozen=True, kw_only=True)
class ScriptedModels(DraftModels):
    """The draft sources of a script, in the place of those that were loaded."""

    answers: Answers

    def sources_for(self, target: TargetModel, method: Method) -> Sources:
        """Chains, and a head where there is one."""
        answers, script = self.answers, self.answers.script
        shape = (max(1, script.num_chains), _ACTION_LENGTH)
        coins = Dice.coins(script.right, shape, answers.tokens.device)
        chains = ScriptedChains(answers, coins, target.action_tokens)
        if self.head is None:
            return Sources((chains,), ())
        head = ScriptedHead(self.head, target, self.new_runner(), answers)
        return Sources((chains,), (head,))


class ScriptedPolicy(OpenVLAPolicy):
    """A policy whose drafts know the answer to every frame before it comes."""

    def __init__(
        self, policy: OpenVLAPolicy, script: Script, answers: dict[int, tuple[int, ...]]
    ) -> None:
        """`answers` are by the identity of the observation."""
        target = policy.parts.target
        self._answers = answers
        nothing = torch.zeros(0, _ACTION_LENGTH, dtype=torch.int64, device=target.device)
        self._next = Answers(script, nothing)
        models = ScriptedModels(
            head=random_head(target.model) if script.lengths else None,
            new_runner=policy.parts.drafts.new_runner,
            answers=self._next,
        )
        key = policy.info.default_statistics_key
        settings = PolicySettings(statistics_key=key, method=script.method)
        super().__init__(replace(policy.parts, drafts=models), settings)

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        """Tell the drafts what is right, then answer."""
        answers = [self._answers[id(request.observation)] for request in batch]
        self._next.tokens = torch.tensor(answers, device=self.parts.target.device)
        return super().act(batch)


def find_answers(
    policy: OpenVLAPolicy, frames: Sequence[ReplayFrame]
) -> dict[int, tuple[int, ...]]:
    """What plain decoding says to every frame."""
    options = ActOptions(decoding=AUTOREGRESSIVE)
    answers = {}
    for frame in frames:
        asked = replace(options, statistics_key=frame.statistics_key)
        request = ActRequest(frame.observation, options=asked)
        trace = policy.act([request])[0].chunk.trace
        assert trace is not None
        answers[id(frame.observation)] = trace.tokens
    return answers


def spoil(tokens: Tensor, action_tokens: TokenRange) -> Tensor:
    """Tokens of the same range, far away from these."""
    shifted = tokens - action_tokens.first + _BINS_OFF
    return shifted % len(action_tokens) + action_tokens.first


@torch.no_grad()
def random_head(model: OpenVLAModel) -> EagleHead:
    """A draft head of the published shape for this model, with random weights."""
    llm, weight = model.config.llm, model.decoder.embedding.weight
    sizes = HeadSizes(llm.width, llm.mlp, llm.heads, llm.kv_heads)
    with torch.device("meta"):
        head = EagleHead(sizes)
    head = head.to(weight.dtype).to_empty(device=weight.device)
    generator = torch.Generator(weight.device).manual_seed(0)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.fill_(1.0 if parameter is head.mlp_norm.weight else 0.0)
    return head.requires_grad_(False).eval()
