"""Has Deft and a model's own code answer the same frames.

The model's own code runs in a process of the interpreter that the user names. Lines of JSON go
there and come back, each no longer than a bound and checked field by field; nothing is unpickled.
"""

import base64
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from deft_core.errors import WireError
from deft_core.image_chain import ImageChain
from deft_core.types import ActOptions, Image, Observation
from deft_core.wire.formats import WireFormat, decode
from deft_core.wire.limits import WireLimits
from deft_policies.base import PolicyRequest
from deft_policies.benchmark.replay import ReplayFrame
from deft_policies.conformance.report import Answer
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.methods import AUTOREGRESSIVE, DEFAULT_METHOD
from deft_policies.errors import PolicyError
from deft_policies.families.ecot import Ecot
from deft_policies.families.model import Model
from deft_policies.families.model_policy import ModelPolicy
from deft_policies.families.pi0fast.model import Pi0Fast
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.prompt import PromptTemplate
from deft_policies.progress import counted

T = TypeVar("T")
NUM_FRAMES = 20
SCRIPT = Path(__file__).parent / "own_code.py"
_LINE_BYTES = 1 << 25  # of one answer: logits of 200,000 tokens are a megabyte
_LIMITS = WireLimits(max_bytes=_LINE_BYTES)
_SHOWN_LINES = 12  # of what the other process wrote before it failed


@dataclass(frozen=True, eq=False)
class OwnAnswers:
    """What the model's own code answered, and what it ran on."""

    answers: tuple[Answer, ...]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class _AnswerLine:
    """An answer as the other process writes it."""

    ms: float
    tokens: tuple[int, ...] | None = None
    actions: tuple[tuple[float, ...], ...] | None = None
    logits: bytes | None = None
    passes: int | None = None


@dataclass(frozen=True)
class _ReadyLine:
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


def choose_frames(model: Model, frames: Sequence[ReplayFrame]) -> list[ReplayFrame]:
    """Complete shipped frames by what the model reads besides a picture and an instruction.

    Every further camera shows another frame, so that exchanged cameras show; states are made up.
    """
    chosen = []
    for at, frame in enumerate(frames):
        others = (
            frames[(at + 7 * (picture + 1)) % len(frames)] for picture in range(model.num_pictures)
        )
        cameras = {
            name: other.observation.image
            for name, other in zip(model.camera_names, others, strict=False)
        }
        state = None
        if model.state_dim is not None:
            state = (0.3 * np.sin(at + np.arange(model.state_dim))).astype(np.float32)
        seen = replace(frame.observation, cameras=cameras, state=state)
        chosen.append(replace(frame, observation=seen))
    return chosen


def look_at(python: str, family: str) -> None:
    """Raise `PolicyError` unless an environment has what a family's own code needs."""
    with _started(python) as (process, complain):
        setup = {"only_look": True, "family": family}
        missing = _exchange(process, setup, _ReadyLine, complain).missing
    if missing:
        raise PolicyError(
            f"--against {python}: this environment has no {', '.join(missing)}, which the own code "
            f"of {family} needs; docs/conformance.md says how to make one"
        )


def setup_of(policy: ModelPolicy, path: str, key: str) -> dict[str, Any]:
    """What the model's own code has to know to load and ask the same model."""
    model = policy.model
    weight = model.network.decoder.embedding.weight
    asked_in_out = model.details.get("prompt") == PromptTemplate.ECOT_IN_OUT.value
    return {
        "only_look": False,
        "family": model.family,
        "checkpoint": path,
        "device": str(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if weight.device.type == "cpu" else 0,
        "statistics_key": key,
        "num_steps": model.num_steps,
        "action_dim": model.statistics[key].action_dim,
        "num_pictures": model.num_pictures,
        "state_dim": model.state_dim,
        "crops": model.image_chains[0] is ImageChain.OFT,
        "max_tokens": policy.model.specs[key].max_tokens if isinstance(policy, VlaPolicy) else 0,
        "prompt": "in-out" if isinstance(model, Ecot) and asked_in_out else "vicuna",
    }


def ask_own_code(
    python: str, setup: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> OwnAnswers:
    """Have another environment's interpreter answer the frames; raises `PolicyError`."""
    with _started(python) as (process, complain):
        ready = _exchange(process, dict(setup), _ReadyLine, complain)
        _exchange(process, lines[0], _AnswerLine, complain)  # the first answer of a process is slow
        answers = [
            _answer_of(_exchange(process, line, _AnswerLine, complain))
            for line in counted(lines, len(lines), "the model's own code", "frame")
        ]
    return OwnAnswers(tuple(answers), ready.versions)


def ask_deft(
    policy: ModelPolicy, decoding: str | None, key: str, frames: Sequence[ReplayFrame]
) -> tuple[Answer, ...]:
    """Answer the frames here, in the sessions that they belong to."""
    memories: dict[str, SessionMemory] = {}
    options = ActOptions(decoding=decoding, statistics_key=key, want_trace=True)
    answers = []
    policy.act([PolicyRequest(frames[0].observation, SessionMemory(), options)])
    for frame in counted(frames, len(frames), f"Deft, {decoding or 'one pass'}", "frame"):
        memory = memories.get(frame.episode, SessionMemory())
        start = time.perf_counter()
        (answer,) = policy.act([PolicyRequest(frame.observation, memory, options)])
        ms = (time.perf_counter() - start) * 1e3
        memories[frame.episode], trace = answer.memory, answer.chunk.trace
        answers.append(
            Answer(
                ms=ms,
                tokens=None if trace is None else trace.tokens,
                actions=None if answer.error is not None else answer.chunk.actions,
                logits=_first_logits(policy, frame.observation),
                passes=1 if trace is None else trace.num_passes,
            )
        )
    return tuple(answers)


def methods_of(policy: ModelPolicy) -> tuple[str | None, ...]:
    """How Deft answers: plainly, and as it serves by default; in its one way where it has one."""
    if isinstance(policy, VlaPolicy):
        return (AUTOREGRESSIVE, DEFAULT_METHOD)
    return (None,)


def logits_behind(
    policy: VlaPolicy, observation: Observation, tokens: Sequence[int]
) -> NDArray[np.float32]:
    """Logits [token] of the token that follows `tokens`, by the ids that files give."""
    model = policy.model
    (spec, *_) = model.specs.values()
    columns = {token: column for column, token in enumerate(spec.ids)}
    forced = [columns[token] for token in tokens] if columns else list(tokens)
    with torch.inference_mode():
        (prompt,) = model.see([observation], StageClock(model.device))
        # A pass for each given token and one behind the last, whatever that one is given.
        logits = model.target.logits_along(prompt, 0, [*forced, 0])[-1].float().cpu().numpy()
    if not columns:
        return np.asarray(logits, np.float32)
    spread = np.full(max(columns) + 1, np.nan, np.float32)
    spread[list(spec.ids)] = logits[: len(spec.ids)]
    return spread


def _first_logits(policy: ModelPolicy, observation: Observation) -> NDArray[np.float32] | None:
    if not isinstance(policy, VlaPolicy):
        return None
    return logits_behind(policy, observation, ())


def frame_line(model: Model, observation: Observation) -> dict[str, Any]:
    """A frame as the other process reads it: pictures in the order in which they are looked at."""
    names = ["image", *model.camera_names]
    if isinstance(model, Pi0Fast):
        names = list(model.files.robot_cameras)
    pictures = model.pictures(observation)
    state = observation.state
    return {
        "instruction": observation.instruction,
        "cameras": names[: len(pictures)],
        "pictures": [_shown(picture) for picture in pictures],
        "state": None if state is None else _shown(np.asarray(state, np.float32)),
    }


def _shown(array: Image | NDArray[np.float32]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _answer_of(line: _AnswerLine) -> Answer:
    actions = None if line.actions is None else np.array(line.actions, np.float64)
    if actions is not None and actions.ndim != 2:
        raise PolicyError("the model's own code answered with rows of different lengths")
    logits = None if line.logits is None else np.frombuffer(line.logits, "<f4")
    return Answer(line.ms, line.tokens, actions, logits, line.passes)


class _Complaints:
    """What the other process writes for people."""

    def __init__(self, python: str, file: IO[bytes]) -> None:
        self.python, self.file = python, file

    def error(self, what: str) -> PolicyError:
        """With the end of what it wrote."""
        self.file.seek(0)
        lines = self.file.read().decode("utf-8", "replace").splitlines()
        shown = "".join(f"\n  {line[:300]}" for line in lines[-_SHOWN_LINES:])
        return PolicyError(f"--against {self.python}: {what}{':' if shown else ''}{shown}")


@contextmanager
def _started(python: str) -> Iterator[tuple["subprocess.Popen[bytes]", _Complaints]]:
    with tempfile.TemporaryFile() as written:
        complain = _Complaints(python, written)
        try:
            process = subprocess.Popen(
                [python, str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
            )
        except OSError as error:
            raise PolicyError(
                f"--against {python}: {error.strerror}; give the python of an environment that has "
                "the model's own code"
            ) from error
        try:
            yield process, complain
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            process.kill()
            process.wait()
            process.stdout.close()
            with suppress(BrokenPipeError):
                process.stdin.close()


def _exchange(
    process: "subprocess.Popen[bytes]",
    line: Mapping[str, Any],
    kind: type[T],
    complain: _Complaints,
) -> T:
    """Send a line, and read and check the one that answers it."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise complain.error("the model's own code has ended") from None
    answered = process.stdout.readline(_LINE_BYTES)
    if not answered.endswith(b"\n"):
        process.kill()
        raise complain.error("the model's own code has ended without an answer")
    try:
        return decode(answered, kind, WireFormat.JSON, _LIMITS, "answer")
    except WireError as error:
        raise complain.error(f"an answer cannot be used: {error}") from error
