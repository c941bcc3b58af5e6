"""Training samples of a policy: pictures, what is asked for, what the expert would do and say."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deft_core.datasets.demonstrations import decode_frame
from deft_core.image_chain import ImageChain
from deft_draft_training.errors import DataError
from deft_policies.model.image import ImageProcessor
from deft_policies.model.prompt import PromptEncoder, PromptTemplate
from deft_policies.model.sizes import OpenVLAConfig
from tiny_libero_recipe.language import sentence
from tiny_libero_recipe.tokenizer import EOS_PIECE


@dataclass(frozen=True)
class WordsConfig:
    """How requests are worded: see `language.sentence`."""

    plain: float = 0.4
    noise: float = 0.15


@dataclass(frozen=True)
class AugmentConfig:
    """How far a frame may be changed; 0 everywhere leaves it alone."""

    shift_pixels: int = 3
    brightness: float = 0.15  # largest relative change
    contrast: float = 0.15
    colour: float = 0.05  # largest relative change of one channel against the others


def augment(frames: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Shifted and recoloured copies of uint8 frames [row, height, width, 3]."""
    shifted = _shift(frames.numpy(), config.shift_pixels, generator)
    rows = len(frames)
    gain = 1 + config.brightness * _uniform((rows, 1, 1), generator)
    gain = gain * (1 + config.colour * _uniform((rows, 1, 3), generator))
    contrast = 1 + config.contrast * _uniform((rows, 1, 1), generator)
    centre = torch.from_numpy(shifted.mean(axis=(1, 2, 3), dtype=np.float32)).view(rows, 1, 1)
    codes = torch.arange(256.0).view(256, 1)
    # What becomes of a byte depends on its frame and channel alone: 256 values, not 40,000 pixels.
    becomes = ((codes - centre) * contrast + centre).mul(gain).clamp(0, 255).round()
    for frame, table in zip(shifted, becomes.to(torch.uint8).numpy(), strict=True):
        for channel in range(3):
            frame[..., channel] = table[:, channel][frame[..., channel]]
    return torch.from_numpy(shifted)


def _shift(frames: NDArray[np.uint8], limit: int, generator: torch.Generator) -> NDArray[np.uint8]:
    """Copies of frames, each moved by up to `limit` pixels either way, repeating its border."""
    rows, height, width, _ = frames.shape
    edges = (limit, limit)
    padded = np.pad(frames, ((0, 0), edges, edges, (0, 0)), mode="edge")
    offsets = torch.randint(0, 2 * limit + 1, (rows, 2), generator=generator).tolist()
    cut = [one[y : y + height, x : x + width] for one, (y, x) in zip(padded, offsets, strict=True)]
    return np.stack(cut)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * 2 - 1


@dataclass(frozen=True)
class Request:
    """What is asked for. Where thing and place are not known the instruction is all there is."""

    instruction: str
    thing: str = ""
    place: str = ""

    def say(self, words: WordsConfig, generator: np.random.Generator) -> str:
        """The request in one of many sentences."""
        if not self.thing:
            return self.instruction
        return sentence(self.thing, self.place, generator, words.plain, words.noise)


@dataclass(frozen=True, eq=False)
class PolicySamples:
    """Samples as parallel arrays; pictures stay compressed until they are needed."""

    encoded: Sequence[bytes]  # [sample] JPEG or PNG files
    labels: NDArray[np.int64]  # [sample, number], action tokens, or the numbers of a text
    positions: NDArray[np.float32]  # [sample, value], what the auxiliary head is asked for
    weights: NDArray[np.float32]  # [sample]
    requests: Sequence[Request]  # [sample]
    thoughts: Sequence[str]  # [sample] what a reasoning says after `TASK:`; empty where unknown

    def __len__(self) -> int:
        return len(self.labels)

    @staticmethod
    def join(parts: Iterable["PolicySamples"]) -> "PolicySamples":
        """All samples of several sets, in order."""
        found = list(parts)
        if not found:
            raise DataError("there are no samples to train on; record demonstrations first")
        return PolicySamples(
            encoded=[one for part in found for one in part.encoded],
            labels=np.concatenate([part.labels for part in found]),
            positions=np.concatenate([part.positions for part in found]),
            weights=np.concatenate([part.weights for part in found]),
            requests=[one for part in found for one in part.requests],
            thoughts=[one for part in found for one in part.thoughts],
        )


AnyBatch = TypeVar("AnyBatch", bound="CloneBatch")


@dataclass(frozen=True)
class CloneBatch:
    """One step's samples as tensors: what is seen and asked for, and where things are."""

    frames: Tensor  # [row, size, size, 3] uint8
    positions: Tensor  # [row, value]
    weights: Tensor  # [row]
    ids: Tensor  # [row, text] prompt and answer, right-padded
    prompt_lengths: Tensor  # [row]

    def to(self: "AnyBatch", device: torch.device) -> "AnyBatch":
        """The same batch on a device."""
        moved = {one.name: getattr(self, one.name).to(device) for one in fields(self)}
        return type(self)(**moved)


@dataclass(frozen=True)
class PolicyBatch(CloneBatch):
    """What a policy of OpenVLA's architecture is to answer."""

    labels: Tensor  # [row, dim] action tokens
    answers: Tensor  # [row, step] the answer alone, -1 behind its end
    first_actions: Tensor  # [row] where in the answer the action begins


class Batches:
    """Makes batches of samples: acting at once, seven tokens, or thinking aloud first."""

    def __init__(
        self,
        samples: PolicySamples,
        tokenizer: Tokenizer,
        config: OpenVLAConfig,
        words: WordsConfig | None = None,
    ) -> None:
        self.samples = samples
        self._tokenizer = tokenizer
        self._words = words or WordsConfig()
        self._prompt, self._thinking_prompt = (
            PromptEncoder(tokenizer, template, Path("the tokenizer"))
            for template in (PromptTemplate.OPENVLA, PromptTemplate.ECOT)
        )
        self._images = ImageProcessor(config.image, ImageChain.NONE)
        self._eos = tokenizer.get_vocab()[EOS_PIECE]

    def take(
        self, chosen: NDArray[np.int64], generator: np.random.Generator, thinks: bool = False
    ) -> PolicyBatch:
        """The named samples, each asked for in a sentence drawn for it."""
        samples = self.samples
        rows = [self._row(int(index), generator, thinks) for index in chosen]
        pictures = [self._images.fit(decode_frame(samples.encoded[index])) for index in chosen]
        ids = [torch.tensor(prompt + answer[:-1]) for prompt, answer in rows]
        answers = [torch.tensor(answer) for _, answer in rows]
        behind = samples.labels.shape[1] + int(thinks)  # the end of the sequence is said aloud, too
        return PolicyBatch(
            frames=torch.from_numpy(np.stack(pictures)),
            labels=torch.from_numpy(samples.labels[chosen]),
            positions=torch.from_numpy(samples.positions[chosen]),
            weights=torch.from_numpy(samples.weights[chosen]),
            ids=pad_sequence(ids, batch_first=True),
            prompt_lengths=torch.tensor([len(prompt) for prompt, _ in rows]),
            answers=pad_sequence(answers, batch_first=True, padding_value=-1),
            first_actions=torch.tensor([len(answer) - behind for _, answer in rows]),
        )

    def _row(
        self, index: int, generator: np.random.Generator, thinks: bool
    ) -> tuple[list[int], list[int]]:
        """Ids of a sample's prompt and of its answer."""
        samples = self.samples
        told = samples.requests[index].say(self._words, generator)
        action = samples.labels[index].tolist()
        if not thinks:
            return list(self._prompt.encode(told)), action
        text = self._tokenizer.encode(samples.thoughts[index], add_special_tokens=False).ids
        return list(self._thinking_prompt.encode(told)), [*text, *action, self._eos]
