"""What speculation did, counted from the passes of answers: every table takes it from here.

A pass that had guesses is *checked*: whatever it kept counts, also in the last pass of an action
and where the published loop runs past its end.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deft_core.measures.answers import AnswerRecord


@dataclass(frozen=True)
class Thinking:
    """What text and action took apart, over all answers that came with a text. Means."""

    text_passes: float
    action_passes: float
    text_ms: float  # of the passes alone
    action_ms: float


@dataclass(frozen=True)
class Speculation:
    """Over all answers that came with a trace. Tokens count from 0."""

    num_answers: int
    num_passes: int
    num_tokens: int
    num_relaxed: int
    accepted_counts: Mapping[int, int]  # accepted length -> checked passes
    committed_by_start: Mapping[int, tuple[float, int]]  # token of the first draft -> mean, passes
    committed_by_pass: tuple[float, ...]  # mean of the first pass, the second, ...
    drafted_by_token: tuple[float, ...]  # share of the answers whose token was an accepted draft
    thinking: Thinking | None = None  # None where no answer came with a text

    @property
    def passes_per_action(self) -> float:
        """Target passes per answer, the prefill included."""
        return self.num_passes / self.num_answers

    @property
    def num_checked(self) -> int:
        """Passes that had guesses."""
        return sum(self.accepted_counts.values())

    @property
    def committed_length(self) -> float:
        """Mean accepted length of the checked passes, and one; 1 where none had guesses."""
        kept = sum(length * count for length, count in self.accepted_counts.items())
        return 1 + kept / self.num_checked if self.num_checked else 1.0

    @property
    def relaxed_share(self) -> float:
        """Share of executed tokens that are not the target's own greedy choice."""
        return self.num_relaxed / self.num_tokens

    def share_of_length(self, length: int) -> float:
        """Share of the checked passes that kept this many guesses."""
        return self.accepted_counts.get(length, 0) / self.num_checked if self.num_checked else 0.0


def speculation_of(answers: Sequence[AnswerRecord]) -> Speculation | None:
    """None where no answer came with a trace."""
    traced = [answer for answer in answers if answer.accepted and answer.num_tokens]
    if not traced:
        return None
    starts: dict[int, list[int]] = defaultdict(list)
    passes: dict[int, list[int]] = defaultdict(list)
    drafted: dict[int, list[bool]] = defaultdict(list)
    lengths: Counter[int] = Counter()
    for answer in traced:
        token = 0
        for number, (accepted, guesses) in enumerate(passes_of(answer)):
            passes[number].append(accepted + 1)
            lengths[accepted] += bool(guesses)
            if guesses and token < answer.num_tokens:  # the published loop goes on
                starts[token].append(accepted + 1)
            for place in range(token, min(token + accepted + 1, answer.num_tokens)):
                drafted[place].append(place < token + accepted)
            token += accepted + 1
    return Speculation(
        num_answers=len(traced),
        num_passes=sum(len(answer.accepted) for answer in traced),
        num_tokens=sum(answer.num_tokens for answer in traced),
        num_relaxed=sum(answer.num_relaxed for answer in traced),
        accepted_counts={length: lengths[length] for length in sorted(lengths) if lengths[length]},
        committed_by_start={at: (_mean(starts[at]), len(starts[at])) for at in sorted(starts)},
        committed_by_pass=tuple(_mean(passes[at]) for at in sorted(passes)),
        drafted_by_token=tuple(_mean(drafted[at]) for at in sorted(drafted)),
        thinking=_thinking([answer for answer in traced if answer.reasoning]),
    )


def _thinking(answers: Sequence[AnswerRecord]) -> Thinking | None:
    if not answers:
        return None
    return Thinking(
        text_passes=_mean([one.text_passes for one in answers]),
        action_passes=_mean([len(one.accepted) - one.text_passes for one in answers]),
        text_ms=_mean([one.text_ms for one in answers]),
        action_ms=_mean([one.action_ms for one in answers]),
    )


def passes_of(answer: AnswerRecord) -> Iterator[tuple[int, int]]:
    """Accepted length and number of guesses of every pass; runs that did not count guesses had."""
    counted = answer.guesses or (1,) * len(answer.accepted)
    return zip(answer.accepted, counted, strict=True)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
