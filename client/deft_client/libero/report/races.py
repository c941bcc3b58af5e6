"""Trials that were filmed, each with the videos of its runs and the pace that is true for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deft_client.libero.report.summary import STEPS_PER_S
from deft_client.libero.results.records import EpisodeRecord, Outcome, TrialKey
from deft_client.libero.results.store import RunResults


@dataclass(frozen=True)
class Racer:
    """One run's video of a trial."""

    run: RunResults
    record: EpisodeRecord

    @property
    def path(self) -> Path:
        """The video file."""
        return self.run.folder / self.record.video

    @property
    def pace_ms(self) -> float:
        """Milliseconds a step took: its answer, or where nothing waited for it the robot's 50."""
        if self.run.header.options.get("pacing") == "real-time":
            return 1000 / STEPS_PER_S
        spent_ms = sum(answer.timings.round_trip_ms for answer in self.record.answers)
        return spent_ms / self.record.num_steps or 1000 / STEPS_PER_S

    @property
    def seconds(self) -> float:
        """How long the episode took."""
        return self.pace_ms * self.record.num_steps / 1000


def find_races(runs: Sequence[RunResults]) -> Mapping[TrialKey, Sequence[Racer]]:
    """The filmed trials: those of most runs first, then those that all runs solved."""
    races: dict[TrialKey, list[Racer]] = {}
    for run in runs:
        for record in run.records:
            racer = Racer(run, record)
            if record.video and record.num_steps and racer.path.is_file():
                races.setdefault(record.key, []).append(racer)

    def rank(key: TrialKey) -> tuple[int, int, TrialKey]:
        lost = sum(racer.record.outcome is not Outcome.SUCCEEDED for racer in races[key])
        return -len(races[key]), lost, key

    return {key: races[key] for key in sorted(races, key=rank)}
