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
    SpaceTensors,
)
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree, TokenRange

_META = torch.device("meta")
_ROWS, _NODES, _TOKENS, _WIDTH, _LENGTH = 2, 5, 16, 4, 7


def find_wait(rule: AcceptanceRule) -> str | None:
    """`file:line: source` of the first read of a value; None where there is none."""
    try:
        rule.accepts(_without_values())
    except RuntimeError as error:
        own = [one for one in traceback.extract_tb(error.__traceback__) if _is_ours(one.filename)]
        last = own[-1]
        return f"{Path(last.filename).name}:{last.lineno}: {last.line}"
    return None


def _is_ours(filename: str) -> bool:
    return Path(torch.__file__).parent not in Path(filename).parents


def _without_values() -> ScoredTree:
    nodes = torch.empty(_ROWS, _NODES, dtype=torch.int64, device=_META)
    scores = torch.empty(_ROWS, _NODES, device=_META)
    rows = nodes[:, 0]
    places = torch.empty(_ROWS, _LENGTH, device=_META)
    return ScoredTree(
        tree=DraftTree(nodes, nodes, nodes >= 0, scores, nodes),
        scores=Scores(
            torch.empty(_ROWS, _NODES, _TOKENS, device=_META),
            torch.empty(_ROWS, _NODES, _WIDTH, device=_META),
        ),
        predictions=nodes,
        num_committed=rows,
        spent=places.long(),
        vocabulary=TokenRange(0, _TOKENS - 1),
        action_tokens=TokenRange(0, _TOKENS - 1),
        context=ActionContext(
            SpaceTensors.of((ActionSpace.in_bins(_LENGTH),) * _ROWS, _META),
            places,
            rows,
            torch.empty(_ROWS, 3, _WIDTH, device=_META),
        ),
    )
