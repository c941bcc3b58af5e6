"""A draft source of an installed package, kept from doing harm."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import torch
from torch import Tensor

from deft_policies.decoding.batch import Batch
from deft_policies.decoding.drafts import DraftSource
from deft_policies.decoding.plugins import load_source, naming
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import Chains, DraftLimits, DraftTree
from deft_policies.errors import PolicyError


class PluginSource(DraftSource):
    """The source, with errors that name its plugin. Tokens outside the vocabulary are no guesses.

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
