"""Whole recordings in memory, for tests: the product reads them step by step."""

from dataclasses import dataclass
from pathlib import Path

from deft_core.recordings import Ending, EpisodeHeader, RecordedStep, StepReader, read_header


@dataclass(frozen=True, eq=False)
class RecordedEpisode:
    header: EpisodeHeader
    steps: tuple[RecordedStep, ...]
    ending: Ending


def read_episode(path: Path) -> RecordedEpisode:
    """Read a recording up to its last whole step."""
    header, reader = read_header(path), StepReader(path)
    return RecordedEpisode(header, tuple(reader), reader.ending)
