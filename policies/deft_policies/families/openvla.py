"""OpenVLA: one picture and an instruction to the seven tokens of one action."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deft_core.image_chain import ImageChain
from deft_core.types import Observation
from deft_policies.checkpoint.drafts import is_block, is_medusa, read_block_sizes
from deft_policies.checkpoint.open import Checkpoint, CheckpointSource, open_source
from deft_policies.decoding.captured import Layout, shapes_of
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.drafts import captured_block, captured_head
from deft_policies.decoding.plan import MOST_LEVELS
from deft_policies.decoding.planner import WIDEST
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.target import Prompt, Target
from deft_policies.errors import CheckpointError
from deft_policies.families.action_tokens import ActionCodec
from deft_policies.families.family import (
    LONGEST_INSTRUCTION,
    Family,
    choose_runner,
    load_network,
    named_sizes,
)
from deft_policies.families.model import Encode, Model, TokenModel
from deft_policies.families.oft.files import HEAD, find_file, sign_of_oft
from deft_policies.families.options import OF_REASONING, ModelOptions
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve, StepRunner, Tensors
from deft_policies.model.image import ImageProcessor
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.staging import to_device
from deft_policies.model.statistics import ActionStatistics
from deft_policies.model.tensor_names import TensorPlace, tensor_places
from deft_policies.model.vla import OpenVLAModel

_CPU = torch.device("cpu")
_BESIDE_PATCHES = 1  # patches come right after the first id


class VlaTarget(Target):
    """The decoder of an OpenVLA model, with the vision towers before it."""

    def __init__(
        self,
        model: OpenVLAModel,
        *,
        runner: StepRunner | None = None,
    ) -> None:
        super().__init__(model.decoder, model.config.action_tokens, runner=runner)
        self.model = model
        if not self.is_captured and self.device.type == "cpu":
            model.pack_vision()

    @torch.no_grad()
    def read(self, pixels: Tensor, prompt_ids: Sequence[Sequence[int]]) -> list[Prompt]:
        """Look at [row, channel, height, width] and lay the prompts around the patches.

        Shorter prompts are padded on the right with their last id, which nothing attends to.
        """
        longest = max(len(ids) for ids in prompt_ids)
        padded = [[*ids, *([ids[-1]] * (longest - len(ids)))] for ids in prompt_ids]
        ids = to_device(padded, self.device)
        (patches,) = self.runner.run_batch((self, "see"), self._see_step, (pixels,))
        num_patches = patches.shape[1]
        embeds = self.model.compose(patches, ids)
        patches_span = slice(_BESIDE_PATCHES, _BESIDE_PATCHES + num_patches)
        return [
            Prompt(embeds[row, : len(text) + num_patches], text[-1], patches_span)
            for row, text in enumerate(prompt_ids)
        ]

    def _see_step(self, pixels: Tensor) -> Tensors:
        return (self.model.projector(self.model.look(pixels)),)


class OpenVLA(TokenModel):
    """Looks at the frame alone; further cameras and the robot's state are ignored."""

    family = "openvla"
    network: OpenVLAModel
    images: ImageProcessor
    target: VlaTarget

    def __init__(
        self,
        target: VlaTarget,
        encode: Encode,
        images: ImageProcessor,
        statistics: Mapping[str, ActionStatistics],
        reasoning_model: TokenModel | None = None,
    ) -> None:
        network = target.model
        self.target = target
        self.codec = ActionCodec(network.config.action_tokens)
        self.reasoning_model = reasoning_model
        super().__init__(network, encode, images, statistics, target.runner)
        longest_answer = max(spec.max_tokens for spec in self.specs.values())
        # Trees of full depth reach beyond a short answer.
        num_reserved = network.config.num_patches + max(longest_answer, MOST_LEVELS)
        self.longest_prompt = target.max_positions - num_reserved
        if (reserve := target.runner.reserve) is not None:
            captured = reserve.lengths[-1] - network.config.num_patches
            self.longest_prompt = min(self.longest_prompt, captured)
        self.details = {
            "cameras": "image alone",
        }

    def spec(self, key: str) -> AnswerSpec:
        """One action."""
        return AnswerSpec.action(self.codec.action_space(self.statistics[key], key))

    def decode(self, key: str, tokens: Sequence[int]) -> NDArray[np.float64]:
        """The action of its tokens, [1, action_dim]."""
        return self.codec.decode(np.array([tokens], np.int64), self.statistics[key])

    def check(self, observation: Observation) -> None:
        """Refuse an instruction that is too long for it, or for what drafts."""
        super().check(observation)
        if self.draft is not None:
            self.draft.check(observation)

    def see(self, observations: Sequence[Observation], clock: StageClock) -> list[Prompt]:
        """Frames and prompts, embedded."""
        fitted = [self.images.fit(observation.image) for observation in observations]
        ids = [self.encode(observation.instruction) for observation in observations]
        clock.record(Stage.PREPARE)
        prompts = self.target.read(self.pixels(fitted), ids)
        clock.record(Stage.VISION)
        if self.draft is None:
            return prompts
        # Asked for by what drafts, where its time counts as drafting.
        return [
            replace(prompt, draft_model=partial(self._see_as_draft, one))
            for prompt, one in zip(prompts, observations, strict=True)
        ]

    def _see_as_draft(self, observation: Observation) -> Prompt:
        assert self.draft is not None
        return self.draft.see([observation], StageClock(_CPU))[0]

    def capture(self) -> None:
        """Record the towers, for every batch within the reserve."""
        config, weight = self.network.config, self.network.decoder.embedding.weight
        size, channels = config.image.size, 3 * len(config.towers)
        for rows in () if self.runner.reserve is None else self.runner.reserve.batches:
            self.target.read(weight.new_zeros(rows, channels, size, size), [[0, 0]] * rows)

    def draft_with(self, draft: Model) -> None:
        """Have another checkpoint draft; raises `CheckpointError` unless actions mean the same."""
        if not isinstance(draft, TokenModel):
            raise CheckpointError(
                f"--draft-model: {draft.family} answers in one pass, and drafts no tokens; give a "
                "model of the target's family"
            )
        if not isinstance(draft, OpenVLA):
            raise CheckpointError(f"--draft-model: {draft.family} has no action tokens")
        theirs, ours = (len(side.network.config.action_tokens) for side in (draft, self))
        if theirs != ours:
            raise CheckpointError(
                f"--draft-model: its actions have {theirs} bins, the target's {ours}; a draft "
                "model needs the same bins"
            )
        shared = draft.statistics.keys() & self.statistics.keys()
        if not shared:
            raise CheckpointError(
                f"--draft-model: it knows actions of {', '.join(draft.statistics)}, the target of "
                f"{', '.join(self.statistics)}; a draft model needs statistics under the same key"
            )
        for key in sorted(shared):
            if not draft.statistics[key].means_the_same(self.statistics[key]):
                raise CheckpointError(
                    f"--draft-model: its statistics of {key!r} are others than the target's, so "
                    "that its bins are other actions; use a checkpoint that was trained on the "
                    "same data"
                )
        self.draft = draft
        if self.reasoning_model is not None:
            self.reasoning_model.draft = draft


class OpenVLAFamily(Family):
    """Whatever is of no other family."""

    name = OpenVLA.family
    config: OpenVLAConfig

    refuses: tuple[str, ...] = (OF_REASONING,)
    refusal = "openvla writes nothing but actions; leave it out, or say --family ecot"

    def __init__(self, source: CheckpointSource | None, options: ModelOptions) -> None:
        """Raises `CheckpointError` if it is OFT's, or could be and no flag says that it is not."""
        super().__init__(source, options)
        if options.num_steps not in (None, 1) or options.num_pictures is not None:
            raise CheckpointError(
                f"{self.name} answers one action at a time and looks at one picture; leave "
                "--family away, or say --family oft"
            )
        self.checkpoint = None if source is None else _open_files(source, options)
        sizes = options.random_weights
        self.config = named_sizes(sizes) if self.checkpoint is None else self.checkpoint.config
        self.summary = "openvla: one action from one picture"

    @staticmethod
    def matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
        """Asked last."""
        return True

    @property
    def places(self) -> Sequence[TensorPlace]:
        """As published."""
        return tensor_places(self.config)

    widest = WIDEST  # nodes of a draft tree

    @property
    def prompts(self) -> range:
        """Ids that passes are captured for."""
        return range(1, LONGEST_INSTRUCTION)

    @property
    def longest_answer(self) -> int:
        """Tokens."""
        return max(len(statistics.mask) for statistics in self.config.statistics.values())

    @property
    def reserve(self) -> Reserve:
        """What passes are captured for."""
        patches, prompts = self.config.num_patches, self.prompts
        return Reserve(self.options.largest_batch, patches + prompts.start, patches + prompts.stop)

    def planned_bytes(self, dtype: torch.dtype) -> Mapping[str, int]:
        """Of the decoder's passes and a head's; the towers' graphs are small in comparison."""
        layout = Layout(self.reserve, self.widest, self.longest_answer + 1)
        readers = [head for head in self.options.draft_heads if not is_medusa(head)]
        num_graphs = len(shapes_of(self.reserve, self.widest, bool(readers)))
        planned = layout.bytes_of(self.config.llm, dtype.itemsize, num_graphs)
        for directory in readers:
            if is_block(directory):
                sizes = read_block_sizes(directory, self.config.llm)
                planned |= captured_block.bytes_of(layout, sizes, dtype.itemsize)
            else:
                planned |= captured_head.bytes_of(layout, self.config.llm, dtype.itemsize)
        return planned

    def load(
        self, device: torch.device, dtype: torch.dtype, runner: StepRunner | None = None
    ) -> OpenVLA:
        """Read the weights, or draw them."""
        network, encode = load_network(self.checkpoint, self.options, device, dtype)
        target, images = self.build_target(network, runner)
        return OpenVLA(target, encode, images, self.config.statistics)

    def build_target(
        self, network: OpenVLAModel, runner: StepRunner | None
    ) -> tuple[VlaTarget, ImageProcessor]:
        """What decodes with a network, and what it sees with."""
        options, config = self.options, network.config
        device = network.decoder.embedding.weight.device
        if device.type == "cpu" and options.quantization is Quantization.NONE:
            network.decoder.prefer_columns()
        target = VlaTarget(
            network,
            runner=runner or choose_runner(options, device, self.reserve),
        )
        chain = options.image_chain or ImageChain.NONE
        return target, ImageProcessor(config.image, chain, resizes_on_device=device.type == "cuda")


def _open_files(source: CheckpointSource, options: ModelOptions) -> Checkpoint:
    """Check all of a checkpoint's files; raises `CheckpointError` if they are, or may be, OFT's."""
    checkpoint = open_source(source)
    head = find_file(source.tuned, HEAD)
    if head is not None:
        raise CheckpointError(
            f"{head} is the head of an OFT fine-tune; leave --family away or say --family oft, "
            "and say --pictures and --chunk"
        )
    reason = sign_of_oft(source)
    if options.num_steps is None and reason:
        raise CheckpointError(
            f"{source.tuned} has no *{HEAD}*checkpoint*, but {reason}, as OFT's "
            "fine-tunes have: say --chunk 1 if it is OpenVLA's, or --chunk 8 --pictures 1 "
            "(LIBERO; --chunk 5 for Bridge) if it is OFT's and answers with tokens"
        )
    return checkpoint
