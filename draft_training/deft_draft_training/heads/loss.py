"""What a draft head is trained on. Pure functions over hidden states and logits.

    regression     SmoothL1(f^, f)                       be where the target is
    distillation   -sum_v softmax(head f)_v log softmax(head f^)_v      say what it would say
    distance       mean_b |CDF_target(b) - CDF_draft(b)| over bins in order (earth mover's, in
                   shares of the range): being near counts, because relaxed acceptance keeps what
                   is near

All are means over the guesses that lead to action tokens; no other position carries loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deft_draft_training.heads.samples import HeadBatch
from deft_policies.model.sizes import TokenRange


@dataclass(frozen=True)
class HeadLossConfig:
    """Weights of the terms; the defaults are Spec-VLA's."""

    regression: float = 1.0
    distillation: float = 0.1
    distance: float = 0.0
    test_steps: int = 1  # guesses in a row that the head makes from its own output in training
    step_decay: float = 0.8  # weight of each further one against the one before
    whole_vocabulary: bool = False  # distil over every token, for heads that draft them all
    noise: float = 0.2  # width of the uniform noise on hidden inputs at a length of 512


Logits = Callable[[Tensor], Tensor]  # the target's head: [..., width] to [..., token]
# A draft head: embeddings and hidden states of whole sequences, and, where it is not causal, a mask
# and positions, to the guess of the next hidden state at every position.
Guess = Callable[..., Tensor]


def head_losses(
    guess: Guess,
    logits: Logits,
    batch: HeadBatch,
    config: HeadLossConfig,
    noise_seeds: Sequence[int] = (),
) -> dict[str, Tensor]:
    """The loss over all training-time-test steps; its reported parts are those of the first.

    `noise_seeds` has one seed per row, or none for no noise.
    """
    hidden = with_noise(batch, config.noise, noise_seeds)
    targets = batch.at_guesses(batch.targets)
    with torch.no_grad():
        truth = logits(targets).float()
    guesses = [batch.at_guesses(guess(batch.embeds, hidden))]
    first = _terms(guesses[0], targets, logits, truth, config)
    total, weight = first["loss"], 1.0
    for step in range(1, min(config.test_steps, batch.num_guesses)):
        continued = guess(*batch.going_on(guesses))
        guesses.append(continued[:, -batch.num_guesses :])
        weight *= config.step_decay
        # The first guesses of a step have nothing to go on from.
        further = _terms(guesses[-1][:, step:], targets[:, step:], logits, truth[:, step:], config)
        total = total + weight * further["loss"]
    return {**first, "loss": total}


def with_noise(batch: HeadBatch, width: float, seeds: Sequence[int]) -> Tensor:
    """The hidden inputs with uniform noise, the wider the shorter the sequence, as in EAGLE.

    Every row has a seed of its own, so that a sample gets the same noise whichever process has it
    and whatever it is padded to. No seeds: no noise.
    """
    if not width or not seeds:
        return batch.hidden
    noisy = batch.hidden.clone()
    for row, (seed, first) in enumerate(zip(seeds, batch.first.tolist(), strict=True)):
        length = first + batch.num_guesses
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand((length, noisy.shape[2]), generator=generator) - 0.5
        noisy[row, :length] += (width * 512 / length * noise).to(noisy)
    return noisy


def earth_movers(draft: Tensor, target: Tensor) -> Tensor:
    """Earth mover's distance of two distributions over bins in order, as a share of the range.

    `draft` and `target` are probabilities [..., bin]; the result is [...].
    """
    return (draft.cumsum(dim=-1) - target.cumsum(dim=-1)).abs().mean(dim=-1)


def _terms(
    guesses: Tensor, targets: Tensor, logits: Logits, truth: Tensor, config: HeadLossConfig
) -> dict[str, Tensor]:
    """Mean losses of a batch, and how often the head's first choice is the target's."""
    regression = F.smooth_l1_loss(guesses.float(), targets.float())
    drafted = logits(guesses).float()
    log_draft, target = drafted.log_softmax(dim=-1), truth.softmax(dim=-1)
    distillation = -(target * log_draft).sum(dim=-1).mean()
    distance = earth_movers(log_draft.exp(), target).mean()
    return {
        "loss": config.regression * regression
        + config.distillation * distillation
        + config.distance * distance,
        "regression": regression,
        "distillation": distillation,
        "distance": distance,
        "agreement": (drafted.argmax(dim=-1) == truth.argmax(dim=-1)).float().mean(),
    }


def medusa_losses(
    states: Tensor, logits: Logits, tokens: Tensor, actions: TokenRange, decay: float = 0.8
) -> Tensor:
    """Cross-entropy of every head with the token it should foresee.

    `states` [row, position, head, width] are the heads' outputs at the action positions, `tokens`
    [row, L] the action. At position j (0 is the prompt's last) the target itself says a_{j+1} and
    head k (0-based) foresees a_{j+k+2}; what lies behind the action carries no loss.
    """
    num_positions, num_heads = states.shape[1:3]
    drafted = logits(states).float().log_softmax(dim=-1)
    total, weight_sum = states.new_zeros(()), 0.0
    for head in range(num_heads):
        usable = min(num_positions, tokens.shape[1] - head - 1)
        if usable <= 0:
            break
        truth = tokens[:, head + 1 : head + 1 + usable]
        inside = actions.contains(truth)  # heads draft action tokens alone
        columns = torch.where(inside, truth - actions.first, 0)
        losses = -drafted[:, :usable, head].gather(2, columns[:, :, None])[:, :, 0]
        total = total + decay**head * (losses * inside).sum() / inside.sum().clamp(min=1)
        weight_sum += decay**head
    return total / max(weight_sum, 1e-9)
