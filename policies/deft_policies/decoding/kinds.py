"""What a user may choose about drafting, by name. Imports nothing heavy: flags are made of it."""

from enum import Enum


class DraftKind(Enum):
    """The draft sources there are."""

    HEAD = "head"  # the trained EAGLE-style draft head
    PREVIOUS = "previous"  # the target's own last action
    EXTRAPOLATION = "extrapolation"  # the last actions, continued in a straight line
    NGRAM = "ngram"  # what followed the same tokens earlier in the session
    RETRIEVAL = "retrieval"  # the action stored with the most similar frame
    RECYCLED = "recycled"  # the target's answers behind its last mismatch (Jacobi)
    MEDUSA = "medusa"  # parallel heads, one per position ahead
    SMALL_MODEL = "small-model"  # a cheaper model of the same tokens

    @property
    def number(self) -> int:
        """What `DraftTree.sources` holds for this kind."""
        return SOURCE_KINDS.index(self)


SOURCE_KINDS: tuple[DraftKind, ...] = tuple(DraftKind)


class RopeOffset(Enum):
    """Where a draft head places the nodes of its tree, from level 2 on."""

    CORRECT = "correct"  # behind the committed positions, patches counted
    PUBLISHED = "published"  # Spec-VLA's code: 0 in the first round, then without the patches


class KeyMask(Enum):
    """Which keys an action position of a draft head may attend to."""

    CAUSAL = "causal"  # everything before it and itself
    PREFIX_ONLY = "prefix-only"  # the prompt without its last position, as Spec-VLA was trained
