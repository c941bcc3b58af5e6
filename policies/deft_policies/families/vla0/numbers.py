"""An answer written as numbers, and the actions that it stands for.

Only an answer that is exactly what was asked for is an action. What the original makes of others,
the middle of the range or a repeated row, would move a robot without a word.
"""

import re

import numpy as np
from numpy.typing import NDArray

from deft_policies.errors import NoActionError
from deft_policies.families.vla0.run_folder import RunFolder

_NUMBERS = re.compile(r"[0-9]+( [0-9]+)*")


def read_numbers_text(text: str, has_ended: bool, run: RunFolder) -> list[int]:
    """The numbers of a valid answer; `NoActionError` says what is wrong with another."""
    if not has_ended:
        raise NoActionError("the text did not end within the tokens that it may have")
    if not _NUMBERS.fullmatch(text):
        raise NoActionError("the text is not numbers with single spaces between them")
    words = text.split(" ")
    if len(words) != run.num_numbers:
        raise NoActionError(f"the text has {len(words)} numbers, {run.num_numbers} are needed")
    longest = len(str(run.num_bins))
    numbers = [int(word) if len(word) <= longest else run.num_bins + 1 for word in words]
    if max(numbers) > run.num_bins:
        raise NoActionError(f"a number of the text is above {run.num_bins}")
    return numbers


def read_rows_begun(text: str, run: RunFolder) -> list[int]:
    """Numbers of the whole rows with which a text begins, as far as they may stand in an answer."""
    numbers: list[int] = []
    for word in text.split(" ")[: run.num_numbers][:-1]:
        if not word or len(word) > len(str(run.num_bins)) or int(word) > run.num_bins:
            break
        numbers.append(int(word))
    return numbers[: len(numbers) // run.action_dim * run.action_dim]


def to_actions(numbers: list[int], run: RunFolder) -> NDArray[np.float64]:
    """Actions [step, action_dim] in robot units.

    A share of the range is rounded to float32 first; the rest is in the format of the statistics.
    """
    shares = np.array(numbers, np.float32).reshape(-1, run.action_dim) / np.float32(run.num_bins)
    return np.asarray(shares * (run.highest - run.lowest) + run.lowest, np.float64)
