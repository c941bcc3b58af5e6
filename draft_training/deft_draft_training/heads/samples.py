"""What a draft head learns from: one action of the target, as the target itself computed it.

With P prompt positions (patches counted) and L action tokens a_1..a_L:

    position t          0 .. P-1          P .. P+L-2
    input embedding e   prompt            a_1 .. a_{L-1}
    hidden state f      f_0 .. f_{P-1}    f_P .. f_{P+L-2}
    next token                  a_1       a_2 .. a_L

The head reads (f_t, e_{t+1}) and guesses f_{t+1}, so only guesses at t = P-1 .. P+L-3 lead to
action tokens, a_2 .. a_L: those positions carry the loss. The prompt is the one that inference
sees, ending where the answer begins; the answer is the target's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deft_core.datasets.formats import read_dataset
from deft_core.types import Observation


@dataclass(frozen=True)
class HeadSample:
    """One action. Word embeddings are not kept: the target's table gives them back."""

    episode: int
    prompt_ids: Tensor  # [text] int64
    patches: Tensor  # [patch, width], projected
    hidden: Tensor  # [P + L - 1, width], after the final norm
    tokens: Tensor  # [L] int64, the target's greedy answer

    @property
    def num_prompt(self) -> int:
        """Prompt positions, patches counted."""
        return len(self.prompt_ids) + len(self.patches)


@dataclass(frozen=True)
class HeadBatch:
    """Samples side by side, padded behind the last real position."""

    embeds: Tensor  # [row, position, width], e_1 .. : one position ahead of `hidden`
    hidden: Tensor  # [row, position, width], f_0 ..
    targets: Tensor  # [row, position, width], f_1 ..
    first: Tensor  # [row], position of the first guess that counts, P - 1
    tokens: Tensor  # [row, L], the actions

    @property
    def num_guesses(self) -> int:
        """Positions per row that carry the loss: they lead to a_2 .. a_L."""
        return self.tokens.shape[1] - 1

    def at_guesses(self, values: Tensor) -> Tensor:
        """Pick the positions that carry the loss, [row, guess, width]."""
        steps = torch.arange(self.num_guesses, device=values.device)
        index = (self.first[:, None] + steps)[:, :, None]
        return values.gather(1, index.expand(-1, -1, values.shape[2]))

    def going_on(self, guesses: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a head reads when it goes on from its own guesses, as it does inside a tree.

        Embeddings and hidden states [row, position, width], who sees whom [row, 1, query, key],
        and rotary positions [row, position].

        `guesses` [row, guess, width] are those of each step so far, made at the positions that
        carry the loss. Behind the true sequence follow as many blocks of those positions as there
        are steps. Position i of block j is the j-th guess in a row: it reads the guess
        that step j - 1 made at i - 1 and sees the true states up to i - j, what its own chain
        guessed since, and itself. So what was committed stays true (as in HASS).
        """
        num, count = len(guesses), self.num_guesses
        steps = torch.arange(count, device=self.first.device)
        draft_positions = self.first[:, None] + steps
        before = [
            torch.cat((guess[:, :1], guess[:, :-1]), dim=1).to(self.hidden) for guess in guesses
        ]
        embeds = self.at_guesses(self.embeds)
        positions = torch.arange(self.hidden.shape[1], device=draft_positions.device)
        return (
            torch.cat((self.embeds, *[embeds] * num), dim=1),
            torch.cat((self.hidden, *before), dim=1),
            self._chains(num, draft_positions, positions),
            torch.cat(
                (positions.expand(len(draft_positions), -1), *[draft_positions] * num), dim=1
            ),
        )

    def _chains(self, num: int, draft_positions: Tensor, positions: Tensor) -> Tensor:
        """Who sees whom in `going_on`, [row, 1, query, key]."""
        width, count = len(positions), self.num_guesses
        mask = draft_positions.new_zeros(
            len(draft_positions), width + num * count, width + num * count
        ).bool()
        mask[:, :width, :width] = positions <= positions[:, None]
        steps = torch.arange(count, device=draft_positions.device)
        for block in range(1, num + 1):
            here = slice(width + (block - 1) * count, width + block * count)
            mask[:, here, :width] = positions <= (draft_positions - block)[:, :, None]
            for other in range(1, block + 1):
                there = slice(width + (other - 1) * count, width + other * count)
                mask[:, here, there] = steps == steps[:, None] - (block - other)
        return mask[:, None]


def collate(samples: Sequence[HeadSample], table: Tensor) -> HeadBatch:
    """Lay samples side by side. `table` is the target's embedding, [token, width]."""
    rows = [_lay_out(sample, table) for sample in samples]
    embeds = pad_sequence([row for row, _ in rows], batch_first=True)
    hidden = pad_sequence([row for _, row in rows], batch_first=True)
    return HeadBatch(
        embeds=embeds[:, 1:],
        hidden=hidden[:, :-1],
        targets=hidden[:, 1:],
        first=torch.tensor([sample.num_prompt - 1 for sample in samples], device=table.device),
        tokens=torch.stack([sample.tokens for sample in samples]).to(table.device),
    )


def _lay_out(sample: HeadSample, table: Tensor) -> tuple[Tensor, Tensor]:
    """Input embeddings and hidden states of one whole sequence."""
    ids = torch.cat([sample.prompt_ids, sample.tokens[:-1]]).to(table.device)
    words = table[ids].float()  # the target may be bfloat16, a head is trained in float32
    patches = sample.patches.to(words)
    embeds = torch.cat([words[:1], patches, words[1:]])
    return embeds, sample.hidden.to(words)


@dataclass(frozen=True)
class EpisodeSource:
    """Data sets whose frames the target answers, and which frames of them."""

    datasets: tuple[Path, ...]
    stride: int = 1  # every how many steps
    cameras: tuple[str, ...] = ()  # as in `read_dataset`

    def observations(self) -> Iterator[tuple[int, Observation]]:
        """Every `stride`-th step of all episodes, in order, each with its episode's number."""
        episodes = (one for path in self.datasets for one in read_dataset(path, self.cameras))
        for episode, stored in enumerate(episodes):
            for step in islice(stored.steps(), 0, None, self.stride):
                yield episode, step.observation
