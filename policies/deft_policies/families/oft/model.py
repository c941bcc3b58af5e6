"""OFT: pictures, state and instruction to a chunk of actions, in one pass.

The sequence is the first prompt id, the patches of every picture, the state's token, the rest of
the prompt, one zero vector for each value of the chunk, and the stop token. Everything sees
everything. A value is read one position before its own zero vector: the first one at the last id of
the prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deft_core.types import DecodeTrace, Observation, PassTrace
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.errors import NotFiniteError, RequestError
from deft_policies.families.action_tokens import RANGE_EPS, ActionCodec, unnormalise
from deft_policies.families.model import Encode, Model
from deft_policies.families.oft.modules import RegressionHead, StateProjector
from deft_policies.model.graphs import LENGTH_STEP, Reserve, StepRunner, Tensors
from deft_policies.model.image import ImageProcessor
from deft_policies.model.llama import Attention, added_mask
from deft_policies.model.passes import LlamaPasses
from deft_policies.model.staging import to_device
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.vla import OpenVLAModel

METHOD = "parallel"
STOP_ID = 2
_FILLER_ID = 1  # its embedding is never used


@dataclass(frozen=True)
class ChunkParts:
    """What a fine-tune looks at, how much it answers, and what it adds to the model for that.

    Without a head it answers with tokens.
    """

    num_pictures: int
    num_steps: int
    action_dim: int
    head: RegressionHead | None = None
    state: StateProjector | None = None
    film: nn.ModuleList | None = None  # [tower]

    @property
    def num_values(self) -> int:
        """Numbers in a chunk."""
        return self.num_steps * self.action_dim

    @property
    def state_dim(self) -> int | None:
        """Numbers of the robot's state; None where it is not looked at."""
        return None if self.state is None else self.state.fc1.in_features

    def to(self, like: Tensor) -> "ChunkParts":
        """The same on the device and in the dtype of `like`; moves the modules themselves."""
        for part in (self.head, self.state, self.film):
            if part is not None:
                part.to(like.device, like.dtype)
        return self


@dataclass(frozen=True)
class ChunkPrompts:
    """A batch of prompts with everything behind them, right-padded."""

    ids: Tensor  # [row, text]: prompt, fillers, stop, padding
    lengths: Tensor  # [row] ids of the prompt alone
    is_padded: bool


class Oft(Model):
    """Remembers nothing of a robot: a chunk depends on one observation alone."""

    family = "oft"
    network: OpenVLAModel
    images: ImageProcessor

    def __init__(
        self,
        network: OpenVLAModel,
        parts: ChunkParts,
        encode: Encode,
        images: ImageProcessor,
        actions: Mapping[str, ActionStatistics],
        states: Mapping[str, ActionStatistics],
        runner: StepRunner | None = None,
    ) -> None:
        """The statistics of actions and states are by key."""
        self.parts, self.states = parts.to(network.decoder.embedding.weight), states
        self._codec = ActionCodec(network.config.action_tokens)
        self._passes = LlamaPasses(network.decoder)
        super().__init__(network, encode, images, actions, runner or StepRunner())
        # Positions between the first prompt id and the second one, and all but the prompt's ids.
        pictures = parts.num_pictures * network.config.num_patches
        self.num_before = pictures + (parts.state is not None)
        self.num_others = self.num_before + parts.num_values + 1
        max_positions = network.decoder.sizes.max_positions
        self.longest_prompt = max_positions - self.num_others - LENGTH_STEP
        # A head's values have no bounds; and poses, unlike motions, are never 0.
        self.may_exceed = parts.head is not None
        self.num_steps = parts.num_steps
        self.num_pictures = parts.num_pictures
        self.state_dim = parts.state_dim
        self.details = {
            "head": "tokens, whole vocabulary" if parts.head is None else "L1 regression",
            "film": "no" if parts.film is None else "yes",
            "cameras": f"image and {parts.num_pictures - 1} whose names contain 'wrist'",
            "state": "not looked at" if parts.state is None else f"{parts.state_dim}, raw",
        }

    def check(self, observation: Observation) -> None:
        """Refuse missing cameras and states, and instructions without end."""
        super().check(observation)
        state, expected = observation.state, self.state_dim
        if expected is not None and (state is None or len(state) != expected):
            got = "none" if state is None else f"{len(state)} numbers"
            raise RequestError(
                "state", f"the model reads the robot's raw state, {expected} numbers; got {got}"
            )

    def answer(
        self, observations: Sequence[Observation], keys: Sequence[str], clock: StageClock
    ) -> list[tuple[NDArray[np.float64], DecodeTrace | None]]:
        """Actions [step, action_dim] in robot units, and a trace where they are tokens."""
        fitted = [
            self.images.fit(picture) for seen in observations for picture in self.pictures(seen)
        ]
        states = self._read_states(observations, keys)
        texts = [self.encode(observation.instruction) for observation in observations]
        clock.record(Stage.PREPARE)
        pixels = self.pixels(fitted)
        prompts = self.lay_out(texts)
        patches = self.see(pixels.view(len(observations), -1, *pixels.shape[1:]), prompts)
        clock.record(Stage.VISION)
        outputs = self.compute(patches, prompts, states)
        clock.record(Stage.PREFILL)
        values, *margins = (tensor.cpu().numpy() for tensor in outputs)
        # Where logits are not finite, neither is the gap between the best two.
        if not all(np.isfinite(numbers).all() for numbers in (values, *margins)):
            raise NotFiniteError(
                "the model's answer holds NaN or infinity; its weights or its number format are "
                "broken"
            )
        clock.restart()
        normalised = values if self.parts.head is not None else self._codec.normalised(values)
        actions = [
            unnormalise(chunk, self.statistics[key], RANGE_EPS)
            for key, chunk in zip(keys, normalised, strict=True)
        ]
        clock.record(Stage.FINISH)
        if not margins:
            return [(chunk, None) for chunk in actions]
        traces = [
            _trace(text, tokens.flatten().tolist(), gaps.flatten().tolist())
            for text, tokens, gaps in zip(texts, values, margins[0], strict=True)
        ]
        return list(zip(actions, traces, strict=True))

    def _read_states(
        self, observations: Sequence[Observation], keys: Sequence[str]
    ) -> Tensor | None:
        if self.state_dim is None:
            return None
        rows = [
            normalise_state(np.asarray(seen.state, np.float64), self.states[key])
            for seen, key in zip(observations, keys, strict=True)
        ]
        return torch.from_numpy(np.array(rows, dtype=np.float32)).to(self.device)

    def reserve(self, longest_prompt: int, num_rows: int) -> Reserve:
        """For passes of up to `num_rows` prompts of one id up to `longest_prompt`."""
        return Reserve(num_rows, self.num_others + 1, self.num_others + longest_prompt)

    def lay_out(self, prompts: Sequence[Sequence[int]]) -> ChunkPrompts:
        """Bring prompts to one length, the next captured one where there is one."""
        behind = [_FILLER_ID] * self.parts.num_values + [STOP_ID]
        texts = [[*ids, *behind] for ids in prompts]
        longest = max(len(text) for text in texts)
        reserve, is_held = self.runner.reserve, False
        if reserve is not None and len(prompts) <= reserve.rows:
            padded_to = reserve.padded(self.num_before + longest)
            is_held = padded_to is not None
            longest = longest if padded_to is None else padded_to - self.num_before
        shortest = min(len(text) for text in texts)
        padded = [text + [_FILLER_ID] * (longest - len(text)) for text in texts]
        return ChunkPrompts(
            to_device(padded, self.device),
            to_device([len(ids) for ids in prompts], self.device),
            is_padded=shortest < longest or is_held,
        )

    def capture(self) -> None:
        """Capture every pass that a batch within the reserve can need; none without a reserve."""
        reserve, config = self.runner.reserve, self.network.config
        channels, size = 3 * len(config.towers), config.image.size
        weight = self.network.decoder.embedding.weight
        if reserve is None:
            return
        for rows in reserve.batches:
            pixels = weight.new_zeros(rows, self.parts.num_pictures, channels, size, size)
            states = weight.new_zeros(rows, self.parts.state_dim or 0)
            for length in reserve.lengths:
                num_ids = length - self.num_others
                prompts = self.lay_out([[STOP_ID] * num_ids] * rows)
                self.compute(self.see(pixels, prompts), prompts, states)

    @torch.no_grad()
    def see(self, pixels: Tensor, prompts: ChunkPrompts) -> Tensor:
        """Patches [row, picture * patch, width] of [row, picture, channel, height, width]."""
        text = (prompts.ids, prompts.lengths) if self.parts.film is not None else ()
        (patches,) = self.runner.run_batch("see", self._see_step, (pixels, *text))
        return patches

    @torch.no_grad()
    def compute(self, patches: Tensor, prompts: ChunkPrompts, states: Tensor | None) -> Tensors:
        """Run the pass; `states` [row, state_dim] are normalised.

        With a head: normalised actions [row, step, action_dim], float32. Without: greedy tokens,
        and how far the second-best logits lie behind, [row, step, action_dim] each. All on the
        device, and valid until the next answer.
        """
        inputs = [patches, prompts.ids, prompts.lengths]
        if self.parts.state is not None:
            assert states is not None
            inputs.append(states.to(patches))
        step = partial(self._answer_step, prompts.is_padded)
        outputs = self.runner.run_batch(("answer", prompts.is_padded), step, tuple(inputs))
        shape = (len(patches), self.parts.num_steps, self.parts.action_dim)
        return tuple(tensor.view(shape) for tensor in outputs)

    def _see_step(self, pixels: Tensor, *text: Tensor) -> Tensors:
        modulations = None
        if self.parts.film is not None:
            language = self.mean_embedding(*text)
            modulations = [
                film(language).repeat_interleave(pixels.shape[1], dim=2) for film in self.parts.film
            ]
        patches = self.network.see(pixels.flatten(0, 1), modulations)
        return (patches.view(len(pixels), -1, patches.shape[2]),)

    def mean_embedding(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """What FiLM reads of the instruction, [row, width]: its prompt and the stop token."""
        behind = _behind(ids, lengths)
        is_read = (behind < 0) | (behind == self.parts.num_values)
        words: Tensor = self.network.decoder.embedding(ids) * is_read.unsqueeze(2)
        mean = words.sum(dim=1, dtype=torch.float32) / is_read.sum(dim=1, keepdim=True)
        return mean.to(words.dtype)

    def _answer_step(
        self, is_padded: bool, patches: Tensor, ids: Tensor, lengths: Tensor, *state: Tensor
    ) -> Tensors:
        behind, num_values = _behind(ids, lengths), self.parts.num_values
        is_asked = (behind >= 0) & (behind < num_values)
        words = self.network.decoder.embedding(ids).masked_fill(is_asked.unsqueeze(2), 0.0)
        tokens = [] if self.parts.state is None else [self.parts.state(*state).unsqueeze(1)]
        embeds = torch.cat((words[:, :1], patches, *tokens, words[:, 1:]), dim=1)
        rows, positions = embeds.shape[:2]
        all_positions = torch.arange(positions, device=ids.device)
        mask = None
        if is_padded:  # rows have their own lengths: nothing sees what is behind the stop
            is_used = all_positions < (lengths + self.num_others)[:, None]
            mask = is_used[:, None, None, :]
        last_of_prompt = self.num_before + lengths - 1
        read = last_of_prompt[:, None] + all_positions[:num_values]
        sizes = self.network.decoder.sizes
        mask = None if mask is None else added_mask(mask, embeds.dtype)
        cos, sin = self.network.decoder.rotary(all_positions.expand(rows, -1), embeds)
        attention = Attention(sizes, cos, sin, mask)
        flat = self._passes.run(embeds.flatten(0, 1), attention, attention.of_rows_out(read))
        hidden = flat.view(rows, num_values, -1)
        if self.parts.head is not None:
            return (self.parts.head(hidden).float(),)
        logits = self.network.decoder.head(hidden).float()
        first, second = logits.topk(2, dim=2).values.unbind(2)
        return logits.argmax(dim=2), first - second


def normalise_state(
    state: NDArray[np.float64], statistics: ActionStatistics
) -> NDArray[np.float64]:
    """A robot's raw state [state_dim], cut off at -1 and 1."""
    low, high = statistics.low, statistics.high
    squeezed = 2 * (state - low) / (high - low + RANGE_EPS) - 1
    return np.clip(np.where(statistics.mask, squeezed, state), -1.0, 1.0)


def _trace(text: Sequence[int], tokens: Sequence[int], gaps: Sequence[float]) -> DecodeTrace:
    """One pass with all tokens."""
    answer = tuple(tokens)
    only_pass = PassTrace(True, (text[-1],), (-1,), ("",), answer[:1], (), answer[0])
    return DecodeTrace(METHOD, answer, answer, tuple(gaps), (only_pass,))


def _behind(ids: Tensor, lengths: Tensor) -> Tensor:
    """How far each id [row, text] is behind its prompt; 0 is the first filler."""
    return torch.arange(ids.shape[1], device=ids.device) - lengths[:, None]
