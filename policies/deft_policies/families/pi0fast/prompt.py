"""The prompt: what is to be done, and the robot's state in 256 steps, as LeRobot writes it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deft_policies.errors import RequestError
from deft_policies.families.pi0fast.normalization import Normalization, Numbers

BOS = "<bos>"
_EDGES = np.linspace(-1.0, 1.0, 257)[:-1]


def state_bins(state: Numbers, normalization: Normalization, padded: int = 0) -> NDArray[np.int64]:
    """A robot's raw state as numbers from -1 (below the range) to 255.

    LeRobot 0.4 had it `padded` with zeros after it was normalised.
    """
    normalised = normalization.normalise(state.astype(np.float32))
    if padded > len(normalised):
        normalised = np.pad(normalised, (0, padded - len(normalised)))
    bins: NDArray[np.int64] = np.digitize(normalised, _EDGES) - 1
    return bins


def prompt_text(instruction: str, bins: Sequence[int]) -> str:
    """Case is kept."""
    words = instruction.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {words}, State: {' '.join(map(str, bins))};\n"


class PromptEncoder:
    """Prompts to ids. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, num_rows: int, most: int) -> None:
        """`num_rows` of the table of words; prompts are cut behind `most` ids."""
        self._tokenizer, self._num_rows, self._most = tokenizer, num_rows, most
        bos = tokenizer.token_to_id(BOS)
        assert bos is not None  # the tokenizer was checked
        self.bos: int = bos

    def encode(self, text: str) -> list[int]:
        """Both `<bos>` included: the one before the text, and the one that LeRobot adds behind."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        ids = [self.bos, *ids][: self._most]
        if max(ids) >= self._num_rows:
            word = self._tokenizer.id_to_token(max(ids))
            raise RequestError("instruction", f"holds {word}, which the model has no row for")
        return [*ids, self.bos]
