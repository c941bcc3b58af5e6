"""FAST: a chunk of actions as a few codes, and back.

A chunk of normalised actions becomes frequencies over time (a DCT), those are rounded to whole
numbers, each number becomes one character, and runs of the characters' bytes become codes
(byte-level BPE). A code may end inside a character, so codes are only read together.

Knows nothing of models and of the ids that they give to codes: a code is 0, 1, 2, ... here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deft_policies.errors import NoActionError

_LAST_CHARACTER = 0x10FFFF


@dataclass(frozen=True, eq=False)
class FastCodec:
    """What the files of one tokenizer say; `deft_policies.fast.files` reads them."""

    scale: float  # of frequencies, before they are rounded
    min_token: int  # the coefficient that character 0 encodes
    pieces: tuple[bytes, ...]  # of each code
    bpe: Tokenizer  # text to codes
    num_steps: int | None = None  # of a chunk, where the files say it
    action_dim: int | None = None

    def encode(self, actions: NDArray[np.floating]) -> list[int]:
        """The codes of normalised actions [step, dim]; `ValueError` where there are none.

        A coefficient below `min_token` becomes `min_token`, as upstream's does.
        """
        return self.encode_coefficients(to_coefficients(actions, self.scale))

    def encode_coefficients(self, coefficients: Sequence[int]) -> list[int]:
        """The codes of coefficients, frequency by frequency, each of all dimensions."""
        numbers = [max(coefficient - self.min_token, 0) for coefficient in coefficients]
        if max(numbers, default=0) > _LAST_CHARACTER:
            raise ValueError(
                f"{max(coefficients)} is too large a coefficient: no character is left"
            )
        text = "".join(map(chr, numbers))
        try:
            expected = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a coefficient has no character: {error.reason}") from None
        codes: list[int] = self.bpe.encode(text, add_special_tokens=False).ids
        if self.bytes_of(codes) != expected:  # the library leaves out what it has no piece for
            raise ValueError("the tokenizer has no piece for some of the coefficients")
        return codes

    def bytes_of(self, codes: Sequence[int]) -> bytes:
        """The coefficients that codes encode together."""
        return b"".join(self.pieces[code] for code in codes)

    def coefficients(self, codes: Sequence[int]) -> list[int]:
        """The coefficients of an answer; `NoActionError` where a character is broken.

        Upstream reads a broken character as U+FFFD, which is a coefficient of some 65,000.
        """
        try:
            text = self.bytes_of(codes).decode()
        except UnicodeDecodeError as error:
            raise NoActionError(
                f"the codes are no text: {error.reason} at byte {error.start} of "
                f"{len(error.object)}, so a coefficient is broken"
            ) from None
        return [ord(character) + self.min_token for character in text]

    def begun(self, codes: Sequence[int | None]) -> list[tuple[int, ...]]:
        """The coefficients that begin in each code; in None, which is no code, begins none."""
        found = iter(self.coefficients([one for one in codes if one is not None]))
        pieces = [b"" if one is None else self.pieces[one] for one in codes]
        return [tuple(next(found) for byte in piece if not _goes_on(byte)) for piece in pieces]

    def decode(self, codes: Sequence[int], num_steps: int, dim: int) -> NDArray[np.float64]:
        """Normalised actions [step, dim]; `NoActionError` for any other number of coefficients."""
        coefficients = self.coefficients(codes)
        if len(coefficients) != num_steps * dim:
            raise NoActionError(
                f"the codes hold {len(coefficients)} coefficients, {num_steps} actions of {dim} "
                f"numbers have {num_steps * dim}"
            )
        return self.to_actions(coefficients, num_steps, dim)

    def to_actions(
        self, coefficients: Sequence[int], num_steps: int, dim: int
    ) -> NDArray[np.float64]:
        """Normalised actions [step, dim] of exactly as many coefficients."""
        frequencies = np.array(coefficients, np.float64).reshape(num_steps, dim) / self.scale
        actions: NDArray[np.float64] = cosines(num_steps).T @ frequencies
        return actions


def _goes_on(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with a character that is begun already."""
    return byte & 0b1100_0000 == 0b1000_0000


def to_coefficients(actions: NDArray[np.floating], scale: float) -> list[int]:
    """Coefficients of normalised actions [step, dim], the lowest frequency of all dimensions first.

    Rounded half to even.
    """
    frequencies = cosines(len(actions)) @ np.asarray(actions, np.float64)
    rounded = np.rint(frequencies * scale)
    if not np.isfinite(rounded).all() or np.abs(rounded).max(initial=0) > _LAST_CHARACTER:
        raise ValueError("the actions are not finite, or far beyond what was normalised")
    coefficients: list[int] = rounded.astype(np.int64).ravel().tolist()
    return coefficients


@lru_cache(maxsize=8)
def cosines(num_steps: int) -> NDArray[np.float64]:
    """The orthonormal DCT-II [frequency, step]; its transpose is the inverse."""
    steps = np.arange(num_steps)
    angles = np.pi / (2 * num_steps) * np.outer(steps, 2 * steps + 1)
    matrix: NDArray[np.float64] = np.sqrt(2 / num_steps) * np.cos(angles)
    matrix[:1] = np.sqrt(1 / num_steps)
    matrix.setflags(write=False)
    return matrix
