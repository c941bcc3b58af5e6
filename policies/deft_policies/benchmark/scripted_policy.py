"""OpenVLA answering with scripted drafts: see `scripted`."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from deft_client.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    Observation,
    ServerInfo,
)
from deft_policies.base import ActRequest, Session
from deft_policies.benchmark.frames import Frame
from deft_policies.benchmark.scripted import Dice, ScriptedChains, ScriptedHead
from deft_policies.decoding.acceptance.sampled import Sampling
from deft_policies.decoding.action_space import ActionSpace
from deft_policies.decoding.drafts.combine import Sources
from deft_policies.decoding.drafts.eagle import EagleHead, HeadSizes
from deft_policies.decoding.drafts.head import HeadDrafts, HeadOptions
from deft_policies.decoding.history import ActionHistory
from deft_policies.decoding.methods import Decoder, DecodeRow
from deft_policies.decoding.plan import DraftKind, Plan, TreeShape
from deft_policies.decoding.presets import preset_by_name
from deft_policies.decoding.target import Prompts
from deft_policies.decoding.trace import StageClock
from deft_policies.model.graphs import CudaRecorder, RecordedRunner
from deft_policies.model.layout import EagerRunner, StepRunner
from deft_policies.model.vla import OpenVLAModel
from deft_policies.openvla.decoders import Decoders, DecodingChoice
from deft_policies.openvla.policy import OpenVLAPolicy, OpenVLASession, PolicySettings
from deft_policies.openvla.target import OpenVLATarget

_ACTION_LENGTH = 7
_HEAD_LEVELS = 5


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


class ScriptedDecoders(Decoders):
    """One decoder, whatever is asked for."""

    def __init__(self, target: OpenVLATarget, decoder: Decoder, head: ScriptedHead | None) -> None:
        super().__init__(target, Sampling())
        self._decoder, self._head = decoder, head

    def check(self, choice: DecodingChoice) -> None:
        """Let everything pass."""

    def warm_up(
        self, choice: DecodingChoice, prompts: Prompts, spaces: Sequence[ActionSpace]
    ) -> None:
        """Nothing: the frames before the counted ones do it."""

    def decode(
        self,
        choice: DecodingChoice,
        prompts: Prompts,
        rows: Sequence[DecodeRow],
        clock: StageClock,
        wants_margins: bool,
    ) -> list[DecodeTrace]:
        """Decode; the newest step of every history is the answer."""
        if self._head is not None:
            answers = [row.history.own[-1] for row in rows]
            self._head.answer = torch.tensor(answers, device=prompts.embeds.device)
        return self._decoder.decode(prompts, rows, clock, wants_margins)


class ScriptedPolicy:
    """A policy whose sessions know the answer to every frame before it comes."""

    def __init__(self, policy: OpenVLAPolicy, answers: dict[int, tuple[int, ...]]) -> None:
        """`answers` are by the identity of the observation."""
        self._policy = policy
        self._answers = answers

    @property
    def info(self) -> ServerInfo:
        """That of the policy inside."""
        return self._policy.info

    def open_session(self) -> Session:
        """As the policy inside."""
        return self._policy.open_session()

    def check(self, observation: Observation, options: ActOptions) -> None:
        """As the policy inside."""
        self._policy.check(observation, options)

    def warm_up(self) -> None:
        """Nothing beyond what the first frames do."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActionChunk]:
        """Put the answers into the sessions, then answer."""
        for request in batch:
            assert isinstance(request.session, OpenVLASession)
            answer = self._answers[id(request.observation)]
            learnt = request.session.history.acceptance
            request.session.history = ActionHistory(own=deque([answer]), acceptance=learnt)
        return self._policy.act(batch)


def find_answers(policy: OpenVLAPolicy, frames: Sequence[Frame]) -> dict[int, tuple[int, ...]]:
    """What plain decoding says to every frame."""
    options = ActOptions(decoding="autoregressive")
    answers = {}
    for frame in frames:
        asked = replace(options, statistics_key=frame.statistics_key)
        request = ActRequest(frame.observation, policy.open_session(), asked)
        trace = policy.act([request])[0].trace
        assert trace is not None
        answers[id(frame.observation)] = trace.tokens
    return answers


def script_policy(
    policy: OpenVLAPolicy, script: Script, answers: dict[int, tuple[int, ...]]
) -> ScriptedPolicy:
    """Give a policy the drafts of a script. Verified with exact match, so answers stay the same."""
    target = policy.parts.target
    device, actions = target.device, target.action_tokens
    coins = Dice.coins(script.right, (max(1, script.num_chains), _ACTION_LENGTH), device)
    head = None
    if script.lengths:
        runner: StepRunner = EagerRunner()
        if target.has_fixed_shapes:
            runner = RecordedRunner(CudaRecorder())
        options = HeadOptions(whole_vocabulary=False)
        real = HeadDrafts(random_head(target.model), target, options, runner)
        head = ScriptedHead(real, Dice.lengths(script.lengths, device), actions)
    sources = Sources((ScriptedChains(coins, actions),), () if head is None else (head,))
    riders = (ScriptedChains.kind,) if script.num_chains else ()
    rounds = (ScriptedChains.kind,) if head is None else (DraftKind.HEAD,)
    plan = Plan(script.name, riders, rounds, TreeShape(_HEAD_LEVELS, 8, 49))
    preset = replace(
        preset_by_name("lossless"),
        name=script.name,
        plans=(plan,),
        is_guarded=script.is_guarded,
    )
    decoders = ScriptedDecoders(target, Decoder(target, preset, sources), head)
    key = policy.info.default_statistics_key
    settings = PolicySettings(statistics_key=key, decoding=DecodingChoice(script.name))
    return ScriptedPolicy(OpenVLAPolicy(policy.parts, settings, decoders), answers)


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
