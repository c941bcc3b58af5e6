"""Clones demonstrations into a small VLA-0, by the loop that clones into a small OpenVLA."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deft_core.datasets.demonstrations import decode_frame
from deft_policies.decoding.acceptance.numbers import END, SPACE
from deft_policies.families.vla0.network import find_ids
from deft_policies.families.vla0.pictures import make_pictures, to_patches
from deft_policies.families.vla0.prompt import IMAGE_PAD, encode_prompt, mrope_positions
from deft_policies.families.vla0.run_folder import RunFolder
from tiny_libero_recipe.data import CloneBatch, PolicySamples
from tiny_libero_recipe.fit import (
    CloneConfig,
    CloneTrainer,
    comes_at,
    position_loss,
    spelling_loss,
)
from tiny_libero_recipe.model import initialise
from tiny_libero_recipe.number_model import NumberModelConfig, NumberNet, build_number_config
from tiny_libero_recipe.number_tokenizer import HIDDEN, token_id
from tiny_libero_recipe.numbers import STOP, spelling_table


@dataclass(frozen=True)
class NumberLossConfig:
    """`sigma` is in numbers of 0 to 1000; 0 is plain cross-entropy."""

    sigma: float = 5.0
    position_weight: float = 1.0  # of the auxiliary regression of simulator positions


@dataclass(frozen=True)
class NumberFitConfig(CloneConfig):
    """A training run of a policy that writes numbers."""

    model: NumberModelConfig = field(default_factory=NumberModelConfig)
    loss: NumberLossConfig = field(default_factory=NumberLossConfig)
    whole_share: float = 0.25  # of the steps, whose answers are whole
    short_rows: int = 1  # of the others' answers: the picture is seen for less time spent on text
    hidden_share: float = 0.4  # at most so much of an answer is not shown
    never_hidden: float = 0.1  # of the samples, of which all is shown


@dataclass(frozen=True)
class NumberBatch(CloneBatch):
    """What a policy that writes numbers is to answer."""

    targets: Tensor  # [row, step, character] shares of the twelve, zero behind the end


class NumberBatches:
    """Makes batches of whole answers, or of their first rows."""

    def __init__(
        self, samples: PolicySamples, tokenizer: Tokenizer, run: RunFolder, config: NumberFitConfig
    ) -> None:
        self._samples, self._tokenizer, self._run, self._config = samples, tokenizer, run, config
        self._ids = np.array(find_ids(tokenizer, run.model))
        self._hidden = token_id(tokenizer, HIDDEN)
        self._near = spelling_table(config.loss.sigma).numpy()
        self._exact = spelling_table(0.0).numpy()

    def prompt(self, instruction: str) -> list[int]:
        """Ids of a whole prompt."""
        return encode_prompt(self._tokenizer, self._run, instruction)

    def take(
        self, chosen: NDArray[np.int64], generator: np.random.Generator, is_whole: bool
    ) -> NumberBatch:
        """The named samples, each asked for in a sentence drawn for it."""
        samples, words = self._samples, self._config.words
        frames = np.stack([decode_frame(samples.encoded[index]) for index in chosen])
        ids, lengths, targets = [], [], []
        for index in chosen.tolist():
            prompt = self.prompt(samples.requests[index].say(words, generator))
            tokens, wanted = self.spell(samples.labels[index], is_whole)
            shown = self._ids[tokens[:-1]]
            is_hidden = generator.random(len(shown)) < self._draw_share(generator)
            shown = np.where(is_hidden, self._hidden, shown)
            ids.append(torch.tensor([*prompt, *shown.tolist()]))
            lengths.append(len(prompt))
            targets.append(torch.from_numpy(wanted))
        return NumberBatch(
            frames=torch.from_numpy(frames),
            positions=torch.from_numpy(samples.positions[chosen]),
            weights=torch.from_numpy(samples.weights[chosen]),
            ids=pad_sequence(ids, batch_first=True),
            prompt_lengths=torch.tensor(lengths),
            targets=pad_sequence(targets, batch_first=True),
        )

    def _draw_share(self, generator: np.random.Generator) -> float:
        is_shown = generator.random() < self._config.never_hidden
        return 0.0 if is_shown else generator.random() * self._config.hidden_share

    def spell(
        self, numbers: NDArray[np.int64], is_whole: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """An answer's characters, or those of its first rows, and what each might have been.

        The gripper, a row's last number, is exact: what is near to open is not nearly right.
        """
        dim = self._run.action_dim
        if not is_whole:
            numbers = numbers[: dim * self._config.short_rows]
        tokens, targets = [], []
        for place, number in enumerate(numbers.tolist()):
            digits = [int(digit) for digit in str(number)]
            table = self._exact if place % dim == dim - 1 else self._near
            tokens += [*digits, SPACE]
            targets.append(table[number, : len(digits) + 1])
        wanted = np.zeros((len(tokens), END + 1), np.float32)
        wanted[:, : STOP + 1] = np.concatenate(targets)
        if is_whole:
            tokens[-1] = END
            wanted[-1] = np.eye(END + 1, dtype=np.float32)[END]
        return np.array(tokens), wanted


class NumberTrainer(CloneTrainer[NumberNet, NumberBatch]):
    """Of VLA-0's architecture: it writes the numbers of the next steps."""

    def __init__(
        self,
        config: NumberFitConfig,
        run: RunFolder,
        samples: PolicySamples,
        tokenizer: Tokenizer,
        device: torch.device | None = None,
    ) -> None:
        self.config, self._run = config, run
        self._batches = NumberBatches(samples, tokenizer, run, config)
        ids = find_ids(tokenizer, run.model)
        sizes = build_number_config(config.model, tokenizer.get_vocab_size(), ids)
        prompt, pad = self._batches.prompt(""), token_id(tokenizer, IMAGE_PAD)
        first = prompt.index(pad)
        slots = slice(first, first + prompt.count(pad))
        places = mrope_positions(prompt, pad, run.grid)
        net = NumberNet(sizes, places, slots, samples.positions.shape[1])
        initialise(net, config.seed)
        super().__init__(config, net, samples, device)
        self._answered = torch.tensor(ids, device=self.device)

    def _is_long(self, step: int) -> bool:
        """Whether answers are whole."""
        return comes_at(step, self.config.whole_share)

    def _take(
        self, chosen: NDArray[np.int64], generator: np.random.Generator, is_long: bool
    ) -> NumberBatch:
        return self._batches.take(chosen, generator, is_long)

    def _look(self, frames: Tensor) -> Tensor:
        pictures = [make_pictures([frame], self._run)[0] for frame in frames.numpy()]
        return to_patches(torch.from_numpy(np.stack(pictures))).to(self.device)

    def _losses(self, pixels: Tensor, batch: NumberBatch, is_long: bool) -> dict[str, Tensor]:
        net, grid, steps = self.net, self._run.grid, batch.targets.shape[1]
        hidden = net(pixels, grid, batch.ids, batch.prompt_lengths, steps)
        logits: Tensor = net.decoder.head(hidden)
        scores = logits.float().log_softmax(dim=-1)[..., self._answered]
        answer = spelling_loss(scores, batch.targets, batch.weights)
        positions = net.position_head(hidden[:, 0])
        return {
            "answer" if is_long else "first_rows": answer,
            "positions": position_loss(positions, batch.positions, batch.weights),
        }

    def _weight(self, name: str, is_long: bool) -> float:
        return self.config.loss.position_weight if name == "positions" else 1.0


def run_of(lowest: NDArray[np.float64], highest: NDArray[np.float64], directory: Path) -> RunFolder:
    """What the run that is taught here says of pictures and numbers: VLA-0's, with one camera."""
    return RunFolder(
        model=directory,
        base=directory,
        num_cameras=1,
        is_tiled=False,
        crop=0.875,
        size=224,
        num_steps=8,
        action_dim=len(lowest),
        num_bins=1000,
        names_pictures=True,
        lowest=lowest,
        highest=highest,
        repetition_penalty=1.0,
    )
