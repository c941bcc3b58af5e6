"""A pi0-FAST folder as LeRobot saves it: what the policy looks at, what it answers, its statistics.

`config.json` names cameras, the horizon and two tokenizers; the two pipelines hold what counts of
normalisation, names and lengths. Sizes of the network are in no file: the tensors tell them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deft_policies.base import ActionLimits
from deft_policies.checkpoint.config import CONFIG_FILE
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.tensor_file import read_header
from deft_policies.errors import CheckpointError
from deft_policies.families.pi0fast.normalization import Mode, Normalization, Numbers
from deft_policies.model.statistics import ActionStatistics

TYPE = "pi0_fast"
IMAGES = "observation.images."  # how names of cameras begin
_STATE, _ACTION = "observation.state", "action"
_PREPROCESSOR, _POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
_ORBAX = "params"
_EMPTY = "empty_camera_"  # LeRobot's names of cameras that no robot has
_SIDE = 224  # pixels of a picture
_MOST_CAMERAS, _MOST_NUMBERS, _MOST_STEPS, _MOST_TOKENS = 16, 1024, 1024, 4096
_FAR = np.float32(10)  # normalised: no action lies so far out
_MOST_BYTES = 1 << 20  # of a file of settings
_RESTORE = "restore it from the training run's folder"


@dataclass(frozen=True, eq=False)
class Pi0FastFiles:
    """What a folder says, tensors and tokenizers apart."""

    cameras: tuple[str, ...]  # names without their beginning, in the order of the prompt
    renames: Mapping[str, str]  # a robot's name of a camera: the policy's
    horizon: int  # actions of an answer
    action_dim: int
    num_executed: int  # of them, before the next frame
    state: Normalization
    action: Normalization
    adds_state: tuple[bool, ...]  # [action_dim], whether the robot's state is added
    max_tokens: int  # of an answer
    max_prompt: int  # ids, `<bos>` included; what is behind is cut off
    padded_state: int  # numbers that LeRobot 0.4 padded the state to
    num_skipped: int  # ids between the codes and the end of the text vocabulary
    text_tokenizer: str  # a folder below the checkpoint, or a hub id
    fast_tokenizer: str
    declared: tuple[str, str] | None  # how config.json says state and actions are normalised
    statistics: ActionStatistics  # what the data set's actions lay between
    state_range: tuple[Numbers, Numbers]  # and its states

    @property
    def robot_cameras(self) -> tuple[str, ...]:
        """Those that a robot has."""
        return tuple(camera for camera in self.cameras if not camera.startswith(_EMPTY))

    @property
    def limits(self) -> ActionLimits:
        """Between what absolute actions lie: the state's range is added where the state is."""
        low, high = self.statistics.low.copy(), self.statistics.high.copy()
        added, num = np.array(self.adds_state), self.action_dim
        if self.is_relative:
            low[added] += self.state_range[0][:num][added]
            high[added] += self.state_range[1][:num][added]
        return ActionLimits(low, high, may_exceed=True)

    @property
    def is_relative(self) -> bool:
        """Whether any number of an action is relative to the robot's state."""
        return any(self.adds_state)


def is_pi0_fast(directory: Path) -> bool:
    """Whether a folder says that it is one; anything odd about it is found on reading."""
    try:
        return _load(directory / CONFIG_FILE).value("type", str, "") == TYPE
    except CheckpointError:
        return False


def read_files(directory: Path) -> Pi0FastFiles:
    """Read and check a folder's JSON files and statistics."""
    if not (directory / CONFIG_FILE).exists() and (directory / _ORBAX).is_dir():
        raise CheckpointError(
            f"{directory} is a checkpoint of openpi ({_ORBAX}/ is Orbax), which is not read; "
            "convert it to LeRobot's names and layout first: docs/pi0fast.md says how they differ"
        )
    config = _load(directory / CONFIG_FILE)
    if (policy_type := config.value("type", str, "unknown")) != TYPE:
        raise config.error(
            "type", f"is {policy_type!r}, expected {TYPE!r}; give a folder that LeRobot has saved"
        )
    if config.value("temperature", float, 0.0) != 0.0:
        raise config.error(
            "temperature", "is not 0; answers are greedy here, --temperature draws them"
        )
    if config.values("image_resolution", int, (_SIDE, _SIDE)) != (_SIDE, _SIDE):
        raise config.error("image_resolution", f"must be [{_SIDE}, {_SIDE}]")
    horizon = config.count("chunk_size", _MOST_STEPS)
    action_dim = _read_dim(config.section("output_features"), _ACTION)
    before, after = _load(directory / _PREPROCESSOR), _load(directory / _POSTPROCESSOR)
    steps, last_steps = _read_steps(before), _read_steps(after)
    normalizer = _step(before, steps, "normalizer_processor")
    unnormalizer = _step(after, last_steps, "unnormalizer_processor")
    state = _read_normalization(normalizer, "STATE", _STATE)
    action = _read_normalization(unnormalizer, "ACTION", _ACTION)
    if action.dim not in (0, action_dim):
        raise CheckpointError(
            f"{after.path}: the statistics of actions have {action.dim} numbers, "
            f"{config.path} says {action_dim}"
        )
    if state.mode is Mode.IDENTITY:  # no statistics say how many numbers it has
        zeros = np.zeros(_read_dim(config.section("input_features"), _STATE), np.float32)
        state = Normalization(Mode.IDENTITY, zeros, zeros, state.eps)
    adds_state = _read_relative(config, steps, last_steps, action_dim)
    if any(adds_state) and state.dim < action_dim:
        raise config.error(
            "use_relative_actions",
            f"is true, but the state has {state.dim} numbers for {action_dim} of an action",
        )
    if action.mode is Mode.IDENTITY:
        zeros = np.zeros(action_dim, np.float32)
        action = Normalization(Mode.IDENTITY, zeros, zeros, action.eps)
    low, high = (ends.astype(np.float64) for ends in _read_range(unnormalizer, action, _ACTION))
    step = steps.get("tokenizer_processor")
    words = config if step is None else step.section("config")
    max_prompt = config.count("tokenizer_max_length", _MOST_TOKENS, 200)
    return Pi0FastFiles(
        cameras=_read_cameras(config),
        renames=_read_renames(steps),
        horizon=horizon,
        action_dim=action_dim,
        num_executed=config.count("n_action_steps", horizon, horizon),
        state=state,
        action=action,
        adds_state=adds_state,
        max_tokens=config.count("max_decoding_steps", _MOST_TOKENS, 256),
        max_prompt=words.count("max_length", _MOST_TOKENS, max_prompt),
        padded_state=config.count("max_state_dim", _MOST_NUMBERS, 32),
        num_skipped=config.count("fast_skip_tokens", 1 << 16, 128, least=0),
        text_tokenizer=config.value("text_tokenizer_name", str),
        fast_tokenizer=config.value("action_tokenizer_name", str),
        declared=_read_declared(config),
        statistics=ActionStatistics(low, high, np.ones(action_dim, np.bool_)),
        state_range=_read_range(normalizer, state, _STATE),
    )


def _load(path: Path) -> JsonFields:
    return JsonFields.load(path, _RESTORE, _MOST_BYTES)


def _read_dim(features: JsonFields, name: str) -> int:
    shape = features.section(name).values("shape", int)
    if len(shape) != 1 or not 1 <= shape[0] <= _MOST_NUMBERS:
        raise features.error(name, f"must have a shape of one number, 1 to {_MOST_NUMBERS}")
    return shape[0]


def _read_cameras(config: JsonFields) -> tuple[str, ...]:
    features = config.section("input_features")
    cameras = [
        name for name in features.names if features.section(name).value("type", str) == "VISUAL"
    ]
    if not 1 <= len(cameras) <= _MOST_CAMERAS:
        raise config.error("input_features", f"must have 1 to {_MOST_CAMERAS} cameras")
    return tuple(name.removeprefix(IMAGES) for name in cameras)


def _read_steps(pipeline: JsonFields) -> dict[str, JsonFields]:
    """The settings of a pipeline's steps by name; a `state_file` lies in the pipeline's folder."""
    return {step.value("registry_name", str): step for step in pipeline.sections("steps")}


def _step(pipeline: JsonFields, steps: Mapping[str, JsonFields], name: str) -> JsonFields:
    if name not in steps:
        raise pipeline.error("steps", f"has no {name}; {_RESTORE}")
    return steps[name]


def _read_normalization(step: JsonFields, kind: str, feature: str) -> Normalization:
    settings = step.section("config")
    modes = settings.section("norm_map")
    name = modes.value(kind, str, Mode.IDENTITY.value)
    if name not in Mode.__members__:
        raise modes.error(kind, f"is {name!r}; known: {', '.join(Mode.__members__)}")
    mode, eps = Mode[name], np.float32(settings.value("eps", float, 1e-8))
    if mode is Mode.IDENTITY:
        return Normalization(mode, np.empty(0, np.float32), np.empty(0, np.float32), eps)
    state_file = step.value("state_file", str)
    if Path(state_file).name != state_file:
        raise step.error("state_file", "must be the name of a file in the pipeline's folder")
    names = [f"{feature}.{need}" for need in mode.needs]
    first, second = _read_numbers(step.path.parent / state_file, names)
    if len(first) != len(second):
        raise CheckpointError(
            f"{step.path.parent / state_file}: {names[0]} and {names[1]} differ in length"
        )
    return Normalization(mode, first, second, eps)


def _read_declared(config: JsonFields) -> tuple[str, str] | None:
    mapping = config.section("normalization_mapping")
    if not (mapping.has("STATE") and mapping.has("ACTION")):
        return None
    return mapping.value("STATE", str), mapping.value("ACTION", str)


def _read_range(
    step: JsonFields, normalization: Normalization, feature: str
) -> tuple[Numbers, Numbers]:
    """The smallest and the largest of a data set; without them what normalises says about it."""
    names, dim = (f"{feature}.min", f"{feature}.max"), normalization.dim
    if normalization.mode is not Mode.IDENTITY:
        path = step.path.parent / step.value("state_file", str)
        stored = read_header(path)
        if all(name in stored and stored[name].shape == (dim,) for name in names):
            low, high = _read_numbers(path, names)
            if (low <= high).all():
                return low, high
    far = np.full(dim, _FAR, np.float32)
    ends = normalization.restore(-far), normalization.restore(far)
    return np.minimum(*ends), np.maximum(*ends)


def _read_numbers(path: Path, names: Sequence[str]) -> list[Numbers]:
    """Vectors of a file of statistics. Its sizes are looked at before anything is read."""
    stored, found = read_header(path), []
    for name in names:
        if name not in stored:
            raise CheckpointError(
                f"{path} has no {name}, by which the model was trained; {_RESTORE}"
            )
        shape = stored[name].shape
        if len(shape) != 1 or not 1 <= shape[0] <= _MOST_NUMBERS:
            raise CheckpointError(
                f"{path}: {name} must be 1 to {_MOST_NUMBERS} numbers, got {list(shape)}"
            )
        values = stored[name].read().float().numpy().copy()
        if not np.isfinite(values).all():
            raise CheckpointError(f"{path}: {name} holds NaN or infinity; {_RESTORE}")
        found.append(values)
    return found


def _read_renames(steps: Mapping[str, JsonFields]) -> dict[str, str]:
    """Of cameras, without the beginning of their names."""
    if (step := steps.get("rename_observations_processor")) is None:
        return {}
    names = step.section("config").section("rename_map")
    return {
        theirs.removeprefix(IMAGES): names.value(theirs, str).removeprefix(IMAGES)
        for theirs in names.names
        if theirs.startswith(IMAGES)
    }


def _read_relative(
    config: JsonFields,
    steps: Mapping[str, JsonFields],
    last_steps: Mapping[str, JsonFields],
    action_dim: int,
) -> tuple[bool, ...]:
    """[action_dim]: all are relative but those whose names hold an excluded word.

    The last pipeline says whether, the first one which.
    """
    absolute, relative = (
        last_steps.get("absolute_actions_processor"),
        steps.get("relative_actions_processor"),
    )
    if absolute is None or not absolute.section("config").value("enabled", bool, False):
        return (False,) * action_dim
    if relative is None:
        raise config.error(
            "use_relative_actions", f"has no relative_actions_processor in {_PREPROCESSOR}"
        )
    fields = relative.section("config")
    names = [name.lower() for name in fields.values("action_names", str, ())]
    words = [name.lower() for name in fields.values("exclude_joints", str, ()) if name]
    kept = [any(word in name for word in words) for name in names[:action_dim]]
    kept += [False] * (action_dim - len(kept))
    return tuple(not is_kept for is_kept in kept)
