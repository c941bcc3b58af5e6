"""What is kept of an answer: its times, and what its passes accepted."""

from dataclasses import dataclass

from deft_core.reasoning import part_costs
from deft_core.types import ActionChunk, StageTimings


@dataclass(frozen=True)
class AnswerRecord:
    """One answered observation.

    `asked_step` is the step whose frame was sent, `used_step` the first step that executed the
    answer; in lock-step they are equal. `accepted` has the accepted length of every pass and is
    empty when the server sent no trace. Passes without guesses checked nothing.
    """

    asked_step: int
    used_step: int
    timings: StageTimings
    accepted: tuple[int, ...] = ()
    num_tokens: int = 0
    num_relaxed: int = 0
    method: str = ""
    plan: str = ""  # of the method's, which a guard may choose anew for every answer
    guesses: tuple[int, ...] = ()  # of every pass; empty in runs that did not count them
    reasoning: str = ""  # what the policy wrote before the action
    text_passes: int = 0  # that began in it; the others are the action's
    text_ms: float = 0.0
    action_ms: float = 0.0  # of the action's passes, where there is a text

    @staticmethod
    def of(chunk: ActionChunk, asked_step: int, used_step: int) -> "AnswerRecord":
        """What is kept of an answer beside its actions."""
        trace, text = chunk.trace, chunk.reasoning or ""
        if trace is None:
            return AnswerRecord(asked_step, used_step, chunk.timings, reasoning=text)
        costs = part_costs(trace, text)
        return AnswerRecord(
            asked_step,
            used_step,
            chunk.timings,
            accepted=trace.accepted_lengths,
            num_tokens=len(trace.tokens),
            num_relaxed=round(trace.relaxed_share * len(trace.tokens)),
            method=trace.method,
            plan=trace.plan,
            guesses=tuple(len(one.tokens) - 1 for one in trace.passes),
            reasoning=text,
            text_passes=sum(one.passes for one in costs[:-1]),
            text_ms=sum(one.ms for one in costs[:-1]),
            action_ms=sum(one.ms for one in costs[-1:]),
        )
