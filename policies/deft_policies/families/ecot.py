"""ECoT: OpenVLA that writes what it sees, plans and is about to do before its action.

The same networks as OpenVLA's, of one tower or two. The prompt ends in the first tag and no blank
is added to it; the answer is text that ends with the stop token, and the action is the seven tokens
before that. An answer that does not end, or has other tokens there, is no action.

A checkpoint that was taught OpenVLA's prompt, too, acts at once where no reasoning is asked for.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deft_core.reasoning import find_parts
from deft_policies.checkpoint.config import load_training
from deft_policies.checkpoint.open import CheckpointSource
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.errors import CheckpointError, NoActionError
from deft_policies.families.family import load_network
from deft_policies.families.openvla import OpenVLA, OpenVLAFamily, VlaTarget
from deft_policies.families.options import ModelOptions
from deft_policies.model.graphs import StepRunner
from deft_policies.model.image import ImageProcessor
from deft_policies.model.prompt import EOS_PIECE, PromptEncoder, PromptTemplate
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.statistics import ActionStatistics

MAX_TOKENS = 1024  # of an answer, as published
WIDEST = 128  # nodes of a draft tree
_PROMPT = range(48, 96)  # ids that passes are captured for
_TEMPLATES = {"vicuna": PromptTemplate.ECOT, "in-out": PromptTemplate.ECOT_IN_OUT}
_AND_ACTS = "openvla+"  # before the name of a prompt
_NAME = re.compile(r"\becot\b", re.IGNORECASE)


class Ecot(OpenVLA):
    """Reads the frame alone, as OpenVLA does, and writes reasoning before the action."""

    family = "ecot"
    widest = WIDEST

    def __init__(
        self,
        target: VlaTarget,
        encoder: PromptEncoder,
        images: ImageProcessor,
        statistics: Mapping[str, ActionStatistics],
        stop: int,
        max_tokens: int,
    ) -> None:
        self._max_tokens, self._stop = max_tokens, stop
        self._words = encoder
        super().__init__(target, encoder.encode, images, statistics)
        self.details["prompt"] = encoder.template.value
        self.details["longest answer"] = f"{max_tokens} tokens"

    def spec(self, key: str) -> AnswerSpec:
        """Text, the action behind it, and the stop token."""
        return replace(super().spec(key), max_tokens=self._max_tokens, stop=self._stop)

    def decode(self, key: str, tokens: Sequence[int]) -> NDArray[np.float64]:
        """The action before the stop token."""
        action_tokens, dim = self.target.action_tokens, self.statistics[key].action_dim
        if not tokens or tokens[-1] != self._stop:
            raise NoActionError(f"the text did not end within {len(tokens)} tokens")
        num = sum(1 for _ in takewhile(action_tokens.__contains__, reversed(tokens[:-1])))
        if num < dim:
            raise NoActionError(f"{num} action tokens before the stop token, {dim} are needed")
        return super().decode(key, tokens[-1 - dim : -1])

    def read_text(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The text of an answer, and how many tokens each of its parts has, tags included.

        The stop token belongs to the last part.
        """
        text, lengths = self._words.lengths(tokens)
        begins = list(accumulate(lengths, initial=0))
        # A tag begins where the part before it stops.
        tags = [bisect_right(begins, stop) - 1 for _, _, stop in find_parts(text)[:-1]]
        edges = [0, *tags, len(tokens)]
        return self._words.decode(tokens), tuple(b - a for a, b in pairwise(edges))


class EcotFamily(OpenVLAFamily):
    """Reasons in every answer, or where reasoning is asked for."""

    name = Ecot.family
    refuses = ()

    def __init__(self, source: CheckpointSource | None, options: ModelOptions) -> None:
        if source is None:
            raise CheckpointError("--family ecot needs a checkpoint: random weights have no words")
        super().__init__(source, options)
        assert self.checkpoint is not None
        config, self._at_once = self.config, self.checkpoint.encoder
        self._template, self._acts_at_once = _find_prompts(config.training.prompts, options)
        self._aloud = self._at_once.with_template(self._template)
        self._stop = self._aloud.find_piece(EOS_PIECE)
        self._max_tokens = _find_room(config, options.max_tokens)
        self.summary = f"ecot: up to {self._max_tokens} tokens of text and action from one picture"
        if self._acts_at_once:
            self.summary = (
                "openvla and ecot: an action at once from one picture, or after up to "
                f"{self._max_tokens} tokens of text where asked to think aloud"
            )

    widest = WIDEST

    @property
    def prompts(self) -> range:
        """Ids that passes are captured for; OpenVLA's prompt is shorter."""
        return range(1, _PROMPT.stop) if self._acts_at_once else _PROMPT

    @property
    def longest_answer(self) -> int:
        """Tokens."""
        return self._max_tokens

    @staticmethod
    def matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
        """Whether its name, a flag or its notes say that it reasons."""
        if source is None:
            return False
        noted = load_training(source.directory).prompts
        is_taught = any(template.value in noted for template in _TEMPLATES.values())
        names = (Path(source.name).name, source.tuned.name)
        return options.prompt is not None or is_taught or any(map(_NAME.search, names))

    def load(
        self, device: torch.device, dtype: torch.dtype, runner: StepRunner | None = None
    ) -> OpenVLA:
        """Read the weights."""
        network, _ = load_network(self.checkpoint, self.options, device, dtype)
        target, images = self.build_target(network, runner)
        statistics = self.config.statistics
        aloud = Ecot(target, self._aloud, images, statistics, self._stop, self._max_tokens)
        if not self._acts_at_once:
            return aloud
        at_once = self._at_once.template.value
        aloud.details["prompt"] = f"{at_once}; {self._template.value} where reasoning is asked for"
        return OpenVLA(target, self._at_once.encode, images, statistics, aloud)


def _find_prompts(noted: Sequence[str], options: ModelOptions) -> tuple[PromptTemplate, bool]:
    """The reasoning template, and whether requests without `reasoning` use OpenVLA's prompt.

    With `--family ecot` every answer reasons.
    """
    if options.prompt is not None:
        name = options.prompt.removeprefix(_AND_ACTS)
        return _TEMPLATES[name], name != options.prompt
    taught = [template for template in _TEMPLATES.values() if template.value in noted]
    acts_at_once = options.family is None and bool(taught) and len(noted) > len(taught)
    return taught[0] if taught else PromptTemplate.ECOT, acts_at_once


def _find_room(config: OpenVLAConfig, max_tokens: int | None) -> int:
    """How long an answer may be: as asked for, or as published where there is room."""
    positions = config.llm.max_positions
    room = positions - config.num_patches - _PROMPT.stop
    if room < (max_tokens or 1):
        raise CheckpointError(
            f"the model has {positions} positions: besides {config.num_patches} patches and a "
            f"prompt of {_PROMPT.stop} tokens there is room for an answer of {max(room, 0)}"
            + ("" if max_tokens is None else f", not {max_tokens}; give a smaller --max-tokens")
        )
    return max_tokens or min(MAX_TOKENS, room)
