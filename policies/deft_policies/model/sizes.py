"""Everything about an OpenVLA model that is not a weight. Knows nothing of files.

`deft_policies.checkpoint.config` reads it from a checkpoint's JSON files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from torch import Tensor

from deft_policies.model.prompt import PromptTemplate
from deft_policies.model.statistics import ActionStatistics

Gate = Literal["silu", "gelu_tanh"]

DEFAULT_NUM_BINS = 256
LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True)
class LlamaSizes:
    """Everything that tells one Llama from another."""

    vocabulary: int  # rows of the embedding and of the head, padding included
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 2048
    has_qkv_bias: bool = False  # of queries, keys and values, as in Qwen2
    gate: Gate = "silu"  # what opens the MLP


@dataclass(frozen=True)
class TokenRange:
    """The ids first..last, both included; adjacent ids in an action range are adjacent bins."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, token: int) -> bool:
        return self.first <= token <= self.last

    def contains(self, tokens: Tensor) -> Tensor:
        """True, elementwise, for the ids inside the range."""
        return (self.first <= tokens) & (tokens <= self.last)

    @property
    def columns(self) -> slice:
        """Where these ids are among the columns of a whole vocabulary."""
        return slice(self.first, self.last + 1)


class ResizeStrategy(Enum):
    """How a frame becomes a square, by the checkpoint's processor."""

    NAIVE = "resize-naive"
    LETTERBOX = "letterbox"
    CROP = "resize-crop"


@dataclass(frozen=True)
class TowerConfig:
    """Sizes of one vision transformer. Its last block and final norm are never used.

    DINOv2 has class token, registers and LayerScale, SigLIP a pooling head. The two tokens are
    dropped from the output, and inference never uses the pooling head.
    """

    is_dino: bool  # DINOv2, else SigLIP
    prefix: str  # of its tensors' names, without the trailing dot
    width: int
    depth: int
    heads: int
    mlp: int
    image_size: int = 224
    patch_size: int = 14

    @property
    def num_patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_leading(self) -> int:
        """Tokens before the patches: the class token and four registers."""
        return 5 if self.is_dino else 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks whose output counts: all but the last."""
        return self.depth - 1


# The two of the published 7B.
DINOV2 = TowerConfig(True, "vision_backbone.featurizer", 1024, 24, 16, 4096)
SIGLIP = TowerConfig(False, "vision_backbone.fused_featurizer", 1152, 27, 16, 4304)

# Mean and standard deviation of the three channels that one tower sees.
Normalization = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class ImageProcessorConfig:
    """How the checkpoint's own processor turns a frame into pixel values.

    `is_stretched`: both sides become `size`, whatever the frame's ratio; otherwise the shorter
    one does, and the middle of the longer one is kept.
    """

    resize: ResizeStrategy
    size: int
    letterbox_fill: tuple[int, ...]
    normalizations: tuple[Normalization, ...]  # [tower]
    is_stretched: bool = True


def find_action_tokens(text_vocab_size: int, num_bins: int = DEFAULT_NUM_BINS) -> TokenRange:
    """Ids of bins: the last `num_bins` of the text vocabulary.

    Ids grow as values fall: the last id is the lowest bin.
    """
    return TokenRange(text_vocab_size - num_bins, text_vocab_size - 1)


@dataclass(frozen=True)
class TrainingNotes:
    """Notes on a checkpoint's training; empty where there are none."""

    instructions: tuple[str, ...] = ()
    assets: str = ""  # of the simulator, as LIBERO's results name them
    prompts: tuple[str, ...] = ()  # values of `PromptTemplate` that it was taught to answer
    held_out: Mapping[str, str] = field(default_factory=dict)  # trials kept for the end, by suite


class VlaConfig(Protocol):
    """What the configuration of every family tells."""

    @property
    def llm(self) -> LlamaSizes:
        """Sizes of the decoder."""

    @property
    def frame_size(self) -> int:
        """Pixels of a side that a frame is best sent with."""

    @property
    def statistics(self) -> Mapping[str, ActionStatistics]:
        """Of actions, by key."""

    @property
    def training(self) -> TrainingNotes:
        """The notes."""


@dataclass(frozen=True, eq=False)
class OpenVLAConfig:
    """All that the modules, the processor and the codec need to know of a checkpoint."""

    llm: LlamaSizes
    towers: tuple[TowerConfig, ...]
    image: ImageProcessorConfig
    action_tokens: TokenRange  # the last ids of the text vocabulary; behind them is padding
    prompt_template: PromptTemplate
    statistics: Mapping[str, ActionStatistics]
    training: TrainingNotes = TrainingNotes()

    @property
    def frame_size(self) -> int:
        """Pixels of a side that a frame is best sent with."""
        return self.image.size

    @property
    def is_fused(self) -> bool:
        """Whether two towers look at the frame, so that the projector has a third layer."""
        return len(self.towers) > 1

    @property
    def vision_width(self) -> int:
        """Features of one patch, all towers side by side."""
        return sum(tower.width for tower in self.towers)

    @property
    def num_patches(self) -> int:
        """Patches of one image, the same in every tower."""
        return self.towers[0].num_patches
