"""`deft doctor --against`: from flags to a finding and a report."""

import gc
import hashlib
import platform
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deft_core.datasets.formats import read_dataset
from deft_core.image_chain import ImageChain
from deft_core.types import ActOptions
from deft_policies.base import Finding, Verdict
from deft_policies.benchmark.audit import last_place
from deft_policies.benchmark.replay import ReplayFrame
from deft_policies.benchmark.shipped import read_shipped
from deft_policies.commands.parse import PolicyCommand
from deft_policies.conformance import kit, report
from deft_policies.conformance.report import Answer, Parting
from deft_policies.errors import PolicyError
from deft_policies.families.loading import open_model
from deft_policies.families.model_policy import ModelPolicy
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy

_EPISODES, _STRIDE = 5, 5  # frames of an episode are so many steps apart
_NEAR_TIE = 1e-3  # of float32: two implementations differ by some hundred-thousandths
_ROUNDING_PLACES = 2  # of bfloat16, as in the audit
SUBJECT = "own code"


def compare_with_own_code(
    command: PolicyCommand, python: str, data: Path | None, cameras: Sequence[str], path: Path
) -> Finding:
    """Answer 20 frames by Deft and by the model's own code, print both, and write a report."""
    command = _as_own_code_answers(command)
    options = _options_of(command)
    assert options.checkpoint is not None
    kit.look_at(python, open_model(options).name)
    frames = read_frames(data, cameras)
    _say("Deft: loading the weights")
    policy = _load(command)
    if data is None:
        frames = kit.choose_frames(policy.model, frames)
    key = options.statistics_key or policy.info.statistics_keys[0]
    for frame in frames:
        policy.check(frame.observation, ActOptions(statistics_key=key))
    policy.warm_up()
    versions = {
        method or "Deft": kit.ask_deft(policy, method, key, frames)
        for method in kit.methods_of(policy)
    }
    lines = [kit.frame_line(policy.model, frame.observation) for frame in frames]
    setup = kit.setup_of(policy, _path_of(options.checkpoint), key)
    limits, about = policy.action_limits(key), _about(policy, options, key, frames, data)
    del policy  # two models need not fit on a device at once
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _say(f"the model's own code: loading the weights with {python}")
    own = kit.ask_own_code(python, setup, lines)
    rows = [
        report.own_row(own.answers),
        *(
            report.compare(_named(name), own.answers, answers, limits.high - limits.low)
            for name, answers in versions.items()
        ),
    ]
    partings = _partings(command, own.answers, versions, frames)
    is_good, words = report.verdict(rows, partings, setup["dtype"] == "bfloat16")
    about |= {"own_code": dict(own.versions), "verdict": words, "is_equal": is_good}
    digest = report.write(path, about, rows, partings)
    sys.stdout.write(
        f"{about['family']} in {about['dtype']} on {about['device']}, {len(frames)} "
        f"{about['frames']['source']} frames\n\n{report.render(rows, partings)}\n\n"
    )
    text = f"{words}; {path} has everything (sha256 {digest[:12]})"
    return Finding(SUBJECT, Verdict.GOOD if is_good else Verdict.BAD, text)


def read_frames(data: Path | None, cameras: Sequence[str]) -> list[ReplayFrame]:
    """Frames of up to five episodes, some steps apart so that they differ."""
    if data is None:
        by_episode: dict[str, list[ReplayFrame]] = {}
        for frame in read_shipped():
            by_episode.setdefault(frame.episode, []).append(frame)
        per_episode = kit.NUM_FRAMES // len(by_episode)
        return [
            frame
            for of_episode in by_episode.values()
            for frame in of_episode[::_STRIDE][:per_episode]
        ]
    episodes = list(islice(read_dataset(data, cameras), _EPISODES))
    per_episode = -(-kit.NUM_FRAMES // max(len(episodes), 1))
    frames = [
        ReplayFrame(step.observation, episode.name, step.statistics_key)
        for episode in episodes
        for step in islice(episode.steps(), 0, per_episode * _STRIDE, _STRIDE)
    ]
    if not frames:
        raise PolicyError(f"{data}: none of its episodes has a step")
    return frames[: kit.NUM_FRAMES]


def _as_own_code_answers(command: PolicyCommand) -> PolicyCommand:
    """Leave out what the model's own code has not: a client's picture chain, and a grammar."""
    options = _options_of(command)
    family = open_model(options)
    changes: dict[str, Any] = {}
    if family.writes_codes:
        changes["grammar"] = "off"
    if family.name in ("openvla", "ecot"):
        changes["image_chain"] = ImageChain.NONE.value
    return replace(command, namespace=Namespace(**{**vars(command.namespace), **changes}))


def _options_of(command: PolicyCommand) -> ModelOptions:
    options = command.entry.make(command.namespace)
    if not isinstance(options, ModelOptions) or options.checkpoint is None:
        raise PolicyError("--against compares a checkpoint with its own code: give --checkpoint")
    return options


def _load(command: PolicyCommand) -> ModelPolicy:
    policy = command.load()
    assert isinstance(policy, ModelPolicy)  # the options are a model's
    return policy


def _path_of(checkpoint: str) -> str:
    """The other process may run in another folder; a hub id stays one."""
    path = Path(checkpoint)
    return str(path.resolve()) if path.exists() else checkpoint


def _named(method: str) -> str:
    return method if method == "Deft" else f"Deft, {method}"


def _partings(
    command: PolicyCommand,
    own: Sequence[Answer],
    found: dict[str, tuple[Answer, ...]],
    frames: Sequence[ReplayFrame],
) -> list[Parting]:
    """Where answers part. Deft is loaded once more to say by how much, if any does."""
    partings: list[Parting] = []
    policy: ModelPolicy | None = None
    for name, answers in found.items():
        for number, (one, other) in enumerate(zip(own, answers, strict=True)):
            if one.tokens is None or other.tokens is None:
                continue
            parted = report.first_difference(one.tokens, other.tokens)
            if parted is None:
                continue
            policy = policy or _load(command)
            assert isinstance(policy, VlaPolicy)  # both have tokens
            at, theirs, ours = parted
            margin, is_tie = None, False
            if theirs is not None and ours is not None:
                before = one.tokens[:at]
                logits = kit.logits_behind(policy, frames[number].observation, before)
                apart = abs(logits[ours] - logits[theirs]) if theirs < len(logits) else np.nan
                margin = float(apart) if np.isfinite(apart) else None
                is_tie = margin is not None and margin <= _near_tie(policy, logits)
            partings.append(Parting(_named(name), number, at, theirs, ours, margin, is_tie))
    return partings


def _near_tie(policy: ModelPolicy, logits: NDArray[np.float32]) -> float:
    """Below it, rounding may choose either of two tokens."""
    weight = policy.model.network.decoder.embedding.weight
    if weight.dtype == torch.float32:
        return _NEAR_TIE
    return _ROUNDING_PLACES * last_place(float(np.nanmax(np.abs(logits))))


def _about(
    policy: ModelPolicy,
    options: ModelOptions,
    key: str,
    frames: Sequence[ReplayFrame],
    data: Path | None,
) -> dict[str, Any]:
    """Of what, on what and by what: nothing of it names a user, a folder or a machine."""
    info, details = policy.info, policy.info.details
    digest = hashlib.sha256()
    for frame in frames:
        seen = frame.observation
        digest.update(seen.instruction.encode())
        for picture in (seen.image, *seen.cameras.values()):
            digest.update(np.ascontiguousarray(picture).tobytes())
        if seen.state is not None:
            digest.update(np.asarray(seen.state, np.float32).tobytes())
    assert options.checkpoint is not None
    is_folder = Path(options.checkpoint).exists()
    name = Path(options.checkpoint).resolve().name if is_folder else options.checkpoint
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "family": policy.model.family,
        "checkpoint": {"name": name, "digest": details.get("digest of weights", "")},
        "statistics_key": key,
        "dtype": details["dtype"],
        "quantization": details["quantization"],
        "device": details["device"],
        "processor": details["processor"],
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "frames": {
            "source": "shipped" if data is None else "recorded",
            "number": len(frames),
            "sha256": digest.hexdigest(),
        },
        "deft": {**info.versions, "commit": report.commit_of(Path(__file__).parent)},
    }


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
