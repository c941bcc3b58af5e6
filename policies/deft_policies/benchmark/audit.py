"""Where a policy answers another token than it should, and how close the two tokens were.

`audit` compares number formats. Both are led along the reference's tokens, so every position is
compared in the same context. A token may flip where the reference's two best logits are closer
than the format can tell apart; a flip anywhere else is a fault.

`check_equal` compares an exact method with plain decoding in the format that is served.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deft_core.types import ActOptions
from deft_policies.benchmark.replay import MeasuredAnswer, Replay, ReplayFrame
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.sampling import first_maximum, top_gap
from deft_policies.families.policy import VlaPolicy

# bfloat16 keeps 8 bits of every number. Two logits count as different when they differ by more than
# their own last place and what rounding in every layer before has added; two last places of the
# largest logit are taken for the two, and reported.
_BFLOAT16_BITS = 8
_ROUNDING_PLACES = 2


@dataclass(frozen=True)
class Flip:
    """A position where the audited format's best token is not the reference's."""

    frame: int
    position: int
    reference: int
    audited: int
    reference_margin: float
    audited_margin: float
    words: str = ""  # what both say, in a text


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    num_actions: int
    num_tokens: int
    num_outside_actions: int | None  # reference tokens that are no action tokens; None: of texts
    threshold: float  # a flip with a larger reference margin is a fault
    largest_error: float  # of the reference's best logits
    flips: tuple[Flip, ...]

    @property
    def faults(self) -> tuple[Flip, ...]:
        """Flips that rounding does not explain."""
        return tuple(flip for flip in self.flips if flip.reference_margin > self.threshold)


@dataclass(frozen=True)
class EqualityCheck:
    """How many answers of an exact method are plain decoding's, and where the others part."""

    name: str  # of the method
    dtype: str
    is_promised: bool  # passes compute the same bits for a token alone and among others
    num_answers: int
    partings: tuple[Flip, ...]  # plain decoding is the reference; the first token that differs

    @property
    def is_broken(self) -> bool:
        """Whether answers differ that must not."""
        return self.is_promised and bool(self.partings)


def audit(
    reference: VlaPolicy,
    audited: VlaPolicy,
    frames: Sequence[ReplayFrame],
    asked: ActOptions | None = None,
) -> AuditReport:
    """Compare two policies of the same weights, token by token."""
    flips: list[Flip] = []
    largest_logit = largest_error = 0.0
    num_tokens = num_outside = 0
    options = asked or ActOptions()
    model = reference.model_for(options)
    actions = model.target.action_tokens
    is_text = any(spec.stop is not None for spec in model.specs.values())
    for number, frame in enumerate(frames):
        own = _logits(reference, frame, options, None)
        tokens = [int(first_maximum(logits)) for logits in own]
        other = _logits(audited, frame, options, tokens)
        num_tokens += len(tokens)
        num_outside += sum(not actions.first <= token <= actions.last for token in tokens)
        for position, (best, first, second) in enumerate(zip(tokens, own, other, strict=True)):
            largest_logit = max(largest_logit, abs(float(first[best])))
            largest_error = max(largest_error, abs(float(first[best] - second[best])))
            found = int(first_maximum(second))
            if found != best:
                gaps = [float(top_gap(logits, first_maximum(logits))) for logits in (first, second)]
                texts = [model.read_text([token]) for token in (best, found)]
                words = " -> ".join(repr(text[0]) for text in texts if text is not None)
                flips.append(Flip(number, position, best, found, gaps[0], gaps[1], words))
    return AuditReport(
        num_actions=len(frames),
        num_tokens=num_tokens,
        num_outside_actions=None if is_text else num_outside,
        threshold=_ROUNDING_PLACES * last_place(largest_logit),
        largest_error=largest_error,
        flips=tuple(flips),
    )


def check_equal(run: Replay, plain: Replay, frames: Sequence[ReplayFrame]) -> EqualityCheck:
    """Compare the answers of one policy to the same frames, in the format it serves."""
    policy = run.contender.policy
    assert isinstance(policy, VlaPolicy)
    target = policy.model.target
    partings: list[Flip] = []
    for number, frame in enumerate(frames):
        expected, tokens = (_tokens(contender.answers[number]) for contender in (plain, run))
        if expected == tokens:
            continue
        pairs = enumerate(zip(expected, tokens, strict=True))
        position = next(at for at, (best, other) in pairs if best != other)
        options = plain.contender.options(frame)
        logits = _logits(policy, frame, options, expected[: position + 1])[position]
        best, other = expected[position], tokens[position]
        margin = float(logits[best] - logits[other])
        partings.append(Flip(number, position, best, other, margin, -margin))
    return EqualityCheck(
        name=run.contender.name,
        dtype=policy.info.details["dtype"],
        is_promised=target.is_batch_invariant,
        num_answers=len(frames),
        partings=tuple(partings),
    )


def _tokens(answer: MeasuredAnswer) -> list[int]:
    assert answer.chunk.trace is not None
    return list(answer.chunk.trace.tokens)


def last_place(value: float) -> float:
    """The distance between neighbouring bfloat16 numbers of this size."""
    return 0.0 if value == 0.0 else 2.0 ** (math.floor(math.log2(abs(value))) - _BFLOAT16_BITS + 1)


def describe(report: AuditReport) -> str:
    """The report in words, every flip on a line of its own."""
    lines = [
        f"audit: {report.num_tokens} tokens of {report.num_actions} actions, "
        f"{len(report.flips)} differ, {len(report.faults)} of them by more than rounding explains "
        f"(threshold {report.threshold:.4f}, largest error of a best logit "
        f"{report.largest_error:.4f})",
    ]
    if (num := report.num_outside_actions) is not None:
        lines.append(f"audit: {num} tokens lie outside the action range")
    for flip in report.flips:
        words = f"{flip.words}, " if flip.words else ""
        verdict = "FAULT" if flip in report.faults else "rounding"
        lines.append(
            f"  frame {flip.frame} token {flip.position}: {flip.reference} -> {flip.audited}, "
            f"{words}margin {flip.reference_margin:.4f} (audited {flip.audited_margin:.4f}): "
            f"{verdict}"
        )
    return "\n".join(lines)


def describe_equality(check: EqualityCheck) -> str:
    """The check in words, every frame that differs on a line of its own."""
    num_equal = check.num_answers - len(check.partings)
    promise = "a token has the same logits alone and among drafts, so none may differ"
    if not check.is_promised:
        promise = "a near tie may differ: a token alone and among drafts is rounded differently"
    lines = [
        f"audit: {check.name} gives {num_equal} of {check.num_answers} answers of plain decoding "
        f"in {check.dtype} ({promise})"
    ]
    verdict = "FAULT" if check.is_promised else "differs"
    for parting in check.partings:
        lines.append(
            f"  frame {parting.frame} token {parting.position}: plain {parting.reference}, "
            f"{check.name} {parting.audited}, margin {parting.reference_margin:.6f}: {verdict}"
        )
    return "\n".join(lines)


def _logits(
    policy: VlaPolicy, frame: ReplayFrame, options: ActOptions, tokens: list[int] | None
) -> list[Tensor]:
    """Plain decoding's logits [vocabulary], position by position, along given tokens or its own."""
    model = policy.model_for(options)
    with torch.inference_mode():
        (prompt,) = model.see([frame.observation], StageClock(model.device))
        spec = model.specs[policy.find_key(frame.statistics_key)]
        return model.target.logits_along(prompt, spec.max_tokens, tokens, spec.stop)
