"""Drafts that know the answer and err to order, so that speed can be measured without training.

With random weights no draft source would ever be right. These know the tokens that plain decoding
gives (found beforehand, outside the timing) and keep as many of them as a given distribution says.
What a real source would cost is still paid: a draft head runs before its tree is overwritten.
Verified with exact match, so answers stay the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from deft_client.types import ActOptions
from deft_policies.base import ActRequest
from deft_policies.benchmark.replay import ReplayFrame
from deft_policies.decoding import kinds
from deft_policies.decoding.batch import Batch, Row
from deft_policies.decoding.clock import StageClock
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
from deft_policies.families.policy import VlaPolicy, _Frame
from deft_policies.model.draft_heads import EagleHead, head_sizes
from deft_policies.model.sizes import TokenRange
from deft_policies.model.vla import VlaNetwork
from scripts.reproduce.published import fit_acceptance

_ACTION_LENGTH = 7
_HEAD_LEVELS = 5
_NUM_DRAWS = 4096
_BINS_OFF = 64  # a wrong guess is this far away, too far for any rule


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
        behind = riders if self.goes_on else ()
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
    """What drafts know of one answer, on the host."""

    tokens: Tensor  # [place]
    in_chains: Tensor  # [chain, place], whether a token of a chain is right
    on_path: Tensor  # [place], whether one on the head's path is, if all before it are


class ScriptedAnswers:
    """What scripted drafts know of the rows that are on their way.

    All scripts have equally many chains: as many columns of a pass are theirs whoever drafts.
    """

    def __init__(self, scripts: Sequence[Script], num_tokens: int) -> None:
        """Of answers with so many tokens at most."""
        if len(counts := {one.num_chains for one in scripts if one.num_chains}) > 1:
            raise ValueError(
                f"scripts that share drafts have {sorted(counts)} chains, expected one"
            )
        self.shape = (max(counts, default=1), num_tokens)  # of chains
        self._dice = {
            one.name: (
                Dice(torch.tensor(one.right).expand(self.shape)),
                Dice(torch.tensor([0.0, *one.chances] + [0.0] * num_tokens)[:num_tokens]),
            )
            for one in scripts
        }
        self._rows = WeakKeyDictionary[Row, _Known]()
        nothing = torch.zeros(num_tokens, dtype=torch.int64)
        self._blank = _Known(nothing, nothing.expand(self.shape) > 0, nothing > 0)

    def add(self, row: Row, script: Script, tokens: tuple[int, ...]) -> None:
        """Say what is right for a row, and throw its coins."""
        chains, path = self._dice[script.name]
        padded = torch.tensor([*tokens, *[0] * self.shape[1]])[: self.shape[1]]
        self._rows[row] = _Known(padded, chains.roll(), path.roll())

    def of(self, rows: Sequence[Row | None]) -> list[_Known]:
        """Of each row; of one that nothing was said of, as when rounds are captured, zeros."""
        return [self._rows.get(row, self._blank) if row else self._blank for row in rows]


class ScriptedChains(DraftSource):
    """Whole actions in which every token is right with a given probability, several at a time."""

    kind = kinds.RETRIEVAL  # a stored answer, with errors
    needs = frozenset({FRAME})
    capturable = True

    def __init__(self, answers: ScriptedAnswers, action_tokens: TokenRange) -> None:
        self._answers, self._action_tokens = answers, action_tokens
        self._tokens = torch.zeros(0)  # [row, chain, place]

    def allocate(self, batch: Batch) -> None:
        """Room for the chains of every row."""
        shape = batch.capacity, *self._answers.shape
        with torch.inference_mode(False):
            self._tokens = torch.zeros(shape, dtype=torch.int64, device=batch.device)

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Repeat the answers, with errors."""
        known = self._answers.of(batch.rows)
        right = torch.stack([one.tokens for one in known])[:, None]
        is_right = torch.stack([one.in_chains for one in known])
        drafted = torch.where(is_right, right, spoil(right, self._action_tokens))
        self._tokens[batch.slots].copy_(drafted)

    def draft(self, batch: Batch, limits: DraftLimits) -> Chains:
        """The rest of what was said when the rows began."""
        tokens = self._tokens[batch.first : batch.first + batch.num_rows]
        return remaining_tokens(batch, tokens, torch.ones_like(tokens, dtype=torch.bool), limits)


class ScriptedHead(EagleDrafts):
    """A draft head that runs as ever; then one path of its tree is replaced by a scripted one.

    A token of the path is right by its own chance, and wrong behind one that is wrong.
    """

    def __init__(
        self, head: EagleHead, target: Target, method: Method, answers: ScriptedAnswers
    ) -> None:
        super().__init__(head, target, method)
        self._answers = answers
        self._tokens = self._is_right = torch.zeros(0)  # [row, place]

    def allocate(self, batch: Batch) -> None:
        """Room for the path of every row, too."""
        super().allocate(batch)
        shape = 2, batch.capacity, self._answers.shape[1]
        with torch.inference_mode(False):
            blank = torch.zeros(shape, dtype=torch.int64, device=batch.device)
        self._tokens, self._is_right = blank

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Learn what is right, too."""
        super().begin(batch, prompts, hidden)
        known = self._answers.of(batch.rows)
        self._tokens[batch.slots].copy_(torch.stack([one.tokens for one in known]))
        self._is_right[batch.slots].copy_(torch.stack([one.on_path for one in known]))

    def draft(self, batch: Batch, limits: DraftLimits) -> DraftTree:
        """Grow the head's tree and put the scripted path in the place of its last nodes."""
        tree = super().draft(batch, limits)
        depth = min(limits.shape.levels, limits.depth, tree.num_nodes - 1)
        answer, is_right = self._tokens[batch.slots], self._is_right[batch.slots]
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
    """Scripted draft sources, in the place of those that were loaded."""

    answers: ScriptedAnswers

    def makers(self, target: Target) -> dict[str, Maker]:
        """Chains in the place of retrieval, and a head where there is one."""
        answers, head = self.answers, self.head
        makers: dict[str, Maker] = {
            kinds.RETRIEVAL: lambda method: ScriptedChains(answers, target.action_tokens)
        }
        if head is not None:
            makers[kinds.HEAD] = lambda method: ScriptedHead(head, target, method, answers)
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
        model = policy.token_model
        self._scripts, self._answers = {one.name: one for one in scripts}, answers
        num_tokens = max(form.max_tokens for form in model.forms.values())
        self._known = ScriptedAnswers(scripts, num_tokens)
        has_head = any(one.chances for one in scripts)
        head = random_head(model.network) if has_head else None
        models = ScriptedModels(head=head, answers=self._known)
        key = policy.info.default_statistics_key
        super().__init__(model, ModelOptions(statistics_key=key), models, scripts[0].method)

    def warm_up(self, methods: Sequence[str] | None = None) -> None:
        """Capture what these scripts, or all, need beside the policy's own frames."""
        with self.model.runner.warming_up(), torch.inference_mode():
            self.capture(list(self._scripts) if methods is None else methods)

    def method_for(self, options: ActOptions) -> Method:
        """That of a script, by its name."""
        script = self._scripts.get(options.decoding or self.method.name)
        return super().method_for(options) if script is None else script.method

    def _frame(self, request: ActRequest, clock: StageClock) -> _Frame:
        """Tell the drafts what is right."""
        frame = super()._frame(request, clock)
        if frame.row is not None and (script := self._scripts.get(frame.row.method.name)):
            self._known.add(frame.row, script, self._answers[id(request.observation)])
        return frame


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
