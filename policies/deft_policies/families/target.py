"""A vision-language-action model as a target."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deft_policies.decoding.target import Prompts, Target
from deft_policies.model.graphs import StepRunner, Tensors
from deft_policies.model.layout import pad_batch
from deft_policies.model.staging import to_device
from deft_policies.model.vla import OpenVLAModel

Encode = Callable[[str], Sequence[int]]  # an instruction to the ids of the whole prompt
_BESIDE_PATCHES = 1  # patches come right after the first id


class VlaTarget(Target):
    """The decoder of an OpenVLA model, with the vision towers before it."""

    def __init__(
        self,
        model: OpenVLAModel,
        *,
        action_rows_only: bool = False,
        runner: StepRunner | None = None,
    ) -> None:
        super().__init__(
            model.decoder,
            model.config.vocabulary.tokens,
            action_rows_only=action_rows_only,
            runner=runner,
        )
        self.model = model
        if self.reads_lengths:
            model.pack_vision()

    @torch.no_grad()
    def read(self, pixels: Tensor, prompt_ids: Sequence[Sequence[int]]) -> Prompts:
        """Look at [row, channel, height, width] and lay the prompts around the patches.

        Shorter prompts are padded on the right with their last id, which nothing attends to.
        """
        longest = max(len(ids) for ids in prompt_ids)
        padded = [[*ids, *([ids[-1]] * (longest - len(ids)))] for ids in prompt_ids]
        ids = to_device(padded, self.device)
        texts = to_device([len(row) for row in prompt_ids], self.device)
        reserve = self.runner.reserve
        if reserve is not None and len(pixels) <= reserve.rows:
            pixels = pad_batch(pixels)
        patches, features = self.runner.run((self, "see", *pixels.shape), self._see_step, (pixels,))
        patches, features = patches[: len(ids)], features[: len(ids)]
        num_patches = patches.shape[1]
        return Prompts(
            embeds=self.model.compose(patches, ids),
            lengths=texts + num_patches,
            last_tokens=ids[:, -1],
            patches=slice(_BESIDE_PATCHES, _BESIDE_PATCHES + num_patches),
            features=features.clone(),  # a captured step overwrites its outputs next time
        )

    def _see_step(self, pixels: Tensor) -> Tensors:
        sight = self.model.see(pixels)
        return sight.patches, sight.features.mean(dim=1)
