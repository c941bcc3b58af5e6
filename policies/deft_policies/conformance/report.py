"""What a comparison with a model's own code found, as a table and as a file that can be posted.

Imports nothing heavy: it also reads reports.
"""

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_core.files import write_atomically
from deft_core.measures.table import NOTHING, Column, column_table
from deft_policies.base import Finding, Verdict
from deft_policies.errors import PolicyError

FORMAT = "deft-conformance/1"
OWN_CODE = "the model's own code"
_DIGEST = "sha256"
# Shares of the actions' range. With equal tokens only the last digits of a division differ; a head
# that computes in bfloat16 differs from itself on another machine by some hundredths.
_ROUNDING, _ROUNDING_OF_BFLOAT16_HEAD = 1e-4, 0.1
_MOST_BYTES = 1 << 24


@dataclass(frozen=True, eq=False)
class Answer:
    """How one frame was answered."""

    ms: float
    tokens: tuple[int, ...] | None = None  # None where the code keeps them to itself
    actions: NDArray[np.float64] | None = None  # [step, action_dim]; None where there is none
    logits: NDArray[np.float32] | None = None  # [token], of the first step
    passes: int | None = None  # runs of the model; None where they are not counted


@dataclass(frozen=True)
class Parting:
    """The first token of an answer that is not that of the model's own code."""

    method: str
    frame: int
    position: int
    own: int | None  # None: its answer had ended
    deft: int | None
    margin: float | None  # between the two tokens' logits, by Deft; None where one has ended
    is_near_tie: bool


@dataclass(frozen=True)
class Row:
    """How one way of answering compares with the model's own code; None where there is nothing."""

    name: str
    num_frames: int
    ms: float  # mean of an answer
    passes: float | None = None  # mean
    equal_tokens: int | None = None  # frames
    num_actions: int | None = None  # frames in which both have an action
    actions_apart: float | None = None  # in robot units, the greatest difference
    actions_apart_share: float | None = None  # of that number's range
    logits_apart: float | None = None  # of the first step, the greatest difference


def compare(
    name: str, own: Sequence[Answer], deft: Sequence[Answer], action_range: NDArray[np.float64]
) -> Row:
    """One row; `action_range` [action_dim] is the difference of the statistics' ends."""
    pairs = list(zip(own, deft, strict=True))
    tokens = [
        one.tokens == other.tokens for one, other in pairs if None not in (one.tokens, other.tokens)
    ]
    apart = [
        np.abs(one.actions - other.actions)
        for one, other in pairs
        if one.actions is not None
        and other.actions is not None
        and one.actions.shape == other.actions.shape
        and one.tokens in (None, other.tokens)
    ]
    shares = [distance / np.maximum(action_range, 1e-9) for distance in apart]
    logits = [
        float(np.nanmax(np.abs(one.logits[:shared] - other.logits[:shared])))
        for one, other in pairs
        if one.logits is not None
        and other.logits is not None
        and (shared := min(len(one.logits), len(other.logits)))
    ]
    return Row(
        name=name,
        num_frames=len(pairs),
        ms=float(np.mean([answer.ms for answer in deft])),
        passes=_mean_passes(deft),
        equal_tokens=sum(tokens) if tokens else None,
        num_actions=len(apart),
        actions_apart=_greatest(apart),
        actions_apart_share=_greatest(shares),
        logits_apart=max(logits, default=None),
    )


def own_row(own: Sequence[Answer]) -> Row:
    """What the model's own code took."""
    ms = float(np.mean([answer.ms for answer in own]))
    return Row(OWN_CODE, len(own), ms, _mean_passes(own))


def first_difference(
    own: Sequence[int], deft: Sequence[int]
) -> tuple[int, int | None, int | None] | None:
    """Position and both tokens where two answers part; None where they are equal."""
    for at in range(max(len(own), len(deft))):
        one = own[at] if at < len(own) else None
        other = deft[at] if at < len(deft) else None
        if one != other:
            return at, one, other
    return None


def verdict(
    rows: Sequence[Row], partings: Sequence[Parting], is_bfloat16: bool
) -> tuple[bool, str]:
    """Whether Deft answers as the model's own code does, and in words."""
    deft = [row for row in rows if row.name != OWN_CODE]
    beyond = [parting for parting in partings if not parting.is_near_tie]
    if beyond:
        first = beyond[0]
        return False, (
            f"{len(beyond)} answers differ by more than rounding explains; the first: frame "
            f"{first.frame}, token {first.position}, {first.own} by the model's own code and "
            f"{first.deft} by {first.method}"
        )
    has_tokens = all(row.equal_tokens is not None for row in deft)
    bound = _ROUNDING_OF_BFLOAT16_HEAD if is_bfloat16 and not has_tokens else _ROUNDING
    worst = max((row.actions_apart_share or 0.0 for row in deft), default=0.0)
    if worst > bound:
        return False, (
            f"actions differ by up to {worst:.2%} of their range, and rounding explains {bound:.2%}"
        )
    if not any(row.num_actions for row in deft):
        return False, "no frame was answered with an action by both, so nothing is shown"
    if partings:
        return True, f"equal but for {len(partings)} near ties"
    if not has_tokens:
        return True, f"actions are equal within {bound:.2%} of their range"
    return True, "every token is equal"


def render(rows: Sequence[Row], partings: Sequence[Parting]) -> str:
    """A table, and below it a line for each answer that parts."""
    columns = (
        Column[Row]("answered by", lambda row: row.name),
        Column[Row]("equal tokens", _share, "frames in which every token is that of the own code"),
        Column[Row](
            "actions apart",
            lambda row: _number(row.actions_apart),
            "the greatest difference of any number, in robot units, where tokens are equal",
        ),
        Column[Row](
            "logits apart",
            lambda row: _number(row.logits_apart),
            "the greatest difference of any token's logit at the first step",
        ),
        Column[Row](
            "passes",
            lambda row: NOTHING if row.passes is None else f"{row.passes:.2f}",
            "runs of the model for an answer, the prefill included",
        ),
        Column[Row]("ms", lambda row: f"{row.ms:.1f}", "mean of an answer, frame in, action out"),
    )
    lines = [
        f"{parting.method}: frame {parting.frame} token {parting.position}: "
        f"{_token(parting.own)} by {OWN_CODE}, {_token(parting.deft)} by Deft"
        + ("" if parting.margin is None else f", {parting.margin:.6f} between their logits")
        + (": a near tie" if parting.is_near_tie else "")
        for parting in partings
    ]
    return "\n".join([column_table(columns, rows, aligned=True).rstrip(), *lines])


def write(path: Path, content: Mapping[str, Any], rows: Sequence[Row], partings: Any) -> str:
    """Write what was found with a digest over it; returns the digest."""
    filled = {
        "format": FORMAT,
        **content,
        "rows": [asdict(row) for row in rows],
        "partings": [asdict(parting) for parting in partings],
    }
    digest = digest_of(filled)
    text = json.dumps({**filled, _DIGEST: digest}, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode())
    return digest


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a report without its digest, however it is indented and ordered."""
    bare = {name: value for name, value in content.items() if name != _DIGEST}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """A report whose digest is that of its content; raises `PolicyError` for any other file."""
    try:
        data = path.read_bytes()
        content = json.loads(data) if len(data) <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PolicyError(f"{path} is no report of `deft doctor --against`")
    if content.get(_DIGEST) != (digest := digest_of(content)):
        raise PolicyError(
            f"{path} was changed after it was written: its digest is {content.get(_DIGEST)}, that "
            f"of its content {digest}"
        )
    return content


def check_report(path: Path) -> Finding:
    """Say what a report found, if its digest is that of its content."""
    try:
        content = read(path)
    except PolicyError as error:
        return Finding("report", Verdict.BAD, str(error))
    text = (
        f"{path} is as it was written: {content.get('family')} in {content.get('dtype')} on "
        f"{content.get('device')}, {content.get('verdict')}"
    )
    return Finding("report", Verdict.GOOD if content.get("is_equal") is True else Verdict.BAD, text)


def commit_of(folder: Path) -> str:
    """The commit that a folder's code is of, with `-dirty` where it was changed; or empty."""

    def git(*words: str) -> str | None:
        try:
            process = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return process.stdout.strip() if process.returncode == 0 else None

    # An installed package may lie in another project's repository, which does not track it.
    if not git("ls-files", "--", "__init__.py"):
        return ""
    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "HEAD") or "") + ("-dirty" if changed else "")


def _mean_passes(answers: Sequence[Answer]) -> float | None:
    counted = [answer.passes for answer in answers if answer.passes is not None]
    return float(np.mean(counted)) if counted else None


def _greatest(found: Sequence[NDArray[np.float64]]) -> float | None:
    return max((float(distance.max()) for distance in found), default=None)


def _share(row: Row) -> str:
    return NOTHING if row.equal_tokens is None else f"{row.equal_tokens} of {row.num_frames}"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2g}"


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)
