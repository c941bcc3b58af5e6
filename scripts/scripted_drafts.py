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
from deft_policies.decoding import kinds
from deft_policies.decoding.batch import Batch
from deft_policies.decoding.drafts import FRAME, Chains, DraftLimits, DraftSource, remaining_tokens
from deft_policies.decoding.drafts.heads import EagleDrafts
from deft_policies.decoding.engine import DraftModels
from deft_policies.decoding.kinds import source_number
from deft_policies.decoding.methods import AUTOREGRESSIVE, Method, find_method
from deft_policies.decoding.plan import Loop, Plan, TreeShape
from deft_policies.decoding.steps import Maker
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.draft_heads import EagleHead, head_sizes
from deft_policies.model.sizes import TokenRange
from deft_policies.model.staging import to_device
from deft_policies.model.vla import VlaNetwork
from scripts.reproduce.published import fit_acceptance

_ACTION_LENGTH = 7
_HEAD_LEVELS = 5
_NUM_DRAWS = 4096
_MOST_ROWS = 16
_BINS_OFF = 64  # a wrong guess is this far away, too far for any rule


@dataclass(frozen=True)
class Script:
    """How often drafts are right: every token of chains in the prefill, or token by token."""

    name: str
    right: float | tuple[float, ...] = 1.0  # of each token of each chain
    num_chains: int = 0  # riding in the prefill
    goes_on: bool = True  # whether chains also draft behind the prefill
    chances: tuple[float, ...] = ()  # of tokens 2 to 7 on the head's path; empty: no head
    loop: Loop = Loop.LEAN
    chain: int | None = None  # levels of a head that grows one branch; None: a whole tree

    @staticmethod
    def of_head(name: str, right: float, chain: int | None = None) -> "Script":
        """A head whose path is right for as long as every one of its tokens is."""
        chances = (right,) * (_ACTION_LENGTH - 1)
        return Script(name, chances=chances, chain=chain)

    @staticmethod
    def of_published(name: str, shares: Sequence[float]) -> "Script":
        """A head in the published loop whose passes accept 0..5 drafts with these shares."""
        chances, _ = fit_acceptance(shares, Loop.PUBLISHED)
        return Script(name, chances=chances, loop=Loop.PUBLISHED)

    @staticmethod
    def like(name: str, method: Method, chances: Sequence[float]) -> "Script":
        """Drafts as a method's first plan makes them; `chances` are of tokens 1 to 7."""
        plan = method.plans[0]
        if kinds.HEAD in plan.rounds:
            return Script(name, chances=tuple(chances[1:]), loop=method.loop)
        return Script(name, tuple(chances), num_chains=1, goes_on=bool(plan.rounds))

    @property
    def method(self) -> Method:
        """Exact match by the one plan of this script."""
        riders = (kinds.RETRIEVAL,) if self.num_chains else ()
        behind = (kinds.RETRIEVAL,) if self.goes_on else ()
        rounds = (kinds.HEAD,) if self.chances else behind
        shape = TreeShape(_HEAD_LEVELS, 8, 49, is_full_depth=self.loop is Loop.PUBLISHED)
        if self.chain is not None:
            shape = TreeShape.chain(self.chain)
        plan = Plan(self.name, riders, rounds, shape)
        return replace(
            find_method("lossless"),
            name=self.name,
            plans=(plan,),
            is_guarded=False,
            loop=self.loop,
        )


class Dice:
    """Coins that are thrown beforehand and used in turn."""

    def __init__(self, chances: Tensor, device: torch.device) -> None:
        """True with these probabilities, in their shape."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand((_NUM_DRAWS, *chances.shape), generator=generator)
        self._values = (drawn < chances).to(device)  # [draw, ...]
        self._next = 0

    def roll(self, num_rows: int) -> Tensor:
        """One draw per row."""
        start = self._next % (_NUM_DRAWS - num_rows)
        self._next = start + num_rows
        return self._values[start : start + num_rows]


class Answers:
    """What a script's drafts know of the batch that is answered next.

    In tensors that stay where they are, because rounds that are recorded read them. Rows beyond
    the batch are like its first.
    """

    def __init__(self, script: Script, device: torch.device, num_tokens: int) -> None:
        self.script = script
        self._coins = Dice(torch.tensor([0.0, *script.chances]), device)
        with torch.inference_mode(False):
            self.tokens = torch.zeros(_MOST_ROWS, num_tokens, dtype=torch.int64, device=device)
            # Where the head's path is right if it is so before, [row, position].
            self.is_right = torch.zeros_like(self.tokens)

    def take(self, tokens: Sequence[tuple[int, ...]]) -> None:
        """Learn the next batch, and throw the coins for it."""
        more = _MOST_ROWS - len(tokens)
        self.tokens.copy_(to_device([*tokens, *[tokens[0]] * more], self.tokens.device))
        if self.script.chances:
            self.is_right[: len(tokens)] = self._coins.roll(len(tokens))


class ScriptedChains(DraftSource):
    """Whole actions in which every token is right with a given probability, several at a time."""

    kind = kinds.RETRIEVAL  # a stored answer, with errors
    needs = frozenset({FRAME})
    capturable = True

    def __init__(self, answers: Answers, coins: Dice, action_tokens: TokenRange) -> None:
        """`coins` are of [chain, position]."""
        self._answers, self._coins, self._action_tokens = answers, coins, action_tokens
        self._tokens = torch.zeros(0)  # [row, chain, position]

    def allocate(self, batch: Batch) -> None:
        """Room for the chains of every row."""
        shape = self._coins.roll(batch.capacity).shape
        with torch.inference_mode(False):
            self._tokens = torch.zeros(shape, dtype=torch.int64, device=batch.device)

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Repeat the answers, with errors."""
        here = slice(batch.first, batch.first + batch.num_rows)
        answer = self._answers.tokens[here, None]
        is_right = self._coins.roll(len(answer))
        self._tokens[here] = torch.where(is_right, answer, spoil(answer, self._action_tokens))

    def draft(self, batch: Batch, limits: DraftLimits) -> Chains:
        """The rest of what was said when the rows began."""
        tokens = self._tokens[batch.first : batch.first + batch.num_rows]
        return remaining_tokens(batch, tokens, torch.ones_like(tokens, dtype=torch.bool), limits)


class ScriptedHead(EagleDrafts):
    """A draft head that runs as ever; then one path of its tree is replaced by a scripted one.

    A token of the path is right by its own chance, and wrong behind one that is wrong.
    """

    def __init__(self, head: EagleHead, target: Target, method: Method, answers: Answers) -> None:
        super().__init__(head, target, method)
        self._answers = answers

    def draft(self, batch: Batch, limits: DraftLimits) -> DraftTree:
        """Grow the head's tree and put the scripted path in the place of its last nodes."""
        tree = super().draft(batch, limits)
        depth = min(limits.shape.levels, limits.depth, tree.num_nodes - 1)
        num_rows = len(limits.roots)
        answer, is_right = self._answers.tokens[:num_rows], self._answers.is_right[:num_rows]
        steps = torch.arange(depth, device=answer.device)
        places = (batch.count[:, None] + steps).clamp(max=answer.shape[1] - 1)
        answer, is_right = answer.gather(1, places), is_right.gather(1, places).cummin(dim=1).values
        path = torch.where(is_right > 0, answer, spoil(answer, self._drafted))
        chain = torch.cat((limits.roots[:, None], path), dim=1)
        kept = torch.arange(tree.num_nodes - depth, device=answer.device)
        return DraftTree.side_by_side(
            [tree.select(kept), DraftTree.chain(chain, source_number(self.kind))]
        )


@dataclass(frozen=True, kw_only=True)
class ScriptedModels(DraftModels):
    """The draft sources of a script, in the place of those that were loaded."""

    answers: Answers

    def makers(self, target: Target) -> dict[str, Maker]:
        """Chains in the place of retrieval, and a head where there is one."""
        answers, script, head = self.answers, self.answers.script, self.head

        def chains(method: Method) -> DraftSource:
            shape = max(1, script.num_chains), answers.tokens.shape[1]
            chances = torch.tensor(script.right).expand(shape)
            coins = Dice(chances, answers.tokens.device)
            return ScriptedChains(answers, coins, target.action_tokens)

        makers: dict[str, Maker] = {kinds.RETRIEVAL: chains}
        if head is not None:
            makers[kinds.HEAD] = lambda method: ScriptedHead(head, target, method, answers)
        return super().makers(target) | makers


class ScriptedPolicy(VlaPolicy):
    """A policy whose drafts know the answer to every frame before it comes."""

    def __init__(
        self, policy: VlaPolicy, script: Script, answers: dict[int, tuple[int, ...]]
    ) -> None:
        """`answers` are by the identity of the observation."""
        model = policy.token_model
        self._answers = answers
        num_tokens = max(len(tokens) for tokens in answers.values())
        self._next = Answers(script, model.device, num_tokens)
        models = ScriptedModels(
            head=random_head(model.network) if script.chances else None,
            answers=self._next,
        )
        key = policy.info.default_statistics_key
        super().__init__(model, ModelOptions(statistics_key=key), models, script.method)

    def warm_up(self, methods: Sequence[str] | None = None) -> None:
        """Capture what this script's own drafts need beside the policy's."""
        with self.model.runner.warming_up(), torch.inference_mode():
            self.capture(methods or ())

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        """Tell the drafts what is right, then answer."""
        answers = [self._answers[id(request.observation)] for request in batch]
        self._next.take(answers)
        return super().act(batch)


def find_answers(policy: VlaPolicy, frames: Sequence[ReplayFrame]) -> dict[int, tuple[int, ...]]:
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
def random_head(model: VlaNetwork) -> EagleHead:
    """A draft head of the published shape for this model, with random weights."""
    llm, weight = model.config.llm, model.decoder.embedding.weight
    sizes = head_sizes(llm.width, llm.mlp_width, llm.num_heads, llm.num_kv_heads)
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
