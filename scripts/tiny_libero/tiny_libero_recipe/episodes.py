"""What training takes from an episode: what was asked for, where things are, what counts."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deft_core.datasets.demonstrations import (
    COLUMNS,
    PRIVILEGED,
    Demonstration,
    find_demonstrations,
    load_demonstration,
)
from deft_draft_training.errors import DataError
from deft_policies.model.sizes import TrainingNotes
from tiny_libero_recipe.data import Request
from tiny_libero_recipe.language import CARRYING, PATTERNS, SEEKING, Facts, reasoning
from tiny_libero_recipe.play import HELD_OUT

_DECIMETRES = 10.0  # positions of a few decimetres become numbers of order one

# Where an open hand is so near the thing that only the expert can tell how far it is off.
_NEAR_METRES, _OPEN_METRES, _RISING = 0.06, 0.07, 0.1

# How much a step counts: the grasp and what surrounds it decide an episode.
_PHASE_WEIGHTS = {"descend": 2.0, "close": 3.0, "lift": 2.0, "lower": 1.5, "release": 3.0}


def load_demonstrations(folders: Sequence[Path], only_succeeded: bool) -> list[Demonstration]:
    """Read all episodes of some folders, or only those that succeeded."""
    paths = [path for folder in folders for path in find_demonstrations(folder)]
    if not paths:
        places = ", ".join(str(folder) for folder in folders)
        raise DataError(f"no demonstrations in {places}; run the command demos first")
    loaded = (load_demonstration(path) for path in tqdm(paths, desc="read", unit="episode"))
    return [one for one in loaded if one.header.succeeded or not only_succeeded]


def decided(episode: Demonstration) -> Demonstration:
    """An episode without the steps at which an open hand, close to the thing, rises again.

    A centimetre decides whether the expert goes down or up first to come down anew. The picture
    does not show it, and a policy that is taught both hovers.
    """
    away = _columns(episode, "object", "xy") - _columns(episode, "gripper", "xy")
    opening = episode.privileged[:, PRIVILEGED.index("opening")]
    phases = np.array(episode.header.phases)[episode.phase]
    hesitates = (
        np.isin(phases, SEEKING)
        & (np.linalg.norm(away, axis=1) < _NEAR_METRES)
        & (opening > _OPEN_METRES)
        & (episode.labels[:, 2] > _RISING)
    )
    kept = np.flatnonzero(~hesitates)
    rows = {name: getattr(episode, name)[kept] for name in COLUMNS}
    return replace(episode, encoded=[episode.encoded[step] for step in kept.tolist()], **rows)


def request_of(episode: Demonstration) -> Request:
    """What an episode was about, in LIBERO's words where it says so."""
    header = episode.header
    if not header.subject:
        return Request(header.instruction)
    told = PATTERNS[0].format(thing=header.subject, place=header.place)
    return Request(told, header.subject, header.place)


def training_notes(episodes: Sequence[Demonstration]) -> TrainingNotes:
    """What a checkpoint says of the episodes that it was taught by."""
    return TrainingNotes(
        instructions=tuple(sorted({request_of(one).instruction for one in episodes})),
        assets=", ".join(sorted({one.header.assets for one in episodes})),
        held_out={one.header.suite: HELD_OUT for one in episodes},
    )


def auxiliary_positions(episode: Demonstration) -> NDArray[np.float32]:
    """What the auxiliary head is asked for: where gripper, object and goal are, and how apart.

    [step, value] in decimetres; positions against each other are what actions depend on.
    """
    hand, thing, goal, target = (
        _columns(episode, name, "xyz") for name in ("gripper", "object", "goal", "target")
    )
    opening = episode.privileged[:, [PRIVILEGED.index("opening")]]
    values = (hand, thing, goal, thing - hand, target - hand, opening)
    return (np.concatenate(values, axis=1) * _DECIMETRES).astype(np.float32)


def step_weights(episode: Demonstration) -> NDArray[np.float32]:
    """How much each step counts."""
    phases = [episode.header.phases[number] for number in episode.phase]
    return np.array([_PHASE_WEIGHTS.get(phase, 1.0) for phase in phases], np.float32)


def thoughts(episode: Demonstration) -> list[str]:
    """What a policy that thinks aloud would say of each step."""
    header, sides = episode.header, ("left", "top", "right", "bottom")
    hand, thing, goal = (_columns(episode, one, "xyz") for one in ("gripper", "object", "goal"))
    is_carrying = np.isin(episode.phase, [header.phases.index(one) for one in CARRYING])
    return [
        reasoning(Facts(header.subject, header.place, header.phases[phase], *facts))
        for phase, *facts in zip(
            episode.phase,
            episode.labels,
            np.where(is_carrying[:, None], goal - thing, thing - hand),
            episode.privileged[:, PRIVILEGED.index("opening")],
            _columns(episode, "object", sides),
            _columns(episode, "goal", sides),
            _columns(episode, "gripper", ("left", "top")),
            strict=True,
        )
    ]


def _columns(episode: Demonstration, name: str, ends: Iterable[str]) -> NDArray[np.float32]:
    """Some of the privileged numbers, [step, end]: `object_x`, `object_y` ..."""
    return episode.privileged[:, [PRIVILEGED.index(f"{name}_{end}") for end in ends]]
