"""A session's memory while its next action is decoded: own answers beside the executed ones.

Drafts come from the target's own tokens. Drafting from executed tokens once froze a robot: an
accepted draft became the next draft, and motion stopped. Host memory only; one thread at a time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deft_policies.memory import STEPS_KEPT, PlanPasses, SessionMemory


@dataclass(eq=False)
class Average:
    """A moving average; the first few samples weigh more. `weight` is the newest one's share."""

    value: float = 0.0
    count: int = 0

    def add(self, sample: float, weight: float) -> None:
        """Take a sample in."""
        self.count += 1
        self.value += max(weight, 1.0 / self.count) * (sample - self.value)

    def add_time(self, sample: float, weight: float, outlier: float) -> None:
        """Take a time in as at most `outlier` times the average, which none may drag along.

        Of the first two the smaller counts, because the first may have warmed things up.
        """
        if self.count == 1:
            self.count, self.value = 2, min(self.value, sample)
        else:
            highest = outlier * self.value if self.count > 0 else sample
            self.add(min(sample, highest), weight)


PassesNeeded = dict[str, Average]  # after the prefill, lately, by the name of the plan


@dataclass(eq=False)
class ActionHistory:
    """The last steps of one robot's episode. `reset` at the start of the next one."""

    own: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    executed: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    drift: tuple[float, ...] = ()  # [position], in bins: executed minus own, leaky sum
    num_steps: int = 0
    noise: int = 0  # of the session: see `draw`
    num_draws: int = 0  # actions decoded in the whole session
    passes_needed: PassesNeeded = field(default_factory=dict)

    @staticmethod
    def of(memory: SessionMemory) -> "ActionHistory":
        """The history that a memory tells of."""
        return ActionHistory(
            deque(memory.own, maxlen=STEPS_KEPT),
            deque(memory.executed, maxlen=STEPS_KEPT),
            memory.drift,
            memory.num_steps,
            memory.noise,
            memory.num_draws,
            {one.plan: Average(one.value, one.count) for one in memory.passes_needed},
        )

    @property
    def draw(self) -> tuple[int, int]:
        """What the random numbers of the next action are drawn by, beside the seed."""
        return self.noise, self.num_draws

    def memory(self, before: SessionMemory) -> SessionMemory:
        """What is to be remembered from now on; the rest is as it was `before`."""
        return replace(
            before,
            own=tuple(self.own),
            executed=tuple(self.executed),
            drift=self.drift,
            num_steps=self.num_steps,
            num_draws=self.num_draws,
            passes_needed=tuple(
                PlanPasses(plan, one.value, one.count) for plan, one in self.passes_needed.items()
            ),
        )

    def reset(self) -> None:
        """Forget the episode; what was learnt about plans stays."""
        self.own.clear()
        self.executed.clear()
        self.drift = ()
        self.num_steps = 0

    def append(self, executed: Sequence[int], own: Sequence[int], leak: float) -> None:
        """Remember one action. `leak` is the share of the old drift that stays, 0..1."""
        if self.own and len(self.own[-1]) != len(own):
            self.reset()  # another action length: the old steps guess nothing
        before = self.drift or (0.0,) * len(own)
        self.drift = tuple(
            leak * old + (done - wanted)
            for old, done, wanted in zip(before, executed, own, strict=True)
        )
        self.own.append(tuple(own))
        self.executed.append(tuple(executed))
        self.num_steps += 1
        self.num_draws += 1
