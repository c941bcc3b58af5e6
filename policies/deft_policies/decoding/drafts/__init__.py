"""Draft sources: their contract, and what a source of a package needs.

A source does not know which rule will judge its guesses.
"""

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import replace
from importlib.metadata import EntryPoint

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.batch import Batch
from deft_policies.decoding.kinds import source_number
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import MOST_BRANCHES, TreeShape
from deft_policies.decoding.plugins import load_source, naming
from deft_policies.decoding.sampling import DRAFT, exponential, target_odds
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import Chains as Chains  # for sources of packages, too
from deft_policies.decoding.tree import DraftLimits as DraftLimits
from deft_policies.decoding.tree import DraftTree as DraftTree
from deft_policies.decoding.tree import Draw, Extend, beam_tree, template_tree
from deft_policies.errors import PolicyError

# What a source may need.
MEMORY = "memory"  # the session's past actions: `batch.past`
FRAME = "frame"  # what the prompts hold
PREDICTIONS = "predictions"  # on the host, the last tree: `Row.drafted`, `Row.predictions`
HIDDEN = "hidden"  # the target's hidden states
LOGITS = "logits"  # the target's logits, or `batch.last.predictions`


class DraftSource(ABC):
    """One source of guesses, for one batch.

    `kind` is its name, `needs` what it reads. A source that needs neither HIDDEN nor LOGITS can
    draft in the prefill, too. A `capturable` source reads nothing but tensors on the device and
    updates its state in place, so that its rounds can be captured as a CUDA graph. It is asked
    where `least_steps` past actions are known.
    """

    kind: str
    needs: frozenset[str]
    capturable: bool
    least_steps = 0

    def allocate(self, batch: Batch) -> None:  # noqa: B027 - some keep nothing
        """Set aside what it keeps of every row of a new batch, and forget the batch before."""

    def begin(  # noqa: B027 - some keep nothing
        self, batch: Batch, prompts: Prompts, hidden: Tensor | None
    ) -> None:
        """Start with the rows of `batch`, which have just joined: from `batch.first` on.

        `hidden` [row, position, width] is what the prefill computed of the prompts. It is None for
        a source without HIDDEN, which begins before the prefill.
        """

    @abstractmethod
    def draft(self, batch: Batch, limits: DraftLimits) -> Chains | DraftTree:
        """Guess what follows the roots of every row: `batch.last.bonus`, or the prompts' ends."""

    def grow(
        self,
        batch: Batch,
        roots: Tensor,
        shape: TreeShape,
        log_probs: Tensor,
        extend: Extend,
        first_token: int,
        draw: Draw | None = None,
    ) -> DraftTree:
        """A tree below the roots; other arguments as of `beam_tree`."""
        if shape.is_full_depth:
            deepest = torch.full_like(batch.count, shape.levels)
        else:
            deepest = batch.limit - 1 - batch.count
        if draw is None and not shape.paths:
            grown = beam_tree(shape, log_probs, extend, deepest, first_token)
        else:
            template = shape.as_template()
            grown = template_tree(template, log_probs, extend, deepest, first_token, draw)
        tokens, parents, is_real, known, odds = grown
        sources = torch.full_like(tokens, source_number(self.kind))
        return DraftTree(tokens, parents, is_real, known, sources, odds=odds).below(roots)


def remaining_tokens(batch: Batch, tokens: Tensor, known: Tensor, limits: DraftLimits) -> Chains:
    """Guesses of whole actions [row, chain, place], from the next token on.

    Nothing is known where an answer is not an action, nor after the last token that needs a guess.
    """
    depth, length = limits.depth, tokens.shape[2]
    steps = torch.arange(depth, device=tokens.device)
    places = batch.count[:, None] + steps
    is_open = (places < (batch.limit - 1).clamp(max=length)[:, None])[:, None, :]
    index = places.clamp(max=length - 1)[:, None, :].expand(-1, tokens.shape[1], -1)
    return Chains(tokens.gather(2, index), known.gather(2, index) & is_open)


# Names of f28efa1, for one version more.
Room, from_here = DraftLimits, remaining_tokens


def drawing(method: Method, batch: Batch, drafted: slice, num_tokens: int) -> Draw | None:
    """How tokens are drawn for the ratio test; None where a method takes the likeliest.

    The odds are over `num_tokens` tokens, of which `drafted` can be drawn. A draft has the noise of
    its position and of its rank among its siblings, which are drawn from the same odds, each for
    itself, so that two of them may be equal. Only one round judges the drafts of a position, and of
    two nodes with different parents only one is judged, so what decides is never drawn twice.
    """
    if not method.draws_drafts or method.temperature == 0.0:
        return None

    def draw(log_probs: Tensor, depth: int, ranks: Tensor) -> tuple[Tensor, Tensor]:
        odds = target_odds(log_probs, method.temperature)
        places = (batch.count + depth - 1)[:, None] * MOST_BRANCHES + ranks
        noise = exponential(batch.keys, DRAFT, places, odds.shape[2])
        around = (drafted.start, num_tokens - drafted.stop)
        return (odds / noise).argmax(dim=-1), functional.pad(odds, around)

    return draw


class PluginSource(DraftSource):
    """A source of an installed package, kept from doing harm: errors name its plugin, and tokens
    outside the vocabulary are no guesses.

    Such tokens are an error in the first draft, which is looked at; later ones are replaced on the
    device, because looking would make the host wait.
    """

    def __init__(self, found: EntryPoint, target: Target) -> None:
        self._found, self._last_token = found, target.num_tokens - 1
        self._is_checked = False
        with naming(found, "drafts"):
            made = load_source(found)(target)
            if getattr(made, "kind", None) != found.name:
                raise PolicyError(f"must make a source whose kind is {found.name!r}, got {made!r}")
            if not isinstance(made, DraftSource):
                raise PolicyError(f"must make a DraftSource, got {type(made).__name__}")
            self._source = made
            self.kind, self.needs = made.kind, frozenset(made.needs)
            self.capturable, self.least_steps = made.capturable, made.least_steps

    def for_a_batch(self) -> "PluginSource":
        """The same source with room for another batch's state: what it was made with is shared."""
        other = copy(self)
        other._source = copy(self._source)
        return other

    def allocate(self, batch: Batch) -> None:
        """As the plugin does."""
        with naming(self._found):
            self._source.allocate(batch)

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """As the plugin does."""
        with naming(self._found):
            self._source.begin(batch, prompts, hidden)

    def draft(self, batch: Batch, limits: DraftLimits) -> Chains | DraftTree:
        """As the plugin does, if its answer can be read."""
        with naming(self._found):
            guesses = self._source.draft(batch, limits)
            is_guess = self._check_shape(guesses, len(limits.roots))
            is_captured = is_guess.is_cuda and torch.cuda.is_current_stream_capturing()
            tokens = guesses.tokens
            if not self._is_checked and not is_captured:
                self._is_checked = True
                wrong = tokens[is_guess & ((tokens < 0) | (tokens > self._last_token))]
                if len(wrong) > 0:
                    raise PolicyError(
                        f"guessed token {int(wrong[0])}, and the vocabulary ends at "
                        f"{self._last_token}"
                    )
            return replace(guesses, tokens=tokens.clamp(0, self._last_token))

    def _check_shape(self, guesses: object, num_rows: int) -> Tensor:
        """Which of the tokens are guesses; raises `PolicyError` for what nobody could read."""
        columns: tuple[Tensor, ...]
        if isinstance(guesses, Chains):
            columns, axes = (guesses.tokens, guesses.is_known), "[row, chain, step]"
            is_guess = guesses.is_known
        elif isinstance(guesses, DraftTree):
            columns, axes, is_guess = guesses.columns, "[row, node]", guesses.is_real
        else:
            raise PolicyError(f"draft must return Chains or a DraftTree, got {guesses!r}")
        shape = columns[0].shape
        if len(shape) != axes.count(",") + 1 or shape[0] != num_rows:
            raise PolicyError(f"tokens must be {axes} of {num_rows} rows, got {list(shape)}")
        if any(one.shape != shape for one in columns):
            raise PolicyError(f"all must have the shape of tokens, {list(shape)}")
        if columns[0].dtype != torch.int64 or is_guess.dtype != torch.bool:
            raise PolicyError("tokens must be int64, is_known or is_real bool")
        return is_guess
