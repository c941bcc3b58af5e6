"""Plays the missing episodes of one run: hands them out, keeps what comes back, stops when lost.

The only place that decides what trouble means. A worker that died or a server that did not answer
costs a try of that episode; after the last try it is Errored, never Failed. While the server is
away nothing is handed out, and if it stays away the evaluation stops with what it has.
"""

import time
from collections import Counter

from deft_client.errors import DeftError
from deft_client.libero.errors import EvaluationStoppedError
from deft_client.libero.evaluation.player import CannotPlay, Heartbeat, Report, Warned
from deft_client.libero.evaluation.pool import Died, Worker, WorkerPool, Workplace
from deft_client.libero.evaluation.progress import ProgressLine
from deft_client.libero.evaluation.runs import RunConfig
from deft_client.libero.policies.source import check_server
from deft_client.libero.results.records import EpisodeRecord, Outcome, TrialKey
from deft_client.libero.results.store import ResultsStore

_LISTEN_S = 0.25
_PROBE_EVERY_S = 1.0


TRIES = 3  # per episode
ERRORED_IN_A_ROW = 5  # episodes, before the evaluation gives up


class Evaluation:
    """One sitting of one run."""

    def __init__(
        self,
        store: ResultsStore,
        config: RunConfig,
        progress: ProgressLine,
        patience_s: float = 30.0,  # for a server that does not answer
    ) -> None:
        self._store = store
        self._config = config
        self._progress = progress
        self._patience_s = patience_s
        self._pending: list[TrialKey] = []
        self._tries: Counter[TrialKey] = Counter()
        self._troubled: dict[TrialKey, EpisodeRecord] = {}  # waiting for the server, or a try
        self._server_lost_s: float | None = None
        self._next_probe_s = 0.0
        self._errored_in_a_row = 0
        self._deaths_in_a_row = 0

    def play(self, place: Workplace, num_workers: int) -> None:
        """Play the episodes of the run that have no result yet.

        Raises EvaluationStoppedError or ResultsError when it cannot go on; the results up to then
        are on disk.
        """
        done = {record.key for record in self._store.resumed}
        self._pending = [key for key in self._config.keys if key not in done]
        if not self._pending:
            return
        with WorkerPool(place, self._config, min(num_workers, len(self._pending))) as pool:
            while self._pending or any(worker.key for worker in pool.workers):
                self._look_for_server()
                if self._server_lost_s is None:
                    self._hand_out(pool)
                for worker, report in pool.listen(_LISTEN_S):
                    self._handle(worker, report)
                self._progress.draw()

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

    def _handle(self, worker: Worker, report: Report | Died) -> None:
        if isinstance(report, Died):
            self._after_death(worker, report.reason)
            return
        self._deaths_in_a_row = 0
        if isinstance(report, Heartbeat):
            self._progress.heard(report.round_trip_ms)
        elif isinstance(report, Warned):
            self._progress.say(report.text)
        elif isinstance(report, CannotPlay):
            raise EvaluationStoppedError(report.reason)
        else:
            worker.key = None
            if not report.may_pass:
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
