"""Lets a policy play in LIBERO and stores what the expert would have done.

The episodes it writes are demonstrations like any other (DAgger): pass them to `train` beside
the first ones, with `--warm-start` and `--tokens-of`. A killed run goes on.
"""

import argparse
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from shlex import quote

import numpy as np
import torch._dynamo  # noqa: F401  (Triton's LLVM before Mesa's: the other way round crashes)
from numpy.typing import NDArray

from deft_core.datasets.episodes import DemonstrationError
from deft_core.peers.conventions import to_robosuite
from deft_core.program import CommandParser
from deft_core.types import ActOptions, Observation
from deft_draft_training.errors import ConfigError, DataError
from deft_libero.errors import SelectionError, SimulationError
from deft_libero.simulator.conventions import CLOSE, METRES_PER_UNIT, OPEN
from deft_libero.simulator.environment import Frame
from deft_libero.simulator.scene import Scene
from deft_policies.base import Policy, PolicyRequest
from deft_policies.checkpoint.config import load_config
from deft_policies.errors import PolicyError
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.families.pi0fast.files import is_pi0_fast
from deft_policies.families.vla0.family import KEY
from deft_policies.families.vla0.run_folder import find_run_folder
from deft_policies.memory import SessionMemory
from deft_policies.model.formats import Precision
from tiny_libero_recipe.demos import add_recording_flags, read_recording_flags
from tiny_libero_recipe.expert.expert import Label
from tiny_libero_recipe.play import Actor, DemoKey, DemosSettings, random_numbers
from tiny_libero_recipe.pool import DemosJob, record_visibly


@dataclass(frozen=True)
class TakeoverSettings:
    """When the expert leads, and for how long."""

    stuck_steps: int = 12  # without moving further than this:
    stuck_metres: float = 0.15 * METRES_PER_UNIT
    wrong_steps: int = 6  # in a row with the gripper the wrong way
    steps: int = 12  # 0: it never leads
    chance: float = 0.01  # per step, so that what comes later is seen even by a poor policy


class Learner:
    """Plays one episode with a policy. Where its text holds no action, the expert acts."""

    def __init__(
        self,
        policy: Policy,
        instruction: str,
        takeover: TakeoverSettings,
        generator: np.random.Generator,
        is_thinking: bool = False,
        num_executed: int = 1,
        convert: Callable[[NDArray[np.float64]], NDArray[np.float64]] = to_robosuite,
    ) -> None:
        """`num_executed` rows of an answer are executed before the policy is asked again."""
        self._policy, self._instruction = policy, instruction
        self._takeover, self._generator = takeover, generator
        self._num_executed, self._convert = num_executed, convert
        self._rows: list[NDArray[np.float64]] = []  # answered, not executed yet
        self._memory = SessionMemory()
        self._options = ActOptions(want_reasoning=is_thinking)
        self._places: deque[NDArray[np.float64]] = deque(maxlen=takeover.stuck_steps)
        self._led = self._num_wrong = 0

    @property
    def sigma(self) -> float:
        """Nothing is added to what the policy says."""
        return 0.0

    def act(self, frame: Frame, scene: Scene, label: Label) -> NDArray[np.float64]:
        """The policy's action, or the expert's while it leads."""
        if not self._rows and not self._ask(frame):
            return label.action
        answer = self._rows.pop(0)
        is_wrong = answer[-1] != label.action[-1]
        if not self._led and self._takeover.steps and self._needs_help(scene, is_wrong):
            self._led, self._num_wrong = self._takeover.steps, 0
            self._places.clear()
        if self._led:
            self._led -= 1
            self._rows.clear()
            return label.action
        return answer

    def _ask(self, frame: Frame) -> bool:
        """Get the next rows; whether the text held actions."""
        observation = Observation(frame.image, self._instruction, state=frame.state)
        (found,) = self._policy.act([PolicyRequest(observation, self._memory, self._options)])
        self._memory = found.memory
        if found.error is not None:
            return False
        self._rows = [self._convert(row) for row in found.chunk.actions[: self._num_executed]]
        return True

    def _needs_help(self, scene: Scene, is_wrong: bool) -> bool:
        self._num_wrong = self._num_wrong + 1 if is_wrong else 0
        self._places.append(np.append(scene.gripper.position, scene.opening))
        if self._num_wrong >= self._takeover.wrong_steps:
            return True
        if self._generator.random() < self._takeover.chance:
            return True
        if len(self._places) < self._takeover.stuck_steps:
            return False
        return bool(np.ptp(np.stack(self._places), axis=0).max() < self._takeover.stuck_metres)


def sign_gripper(action: NDArray[np.float64]) -> NDArray[np.float64]:
    """An action as VLA-0 and pi0-FAST answer it here.

    It is robosuite's own, but for a gripper between its two values.
    """
    converted = np.array(action)
    converted[-1] = CLOSE if action[-1] > 0 else OPEN
    return converted


@dataclass(frozen=True)
class LearnerFactory:
    """Makes learners in whichever process it is called; each loads the policy once."""

    checkpoint: Path
    statistics_key: str
    takeover: TakeoverSettings = field(default_factory=TakeoverSettings)
    is_thinking: bool = False
    num_executed: int = 1

    def __call__(self, settings: DemosSettings, key: DemoKey, instruction: str) -> Actor:
        """A learner for the episode that has just begun."""
        policy = _load(self.checkpoint, self.statistics_key)
        generator = random_numbers(settings, key, "takeover")
        return Learner(
            policy,
            instruction,
            self.takeover,
            generator,
            self.is_thinking,
            self.num_executed,
            sign_gripper if _has_one_key(self.checkpoint) else to_robosuite,
        )


@lru_cache(maxsize=1)
def _load(checkpoint: Path, statistics_key: str) -> Policy:
    options = ModelOptions(
        checkpoint=str(checkpoint),
        statistics_key=statistics_key,
        device="cpu",
        precision=Precision.FLOAT32,
        decoding="lossless",  # the same actions, sooner
        num_threads=1,
    )
    return load_policy(options)


def main(arguments: list[str]) -> int:
    """Record what is missing."""
    given = _parser().parse_args(arguments)
    try:
        job = _job(given)
        _record(job, given.checkpoint)
    except SelectionError as error:
        raise ConfigError(str(error)) from error
    except (SimulationError, DemonstrationError, PolicyError) as error:
        raise DataError(str(error)) from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m tiny_libero_recipe correct", description=__doc__)
    add_recording_flags(parser)
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="the policy that plays")
    add("--statistics-key", metavar="KEY", help="default: the suite's name")
    add(
        "--lead",
        type=float,
        default=TakeoverSettings().chance,
        metavar="CHANCE",
        help="per step, of the expert leading for a moment (default: %(default)s)",
    )
    add(
        "--execute",
        type=int,
        default=1,
        metavar="ROWS",
        help="of an answer, before the policy is asked again (default: %(default)s)",
    )
    add("--reasoning", action="store_true", help="let it think aloud before every action")
    add("--alone", action="store_true", help="the expert never leads: to see what a policy can do")
    return parser


def _job(given: argparse.Namespace) -> DemosJob:
    key = _statistics_key(given)
    job, checkpoint = read_recording_flags(given), given.checkpoint.resolve()
    how = (" thinking aloud" if given.reasoning else "") + (" alone" if given.alone else "")
    how += f" executing {given.execute}" if given.execute > 1 else ""
    settings = replace(job.settings, actor=f"{checkpoint.name} ({key}){how}")
    takeover = TakeoverSettings(chance=given.lead)
    if given.alone:
        takeover = replace(takeover, steps=0)
    learner = LearnerFactory(checkpoint, key, takeover, given.reasoning, given.execute)
    return replace(job, settings=settings, new_actor=learner)


def _statistics_key(given: argparse.Namespace) -> str:
    """Which statistics of the checkpoint are used."""
    if _has_one_key(given.checkpoint):
        return KEY
    key: str = given.statistics_key or given.suite
    statistics = load_config(given.checkpoint).statistics
    if key not in statistics:
        known = ", ".join(statistics)
        raise ConfigError(f"{given.checkpoint} has no statistics {key!r}; it has {known}")
    return key


def _has_one_key(checkpoint: Path) -> bool:
    """Whether it is a run of VLA-0 or a pi0-FAST, whose statistics have no name of their own."""
    return find_run_folder(checkpoint) is not None or is_pi0_fast(checkpoint)


def _record(job: DemosJob, checkpoint: Path) -> None:
    results = record_visibly(job)
    steps = sum(one.num_steps for one in results)
    succeeded = sum(one.succeeded for one in results)
    sys.stdout.write(
        f"{len(results)} new episodes with {steps} labelled frames in {job.folder}; the policy, "
        f"led on where it stood still, succeeded in {succeeded}\n"
        f"next: python -m tiny_libero_recipe train DEMOS {quote(str(job.folder))} "
        f"--run runs/policy-2 --warm-start RUN --tokens-of {quote(str(checkpoint))} "
        "--out checkpoints/policy-2\n"
    )
