"""Clones demonstrations into a small pi0-FAST, by the loop that clones into a small OpenVLA."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deft_core.datasets.demonstrations import decode_frame
from deft_policies.families.pi0fast.pictures import to_pixels
from deft_policies.families.pi0fast.prompt import PromptEncoder, prompt_text, state_bins
from tiny_libero_recipe.data import CloneBatch
from tiny_libero_recipe.fast_checkpoint import MAX_PROMPT
from tiny_libero_recipe.fast_format import HIDDEN, FastFormat
from tiny_libero_recipe.fast_model import (
    FastModelConfig,
    FastNet,
    build_fast_config,
    initialise_fast,
)
from tiny_libero_recipe.fast_samples import BEHIND, PreparedFast
from tiny_libero_recipe.fit import (
    CloneConfig,
    CloneTrainer,
    comes_at,
    position_loss,
    spelling_loss,
)

_CELL = 2  # patches of a cell's side, of which a short step's decoder is shown one


@dataclass(frozen=True)
class FastLossConfig:
    """`sigma` is in coefficients, see `near_codes`; 0 is plain cross-entropy."""

    sigma: float = 0.7
    range_power: float = 0.0  # a code counts by its dimensions' ranges to this power; 0: all alike
    position_weight: float = 1.0  # of the auxiliary regression of simulator positions


@dataclass(frozen=True)
class FastFitConfig(CloneConfig):
    """A training run of a policy that writes FAST codes."""

    model: FastModelConfig = field(default_factory=FastModelConfig)
    loss: FastLossConfig = field(default_factory=FastLossConfig)
    num_codes: int = 384  # of the FAST tokenizer, at most
    whole_share: float = 0.0  # of the steps, whose decoder is shown every patch of a picture
    state_noise: float = 0.02  # of a number's range; a state that is known exactly hides pictures
    hidden_share: float = 0.4  # at most so much of an answer is not shown
    never_hidden: float = 0.1  # of the samples, of which all is shown


@dataclass(frozen=True)
class FastBatch(CloneBatch):
    """What a policy that writes FAST codes is shown, and what it is to answer."""

    patches: Tensor  # [row, kept] those that the decoder is shown
    targets: Tensor  # [row, step, token] shares of all tokens, weighed, zero behind the end


def near_codes(given: FastFormat, sigma: float) -> Tensor:
    """What may stand for each code, [dim, code, code]: itself, and those of nearly its actions.

    Gaussian weights of the distance between codes of as many coefficients, the first of which is
    of a dimension. `sigma` is in coefficients of the dimension with the widest range; in a narrow
    one as many coefficients are a smaller motion. A code that ends within a coefficient is itself
    alone; so is every code where sigma is 0.
    """
    pieces, ranges = given.codec.pieces, given.action.second - given.action.first
    shares = torch.from_numpy(ranges / ranges.max())
    groups: dict[int, list[int]] = {}
    for code, piece in enumerate(pieces):
        if piece.isascii():  # a byte is a coefficient
            groups.setdefault(len(piece), []).append(code)
    tables = torch.eye(len(pieces)).repeat(len(ranges), 1, 1)
    for members in groups.values() if sigma > 0 else ():
        numbers = torch.tensor([list(pieces[code]) for code in members]).float()
        index = torch.tensor(members)
        for dim, table in enumerate(tables):
            scaled = numbers * shares[(dim + torch.arange(numbers.shape[1])) % len(shares)]
            away = (scaled[:, None] - scaled).square().sum(dim=2)
            weights = torch.exp(-0.5 * away / sigma**2)
            table[index[:, None], index] = weights / weights.sum(dim=1, keepdim=True)
    return tables


class FastBatches:
    """Makes batches: frames, prompts with the robot's state, and answers."""

    def __init__(self, prepared: PreparedFast, config: FastFitConfig, side: int) -> None:
        """`side` is that of a picture in patches."""
        self._prepared, self._config, self._side = prepared, config, side
        given = prepared.format
        self._tokenizer = given.words.tokenizer
        self.num_words = self._tokenizer.get_vocab_size()
        self._encoder = PromptEncoder(self._tokenizer, self.num_words, MAX_PROMPT)
        self._codes = np.array(given.code_ids)
        self._hidden = self._tokenizer.token_to_id(HIDDEN)
        counts = (given.action.second - given.action.first) ** config.loss.range_power
        self._counts = np.tile(counts / counts.mean(), given.horizon)  # [coefficient]
        near = near_codes(given, config.loss.sigma)
        self._near = torch.zeros(*near.shape[:2], self.num_words)
        self._near[..., given.code_ids] = near

    def number_ids(self) -> Tensor:
        """The tokens of the state's numbers, in order."""
        text = prompt_text("", range(-1, 256))
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return torch.tensor(ids[-2 - 257 : -2])  # before `;` and the line's end

    def take(
        self, chosen: NDArray[np.int64], generator: np.random.Generator, is_whole: bool
    ) -> FastBatch:
        """The named samples, each asked for in a sentence drawn for it."""
        samples, words = self._prepared.samples, self._config.words
        frames = np.stack([decode_frame(samples.encoded[index]) for index in chosen])
        ids, lengths, targets = [], [], []
        for index in chosen.tolist():
            told = samples.requests[index].say(words, generator)
            prompt = self.prompt(told, self._noisy_state(index, generator))
            shown, wanted = self.spell(samples.labels[index], generator)
            ids.append(torch.tensor([*prompt, *shown]))
            lengths.append(len(prompt))
            targets.append(wanted)
        return FastBatch(
            frames=torch.from_numpy(frames),
            positions=torch.from_numpy(samples.positions[chosen]),
            weights=torch.from_numpy(samples.weights[chosen]),
            ids=pad_sequence(ids, batch_first=True),
            prompt_lengths=torch.tensor(lengths),
            patches=torch.from_numpy(self._pick(len(chosen), generator, is_whole)),
            targets=pad_sequence(targets, batch_first=True),
        )

    def prompt(self, instruction: str, state: NDArray[np.float32]) -> list[int]:
        """Ids of a whole prompt."""
        bins = state_bins(state, self._prepared.format.state)
        return self._encoder.encode(prompt_text(instruction, bins.tolist()))

    def _noisy_state(self, index: int, generator: np.random.Generator) -> NDArray[np.float32]:
        numbers = self._prepared.format.state
        noise = self._config.state_noise * generator.standard_normal(numbers.dim)
        state = self._prepared.states[index] + noise * (numbers.second - numbers.first)
        return np.asarray(state, np.float32)

    def spell(
        self, codes: NDArray[np.int64], generator: np.random.Generator
    ) -> tuple[list[int], Tensor]:
        """What an answer is shown of itself, and what it is to say, [step, token]."""
        words, config = self._prepared.format.words, self._config
        written = codes[codes != BEHIND]
        is_shown = generator.random() < config.never_hidden
        share = 0.0 if is_shown else generator.random() * config.hidden_share
        is_hidden = generator.random(len(written)) < share
        shown = self._codes[written]
        shown[is_hidden] = self._hidden
        fixed = torch.eye(self.num_words)
        ends = np.cumsum([len(one) for one in self._prepared.format.codec.begun(written.tolist())])
        dims = np.array([0, *ends[:-1]]) % len(self._near)
        parts = np.split(self._counts, ends[:-1])  # a code counts as the mean of its coefficients
        counts = torch.tensor([part.mean() if len(part) else 1.0 for part in parts]).float()
        codes_wanted = self._near[dims, written] * counts[:, None]
        wanted = (fixed[list(words.prefix)], codes_wanted, fixed[[words.end]])
        return [*words.prefix, *shown.tolist()], torch.cat(wanted)

    def _pick(
        self, num_rows: int, generator: np.random.Generator, is_whole: bool
    ) -> NDArray[np.int64]:
        """All patches of each picture, or one of each cell, drawn anew."""
        if is_whole:
            return np.tile(np.arange(self._side**2), (num_rows, 1))
        num = self._side // _CELL
        rows, columns = generator.integers(0, _CELL, (2, num_rows, num, num))
        cells = _CELL * np.arange(num)
        picked: NDArray[np.int64] = (rows + cells[:, None]) * self._side + columns + cells
        return picked.reshape(num_rows, -1)


class FastTrainer(CloneTrainer[FastNet, FastBatch]):
    """Of pi0-FAST's architecture: it writes the codes of the next steps."""

    def __init__(
        self, config: FastFitConfig, prepared: PreparedFast, device: torch.device | None = None
    ) -> None:
        self.config = config
        num_words = prepared.format.words.tokenizer.get_vocab_size()
        sizes = build_fast_config(config.model, num_words)
        side = sizes.tower.image_size // sizes.tower.patch_size
        self._batches = FastBatches(prepared, config, side)
        net = FastNet(sizes, prepared.samples.positions.shape[1])
        initialise_fast(net, self._batches.number_ids(), config.seed)
        super().__init__(config, net, prepared.samples, device)

    def _is_long(self, step: int) -> bool:
        """Whether the decoder is shown whole pictures."""
        return comes_at(step, self.config.whole_share)

    def _take(
        self, chosen: NDArray[np.int64], generator: np.random.Generator, is_long: bool
    ) -> FastBatch:
        return self._batches.take(chosen, generator, is_long)

    def _look(self, frames: Tensor) -> Tensor:
        return torch.stack([to_pixels(frame) for frame in frames.numpy()]).to(self.device)

    def _losses(self, pixels: Tensor, batch: FastBatch, is_long: bool) -> dict[str, Tensor]:
        net, steps = self.net, batch.targets.shape[1]
        hidden = net(pixels, batch.patches, batch.ids, batch.prompt_lengths, steps)
        logits: Tensor = net.network.decoder.head(hidden)
        scores = logits.float().log_softmax(dim=-1)
        answer = spelling_loss(scores, batch.targets, batch.weights)
        positions = net.position_head(hidden[:, 0])
        return {
            "answer" if is_long else "answer_in_part": answer,
            "positions": position_loss(positions, batch.positions, batch.weights),
        }

    def _weight(self, name: str, is_long: bool) -> float:
        return self.config.loss.position_weight if name == "positions" else 1.0
