"""Workers as actors of a Ray cluster. Ray is imported where it is used: few installations have it.

Ray finds each worker a CPU on some machine. Results travel back, and videos with them.
"""

import logging
import queue
import signal
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deft_libero.errors import EvaluationError, EvaluationStoppedError, VideoError, needed
from deft_libero.evaluation.player import EpisodeEnded, Player, WorkerMessage
from deft_libero.evaluation.runs import RunConfig
from deft_libero.evaluation.video import keep_video
from deft_libero.evaluation.workers import MAX_REASON, Died, WarningForwarder, Worker
from deft_libero.results.records import TrialKey

logger = logging.getLogger(__name__)


ActorMessage = WorkerMessage | Died | None  # by an actor; None comes first, to say that it is there


class RemotePlayer:
    """The actor. Ray calls it on threads of its own; episodes have one, as OpenGL wants it."""

    def __init__(self, config: RunConfig) -> None:
        self._outbox: queue.SimpleQueue[ActorMessage] = queue.SimpleQueue()
        self._outbox.put(None)
        logging.getLogger("deft_client").addHandler(WarningForwarder(self._outbox.put))
        # Not the run's own folder: this may be another machine.
        here = replace(config, out=Path(tempfile.mkdtemp(prefix="deft-")))
        self._folder = here.folder
        self._player = Player(here, self._outbox.put)
        self._thread = ThreadPoolExecutor(1, "episodes")

    def play(self, key: TrialKey) -> None:
        """Begin an episode."""
        self._thread.submit(self._player.play, key).add_done_callback(self._ended)

    def next_report(self) -> ActorMessage:
        """Wait for something to say."""
        return self._outbox.get()

    def _ended(self, episode: Future[WorkerMessage]) -> None:
        error = episode.exception()
        if error is None:
            self._outbox.put(self._with_video(episode.result()))
        else:
            traceback.print_exception(error)
            self._outbox.put(_ended(f"{type(error).__name__}: {error}"))

    def _with_video(self, report: WorkerMessage) -> WorkerMessage:
        if not isinstance(report, EpisodeEnded) or not report.record.video:
            return report
        file = self._folder / report.record.video
        content = file.read_bytes()
        file.unlink()
        return replace(report, video=content)


@dataclass(eq=False)
class ActorWorker(Worker):
    """One actor; its only end is what it will say next."""

    ray: Any
    actor: Any
    folder: Path  # of the run

    def send(self, key: TrialKey) -> None:
        """Have it play an episode."""
        self.actor.play.remote(key)

    def receive(self) -> ActorMessage:
        """What it says, or how it ended."""
        try:
            report: ActorMessage = self.ray.get(self.ends[0])
        except self.ray.exceptions.RayError as error:
            return _ended(str(error).strip().splitlines()[-1].strip())
        self.is_placed = True
        self.ends = (self.actor.next_report.remote(),)
        if not isinstance(report, EpisodeEnded) or not report.video:
            return report
        try:
            keep_video(self.folder / report.record.video, report.video)
        except VideoError as error:
            logger.warning("%s", error)
            return EpisodeEnded(replace(report.record, video=""))
        return report

    def end(self) -> None:
        """Kill it."""
        self.ray.kill(self.actor)


class RayActors:
    """A `Workplace`: the machines of a Ray cluster, a CPU for every worker."""

    def __init__(self, address: str) -> None:
        self._ray = _connect(address)

    def start(self, config: RunConfig) -> ActorWorker:
        """Ask for a worker; it is there as soon as a CPU is free."""
        actor = self._ray.remote(num_cpus=1, max_concurrency=2)(RemotePlayer).remote(config)
        ends = (actor.next_report.remote(),)
        return ActorWorker(self._ray, actor, config.folder, ends=ends)

    def wait(self, ends: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Wait for a message."""
        try:
            self._ray.wait(ends, timeout=timeout_s)
            ready: Sequence[Any] = self._ray.wait(ends, timeout=0, num_returns=len(ends))[0]
        except self._ray.exceptions.RayError as error:
            raise EvaluationStoppedError(f"the Ray cluster is gone: {error}") from error
        return ready

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()


def _ended(reason: str) -> Died:
    return Died(f"the worker ended: {reason[:MAX_REASON]}")


def _connect(address: str) -> Any:
    with needed("--ray needs Ray", "ray"):
        import ray
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.WARNING,
            configure_logging=False,
        )  # fmt: skip
    except Exception as error:  # Ray raises no narrower one where it takes too long to start
        raise EvaluationError(f"no Ray cluster at {address}: {error}") from error
    signal.signal(signal.SIGTERM, on_terminate)  # Ray puts its own in its place
    return ray
