"""How sure the target is of each number of an action: its own distributions over recorded frames.

Relaxed acceptance takes guesses that are some bins off. It saves passes where the target wavers
between bins, and it costs little where these lie side by side.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from deft_core.files import write_atomically
from deft_core.measures.table import legend, markdown_table
from deft_core.types import Observation
from deft_libero.results.store import WEIGHTS
from deft_policies.decoding.clock import StageClock
from deft_policies.families.model import TokenModel
from deft_policies.families.policy import VlaPolicy
from scripts.reproduce.record import FrameSet
from scripts.reproduce.study import ReproductionError

FILE = "choices.jsonl.gz"
_RADII = (1, 2, 3, 5, 9, 15)
_ARM = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
_MEANINGS = {
    "first choice": "mean probability of the bin that plain decoding takes",
    "bits": "mean entropy over the bins; 8 were all 256 alike",
    f"second within {_RADII[0]}": "share of the frames in which the second likeliest bin is so "
    "many bins from the likeliest; the columns to the right likewise",
}


def record_choices(policy: VlaPolicy, frames: FrameSet, out: Path) -> None:
    """Write a line for every episode, unless they are there; nothing of a policy that thinks."""
    model = policy.model
    if model.specs[policy.find_key(None)].stop is not None:
        return
    header = {"frames": frames.label, "weights": policy.digests.get(WEIGHTS, "not recorded")}
    if (out / FILE).exists():
        if _read(out)[0] != header:
            raise ReproductionError(f"{out / FILE} was made of other frames or weights: delete it")
        return
    lines: list[object] = [header]
    for key, seen in tqdm(frames.episodes(), unit="episode", desc="choices", disable=None):
        found = [_choices(policy, model, one) for one in seen]
        names = ("first", "second", "probability", "bits")
        columns = zip(names, zip(*found, strict=True), strict=True)
        lines.append({"task": key.task, "trial": key.trial, **dict(columns)})
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    write_atomically(out / FILE, gzip.compress(text.encode(), mtime=0))


def _choices(policy: VlaPolicy, model: TokenModel, seen: Observation) -> list[list[float]]:
    """Of each number: the likeliest and the second bin, the odds of the first, entropy in bits."""
    target = model.target
    spec = model.specs[policy.find_key(None)]
    bins = target.action_tokens.first
    with torch.inference_mode():
        (prompt,) = model.see([seen], StageClock(model.device))
        logits = torch.stack(target.logits_along(prompt, spec.max_tokens))
        odds = torch.softmax(logits[:, bins : bins + len(target.action_tokens)].double(), dim=1)
    best = odds.topk(2, dim=1)
    bits = torch.special.entr(odds).sum(dim=1) / np.log(2)
    first, second = best.indices.T.tolist()
    return [first, second, _rounded(best.values[:, 0]), _rounded(bits)]


def _rounded(values: Tensor) -> list[float]:
    return [round(one, 4) for one in values.tolist()]


def choices_table(folder: Path) -> str:
    """A row for every number of an action, and one for those of the motion together."""
    _, *lines = _read(folder)
    first, second, odds, bits = (
        np.concatenate([np.array(line[name]) for line in lines])
        for name in ("first", "second", "probability", "bits")
    )  # [frame, number]
    names = _ARM if first.shape[1] == len(_ARM) else [str(one) for one in range(first.shape[1])]
    apart = np.abs(first - second)

    def row(name: str, chosen: slice) -> list[str]:
        shares = [f"{100 * np.mean(apart[:, chosen] <= radius):.1f}%" for radius in _RADII]
        return [name, f"{odds[:, chosen].mean():.2f}", f"{bits[:, chosen].mean():.2f}", *shares]

    rows = [row(name, slice(at, at + 1)) for at, name in enumerate(names)]
    rows.append(row("all but the last", slice(0, -1)))
    radii = [f"second within {radius}" for radius in _RADII]
    columns = ["number", *list(_MEANINGS)[:2], *radii]
    return "\n".join([markdown_table(columns, rows), legend(columns, _MEANINGS)]).rstrip()


def _read(folder: Path) -> list[dict[str, object]]:
    with gzip.open(folder / FILE, "rt") as lines:
        return [json.loads(line) for line in lines]
