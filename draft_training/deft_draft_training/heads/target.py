"""The target as training sees it: answers, features, its own head, and a fingerprint."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deft_core.types import ActOptions, Observation
from deft_draft_training.errors import ConfigError
from deft_draft_training.heads.samples import HeadSample
from deft_policies import catalog
from deft_policies.base import PolicyRequest
from deft_policies.errors import PolicyError
from deft_policies.families.loading import load_token_policy
from deft_policies.families.openvla import OpenVLA
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.sizes import TokenRange

_AUTOREGRESSIVE = ActOptions(decoding="autoregressive", want_trace=True)


@dataclass(frozen=True, eq=False)
class FeatureTarget:
    """A loaded policy whose answers and hidden states a draft head learns from."""

    policy: VlaPolicy

    @property
    def width(self) -> int:
        """Features of a hidden state."""
        return self.policy.model.network.config.llm.width

    @property
    def actions(self) -> TokenRange:
        """Token ids that stand for bins."""
        return self.policy.model.target.action_tokens

    @property
    def table(self) -> Tensor:
        """The embedding of every token, [token, width]."""
        return self.policy.model.target.decoder.embedding.weight.detach()

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of tokens, [..., width]."""
        with torch.no_grad():
            return self.policy.model.target.embed(tokens)

    @property
    def weight(self) -> Tensor:
        """Rows of the target's head for the action tokens, [token, width]."""
        rows = slice(self.actions.first, self.actions.last + 1)
        return self.policy.model.target.decoder.head.weight.detach()[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the action tokens; gradients reach `hidden`, never the head."""
        return hidden.to(self.weight.dtype) @ self.weight.T

    def every_logit(self, hidden: Tensor) -> Tensor:
        """Logits of the whole vocabulary, what `spec-vla` drafts from."""
        weight = self.policy.model.target.decoder.head.weight.detach()
        return hidden.to(weight.dtype) @ weight.T

    @property
    def _openvla(self) -> OpenVLA:
        """Heads learn from models of one picture before the prompt."""
        model = self.policy.model
        if not isinstance(model, OpenVLA):
            raise PolicyError(f"draft heads are trained for openvla and ecot, not {model.family}")
        return model

    def fingerprint(self) -> str:
        """A digest of the weights that features depend on: equal for equal checkpoints."""
        return self.policy.model.network.fingerprint()

    def sample(
        self, observations: Sequence[Observation], episodes: Sequence[int], dtype: torch.dtype
    ) -> list[HeadSample]:
        """Let the target answer, then read its features over prompt and answer in one forward."""
        requests = [
            PolicyRequest(observation, options=_AUTOREGRESSIVE) for observation in observations
        ]
        traces = [answer.chunk.trace for answer in self.policy.act(requests)]
        tokens = [torch.tensor(trace.tokens) for trace in traces if trace is not None]
        parts = self._openvla
        with torch.no_grad():
            fitted = [parts.images.fit(observation.image) for observation in observations]
            patches = parts.network.see(parts.pixels(fitted))
            prompts = [
                torch.tensor(parts.encode(observation.instruction)) for observation in observations
            ]
            hidden = self._features(patches, prompts, tokens)
        return [
            HeadSample(
                episode=episodes[row],
                prompt_ids=prompts[row],
                patches=patches[row].to("cpu", dtype),
                hidden=hidden[row].to("cpu", dtype),
                tokens=tokens[row],
            )
            for row in range(len(observations))
        ]

    def _features(
        self, patches: Tensor, prompts: Sequence[Tensor], tokens: Sequence[Tensor]
    ) -> list[Tensor]:
        """Hidden states after the final norm at every position but the last token's, by row."""
        model = self._openvla.network
        ids = [torch.cat([prompt, own[:-1]]) for prompt, own in zip(prompts, tokens, strict=True)]
        padded = pad_sequence(ids, batch_first=True)
        hidden = model.decoder(model.compose(patches, padded.to(patches.device)))
        lengths = [patches.shape[1] + len(token) for token in ids]
        return [hidden[row, :length] for row, length in enumerate(lengths)]


def load_target(flags: argparse.Namespace) -> FeatureTarget:
    """Load the target that the flags name."""
    try:
        options = catalog.find(flags.policy).make(flags)
        if not isinstance(options, ModelOptions):
            raise ConfigError(f"{flags.policy} has no model that a draft head could learn from")
        # Training has work for every core, whatever answering would take.
        threads = options.num_threads or torch.get_num_threads()
        return FeatureTarget(load_token_policy(replace(options, num_threads=threads)))
    except PolicyError as error:
        raise ConfigError(str(error)) from error
