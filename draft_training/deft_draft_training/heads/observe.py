"""Where observations to learn from come from: demonstrations or recordings, in a fixed order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deft_client.libero.demonstrations.files import find_demonstrations, load_demonstration
from deft_client.recordings import find_episodes, iterate_steps
from deft_client.types import Observation
from deft_draft_training.errors import DataError


@dataclass(frozen=True)
class SourcedObservation:
    """One observation, its number among all and the episode it belongs to."""

    number: int
    episode: int
    observation: Observation


def observations(folders: tuple[Path, ...], stride: int = 1) -> Iterator[SourcedObservation]:
    """Every `stride`-th step of all episodes below some folders, numbered in order.

    A folder holds demonstrations (`deft-client demos`) or recordings (a server's).
    """
    number = episode = 0
    for folder in folders:
        for steps in _episodes(folder):
            for index, observation in enumerate(steps):
                if index % stride == 0:
                    yield SourcedObservation(number, episode, observation)
                    number += 1
            episode += 1


def _episodes(folder: Path) -> Iterator[Iterator[Observation]]:
    demonstrations = list(find_demonstrations(folder))
    recordings = [] if demonstrations else find_episodes(folder)
    if not demonstrations and not recordings:
        raise DataError(f"{folder} holds neither demonstrations nor recordings")
    for path in demonstrations:
        yield _demonstrated(path)
    for path in recordings:
        yield (step.observation for step in iterate_steps(path))


def _demonstrated(path: Path) -> Iterator[Observation]:
    episode = load_demonstration(path)
    for step in range(len(episode)):
        yield Observation(episode.frame(step), episode.header.instruction)
