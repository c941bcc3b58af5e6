"""A run of StarVLA's QwenFAST as it is left: three places that belong together.

The run's own folder has `config.yaml`, statistics and weights; the model that it began with has
sizes, tokenizer and generation settings; and there is the FAST tokenizer. The last two lie where
`config.yaml` was written, `playground/Pretrained_models`, somewhere above the run.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from deft_policies.checkpoint.config import (
    EXTREMES,
    QUANTILES,
    STATISTICS_FILE,
    parse_statistics,
)
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.open import download_snapshot
from deft_policies.checkpoint.tensor_file import StoredTensor, read_header
from deft_policies.errors import CheckpointError
from deft_policies.families.qwenfast.policy_files import (
    INSTRUCTION,
    MOST_DIM,
    MOST_STATISTICS_BYTES,
    MOST_STEPS,
    PolicyFiles,
    check_statistics,
    doubts_of,
    find_fast,
    open_base,
)
from deft_policies.model.statistics import ActionStatistics

RUN_FILE = "config.yaml"
_PREFIX = "qwen_vl_interface.model."  # of the names of tensors
_MODELS = Path("playground/Pretrained_models")  # where StarVLA keeps the others
_RUNS = "results/Checkpoints/*"  # below StarVLA's root
_ORGANISATION = "StarVLA"  # on the hub
_FRAMEWORK = "qwenfast"
_USUAL_DIM, _USUAL_AHEAD = 7, 15
_STEPS = re.compile(r"steps_(\d+)_(pytorch_model\.pt|model\.safetensors)")
_REMEDY = "give the folder of a run, with config.yaml and checkpoints/"


@dataclass(frozen=True)
class _Mix:
    """How StarVLA normalises the actions of a mixture of data. Only its code says so."""

    num_cameras: int
    ends: tuple[str, str]  # the statistics that become -1 and 1
    cuts_gripper: bool  # at 0.5, to 0 or 1; else it stays as it is


_LIBERO, _BRIDGE = _Mix(2, EXTREMES, False), _Mix(1, QUANTILES, True)
_MIXES: Mapping[str, _Mix] = {
    "libero_all": _LIBERO,
    "libero_goal": _LIBERO,
    "bridge": _BRIDGE,
    "bridge_rt_1": _BRIDGE,
}


def find_runs(directory: Path) -> list[Path]:
    """The runs of QwenFAST of a folder: it is one, lies in one, or holds some."""
    for folder in (directory, directory.parent):
        if _is_run(folder):
            return [folder]
    return [path for path in sorted(directory.glob(_RUNS)) if _is_run(path)]


def _is_run(folder: Path) -> bool:
    if not ((folder / RUN_FILE).is_file() and (folder / STATISTICS_FILE).is_file()):
        return False
    try:
        framework = JsonFields.load_yaml(folder / RUN_FILE, _REMEDY).section("framework")
        return _name_of(framework).lower() == _FRAMEWORK
    except CheckpointError:
        return False


def _name_of(framework: JsonFields) -> str:
    return framework.value("name", str, framework.value("framework_py", str, ""))


def read_run(directory: Path) -> PolicyFiles:
    """Read a run and what it names; `CheckpointError` for what is not served."""
    runs = find_runs(directory)
    if len(runs) != 1:
        names = ", ".join(one.name for one in runs) or f"no run of QwenFAST, {_REMEDY}"
        raise CheckpointError(f"{directory} holds {names}; name one run's folder")
    (run,) = runs
    config = JsonFields.load_yaml(run / RUN_FILE, _REMEDY)
    framework = config.section("framework")
    action, data = framework.section("action_model"), config.section("datasets").section("vla_data")
    mix = _MIXES.get(data.value("data_mix", str, ""))
    if mix is None:
        raise data.error(
            "data_mix",
            f"is {data.value('data_mix', str, '')!r}: how its actions were normalised is in no "
            f"file; known: {', '.join(_MIXES)}",
        )
    base = _find_base(run, framework.section("qwenvl"))
    action_dim = action.count("action_dim", MOST_DIM, _USUAL_DIM)
    num_steps = _read_horizon(action)
    fast, codec = find_fast(
        [*(parent / _MODELS / "fast" for parent in run.parents), base.parent / "fast"]
    )
    tokenizer, settings = open_base(base)
    stored, weights, doubts = _find_weights(run)
    statistics = _read_statistics(run / STATISTICS_FILE, mix, action_dim)
    template = data.value("CoT_prompt", str, INSTRUCTION)
    gripper = "0 or 1" if mix.cuts_gripper else "as in the data, about 0 to 1"
    return PolicyFiles(
        base=base,
        stored=stored,
        weight_files=[weights],
        codec=codec,
        fast=fast,
        num_steps=num_steps,
        action_dim=action_dim,
        num_cameras=mix.num_cameras,
        template=template,
        resample=Resampling.BILINEAR,
        statistics=statistics,
        unnormalise=_cut if mix.cuts_gripper else _keep,
        gripper=f"{gripper}: StarVLA's LIBERO evaluation sends 1 - 2 (g > 0.5)",
        settings=settings,
        tokenizer=tokenizer,
        doubts=(*doubts, *doubts_of(fast, codec, num_steps, action_dim)),
    )


def _read_horizon(action: JsonFields) -> int:
    """Under two names; of both the one counts that says the number itself."""
    if action.has("action_horizon"):
        return action.count("action_horizon", MOST_STEPS)
    return 1 + action.count("future_action_window_size", MOST_STEPS, _USUAL_AHEAD, least=0)


def _find_base(run: Path, qwen: JsonFields) -> Path:
    """The model that the run began with: below the run, above it, or on the hub."""
    name = qwen.value("base_vlm", str)
    tops = [run, *run.parents]
    candidates = [top / name for top in tops] + [top / _MODELS / Path(name).name for top in tops]
    existing = next(
        (candidate for candidate in candidates if (candidate / "config.json").is_file()), None
    )
    if existing is not None:
        return existing
    hub_id = (
        name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else f"{_ORGANISATION}/{Path(name).name}"
    )
    try:
        return download_snapshot(hub_id.removeprefix("./"), ("*.json", "*.jinja"))
    except CheckpointError as error:
        raise qwen.error(
            "base_vlm",
            f"names {name}, which is neither in {run} nor above it, and {error}; its tokenizer, "
            f"sizes and generation settings are needed, at best in {run / name}",
        ) from None


def _find_weights(run: Path) -> tuple[Mapping[str, StoredTensor], Path, tuple[str, ...]]:
    """The final weights, or else those of most steps; their file, and what is to be said of it."""
    final = [run / "final_model" / name for name in ("pytorch_model.pt", "model.safetensors")]
    steps = [
        (int(match[1]), one)
        for one in sorted((run / "checkpoints").glob("steps_*"))
        if (match := _STEPS.fullmatch(one.name))
    ]
    paths = [path for path in final if path.is_file()] or [path for _, path in sorted(steps)[-1:]]
    if not paths:
        raise CheckpointError(
            f"{run} has neither final_model/pytorch_model.pt nor checkpoints/steps_N_*; {_REMEDY}"
        )
    path = paths[0]
    stored = read_header(path)
    doubts = () if len(steps) < 2 else (f"of {len(steps)} steps' weights {path.name} is served",)
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}
    return named, path, doubts


def _read_statistics(path: Path, mix: _Mix, action_dim: int) -> Mapping[str, ActionStatistics]:
    """Of each key; the gripper, the last number, is in no unit that statistics would change."""
    fields = JsonFields.load(path, f"restore {STATISTICS_FILE}", MOST_STATISTICS_BYTES)
    statistics_by_key = parse_statistics(fields, ends=mix.ends)
    check_statistics(path, statistics_by_key, action_dim)
    mask = np.arange(action_dim) < action_dim - 1
    return {
        key: ActionStatistics(
            statistics.low,
            statistics.high,
            mask,
            minimum=statistics.minimum,
            maximum=statistics.maximum,
        )
        for key, statistics in statistics_by_key.items()
    }


def _keep(normalised: NDArray[np.float64], statistics: ActionStatistics) -> NDArray[np.float64]:
    """In float32, as StarVLA does; the gripper stays as it is."""
    kept = normalised.astype(np.float32)
    low, high = (ends.astype(np.float32)[:-1] for ends in (statistics.low, statistics.high))
    kept[:, :-1] = (kept[:, :-1] + 1) / 2 * (high - low) + low
    return kept.astype(np.float64)


def _cut(normalised: NDArray[np.float64], statistics: ActionStatistics) -> NDArray[np.float64]:
    """The same, with a gripper of 0 or 1."""
    kept = _keep(normalised, statistics)
    kept[:, -1] = kept[:, -1] > 0.5
    return kept
