"""The near-tie audit: where another number format answers another token, and how close it was.

Both formats are led along the reference's tokens, so every position is compared in the same
context. A token may flip where the reference's two best logits are closer than the format can
tell apart; a flip anywhere else is a fault.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deft_policies.benchmark.replay import ReplayFrame
from deft_policies.decoding.autoregressive import AutoregressiveDecoder
from deft_policies.decoding.records import StageClock
from deft_policies.decoding.sampling import first_maximum, top_gap
from deft_policies.openvla.policy import OpenVLAPolicy

# bfloat16 keeps 8 bits of every number. Two logits are told apart when they differ by more than
# their own last place and what rounding in every layer before has added; two last places of the
# largest logit are taken for the two, and reported.
_BFLOAT16_BITS = 8
_NEAR_TIE_PLACES = 2


@dataclass(frozen=True)
class Flip:
    """A position where the audited format's best token is not the reference's."""

    frame: int
    position: int
    reference: int
    audited: int
    reference_margin: float
    audited_margin: float


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    num_actions: int
    num_tokens: int
    num_outside_actions: int  # reference tokens that are no action tokens
    threshold: float  # a flip with a larger reference margin is a fault
    largest_error: float  # of the reference's best logits
    flips: tuple[Flip, ...]

    @property
    def faults(self) -> tuple[Flip, ...]:
        """Flips that rounding does not explain."""
        return tuple(flip for flip in self.flips if flip.reference_margin > self.threshold)


def audit(
    reference: OpenVLAPolicy, audited: OpenVLAPolicy, frames: Sequence[ReplayFrame]
) -> AuditReport:
    """Compare two policies of the same weights, token by token. Both see the whole vocabulary."""
    flips: list[Flip] = []
    largest_logit = largest_error = 0.0
    num_tokens = num_outside = 0
    actions = reference.parts.target.action_tokens
    for number, frame in enumerate(frames):
        own = _decode(reference, frame, None)
        other = _decode(audited, frame, own.tokens)
        num_tokens += len(own.tokens)
        num_outside += sum(not actions.first <= token <= actions.last for token in own.tokens)
        for position, (first, second) in enumerate(zip(own.logits, other.logits, strict=True)):
            best = int(first_maximum(first))
            largest_logit = max(largest_logit, abs(float(first[best])))
            largest_error = max(largest_error, abs(float(first[best] - second[best])))
            found = int(first_maximum(second))
            if found != best:
                gaps = [float(top_gap(one, first_maximum(one))) for one in (first, second)]
                flips.append(Flip(number, position, best, found, gaps[0], gaps[1]))
    return AuditReport(
        num_actions=len(frames),
        num_tokens=num_tokens,
        num_outside_actions=num_outside,
        threshold=_NEAR_TIE_PLACES * last_place(largest_logit),
        largest_error=largest_error,
        flips=tuple(flips),
    )


def last_place(value: float) -> float:
    """The distance between neighbouring bfloat16 numbers of this size."""
    return 0.0 if value == 0.0 else 2.0 ** (math.floor(math.log2(abs(value))) - _BFLOAT16_BITS + 1)


def describe(report: AuditReport) -> str:
    """The report in words, every flip on a line of its own."""
    lines = [
        f"audit: {report.num_tokens} tokens of {report.num_actions} actions, "
        f"{len(report.flips)} differ, {len(report.faults)} of them by more than a near tie "
        f"(threshold {report.threshold:.4f}, largest error of a best logit "
        f"{report.largest_error:.4f})",
        f"audit: {report.num_outside_actions} tokens lie outside the action range"
        + (": --action-rows-only would change them" if report.num_outside_actions else ""),
    ]
    for flip in report.flips:
        verdict = "FAULT" if flip in report.faults else "near tie"
        lines.append(
            f"  frame {flip.frame} token {flip.position}: {flip.reference} -> {flip.audited}, "
            f"margin {flip.reference_margin:.4f} (audited {flip.audited_margin:.4f}): {verdict}"
        )
    return "\n".join(lines)


@dataclass
class _Led:
    """Chooses given tokens, or the best ones, and keeps all logits."""

    given: list[int] | None
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # [step] of [vocabulary]

    def choose(self, logits: Tensor) -> Tensor:
        """One row."""
        step = len(self.tokens)
        self.logits.append(logits[0].clone())
        token = int(first_maximum(logits[0])) if self.given is None else self.given[step]
        self.tokens.append(token)
        return torch.tensor([token], device=logits.device)


def _decode(policy: OpenVLAPolicy, frame: ReplayFrame, tokens: list[int] | None) -> _Led:
    parts, led = policy.parts, _Led(tokens)
    if len(parts.target.vocabulary) != parts.target.decoder.sizes.vocabulary:
        raise ValueError("an audit compares the whole vocabulary")
    clock = StageClock(parts.target.device)
    with torch.inference_mode():
        prompts = parts.read([frame.observation], clock)
        length = parts.statistics[policy.find_key(frame.statistics_key)].action_dim
        AutoregressiveDecoder(parts.target, led).decode(prompts, length, clock)
    return led
