"""OFT's forward written position by position, and with the mistakes that are easily made in it.

The slow, obviously right twin of `Oft`: one row, whole sequences, a full mask, no selection
of positions before the end. `right` is what the golden files were made with.
"""

from enum import Enum, auto

import torch
from torch import Tensor

from deft_policies.families.oft.model import STOP_ID, Oft


class Mistake(Enum):
    READ_AT_PLACEHOLDERS = auto()
    CAUSAL = auto()
    PROMPT_CAUSAL = auto()
    NO_STOP = auto()
    STOP_ZEROED = auto()
    PLACEHOLDERS_EMBEDDED = auto()
    STATE_BEFORE_PATCHES = auto()
    STATE_BEHIND_PROMPT = auto()
    MEAN_WITHOUT_STOP = auto()
    MEAN_WITHOUT_BOS = auto()
    MEAN_WITH_PLACEHOLDERS = auto()
    FILM_WITHOUT_ONE = auto()
    LAST_PICTURE_FIRST = auto()
    HEAD_BY_DIMENSION = auto()


FILM_MISTAKES = {
    Mistake.MEAN_WITHOUT_STOP,
    Mistake.MEAN_WITHOUT_BOS,
    Mistake.MEAN_WITH_PLACEHOLDERS,
    Mistake.FILM_WITHOUT_ONE,
}
STATE_MISTAKES = {Mistake.STATE_BEFORE_PATCHES, Mistake.STATE_BEHIND_PROMPT}


def slow_hidden(
    oft: Oft,
    pixels: Tensor,
    ids: list[int],
    state: Tensor | None,
    mistake: Mistake | None = None,
) -> Tensor:
    """Hidden states [value, width] of pixels [picture, channel, height, width]."""
    model, num_values = oft.network, oft.parts.num_values
    words = model.decoder.embedding(torch.tensor(ids))
    stop = model.decoder.embedding(torch.tensor([STOP_ID]))
    modulations = slow_modulations(oft, words, stop, mistake)
    if mistake is Mistake.LAST_PICTURE_FIRST:
        pixels = pixels.flip(0)
    patches = torch.cat([model.see(one[None], modulations)[0] for one in pixels])
    token = torch.zeros(0, words.shape[1])
    if state is not None:
        assert oft.parts.state is not None
        token = oft.parts.state(state[None])
    asked = torch.zeros(num_values, words.shape[1])
    if mistake is Mistake.PLACEHOLDERS_EMBEDDED:
        asked = model.decoder.embedding(torch.ones(num_values, dtype=torch.int64))
    if mistake is Mistake.NO_STOP:
        stop = stop[:0]
    if mistake is Mistake.STOP_ZEROED:
        stop = torch.zeros_like(stop)
    parts = [words[:1], patches, token, words[1:], asked, stop]
    if mistake is Mistake.STATE_BEFORE_PATCHES:
        parts = [words[:1], token, patches, words[1:], asked, stop]
    if mistake is Mistake.STATE_BEHIND_PROMPT:
        parts = [words[:1], patches, words[1:], token, asked, stop]
    embeds = torch.cat(parts)
    first = len(words) + len(patches) + len(token) - 1
    if mistake is Mistake.READ_AT_PLACEHOLDERS:
        first += 1
    hidden: Tensor = model.decoder(embeds[None], slow_mask(len(embeds), first, mistake))
    return hidden[0, first : first + num_values]


def slow_mask(length: int, first: int, mistake: Mistake | None) -> Tensor:
    mask = torch.ones(length, length, dtype=torch.bool)
    if mistake is Mistake.CAUSAL:
        mask = mask.tril()
    if mistake is Mistake.PROMPT_CAUSAL:
        mask[: first + 1] = mask.tril()[: first + 1]
    return mask[None, None]


def slow_modulations(
    oft: Oft, words: Tensor, stop: Tensor, mistake: Mistake | None
) -> list[Tensor] | None:
    if oft.parts.film is None:
        return None
    read = torch.cat((words, stop))
    if mistake is Mistake.MEAN_WITHOUT_STOP:
        read = words
    if mistake is Mistake.MEAN_WITHOUT_BOS:
        read = read[1:]
    if mistake is Mistake.MEAN_WITH_PLACEHOLDERS:
        zeros = torch.zeros(oft.parts.num_values, words.shape[1])
        read = torch.cat((read, zeros))
    found = [film(read.mean(dim=0, keepdim=True)) for film in oft.parts.film]
    if mistake is Mistake.FILM_WITHOUT_ONE:
        for one in found:
            one[:, 0] -= 1
    return found


def slow_actions(oft: Oft, hidden: Tensor, mistake: Mistake | None = None) -> Tensor:
    """Normalised actions [step, action_dim] of the head, one step after the other."""
    head, dim = oft.parts.head, oft.parts.action_dim
    assert head is not None
    if mistake is Mistake.HEAD_BY_DIMENSION:
        hidden = hidden.view(dim, -1, hidden.shape[1]).transpose(0, 1).flatten(0, 1)
    steps = [hidden[first : first + dim] for first in range(0, len(hidden), dim)]
    return torch.cat([head(step[None])[0] for step in steps])
