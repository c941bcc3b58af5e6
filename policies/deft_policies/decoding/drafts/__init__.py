"""Draft sources: what a source is asked, and what a source of a package is kept from doing.

A source guesses how an answer goes on. It knows integers of the host, and not which rule will judge
its guesses. Derive from `DraftSource`; a model that drafts for all answers at once derives from
`ModelSource`. Imports no torch, so that methods are listed and checked without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

from deft_policies.decoding.plugins import load_source, naming
from deft_policies.decoding.tree import Branches as Branches
from deft_policies.decoding.tree import Chain as Chain
from deft_policies.decoding.tree import Guesses as Guesses
from deft_policies.errors import PolicyError

if TYPE_CHECKING:
    from torch import Tensor

    from deft_policies.decoding.captured import Layout
    from deft_policies.decoding.sequence import Sequence
    from deft_policies.decoding.target import Prompt, Target


class DraftSource(ABC):
    """Drafts for every sequence whose plan names it. `kind` is its name.

    What it remembers of a sequence belongs into `sequence.notes[kind]`.
    """

    kind: str
    # Whether it can draft in the prefill, before the target has said anything.
    early: bool = True

    def begin(self, sequence: Sequence) -> None:  # noqa: B027 - most remember nothing
        """Start with an answer, before its prefill."""

    @abstractmethod
    def draft(self, sequence: Sequence, depth: int) -> Guesses:
        """Guess what follows the last token, up to `depth` tokens: chains, or a tree."""

    def draft_all(self, sequences: Items[Sequence]) -> list[Guesses]:
        """The guesses of several answers."""
        return [self.draft(sequence, sequence.room) for sequence in sequences]


class ModelSource(DraftSource):
    """A source that looks at what the target computes, and drafts for all answers at once."""

    early = False
    reads_prompts = False  # whether it reads the hidden states of prompts
    # Whether hidden states come with those behind the layers that the target reads (`read_layers`)
    # in front, side by side.
    reads_states = False
    reads_ends = False  # whether it is shown the pass that ends an answer, too

    def observe_prompt(self, sequence: Sequence, prompt: Prompt, hidden: Tensor) -> None:
        """Look at the hidden states [position, width] of a prompt."""

    def observe(self, sequence: Sequence, hidden: Tensor, logits: Tensor) -> None:
        """Look at a pass, `sequence.last`: hidden states [node, width] and logits [node, token].

        They are overwritten by the next pass: what is kept must be copied.
        """

    def capture(self, layout: Layout) -> None:
        """Capture what drafting runs, for passes of this layout."""

    def release(self, sequence: Sequence) -> None:
        """Forget an answer that has ended or was cancelled."""

    @abstractmethod
    def draft_all(self, sequences: Items[Sequence]) -> list[Guesses]:
        """The guesses of several answers, in one read."""

    def draft(self, sequence: Sequence, depth: int) -> Guesses:
        """The guesses of one."""
        return self.draft_all([sequence])[0]


class PluginSource(ModelSource):
    """A source of an installed package, kept from doing harm: errors name its plugin."""

    def __init__(self, found: EntryPoint, target: Target) -> None:
        self._found, self._num_tokens = found, target.num_tokens
        with naming(found, "drafts"):
            source = load_source(found)(target)
            if not isinstance(source, DraftSource):
                raise PolicyError(f"must make a DraftSource, got {type(source).__name__}")
            if getattr(source, "kind", None) != found.name:
                raise PolicyError(
                    f"must make a source whose kind is {found.name!r}, got {source!r}"
                )
            self._source = source
            self._model = source if isinstance(source, ModelSource) else None
            self.kind, self.early = source.kind, source.early
            self.reads_prompts = self._model is not None and self._model.reads_prompts

    def begin(self, sequence: Sequence) -> None:
        """As the plugin does."""
        with naming(self._found):
            self._source.begin(sequence)

    def observe_prompt(self, sequence: Sequence, prompt: Prompt, hidden: Tensor) -> None:
        """As the plugin does, where it is a model."""
        with naming(self._found):
            if self._model is not None:
                self._model.observe_prompt(sequence, prompt, hidden)

    def observe(self, sequence: Sequence, hidden: Tensor, logits: Tensor) -> None:
        """As the plugin does, where it is a model."""
        with naming(self._found):
            if self._model is not None:
                self._model.observe(sequence, hidden, logits)

    def release(self, sequence: Sequence) -> None:
        """As the plugin does, where it is a model."""
        with naming(self._found):
            if self._model is not None:
                self._model.release(sequence)

    def draft_all(self, sequences: Items[Sequence]) -> list[Guesses]:
        """As the plugin does, if its answer can be read."""
        with naming(self._found):
            guessed = self._source.draft_all(sequences)
            if not isinstance(guessed, list) or len(guessed) != len(sequences):
                raise PolicyError(
                    f"draft_all must return the guesses of {len(sequences)} answers, "
                    f"got {guessed!r}"
                )
            for guesses in guessed:
                self._check(guesses)
            return guessed

    def _check(self, guesses: Guesses) -> None:
        if isinstance(guesses, Branches):
            self._check_branches(guesses)
            return
        if not isinstance(guesses, list) or not all(isinstance(guess, list) for guess in guesses):
            raise PolicyError(
                f"draft must return a list of chains, each a list of tokens, got {guesses!r}"
            )
        for chain in guesses:
            self._check_tokens(chain)

    def _check_tokens(self, tokens: Chain) -> None:
        for token in tokens:
            if type(token) is not int:
                raise PolicyError(f"guessed {token!r}, which is no int")
            if not 0 <= token < self._num_tokens:
                raise PolicyError(
                    f"guessed token {token}, and the vocabulary ends at {self._num_tokens - 1}"
                )

    def _check_branches(self, guesses: Branches) -> None:
        self._check_tokens(guesses.tokens)
        if len(guesses.parents) != len(guesses.tokens):
            raise PolicyError("Branches need as many parents as tokens")
        for node, parent in enumerate(guesses.parents, start=1):
            if type(parent) is not int or not 0 <= parent < node:
                raise PolicyError(f"guess {node} hangs on {parent!r}, which is no node before it")


def look_up(past: Items[Items[int]], tokens: Items[int], longest: int) -> Chain | None:
    """What followed the last tokens in an earlier action of the same length; None if nowhere.

    The longest match wins, then the newest.
    """
    count = len(tokens)
    if not past or count >= len(past[-1]):
        return None
    stream = [token for step in past for token in step]
    tail = [*stream, *tokens][-longest:][::-1]
    best, found = 0, None
    for step in reversed(range(len(past))):
        end = step * len(past[-1]) + count
        length = 0
        while length < min(longest, end) and stream[end - 1 - length] == tail[length]:
            length += 1
        if length > best:
            best, found = length, list(past[step][count:])
    return found
