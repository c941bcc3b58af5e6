"""Finds the line of an acceptance rule that makes the host wait for the device.

The rule judges a tree of tensors that have shapes and no values. Whatever asks for a value fails
there, and so would make the host wait on a GPU; such a rule cannot be part of a recording.
"""

import traceback
from pathlib import Path

import torch

from deft_policies.decoding.acceptance.rule import (
    AcceptanceRule,
    ActionContext,
    ActionSpace,
    ScoredTree,
    space_tensors,
)
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.sizes import TokenRange

_ROWS, _NODES, _TOKENS, _WIDTH, _LENGTH = 2, 5, 16, 4, 7


def find_wait(rule: AcceptanceRule) -> str | None:
    """`file:line: source` of the first read of a value; None where there is none."""
    try:
        rule.accepts(example_tree("meta"))
    except RuntimeError as error:
        own = [one for one in traceback.extract_tb(error.__traceback__) if _is_ours(one.filename)]
        last = own[-1]
        return f"{Path(last.filename).name}:{last.lineno}: {last.line}"
    return None


def _is_ours(filename: str) -> bool:
    return Path(torch.__file__).parent not in Path(filename).parents


def example_tree(device: str) -> ScoredTree:
    """Two rows of a chain of guesses, half right; on the device "meta" without values."""
    tokens = torch.arange(_NODES, device=device).expand(_ROWS, -1)
    scores = torch.ones(_ROWS, _NODES, device=device)
    rows = tokens[:, 0]
    places = torch.zeros(_ROWS, _LENGTH, device=device)
    space = space_tensors((ActionSpace.in_bins(_LENGTH),) * _ROWS, torch.device(device))
    return ScoredTree(
        tree=DraftTree(tokens, tokens - 1, tokens >= 0, scores, tokens - 1),
        scores=Scores(
            torch.zeros(_ROWS, _NODES, _TOKENS, device=device),
            torch.ones(_ROWS, _NODES, _WIDTH, device=device),
        ),
        predictions=tokens + 1 - tokens % 2,
        num_committed=rows,
        spent=places.long(),
        vocabulary=TokenRange(0, _TOKENS - 1),
        action_tokens=TokenRange(0, _TOKENS - 1),
        context=ActionContext(*space, places, rows, torch.ones(_ROWS, 3, _WIDTH, device=device)),
    )
