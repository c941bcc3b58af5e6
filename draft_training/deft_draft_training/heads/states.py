"""What a block head learns from: one answer of a target of any family, and its hidden states.

With P prompt positions and an answer a_1..a_L, states are known at P + L - 1 positions: those of
the prompt, and those of a_1..a_{L-1}. Each of them has the hidden states behind some layers,
side by side, the final ones last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deft_core.types import ActOptions, Observation
from deft_draft_training.errors import ConfigError
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.drafts import Guesses, ModelSource
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import AUTOREGRESSIVE, find_method
from deft_policies.decoding.plan import Plan
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Prompt, Target
from deft_policies.errors import PolicyError
from deft_policies.families.policy import VlaPolicy


@dataclass(frozen=True)
class StatesSample:
    """One answer."""

    episode: int
    states: Tensor  # [P + L - 1, states * width]
    tokens: Tensor  # [L] int64, the target's greedy answer

    @property
    def num_prompt(self) -> int:
        """Prompt positions."""
        return len(self.states) - len(self.tokens) + 1


class _Recorder(ModelSource):
    """Drafts nothing, and keeps the hidden states of every answer."""

    kind = "states"
    reads_prompts = True
    reads_states = True
    reads_ends = True

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}  # by the answer's number

    def observe_prompt(self, sequence: Answer, prompt: Prompt, hidden: Tensor) -> None:
        """Keep all positions but the last, which comes with the pass."""
        sequence.notes[self.kind] = [hidden[:-1].clone()]

    def observe(self, sequence: Answer, hidden: Tensor, logits: Tensor) -> None:
        """Keep what was committed."""
        assert sequence.last is not None
        sequence.notes[self.kind].append(hidden[sequence.last.path].clone())

    def release(self, sequence: Answer) -> None:
        """Put the parts together."""
        self.found[sequence.number] = torch.cat(sequence.notes[self.kind])

    def draft_all(self, sequences: Sequence[Answer]) -> list[Guesses]:
        """Nothing."""
        return [[] for _ in sequences]


class StatesRecorder:
    """Lets a policy's target answer, and reads its states behind some layers on the way."""

    def __init__(self, policy: VlaPolicy, layers: Sequence[int], reasoning: bool = False) -> None:
        model = policy.model_for(ActOptions(want_reasoning=reasoning))
        self._policy, self._model, self._source = policy, model, _Recorder()
        target: Target = model.target
        try:
            target.read_layers(layers)
        except PolicyError as error:
            raise ConfigError(str(error)) from error
        models = DraftModels(others={self._source.kind: lambda: self._source})
        longest = max(spec.max_tokens for spec in model.specs.values())
        self._engine = Engine(target, models, model.widest, longest)
        plan = Plan("states", (), (self._source.kind,))
        self._method = replace(find_method(AUTOREGRESSIVE), plans=(plan,), is_guarded=False)

    @torch.inference_mode()
    def sample(
        self, observations: Sequence[Observation], episodes: Sequence[int], dtype: torch.dtype
    ) -> list[StatesSample]:
        """Answers and states of some frames."""
        clock, spec = StageClock(self._model.device), self._model.specs[self._policy.find_key(None)]
        rows = [Answer(self._method, spec) for _ in observations]
        prompts = self._model.see(
            [self._model.complete(observation) for observation in observations], clock
        )
        self._engine.decode(prompts, rows, clock)
        samples = []
        for row, episode in zip(rows, episodes, strict=True):
            states = self._source.found.pop(row.number).to("cpu", dtype)
            tokens = torch.tensor(row.tokens)
            samples.append(StatesSample(episode, states.clone(), tokens))
        return samples


@dataclass(frozen=True)
class StatesBatch:
    """Samples side by side, and the blocks that are drafted behind some of their tokens."""

    states: Tensor  # [row, position, states * width], padded behind the last
    anchors: Tensor  # [row, block], positions of the tokens that blocks begin with
    first: Tensor  # [row, block], those tokens
    wanted: Tensor  # [row, block, place], the tokens behind them; any where there are none
    before: Tensor  # [row, block, place], the token before each
    says: Tensor  # [row, block, place], positions whose final states lead to the wanted tokens
    counts: Tensor  # [row, block, place] bool: whether there is such a token

    @property
    def width(self) -> int:
        """Of all states of a position."""
        return int(self.states.shape[2])


def collate_blocks(
    samples: Sequence[StatesSample],
    places: int,
    num_blocks: int,
    seeds: Sequence[int],
    device: torch.device,
) -> StatesBatch:
    """Draw blocks of each sample: behind all of its tokens where they are no more than that."""
    num_blocks = min(num_blocks, max(len(sample.tokens) for sample in samples) - 1)
    anchors, firsts, wanted, before, says, counts = ([] for _ in range(6))
    for sample, seed in zip(samples, seeds, strict=True):
        length = len(sample.tokens)
        if length < 2:
            raise ConfigError("an answer of one token has nothing that could be drafted")
        generator = torch.Generator().manual_seed(seed)
        every = torch.randperm(length - 1, generator=generator)
        chosen = every.repeat(-(-num_blocks // len(every)))[:num_blocks]  # indices of tokens
        ahead = chosen[:, None] + torch.arange(1, places + 1)
        is_there = ahead < length
        ahead = ahead.clamp(max=length - 1)
        # Where other answers are longer, a block is there twice: it counts once.
        is_there &= (torch.arange(num_blocks) < len(every))[:, None]
        anchors.append(sample.num_prompt + chosen)
        firsts.append(sample.tokens[chosen])
        wanted.append(sample.tokens[ahead])
        before.append(sample.tokens[ahead - 1])
        says.append(sample.num_prompt + ahead - 1)
        counts.append(is_there)
    states = pad_sequence([sample.states.float() for sample in samples], batch_first=True)
    columns = (anchors, firsts, wanted, before, says, counts)
    return StatesBatch(states.to(device), *(torch.stack(column).to(device) for column in columns))
