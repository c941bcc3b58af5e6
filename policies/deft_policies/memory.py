"""What is remembered of one robot between its frames: a small value that travels.

The server owns it, hands it to a policy with a frame and gets the next one back with the answer, so
any replica of a policy can answer any frame. Knows nothing of tensors.
"""

from dataclasses import dataclass, replace

STEPS_KEPT = 32
LONGEST_ANSWER = 4096  # tokens

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class SessionMemory:
    """One robot's episode so far. The value without arguments is that of a new one.

    Drafts come from the target's own tokens. Drafting from executed tokens once froze a robot: an
    accepted draft became the next draft, and motion stopped.
    """

    own: tuple[Tokens, ...] = ()  # [step][position], the target's greedy tokens, the newest last
    drift: tuple[float, ...] = ()  # [position], in bins: executed minus own, leaky sum
    num_steps: int = 0
    noise: int = 0  # drawn when the session opens, so that no two draw the same samples
    num_draws: int = 0  # actions decoded in the whole session: each draws noise of its own
    answer: Tokens = ()  # the last text
    target_answer: Tokens = ()  # the target's own tokens in it, where they differ
    executed_steps: int = 1  # of an answer, before the next frame

    def __post_init__(self) -> None:
        if len(self.own) > STEPS_KEPT:
            raise ValueError(f"at most {STEPS_KEPT} steps are kept, got {len(self.own)}")
        if len(self.answer) > LONGEST_ANSWER:
            raise ValueError(
                f"an answer of at most {LONGEST_ANSWER} tokens is kept, got {len(self.answer)}"
            )
        if len(set(map(len, self.own))) > 1:
            raise ValueError("all steps must have as many tokens")

    @property
    def draw(self) -> tuple[int, int]:
        """Noise key of the next action, together with the seed."""
        return self.noise, self.num_draws

    def after_action(self, executed: Tokens, own: Tokens, leak: float) -> "SessionMemory":
        """What is remembered after one more action; `leak` (0..1) of the old drift stays.

        Actions of another length than before begin a new episode: the old ones guess nothing.
        """
        is_like = not self.own or len(self.own[-1]) == len(own)
        steps, drift, num_steps = (self.own, self.drift, self.num_steps) if is_like else ((), (), 0)
        pairs = zip(drift or (0.0,) * len(own), executed, own, strict=True)
        return replace(
            self,
            own=(*steps, own)[-STEPS_KEPT:],
            drift=tuple(
                leak * before + (executed_token - own_token)
                for before, executed_token, own_token in pairs
            ),
            num_steps=num_steps + 1,
            num_draws=self.num_draws + 1,
        )

    def after_text(self, answer: Tokens) -> "SessionMemory":
        """What is remembered after a text, which is kept unless it is too long."""
        return replace(
            self,
            num_steps=self.num_steps + 1,
            num_draws=self.num_draws + 1,
            answer=answer if len(answer) <= LONGEST_ANSWER else self.answer,
        )

    def after_numbers(
        self, target_tokens: Tokens, drift: tuple[float, ...], executed_steps: int
    ) -> "SessionMemory":
        """With what is known of the steps before this answer, and of its own tokens."""
        differs = target_tokens != self.answer and len(target_tokens) == len(self.answer)
        return replace(
            self,
            drift=drift if any(drift) else (),
            target_answer=target_tokens if differs else (),
            executed_steps=executed_steps,
        )
