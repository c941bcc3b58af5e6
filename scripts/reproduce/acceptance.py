"""How often drafts stood, token by token, in the committed lines of the small policy.

Apart from studies, so that a machine that only times things needs none of what checks them.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from deft_core.measures.answers import AnswerRecord
from deft_libero.results.store import RunResults, load_runs
from deft_policies.decoding import kinds
from deft_policies.decoding.methods import find_method
from deft_policies.errors import PolicyError
from scripts.reproduce.published import ACTION_LENGTH

LINES = Path(__file__).parents[2] / "docs/results/tiny-libero/frames.jsonl.gz"


def folder_name(*parts: str) -> str:
    """Of a row's lines, by what tells it from others."""
    return re.sub(r"[^A-Za-z0-9._+=-]+", "-", " ".join(parts))


@lru_cache(maxsize=16)
def measured_chances(text: str) -> tuple[float, ...]:
    """Of tokens 1 to 7, where the drafts before it in its pass stood."""
    run = _recorded_runs().get(folder_name(text))
    if run is None:
        raise PolicyError(f"{LINES.name} has no lines of {text!r}; name a method that it has")
    method = find_method(text)
    plan = method.plans[0]
    levels = plan.shape.levels if kinds.HEAD in plan.rounds else ACTION_LENGTH
    answers = [one for record in run.records for one in record.answers]
    return chances(answers, levels, ACTION_LENGTH + method.rule.tokens_behind)


@lru_cache(maxsize=1)
def _recorded_runs() -> dict[str, RunResults]:
    """By the name of their folders."""
    return {run.folder.name: run for run in load_runs(LINES)}


def chances(answers: Iterable[AnswerRecord], levels: int, length: int) -> tuple[float, ...]:
    """Of drafts up to `levels` deep, where `length` - 1 tokens need one; 0 where none was tried."""
    stood, tried = [0] * length, [0] * length
    for answer in answers:
        count = 0
        for kept, guesses in zip(answer.accepted, answer.guesses, strict=True):
            deepest = min(levels, length - 1 - count) if guesses else 0
            for depth in range(min(kept + 1, deepest)):
                tried[count + depth] += 1
                stood[count + depth] += depth < kept
            count += kept + 1
    found = [a / b if b else 0.0 for a, b in zip(stood, tried, strict=True)]
    return tuple(found[:ACTION_LENGTH])
