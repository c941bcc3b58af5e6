"""Plays the missing episodes of one run: hands them out, keeps what comes back, stops when lost.

The only place that decides what trouble means. A worker that died or a server that did not answer
costs a try of that episode; after the last try it is Errored, never Failed. While the server is
away nothing is handed out, and if it stays away the evaluation stops with what it has.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from deft_core.errors import DeftError
from deft_core.types import ServerInfo
from deft_libero.errors import EvaluationStoppedError
from deft_libero.evaluation.player import CannotPlay, Heartbeat, Opening, Warned, WorkerMessage
from deft_libero.evaluation.progress import ProgressLine
from deft_libero.evaluation.runs import RunConfig, warnings_of
from deft_libero.evaluation.workers import Died, Worker, WorkerPool, Workplace
from deft_libero.policies.source import check_server
from deft_libero.results.records import EpisodeRecord, Outcome, TrialKey
from deft_libero.results.store import ResultsStore

_LISTEN_S = 0.25
_PROBE_EVERY_S = 1.0


TRIES = 3  # per episode
ERRORED_IN_A_ROW = 5  # episodes, before the evaluation gives up


class Evaluation:
    """One sitting of one run, part by part: its results stay open until it is closed."""

    def __init__(self, config: RunConfig, info: ServerInfo | None, patience_s: float) -> None:
        self._config = config
        self._patience_s = patience_s  # for a server that does not answer
        self._store = ResultsStore(config.folder, config.header())
        self._done = {record.key for record in self._store.resumed}
        # What is about to be played, with the conventions that go wrong silently.
        profile = config.source.profile
        sys.stderr.write(
            f"{config.name}: {self._how_many()}, {config.pacing.value}, assets "
            f"{config.assets}; image chain: {profile.client_chain.value} here, "
            f"{config.server.get('image_chain', 'unknown')} at the server; gripper: "
            f"{profile.gripper.value}\n"
        )
        sys.stderr.writelines(f"{warning}\n" for warning in warnings_of(config, info))
        self._progress = ProgressLine(config.name, len(config.keys), sys.stderr)
        self._progress.resume([one for one in self._store.resumed if one.key in config.keys])
        self._pending: list[TrialKey] = []
        self._tries: Counter[TrialKey] = Counter()
        self._troubled: dict[TrialKey, EpisodeRecord] = {}  # waiting for the server, or a try
        self._server_lost_s: float | None = None
        self._next_probe_s = 0.0
        self._errored_in_a_row = 0
        self._deaths_in_a_row = 0

    def _how_many(self) -> str:
        """`8 episodes`, or where an earlier sitting played some, how many are left."""
        num_all = len(self._config.keys)
        num_there = len(self._done.intersection(self._config.keys))
        text = f"{num_all} episodes"
        if num_there:
            text += f" ({num_there} already there, {num_all - num_there} to play)"
        return text

    @property
    def num_errored(self) -> int:
        """Episodes that Errored in this sitting."""
        return self._progress.num_errored

    def play(self, keys: Sequence[TrialKey], place: Workplace, num_workers: int) -> None:
        """Play those of some episodes that have no result yet.

        Raises EvaluationStoppedError or ResultsError when it cannot go on; the results up to then
        are on disk.
        """
        self._pending = [key for key in keys if key not in self._done]
        if not self._pending:
            return
        num_workers = min(num_workers, len(self._pending))
        with closing(WorkerPool(place, self._config, num_workers)) as pool:
            while self._pending or any(worker.key for worker in pool.workers):
                self._look_for_server()
                if self._server_lost_s is None:
                    self._hand_out(pool)
                for worker, report in pool.listen(_LISTEN_S):
                    self._handle(worker, report)
                self._progress.draw()

    def close(self) -> None:
        """Close the results, and leave the last line on the screen."""
        self._store.close()
        self._progress.finish()

    def _hand_out(self, pool: WorkerPool) -> None:
        for worker in pool.idle:
            if self._pending:
                key = self._pending.pop(self._choose(worker, pool))
                self._tries[key] += 1
                pool.assign(worker, key)

    def _choose(self, worker: Worker, pool: WorkerPool) -> int:
        """The next episode of the task the worker has open; else of one nobody has open."""
        tasks = [(key.suite, key.task) for key in self._pending]
        if worker.task in tasks:
            return tasks.index(worker.task)
        opened = {other.task for other in pool.workers}
        return next((index for index, task in enumerate(tasks) if task not in opened), 0)

    def _handle(self, worker: Worker, report: WorkerMessage | Died) -> None:
        if isinstance(report, Died):
            self._after_death(worker, report.reason)
            return
        self._deaths_in_a_row = 0
        if isinstance(report, Heartbeat):
            self._progress.heard(report.round_trip_ms)
        elif isinstance(report, Opening):
            self._progress.opens(report.scene)
        elif isinstance(report, Warned):
            self._progress.say(report.text)
        elif isinstance(report, CannotPlay):
            raise EvaluationStoppedError(report.reason)
        else:
            worker.key = None
            if not report.is_retryable:
                self._keep(report.record)
                return
            self._try_again(report.record)
            if self._server_lost_s is None:
                self._server_lost_s = self._next_probe_s = time.monotonic()

    def _after_death(self, worker: Worker, reason: str) -> None:
        self._deaths_in_a_row += 1
        if worker.key is not None:
            self._try_again(EpisodeRecord(worker.key, "", Outcome.ERRORED, error=reason))
        if self._deaths_in_a_row > TRIES + ERRORED_IN_A_ROW:
            raise EvaluationStoppedError(f"workers die before they do anything: {reason}")

    def _try_again(self, record: EpisodeRecord) -> None:
        tries = f"try {self._tries[record.key]} of {TRIES}"
        self._progress.say(f"{record.key}, {tries}: {record.error}")
        if self._tries[record.key] >= TRIES:
            self._keep(record)
        else:
            self._troubled[record.key] = record
            self._pending.insert(0, record.key)

    def _keep(self, record: EpisodeRecord) -> None:
        self._store.append(record)
        self._troubled.pop(record.key, None)
        self._progress.count(record)
        errored = record.outcome is Outcome.ERRORED
        self._errored_in_a_row = self._errored_in_a_row + 1 if errored else 0
        if self._errored_in_a_row >= ERRORED_IN_A_ROW:
            raise EvaluationStoppedError(
                f"{self._errored_in_a_row} episodes in a row Errored, the last with: {record.error}"
            )

    def _look_for_server(self) -> None:
        """After trouble, find out whether the server is there, for as long as patience lasts."""
        now_s = time.monotonic()
        if self._server_lost_s is None or now_s < self._next_probe_s:
            return
        self._next_probe_s = now_s + _PROBE_EVERY_S
        try:
            check_server(self._config.source)
        except DeftError as error:
            if now_s - self._server_lost_s > self._patience_s:
                self._give_up(error)
            return
        self._server_lost_s = None

    def _give_up(self, error: DeftError) -> None:
        for record in list(self._troubled.values()):
            self._pending.remove(record.key)
            self._keep(record)
        raise EvaluationStoppedError(
            f"the server stayed away for {self._patience_s:.0f} s: {error}"
        )
