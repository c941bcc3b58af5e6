"""What a robot sends and what it gets back. Knows nothing of bytes, models or servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]  # [height, width, 3], RGB, upright as a person would see it


def _check_image(name: str, image: Image) -> None:
    if not isinstance(image, np.ndarray):
        raise ValueError(
            f"{name} must be a numpy array, uint8 [height, width, 3], got {type(image).__name__}; "
            "of a file: np.asarray(PIL.Image.open(path).convert('RGB'))"
        )
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ValueError(
            f"{name} must be uint8 [height, width, 3], got {image.dtype} {list(image.shape)}"
        )


def _state_of(given: object) -> NDArray[np.float32]:
    """Return a robot's state as it is sent: drivers yield float64, and lists."""
    try:
        numbers = np.asarray(given)
    except (TypeError, ValueError) as error:  # rows of several lengths; another device's memory
        raise ValueError(f"state must be numbers [state_dim]: {error}") from error
    if numbers.dtype.kind not in "fiub" or numbers.ndim != 1:
        arrived = f"{numbers.dtype} {list(numbers.shape)}"
        raise ValueError(
            f"state must be numbers [state_dim], got {arrived} ({type(given).__name__})"
        )
    with np.errstate(over="ignore"):
        state = numbers.astype(np.float32, copy=False)
    if not np.isfinite(state).all():
        raise ValueError("state must be finite in float32, got NaN or infinity")
    return state


@dataclass(frozen=True, eq=False)
class Observation:
    """One camera frame and the instruction the robot is following.

    `cameras` holds further views by name; `state` is whatever the robot reports of itself.
    `taken_s` is when the frame was taken, by `time.monotonic`; it stays on the robot.
    """

    image: Image
    instruction: str
    cameras: Mapping[str, Image] = field(default_factory=dict)
    # [state_dim]; a list or an array of other numbers is converted.
    state: NDArray[np.float32] | None = None
    taken_s: float | None = None

    def __post_init__(self) -> None:
        _check_image("image", self.image)
        for name, image in self.cameras.items():
            _check_image(f"cameras[{name!r}]", image)
        if self.state is not None:
            object.__setattr__(self, "state", _state_of(self.state))


@dataclass(frozen=True)
class ActOptions:
    """How one observation is to be answered; every field may be left to the server.

    `deadline_ms` counts from the arrival of the request: a later answer is worthless to the caller.
    `decoding` names a preset of the server, `radius` overrides its acceptance radius in bins.
    """

    session_id: str | None = None
    deadline_ms: float | None = None
    statistics_key: str | None = None
    decoding: str | None = None
    radius: int | None = None
    want_trace: bool = False
    want_reasoning: bool = False  # the text that a policy writes before it acts, where it does
    max_tokens: int | None = None  # of such an answer, text and action; servers bound it
    want_log_probs: bool = False  # of every token of the answer, under the model
    executed_steps: int | None = None  # of the session's last answer, since its frame
    want_notes: bool = False  # what the server has to say about the request


@dataclass(frozen=True)
class StageTimings:
    """Milliseconds spent on one action, by stage; 0 for a stage that did not happen.

    `total_ms` is the server's time from the last byte in to the first byte out;
    `round_trip_ms` is what the client measured around the whole call.
    """

    wire_ms: float = 0.0
    queue_ms: float = 0.0
    prepare_ms: float = 0.0  # image and prompt
    vision_ms: float = 0.0  # towers and projector
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0  # every target pass after the prefill, width 1 included
    judge_ms: float = 0.0  # which drafts of all passes stand
    commit_ms: float = 0.0
    finish_ms: float = 0.0  # tokens to robot units
    total_ms: float = 0.0
    round_trip_ms: float = 0.0


@dataclass(frozen=True)
class PassTrace:
    """One target pass and the draft tree it checked, as parallel tuples over nodes.

    Node 0 is the root: the last committed token (in the prefill, the last prompt token), not a
    guess. `path` lists the accepted nodes from a child of the root downwards.
    """

    is_prefill: bool
    tokens: tuple[int, ...]  # [node]
    parents: tuple[int, ...]  # [node], -1 for the root
    sources: tuple[str, ...]  # [node], which draft source guessed it; "" for the root
    # [node], the target's token after each node, drawn where it samples: what drafts must meet.
    predictions: tuple[int, ...]
    path: tuple[int, ...]
    bonus: int  # the target's own token after the path
    draft_ms: float = 0.0
    pass_ms: float = 0.0
    judge_ms: float = 0.0

    @property
    def has_drafts(self) -> bool:
        """Whether there was anything to accept: a pass over the root alone checks nothing."""
        return len(self.tokens) > 1

    @property
    def accepted_length(self) -> int:
        """Drafted tokens kept in this pass."""
        return len(self.path)

    @property
    def committed_length(self) -> int:
        """Accepted length + 1, the tau of the papers."""
        return len(self.path) + 1

    def accepted(self) -> "PassTrace":
        """The same pass without the drafts that were not accepted."""
        nodes = (0, *self.path)
        return replace(
            self,
            tokens=tuple(self.tokens[node] for node in nodes),
            parents=tuple(range(-1, len(self.path))),
            sources=tuple(self.sources[node] for node in nodes),
            predictions=tuple(self.predictions[node] for node in nodes),
            path=tuple(range(1, len(nodes))),
        )

    @property
    def distances(self) -> tuple[int, ...]:
        """How far each node's token is from the target's own in its place, in ids; 0 for the root.

        The token of a node is judged against the prediction at its parent.
        """
        return tuple(
            abs(token - self.predictions[parent]) if parent >= 0 else 0
            for token, parent in zip(self.tokens, self.parents, strict=True)
        )


class CountedPasses(Sequence[PassTrace]):
    """Passes whose accepted lengths are known before the passes are described."""

    accepted_lengths: tuple[int, ...]  # drafted tokens kept, pass by pass


@dataclass(frozen=True)
class FastAnswer:
    """A chunk as a FAST policy wrote it: coefficients over time (a DCT) of normalised actions.

    The first are the lowest frequency of each dimension, then follow the next frequencies.
    """

    coefficients: tuple[int, ...]  # [frequency * dim]
    drafted: tuple[bool, ...]  # the same: whether the code it begins in was an accepted draft


@dataclass(frozen=True)
class DecodeTrace:
    """Everything that happened while one action was decoded.

    A pass checked drafts if it had any guesses. Averages of accepted and committed lengths are over
    those passes alone. `num_passes` counts every pass. A loop may go on
    behind the action, so that what passes committed adds up to more than `tokens`.
    """

    method: str
    tokens: tuple[int, ...]  # executed
    predicted: tuple[int, ...]  # the target's greedy token at each position, given those executed
    margins: tuple[float, ...]  # gap between the two largest logits at each position
    passes: Sequence[PassTrace]
    guard: str = ""  # why the never-slower guard chose this method; empty when it did not act
    rule: str = ""  # the acceptance rule with its numbers; empty where nothing was ever drafted
    plan: str = ""  # which of the method's plans was used; a replay needs it
    parts: tuple[int, ...] = ()  # tokens of each part of a reasoning: see `reasoning.part_costs`
    fast: FastAnswer | None = None  # of an answer in FAST codes

    @property
    def num_passes(self) -> int:
        """Target forwards, the prefill included."""
        return len(self.passes)

    @property
    def accepted_lengths(self) -> tuple[int, ...]:
        """Drafted tokens kept, pass by pass."""
        if isinstance(self.passes, CountedPasses):
            return self.passes.accepted_lengths
        return tuple(one.accepted_length for one in self.passes)

    @property
    def checked_passes(self) -> tuple[PassTrace, ...]:
        """Those that checked drafts: what accepted and committed lengths are means over."""
        return tuple(one for one in self.passes if one.has_drafts)

    @property
    def relaxed_share(self) -> float:
        """Share of the executed tokens that differ from the target's greedy choice."""
        if not self.tokens:
            return 0.0
        pairs = zip(self.tokens, self.predicted, strict=True)
        return sum(executed != own for executed, own in pairs) / len(self.tokens)


@dataclass(frozen=True)
class LogProbs:
    """How likely the model was to write each token of an answer, given those before it.

    They are of the model that answers, whatever drafted: plain decoding has the same. Natural
    logarithms of the softmax of its logits over `temperature`, which is 1 where it is greedy.
    """

    values: tuple[float, ...]  # of each token
    temperature: float
    over: str  # what the softmax is over: "vocabulary", or "action tokens" alone


class Intervention(Enum):
    """What a server sent in place of the policy's action, to keep a robot safe."""

    CLAMP = "clamp"  # the policy's action, brought into the range of its statistics
    GRAMMAR = "grammar"  # an action, where the policy's own words were none or another's


@dataclass(frozen=True, eq=False)
class ActionChunk:
    """Actions to execute in order, in the robot's own units.

    float64, because that is what OpenVLA's own un-normalisation yields and peers compare to the
    byte.
    """

    actions: NDArray[np.float64]  # [step, action_dim]
    timings: StageTimings = StageTimings()
    trace: DecodeTrace | None = None
    intervention: Intervention | None = None
    reasoning: str | None = None  # what the policy wrote before; `reasoning` takes it apart
    log_probs: LogProbs | None = None  # where they were asked for
    notes: tuple[str, ...] = ()  # the same: what may be wrong with the request, for people

    def __post_init__(self) -> None:
        if self.actions.dtype != np.float64 or self.actions.ndim != 2:
            raise ValueError(
                "actions must be float64 [step, action_dim], "
                f"got {self.actions.dtype} {list(self.actions.shape)}"
            )


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself before the first observation."""

    policy: str
    action_dim: int
    chunk_length: int
    statistics_keys: tuple[str, ...]
    default_statistics_key: str | None
    image_height: int
    image_width: int
    image_chain: str  # what the server does to a frame: see `image_chains`
    image_chains: tuple[str, ...]
    decoding: str
    decoding_methods: tuple[str, ...]
    instructions: tuple[str, ...] = ()  # those it was trained on; empty where nobody noted them
    assets: str = ""  # LIBERO's it was trained on, as results name them; empty: nobody noted
    # Initial states that are played once, at the end, by suite: {"libero_object": "30-39"}.
    held_out: Mapping[str, str] = field(default_factory=dict)
    num_pictures: int = 1  # the frame, and cameras whose names contain "wrist"
    # Their names in the order in which it looks at them, "image" for the frame; empty where it does
    # not say. Of other names with "wrist" in them the order is that of the observation.
    cameras: tuple[str, ...] = ()
    state_dim: int | None = None  # numbers of the robot's state it reads; None: it reads none
    max_tokens: int | None = None  # of an answer with reasoning; None: it writes none
    thinks_when_asked: bool = False  # it acts at once where no reasoning is asked for
    versions: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)

    def ignored_inputs(self, observation: Observation) -> dict[str, str]:
        """The fields of an observation that the policy does not look at, and why."""
        reasons = {}
        wrists = [name for name in observation.cameras if "wrist" in name]
        named = [name for name in observation.cameras if name.rpartition(".")[2] in self.cameras]
        wrists = [name for name in wrists if name not in named]
        unseen = [name for name in observation.cameras if name not in (*wrists, *named)]
        unseen += wrists[max(self.num_pictures - 1 - len(named), 0) :]
        if unseen:
            reasons["cameras"] = f"the policy does not look at {', '.join(unseen)}"
        if observation.state is not None and self.state_dim is None:
            reasons["state"] = "the policy reads no state"
        return reasons

    def untrained(self, instruction: str) -> str:
        """Say that the policy was not trained on an instruction; empty where it was, or may be."""
        known = {_words_of(one) for one in self.instructions}
        if not known or _words_of(instruction) in known:
            return ""
        return f"the instruction is not among the {len(known)} that the policy was trained on"


def _words_of(instruction: str) -> str:
    return " ".join(instruction.lower().rstrip(". ").split())


class ChunkBlending(Enum):
    """How a chunk gives way to the next one."""

    WAIT = "wait"  # the next one is asked for when nothing is left, and the robot holds meanwhile
    SWITCH = "switch"  # asked for early; the newest chunk's action for a period is executed
    ENSEMBLE = "ensemble"  # asked for all the time; the mean of all chunks with an action for it


class ActingPolicy(Protocol):
    """A policy as its caller sees it: `PolicyClient`, `StreamClient`, `Recorder`, or one's own."""

    @property
    def session_id(self) -> str:
        """The session of acts and resets that name no other."""

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Return the actions that follow an observation."""

    def reset(self, session_id: str | None = None) -> None:
        """Say that an episode starts."""
