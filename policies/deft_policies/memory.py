"""What is remembered of one robot between its frames: a small value that travels.

The server owns it, hands it to a policy with a frame and gets the next one back with the answer, so
any replica of a policy can answer any frame. Knows nothing of tensors.
"""

from dataclasses import dataclass

STEPS_KEPT = 32
ANSWERS_KEPT = 4
LONGEST_ANSWER = 4096  # tokens

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class PlanPasses:
    """How many passes after the prefill a plan has needed lately: an average of `count` actions."""

    plan: str
    value: float
    count: int


@dataclass(frozen=True)
class SessionMemory:
    """One robot's episode so far. The value without arguments is that of a new one."""

    own: tuple[Tokens, ...] = ()  # [step][position], the target's own tokens, the newest last
    executed: tuple[Tokens, ...] = ()  # [step][position], what was executed in their place
    drift: tuple[float, ...] = ()  # [position], in bins: executed minus own, leaky sum
    num_steps: int = 0
    noise: int = 0  # drawn by whoever opens the session, so that no two sample alike
    num_draws: int = 0  # actions decoded in the whole session: each draws noise of its own
    passes_needed: tuple[PlanPasses, ...] = ()
    answers: tuple[Tokens, ...] = ()  # [answer][token], texts of late, the newest last

    def __post_init__(self) -> None:
        if len(self.own) != len(self.executed) or len(self.own) > STEPS_KEPT:
            raise ValueError(
                f"own and executed must have as many steps, at most {STEPS_KEPT}, "
                f"got {len(self.own)} and {len(self.executed)}"
            )
        if len(self.answers) > ANSWERS_KEPT or any(
            len(one) > LONGEST_ANSWER for one in self.answers
        ):
            raise ValueError(
                f"at most {ANSWERS_KEPT} answers of at most {LONGEST_ANSWER} tokens are kept, "
                f"got {[len(one) for one in self.answers]}"
            )
        if len(set(map(len, (*self.own, *self.executed)))) > 1:
            raise ValueError("all steps must have as many tokens")
