"""OFT's forward: pictures, prompt and state to all values of a chunk in one pass.

The sequence is the first prompt id, the patches of every picture, the state's token, the rest of
the prompt, one zero vector for each value of the chunk, and the stop token. Everything sees
everything. A value is read one position before its own zero vector: the first one at the last id of
the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from deft_policies.families.oft.modules import RegressionHead, StateProjector
from deft_policies.model.kv_cache import Append
from deft_policies.model.layout import EagerRunner, Reserve, StepRunner, Tensors, pad_batch
from deft_policies.model.passes import LlamaPasses, PassInput
from deft_policies.model.vla import OpenVLAModel

STOP_ID = 2
_FILLER_ID = 1  # its embedding is never used
_MOST_PADDING = Reserve().bucket


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


class ChunkModel:
    """Runs the pass. Used by one thread."""

    def __init__(
        self, model: OpenVLAModel, parts: ChunkParts, runner: StepRunner | None = None
    ) -> None:
        self.model = model
        self.parts = parts.to(model.decoder.embedding.weight)
        self._passes = LlamaPasses(model.decoder)
        self.runner: StepRunner = runner or EagerRunner()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.decoder.embedding.weight.device

    @property
    def num_before(self) -> int:
        """Positions between the first prompt id and the second one."""
        parts = self.parts
        return parts.num_pictures * self.model.config.num_patches + (parts.state is not None)

    @property
    def num_others(self) -> int:
        """Positions beside those of the prompt's ids."""
        return self.num_before + self.parts.num_values + 1

    @property
    def longest_prompt(self) -> int:
        """Ids that a prompt may have."""
        return self.model.decoder.sizes.max_positions - self.num_others - _MOST_PADDING

    def reserve(self, longest_prompt: int, num_rows: int) -> Reserve:
        """For passes of up to `num_rows` prompts of one id up to `longest_prompt`."""
        return Reserve(num_rows, self.num_others + 1, self.num_others + longest_prompt)

    def lay_out(self, prompts: Sequence[Sequence[int]]) -> ChunkPrompts:
        """Bring prompts to one length, the next captured one where there is one."""
        behind = [_FILLER_ID] * self.parts.num_values + [STOP_ID]
        texts = [[*ids, *behind] for ids in prompts]
        longest = max(len(text) for text in texts)
        reserve, rows = self.runner.reserve, len(prompts)
        is_held = reserve is not None and reserve.holds(rows, self.num_before + longest)
        if reserve is not None and is_held:
            longest = reserve.padded(self.num_before + longest) - self.num_before
        shortest = min(len(text) for text in texts)
        padded = [text + [_FILLER_ID] * (longest - len(text)) for text in texts]
        return ChunkPrompts(
            torch.tensor(padded).to(self.device, non_blocking=True),
            torch.tensor([len(ids) for ids in prompts]).to(self.device, non_blocking=True),
            is_padded=shortest < longest or is_held,
        )

    def capture(self) -> None:
        """Capture every pass that a batch within the reserve can need; none without a reserve."""
        reserve, config = self.runner.reserve, self.model.config
        channels, size = 3 * len(config.towers), config.image.size
        weight = self.model.decoder.embedding.weight
        if reserve is None:
            return
        for rows in reserve.batches:
            pixels = weight.new_zeros(rows, self.parts.num_pictures, channels, size, size)
            states = weight.new_zeros(rows, self.parts.state_dim or 0)
            for length in reserve.lengths:
                num_ids = length - self.num_others
                prompts = self.lay_out([[STOP_ID] * num_ids] * rows)
                self.answer(self.see(pixels, prompts), prompts, states)

    @torch.no_grad()
    def see(self, pixels: Tensor, prompts: ChunkPrompts) -> Tensor:
        """Patches [row, picture * patch, width] of [row, picture, channel, height, width]."""
        text = (prompts.ids, prompts.lengths) if self.parts.film is not None else ()
        inputs = tuple(self._pad(one) for one in (pixels, *text))
        shapes = tuple(one.shape for one in inputs)
        (patches,) = self.runner.run(("see", shapes), self._see_step, inputs)
        return patches[: len(pixels)]

    @torch.no_grad()
    def answer(self, patches: Tensor, prompts: ChunkPrompts, states: Tensor | None) -> Tensors:
        """Run the pass; `states` [row, state_dim] are normalised.

        With a head: normalised actions [row, step, action_dim], float32. Without: greedy tokens,
        and how far the second-best logits lie behind, [row, step, action_dim] each. All on the
        device, and valid until the next answer.
        """
        own = [patches, prompts.ids, prompts.lengths]
        if self.parts.state is not None:
            assert states is not None
            own.append(states.to(patches))
        inputs = tuple(self._pad(one) for one in own)
        step = partial(self._answer_step, prompts.is_padded)
        key = ("answer", prompts.is_padded, inputs[0].shape, inputs[1].shape)
        found = self.runner.run(key, step, inputs)
        shape = (len(patches), self.parts.num_steps, self.parts.action_dim)
        return tuple(one[: len(patches)].view(shape) for one in found)

    def _pad(self, values: Tensor) -> Tensor:
        reserve = self.runner.reserve
        return values if reserve is None or len(values) > reserve.rows else pad_batch(values)

    def _see_step(self, pixels: Tensor, *text: Tensor) -> Tensors:
        modulations = None
        if self.parts.film is not None:
            language = self.mean_embedding(*text)
            modulations = [
                film(language).repeat_interleave(pixels.shape[1], dim=2) for film in self.parts.film
            ]
        patches = self.model.see(pixels.flatten(0, 1), modulations).patches
        return (patches.view(len(pixels), -1, patches.shape[2]),)

    def mean_embedding(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """What FiLM reads of the instruction, [row, width]: its prompt and the stop token."""
        behind = _behind(ids, lengths)
        is_read = (behind < 0) | (behind == self.parts.num_values)
        words: Tensor = self.model.decoder.embedding(ids) * is_read.unsqueeze(2)
        mean = words.sum(dim=1, dtype=torch.float32) / is_read.sum(dim=1, keepdim=True)
        return mean.to(words.dtype)

    def _answer_step(
        self, is_padded: bool, patches: Tensor, ids: Tensor, lengths: Tensor, *state: Tensor
    ) -> Tensors:
        behind, num_values = _behind(ids, lengths), self.parts.num_values
        is_asked = (behind >= 0) & (behind < num_values)
        words = self.model.decoder.embedding(ids).masked_fill(is_asked.unsqueeze(2), 0.0)
        tokens = [] if self.parts.state is None else [self.parts.state(*state).unsqueeze(1)]
        embeds = torch.cat((words[:, :1], patches, *tokens, words[:, 1:]), dim=1)
        rows, positions = embeds.shape[:2]
        every = torch.arange(positions, device=ids.device)
        mask = None
        if is_padded:  # rows have their own lengths: nothing sees what is behind the stop
            is_used = every < (lengths + self.num_others)[:, None]
            mask = is_used[:, None, None, :]
        last_of_prompt = self.num_before + lengths - 1
        read = last_of_prompt[:, None] + every[:num_values]
        given = PassInput(embeds, every.expand(rows, -1), Append(positions), mask, rows_out=read)
        hidden = self._passes.run(given, None)
        if self.parts.head is not None:
            return (self.parts.head(hidden).float(),)
        logits = self.model.decoder.head(hidden).float()
        first, second = logits.topk(2, dim=2).values.unbind(2)
        return logits.argmax(dim=2), first - second


def _behind(ids: Tensor, lengths: Tensor) -> Tensor:
    """How far each id [row, text] is behind its prompt; 0 is the first filler."""
    return torch.arange(ids.shape[1], device=ids.device) - lengths[:, None]
