"""Drafts that know the answer and err to order, so that speed can be measured without training.

With random weights no draft source would ever be right. These know the tokens that plain decoding
gives (found beforehand, outside the timing) and keep as many of them as a given distribution says.
What a real source would cost is still paid: a draft head runs before its tree is overwritten.
Verified with exact match, so answers stay the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deft_core.types import ActOptions
from deft_policies.base import PolicyRequest
from deft_policies.benchmark.replay import ReplayFrame
from deft_policies.decoding import kinds
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.drafts import Branches, DraftSource, Guesses
from deft_policies.decoding.drafts.heads import EagleDrafts
from deft_policies.decoding.methods import AUTOREGRESSIVE, Method, find_method
from deft_policies.decoding.plan import Plan, TreeShape
from deft_policies.decoding.planner import DraftModels, Maker
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Target
from deft_policies.decoding.warm_up import capture
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy, _RunningRequest
from deft_policies.model.draft_heads import EagleHead, head_sizes
from deft_policies.model.sizes import TokenRange
from deft_policies.model.vla import VlaNetwork
from scripts.reproduce.published import PUBLISHED_BEHIND, fit_acceptance

_ACTION_LENGTH = 7
_HEAD_LEVELS = 5
_NUM_DRAWS = 4096
_BINS_OFF = 64  # a wrong guess is this far away, too far for any rule
_SCRIPTED = "scripted"  # the kind of the chains, and under which an answer notes what is right


@dataclass(frozen=True)
class Script:
    """How often drafts are right: every token of chains in the prefill, or token by token.

    Without chains and without chances nothing is drafted.
    """

    name: str
    right: float | tuple[float, ...] = 1.0  # of each token of each chain
    num_chains: int = 0  # riding in the prefill
    goes_on: bool = True  # whether chains also draft behind the prefill
    chances: tuple[float, ...] = ()  # of tokens 2 to 7 on the head's path; empty: no head
    is_published: bool = False  # whether they are judged in Spec-VLA's own loop
    chain: int | None = None  # levels of a head that grows one branch; None: a whole tree

    @staticmethod
    def of_head(name: str, right: float, chain: int | None = None) -> "Script":
        """A head whose path is right for as long as every one of its tokens is."""
        chances = (right,) * (_ACTION_LENGTH - 1)
        return Script(name, chances=chances, chain=chain)

    @staticmethod
    def of_published(name: str, shares: Sequence[float]) -> "Script":
        """A head in the published loop whose passes accept 0..5 drafts with these shares."""
        chances, _ = fit_acceptance(shares, PUBLISHED_BEHIND)
        return Script(name, chances=chances, is_published=True)

    @staticmethod
    def like(name: str, method: Method, chances: Sequence[float]) -> "Script":
        """Drafts as a method's first plan makes them; `chances` are of tokens 1 to 7."""
        plan = method.plans[0]
        if kinds.HEAD in plan.rounds:
            is_published = method.rule.tokens_behind == PUBLISHED_BEHIND
            return Script(name, chances=tuple(chances[1:]), is_published=is_published)
        return Script(name, tuple(chances), num_chains=1, goes_on=bool(plan.rounds))

    @property
    def method(self) -> Method:
        """Exact match by the one plan of this script."""
        riders = (_SCRIPTED,) if self.num_chains else ()
        behind = riders if self.goes_on else ()
        rounds = (kinds.HEAD,) if self.chances else behind
        shape = TreeShape(_HEAD_LEVELS, 8, 49, is_full_depth=self.is_published)
        if self.chain is not None:
            shape = TreeShape.chain(self.chain)
        plan = Plan(self.name, riders, rounds, shape)
        method = find_method("lossless:guard=off")
        if self.is_published:
            method = replace(method, rule=find_method("spec-vla-published:radius=0").rule)
        return replace(method, name=self.name, plans=(plan,))


class Dice:
    """Coins that are thrown beforehand and used in turn."""

    def __init__(self, chances: Tensor) -> None:
        """True with these probabilities, in their shape."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand((_NUM_DRAWS, *chances.shape), generator=generator)
        self._values = drawn < chances  # [draw, ...]
        self._next = 0

    def roll(self) -> Tensor:
        """One draw."""
        self._next = (self._next + 1) % _NUM_DRAWS
        return self._values[self._next - 1]


@dataclass(frozen=True)
class _Known:
    """What drafts know of an answer."""

    tokens: list[int]
    chains: list[list[int]]  # whole answers, with errors
    on_path: list[bool]  # [place], whether a token on the head's path is right


class _Coins:
    """What is thrown for the answers of one script."""

    def __init__(self, script: Script, num_tokens: int) -> None:
        """Of answers with so many tokens at most."""
        shape = script.num_chains, num_tokens
        self._chains = Dice(torch.tensor(script.right).expand(shape))
        self._path = Dice(torch.tensor([0.0, *script.chances] + [0.0] * num_tokens)[:num_tokens])

    def throw(self, tokens: tuple[int, ...], action_tokens: TokenRange) -> _Known:
        """What drafts are to know of an answer with these tokens."""
        right = torch.tensor(tokens)
        is_right = self._chains.roll()[:, : len(tokens)]
        chains = torch.where(is_right, right, spoil(right, action_tokens))
        return _Known(list(tokens), chains.tolist(), self._path.roll().tolist())


class ScriptedChains(DraftSource):
    """Whole actions in which every token is right with a given probability, several at a time."""

    kind = _SCRIPTED

    def draft(self, sequence: Answer, depth: int) -> Guesses:
        """The rest of what was said when the answer began."""
        known: _Known = sequence.notes[_SCRIPTED]
        return [chain[sequence.count :][:depth] for chain in known.chains]


class ScriptedHead(EagleDrafts):
    """A draft head that runs as ever; then one path of its tree is replaced by a scripted one.

    A token of the path is right by its own chance, and wrong behind one that is wrong.
    """

    def draft_all(self, sequences: Sequence[Answer]) -> list[Guesses]:
        """Grow the head's trees and put the scripted path in the place of their last nodes."""
        pairs = zip(sequences, super().draft_all(sequences), strict=True)
        return [self._scripted(one, grown) for one, grown in pairs]

    def _scripted(self, sequence: Answer, grown: Guesses) -> Guesses:
        if not isinstance(grown, Branches):
            return grown
        depth = min(sequence.shape.levels, sequence.room, len(grown.tokens))
        known: _Known = sequence.notes[_SCRIPTED]
        first, path = sequence.count, list[int]()
        for place in range(first, first + depth):
            is_right = all(known.on_path[first : place + 1])
            token = known.tokens[place]
            path.append(token if is_right else _spoilt(token, self.drafted(sequence.method)))
        num_kept = len(grown.tokens) - depth
        parents = [0, *range(num_kept + 1, num_kept + depth)]
        return Branches([*grown.tokens[:num_kept], *path], [*grown.parents[:num_kept], *parents])


@dataclass(frozen=True, kw_only=True)
class ScriptedModels(DraftModels):
    """Scripted draft sources, beside or in the place of those that were loaded."""

    def makers(self, target: Target) -> dict[str, Maker]:
        """Chains, and a head where there is one."""
        head = self.head
        makers: dict[str, Maker] = {_SCRIPTED: ScriptedChains}
        if head is not None:
            makers[kinds.HEAD] = lambda: ScriptedHead(head, target)
        return super().makers(target) | makers


class ScriptedPolicy(VlaPolicy):
    """A policy whose drafts know the answer to every frame before it comes.

    Scripts are methods by their names. They share one engine, so that passes are captured once.
    """

    def __init__(
        self,
        policy: VlaPolicy,
        scripts: Sequence[Script],
        answers: Mapping[int, tuple[int, ...]],
    ) -> None:
        """The first script is the default; `answers` are by the identity of the observation."""
        model = policy.model
        self._scripts, self._answers = {one.name: one for one in scripts}, answers
        num_tokens = max(spec.max_tokens for spec in model.specs.values())
        self._coins = {one.name: _Coins(one, num_tokens) for one in scripts}
        has_head = any(one.chances for one in scripts)
        models = ScriptedModels(head=random_head(model.network) if has_head else None)
        key = policy.info.default_statistics_key
        super().__init__(model, ModelOptions(statistics_key=key), models, scripts[0].method)

    def warm_up(self, methods: Sequence[str] | None = None) -> None:
        """Capture passes; the policy that is scripted has captured what it sees with."""
        with self.model.runner.warming_up(), torch.inference_mode():
            capture(self.engine)

    def method_for(self, options: ActOptions) -> Method:
        """That of a script, by its name."""
        script = self._scripts.get(options.decoding or self.method.name)
        return super().method_for(options) if script is None else script.method

    def _request(self, request: PolicyRequest, clock: StageClock) -> _RunningRequest:
        """Tell the drafts what is right."""
        running = super()._request(request, clock)
        coins, target = self._coins.get(running.sequence.method.name), self.engine.target
        if coins is not None:
            tokens = self._answers[id(request.observation)]
            running.sequence.notes[_SCRIPTED] = coins.throw(tokens, target.action_tokens)
        return running


def find_answers(policy: VlaPolicy, frames: Sequence[ReplayFrame]) -> dict[int, tuple[int, ...]]:
    """What plain decoding says to every frame."""
    options = ActOptions(decoding=AUTOREGRESSIVE)
    answers = {}
    for frame in frames:
        asked = replace(options, statistics_key=frame.statistics_key)
        request = PolicyRequest(frame.observation, options=asked)
        trace = policy.act([request])[0].chunk.trace
        assert trace is not None
        answers[id(frame.observation)] = trace.tokens
    return answers


def spoil(tokens: Tensor, action_tokens: TokenRange) -> Tensor:
    """Tokens of the same range, far away from these."""
    shifted = tokens - action_tokens.first + _BINS_OFF
    return shifted % len(action_tokens) + action_tokens.first


def _spoilt(token: int, action_tokens: TokenRange) -> int:
    return int(spoil(torch.tensor(token), action_tokens))


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
